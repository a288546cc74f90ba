"""Follows a client's request in the API process: what its threads generate, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apar_core.engine.thread_observer import ThreadObserver
from apar_core.journal import Journal, ThreadDelta
from apar_core.tree.statistics import TreeStatistics
from apar_core.tree.thread_names import thread_path

# vLLM takes seconds to import, and the process that composes the application reads this module.
if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput


# `FinishReason.ABORT`; the value, for the sake of the import.
_ABORT = 2


@dataclass(slots=True)
class _Fresh:
    """What one thread has generated since the journal was last taken."""

    path: tuple[int, ...]
    token_ids: list[int]
    finish_reason: int | None = None


class RequestFollower:
    """Counts and, where asked to, writes down what the threads of one client's request generate.

    A client's request may be several requests of the engine (`n`, several prompts); then it counts
    them all and keeps no journal. `resume` is the journal of the request that this one continues:
    its tokens are part of `generated_tokens`, and of no journal taken here.

    `aborted` tells that the engine core has given the request up by itself, as it does with all its
    requests when it is told to end. A client's abort never comes this way: the API process drops
    the request at once and asks the engine core for no answer.
    """

    def __init__(
        self,
        *,
        keeps_journal: bool,
        resume: Journal | None = None,
        observer: ThreadObserver | None = None,
    ) -> None:
        self.resume = resume
        self._observer = observer
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.num_roots = 0
        self.aborted = False
        self.statistics: TreeStatistics | None = None
        # When the engine got the request, and when its outputs came; by the monotonic clock.
        self.began_s = self.first_output_s = self.last_output_s = 0.0
        self._wants_journal = keeps_journal
        self._journal: dict[str, _Fresh] | None = None
        self._root_id = ""
        self._num_fresh = 0
        self._replaying = False
        self._beam_searches: set[str] = set()

    @property
    def continuable(self) -> bool:
        """Whether the journals taken here are enough to continue the request elsewhere."""
        return self._journal is not None and self.num_roots == 1

    @property
    def searches_beams(self) -> bool:
        """Whether what is followed are the beams of searches."""
        return bool(self._beam_searches)

    def begin(
        self, root_id: str, num_prompt_tokens: int, params: SamplingParams, *, choice: int | None
    ) -> None:
        """Told of each request of the engine before it has generated anything.

        `choice` is its number among those for one prompt (`n`), None where there is but one.
        """
        self.num_roots += 1
        self.began_s = self.began_s or time.monotonic()
        if not choice:
            self.prompt_tokens += num_prompt_tokens
        self._root_id = root_id
        alone = self.num_roots == 1 and choice is None
        self._journal = {} if self._wants_journal and alone and can_continue(params) else None
        if self._observer is not None:
            self._observer.began(root_id, choice)

    def begin_beam(self, search: str, num_prompt_tokens: int) -> None:
        """Told of each beam of each step of a beam search, which has one name for all of them.

        Its prompt counts once, and the search as one root; beams are never continued.
        """
        self.began_s = self.began_s or time.monotonic()
        if search not in self._beam_searches:
            self._beam_searches.add(search)
            self.num_roots += 1
            self.prompt_tokens += num_prompt_tokens

    def add(self, output: EngineCoreOutput) -> None:
        """Take what one thread has generated in one step; called for every output."""
        if self._observer is not None:
            self._observer.generated(output, replayed=self._replaying)
        token_ids = output.new_token_ids
        self.generated_tokens += len(token_ids)
        if self._replaying:
            return
        self.last_output_s = time.monotonic()
        self.first_output_s = self.first_output_s or self.last_output_s
        self._num_fresh += len(token_ids)
        finish_reason = None if output.finish_reason is None else int(output.finish_reason)
        if finish_reason == _ABORT:
            # No end of the thread: another engine can go on with it.
            self.aborted, finish_reason = True, None
        if self._journal is None or not (token_ids or finish_reason is not None):
            return
        fresh = self._journal.get(output.request_id)
        if fresh is None:
            path = thread_path(self._root_id, output.request_id)
            fresh = self._journal[output.request_id] = _Fresh(path, [])
        fresh.token_ids += token_ids
        if finish_reason is not None:
            fresh.finish_reason = finish_reason

    def forked(self, parent_id: str, child_id: str) -> None:
        """Told of each fork token, by the engine request ids of the two threads."""
        if self._observer is not None:
            self._observer.forked(parent_id, child_id)

    def end(self, statistics: TreeStatistics) -> None:
        """Told the statistics of each finished tree; those of beams are no answer's."""
        if self._beam_searches:
            return
        known = self.statistics
        self.statistics = statistics if known is None else known + statistics

    def take_num_tokens(self) -> int:
        """Tokens that all threads together have generated since the last call."""
        num_fresh, self._num_fresh = self._num_fresh, 0
        return num_fresh

    def take_journal(self) -> Journal:
        """What the threads have generated since the last call; empty where none is kept."""
        if not self._journal:
            return ()
        journal, self._journal = self._journal, {}
        return tuple(
            ThreadDelta(fresh.path, tuple(fresh.token_ids), fresh.finish_reason)
            for fresh in journal.values()
        )

    def replay(self, *, begins: bool) -> None:
        """Between two calls, what is added is that of the request that this one continues."""
        self._replaying = begins


def can_continue(params: SamplingParams) -> bool:
    """Whether a request may be taken up again from its token ids alone.

    Not where the engine that died has taken something along: log-probabilities, the state of a
    grammar, and what it counts over the tokens generated (penalties, a least number of tokens, bad
    words of several tokens, repetitions, a thinking budget, given tokens). The HTTP layer's part of
    the rule is in `deployments/relay/continuation.py`.
    """
    lost_with_the_engine = (
        params.logprobs is not None,
        params.prompt_logprobs is not None,
        bool(params.logprob_token_ids),
        bool(params.prompt_logprob_token_ids),
        params.structured_outputs is not None,
        params.presence_penalty != 0,
        params.frequency_penalty != 0,
        params.min_tokens > 0,
        bool(params.bad_words),
        params.repetition_detection is not None,
        params.thinking_token_budget is not None,
        params.trace_decode_token_ids is not None,
    )
    return not any(lost_with_the_engine)


def stop_reason(params: SamplingParams, token_ids: Sequence[int]) -> int | None:
    """What vLLM names as the reason of a thread that a stop token has ended: a client's token.

    As in vLLM's `check_stop`: the model's first end token has no name.
    """
    last = token_ids[-1] if token_ids else None
    if last is None or last == params.eos_token_id:
        return None
    return last if last in (params.stop_token_ids or ()) else None
