"""Engines in virtual time: complete answers, no leaked block, and the same bytes in every run."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.attention.settings import FamilySettings
from apar_core.step_costs.costs import StepCosts
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from cluster.lab.virtual.executor import VirtualClock
from cluster.lab.virtual.shared_reads import Grouping, SharedReads
from tests.fakes.examples import num_examples
from tests.fakes.step_traces import FORK, Asked, RunSeen, requests, run

pytestmark = pytest.mark.engine

COSTS = StepCosts(
    "any", "predicted", "made up", ((1, 4e-3), (64, 9e-3)), 1e-6, launch_s=1e-3, host_row_s=1e-4
)
CONFIG = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
SPEC = VirtualSpec(
    CONFIG, COSTS, kv_tokens=16 * 100, max_model_len=512, max_rows=24, max_step_tokens=32
)
TREE = {
    "": [300, FORK, 301, 302, FORK, *range(303, 330)],
    "0": [*range(330, 350), FORK, *range(350, 370)],
    "0.0": [*range(370, 399)],
    "1": [*range(300, 355)],
}
MANY = [Asked(20, TREE, at_step=number // 3) for number in range(12)]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest) -> Iterator[VirtualEngine]:
    with VirtualEngine(replace(SPEC, is_async=request.param)) as engine:
        yield engine


def assert_complete(seen: RunSeen, asked: Sequence[Asked]) -> None:
    """Check every answer that was not aborted, and that no block is held."""
    for number, each in enumerate(asked):
        if each.abort_at_step is None:
            found = seen.answers[f"r{number}"]
            assert [(list(ids), reason) for ids, reason in found] == [(each.text, "stop")] * each.n
    assert seen.free_after == seen.free_before


def check_any_run(engine: VirtualEngine, asked: Sequence[Asked], kv_blocks: int) -> None:
    assert_complete(run(engine, asked, kv_blocks=kv_blocks), asked)
    assert not engine.scheduler.requests


# The longest path of a tree takes 14 blocks.
@settings(max_examples=num_examples(25))
@given(asked=requests(), kv_blocks=st.integers(16, 60))
def test_answers_are_the_scripts_in_any_memory_and_no_block_leaks(
    engine: VirtualEngine, asked: list[Asked], kv_blocks: int
) -> None:
    check_any_run(engine, asked, kv_blocks)


@pytest.mark.slow
@settings(max_examples=num_examples(1000))
@given(asked=requests(max_size=10), kv_blocks=st.integers(16, 60))
def test_answers_are_the_scripts_in_many_more_runs(
    engine: VirtualEngine, asked: list[Asked], kv_blocks: int
) -> None:
    check_any_run(engine, asked, kv_blocks)


def test_memory_that_is_short_preempts_and_changes_no_answer(engine: VirtualEngine) -> None:
    wide, short = run(engine, MANY), run(engine, MANY, kv_blocks=24)

    assert sum(len(step.preempted) for step in short.steps) > 10
    assert wide.answers == short.answers
    assert_complete(short, MANY)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[VirtualEngine, VirtualEngine]]:
    """A synchronous engine and one that schedules ahead."""
    with (
        VirtualEngine(replace(SPEC, is_async=False)) as sync,
        VirtualEngine(replace(SPEC, is_async=True)) as ahead,
    ):
        yield sync, ahead


def limited(asked: Sequence[Asked], limits: Sequence[int]) -> list[Asked]:
    return [replace(each, max_tokens=limit) for each, limit in zip(asked, limits, strict=False)]


def check_both(
    both: tuple[VirtualEngine, VirtualEngine],
    asked: list[Asked],
    kv_blocks: int,
    limits: list[int],
) -> None:
    """Compare the answers of both engines.

    The threads of an answer share its limit, and which of them uses it up is up to the steps.
    """
    asked = limited(asked, limits)

    found = [run(engine, asked, kv_blocks=kv_blocks).answers for engine in both]

    for number, each in enumerate(asked):
        if each.abort_at_step is not None:
            continue
        sync, ahead = (answers[f"r{number}"] for answers in found)
        is_cut = len(each.text) >= each.max_tokens
        if not is_cut or not each.forks:
            assert ahead == sync
        for (ids, reason), (ids_ahead, reason_ahead) in zip(sync, ahead, strict=True):
            assert reason_ahead == reason
            assert len(ids_ahead) == len(ids)
            whole = iter(each.text)
            assert all(token in whole for token in ids_ahead)


LIMITS = st.lists(st.sampled_from([1000, 1000, 30, 7]), min_size=6, max_size=6)


@settings(max_examples=num_examples(20))
@given(asked=requests(max_size=4), kv_blocks=st.integers(16, 60), limits=LIMITS)
def test_scheduling_ahead_changes_no_text(
    both: tuple[VirtualEngine, VirtualEngine],
    asked: list[Asked],
    kv_blocks: int,
    limits: list[int],
) -> None:
    check_both(both, asked, kv_blocks, limits)


@pytest.mark.slow
@settings(max_examples=num_examples(500))
@given(asked=requests(), kv_blocks=st.integers(16, 60), limits=LIMITS)
def test_scheduling_ahead_changes_no_text_in_many_more_runs(
    both: tuple[VirtualEngine, VirtualEngine],
    asked: list[Asked],
    kv_blocks: int,
    limits: list[int],
) -> None:
    check_both(both, asked, kv_blocks, limits)


def test_a_fork_is_seen_one_step_late_and_each_thread_computes_one_token_too_many(
    both: tuple[VirtualEngine, VirtualEngine],
) -> None:
    sync, ahead = (run(engine, [Asked(20, TREE)]).steps for engine in both)

    def first_steps(steps: Sequence[Any]) -> dict[str, int]:
        rows = [(name, number) for number, step in enumerate(steps) for name, *_ in step.rows]
        return {name: number for name, number in reversed(rows)}

    starts = first_steps(sync)
    assert sorted(starts) == ["r0", "r0~0", "r0~0~0", "r0~1"]
    # The lag of a grandchild adds to its parent's.
    late = {"r0": 0, "r0~0": 1, "r0~0~0": 2, "r0~1": 1}
    assert first_steps(ahead) == {name: step + late[name] for name, step in starts.items()}
    num_rows = [sum(len(step.rows) for step in steps) for steps in (sync, ahead)]
    assert num_rows[1] == num_rows[0] + len(TREE)


def test_both_model_runners_are_scheduled_alike(both: tuple[VirtualEngine, VirtualEngine]) -> None:
    """V2 gets a preempted request as a new one when it resumes."""
    _, ahead = both
    v2 = run(ahead, VARIED, kv_blocks=30)
    assert ahead.scheduler.use_v2_model_runner
    ahead.scheduler.use_v2_model_runner = False
    try:
        v1 = run(ahead, VARIED, kv_blocks=30)
    finally:
        ahead.scheduler.use_v2_model_runner = True

    assert any(step.preempted for step in v2.steps)
    assert (v1.steps, v1.answers) == (v2.steps, v2.answers)


VARIED = [
    Asked(
        20 + number,
        TREE,
        forks=number % 5 > 0,
        n=1 + number % 2,
        max_threads=2 if number % 3 == 0 else None,
        at_step=number // 2,
        abort_at_step=10 + 3 * number if number % 4 == 3 else None,
    )
    for number in range(12)
]


def record(engine: VirtualEngine) -> bytes:
    """Return all that a run of `VARIED` shows of the engine: steps, times, blocks and answers."""
    device, steps = engine.device, list[Any]()
    device.clock.now_s = device.free_at_s = 0.0
    device.totals = type(device.totals)()
    device.counts_blocks, device.on_step = True, lambda step: steps.append(asdict(step))
    try:
        seen = asdict(run(engine, VARIED, kv_blocks=30))
    finally:
        device.counts_blocks, device.on_step = False, None
    return json.dumps([seen, steps, asdict(device.totals)], indent=0).encode()


def test_a_run_repeats_to_the_byte(engine: VirtualEngine) -> None:
    assert record(engine) == record(engine)


def test_no_real_clock_has_an_influence(
    engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = record(engine)
    generator = random.Random(1)
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: generator.uniform(0, 1e10))
        monkeypatch.setattr(time, f"{name}_ns", lambda: generator.randrange(10**19))

    assert record(engine) == expected


@pytest.mark.ci
def test_another_process_with_another_hash_seed_writes_the_same_bytes(
    engine: VirtualEngine,
) -> None:
    if not engine.spec.is_async:
        pytest.skip("one process, for the asynchronous engine, is enough")
    code = (
        "import sys; from tests.unit.cluster.lab.virtual import test_engine as it\n"
        "with it.VirtualEngine(it.SPEC) as engine: sys.stdout.buffer.write(it.record(engine))"
    )

    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[5],
        env={**os.environ, "PYTHONHASHSEED": "7", "VLLM_LOGGING_LEVEL": "ERROR"},
    )

    assert other.stdout == record(engine)


def test_arrival_times_increase_while_the_clock_stands_still() -> None:
    clock = VirtualClock()
    clock.advance_to(5.0)

    first, second = clock.arrival_s(), clock.arrival_s()
    clock.advance_to(9.0)

    assert 5.0 == first < second < 5.001
    assert clock.arrival_s() == 9.0


def common_blocks(tables: Sequence[Sequence[int]]) -> int:
    """Return how many blocks all tables begin with."""
    columns = list(zip(*tables, strict=False))
    return next((n for n, each in enumerate(columns) if len(set(each)) > 1), len(columns))


def test_requests_read_together_what_the_schedulers_block_tables_have_in_common(
    engine: VirtualEngine,
) -> None:
    device, scheduler, found = engine.device, engine.scheduler, list[SharedReads]()
    expected: list[SharedReads] = []
    schedule = scheduler.schedule

    def seen(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        cached = step.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        families: dict[str, list[list[int]]] = {}
        for name, number in step.num_scheduled_tokens.items():
            table = scheduler.kv_cache_manager.get_block_ids(name)[0][: computed[name] // 16]
            if number == 1 and table:
                families.setdefault(name.partition("~")[0], []).append(table)
        groups = [(len(each), common_blocks(each)) for each in families.values() if len(each) > 1]
        read = [(rows, blocks) for rows, blocks in groups if blocks]
        saved = sum((rows - 1) * blocks for rows, blocks in read)
        if step.num_scheduled_tokens:
            each = (saved, int(bool(read)), len(read), sum(rows for rows, _ in read))
            expected.append(SharedReads(*each))
        return step

    device.compared = {"families": Grouping("request", FamilySettings(min_prefix_blocks=1))}
    device.on_step = lambda step: found.append(step.shared["families"])
    scheduler.schedule = seen
    try:
        steps = run(engine, VARIED, kv_blocks=30).steps
    finally:
        device.compared, device.on_step, scheduler.schedule = {}, None, schedule

    assert any(step.preempted for step in steps)
    assert sum(each.saved_blocks for each in found) > 100
    assert found == expected


def test_family_attention_changes_the_time_of_steps_and_nothing_else(
    engine: VirtualEngine,
) -> None:
    device = engine.device
    found = []
    for attention in (None, Grouping("request", FamilySettings(min_prefix_blocks=1))):
        device.attention, device.totals = attention, type(device.totals)()
        found.append((run(engine, VARIED, kv_blocks=30), device.totals))
    device.attention = None
    (today, before), (family, after) = found

    assert (family.steps, family.answers) == (today.steps, today.answers)
    assert before.saved_tokens == 0 < after.saved_tokens
    saved_s = COSTS.attended_token_s * after.saved_tokens
    assert after.device_s == pytest.approx(before.device_s - saved_s)


def test_requests_at_one_instant_are_served_in_order(engine: VirtualEngine) -> None:
    # "r10" sorts before "r2", and a child's arrival time follows its parent's.
    first_steps: dict[str, int] = {}
    for index, step in enumerate(run(engine, [Asked(20, TREE) for _ in range(12)]).steps):
        for name, _, _ in step.rows:
            first_steps.setdefault(name, index)

    roots = [first_steps[f"r{number}"] for number in range(12)]
    assert roots == sorted(roots)


def test_limits_that_hold_back_forked_threads_are_counted(engine: VirtualEngine) -> None:
    totals = engine.device.totals
    totals.row_limited_steps = totals.token_limited_steps = 0
    run(engine, [Asked(20, TREE)])
    assert (totals.row_limited_steps, totals.token_limited_steps) == (0, 0)

    # Beside the 14 parents, a step of 32 tokens has room for nine children of two tokens each. The
    # next one has 24 rows. Scheduled ahead, a child computes one token: 24 rows come first.
    twigs = {"": [300, FORK, *range(301, 320)], "0": [*range(330, 340)]}
    run(engine, [Asked(1, twigs) for _ in range(14)])

    assert totals.row_limited_steps > 0
    assert (totals.token_limited_steps > 0) == (not engine.spec.is_async)
    assert totals.largest_rows == 24
