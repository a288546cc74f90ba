"""OpenTelemetry traces of requests."""

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

from deployments.config.files import SecretError
from deployments.config.secret import SecretReference

_HEADER_NAME = re.compile(r"[A-Za-z0-9._-]+")


class TracingConfig(BaseModel):
    """OpenTelemetry traces of requests; off without an `endpoint`.

    The environment variable OTEL_RESOURCE_ATTRIBUTES of the processes adds resource attributes,
    such as namespace and pod.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = Field(
        None,
        description="URL of the OTLP collector, such as `http://host:4318`, reachable from every "
        "node. Without a path, HTTP uses `/v1/traces`. By default nothing is traced.",
    )
    protocol: Literal["http/protobuf", "grpc"] = Field(
        "http/protobuf", description="OTLP protocol of the collector."
    )
    headers: dict[str, SecretReference] = Field(
        default_factory=dict,
        description="Headers of each export, such as `authorization`, whose values gateway and "
        "replicas read.",
    )
    service_name: str = Field(
        "apar", min_length=1, description="Resource attribute `service.name` of all spans."
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests to trace, unless the caller's `traceparent` decides.",
    )
    honour_traceparent: bool = Field(
        True,
        description="Whether a request with a W3C `traceparent` continues that trace and follows "
        "its sampling decision. Turn it off for untrusted callers.",
    )
    max_thread_spans: PositiveInt = Field(
        256,
        description="Limit on thread spans per request and replica; further threads are only "
        "counted.",
    )
    max_queued_spans: PositiveInt = Field(
        8192,
        description="Limit on the spans queued for export in a process; the oldest are dropped.",
    )
    export_s: PositiveFloat = Field(
        1.0, description="Interval between the exports of a process (seconds)."
    )
    timeout_s: PositiveFloat = Field(
        5.0, description="Timeout of an export (seconds); its spans are then dropped."
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is traced."""
        return self.endpoint is not None

    def read_headers(self) -> dict[str, str]:
        """Return the headers with their values. Raises SecretError."""
        headers = {}
        for name, reference in self.headers.items():
            field = f"tracing.headers.{name}"
            headers[name.lower()] = value = reference.read(field)
            if not value.isascii() or not value.isprintable():
                raise SecretError(f"{field}: the value is not valid in a header")
        return headers

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("a URL is expected, such as http://host:4318")
        if url.username is not None or url.query or url.fragment:
            raise ValueError(
                "only scheme, host, port and path are allowed; use `headers` for credentials"
            )
        return endpoint

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, SecretReference]) -> dict[str, SecretReference]:
        for name in headers:
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError("a header's name may have only letters, digits, `.`, `_` and `-`")
        return headers

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        # Default values are allowed: `apar config show` prints all of them.
        changed = sorted(self.model_dump(exclude_defaults=True))
        if self.endpoint is None and changed:
            raise ValueError(f"{', '.join(changed)}: has no effect without `endpoint`")
        return self
