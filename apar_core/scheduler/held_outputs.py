"""Hold back outputs in the engine core and send several steps' tokens of a request together.

vLLM's engine core sends a message after each step, and the API process handles each row of it:
decoding, detokenization, statistics, waking the request's task. A client that gets a chunk every
50 ms, or a whole answer, needs none of that for most steps. At a few hundred rows it takes as long
as a step of the model.

The API process decides which requests may wait (`HOLD_ARG`), because it knows what it does with
their tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from apar_core.fork_parameters import HOLD_ARG
from apar_core.vllm_names import EngineCoreOutput, EngineCoreOutputs, Request

_REQUESTS_A_STEP = 16
_MOST_STEPS = 4


def interval_under_load(least_s: float, num_requests: int) -> float:
    """Return an interval that grows with the number of requests, up to four times `least_s`.

    Few streams are smooth; many leave the server time for tokens instead of chunks.
    """
    return least_s * min(1 + num_requests // _REQUESTS_A_STEP, _MOST_STEPS)


def next_multiple(now_s: float, interval_s: float) -> float:
    """Return the first multiple of an interval after now.

    What is due at multiples of the same interval is sent together, and wakes each process on its
    way once.
    """
    return (math.floor(now_s / interval_s) + 1) * interval_s


@dataclass(slots=True, eq=False)
class _Held:
    """Outputs of one client's request, by the engine request ids of its threads."""

    client_index: int
    due_s: float = -math.inf
    thread_ids: list[str] = field(default_factory=list)
    outputs: dict[str, EngineCoreOutput] = field(default_factory=dict)


class HeldOutputs:
    """Outputs that are not sent yet.

    A request's first output, the end of each thread, forks, errors and events pass at once,
    together with all that is held of that request. So the API process sees a thread's fork token
    before its child, and nothing arrives out of order. Other tokens pass when the clock is at a
    multiple of the interval, which grows with the number of requests. Those of whole answers could
    wait longer, but then the API process would have to decode them all when the answer ends. With
    `interval_s` 0, everything passes at once.
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
        self._ended: list[str] = []

    @property
    def enabled(self) -> bool:
        """Whether outputs may be held at all."""
        return self._interval_s > 0

    def begin(self, request: Request) -> None:
        """Add a client's request, if it may wait for its outputs."""
        params = request.sampling_params
        if not self.enabled or params is None or not (params.extra_args or {}).get(HOLD_ARG):
            return
        self._requests[request.request_id] = _Held(request.client_index)
        self.join(request.request_id, request.request_id)

    def join(self, thread_id: str, root_id: str) -> None:
        """Add a thread of a request."""
        held = self._requests.get(root_id)
        if held is not None:
            held.thread_ids.append(thread_id)
            self._by_thread[thread_id] = held

    def release(self, root_id: str) -> None:
        """Let all outputs of a request pass at the end of this step."""
        held = self._requests.get(root_id)
        if held is not None:
            self._releasing[held] = None

    def end(self, root_id: str) -> None:
        """Forget a request after this step, or before the next one: all its threads have ended."""
        if root_id in self._requests:
            self._ended.append(root_id)

    def pass_on(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Replace the outputs of a step by those to send now, by the index of the client."""
        passing = {index: self._hold(message.outputs) for index, message in outputs.items()}
        now_s = self.clock()
        if now_s >= self._due_s:
            self._releasing.update((held, None) for held in self._holding if held.due_s <= now_s)
        released: dict[int, list[EngineCoreOutput]] = {}
        interval_s = interval_under_load(self._interval_s, len(self._requests))
        for held in self._releasing:
            released.setdefault(held.client_index, []).extend(held.outputs.values())
            held.outputs.clear()
            held.due_s = next_multiple(now_s, interval_s)
            self._holding.pop(held, None)
        if self._releasing:
            self._due_s = min((held.due_s for held in self._holding), default=math.inf)
            self._releasing.clear()
        for root_id in self._ended:
            self._forget(root_id)
        self._ended.clear()
        for index in outputs.keys() | released.keys():
            message = outputs.setdefault(index, EngineCoreOutputs())
            # Those that pass at once may be children, whose parents must be first.
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
            earlier = held.outputs.get(output.request_id)
            only_tokens = _has_only_tokens(output)
            if earlier is not None and only_tokens:
                # The common case, for nearly every row in nearly every step.
                earlier.new_token_ids += output.new_token_ids
                continue
            if earlier is not None:
                output.new_token_ids = earlier.new_token_ids + output.new_token_ids
            elif only_tokens:
                # The list may belong to the model runner.
                output.new_token_ids = output.new_token_ids.copy()
                self._holding[held] = None
                self._due_s = min(self._due_s, held.due_s)
            held.outputs[output.request_id] = output
            if not only_tokens:
                self._releasing[held] = None
        return passing

    def _forget(self, root_id: str) -> None:
        held = self._requests.pop(root_id, None)
        if held is None:
            return
        self._holding.pop(held, None)
        for thread_id in held.thread_ids:
            self._by_thread.pop(thread_id, None)


def _has_only_tokens(output: EngineCoreOutput) -> bool:
    """Return whether an output can be joined with those of the steps before and after it."""
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
