"""Join the outputs of a request's threads into its paragraph tree, and read it as one output.

Runs in the API process. Input: the engine's outputs of each thread. Output: one output per request
with the tokens whose position in the restored text is certain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from apar_core.engine.request_follower import RequestFollower
from apar_core.engine.thread_tags import ThreadTags
from apar_core.errors import TreeError
from apar_core.fork_parameters import ForkParameters
from apar_core.scheduler.held_outputs import has_only_tokens
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import Separator, TreeStream
from apar_core.tree.statistics import TreeStatistics, tree_statistics, unforked_statistics
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_request_id, child_thread
from apar_core.vllm_names import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    LogprobsLists,
    SamplingMaskLists,
    copy_error,
)

# Finish reason of a request whose threads end with different ones: the first in this order.
_PRECEDENCE = (
    FinishReason.ERROR,
    FinishReason.ABORT,
    FinishReason.LENGTH,
    FinishReason.REPETITION,
    FinishReason.STOP,
)


class TextToken(NamedTuple):
    """One token of the text; most have nothing but an id and are shared: see `plain_token`.

    logprobs: the token's row of log-probabilities, if the request asked for them.
    stops: whether it is a stop token of the client.
    sampling_mask: the tokens it was sampled from, if the engine returns them.
    """

    token_id: int
    logprobs: LogprobsLists | None
    stops: bool = False
    sampling_mask: SamplingMaskLists | None = None


@cache
def plain_token(token_id: int) -> TextToken:
    """Return the token with this id and nothing else; one object serves all trees."""
    return TextToken(token_id, None)


@dataclass(slots=True)
class _Carried:
    """Fields of outputs without certain text, kept for the next output with text."""

    prefill_stats: Any = None
    prompt_logprobs: Any = None
    prompt_token_id_logprobs: Any = None
    num_nans_in_logits: int = 0
    events: list[Any] = field(default_factory=list)


_NOTHING_CARRIED = _Carried()


def _is_one_token(output: EngineCoreOutput) -> bool:
    """Return whether an output is one token id and nothing else."""
    return len(output.new_token_ids) == 1 and has_only_tokens(output)


def _ended_itself(output: EngineCoreOutput, parameters: ForkParameters) -> bool:
    stopped = output.finish_reason == FinishReason.STOP
    return parameters.ended_itself(output.new_token_ids, stopped=stopped)


class UnforkedThread:
    """The only thread of a request that may not fork; its outputs are passed on unchanged.

    Stores token ids for the statistics, and does no work per token.
    """

    def __init__(self, parameters: ForkParameters, follower: RequestFollower | None = None) -> None:
        self.parameters = parameters
        self.follower = follower
        self._token_ids: list[int] = []
        self._ended = False

    def watch(self, output: EngineCoreOutput) -> None:
        """Add an output; a streaming-input session finishes once for each part of its input."""
        if self.follower is not None:
            self.follower.add(output)
        self._token_ids += output.new_token_ids
        # Most outputs end nothing.
        self._ended = output.finish_reason is not None and _ended_itself(output, self.parameters)
        if self._ended:
            del self._token_ids[-1]
        if self.follower is not None:
            self.follower.certain(len(output.new_token_ids) - self._ended)

    @property
    def tree(self) -> ParagraphTree[TextToken]:
        """The answer as a finished tree with one paragraph."""
        tree: ParagraphTree[TextToken] = ParagraphTree()
        tree.append(ROOT_THREAD, map(plain_token, self._token_ids))
        tree.finish(ROOT_THREAD, ended=self._ended)
        return tree

    def statistics(self, num_prompt_tokens: int) -> TreeStatistics:
        """Return the statistics of a single thread."""
        return unforked_statistics(len(self._token_ids), num_prompt_tokens, ended=self._ended)


class RequestThreads:
    """Paragraph tree of one request, fed by its threads and read as one output.

    `num_logprobs` is the request's number of alternatives per token; -1 for all.
    """

    def __init__(
        self,
        request_id: str,
        parameters: ForkParameters,
        separator: Separator[TextToken] | None,
        follower: RequestFollower | None = None,
        *,
        num_logprobs: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.follower = follower
        self._num_logprobs = num_logprobs
        self.tree: ParagraphTree[TextToken] = ParagraphTree(
            seed_tokens=len(parameters.seed_ids), cut_tokens=parameters.cut_tokens
        )
        self.parameters = parameters
        self._stream = TreeStream(self.tree, separator)
        self._threads: dict[str, ThreadId] = {request_id: ROOT_THREAD}
        self._control_ids: Container[int] = parameters.control_ids
        self._replacement = [plain_token(token_id) for token_id in parameters.replacement_ids]
        self._reasons: set[FinishReason] = set()
        self._stop_reason: int | str | None = None
        # The root's last output, with the fields that vLLM reports at a request's end.
        self._root_end: EngineCoreOutput | None = None
        self._trace_headers: Any = None
        # The output of the thread that failed.
        self._failure: EngineCoreOutput | None = None
        self._carried: _Carried | None = None
        # Whether any token has more than an id.
        self._has_details = False
        self.tags: ThreadTags | None = None

    def tag(self, tags: ThreadTags) -> None:
        """Let `tags` read the threads for a tagged stream."""
        self.tags, self._stream.pieces = tags, tags.pieces

    def feed(self, output: EngineCoreOutput) -> Sequence[str]:
        """Add one thread's output; return the engine request ids of its new children."""
        if self.follower is not None:
            self.follower.add(output)
        if _is_one_token(output) and not self.tree.finished:
            # The common case, for nearly every row in nearly every step.
            (token_id,) = output.new_token_ids
            if token_id not in self._control_ids:
                self.tree.append(self._threads[output.request_id], (plain_token(token_id),))
                return ()
        if output.events and output.request_id != self.request_id:
            self._carry_child_events(output.events)
        if self.tree.finished:
            return []  # Another thread's error or abort in the same step has ended the request.
        thread = self._threads[output.request_id]
        if thread == ROOT_THREAD:
            self._carry(output)
        if output.num_nans_in_logits:
            carried = self._carrying()
            carried.num_nans_in_logits = max(carried.num_nans_in_logits, output.num_nans_in_logits)
        ended = _ended_itself(output, self.parameters)
        children = self._feed_tokens(thread, output, ended=ended)
        if output.finish_reason is not None:
            self._finish(thread, output, ended=ended)
        return children

    def _is_discarded(self, output: EngineCoreOutput) -> bool:
        """Count an output of a thread that the scheduler has not cancelled yet."""
        if not self.tree.threads[self._threads[output.request_id]].discarded:
            return False
        if self.follower is not None:
            self.follower.add(output)
        ended = _ended_itself(output, self.parameters)
        self.tree.discarded_tokens += len(output.new_token_ids) - ended
        return True

    def _feed_tokens(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> list[str]:
        """Add the tokens of one output; return the engine request ids of its new children."""
        token_ids = output.new_token_ids
        num_text = len(token_ids) - ended
        children: list[str] = []
        start = 0
        for index in range(num_text):
            token_id = token_ids[index]
            if self.parameters.is_control(token_id):
                self._append(thread, output, start, index)
                start = index + 1
                if token_id == self.parameters.fork_id:
                    children.append(self._fork(output.request_id, thread))
        self._append(thread, output, start, num_text)
        return children

    def take(self) -> list[EngineCoreOutput]:
        """Return outputs under the request's own id with the text that became certain.

        The last one has no token, only the finish reason: vLLM's detokenizer would otherwise take
        the last token of the text for a stop token.
        """
        if self.tags is not None:
            self.tags.read()
        tokens = self._stream.take()
        stopping = next((i for i, token in enumerate(tokens) if token.stops), None)
        if stopping is not None:
            # The first stop token in reading order, not in time.
            self._stop_reason = tokens[stopping].token_id
            return [self._output(tokens[: stopping + 1], FinishReason.STOP)]
        outputs = [self._output(tokens, None)] if tokens else []
        if self.tree.finished:
            outputs.append(self._output([], self._finish_reason()))
        return outputs

    def cut(self) -> None:
        """Close every open thread, because the request has ended without them."""
        for thread, record in self.tree.threads.items():
            if not record.finished:
                self.tree.finish(thread, ended=False)

    def statistics(self, num_prompt_tokens: int) -> TreeStatistics:
        """Return what forking saved."""
        return tree_statistics(self.tree, num_prompt_tokens)

    def forked_at(self, child: ThreadId) -> int:
        """Return how many of its parent's generated tokens a child has read."""
        return self.parameters.num_inherited(self.tree.threads[child].fork_index)

    @property
    def thread_request_ids(self) -> list[str]:
        """Engine request ids of all threads, root first."""
        return list(self._threads)

    @property
    def unfinished(self) -> list[str]:
        """Engine request ids of the threads that have not ended, children before their parents."""
        records = self.tree.threads
        return [each for each, thread in self._threads.items() if not records[thread].finished][
            ::-1
        ]

    def _fork(self, request_id: str, thread: ThreadId) -> str:
        ordinal = len(self.tree.threads[thread].children)
        child_id = child_request_id(request_id, ordinal)
        child = child_thread(thread, ordinal)
        self.tree.fork(thread, child, lead=self._replacement)
        self._threads[child_id] = child
        if self.follower is not None:
            self.follower.forked(request_id, child_id)
        return child_id

    def _append(self, thread: ThreadId, output: EngineCoreOutput, start: int, end: int) -> None:
        if start < end:
            self.tree.append(thread, self._text_tokens(output, start, end))

    def _text_tokens(self, output: EngineCoreOutput, start: int, end: int) -> Iterable[TextToken]:
        """Return tokens of an output with what the request asked for of each."""
        logprobs, mask = output.new_logprobs, output.new_sampling_mask
        if logprobs is None and mask is None:
            return map(plain_token, output.new_token_ids[start:end])
        self._has_details = True
        return (
            TextToken(
                output.new_token_ids[index],
                None if logprobs is None else logprobs.slice_request(index, 1),
                sampling_mask=None if mask is None else _mask_of_token(mask, index),
            )
            for index in range(start, end)
        )

    def _finish(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> None:
        reason = output.finish_reason
        if reason is None:
            raise TreeError(f"thread {thread!r} has not finished: its output names no reason")
        self._reasons.add(reason)
        if reason == FinishReason.STOP and not ended and isinstance(output.stop_reason, int):
            # A stop token of the client ends the whole answer at its position.
            items = self.tree.threads[thread].current_node.items
            items[-1] = items[-1]._replace(stops=True)
        elif reason in (FinishReason.REPETITION, FinishReason.ERROR):
            self._stop_reason = output.stop_reason
        if reason == FinishReason.ERROR:
            self._failure = output
        if self.tags is not None:
            self.tags.finished(thread, str(reason))
        self.tree.finish(thread, ended=ended)
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.cut()

    def _finish_reason(self) -> FinishReason:
        return next(reason for reason in _PRECEDENCE if reason in self._reasons)

    def _carrying(self) -> _Carried:
        if self._carried is None:
            self._carried = _Carried()
        return self._carried

    def _carry(self, output: EngineCoreOutput) -> None:
        carried = self._carrying()
        carried.prefill_stats = output.prefill_stats or carried.prefill_stats
        if output.new_prompt_logprobs_tensors is not None:
            carried.prompt_logprobs = output.new_prompt_logprobs_tensors
        if output.prompt_token_id_logprobs is not None:
            carried.prompt_token_id_logprobs = output.prompt_token_id_logprobs
        carried.events.extend(output.events or ())
        if output.finish_reason is not None:
            self._root_end = output
        self._trace_headers = output.trace_headers or self._trace_headers

    def _carry_child_events(self, events: list[EngineCoreEvent]) -> None:
        """Report a child's preemptions as its request's, but not its queueing."""
        self._carrying().events.extend(
            event for event in events if event.type != EngineCoreEventType.QUEUED
        )

    def _output(
        self, tokens: list[TextToken], finish_reason: FinishReason | None
    ) -> EngineCoreOutput:
        carried, self._carried = self._carried or _NOTHING_CARRIED, None
        output = EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=[token.token_id for token in tokens],
            new_logprobs=(
                _joined_logprobs(tokens, self._num_logprobs) if self._has_details else None
            ),
            new_sampling_mask=_joined_masks(tokens) if self._has_details else None,
            new_prompt_logprobs_tensors=carried.prompt_logprobs,
            prompt_token_id_logprobs=carried.prompt_token_id_logprobs,
            finish_reason=finish_reason,
            stop_reason=None if finish_reason in (None, FinishReason.LENGTH) else self._stop_reason,
            events=carried.events or None,
            prefill_stats=carried.prefill_stats,
            trace_headers=self._trace_headers,
            num_nans_in_logits=carried.num_nans_in_logits,
        )
        if finish_reason is not None and self._root_end is not None:
            # vLLM reads these fields from the last output only.
            output.kv_transfer_params = self._root_end.kv_transfer_params
            output.ec_transfer_params = self._root_end.ec_transfer_params
            output.mm_cache_miss_hashes = self._root_end.mm_cache_miss_hashes
            output.spec_decode_metrics = self._root_end.spec_decode_metrics
        if finish_reason is not None and self._failure is not None:
            copy_error(self._failure, output)
        return output


def watch_unforked(tags: ThreadTags, output: EngineCoreOutput) -> None:
    """Add an output to the tags of a request that may not fork."""
    token_ids, reason = output.new_token_ids, output.finish_reason
    ended = reason == FinishReason.STOP and output.stop_reason is None
    num_text = len(token_ids) - ended
    tags.tree.append(ROOT_THREAD, map(plain_token, token_ids[:num_text]))
    # vLLM's detokenizer may decode the end token too.
    tags.pieces.append((tags.tree.root, len(token_ids)))
    if reason is not None:
        tags.finished(ROOT_THREAD, str(reason))
        tags.tree.finish(ROOT_THREAD, ended=ended)
    tags.read()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Statistics and trees of one finished request; several trees with `n` or several prompts.

    `trees` is empty unless trees are kept.
    """

    statistics: TreeStatistics
    trees: tuple[ParagraphTree[TextToken], ...]

    def __add__(self, other: RequestRecord) -> RequestRecord:
        return RequestRecord(self.statistics + other.statistics, self.trees + other.trees)


class RequestRecords:
    """Records of the last finished requests, by the client's request id.

    A record that nobody takes is dropped after `capacity` newer ones. Trees hold every token of an
    answer, so they are kept only if `keep_trees` is set.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.keep_trees = False
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(
        self,
        request_id: str,
        threads: RequestThreads | UnforkedThread,
        num_prompt_tokens: int,
    ) -> TreeStatistics:
        """Add a finished tree to its request's record; return the tree's statistics."""
        statistics = threads.statistics(num_prompt_tokens)
        record = RequestRecord(statistics, (threads.tree,) if self.keep_trees else ())
        known = self._records.pop(request_id, None)
        self._records[request_id] = record if known is None else known + record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)
        return statistics

    def take(self, request_id: str) -> RequestRecord | None:
        """Remove and return the record of a request; None if there is none.

        vLLM runs a completion with several prompts as requests `ID-0`, `ID-1`, ...: their records
        are joined.
        """
        record = self._records.pop(request_id, None)
        index = 0
        while (part := self._records.pop(f"{request_id}-{index}", None)) is not None:
            record = part if record is None else record + part
            index += 1
        return record


def _joined_logprobs(tokens: list[TextToken], num_logprobs: int | None) -> LogprobsLists | None:
    """Return the rows of the tokens in reading order; None if the request asked for none.

    The engine makes all rows of a step as wide as its widest request needs. Each row gets the width
    that this request asked for.
    """
    rows = [token.logprobs for token in tokens if token.logprobs is not None]
    if not rows:
        return None
    if num_logprobs is None or num_logprobs < 0:
        width = max(row.logprobs.shape[1] for row in rows)
    else:
        width = num_logprobs + 1
    joined = [
        _certain(token.token_id, width) if token.logprobs is None else _fit(token.logprobs, width)
        for token in tokens
    ]
    return LogprobsLists(
        np.concatenate([row.logprob_token_ids for row in joined]),
        np.concatenate([row.logprobs for row in joined]),
        np.concatenate([row.sampled_token_ranks for row in joined]),
        None,
    )


def _fit(row: LogprobsLists, width: int) -> LogprobsLists:
    """Cut a row to the width, or repeat its last entry if it is too narrow.

    A row is too narrow if another request of the step has `logprob_token_ids`: the V1 sampler then
    gathers those for every row. vLLM reports a repeated entry once.
    """
    missing = width - row.logprobs.shape[1]
    if missing == 0:
        return row
    if missing < 0:
        return row._replace(
            logprob_token_ids=row.logprob_token_ids[:, :width], logprobs=row.logprobs[:, :width]
        )
    behind = ((0, 0), (0, missing))
    return row._replace(
        logprob_token_ids=np.pad(row.logprob_token_ids, behind, mode="edge"),
        logprobs=np.pad(row.logprobs, behind, mode="edge"),
    )


def _certain(token_id: int, width: int) -> LogprobsLists:
    """Return the row of an inserted token (a separator): probability 1."""
    return LogprobsLists(
        np.full((1, width), token_id, dtype=np.int32),
        np.zeros((1, width), dtype=np.float32),
        np.ones(1, dtype=np.int32),
        None,
    )


def _mask_of_token(mask: SamplingMaskLists, index: int) -> SamplingMaskLists:
    """Return the mask of one token of an output; a single token's mask has no offsets."""
    return mask if mask.offsets is None else mask.slice_request(index, 1)


def _joined_masks(tokens: list[TextToken]) -> SamplingMaskLists | None:
    """Return the sampling masks in reading order; None if the engine returns none."""
    if all(token.sampling_mask is None for token in tokens):
        return None
    # The mask of an inserted token holds only that token.
    kept = [
        np.array([token.token_id], dtype=np.int32)
        if token.sampling_mask is None
        else token.sampling_mask.token_ids
        for token in tokens
    ]
    return SamplingMaskLists(np.concatenate(kept), np.cumsum([0, *map(len, kept)]))
