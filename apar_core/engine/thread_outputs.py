"""Joins the outputs of all threads of one request into its paragraph tree, and reads it out.

Lives in the API process. What the engine reports of a thread goes in; what comes out is one output
per request that holds only tokens whose place in the restored text is certain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from apar_core.engine.journal import RequestFollower
from apar_core.errors import TreeError
from apar_core.fork_parameters import ForkParameters, child_request_id
from apar_core.tree.paragraph import ROOT_THREAD, ParagraphTree, ThreadId
from apar_core.tree.separator import Separator
from apar_core.tree.stream import TreeStream

# Which reason a request ends with when its threads end with different ones: the first found.
_PRECEDENCE = (
    FinishReason.ERROR,
    FinishReason.ABORT,
    FinishReason.LENGTH,
    FinishReason.REPETITION,
    FinishReason.STOP,
)


class TextToken(NamedTuple):
    """One token of the text; `stops` marks a stop token that the client named.

    `logprobs` holds the token's row of log-probabilities where the request asked for them.
    """

    token_id: int
    logprobs: LogprobsLists | None
    stops: bool = False


@dataclass(slots=True)
class _Carried:
    """Facts of outputs that held no certain text yet, to travel with the next one that does."""

    prefill_stats: Any = None
    prompt_logprobs: Any = None
    prompt_token_id_logprobs: Any = None
    events: list[Any] = field(default_factory=list)


class RequestThreads:
    """The paragraph tree of one request and the engine request ids of its threads."""

    def __init__(
        self,
        request_id: str,
        parameters: ForkParameters,
        separator: Separator[TextToken] | None,
        follower: RequestFollower | None = None,
    ) -> None:
        self.request_id = request_id
        self.follower = follower
        self.tree: ParagraphTree[TextToken] = ParagraphTree()
        self.parameters = parameters
        self._stream = TreeStream(self.tree, separator)
        self._threads: dict[str, ThreadId] = {request_id: ROOT_THREAD}
        self._num_children: dict[str, int] = {}
        self._reasons: set[FinishReason] = set()
        self._stop_reason: int | str | None = None
        self._spec_decode_metrics: Any = None
        self._trace_headers: Any = None
        self._carried = _Carried()
        self._watched_ids: list[int] = []

    def feed(self, output: EngineCoreOutput) -> list[str]:
        """Add what one thread has generated; returns the engine request ids of its new children."""
        if self.follower is not None:
            self.follower.add(output)
        if output.events and output.request_id != self.request_id:
            self._carry_child_events(output.events)
        if self.tree.finished:
            return []  # An error or abort of another thread, in the same step, has ended it.
        thread = self._threads[output.request_id]
        if thread == ROOT_THREAD:
            self._carry(output)
        token_ids = output.new_token_ids
        ended = self._ends_itself(output)
        num_text = len(token_ids) - ended
        children: list[str] = []
        start = 0
        for index in range(num_text):
            token_id = token_ids[index]
            if token_id in (self.parameters.fork_id, self.parameters.child_id):
                self._append(thread, output, start, index)
                start = index + 1
                if token_id == self.parameters.fork_id:
                    children.append(self._fork(output.request_id, thread))
        self._append(thread, output, start, num_text)
        if output.finish_reason is not None:
            self._finish(thread, output, ended=ended)
        return children

    def watch(self, output: EngineCoreOutput) -> None:
        """Keep what the only thread of a request that may not fork has generated.

        Called for every token of unforked traffic: the tree is made when the request ends.
        """
        if self.follower is not None:
            self.follower.add(output)
        self._watched_ids += output.new_token_ids
        if output.finish_reason is not None:
            ended = self._ends_itself(output)
            if ended:
                del self._watched_ids[-1]
            self._end_watch(ended=ended)

    def take(self) -> list[EngineCoreOutput]:
        """Outputs under the request's own id for what has become certain; often none.

        The last one is empty and carries the finish reason: vLLM's detokenizer would otherwise
        take the last token of the text for a stop token.
        """
        tokens = self._stream.take()
        stopping = next((i for i, token in enumerate(tokens) if token.stops), None)
        if stopping is not None:
            # Not of the thread that met its stop token first: of the one that is read first.
            self._stop_reason = tokens[stopping].token_id
            return [self._output(tokens[: stopping + 1], FinishReason.STOP)]
        outputs = [self._output(tokens, None)] if tokens else []
        if self.tree.finished:
            outputs.append(self._output([], self._finish_reason()))
        return outputs

    def cut(self) -> None:
        """Close every thread that is still open: the request has ended without them."""
        if self._watched_ids:
            self._end_watch(ended=False)
        for thread, record in self.tree.threads.items():
            if not record.finished:
                self.tree.finish(thread, ended=False)

    @property
    def thread_request_ids(self) -> list[str]:
        """Engine request ids of all threads, the root's first."""
        return list(self._threads)

    def _end_watch(self, *, ended: bool) -> None:
        self.tree.append(ROOT_THREAD, (TextToken(token, None) for token in self._watched_ids))
        self.tree.finish(ROOT_THREAD, ended=ended)
        self._watched_ids = []

    def _ends_itself(self, output: EngineCoreOutput) -> bool:
        """Whether the last token is an end-of-thread token of the model."""
        if output.finish_reason != FinishReason.STOP or not output.new_token_ids:
            return False
        return output.new_token_ids[-1] in self.parameters.end_ids

    def _fork(self, request_id: str, thread: ThreadId) -> str:
        ordinal = self._num_children.get(request_id, 0)
        self._num_children[request_id] = ordinal + 1
        child_id = child_request_id(request_id, ordinal)
        child = ThreadId(f"{thread}.{ordinal}")
        self.tree.fork(thread, child)
        self._threads[child_id] = child
        if self.follower is not None:
            self.follower.forked(request_id, child_id)
        return child_id

    def _append(self, thread: ThreadId, output: EngineCoreOutput, start: int, end: int) -> None:
        if start >= end:
            return
        logprobs = output.new_logprobs
        self.tree.append(
            thread,
            (
                TextToken(
                    output.new_token_ids[index],
                    None if logprobs is None else logprobs.slice_request(index, 1),
                )
                for index in range(start, end)
            ),
        )

    def _finish(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> None:
        reason = output.finish_reason
        if reason is None:
            raise TreeError(f"thread {thread!r} has not finished: its output names no reason")
        self._reasons.add(reason)
        if reason == FinishReason.STOP and not ended and isinstance(output.stop_reason, int):
            # A stop token that the client named ends the whole answer, where it stands.
            items = self.tree.threads[thread].current_node.items
            items[-1] = items[-1]._replace(stops=True)
        elif reason in (FinishReason.REPETITION, FinishReason.ERROR):
            self._stop_reason = output.stop_reason
        self.tree.finish(thread, ended=ended)
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.cut()

    def _finish_reason(self) -> FinishReason:
        return next(reason for reason in _PRECEDENCE if reason in self._reasons)

    def _carry(self, output: EngineCoreOutput) -> None:
        carried = self._carried
        carried.prefill_stats = output.prefill_stats or carried.prefill_stats
        if output.new_prompt_logprobs_tensors is not None:
            carried.prompt_logprobs = output.new_prompt_logprobs_tensors
        if output.prompt_token_id_logprobs is not None:
            carried.prompt_token_id_logprobs = output.prompt_token_id_logprobs
        carried.events.extend(output.events or ())
        self._spec_decode_metrics = output.spec_decode_metrics or self._spec_decode_metrics
        self._trace_headers = output.trace_headers or self._trace_headers

    def _carry_child_events(self, events: list[EngineCoreEvent]) -> None:
        """Report a child's preemptions as its request's; a request is queued only once."""
        self._carried.events.extend(
            event for event in events if event.type != EngineCoreEventType.QUEUED
        )

    def _output(
        self, tokens: list[TextToken], finish_reason: FinishReason | None
    ) -> EngineCoreOutput:
        carried, self._carried = self._carried, _Carried()
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=[token.token_id for token in tokens],
            new_logprobs=_joined_logprobs(tokens),
            new_prompt_logprobs_tensors=carried.prompt_logprobs,
            prompt_token_id_logprobs=carried.prompt_token_id_logprobs,
            finish_reason=finish_reason,
            stop_reason=None if finish_reason in (None, FinishReason.LENGTH) else self._stop_reason,
            events=carried.events or None,
            prefill_stats=carried.prefill_stats,
            trace_headers=self._trace_headers,
            spec_decode_metrics=self._spec_decode_metrics if finish_reason is not None else None,
        )


def _joined_logprobs(tokens: list[TextToken]) -> LogprobsLists | None:
    """Rows of the tokens in reading order, one a token; None where none were asked for."""
    rows = [token.logprobs for token in tokens if token.logprobs is not None]
    if not rows:
        return None
    width = max(row.logprobs.shape[1] for row in rows)
    joined = [token.logprobs or _certain(token.token_id, width) for token in tokens]
    return LogprobsLists(
        np.concatenate([row.logprob_token_ids for row in joined]),
        np.concatenate([row.logprobs for row in joined]),
        np.concatenate([row.sampled_token_ranks for row in joined]),
        None,
    )


def _certain(token_id: int, width: int) -> LogprobsLists:
    """Row of a token that was put in, not sampled (a separator): probability 1."""
    return LogprobsLists(
        np.full((1, width), token_id, dtype=np.int32),
        np.zeros((1, width), dtype=np.float32),
        np.ones(1, dtype=np.int32),
        None,
    )
