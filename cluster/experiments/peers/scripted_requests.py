"""What the programs of other methods share: an answer's threads as requests of their own.

To the engine all of them are ordinary requests. A marker stands in for fork and child tokens, one
for one, because this engine bans and rewrites control tokens of requests that do not fork: token
counts and shared prefixes stay those of the method.

In process, a client costs nothing: what it submits reaches the engine before the next step, with no
network, no HTTP and no tokenising in between. All that favours the other methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import restore
from apar_core.tree.thread_names import ThreadId
from apar_core.tree.threads import ThreadText, thread_texts
from cluster.experiments.program import Submission, replay_sampling

if TYPE_CHECKING:
    from apar_core.workload.replay_answers import ReplayAnswer

Texts = Mapping[ThreadId, ThreadText[int]]


class ScriptedRequests:
    """The requests of one program: makes them, and keeps what each has generated.

    `given` is by the name of the request; `marker` is a token that no text has. `streams`: the
    client has to see tokens as they come.
    """

    def __init__(self, answer: ReplayAnswer, marker: int, *, streams: bool = False) -> None:
        self.texts: Texts = thread_texts(answer.tree)
        self.end_id = answer.flat[-1]
        self.marker = marker
        self._streams = streams
        self.given: dict[str, list[int]] = {}

    def submit(self, name: str, prompt_ids: list[int], script: list[int]) -> Submission:
        """A request that generates the script and ends with its last token."""
        self.given[name] = []
        sampling = replay_sampling({"": script}, max_tokens=len(script), streams=self._streams)
        sampling["extra_args"]["apar_enabled"] = False
        return Submission(name, prompt_ids, sampling)

    def script(self, thread: ThreadId) -> list[int]:
        """All that a thread generates: its text, a marker at each fork, its end."""
        return self.texts[thread].generated(self.marker, self.end_id)

    def restored(self, paragraphs: Mapping[ThreadId, Sequence[Sequence[int]]]) -> list[int]:
        """The answer in reading order, of what was given of each thread; without an end token."""
        tree: ParagraphTree[int] = ParagraphTree()
        for thread, text in self.texts.items():
            first, *others = paragraphs[thread]
            tree.append(thread, first)
            for child, paragraph in zip(text.children, others, strict=True):
                tree.fork(thread, child)
                tree.append(thread, paragraph)
            tree.finish(thread)
        return restore(tree)


def split_paragraphs(
    given: Sequence[int], paragraphs: Sequence[Sequence[int]], *, gap: int = 1
) -> Iterator[Sequence[int]]:
    """What was given in place of each paragraph; `gap` tokens stand behind each, a marker or the
    end token.
    """
    start = 0
    for paragraph in paragraphs:
        yield given[start : start + len(paragraph)]
        start += len(paragraph) + gap


def flat_text(texts: Texts, thread: ThreadId) -> list[int]:
    """The text of a thread and of all below it, in reading order."""
    text = texts[thread]
    flat = list(text.paragraphs[0])
    for child, paragraph in zip(text.children, text.paragraphs[1:], strict=True):
        flat += flat_text(texts, child)
        flat += paragraph
    return flat
