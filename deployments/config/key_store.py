"""Store of the usage of each key, and of the keys that are created at run time."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator

_REDIS_SCHEMES = ("redis", "rediss")


class KeyStoreConfig(BaseModel):
    """Usage and run-time keys: in one SQLite file, or in the Redis of `limits.rate_storage`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(
        None,
        description="SQLite file, shared by the gateways of one machine. By default, the Redis of "
        "`limits.rate_storage` if that begins with `redis://` or `rediss://`; otherwise "
        "`apar-serve/keys-PORT.db` in `$XDG_STATE_HOME` (`~/.local/state`).",
    )
    flush_s: PositiveFloat = Field(
        1.0,
        le=60.0,
        description="Interval at which a gateway writes usage (seconds). A killed gateway loses at "
        "most this much, and the prompts of its running requests.",
    )
    max_keys_age_s: PositiveFloat = Field(
        300.0,
        description="Time for which keys created at run time stay valid while the store fails "
        "(seconds). A key revoked in another gateway stays valid for at most as long. After it, "
        "requests whose key is not in the configuration get a 503.",
    )
    keep_days: PositiveInt = Field(400, description="Days for which usage is kept.")

    @field_validator("path")
    @classmethod
    def _make_absolute(cls, path: Path | None) -> Path | None:
        # Ray's processes may run in another working directory.
        return None if path is None else path.expanduser().absolute()

    def placed(self, rate_storage: str, port: int) -> "KeyStoreConfig":
        """Return these settings with the default file in place, unless Redis is used."""
        if self.path is not None or urlsplit(rate_storage).scheme in _REDIS_SCHEMES:
            return self
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = (state / "apar-serve" / f"keys-{port}.db").absolute()
        return self.model_copy(update={"path": path})
