"""When the reader of an ordered stream sees the text of an answer that forks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from apar_core.tree.reader_times import ReaderTimes
from apar_core.tree.thread_names import child_replay_key, child_request_id

if TYPE_CHECKING:
    from apar_core.engine.list_threads import ListThreads
    from apar_core.tree.statistics import TreeStatistics
    from apar_core.vllm_names import EngineCoreOutput


class _Paragraph(NamedTuple):
    """Tokens `begin` to `end` of a thread; closed once the thread has `closed` tokens."""

    thread: str
    begin: int
    end: int
    closed: int


class Reader:
    """Times at which the text of a request became certain, in virtual seconds.

    A core passes it each output of a step, then the time at which the step ended.
    """

    def __init__(self) -> None:
        self._silences_s: list[float] = []
        self.times = ReaderTimes()

    def take(self, output: EngineCoreOutput) -> None:
        """Add one thread's output."""

    def advance(self, generated: Mapping[str, int], now_s: float) -> None:
        """Note the text that is certain by now.

        `generated`: how many tokens each thread has generated, by engine request id.
        """
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        """Return whether the reader saw the text at the same times."""
        return isinstance(other, Reader) and (self.times, self._silences_s) == (
            other.times,
            other._silences_s,
        )

    def silence_s(self, quantile: float) -> float:
        """Return a quantile of the times between two steps with certain text; 0 without any."""
        found = sorted(self._silences_s)
        return found[math.ceil(quantile * (len(found) - 1))] if found else 0.0

    def _add(self, num_tokens: int, now_s: float) -> None:
        silence_s = self.times.add(num_tokens, now_s)
        if silence_s is not None:
            self._silences_s.append(silence_s)


class ScriptReader(Reader):
    """Follows a request whose threads generate given tokens, control tokens included.

    Counts tokens of each thread, and finds by them what `TreeStream` finds by the tree: a paragraph
    is complete with the fork or end token that closes it.
    """

    def __init__(
        self,
        request_id: str,
        scripts: Mapping[str, Sequence[int]],
        *,
        fork_id: int | None,
        end_id: int,
    ) -> None:
        """Start before the first token. `fork_id`: None for a request that does not fork."""
        super().__init__()
        self._paragraphs: list[_Paragraph] = []
        self._scripts = scripts
        self._fork_id, self._end_id = fork_id, end_id
        self._add_thread(request_id, "")
        self._place = 0
        self._num_before = self._num_certain = 0

    def _add_thread(self, thread: str, key: str) -> None:
        # A fork may be refused, and then has no text.
        script = self._scripts.get(key, ())
        begin = num_children = 0
        for index, token_id in enumerate(script):
            if token_id == self._fork_id:
                self._paragraphs.append(_Paragraph(thread, begin, index, index + 1))
                child = child_request_id(thread, num_children)
                self._add_thread(child, child_replay_key(key, num_children))
                begin, num_children = index + 1, num_children + 1
        number = len(script)
        end = number - bool(number and script[-1] == self._end_id)
        self._paragraphs.append(_Paragraph(thread, begin, end, number))

    def advance(self, generated: Mapping[str, int], now_s: float) -> None:
        """Note the text that is certain by now."""
        seen = 0
        while self._place < len(self._paragraphs):
            paragraph = self._paragraphs[self._place]
            number = generated.get(paragraph.thread, 0)
            seen = max(0, min(number, paragraph.end) - paragraph.begin)
            if number < paragraph.closed:
                break
            self._num_before += seen
            seen = 0
            self._place += 1
        num_certain = self._num_before + seen
        self._add(num_certain - self._num_certain, now_s)
        self._num_certain = num_certain


class ListReader(Reader):
    """Follows a request whose lists the engine writes in parallel, as the product does.

    Which tokens are text depends on what they say, so their number alone does not tell.
    """

    def __init__(self, threads: ListThreads) -> None:
        super().__init__()
        self._threads = threads

    def take(self, output: EngineCoreOutput) -> None:
        """Add one thread's output."""
        self._threads.feed(output)

    def advance(self, generated: Mapping[str, int], now_s: float) -> None:
        """Note the text that is certain by now."""
        self._add(sum(len(each.new_token_ids) for each in self._threads.take()), now_s)

    def statistics(self, num_prompt_tokens: int) -> TreeStatistics:
        """Return the counts of the answer's threads."""
        return self._threads.statistics(num_prompt_tokens)
