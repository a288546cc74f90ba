"""A client of thread-tagged streams: checks every chunk, and rebuilds the text as the page does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deployments.wire.thread_stream import ThreadStream

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"


def code_blocks() -> list[str]:
    """Return the Python code of the page: the example, then the function."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def ordered_text(threads: Mapping[str, Any]) -> str:
    """Call the function of the page."""
    names: dict[str, Any] = {}
    exec(compile(code_blocks()[1], str(PAGE), "exec"), names)
    text: str = names["ordered_text"](threads)
    return text


class TaggedReader:
    """The threads of each choice, from the `apar` objects of a stream.

    `in_order`: whether children appear in the order of their forks, not of their joins.
    """

    def __init__(self, *, in_order: bool = True) -> None:
        self._in_order = in_order
        self.threads: dict[int, dict[str, dict[str, Any]]] = {}
        self.time_ms = 0

    def read(self, apar: Mapping[str, Any]) -> None:
        """Read an object of a chunk, which must be valid and continue the ones before it."""
        ThreadStream.model_validate(dict(apar))
        assert apar["time_ms"] >= self.time_ms
        self.time_ms = apar["time_ms"]
        updated = [(update["choice"], update["id"]) for update in apar["updates"]]
        assert len(updated) == len(set(updated))
        for update in apar["updates"]:
            self._update(update)

    def _update(self, update: Mapping[str, Any]) -> None:
        threads = self.threads.setdefault(update["choice"], {})
        known = threads.get(update["id"])
        assert ("parent" in update) == ("position" in update) == (known is None), update
        if known is None:
            if update["id"] == "root":
                assert update["parent"] is None is update["position"]
            else:
                parent = threads[update["parent"]]
                assert update["position"] <= len(parent["text"])
                ordinal = sum(thread["parent"] == update["parent"] for thread in threads.values())
                parent_id, _, number = update["id"].rpartition(".")
                assert parent_id == update["parent"]
                assert int(number) == ordinal or not self._in_order
            known = threads[update["id"]] = {
                "parent": update["parent"],
                "position": update["position"],
                "text": "",
                "edits": {},
                "tokens": 0,
                "state": "waiting",
            }
        assert known["state"] != "ended" or (update["text"], update["tokens"]) == ("", 0)
        assert ("finish_reason" in update) == (update["state"] == "ended")
        known["text"] += update["text"]
        known["tokens"] += update["tokens"]
        known["state"] = update["state"]
        known["finish_reason"] = update.get("finish_reason")
        for edit in update.get("edits", ()):
            known["edits"][edit["paragraph"]] = edit

    def text(self, choice: int = 0) -> str:
        """Return the ordered text, rebuilt from the updates."""
        return ordered_text(self.threads[choice])


def chunks_of(events: Iterable[str]) -> list[dict[str, Any]]:
    """Return the chunks of a stream from its lines; an error event fails."""
    lines = [line for line in events if line]
    assert lines[-1] == "data: [DONE]", lines[-3:]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    return chunks
