"""Follow a client's request in the API process: the tokens of its threads, its journal, its cost.

One request of a client can be several requests of the engine: choices (`n`), several prompts, or
the beams of a search. `find_client` finds the client's request by the engine's ids.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from apar_core.journal import EndReason, Journal, ThreadDelta
from apar_core.tree.statistics import TreeStatistics
from apar_core.tree.thread_names import ThreadPath, thread_path

# Importing vLLM takes seconds, and the process that composes the application imports this module.
if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from apar_core.engine.thread_tags import StreamTags
    from apar_core.vllm_names import EngineCoreOutput

Value = TypeVar("Value")

# vLLM names the beams of a search `ID-UUID-beam-I`, with another UUID in each step.
_BEAM = re.compile(r"(?P<search>.+)-[0-9a-f]+-beam-[0-9]+")


class ThreadObserver(Protocol):
    """Callbacks for the threads of a request, called in the event loop of the API process.

    Threads are named by their engine request ids. Replayed outputs come from another engine, whose
    request this one continues.
    """

    def began(self, root_id: str, choice: int | None) -> None:
        """Note that the engine gets a request; `choice` is its number if there are several."""

    def forked(self, parent_id: str, child_id: str) -> None:
        """Note a fork token; called before any output of the child."""

    def generated(self, output: EngineCoreOutput, *, replayed: bool) -> None:
        """Note one thread's output of one step; the output belongs to the caller."""


@dataclass(slots=True)
class _NewTokens:
    """Tokens of one thread since the journal was last taken."""

    path: ThreadPath
    token_ids: list[int]
    finish_reason: int | None = None


class RequestFollower:
    """Token counts, times, statistics and, on demand, the journal of one client's request.

    There is a journal only if the request is a single request of the engine that another engine
    can continue. `resume` is the journal of the request that this one continues: its tokens count
    in `generated_tokens`, but are not part of the journals taken here.

    `aborted` is set when the engine core gives up a request, as it does when it shuts down. A
    client's abort never sets it: the API process then drops the request at once and does not wait
    for an output.

    `tags` collects what each thread writes, if the client asked for a thread-tagged stream.
    """

    def __init__(
        self,
        *,
        keeps_journal: bool,
        resume: Journal | None = None,
        observer: ThreadObserver | None = None,
    ) -> None:
        self.resume = resume
        self.tags: StreamTags | None = None
        self._observer = observer
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.certain_tokens = 0
        self.num_roots = 0
        self.aborted = False
        self.statistics: TreeStatistics | None = None
        # Monotonic times: the engine got the request, first and last output.
        self.began_s = self.first_output_s = self.last_output_s = 0.0
        self._wants_journal = keeps_journal
        # By engine request id of a thread; None if no journal is kept.
        self._journal: dict[str, _NewTokens] | None = None
        self._root_id = ""
        self._num_new_tokens = 0
        self._replaying = False
        self._beam_searches: set[str] = set()

    @property
    def continuable(self) -> bool:
        """Whether the journals taken here are enough to continue the request in another engine."""
        return self._journal is not None and self.num_roots == 1

    @property
    def searches_beams(self) -> bool:
        """Whether the request is a beam search."""
        return bool(self._beam_searches)

    def begin(
        self, root_id: str, num_prompt_tokens: int, params: SamplingParams, *, choice: int | None
    ) -> None:
        """Add a request of the engine, before it has generated anything.

        `choice` is its number among the choices for one prompt, None if there is only one.
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
        """Add a beam; vLLM starts new ones in each step of a search.

        The beams of one search count as one root with one prompt.
        """
        self.began_s = self.began_s or time.monotonic()
        if search not in self._beam_searches:
            self._beam_searches.add(search)
            self.num_roots += 1
            self.prompt_tokens += num_prompt_tokens

    def begin_pooling(self, num_prompt_tokens: int) -> None:
        """Add a request that generates nothing, for example an embedding."""
        self.began_s = self.began_s or time.monotonic()
        self.prompt_tokens += num_prompt_tokens

    def add(self, output: EngineCoreOutput) -> None:
        """Add one thread's output of one step."""
        if self._observer is not None:
            self._observer.generated(output, replayed=self._replaying)
        token_ids = output.new_token_ids
        self.generated_tokens += len(token_ids)
        if self._replaying:
            return
        self.last_output_s = time.monotonic()
        self.first_output_s = self.first_output_s or self.last_output_s
        self._num_new_tokens += len(token_ids)
        finish_reason = None if output.finish_reason is None else int(output.finish_reason)
        if finish_reason == EndReason.ABORT:
            # Not an end of the thread: another engine can continue it.
            self.aborted, finish_reason = True, None
        if self._journal is None or not (token_ids or finish_reason is not None):
            return
        new = self._journal.get(output.request_id)
        if new is None:
            path = thread_path(self._root_id, output.request_id)
            new = self._journal[output.request_id] = _NewTokens(path, [])
        new.token_ids += token_ids
        if finish_reason is not None:
            new.finish_reason = finish_reason

    def forked(self, parent_id: str, child_id: str) -> None:
        """Note a fork token, by the engine request ids of the two threads."""
        if self._observer is not None:
            self._observer.forked(parent_id, child_id)

    def end(self, statistics: TreeStatistics) -> None:
        """Add the statistics of a finished tree; beams are ignored, as they are no answers."""
        if self._beam_searches:
            return
        known = self.statistics
        self.statistics = statistics if known is None else known + statistics

    def certain(self, num_tokens: int) -> None:
        """Count text tokens that became certain, replayed ones included (`TreeStream`)."""
        self.certain_tokens += num_tokens

    def take_num_tokens(self) -> int:
        """Return the number of tokens that all threads have generated since the last call."""
        num_tokens, self._num_new_tokens = self._num_new_tokens, 0
        return num_tokens

    def take_journal(self) -> Journal:
        """Return the tokens generated since the last call; empty if no journal is kept."""
        if not self._journal:
            return ()
        journal, self._journal = self._journal, {}
        return tuple(
            ThreadDelta(new.path, tuple(new.token_ids), new.finish_reason)
            for new in journal.values()
        )

    def replay(self, *, begins: bool) -> None:
        """Mark the start or end of replayed outputs."""
        self._replaying = begins


def can_continue(params: SamplingParams) -> bool:
    """Return whether another engine can continue a request from its token ids alone.

    It cannot if the first engine's state is part of the answer: log-probabilities, the state of a
    grammar, and counts over generated tokens (penalties, `min_tokens`, bad words of several tokens,
    repetitions, a thinking budget, given tokens). The HTTP layer's part of this rule is in
    `deployments/gateway/body.py`.
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


def beam_search_of(external_id: str) -> str | None:
    """Return the id of the search that a request is a beam of; None if it is not a beam."""
    beam = _BEAM.fullmatch(external_id)
    return None if beam is None else beam["search"]


def find_client(table: Mapping[str, Value], external_id: str) -> Value | None:
    """Return the entry of the client's request that a request of the engine belongs to.

    Understands beams, and vLLM's numbering of the prompts of one request: `ID-0`, `ID-1`.
    """
    if not table:
        return None
    if external_id in table:
        return table[external_id]
    external_id = beam_search_of(external_id) or external_id
    if external_id in table:
        return table[external_id]
    return table.get(external_id.rpartition("-")[0])
