"""Map and reduce: the parent stops at its last fork, and goes on when all its children have ended.

Map: a thread writes its outline, up to and with its last fork, and stops. Process: its children run
side by side, each behind the whole outline and a child token. Reduce: the thread goes on behind the
outline and all that the children wrote. Threads below work alike.

Sources: Multiverse (arXiv 2506.09991) and Native Parallel Reasoner (arXiv 2512.07461), on their own
builds of SGLang, and ThreadWeaver's join (arXiv 2512.07843), on unmodified engines. The engine here
is an unmodified one: of the children's text, only what the prefix cache knows behind the same
prefix (the first child's) need not be computed again. The former two join the KV of the children
without computing any; `free_merge` bounds that from below: the thread goes on behind its outline
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from apar_core.tree.thread_names import ROOT_THREAD, ThreadId
from cluster.experiments.peers.scripted_requests import ScriptedRequests, split_paragraphs
from cluster.experiments.program import Submission

if TYPE_CHECKING:
    from apar_core.workload.replay_answers import ReplayAnswer

_REST = "/rest"
"""Behind a thread's name: the request of what it writes after its children."""


class ParentStops:
    """One answer; a thread with children is two requests, one without is one."""

    def __init__(self, answer: ReplayAnswer, marker: int, *, free_merge: bool = False) -> None:
        self.answer = answer
        self._free_merge = free_merge
        self._requests = ScriptedRequests(answer, marker)
        self._prompts: dict[ThreadId, list[int]] = {}
        self._running: dict[ThreadId, set[ThreadId]] = {}

    def start(self) -> list[Submission]:
        """The question, as the outline of the root thread."""
        return [self._begin(ROOT_THREAD, list(self.answer.prompt_ids))]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Nothing before a request has ended."""
        self._requests.given[name].extend(token_ids)
        return []

    def on_end(self, name: str) -> list[Submission]:
        """The children behind an outline; the parent's rest behind its last child."""
        thread = ThreadId(name.removesuffix(_REST))
        text = self._requests.texts[thread]
        if text.children and name == thread:
            self._running[thread] = set(text.children)
            outline = [*self._prompts[thread], *self._requests.given[name]]
            return [
                self._begin(child, [*outline, self._requests.marker]) for child in text.children
            ]
        parent = text.parent
        if parent is None:
            return []
        self._running[parent].discard(thread)
        return [] if self._running[parent] else [self._go_on(parent)]

    def text_ids(self) -> list[int]:
        """What the threads have generated, in reading order."""
        requests = self._requests
        paragraphs: dict[ThreadId, list[Sequence[int]]] = {}
        for thread, text in requests.texts.items():
            outline = list(split_paragraphs(requests.given[thread], text.paragraphs))
            if text.children:
                outline[-1] = requests.given[thread + _REST][:-1]
            paragraphs[thread] = outline
        last = ROOT_THREAD + _REST if requests.texts[ROOT_THREAD].children else ROOT_THREAD
        return [*requests.restored(paragraphs), *requests.given[last][-1:]]

    def _begin(self, thread: ThreadId, prompt_ids: list[int]) -> Submission:
        self._prompts[thread] = prompt_ids
        script = self._requests.script(thread)
        if self._requests.texts[thread].children:
            rest = self._requests.texts[thread].paragraphs[-1]
            script = script[: len(script) - len(rest) - 1]
        return self._requests.submit(thread, prompt_ids, script)

    def _go_on(self, thread: ThreadId) -> Submission:
        rest = [*self._requests.texts[thread].paragraphs[-1], self._requests.end_id]
        read = [*self._requests.given[thread], *self._below(thread)]
        return self._requests.submit(thread + _REST, [*self._prompts[thread], *read], rest)

    def _below(self, thread: ThreadId) -> list[int]:
        """What a thread's children wrote, each behind its child token."""
        if self._free_merge:
            return []
        given = self._requests.given
        read: list[int] = []
        for child in self._requests.texts[thread].children:
            read += [self._requests.marker, *given[child], *self._below(child)]
            read += given.get(child + _REST, [])
        return read
