"""Hold back outputs in the engine core and send several steps' tokens of a request together.

vLLM's engine core sends a message after each step, and the API process handles each row of it:
decoding, detokenization, statistics, waking the request's task. A client that gets a chunk every
50 ms, or a whole answer, needs none of that for most steps.

The API process decides which requests may wait (`HOLD_ARG`), because it knows what it does with
their tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from apar_core.fork_parameters import may_be_held
from apar_core.vllm_names import EngineCoreOutput, EngineCoreOutputs, Request

_MANY_REQUESTS = 16


def interval_under_load(least_s: float, num_requests: int) -> float:
    """Return `least_s` for few requests, and twice as much for many.

    Twice the default is 0.1 s: within about this time, two events look like one to an observer
    (Card, Moran and Newell, 1983, chapter 2: 0.05 to 0.2 s), so that longer intervals would show as
    jerks. Shorter ones take time from the tokens of many requests.
    """
    return least_s if num_requests < _MANY_REQUESTS else 2 * least_s


def next_multiple(now_s: float, interval_s: float) -> float:
    """Return the first multiple of an interval after now.

    What is due at multiples of the same interval is sent together, and wakes each process on its
    way once.
    """
    return (math.floor(now_s / interval_s) + 1) * interval_s


@dataclass(slots=True, eq=False)
class _Held:
    """Outputs of one client's request, in the order in which the engine made them.

    `open` has those that further tokens of the thread are added to, by its engine request id.
    """

    client_index: int
    due_s: float = -math.inf
    thread_ids: list[str] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    open: dict[str, EngineCoreOutput] = field(default_factory=dict)


class HeldOutputs:
    """Outputs that are not sent yet.

    A request's first output, the end of each thread, forks, errors and events pass at once,
    together with all that is held of that request. So the API process sees a thread's fork token
    before its child, and nothing arrives out of order. Other tokens pass when the clock is at a
    multiple of the interval, which grows with the number of requests. Those of whole answers could
    wait longer, but then the API process would have to decode them all when the answer ends. With
    `interval_s` 0, everything passes at once.

    What is held when vLLM aborts everything, to shut down or to pause, is lost.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self.clock = clock
        # By the root's id, and by the id of each thread.
        self._requests: dict[str, _Held] = {}
        self._by_thread: dict[str, _Held] = {}
        # Requests of which something is held, and the earliest time at which some of it is due.
        self._holding: dict[_Held, None] = {}
        self._due_s = math.inf
        self._releasing: dict[_Held, None] = {}
        # By the root's id; the id may come back before the next step.
        self._ended: dict[str, _Held] = {}

    @property
    def enabled(self) -> bool:
        """Whether outputs may be held at all."""
        return self._interval_s > 0

    def begin(self, request: Request) -> None:
        """Add a client's request, if it may wait for its outputs."""
        params = request.sampling_params
        if not self.enabled or params is None or not may_be_held(params.extra_args):
            return
        if (ended := self._ended.pop(request.request_id, None)) is not None:
            self._forget(ended)
        self._requests[request.request_id] = _Held(request.client_index)
        self.join(request.request_id, request.request_id)

    def join(self, thread_id: str, root_id: str) -> None:
        """Add a thread of a request; may be called again for the same thread."""
        held = self._requests.get(root_id)
        if held is not None and self._by_thread.get(thread_id) is not held:
            held.thread_ids.append(thread_id)
            self._by_thread[thread_id] = held

    def release(self, root_id: str) -> None:
        """Let all outputs of a request pass at the end of this step."""
        held = self._requests.get(root_id)
        if held is not None:
            self._releasing[held] = None

    def release_all(self) -> None:
        """Let everything pass at the end of the next step."""
        self._releasing.update(self._holding)

    @property
    def waits_for_step(self) -> bool:
        """Whether outputs pass at the end of the next step, even if it generates nothing."""
        return bool(self._releasing)

    def end(self, root_id: str) -> None:
        """Forget a request after this step, or before the next one: all its threads have ended."""
        held = self._requests.pop(root_id, None)
        if held is not None:
            self._ended[root_id] = held

    def pass_on(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Replace the outputs of a step by those to send now, by the index of the client."""
        passing = {index: self._hold(message.outputs) for index, message in outputs.items()}
        now_s = self.clock()
        if now_s >= self._due_s:
            self._releasing.update((held, None) for held in self._holding if held.due_s <= now_s)
        released: dict[int, list[EngineCoreOutput]] = {}
        interval_s = interval_under_load(self._interval_s, len(self._requests))
        for held in self._releasing:
            released.setdefault(held.client_index, []).extend(held.outputs)
            held.outputs.clear()
            held.open.clear()
            held.due_s = next_multiple(now_s, interval_s)
            self._holding.pop(held, None)
        for held in self._ended.values():
            self._forget(held)
        if self._releasing or self._ended:
            self._due_s = min((held.due_s for held in self._holding), default=math.inf)
            self._releasing.clear()
            self._ended.clear()
        for index in outputs.keys() | released.keys():
            message = outputs.setdefault(index, EngineCoreOutputs())
            message.outputs = released.get(index, []) + passing.get(index, [])
            if not message.outputs and message.finished_requests is None:
                del outputs[index]

    def _hold(self, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Hold outputs, marking those requests that must not wait; return all others."""
        passing = []
        for output in outputs:
            held = self._by_thread.get(output.request_id)
            if held is None:
                passing.append(output)
                continue
            earlier = held.open.get(output.request_id)
            if not has_only_tokens(output):
                held.open.pop(output.request_id, None)
                # An output without tokens is a thread's second one in the same step.
                if earlier is not None and output.new_token_ids and not _has_rows(output):
                    output.new_token_ids = earlier.new_token_ids + output.new_token_ids
                    held.outputs = [output if each is earlier else each for each in held.outputs]
                else:
                    held.outputs.append(output)
                self._releasing[held] = None
            elif earlier is not None:
                # The common case, for nearly every row in nearly every step.
                earlier.new_token_ids += output.new_token_ids
            else:
                # The list may belong to the model runner.
                output.new_token_ids = output.new_token_ids.copy()
                held.open[output.request_id] = output
                held.outputs.append(output)
                self._holding[held] = None
                self._due_s = min(self._due_s, held.due_s)
        return passing

    def _forget(self, held: _Held) -> None:
        self._holding.pop(held, None)
        self._releasing.pop(held, None)
        for thread_id in held.thread_ids:
            if self._by_thread.get(thread_id) is held:
                del self._by_thread[thread_id]


def has_only_tokens(output: EngineCoreOutput) -> bool:
    """Return whether an output has token ids and nothing else, so that others can be added."""
    return (
        output.finish_reason is None
        and output.events is None
        and output.prefill_stats is None
        and output.new_logprobs is None
        and output.new_sampling_mask is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
    )


def _has_rows(output: EngineCoreOutput) -> bool:
    """Return whether an output has more than an id for each token."""
    return (
        output.new_logprobs is not None
        or output.new_sampling_mask is not None
        or output.routed_experts is not None
    )
