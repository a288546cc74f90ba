"""Files and batches for tests of their store and of the gateway."""

import json
import time
from collections.abc import Iterable
from typing import Any

from deployments.gateway.batches.records import INPUT, WINDOW_S, Batch, StoredFile, new_id
from deployments.gateway.batches.store import CHUNK_BYTES, BatchStore, Limits

CHAT = "/v1/chat/completions"
ROOMY = Limits(max_files=100, max_key_bytes=2**30, max_total_bytes=2**30)


def line_of(custom_id: str, **fields: Any) -> dict[str, Any]:
    """A line of a batch of chats; `fields` replace those of the line."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"hello {custom_id}"}]}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return line | fields


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    """The lines as a file."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def file_of(owner: str = "a", num_bytes: int = 0, **fields: Any) -> StoredFile:
    """The record of an uploaded file."""
    now_s = int(time.time())
    values = {
        "id": new_id("file-"),
        "owner": owner,
        "filename": "input.jsonl",
        "num_bytes": num_bytes,
        "purpose": INPUT,
        "created_at": now_s,
        "expires_at": now_s + 86_400,
    }
    return StoredFile.model_validate(values | fields)


async def uploaded(store: BatchStore, data: bytes, owner: str = "a", **fields: Any) -> StoredFile:
    """Store a file."""
    file = file_of(owner, len(data), **fields)
    assert await store.begin_file(file, ROOMY) is None
    for number in range(-(-len(data) // CHUNK_BYTES) or 1):
        await store.append(file.id, number, data[number * CHUNK_BYTES :][:CHUNK_BYTES])
    await store.finish_file(file)
    return file


def batch_of(input_file_id: str = "file-1", owner: str = "a", **fields: Any) -> Batch:
    """A new batch of chats."""
    now_s = int(time.time())
    values = {
        "id": new_id("batch_"),
        "owner": owner,
        "endpoint": CHAT,
        "input_file_id": input_file_id,
        "completion_window": "24h",
        "metadata": {"of": "a test"},
        "created_at": now_s,
        "expires_at": now_s + WINDOW_S,
    }
    return Batch.model_validate(values | fields)
