"""Steps of a virtual run, recorded once and timed for any device and any grouping of rows.

vLLM schedules by counts of rows, tokens and free blocks. So if all requests arrive at the start, or
each at the end of another one, the duration of a step does not change any later step. A run is
recorded with steps of one second each, so that the virtual clock counts finished steps. `timed`
then applies the durations of a device. The result equals a run with the device's costs (tested).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apar_core.step_costs.costs import StepCosts
from cluster.lab.experiments.samples import Sample, Sampler, steady

if TYPE_CHECKING:
    from cluster.lab.experiments.driver import Drive
    from cluster.lab.virtual.executor import StepRecord, VirtualDevice
    from cluster.lab.virtual.shared_reads import Grouping

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

UNIT_COSTS = StepCosts("one second a step", "predicted", "none", ((1, 1.0), (1 << 30, 1.0)), 0.0)
ROW_BY_ROW = ""
"""Name of the grouping that groups no rows."""
_ARRAYS, _SHARED = ("batches", "outputs", "answers"), "shared "


@dataclass(frozen=True)
class RecordedSteps:
    """A run by its steps.

    block_size: tokens of a KV block.
    batches: [steps, 5]; rows, tokens, attended tokens, copied blocks, and the number of steps
        finished when the step was launched.
    shared: by grouping, [steps, 4]; saved blocks, passes, groups, grouped rows.
    outputs: [outputs, 3]; finished steps when the engine returned, new text tokens, whether a
        request was waiting.
    answers: [answers, 3]; finished steps at arrival and at the end, and text tokens.
    """

    block_size: int
    batches: Ints
    shared: Mapping[str, Ints]
    outputs: Ints
    answers: Ints

    def save(self, path: Path) -> None:
        """Write the steps to a file of numpy arrays."""
        own: dict[str, Any] = {name: getattr(self, name).astype(np.int32) for name in _ARRAYS}
        shared: dict[str, Any] = {
            f"{_SHARED}{name}": each.astype(np.int32) for name, each in self.shared.items()
        }
        np.savez_compressed(path, block_size=self.block_size, **own, **shared)

    @classmethod
    def load(cls, path: Path) -> RecordedSteps:
        """Read a file written by `save`."""
        with np.load(path) as file:
            arrays = {name: file[name].astype(np.int64) for name in file.files}
        own = {name: arrays[name] for name in _ARRAYS}
        shared = {
            name.removeprefix(_SHARED): each
            for name, each in arrays.items()
            if name.startswith(_SHARED)
        }
        return cls(int(arrays["block_size"]), shared=shared, **own)


@dataclass
class StepRecorder:
    """Records the steps of one run; create it before the run, whose costs are `UNIT_COSTS`."""

    device: VirtualDevice
    block_size: int
    groupings: Mapping[str, Grouping]
    _batches: list[tuple[int, ...]] = field(default_factory=list)
    _shared: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device.compared = self.groupings
        self.device.on_step = self._note
        self._shared = {name: [] for name in self.groupings}

    def steps(self, found: Drive) -> RecordedSteps:
        """Return the steps of the run after its end, and stop recording."""
        self.device.compared, self.device.on_step = {}, None
        outputs = [_output(each, before) for before, each in _pairs(found.samples)]
        answers = [
            (each.arrival_s, each.arrival_s + each.latency_s, each.text_tokens)
            for each in found.served
        ]
        # Steps after the last output only end the run.
        last = int(outputs[-1][0])
        return RecordedSteps(
            self.block_size,
            np.array(self._batches[:last], np.int64),
            {name: np.array(each[:last], np.int64) for name, each in self._shared.items()},
            np.array(outputs, np.int64),
            np.array(answers, np.int64),
        )

    def _note(self, record: StepRecord) -> None:
        batch = record.batch
        finished = round(self.device.clock.now_s)
        self._batches.append(
            (batch.rows, batch.tokens, batch.attended_tokens, batch.copied_blocks, finished)
        )
        for name, each in record.shared.items():
            self._shared[name].append((each.saved_blocks, each.passes, each.groups, each.rows))


def _pairs(samples: Sequence[Sample]) -> Any:
    return zip([None, *samples], samples, strict=False)


def _output(sample: Sample, before: Sample | None) -> tuple[int, int, int]:
    since_s = sample.at_s - (0.0 if before is None else before.at_s)
    return round(sample.at_s), round(sample.tokens_per_s * since_s), int(sample.has_pending)


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of a run on a device.

    throughput: text tokens per second in the `kept_samples` steady-state samples; None without any.
    """

    duration_s: float
    whole_tokens_per_s: float
    throughput: float | None
    kept_samples: int
    mean_latency_s: float


def device_times(
    steps: RecordedSteps,
    costs: StepCosts,
    grouping: str = ROW_BY_ROW,
    *,
    saved_share: float = 1.0,
    min_saved_blocks: int = 0,
) -> Floats:
    """Return the seconds of each step on the device.

    saved_share: share of the time of the saved reads that a kernel really saves. Steps that save
    fewer than `min_saved_blocks` are not grouped. Raises ValueError for costs with a separate time
    for repeated tokens.
    """
    if costs.repeated_token_s is not None:
        raise ValueError(f"{costs.name}: repeated tokens are not recorded")
    rows, tokens, attended, copied, _ = steps.batches.T
    known, seconds_of = np.unique(tokens, return_inverse=True)
    matrix_s = np.array([costs.matrix_time_s(int(number)) for number in known])[seconds_of]
    is_captured = (
        np.ones(len(tokens), bool) if costs.largest_graph is None else tokens <= costs.largest_graph
    )
    seconds: Floats = (
        np.where(is_captured, costs.launch_s, costs.eager_launch_s)
        + matrix_s
        + costs.row_s * rows
        + costs.attended_token_s * attended
        + costs.copied_block_s * copied
    )
    if grouping == ROW_BY_ROW:
        return seconds
    saved, passes, groups, grouped = steps.shared[grouping].T
    change_s = (
        costs.group_pass_s * passes
        + costs.group_s * groups
        + costs.grouped_row_s * grouped
        - saved_share * costs.attended_token_s * steps.block_size * saved
    )
    is_grouped = (passes > 0) & (saved >= min_saved_blocks)
    seconds += np.where(is_grouped, change_s, 0.0)
    return seconds


def finish_times(steps: RecordedSteps, costs: StepCosts, device_s: Floats) -> Floats:
    """Return the time at which each number of steps, from 0 on, was finished.

    With asynchronous scheduling, the engine core's time overlaps with that of the device.
    """
    host_s = (costs.host_base_s + costs.host_row_s * steps.batches[:, 0]).tolist()
    launched_after = steps.batches[:, 4].tolist()
    times = [0.0]
    ends: list[float] = []
    now = free = 0.0
    for after, host, device in zip(launched_after, host_s, device_s.tolist(), strict=True):
        while len(times) <= after:
            now = max(now, ends[len(times) - 1])
            times.append(now)
        now += host
        free = max(now, free) + device
        ends.append(free)
    for end in ends[len(times) - 1 :]:
        now = max(now, end)
        times.append(now)
    return np.array(times)


def timed(
    steps: RecordedSteps, costs: StepCosts, device_s: Floats, *, sample_s: float = 3.0
) -> Timed:
    """Return the times of a run with these step durations."""
    times = finish_times(steps, costs, device_s)
    duration_s = float(times[steps.outputs[-1, 0]])
    samples = _samples(steps, times, sample_s)
    kept = steady(samples)
    arrival, end, _ = steps.answers.T
    return Timed(
        duration_s=duration_s,
        whole_tokens_per_s=float(steps.outputs[:, 1].sum()) / duration_s,
        throughput=statistics.fmean(each.tokens_per_s for each in kept) if kept else None,
        kept_samples=len(kept),
        mean_latency_s=float((times[end] - times[arrival]).mean()),
    )


def _samples(steps: RecordedSteps, times: Floats, sample_s: float) -> list[Sample]:
    state = [0.0, False]
    sampler = Sampler(sample_s, lambda: float(state[0]), lambda: bool(state[1]))
    for finished, tokens, has_pending in steps.outputs.tolist():
        state[:] = times[finished], has_pending
        sampler.add_step(tokens=tokens, kv_tokens=0, rows=0)
    return sampler.samples
