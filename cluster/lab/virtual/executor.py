"""An executor that computes no model: it replays tokens and advances a virtual clock.

The scheduler, the KV-cache manager, forks and output processing of the engine are the real ones.
No real time influences the clock, so two runs are identical.

With synchronous scheduling a step takes the host's time and then the device's. With asynchronous
scheduling vLLM launches step n + 1 before it waits for step n, so the larger of the two counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from apar_core.engine.plugin import complete
from apar_core.engine.replay import script_of
from apar_core.fork_parameters import ForkParameters
from apar_core.scheduler.step_time import StepClock
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.vllm_names import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    Executor,
    FullAttentionSpec,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
)
from cluster.lab.virtual.list_answers import LIST_ANSWER_ARG, ListAnswer
from cluster.lab.virtual.shared_reads import (
    NOTHING_SHARED,
    BlockTables,
    Grouping,
    SharedReads,
    shared_reads,
)

# Token that a sequence without a replay generates; any ordinary one.
_UNSCRIPTED_TOKEN = 100
_ENOUGH_BYTES = 1 << 50
# Child threads arrive one floating-point step after their parent. This gap is far above that step,
# even on a clock of years, so that all threads of a request stay before the next request.
_ARRIVAL_GAP_S = 1e-6


class VirtualClock:
    """Seconds of virtual time since the start of a run; moved only by virtual engines."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_arrival_s = -_ARRIVAL_GAP_S

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        """Move forward to a time; a time in the past changes nothing."""
        self.now_s = max(self.now_s, time_s)

    def arrival_s(self, wanted_s: float | None = None) -> float:
        """Return the arrival time of a new request: as wanted, but after the previous request.

        The default is now. vLLM orders requests of the same arrival time by id, and children after
        all of them.
        """
        arrival_s = self.now_s if wanted_s is None else wanted_s
        self._last_arrival_s = max(arrival_s, self._last_arrival_s + _ARRIVAL_GAP_S)
        return self._last_arrival_s


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its start and end on the device, and its reads.

    blocks: KV blocks read, summed over the rows.
    distinct_blocks: the same, with each block counted once.
    shared: reads that rows would share, by the names of `VirtualDevice.compared`.
    """

    begin_s: float
    end_s: float
    batch: StepBatch
    blocks: int
    distinct_blocks: int
    shared: Mapping[str, SharedReads]


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps since the totals were last reset.

    row_limited_steps, token_limited_steps: steps in which vLLM's `max_num_seqs`, or its token
        budget per step, held back a forked thread. If they are not 0, these limits and not the
        memory decide the result.
    largest_rows, largest_tokens: rows and tokens of the largest steps.
    """

    steps: int = 0
    rows: int = 0
    computed_tokens: int = 0
    attended_tokens: int = 0
    saved_tokens: int = 0
    blocks: int = 0
    distinct_blocks: int = 0
    copied_blocks: int = 0
    device_s: float = 0.0
    host_s: float = 0.0
    largest_rows: int = 0
    largest_tokens: int = 0
    row_limited_steps: int = 0
    token_limited_steps: int = 0


@dataclass(slots=True)
class _Row:
    """A sequence in the worker's batch.

    slot: slot of its block table. generated: tokens sampled so far.
    """

    prompt_length: int
    script: list[int]
    slot: int
    generated: int = 0


class VirtualFuture(Future[ModelRunnerOutput]):
    """The output of a step; waiting for it moves the clock to the end of the step."""

    def __init__(self, clock: VirtualClock, end_s: float, output: ModelRunnerOutput) -> None:
        super().__init__()
        self._clock = clock
        self._end_s = end_s
        self.set_result(output)

    def done(self) -> bool:
        """Return whether the device has finished the step by the clock's current time."""
        return self._clock.now_s >= self._end_s

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Return the output at the end of the step."""
        self._clock.advance_to(self._end_s)
        return super().result(timeout)


@dataclass(slots=True)
class VirtualDevice:
    """Clock, costs and counts of one virtual engine; the owner sets costs and clock.

    counts_blocks: count the KV blocks that each step reads, which takes time per block. They are
        also counted if the costs need them.
    attention: family attention of the engine; None: each row reads its own blocks.
    compared: further groupings to count for the records of steps, by name.
    on_step: called for each step with its record, for traces.
    free_at_s: time at which the device has finished all launched steps.
    """

    costs: StepCosts
    clock: VirtualClock = field(default_factory=VirtualClock)
    totals: StepTotals = field(default_factory=StepTotals)
    counts_blocks: bool = False
    attention: Grouping | None = None
    compared: Mapping[str, Grouping] = field(default_factory=dict)
    on_step: Callable[[StepRecord], None] | None = None
    free_at_s: float = 0.0


class VirtualExecutor(Executor):
    """Executor of vLLM's engine core without workers; `attach` gives it a device."""

    is_async = False

    device: VirtualDevice
    _scheduler: Any

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True: outputs are futures."""
        return True

    def _init_executor(self) -> None:
        # The CPU platform turns asynchronous scheduling off, which is on for GPUs. Our plugin chose
        # the scheduler accordingly, and has to choose again.
        self.scheduler_config.async_scheduling = self.is_async
        complete(self.vllm_config)
        self._rows: dict[str, _Row] = {}
        self._tables = BlockTables()
        self._output: ModelRunnerOutput = EMPTY_MODEL_RUNNER_OUTPUT
        self._end_s = 0.0

    def attach(self, device: VirtualDevice, scheduler: Any) -> None:
        """Set the device and the scheduler, which then times steps by the device's clock."""
        self.device = device
        self._scheduler = scheduler
        scheduler.step_clock = StepClock(device.clock)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return one full-attention layer per layer of the model."""
        model, config = self.model_config, self.vllm_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(self.parallel_config),
            head_size=model.get_head_size(),
            dtype=torch.bfloat16,
        )
        layers = model.get_num_layers(config.parallel_config)
        return [{f"layer.{number}": spec for number in range(layers)}]

    def determine_available_memory(self) -> list[int]:
        """Return more than any cache takes: `num_gpu_blocks_override` sets its size."""
        return [_ENOUGH_BYTES]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return the layouts that vLLM's attention backends have."""
        return [["NHD", "HND"]]

    def set_kv_cache_layout(self, layout_name: str, *interleaving: Any) -> None:
        """Ignore the layout."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Compile nothing."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:  # type: ignore[override]
        """Answer the calls that the engine core makes to its workers."""
        return [("generate",)] if method == "get_supported_tasks" else [None]

    def check_health(self) -> None:
        """Do nothing: no worker can fail."""

    def shutdown(self) -> None:
        """Release nothing."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run a step: charge its time and sample the replayed tokens."""
        for name in scheduler_output.finished_req_ids:
            self._forget(name)
        for name in scheduler_output.preempted_req_ids or ():
            self._tables.clear(self._rows[name].slot)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        self._charge(scheduler_output, *self._take_rows(scheduler_output))
        # As with vLLM's model runners, the output comes from `sample_tokens`.
        return _done(None) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the output of the step that `execute_model` ran."""
        future = VirtualFuture(self.device.clock, self._end_s, self._output)
        return future if non_block else future.result()

    def _forget(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._tables.close(row.slot)

    def _take_rows(self, step: SchedulerOutput) -> tuple[list[str], list[int]]:
        """Update the rows and sample their tokens.

        Returns their names, and the position up to which the step computes each.
        """
        rows, scheduled = self._rows, step.num_scheduled_tokens
        tables = self._tables
        names: list[str] = []
        ends: list[int] = []
        sampled: list[list[int]] = []
        for new in step.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self._forget(new.req_id)
            slot = tables.open()
            tables.append(slot, new.block_ids[0])
            script = _script(new.sampling_params, new.prompt_token_ids)
            row = _Row(len(new.prompt_token_ids), script, slot)
            if new.prefill_token_ids is not None:
                # The V2 model runner gets a resumed request as a new one with its earlier tokens.
                row.generated = len(new.prefill_token_ids) - row.prompt_length
            rows[new.req_id] = row
            end = new.num_computed_tokens + scheduled[new.req_id]
            ends.append(end)
            names.append(new.req_id)
            sampled.append(_sample(row, end))
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            row = rows[name]
            new_blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                assert new_blocks is not None
                tables.clear(row.slot)
                tables.append(row.slot, new_blocks[0])
                # A token in flight at the preemption was dropped.
                row.generated = cached.num_output_tokens[index]
            elif new_blocks is not None:
                tables.append(row.slot, new_blocks[0])
            end = cached.num_computed_tokens[index] + scheduled[name]
            ends.append(end)
            names.append(name)
            sampled.append(_sample(row, end))
        self._output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        return names, ends

    def _charge(self, step: SchedulerOutput, names: Sequence[str], ends: Sequence[int]) -> None:
        device = self.device
        num_rows, attended = len(names), sum(ends)
        num_tokens = step.total_num_scheduled_tokens
        block_size = self.cache_config.block_size
        blocks = distinct = repeated = 0
        if device.counts_blocks or device.costs.repeated_token_s is not None:
            blocks, distinct = self._tables.count([self._rows[name].slot for name in names])
            repeated = (blocks - distinct) * block_size
        compared = self._shared(step, names, ends, device.compared)
        shared = NOTHING_SHARED
        if device.attention is not None:
            shared = self._shared(step, names, ends, {"": device.attention})[""]
        saved = shared.saved_blocks * block_size
        batch = StepBatch(
            num_rows,
            attended,
            num_tokens - num_rows,
            len(step.kv_cache_block_copies or ()),
            max(repeated - saved, 0),
            saved,
            shared.passes,
            shared.groups,
            shared.rows,
        )
        host_s, device_s = device.costs.host_s(num_rows), device.costs.device_s(batch)
        device.clock.now_s += host_s
        begin_s = max(device.clock.now_s, device.free_at_s)
        self._end_s = device.free_at_s = begin_s + device_s
        totals = device.totals
        totals.steps += 1
        totals.rows += num_rows
        totals.computed_tokens += num_tokens
        totals.attended_tokens += attended
        totals.saved_tokens += saved
        totals.copied_blocks += batch.copied_blocks
        totals.device_s += device_s
        totals.host_s += host_s
        totals.largest_rows = max(totals.largest_rows, num_rows)
        totals.largest_tokens = max(totals.largest_tokens, num_tokens)
        limits = self.scheduler_config
        scheduler = self._scheduler
        if num_rows >= limits.max_num_seqs:
            totals.row_limited_steps += self._any_child_left_out(step, scheduler.waiting)
        elif num_tokens >= limits.max_num_batched_tokens:
            requests = (*scheduler.running, *scheduler.waiting)
            totals.token_limited_steps += self._any_child_left_out(step, requests)
        totals.blocks += blocks
        totals.distinct_blocks += distinct
        if device.on_step is not None:
            device.on_step(StepRecord(begin_s, self._end_s, batch, blocks, distinct, compared))

    def _shared(
        self,
        step: SchedulerOutput,
        names: Sequence[str],
        ends: Sequence[int],
        groupings: Mapping[str, Grouping],
    ) -> dict[str, SharedReads]:
        """Count the shared reads of a step's decoding rows with each grouping."""
        if not groupings:
            return {}
        scheduled, block_size = step.num_scheduled_tokens, self.cache_config.block_size
        numbers: dict[str, int] = {}
        slots: list[int] = []
        full_blocks: list[int] = []
        families: list[int] = []
        for name, end in zip(names, ends, strict=True):
            # Rows with several tokens are prefills, which attention handles differently.
            if scheduled[name] == 1:
                slots.append(self._rows[name].slot)
                full_blocks.append((end - 1) // block_size)
                families.append(numbers.setdefault(name.partition("~")[0], len(numbers)))
        if not slots:
            return dict.fromkeys(groupings, NOTHING_SHARED)
        full, numbered = np.array(full_blocks, np.int64), np.array(families, np.int64)
        tables = self._tables.ids[slots, : int(full.max())]
        return {
            name: shared_reads(tables, full, numbered, grouping)
            for name, grouping in groupings.items()
        }

    def _any_child_left_out(self, step: SchedulerOutput, requests: Iterable[Any]) -> bool:
        """Return whether one of these requests is a forked thread that is not in the step."""
        threads, scheduled = self._scheduler.threads, step.num_scheduled_tokens
        return any(
            name not in scheduled
            and threads.group(name) is not None
            and threads.group_of_root(name) is None
            for name in (request.request_id for request in requests)
        )


class AsyncVirtualExecutor(VirtualExecutor):
    """Virtual executor with asynchronous scheduling for the V2 model runner, as on GPUs."""

    is_async = True

    def attach(self, device: VirtualDevice, scheduler: Any) -> None:
        """Set the device and the scheduler, and switch the scheduler to the V2 model runner.

        vLLM's configuration selects V1 on a CPU, because V2 needs Triton.
        """
        super().attach(device, scheduler)
        scheduler.use_v2_model_runner = True


def _sample(row: _Row, end: int) -> list[int]:
    """Return the token that a row samples when computed up to `end`; empty before its last one."""
    if end != row.prompt_length + row.generated:
        return []
    position = row.generated
    row.generated += 1
    # With asynchronous scheduling, one token is computed beyond the end of a thread.
    return [row.script[position] if position < len(row.script) else _UNSCRIPTED_TOKEN]


def _script(params: SamplingParams | None, prompt_ids: list[int]) -> list[int]:
    """Return what an engine request with this prompt generates."""
    extra_args = (None if params is None else params.extra_args) or {}
    listed = extra_args.get(LIST_ANSWER_ARG)
    if listed is None:
        return script_of(extra_args) or []
    parameters = ForkParameters.from_extra_args(extra_args)
    path = () if parameters is None else parameters.thread_path
    return ListAnswer.from_text(listed).script(path, prompt_ids)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
