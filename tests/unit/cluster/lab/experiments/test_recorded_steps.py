"""Recorded steps, timed for a device, equal a run with the device's costs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apar_core.attention import families as grouping
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import step_costs
from cluster.lab.experiments import family_attention
from cluster.lab.experiments.driver import Drive, RunPlan, drive
from cluster.lab.experiments.engine import RunConditions
from cluster.lab.experiments.family_attention import (
    FAMILY,
    REQUEST,
    RunName,
    Worker,
    do_runs,
    load_run,
    points,
)
from cluster.lab.experiments.methods import EAGER, METHODS, SEQUENTIAL
from cluster.lab.experiments.recorded_steps import RecordedSteps, device_times, timed
from cluster.lab.experiments.settings import FamilyAttentionSettings
from cluster.lab.virtual.shared_reads import Grouping

LIST = "Here are {0} tips:\n\n" + "\n".join(
    f"{i}. Tip {i}: do this, then that." for i in range(1, 5)
)
COSTS = step_costs(find_model("llama-7b"), find_gpu("h100"))
# An engine core that takes longer than the device, and a device with a small graph.
SLOW_HOST = replace(COSTS, host_row_s=2e-3, largest_graph=16)
SAMPLE_S = 0.05
# Small memory preempts.
NAMES = [
    RunName("structured", EAGER, num_blocks=64, concurrency=8),
    RunName("structured", EAGER, num_blocks=400, concurrency=3, is_closed_loop=True),
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    trace = tmp_path_factory.mktemp("trace") / "answers.jsonl"
    lines = [
        {"id": n, "category": "a", "prompt": f"Give {n} tips. " * n, "response": LIST.format(n)}
        for n in range(1, 17)
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    settings = FamilyAttentionSettings(
        trace=trace, answers=16, max_tokens=512, models=("llama-7b",), gpus=("a100-80gb",)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "_compiled", lambda: grouping.partition)
        worker = Worker(settings)
        yield worker
        worker.close()


def live(worker: Worker, name: RunName, costs: StepCosts, attention: Grouping | None) -> Drive:
    engine, workload = worker._engine, worker._workload(name.trace, name.system_tokens)
    assert engine.device is not None
    engine.device.attention = attention
    plan = RunPlan(
        RunConditions(
            num_blocks=name.num_blocks,
            max_requests=None if name.is_closed_loop else name.concurrency,
            growth_reserve_tokens=8,
        ),
        lambda index: METHODS[EAGER].build(workload.questions[index], workload.marker_id),
        len(workload.questions),
        clients=name.concurrency if name.is_closed_loop else None,
        is_closed_loop=name.is_closed_loop,
        costs=costs,
    )
    try:
        return drive(engine, plan, sample_s=SAMPLE_S)
    finally:
        engine.device.attention = None


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES, ids=["preempted", "closed loop"])
@pytest.mark.parametrize("costs", [COSTS, SLOW_HOST], ids=["device", "host"])
def test_recorded_steps_take_as_long_as_the_run_itself(
    worker: Worker, name: RunName, costs: StepCosts, tmp_path: Path
) -> None:
    worker.run(name).save(tmp_path / "steps.npz")
    steps = RecordedSteps.load(tmp_path / "steps.npz")

    for levels in (None, FAMILY, REQUEST):
        found = live(worker, name, costs, levels and Grouping(levels))
        expected = timed(steps, costs, device_times(steps, costs, levels or ""), sample_s=SAMPLE_S)

        assert found.totals is not None
        assert (found.totals.saved_tokens > 0) == (levels is not None)
        assert expected.duration_s == pytest.approx(found.duration_s, rel=1e-9)
        assert expected.whole_tokens_per_s == pytest.approx(found.whole.tokens_per_s, rel=1e-9)
        latency_s = statistics.fmean(each.latency_s for each in found.served)
        assert expected.mean_latency_s == pytest.approx(latency_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.engine
def test_thresholds_change_nothing_else_in_a_run(worker: Worker) -> None:
    plain, richer = worker.run(NAMES[0]), worker.run(NAMES[0].richer)

    for found, expected in (
        (richer.batches, plain.batches),
        (richer.outputs, plain.outputs),
        (richer.answers, plain.answers),
        *((richer.shared[name], counts) for name, counts in plain.shared.items()),
    ):
        np.testing.assert_array_equal(found, expected)
    assert len(richer.shared) > len(plain.shared)


def test_a_run_that_was_done_with_thresholds_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[RunName] = []

    class Recorded:
        def __init__(self, settings: FamilyAttentionSettings) -> None:
            pass

        def run(self, name: RunName) -> RecordedSteps:
            done.append(name)
            nothing = np.zeros((1, 5), np.int64)
            return RecordedSteps(16, nothing, {}, nothing[:, :3], nothing[:, :3])

        def close(self) -> None:
            pass

    monkeypatch.setattr(family_attention, "Worker", Recorded)
    trace = tmp_path / "answers.jsonl"
    trace.write_text("{}\n", "utf-8")

    def do(*shares: float) -> list[RunName]:
        settings = FamilyAttentionSettings(
            trace=trace, models=("llama-7b",), gpus=("a100-80gb", "h100"), kv_shares=shares,
            concurrencies=(1,), system_tokens=0,
        )  # fmt: skip
        done.clear()
        store = do_runs(settings, tmp_path, lambda *_: lambda: None, 1)
        for point in points(settings):
            for method in (SEQUENTIAL, EAGER):
                load_run(tmp_path, store, point.run(method))
        return list(done)

    # Both GPUs have the same KV cache: two methods at one share, and a closed loop.
    assert len(do(0.5)) == 4
    # Thresholds are now those of 0.9: 0.5 is known with them.
    assert [name.has_thresholds for name in do(0.5, 0.9)] == [False, True]
    # Of 0.5 and 0.9 nothing is missing, whichever has thresholds.
    assert {name.num_blocks for name in do(0.3, 0.5, 0.9)} == {2031}
    assert do(0.5, 0.9) == []


def test_a_step_that_saves_too_little_is_not_grouped() -> None:
    steps = RecordedSteps(
        block_size=16,
        batches=np.array([[4, 4, 400, 0, 0], [4, 4, 400, 0, 0]]),
        shared={"any": np.array([[10, 1, 1, 3], [9, 1, 1, 3]])},
        outputs=np.array([[2, 8, 0]]),
        answers=np.array([[0, 2, 8]]),
    )

    today, always, often, half = (
        device_times(steps, COSTS, *arguments, **options)
        for arguments, options in (
            ((), {}),
            (("any",), {}),
            (("any",), {"min_saved_blocks": 10}),
            (("any",), {"saved_share": 0.5}),
        )
    )

    cost_s = COSTS.group_pass_s + COSTS.group_s + 3 * COSTS.grouped_row_s
    read_s = 16 * COSTS.attended_token_s
    assert always - today == pytest.approx([cost_s - 10 * read_s, cost_s - 9 * read_s])
    assert often - today == pytest.approx([cost_s - 10 * read_s, 0])
    assert half - today == pytest.approx([cost_s - 5 * read_s, cost_s - 4.5 * read_s])
