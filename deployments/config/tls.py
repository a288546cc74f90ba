"""TLS at the address of a private cluster, which HAProxy terminates."""

import ssl
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.config.files import SecretError


class TlsConfig(BaseModel):
    """HTTPS instead of HTTP; off without a `certificate`. TLS 1.2 or newer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate: Path | None = Field(
        None,
        description="PEM file with the certificate and its chain. With it the server speaks HTTPS "
        "only.",
    )
    key: Path | None = Field(
        None,
        description="PEM file with the certificate's private key, without a password. By default "
        "it is in the file of the certificate.",
    )

    @field_validator("certificate", "key")
    @classmethod
    def _make_absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        if self.key is not None and self.certificate is None:
            raise ValueError("key: has no effect without `certificate`")
        return self

    def read_pem(self) -> bytes | None:
        """Return certificate and key as one PEM text, None without TLS.

        Raises SecretError if a file cannot be read, or the key is not the certificate's.
        """
        if self.certificate is None:
            return None
        try:
            # A password would be asked for on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certificate, self.key, password=_refuse_password
            )
            pieces = [path.read_bytes() for path in (self.certificate, self.key) if path]
        except ssl.SSLError as error:
            raise SecretError(
                f"tls: {self.certificate} and its key are not usable: {error.reason or error}"
            ) from None
        except OSError as error:
            at = error.filename or self.certificate
            raise SecretError(f"tls: cannot read {at}: {error.strerror}") from None
        return b"\n".join(pieces)


def _refuse_password() -> str:
    raise SecretError("tls.key: a key with a password is not supported")
