"""The web page of a running server: the static files of `page/`, served without an API key.

The files contain no data of the server. The page calls the API like any other client, with the
key that its user enters.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path

from starlette.types import Scope, Send

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
# No inline scripts and styles, and no way from text to HTML: `innerHTML` and the like throw,
# because no Trusted Types policy may be created.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # A browser asks each time whether the file has changed, so that an upgrade is seen at once.
    (b"cache-control", b"no-cache"),
)
_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page."""

    body: bytes
    media_type: bytes
    etag: bytes

    @classmethod
    def of(cls, path: Path) -> "PageFile":
        """Read a file."""
        body = path.read_bytes()
        digest = hashlib.sha256(body).hexdigest()[:32]
        return cls(body, _TYPES[path.suffix], f'"{digest}"'.encode())

    async def send(self, scope: Scope, send: Send) -> None:
        """Answer a GET or HEAD request with the file, or with 304 if the client has it."""
        given = next((value for name, value in scope["headers"] if name == b"if-none-match"), b"")
        headers = [*_HEADERS, (b"etag", self.etag)]
        status, body = HTTPStatus.OK, self.body
        if self.etag in (tag.strip().removeprefix(b"W/") for tag in given.split(b",")):
            status, body = HTTPStatus.NOT_MODIFIED, b""
        else:
            length = (b"content-length", str(len(body)).encode())
            headers += [(b"content-type", self.media_type), length]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if scope["method"] == "HEAD":
            body = b""
        await send({"type": "http.response.body", "body": body, "more_body": False})


@lru_cache(maxsize=1)
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by the path of their URL."""
    files = {
        f"/page/{path.name}": PageFile.of(path)
        for path in FOLDER.iterdir()
        if path.suffix in _TYPES and path.name != INDEX
    }
    return {"/": PageFile.of(FOLDER / INDEX), **files}
