"""Routes of the Batch API: `/v1/files` and `/v1/batches`, as OpenAI's clients use them.

A file or batch is visible only to callers of the key name that created it; for others it does not
exist.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from starlette.datastructures import FormData, UploadFile
from starlette.datastructures import Headers as HeaderFields
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Receive, Scope, Send

from apar_core.errors import RequestError
from deployments.config.batches import BatchesConfig
from deployments.gateway.batches.records import (
    COMPLETION_WINDOW,
    ENDPOINTS,
    INPUT,
    WINDOW_S,
    Batch,
    Counts,
    Page,
    StoredFile,
    new_id,
)
from deployments.gateway.batches.runner import BatchRunner
from deployments.gateway.batches.store import CHUNK_BYTES, BatchStore, Limits
from deployments.gateway.body import parse_fields
from deployments.gateway.codings import decoder_of
from deployments.relay.relay import send_whole
from deployments.wire.errors import (
    JSON_TYPE,
    BodyTimeoutError,
    BodyTooLargeError,
    ConflictError,
    RateLimitError,
    UnknownRouteError,
    WrongMethodError,
)
from deployments.wire.response import ResponseStart

FILES_PATH = "/v1/files"
BATCHES_PATH = "/v1/batches"
MAX_FIELDS_BYTES = 2**16
"""Limit on the body of a request that creates a batch."""
MAX_UPLOADS = 8
"""Uploads of one key that a gateway receives at once: each may fill a temporary file."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_MAX_NAME_CHARS = 256
_MAX_FIELDS = 16
# Boundaries and headers of the parts of an upload.
_FORM_BYTES = 2**16
_LEAST_EXPIRY_S = 3_600
_MAX_PAGE = {FILES_PATH: 10_000, BATCHES_PATH: 100}
_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512
_LINES_AT_ONCE = 64
_ALLOWED = {
    (FILES_PATH, False, ""): ("GET", "POST"),
    (FILES_PATH, True, ""): ("GET", "DELETE"),
    (FILES_PATH, True, "content"): ("GET",),
    (BATCHES_PATH, False, ""): ("GET", "POST"),
    (BATCHES_PATH, True, ""): ("GET",),
    (BATCHES_PATH, True, "cancel"): ("POST",),
}


class UnknownRecordError(RequestError):
    """The file or batch does not exist, or belongs to another key."""

    status = 404
    code = "not_found"


class StorageLimitError(BodyTooLargeError):
    """The file would exceed what the key, or all keys together, may store."""

    code = "storage_limit_exceeded"


class TooManyBatchesError(RequestError):
    """So many batches of the key have not ended."""

    code = "too_many_batches"


class TooManyUploadsError(RateLimitError):
    """So many files of the key are being uploaded to this gateway."""

    code = "too_many_uploads"

    def __init__(self) -> None:
        super().__init__(
            f"{MAX_UPLOADS} files of this key are being uploaded; wait for one of them.",
            kind="uploads",
            retry_after_s=1.0,
        )


def is_batch_path(path: str) -> bool:
    """Return whether a path belongs to the Batch API."""
    return any(path == each or path.startswith(f"{each}/") for each in (FILES_PATH, BATCHES_PATH))


class BatchApi:
    """Answers the requests of one gateway."""

    def __init__(self, store: BatchStore, runner: BatchRunner, config: BatchesConfig) -> None:
        self._store = store
        self._runner = runner
        self.config = config
        self._num_uploads = Counter[str]()

    @staticmethod
    def check_route(method: str, path: str) -> None:
        """Raise UnknownRouteError or WrongMethodError."""
        collection, record_id, action = _parts_of(path)
        allowed = _ALLOWED.get((collection, bool(record_id), action))
        if allowed is None or path.endswith("/"):
            raise UnknownRouteError(f"Unknown route: {method} {path}")
        if method not in allowed:
            raise WrongMethodError(method, path, allowed)

    async def answer(
        self, method: str, scope: Scope, receive: Receive, body: bytes, owner: str, send: Send
    ) -> None:
        """Answer a request to a route that `check_route` has accepted.

        `body` is the whole body, except that of an upload, which is read from `receive`. Raises
        RequestError and CapacityError.
        """
        collection, record_id, action = _parts_of(scope["path"])
        parameters = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if collection == FILES_PATH:
            if not record_id and method == "POST":
                shown = await self._upload(scope, receive, owner)
            elif not record_id:
                shown = await self._list_files(parameters, owner)
            elif action:
                await self._send_content(await self._file(record_id, owner), send)
                return
            elif method == "DELETE":
                shown = await self._delete(record_id, owner)
            else:
                shown = (await self._file(record_id, owner)).shown()
        elif not record_id and method == "POST":
            shown = await self._create(body, owner)
        elif not record_id:
            shown = await self._list_batches(parameters, owner)
        elif action:
            shown = await self._cancel(record_id, owner)
        else:
            batch, counts = await self._batch(record_id, owner)
            shown = batch.shown(counts)
        await send_whole(
            send, ResponseStart(HTTPStatus.OK, [JSON_TYPE], json.dumps(shown).encode())
        )

    async def _file(self, file_id: str, owner: str) -> StoredFile:
        file = await self._store.file(file_id) if _ID.fullmatch(file_id) else None
        if file is None or file.owner != owner or file.expires_at <= _now():
            raise UnknownRecordError(f"No file has the id {file_id[:80]!r}.", param="file_id")
        return file

    async def _batch(self, batch_id: str, owner: str) -> tuple[Batch, Counts]:
        found = await self._store.batch(batch_id) if _ID.fullmatch(batch_id) else None
        if found is None or found[0].owner != owner:
            raise UnknownRecordError(f"No batch has the id {batch_id[:80]!r}.", param="batch_id")
        return found

    async def _upload(self, scope: Scope, receive: Receive, owner: str) -> dict[str, Any]:
        if self._num_uploads[owner] >= MAX_UPLOADS:
            raise TooManyUploadsError
        self._num_uploads[owner] += 1
        try:
            return await self._store_upload(scope, receive, owner)
        finally:
            self._num_uploads[owner] -= 1
            # Without counts of keys that may never come back.
            self._num_uploads += Counter()

    async def _store_upload(self, scope: Scope, receive: Receive, owner: str) -> dict[str, Any]:
        config = self.config
        async with _Upload(scope, receive, config).received() as form:
            upload = form.file
            if upload.size is None or upload.size > config.max_file_bytes:
                raise _too_large(config)
            now_s = _now()
            file = StoredFile(
                id=new_id("file-"),
                owner=owner,
                filename=_file_name(upload),
                num_bytes=upload.size,
                purpose=INPUT,
                created_at=now_s,
                expires_at=now_s + form.keep_s,
            )
            limits = Limits(config.max_files, config.max_key_bytes, config.max_total_bytes)
            stored = await self._store.begin_file(file, limits)
            if stored is not None:
                raise StorageLimitError(
                    f"This file has {file.num_bytes} bytes. This key has {stored.num_files} files "
                    f"of at most {limits.max_files}, and {stored.key_bytes} of "
                    f"{limits.max_key_bytes} bytes; all keys have {stored.total_bytes} of "
                    f"{limits.max_total_bytes}. Delete files that you no longer need."
                )
            try:
                number = 0
                # An empty file has one chunk, too.
                while (data := await upload.read(CHUNK_BYTES)) or not number:
                    await self._store.append(file.id, number, data)
                    number += 1
                await self._store.finish_file(file)
            except BaseException:
                await asyncio.shield(self._store.delete_file(file))
                raise
        return file.shown()

    async def _list_files(self, parameters: Mapping[str, str], owner: str) -> dict[str, Any]:
        page = _page(parameters, FILES_PATH, 10_000, ("purpose",))
        wanted = Page(page.after, page.limit + 1, page.newest_first)
        files = await self._store.files(owner, wanted, parameters.get("purpose"))
        now_s = _now()
        shown = [file.shown() for file in files[: page.limit] if file.expires_at > now_s]
        return _list_of(shown, has_more=len(files) > page.limit)

    async def _delete(self, file_id: str, owner: str) -> dict[str, Any]:
        file = await self._file(file_id, owner)
        for batch in await self._store.open_batches():
            if batch.input_file_id == file_id:
                raise ConflictError(
                    f"The batch {batch.id} still reads the file {file_id}; cancel it first.",
                    param="file_id",
                )
        await self._store.delete_file(file)
        return {"id": file_id, "object": "file", "deleted": True}

    async def _send_content(self, file: StoredFile, send: Send) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(file.num_bytes).encode()),
        ]
        start = {"type": "http.response.start", "status": HTTPStatus.OK.value, "headers": headers}
        async with aclosing(self._content(file)) as pieces:
            # An error of the store before the first piece becomes an error response.
            first = await anext(pieces, b"")
            await send(start)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _content(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file piece by piece."""
        if file.batch_id is None:
            number = 0
            while (chunk := await self._store.chunk(file.id, number)) is not None:
                yield chunk
                number += 1
            return
        found = await self._store.batch(file.batch_id)
        last = 0 if found is None else found[0].last_line
        for first in range(1, last + 1, _LINES_AT_ONCE):
            end = first + _LINES_AT_ONCE - 1
            records = await self._store.results(
                file.batch_id, first, end, has_errors=file.has_errors
            )
            if records:
                yield b"".join(records)

    async def _create(self, body: bytes, owner: str) -> dict[str, Any]:
        fields = parse_fields(body)
        for name in fields:
            if name not in _CREATE_FIELDS:
                known = ", ".join(_CREATE_FIELDS)
                raise RequestError(f"Unknown field `{name[:80]}`; known: {known}", param=name[:80])
        endpoint = fields.get("endpoint")
        if endpoint not in ENDPOINTS:
            raise RequestError(
                f"`endpoint` must be one of {', '.join(ENDPOINTS)}, got {_quoted(endpoint)}",
                param="endpoint",
            )
        window = fields.get("completion_window")
        if window != COMPLETION_WINDOW:
            raise RequestError(
                f"`completion_window` must be {COMPLETION_WINDOW}, got {_quoted(window)}",
                param="completion_window",
            )
        file_id = fields.get("input_file_id")
        if not isinstance(file_id, str):
            raise RequestError("`input_file_id` must be the id of a file", param="input_file_id")
        file = await self._file(file_id, owner)
        if file.purpose != INPUT:
            raise RequestError(
                f"The file {file_id} has the purpose {file.purpose}; the input of a batch has "
                f"{INPUT}",
                param="input_file_id",
            )
        stored = await self._store.stored(owner)
        max_files = self.config.max_files
        if stored.num_files >= max_files:
            raise StorageLimitError(
                f"This key has {stored.num_files} files, the limit is {max_files} "
                "(`batches.max_files`). Delete files that you no longer need."
            )
        now_s = _now()
        batch = Batch(
            id=new_id("batch_"),
            owner=owner,
            endpoint=endpoint,
            input_file_id=file_id,
            completion_window=COMPLETION_WINDOW,
            metadata=_checked_metadata(fields.get("metadata")),
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
        )
        if not await self._store.create(batch, self.config.max_open_batches, max_files):
            raise TooManyBatchesError(
                f"{self.config.max_open_batches} batches of this key have not ended, the limit "
                "`batches.max_open_batches`; wait for one of them or cancel it."
            )
        self._runner.look()
        return batch.shown(Counts())

    async def _list_batches(self, parameters: Mapping[str, str], owner: str) -> dict[str, Any]:
        page = _page(parameters, BATCHES_PATH, 20)
        wanted = Page(page.after, page.limit + 1, page.newest_first)
        found = await self._store.batches(owner, wanted)
        shown = [batch.shown(counts) for batch, counts in found[: page.limit]]
        return _list_of(shown, has_more=len(found) > page.limit)

    async def _cancel(self, batch_id: str, owner: str) -> dict[str, Any]:
        await self._batch(batch_id, owner)
        batch = await self._store.change(batch_id, lambda batch: batch.cancelled(_now()))
        self._runner.cancel(batch_id)
        _, counts = await self._batch(batch_id, owner)
        assert batch is not None, "batches are not deleted while they are open"
        return batch.shown(counts)


_CREATE_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


class _Form(NamedTuple):
    """The parts of an upload: the file, and how long it is kept."""

    file: UploadFile
    keep_s: int


class _Upload:
    """An upload on its way; the file lies in a temporary file if it is larger than 1 MiB."""

    def __init__(self, scope: Scope, receive: Receive, config: BatchesConfig) -> None:
        self._scope, self._receive, self._config = scope, receive, config

    @asynccontextmanager
    async def received(self) -> AsyncIterator[_Form]:
        """Yield the whole form; the temporary file is then deleted. Raises RequestError."""
        timeout_s = self._config.upload_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                form = await self._read()
        except TimeoutError as error:
            raise BodyTimeoutError(f"The file did not arrive within {timeout_s:g} s.") from error
        try:
            yield self._checked(dict(form.multi_items()))
        finally:
            await form.close()

    async def _read(self) -> FormData:
        headers = HeaderFields(raw=self._scope["headers"])
        kind = headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            raise RequestError(
                f"A file is uploaded as multipart/form-data, got {kind[:80]!r}",
                param="content-type",
            )
        parser = MultiPartParser(
            headers, self._body(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_FORM_BYTES
        )
        try:
            return await parser.parse()
        except MultiPartException as error:
            raise RequestError(f"The form is not valid: {error.message}") from error
        except (ValueError, LookupError) as error:
            raise RequestError(f"The form is not valid: {error}") from error

    async def _body(self) -> AsyncGenerator[bytes, None]:
        decoder = decoder_of(self._scope["headers"])
        num_received = num_decoded = 0
        most = self._config.max_file_bytes + _FORM_BYTES
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RequestError("The client left before the end of the file.")
            received = message.get("body", b"")
            num_received += len(received)
            for piece in decoder.decode(received):
                num_decoded += len(piece)
                if num_decoded > most:
                    raise _too_large(self._config)
                yield piece
            if num_received > most:
                raise _too_large(self._config)
            if not message.get("more_body", False):
                if not decoder.is_complete:
                    raise RequestError("The body ends before the end of its compressed data.")
                return

    def _checked(self, fields: dict[str, Any]) -> _Form:
        file, purpose = fields.get("file"), fields.get("purpose")
        if not isinstance(file, UploadFile):
            raise RequestError("`file` is missing: a part with a `filename`", param="file")
        if purpose != INPUT:
            raise RequestError(
                f"`purpose` must be {INPUT}, got {_quoted(purpose)}", param="purpose"
            )
        most_s = self._config.keep_days * 86_400
        keep_s = most_s
        anchor = fields.get("expires_after[anchor]", "created_at")
        if anchor != "created_at":
            raise RequestError(
                f"`expires_after[anchor]` must be created_at, got {_quoted(anchor)}",
                param="expires_after",
            )
        if (given := fields.get("expires_after[seconds]")) is not None:
            is_number = isinstance(given, str) and given.isascii() and given.isdigit()
            keep_s = int(given[:12]) if is_number else 0
            if not _LEAST_EXPIRY_S <= keep_s <= most_s:
                raise RequestError(
                    f"`expires_after[seconds]` must be an integer from {_LEAST_EXPIRY_S} to "
                    f"{most_s}, got {_quoted(given)}",
                    param="expires_after",
                )
        for name in fields:
            if name not in _UPLOAD_FIELDS:
                raise RequestError(f"Unknown field `{name[:80]}`", param=name[:80])
        return _Form(file, keep_s)


_UPLOAD_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


def _file_name(upload: UploadFile) -> str:
    name = (upload.filename or "file")[:_MAX_NAME_CHARS]
    # The client's charset may lead to characters that are not Unicode.
    return name.encode("utf-8", "replace").decode()


def _too_large(config: BatchesConfig) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The file is larger than {config.max_file_bytes} bytes, the limit "
        "`batches.max_file_bytes`; split it.",
        param="file",
    )


def _parts_of(path: str) -> tuple[str, str, str]:
    """Return collection, id and action of a path."""
    collection = FILES_PATH if path.startswith(FILES_PATH) else BATCHES_PATH
    record_id, _, action = path.removeprefix(collection).removeprefix("/").partition("/")
    return collection, record_id, action


def _checked_metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if (
        not isinstance(given, dict)
        or len(given) > _MAX_METADATA
        or not all(
            isinstance(value, str)
            and len(name) <= _MAX_METADATA_KEY
            and len(value) <= _MAX_METADATA_VALUE
            for name, value in given.items()
        )
    ):
        raise RequestError(
            f"`metadata` must be an object of at most {_MAX_METADATA} texts, with names of at most "
            f"{_MAX_METADATA_KEY} and values of at most {_MAX_METADATA_VALUE} characters",
            param="metadata",
        )
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("`metadata` must be valid Unicode", param="metadata") from None
    return given


def _page(
    parameters: Mapping[str, str], path: str, default: int, others: tuple[str, ...] = ()
) -> Page:
    known = ("after", "limit", "order", *others)
    for name in parameters:
        if name not in known:
            raise RequestError(
                f"Unknown parameter `{name[:80]}`; known: {', '.join(known)}", param=name[:80]
            )
    given = parameters.get("limit", str(default))
    most = _MAX_PAGE[path]
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise RequestError(
            f"`limit` must be an integer from 1 to {most}, got {_quoted(given)}", param="limit"
        )
    order = parameters.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"`order` must be asc or desc, got {_quoted(order)}", param="order")
    after = parameters.get("after")
    if after is not None and not _ID.fullmatch(after):
        raise RequestError(f"`after` must be an id, got {_quoted(after)}", param="after")
    return Page(after, int(given[:9]), order == "desc")


def _list_of(shown: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }


def _quoted(value: object) -> str:
    return repr(str(value)[:80]) if isinstance(value, str | int | float) else type(value).__name__


def _now() -> int:
    return int(time.time())
