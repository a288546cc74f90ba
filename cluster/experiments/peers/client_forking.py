"""Forking by the client: a child is a new completion that leans on the prefix cache.

The client reads the stream; at a fork token it sends a completion whose prompt is all that the
parent has read and written, and a child token. The parent goes on. The engine knows nothing of it:
a child finds whole blocks of its prefix in the cache and computes the rest of its prompt, waits
behind whatever came before it, and a fork's requests stand alone when memory is short.

Sources: PaDoc, and ThreadWeaver (arXiv 2512.07843), which run on unmodified engines in this way.
ThreadWeaver's parent waits for its threads besides and reads what they wrote; that part of it is
`parent_stops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from apar_core.tree.thread_names import ROOT_THREAD, ThreadId
from cluster.experiments.peers.scripted_requests import ScriptedRequests, split_paragraphs
from cluster.experiments.program import Submission

if TYPE_CHECKING:
    from apar_core.workload.replay_answers import ReplayAnswer


class ClientForking:
    """One answer, each of its threads a completion that the client sends."""

    def __init__(self, answer: ReplayAnswer, marker: int) -> None:
        self.answer = answer
        self._requests = ScriptedRequests(answer, marker, streams=True)
        self._prompts: dict[str, list[int]] = {}
        self._fork_index = {
            thread: record.fork_index for thread, record in answer.tree.threads.items()
        }

    def start(self) -> list[Submission]:
        """The question, as the completion of the root thread."""
        return [self._thread(ROOT_THREAD, list(self.answer.prompt_ids))]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """A completion for every fork among the new tokens."""
        given = self._requests.given[name]
        first = len(given)
        given.extend(token_ids)
        children: list[Submission] = []
        for child in self._requests.texts[ThreadId(name)].children:
            index = self._fork_index[child]
            if first <= index < len(given):
                read = [*self._prompts[name], *given[: index + 1]]
                children.append(self._thread(child, [*read, self._requests.marker]))
        return children

    def on_end(self, name: str) -> list[Submission]:
        """Nothing: every child is under way already."""
        return []

    def text_ids(self) -> list[int]:
        """What the threads have generated, in reading order."""
        requests = self._requests
        paragraphs = {
            thread: list(split_paragraphs(requests.given[thread], text.paragraphs))
            for thread, text in requests.texts.items()
        }
        return [*requests.restored(paragraphs), *requests.given[ROOT_THREAD][-1:]]

    def _thread(self, thread: ThreadId, prompt_ids: list[int]) -> Submission:
        self._prompts[thread] = prompt_ids
        return self._requests.submit(thread, prompt_ids, self._requests.script(thread))
