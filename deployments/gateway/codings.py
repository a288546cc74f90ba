"""Content codings of request bodies (RFC 9110, section 8.4), decoded piece by piece."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import zstandard

from apar_core.errors import RequestError
from deployments.wire.errors import UnsupportedCodingError
from deployments.wire.response import Headers

_CHUNK_BYTES = 2**16
# Input decoded at once. A zstd block takes three bytes or more and holds at most 128 KiB.
_ZSTD_SLICE_BYTES = 48
# The largest window that HTTP allows: RFC 9659.
_ZSTD_WINDOW_BYTES = 2**23


class Decoder(Protocol):
    """Decoder of one body."""

    @property
    def is_complete(self) -> bool:
        """Whether the data has reached its end."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded data in pieces of at most 3 MiB. Raises RequestError if invalid."""


class _Identity:
    is_complete = True

    def decode(self, data: bytes) -> Iterator[bytes]:
        yield data


class _Zlib:
    def __init__(self, wbits: int) -> None:
        self._object = zlib.decompressobj(wbits)

    @property
    def is_complete(self) -> bool:
        return self._object.eof

    def decode(self, data: bytes) -> Iterator[bytes]:
        piece = b""
        # A full piece may be followed by more that the object still holds.
        while data or len(piece) == _CHUNK_BYTES:
            if data and self._object.eof:
                raise RequestError("The body continues after the end of its compressed data.")
            try:
                piece = self._object.decompress(data, _CHUNK_BYTES)
            except zlib.error as error:
                raise _invalid(error) from error
            data = self._object.unconsumed_tail or self._object.unused_data
            yield piece


class _Deflate:
    """Decoder of `deflate`, also without the header that some clients leave out."""

    def __init__(self) -> None:
        self._head = b""
        self._inner: _Zlib | None = None

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._inner is None:
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return
            # RFC 1950, section 2.2.
            has_header = data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0
            self._inner = _Zlib(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        yield from self._inner.decode(data)


class _Zstd:
    def __init__(self) -> None:
        unbound = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._object = unbound.decompressobj()

    @property
    def is_complete(self) -> bool:
        return self._object.eof

    def decode(self, data: bytes) -> Iterator[bytes]:
        piece = b""
        for start in range(0, len(data), _ZSTD_SLICE_BYTES):
            if self._object.eof:
                raise RequestError("The body continues after the end of its compressed data.")
            try:
                piece += self._object.decompress(data[start : start + _ZSTD_SLICE_BYTES])
            except zstandard.ZstdError as error:
                raise _invalid(error) from error
            if len(piece) >= _CHUNK_BYTES:
                yield piece
                piece = b""
        yield piece
        if self._object.unused_data:
            raise RequestError("The body continues after the end of its compressed data.")


def _invalid(error: Exception) -> RequestError:
    return RequestError(f"The body does not have the form that `Content-Encoding` names: {error}")


def _gzip() -> Decoder:
    return _Zlib(16 + zlib.MAX_WBITS)


_DECODERS: Mapping[str, Callable[[], Decoder]] = {
    "gzip": _gzip,
    "deflate": _Deflate,
    "zstd": _Zstd,
    "x-gzip": _gzip,
    "identity": _Identity,
    "": _Identity,
}


def decoder_of(headers: Headers) -> Decoder:
    """Return a decoder for the body of a request. Raises UnsupportedCodingError."""
    given = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    coding = ", ".join(given).strip()
    try:
        return _DECODERS[coding.lower()]()
    except KeyError:
        raise UnsupportedCodingError(coding[:64]) from None
