"""Whether requests are traced, and where their spans go."""

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from cluster.config.secret import SecretError, SecretReference

_HEADER_NAME = re.compile(r"[A-Za-z0-9._-]+")


class TracingConfig(BaseModel):
    """OpenTelemetry traces; none where no `endpoint` is given.

    OpenTelemetry's variable OTEL_RESOURCE_ATTRIBUTES, in the environment of the processes, adds
    attributes of their surroundings (namespace, pod).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = Field(
        None,
        description="Collector to send spans to, as `http://host:4318`; reached from every node. "
        "Without a path, HTTP uses `/v1/traces`. Nothing is traced when absent.",
    )
    protocol: Literal["http/protobuf", "grpc"] = Field(
        "http/protobuf", description="How OTLP is spoken to the collector."
    )
    headers: dict[str, SecretReference] = Field(
        default_factory=dict,
        description="Headers of each export, such as `authorization`: where gateway and replicas "
        "read their values.",
    )
    service_name: str = Field("apar", min_length=1, description="`service.name` of all spans.")
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests that are traced, where no caller has decided it.",
    )
    honour_traceparent: bool = Field(
        True,
        description="Whether a request that comes with a W3C `traceparent` goes on with that "
        "trace, and is sampled as it says. Turn it off where callers are not to be trusted.",
    )
    max_thread_spans: PositiveInt = Field(
        256, description="Thread spans of one request and replica; those left out are counted."
    )
    max_queued_spans: PositiveInt = Field(
        8192,
        description="Spans of a process that wait to be sent; the oldest give way to others.",
    )
    export_s: PositiveFloat = Field(1.0, description="Time between two exports of a process.")
    timeout_s: PositiveFloat = Field(
        5.0, description="Time that one export may take; then its spans are given up."
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is traced."""
        return self.endpoint is not None

    def read_headers(self) -> dict[str, str]:
        """The headers as they are sent; raises SecretError."""
        headers = {}
        for name, reference in self.headers.items():
            field = f"tracing.headers.{name}"
            headers[name.lower()] = value = reference.read(field)
            if not value.isascii() or not value.isprintable():
                raise SecretError(f"{field}: the value cannot be sent as a header")
        return headers

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("a URL is expected, as http://host:4318")
        if url.username is not None or url.query or url.fragment:
            raise ValueError("scheme, host, port and path are all it may have; use `headers`")
        return endpoint

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, SecretReference]) -> dict[str, SecretReference]:
        for name in headers:
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError("a header's name is made of letters, digits, `.`, `_` and `-`")
        return headers

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        # What is as it would be anyway is let through: `apar config show` prints all defaults.
        changed = sorted(self.model_dump(exclude_defaults=True))
        if self.endpoint is None and changed:
            raise ValueError(f"{', '.join(changed)}: without effect where `endpoint` is not given")
        return self
