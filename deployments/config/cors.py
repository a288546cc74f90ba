"""Which web pages of other origins may call the server from a browser (CORS)."""

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator

ANY_ORIGIN = "*"


class CorsConfig(BaseModel):
    """Cross-origin requests of browsers; refused without `origins`.

    Cookies are never used: a page sends its API key in the header `Authorization`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    origins: tuple[str, ...] = Field(
        (),
        description="Origins whose pages may call the server, such as `https://chat.example.org`, "
        "or `*` for all. By default none.",
    )
    max_age_s: NonNegativeInt = Field(
        600, description="How long a browser may remember the answer to a preflight (seconds)."
    )

    @field_validator("origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            url = urlsplit(origin)
            is_origin = url.scheme in ("http", "https") and url.hostname and url.username is None
            if origin != ANY_ORIGIN and (
                not is_origin or origin != f"{url.scheme}://{url.netloc}".lower()
            ):
                raise ValueError(
                    f"an origin such as https://chat.example.org is expected, in lower case and "
                    f"without a path, or `*`; got {origin!r}"
                )
        if ANY_ORIGIN in origins and len(origins) > 1:
            raise ValueError("`*` contains the other origins; give either")
        return origins
