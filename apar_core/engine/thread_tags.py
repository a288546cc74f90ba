"""Texts of a request's threads, for thread-tagged streams.

A `ThreadTags` reads the paragraph tree of one choice as it grows, and detokenizes each thread on
its own. It also learns which text vLLM's detokenizer made of each paragraph in the ordered text,
and reports an edit where the two differ. `docs/streams.md` describes the updates.

Nothing here imports vLLM, which takes seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from apar_core.tree.paragraph import ParagraphNode, ParagraphTree, ThreadRecord
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId

Update = dict[str, Any]
"""A `ThreadUpdate` of `deployments/wire/thread_stream.py` as a plain dictionary."""

DISCARDED = "discarded"
"""Finish reason of a thread whose text is no part of the answer."""
CUT = "cut"
"""Finish reason of a thread that had not ended when the answer did."""
# Enough for the longest character, and for tokenizers that treat a text's first token differently.
_CONTEXT_TOKENS = 8
# Part of an interval that updates without text wait longer than text.
_AFTER_TEXT = 0.25


class Decoder(Protocol):
    """vLLM's incremental detokenizer."""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Add tokens."""

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """Return the text since the last call."""


class _TokenItem(Protocol):
    @property
    def token_id(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Paragraph:
    """Own text of a thread's paragraph, and its text within the ordered text."""

    thread: _Thread
    number: int
    own: str = ""
    ordered: str = ""
    edit: Update | None = None


@dataclass(slots=True)
class _Fork:
    """State of a thread at a fork: where its child begins.

    `context` are the last tokens that have become text, `held` those after them that have not: the
    first bytes of a character.
    """

    position: int
    first_node: ParagraphNode[Any]
    context: list[int]
    held: list[int]


@dataclass(slots=True, eq=False)
class _Thread:
    """Reading position in one thread, and what its updates have reported."""

    id: ThreadId
    parent: ThreadId | None
    position: int | None
    record: ThreadRecord[Any]
    node: ParagraphNode[Any]
    context: list[int]
    decoder: Decoder
    held: list[int] = field(default_factory=list)
    paragraphs: list[_Paragraph] = field(default_factory=list)
    forks: dict[ParagraphNode[Any], _Fork] = field(default_factory=dict)
    num_read: int = 0
    num_chars: int = 0
    new_text: list[str] = field(default_factory=list)
    new_edits: list[Update] = field(default_factory=list)
    num_reported_tokens: int = 0
    reported_state: str | None = None
    reported_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.record.num_generated

    @property
    def state(self) -> str:
        if self.record.finished:
            return "ended"
        if self.record.waits:
            return "waiting"
        return "writing" if self.num_tokens else "waiting"


class ThreadTags:
    """Updates of the threads of one choice.

    `new_decoder` makes a detokenizer for text that follows the given tokens. `pieces` gets the
    paragraphs that the ordered text is made of, with their numbers of tokens (`TreeStream.pieces`).
    """

    def __init__(
        self,
        choice: int,
        tree: ParagraphTree[Any],
        prompt_token_ids: Sequence[int],
        new_decoder: Callable[[list[int]], Decoder],
    ) -> None:
        self.tree = tree
        self.pieces: deque[tuple[ParagraphNode[Any], int]] = deque()
        self._choice = choice
        self._new_decoder = new_decoder
        self._paragraphs: dict[ParagraphNode[Any], _Paragraph] = {}
        self._threads: dict[ThreadId, _Thread] = {}
        self._reasons: dict[ThreadId, str] = {}
        # The paragraphs of the ordered text so far.
        self._reading_order: list[_Paragraph] = []
        self._num_left = 0
        context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._root_fork = _Fork(0, tree.root, context, [])

    def finished(self, thread: ThreadId, reason: str) -> None:
        """Note why a thread has ended; without a reason, the end of the answer has cut it."""
        self._reasons[thread] = reason

    def discard(self, thread: ThreadId) -> None:
        """Note that a thread's text was removed."""
        self._reasons[thread] = DISCARDED
        known = self._threads.get(thread)
        if known is not None:
            self._read(known)
            for paragraph in known.paragraphs:
                self._compare(paragraph, "")

    def read(self) -> None:
        """Read what the threads have written since the last call."""
        for thread in self._threads.values():
            self._read(thread)
        if ROOT_THREAD not in self._threads:
            # Its paragraphs tell the order of its children.
            self._begin(ROOT_THREAD, self.tree.threads[ROOT_THREAD])
        # A thread stands in the tree after its parent; one that its parent has not joined has no
        # place yet.
        new = [
            (thread_id, record)
            for thread_id, record in self.tree.threads.items()
            if thread_id not in self._threads and not record.is_apart
        ]
        for thread_id, record in sorted(new, key=lambda each: self._place(each[1])):
            self._begin(thread_id, record)

    def _place(self, record: ThreadRecord[Any]) -> int:
        """Return the place of a thread among its siblings, if they have joined in another order."""
        if record.parent is None or not self.tree.threads[record.parent].joins_later:
            return 0
        return list(self._threads[record.parent].forks).index(record.first_node)

    def note(self, text: str) -> None:
        """Add the text that the next token of the ordered text has become."""
        while not self._num_left:
            node, self._num_left = self.pieces.popleft()
            paragraph = self._paragraphs[node]
            if not self._reading_order or paragraph is not self._reading_order[-1]:
                if self._reading_order:
                    last = self._reading_order[-1]
                    self._compare(last, last.ordered)
                self._reading_order.append(paragraph)
        self._num_left -= 1
        self._reading_order[-1].ordered += text

    def end(self, ordered_text: str) -> None:
        """Cut the open threads, and compare all paragraphs with the whole ordered text."""
        for thread, record in self.tree.threads.items():
            if not record.finished:
                self.tree.finish(thread, ended=False)
        self.read()
        room = len(ordered_text)
        visible = dict.fromkeys(self._paragraphs.values(), "")
        for paragraph in self._reading_order:
            visible[paragraph] = paragraph.ordered[:room]
            room -= len(visible[paragraph])
        for paragraph, text in visible.items():
            self._compare(paragraph, text)

    def take(self) -> list[Update]:
        """Return the updates since the last call, parents before their children."""
        updates = (self._update(thread) for thread in self._threads.values())
        return [update for update in updates if update is not None]

    def _begin(self, thread_id: ThreadId, record: ThreadRecord[Any]) -> None:
        """Add a thread after its parent, and read it."""
        fork = self._root_fork
        if record.parent is not None:
            fork = self._threads[record.parent].forks[record.first_node]
        thread = _Thread(
            thread_id,
            record.parent,
            None if thread_id == ROOT_THREAD else fork.position,
            record,
            fork.first_node,
            list(fork.context),
            self._new_decoder(fork.context),
        )
        self._open_paragraph(thread)
        # In reading order the child's bytes follow those of its parent.
        for token_id in fork.held:
            self._decode(thread, token_id)
        for item in fork.first_node.lead:
            self._decode(thread, item.token_id)
        self._threads[thread_id] = thread
        self._read(thread)

    def _open_paragraph(self, thread: _Thread) -> None:
        paragraph = _Paragraph(thread, len(thread.paragraphs))
        thread.paragraphs.append(paragraph)
        self._paragraphs[thread.node] = paragraph

    def _read(self, thread: _Thread) -> None:
        while True:
            node = thread.node
            if thread.num_read < len(node.items):
                items: list[_TokenItem] = node.items[thread.num_read :]
                thread.num_read += len(items)
                for item in items:
                    self._decode(thread, item.token_id)
            if node.first_child is None or node.next_sibling is None:
                return
            context, held = thread.context, thread.held
            fork = _Fork(thread.num_chars, node.first_child, list(context), list(held))
            thread.forks[node.first_child] = fork
            if held:
                thread.held = []
                thread.decoder = self._new_decoder(context)
            thread.node, thread.num_read = node.next_sibling, 0
            self._open_paragraph(thread)

    def _decode(self, thread: _Thread, token_id: int) -> None:
        thread.decoder.update([token_id], stop_terminated=False)
        text = thread.decoder.get_next_output_text(finished=True, delta=True)
        thread.held.append(token_id)
        if not text:
            return
        thread.context = [*thread.context, *thread.held][-_CONTEXT_TOKENS:]
        thread.held = []
        thread.paragraphs[-1].own += text
        thread.num_chars += len(text)
        thread.new_text.append(text)

    def _compare(self, paragraph: _Paragraph, ordered: str) -> None:
        """Report an edit if a paragraph differs from its place in the ordered text."""
        if paragraph.own == ordered and paragraph.edit is None:
            return
        edit = _edit(paragraph.number, paragraph.own, ordered)
        if edit != paragraph.edit:
            paragraph.edit = edit
            paragraph.thread.new_edits.append(edit)

    def _update(self, thread: _Thread) -> Update | None:
        num_tokens = max(0, thread.num_tokens - thread.num_reported_tokens)
        state = thread.state
        reason = self._reasons.get(thread.id, CUT) if state == "ended" else None
        if not (
            thread.new_text
            or thread.new_edits
            or num_tokens
            or (state, reason) != (thread.reported_state, thread.reported_reason)
        ):
            return None
        update: Update = {"choice": self._choice, "id": thread.id}
        if thread.reported_state is None:
            update |= {"parent": thread.parent, "position": thread.position}
        update |= {"text": "".join(thread.new_text), "tokens": num_tokens, "state": state}
        if reason is not None:
            update["finish_reason"] = reason
        if thread.new_edits:
            update["edits"] = list({edit["paragraph"]: edit for edit in thread.new_edits}.values())
        thread.new_text.clear()
        thread.new_edits.clear()
        thread.num_reported_tokens += num_tokens
        thread.reported_state, thread.reported_reason = state, reason
        return update


class StreamTags:
    """Updates of all choices of one client's request, whose id the engine knows it by."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._choices: list[ThreadTags] = []
        self._began_s = time.monotonic()
        self._new = asyncio.Event()
        # Of the streams of this engine; 0 for none.
        self.interval_s: Callable[[], float] = lambda: 0.0

    def choice(self, external_id: str, index: int, num_choices: int) -> int:
        """Return the index of a choice in the answer.

        vLLM runs the prompts of a completion as requests `ID-0`, `ID-1`, ..., each of all choices.
        """
        prompt = external_id[len(self._request_id) + 1 :]
        return index + (int(prompt) * num_choices if prompt else 0)

    def add(self, tags: ThreadTags) -> None:
        """Add the threads of a choice."""
        self._choices.append(tags)

    def announce(self) -> None:
        """Note that there may be updates."""
        self._new.set()

    async def due(self) -> None:
        """Wait for updates, and then for the chunks of ordered text, which take updates along.

        A `PacedQueue` passes text when the event loop's clock is at a multiple of the interval.
        """
        await self._new.wait()
        interval_s = self.interval_s()
        if interval_s > 0:
            now_s = asyncio.get_running_loop().time()
            await asyncio.sleep((_AFTER_TEXT - now_s / interval_s) % 1 * interval_s)
        self._new.clear()

    def take(self) -> dict[str, Any]:
        """Return the updates since the last call, with the time in milliseconds."""
        time_ms = round((time.monotonic() - self._began_s) * 1000)
        updates = [update for tags in self._choices for update in tags.take()]
        return {"time_ms": time_ms, "updates": updates}


def _edit(number: int, own: str, ordered: str) -> Update:
    """Return the shortest edit that makes a paragraph's own text that of the ordered text."""
    start = _num_common(own, ordered)
    length = _num_common(own[start:][::-1], ordered[start:][::-1])
    return {
        "paragraph": number,
        "position": start,
        "length": len(own) - start - length,
        "text": ordered[start : len(ordered) - length],
    }


def _num_common(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
