"""Engine cores in virtual time without vLLM's front end, for many replicas in one event loop.

A `VirtualCore` is vLLM's `EngineCore` with our scheduler and the virtual executor. It has no
tokenizer, output processor or detokenizer: requests are given as token ids, and only their first
token and their end are reported. Given the same requests, it takes the same steps as
`VirtualEngine`.

A core advances its own clock. A caller with several cores steps the one with the earliest `now_s`
that has work, and delivers the returned events at their own times:

    cores = VirtualCores(spec)
    core = cores.build()
    core.add(VirtualRequest("a", prompt_ids, scripts, max_tokens=100))
    while core.has_work:
        for event in core.step():
            ...
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.sampling_params import SamplingParams

from apar_core.engine.list_threads import ListThreads
from apar_core.engine.offline_engine import engine_core_in_this_process
from apar_core.engine.replay import Scripts, replay_args
from apar_core.engine.resume_request import completed, hand_to_scheduler
from apar_core.errors import EngineError
from apar_core.fork_parameters import EXTRA_ARG, NO_TOKEN, ForkParameters
from apar_core.formats.control_tokens import TreeTokens
from apar_core.formats.lists import ListRules
from apar_core.formats.shipped_formats import LISTS
from apar_core.journal import Journal, ThreadDelta
from apar_core.scheduler.core_state import CoreState, core_state
from apar_core.scheduler.fork_settings import ForkSettings
from apar_core.step_costs.costs import StepCosts
from apar_core.tree.thread_names import (
    ThreadPath,
    replay_key_of_path,
    thread_path,
    thread_request_id,
)
from apar_core.vllm_names import (
    EngineArgs,
    EngineCore,
    EngineCoreOutput,
    FinishReason,
    Request,
    cached_tokenizer_from_config,
    call_at_preemption,
)
from cluster.lab.virtual.engine import VirtualSpec, engine_arguments, write_model_folder
from cluster.lab.virtual.executor import StepTotals, VirtualClock, VirtualDevice
from cluster.lab.virtual.list_answers import LIST_ANSWER_ARG, ListAnswer
from cluster.lab.virtual.reader import ListReader, Reader, ScriptReader
from cluster.lab.virtual.text import checkpoint_tokens

# After more idle steps than this, nothing will ever change.
_MAX_IDLE_STEPS = 8


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """A prompt with the tokens that each thread generates, by replay key, end tokens included.

    `max_tokens` limits the text tokens of all threads together. With `listed`, the engine writes
    its lists in parallel, and there are no scripts.
    """

    request_id: str
    prompt_ids: Sequence[int]
    scripts: Scripts
    max_tokens: int
    forked: bool = True
    arrival_s: float = 0.0
    listed: ListAnswer | None = None

    def __post_init__(self) -> None:
        if "~" in self.request_id:
            raise ValueError(f"request id {self.request_id!r} contains '~', which marks threads")


@dataclass(frozen=True, slots=True)
class CoreEvent:
    """The first token of a request, or its end, when all of its threads have ended.

    cached_tokens: prompt tokens found in the prefix cache.
    generated_tokens: tokens of all threads so far, fork and end tokens included.
    text_tokens: the same without fork and end tokens.
    reader: of an end, what the reader of an ordered stream has seen, and when.
    """

    request_id: str
    time_s: float
    is_end: bool
    cached_tokens: int
    generated_tokens: int
    text_tokens: int
    reader: Reader | None


@dataclass(slots=True)
class _Live:
    """A request in the core. `generated` counts tokens by thread, including those of a journal."""

    request: VirtualRequest
    reader: Reader
    generated: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    has_begun: bool = False
    cached_tokens: int = 0


class VirtualCores:
    """Factory for cores of one specification, which share vLLM's configuration and model folder."""

    def __init__(self, spec: VirtualSpec) -> None:
        self.spec = spec
        self._folder = TemporaryDirectory(prefix="virtual-core-")
        path = write_model_folder(spec.config, Path(self._folder.name), spec.checkpoint)
        arguments = engine_arguments(spec, path)
        self.executor_class = arguments["distributed_executor_backend"]
        self.vllm_config = EngineArgs(**arguments).create_engine_config()
        self.tokens = checkpoint_tokens()
        # None: threads fork at tokens.
        self.list_rules: ListRules | None = None
        if (spec.forks or {}).get("parallel_format") == LISTS.name:
            tokenizer: Any = cached_tokenizer_from_config(self.vllm_config.model_config)
            self.list_rules = ListRules(LISTS, tokenizer)
            self.tokens = TreeTokens(NO_TOKEN, NO_TOKEN, int(tokenizer.eos_token_id))
        # vLLM freezes the heap for each core. What is still frozen at exit is reported as a leak.
        atexit.register(gc.unfreeze)

    def build(self, *, costs: StepCosts | None = None, start_s: float = 0.0) -> VirtualCore:
        """Return an idle core with an empty cache; `costs` replace those of the specification."""
        return VirtualCore(self, costs or self.spec.costs, start_s)


class VirtualCore:
    """One engine core. `device` holds its costs, clock and step totals, which may be replaced."""

    def __init__(self, cores: VirtualCores, costs: StepCosts, start_s: float = 0.0) -> None:
        spec = cores.spec
        self.spec = spec
        self.tokens = tokens = cores.tokens
        self.preemptions = 0
        self.device = VirtualDevice(costs, VirtualClock(), attention=spec.attention)
        self.device.clock.advance_to(start_s)
        # vLLM caches its environment variables when it builds an engine core. Without this, an
        # `OfflineEngine` that is built later would start a process.
        with engine_core_in_this_process():
            self._core: Any = EngineCore(cores.vllm_config, cores.executor_class, log_stats=False)
        # The configuration and the folder live as long as one of the cores.
        self._cores = cores
        self.scheduler: Any = self._core.scheduler
        self._core.model_executor.attach(self.device, self.scheduler)
        call_at_preemption(self.scheduler, self._count_preemption)
        settings = ForkSettings.model_validate(dict(spec.forks or {}))
        only_engine = () if cores.list_rules is not None else (tokens.child_id,)
        self._parameters = ForkParameters(
            fork_id=tokens.fork_id,
            seed_ids=only_engine,
            banned_ids=only_engine,
            enabled=True,
            max_threads=settings.max_threads,
            max_forks=settings.max_forks,
            end_ids=(tokens.end_id,),
            blocks=None if cores.list_rules is None else LISTS.model_dump_json(),
        )
        self._live: dict[str, _Live] = {}
        self._idle_steps = 0

    @property
    def now_s(self) -> float:
        """The time on the core's clock."""
        return self.device.clock.now_s

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; without work the clock stands still."""
        return bool(self.scheduler.has_requests() or self._core.batch_queue)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def totals(self) -> StepTotals:
        """Sums over all steps so far."""
        return self.device.totals

    @property
    def num_forks(self) -> int:
        """Forks so far, including delayed and refused ones."""
        counters = self.scheduler.admission.counters
        return int(counters.accepted + sum(counters.delayed.values()) + counters.refused)

    def state(self) -> CoreState:
        """Return the counts of a replica's load report (`core_state`)."""
        return core_state(self.scheduler)

    def add(self, request: VirtualRequest, journal: Journal = ()) -> None:
        """Queue a request; an idle core's clock moves to its arrival.

        With a journal, the core continues a request that another core has begun, as the product
        does. Raises EngineError if the request is running, does not fit or has no thread left.
        Raises it also for parallel lists if the engine writes none.
        """
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id!r} is already running")
        if len(request.prompt_ids) >= self.spec.max_model_len:
            raise EngineError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room in a context of "
                f"{self.spec.max_model_len}"
            )
        if not self.has_work:
            self.device.clock.advance_to(request.arrival_s)
        arrival_s = self.device.clock.arrival_s(request.arrival_s)
        engine_request = self._engine_request(request, arrival_s)
        live = _Live(request, self._reader(request))
        if journal:
            whole = completed(engine_request, journal, self.spec.max_model_len)
            if all(delta.finish_reason is not None for delta in whole):
                raise EngineError(f"all threads of {request.request_id!r} have ended")
            for delta in whole:
                name = thread_request_id(request.request_id, delta.path)
                live.generated[name] = len(delta.token_ids)
                if delta.finish_reason is not None:
                    live.reasons[name] = FinishReason(delta.finish_reason)
            hand_to_scheduler(engine_request, whole)
            live.has_begun = any(live.generated.values())
        self._live[request.request_id] = live
        self._idle_steps = 0
        self._core.add_request(engine_request)

    def step(self) -> list[CoreEvent]:
        """Advance the clock to the end of the next step, and return its events.

        Raises EngineError if the waiting requests can never run.
        """
        core = self._core
        outputs = None
        while outputs is None and self.has_work:
            # With async scheduling, the first call only fills the batch queue.
            outputs, has_executed = core.step_fn()
            core.post_step(has_executed)
            self._idle_steps = 0 if has_executed else self._idle_steps + 1
            if self._idle_steps > _MAX_IDLE_STEPS and self._live:
                raise EngineError(
                    f"none of {len(self.scheduler.requests)} threads fits into the KV cache"
                )
        events: list[CoreEvent] = []
        stopped: dict[str, None] = {}
        grown: dict[str, _Live] = {}
        for output in (each for client in (outputs or {}).values() for each in client.outputs):
            self._take(output, events, stopped, grown)
        for live in grown.values():
            live.reader.advance(live.generated, self.now_s)
        for request_id in stopped:
            if self.scheduler.threads.group_of_root(request_id) is None:
                events.append(self._event(self._live.pop(request_id), is_end=True))
        return events

    def journal(self, request_id: str) -> Journal:
        """Return what each thread of a request has generated, for another core to continue.

        Raises EngineError for a request whose lists are written in parallel.
        """
        live = self._live[request_id]
        if live.request.listed is not None:
            raise EngineError(
                f"{request_id!r} writes lists in parallel, so another core cannot continue it"
            )
        deltas: list[ThreadDelta] = []
        pending: list[ThreadPath] = [()]
        while pending:
            path = pending.pop()
            name = thread_request_id(request_id, path)
            script = live.request.scripts[replay_key_of_path(path)]
            token_ids = tuple(script[: live.generated.get(name, 0)])
            reason = live.reasons.get(name)
            deltas.append(ThreadDelta(path, token_ids, None if reason is None else int(reason)))
            if live.request.forked:
                num_forks = token_ids.count(self.tokens.fork_id)
                pending.extend((*path, ordinal) for ordinal in range(num_forks))
        return tuple(sorted(deltas))

    def _reader(self, request: VirtualRequest) -> Reader:
        name, tokens, rules = request.request_id, self.tokens, self._cores.list_rules
        if request.listed is None:
            fork_id = tokens.fork_id if request.forked and rules is None else None
            return ScriptReader(name, request.scripts, fork_id=fork_id, end_id=tokens.end_id)
        if rules is None:
            raise EngineError(
                f"{name!r} writes lists in parallel, and this engine has no such format"
            )
        return ListReader(
            ListThreads(
                name, self._parameters, rules, request.prompt_ids, max_tokens=request.max_tokens
            )
        )

    def _engine_request(self, request: VirtualRequest, arrival_s: float) -> Request:
        parameters = replace(self._parameters, enabled=request.forked)
        recorded: dict[str, Any] = dict(replay_args(request.scripts))
        if request.listed is not None:
            recorded = {LIST_ANSWER_ARG: request.listed.to_text()}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            detokenize=False,
            # Plain str: nothing checks here where a replay comes from.
            extra_args={
                EXTRA_ARG: parameters.to_extra_arg(),
                **{name: str(value) for name, value in recorded.items()},
            },
        )
        end_id = self.tokens.end_id
        params.update_from_generation_config({"eos_token_id": end_id}, end_id)
        return Request(
            request_id=request.request_id,
            prompt_token_ids=list(request.prompt_ids),
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival_s,
            block_hasher=self._core.request_block_hasher,
        )

    def _take(
        self,
        output: EngineCoreOutput,
        events: list[CoreEvent],
        stopped: dict[str, None],
        grown: dict[str, _Live],
    ) -> None:
        """Count a thread's new tokens; note its request, and whether the thread has ended."""
        name = output.request_id
        root_id = name.partition("~")[0]
        live = self._live.get(root_id)
        if live is None:
            return
        live.reader.take(output)
        # The end of a thread may make other text certain.
        grown[root_id] = live
        if output.new_token_ids:
            live.generated[name] = live.generated.get(name, 0) + len(output.new_token_ids)
            if not live.has_begun:
                live.has_begun = True
                if output.prefill_stats is not None:
                    live.cached_tokens = output.prefill_stats.num_cached_tokens
                events.append(self._event(live, is_end=False))
        if output.finish_reason is not None:
            live.reasons[name] = output.finish_reason
            stopped[root_id] = None

    def _event(self, live: _Live, *, is_end: bool) -> CoreEvent:
        request = live.request
        generated = sum(live.generated.values())
        if request.listed is not None:
            text_tokens = int(live.reader.times.amount)
        else:
            text_tokens = generated - self._num_hidden(live)
        return CoreEvent(
            request.request_id,
            self.now_s,
            is_end,
            live.cached_tokens,
            generated,
            text_tokens,
            live.reader if is_end else None,
        )

    def _num_hidden(self, live: _Live) -> int:
        """Return how many generated tokens are fork or end tokens."""
        request, hidden = live.request, (self.tokens.fork_id, self.tokens.end_id)
        num_hidden = 0
        for name, number in live.generated.items():
            key = replay_key_of_path(thread_path(request.request_id, name))
            script = request.scripts.get(key, ())[:number]
            num_hidden += sum(token_id in hidden for token_id in script)
        return num_hidden

    def _count_preemption(self) -> None:
        self.preemptions += 1
