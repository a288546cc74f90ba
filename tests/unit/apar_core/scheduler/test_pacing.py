from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from apar_core.scheduler.core_state import core_state
from apar_core.scheduler.pacing import Prompt, chunk_tokens, first_thread
from tests.fakes.fork_policies import MostTokens
from tests.fakes.scripted_engine import (
    END,
    FIRST_TEXT_ID,
    FORK,
    EngineShape,
    Script,
    ScriptedEngine,
    fork_parameters,
)
from tests.unit.apar_core.scheduler.test_any_schedule import any_schedule, scripts


def paced_engine(
    model_dir: Path,
    policy: MostTokens,
    *,
    max_num_seqs: int = 32,
    run_ahead: bool = False,
    memory_s: float = math.inf,
) -> ScriptedEngine:
    shape = EngineShape(
        num_blocks=500,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        run_ahead=run_ahead,
    )
    engine = ScriptedEngine(shape, model_dir)
    engine.scheduler.admission.policy = policy
    # By default, nothing ever counts as an overload.
    engine.scheduler.pacing.memory_s = memory_s
    return engine


@any_schedule
@given(wanted=scripts(), max_num_seqs=st.sampled_from([1, 2, 8]))
def test_with_time_for_one_row_a_request_is_written_in_reading_order(
    model_dir: Path, wanted: tuple[Script, list[int]], max_num_seqs: int
) -> None:
    script, text = wanted
    engine = paced_engine(model_dir, MostTokens(1), max_num_seqs=max_num_seqs)
    engine.add("r", [7] * 5, script)

    written: list[int] = []
    while engine.step():
        tokens = [
            token
            for output in engine.take_messages()
            for each in output.outputs
            for token in each.new_token_ids
        ]
        written += [token for token in tokens if token >= FIRST_TEXT_ID]
        if max_num_seqs == 8:
            # A child needs a place beside those that its ancestors keep.
            assert written == text[: len(written)]

    assert engine.texts["r"] == text
    assert sorted(written) == sorted(text)
    engine.assert_nothing_is_left()


@any_schedule
@given(
    wanted=st.lists(scripts(), min_size=1, max_size=5),
    most=st.integers(1, 12),
    run_ahead=st.booleans(),
)
def test_threads_rest_beyond_the_time_but_no_reader_waits(
    model_dir: Path, wanted: list[tuple[Script, list[int]]], most: int, run_ahead: bool
) -> None:
    engine = paced_engine(model_dir, MostTokens(most), run_ahead=run_ahead)
    for number, (script, _) in enumerate(wanted):
        engine.add(f"r{number}", [1000 + number] * 5, script, arrival_time=float(number))
    scheduler = engine.scheduler
    schedule = scheduler.schedule

    def checked(throttle_prefills: bool = False) -> SchedulerOutput:
        running = [each.request_id for each in scheduler.running]
        first = {group.root_id: first_thread(group) for group in scheduler.threads.groups}
        step = schedule(throttle_prefills)
        rows = [name for name in running if name in step.num_scheduled_tokens]
        # A resting thread keeps its place.
        assert [each.request_id for each in scheduler.running if each.request_id in running] == [
            name for name in running if name in scheduler.requests
        ]
        readers = {name for name in first.values() if name in running}
        assert run_ahead or readers <= set(rows)
        limit = scheduler.pacing.limit_s or most
        assert len(rows) <= max(limit, len(first))
        return step

    scheduler.schedule = checked  # type: ignore[method-assign]
    engine.run()

    for number, (_, text) in enumerate(wanted):
        assert engine.texts[f"r{number}"] == text
    engine.assert_nothing_is_left()


def test_all_threads_run_where_first_threads_leave_no_time(model_dir: Path) -> None:
    # Averages over the last step.
    engine = paced_engine(model_dir, MostTokens(3), memory_s=1e-9)
    scheduler = engine.scheduler
    script = {"": [20, FORK, *range(30, 60), END], "0": [*range(100, 115), END]}
    for number in range(4):
        engine.add(f"r{number}", [7] * 5, script, arrival_time=float(number))
    while len(scheduler.running) < 8:
        engine.step()

    for _ in range(3):
        engine.step()
        assert not scheduler.step_plan.resting
    assert scheduler.pacing.limit_s == math.inf
    engine.run()

    # One request, whose first thread leaves time for two more, is no overload.
    details = {str(number): script["0"] for number in range(6)}
    engine.add("r", [7] * 5, {"": [20, *[FORK] * 6, *range(30, 60), END], **details})
    while len(scheduler.running) < 3:
        engine.step()
    assert scheduler.pacing.limit_s is None
    engine.run()


def test_a_prompt_is_computed_in_chunks_beside_the_rows(model_dir: Path) -> None:
    engine = paced_engine(model_dir, MostTokens(20))
    engine.add("old", [7] * 5, {"": [*range(20, 80), 3]})
    for _ in range(5):
        engine.step()
    engine.add("new", [8] * 90, {"": [100, 3]}, arrival_time=1.0)

    steps = 0
    while not engine.texts["new"]:
        before = len(engine.texts["old"])
        engine.step()
        steps += 1
        assert len(engine.texts["old"]) == before + 1

    # 16 tokens a step, as 20 less the row has no room for 32.
    assert steps == 6


def test_a_prompt_that_is_due_is_computed_at_once(model_dir: Path) -> None:
    engine = paced_engine(model_dir, MostTokens(20, first_token_s=0.0))
    engine.add("old", [7] * 5, {"": [*range(20, 80), 3]})
    for _ in range(5):
        engine.step()
    engine.add("new", [8] * 90, {"": [100, 3]}, arrival_time=1.0)

    engine.step()

    assert engine.texts["new"] == [100]


@given(
    st.lists(st.builds(Prompt, st.integers(1, 500), st.floats(0.0, 2.0)), max_size=6),
    st.integers(0, 600),
    st.floats(0.001, 0.1),
)
def test_chunks_complete_every_prompt_when_it_is_due(
    prompts: list[Prompt], most: int, step_s: float
) -> None:
    chunk = chunk_tokens(prompts, lambda tokens: tokens <= most, step_s)

    total = sum(prompt.tokens for prompt in prompts)
    if chunk is None:
        assert total <= most
        return
    assert chunk > 0
    assert chunk >= most - most % 16
    before = 0
    for prompt in prompts:
        before += prompt.tokens
        assert chunk * max(1.0, prompt.due_s / step_s) >= 0.999 * before


def test_resting_threads_are_reported_beside_the_running_ones(model_dir: Path) -> None:
    engine = paced_engine(model_dir, MostTokens(1))
    script = {"": [20, FORK, 21, FORK, *range(30, 60), END], "0": [*range(60, 80), END], "1": [END]}
    engine.add("r", [7] * 5, script)
    while len(engine.scheduler.running) < 2:
        engine.step()
    engine.step()

    state = core_state(engine.scheduler)

    # The reader waits for the first child.
    assert (state.threads, state.running_threads, state.resting_threads) == (2, 1, 1)
    engine.run()
    assert core_state(engine.scheduler).resting_threads == 0


def test_a_request_at_its_thread_limit_keeps_a_row(model_dir: Path) -> None:
    """Its next child is read first, but cannot start before the root has ended."""
    engine = paced_engine(model_dir, MostTokens(1))
    engine.add("old", [7] * 5, {"": [*range(100, 160), END]})
    parameters = fork_parameters(max_threads=1)
    script = {"": [20, FORK, *range(30, 50), END], "0": [*range(60, 70), END]}
    engine.add("new", [8] * 5, script, parameters=parameters, arrival_time=1.0)
    while not any(group.deferred for group in engine.scheduler.threads.groups):
        engine.step()
    root = engine.scheduler.requests["new"]

    before = root.num_output_tokens
    for _ in range(10):
        engine.step()

    assert root.num_output_tokens == before + 10
    engine.run()
    assert engine.texts["new"] == [20, *range(60, 70), *range(30, 50)]


def test_a_failed_step_leaves_rows_and_limits_as_they_were(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = paced_engine(model_dir, MostTokens(1))
    engine.add("r", [7] * 5, {"": [20, FORK, *range(30, 60), END], "0": [*range(60, 80), END]})
    scheduler = engine.scheduler
    while not scheduler.step_plan.resting:
        engine.step()
    engine.add("new", [8] * 90, {"": [100, END]}, arrival_time=1.0)

    def limits() -> tuple[object, ...]:
        return (
            [each.request_id for each in scheduler.running],
            scheduler.max_num_running_reqs,
            scheduler.max_num_active_reqs,
            scheduler.max_num_scheduled_tokens,
            scheduler.scheduler_config.long_prefill_token_threshold,
        )

    before = limits()
    with monkeypatch.context() as patched:
        patched.setattr(scheduler.kv_cache_manager, "new_step_starts", None)
        with pytest.raises(TypeError):
            scheduler.schedule()

    assert scheduler.step_plan.resting
    assert scheduler.step_plan.max_tokens is not None
    assert limits() == before
