"""Limit on running requests, in vLLM's real scheduler with a scripted model."""

from pathlib import Path

import pytest

from apar_core.scheduler.core_state import core_state
from apar_core.scheduler.fork_settings import ForkSettings
from tests.fakes.scripted_engine import (
    END,
    FORK,
    EngineShape,
    ScriptedEngine,
    fork_parameters,
)

PROMPT = list(range(100, 110))
FORKING = {
    "": [10, FORK, 11, FORK, *range(30, 40), END],
    "0": [*range(50, 60), END],
    "1": [*range(60, 70), END],
}
PLAIN = {"": [*range(30, 40), END]}


def most_requests_and_threads(engine: ScriptedEngine) -> tuple[int, int]:
    """Run to the end; return the largest numbers of requests and of threads in one step."""
    roots = threads = 0
    while engine.step():
        running = [request.request_id for request in engine.scheduler.running]
        roots = max(roots, len({name.split("~")[0] for name in running}))
        threads = max(threads, len(running))
    return roots, threads


def test_the_gate_limits_requests_and_not_their_forks(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(forks={"max_requests": 2}), model_dir)
    for number in range(5):
        engine.add(f"r{number}", PROMPT, FORKING, arrival_time=float(number))

    # Both requests run with both children beside their roots at some moment.
    assert most_requests_and_threads(engine) == (2, 6)
    assert set(engine.finish_reasons) == {f"r{number}" for number in range(5)}
    assert engine.scheduler.gate.num_held == 0
    engine.assert_nothing_is_left()


def test_without_a_limit_all_run(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    for number in range(5):
        engine.add(f"r{number}", PROMPT, PLAIN)

    assert most_requests_and_threads(engine) == (5, 5)


def test_held_requests_enter_by_priority_and_arrival(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(forks={"max_requests": 1}), model_dir)
    engine.add("first", PROMPT, PLAIN, arrival_time=1.0)
    engine.add("late", PROMPT, PLAIN, arrival_time=3.0)
    engine.add("soon", PROMPT, PLAIN, arrival_time=2.0)
    engine.add("urgent", PROMPT, PLAIN, arrival_time=4.0, priority=-1)
    order: list[str] = []
    while engine.step():
        order += [r.request_id for r in engine.scheduler.running if r.request_id not in order]

    assert order == ["first", "urgent", "soon", "late"]


def test_a_held_request_counts_as_waiting_and_can_be_aborted(
    model_dir: Path,
) -> None:
    engine = ScriptedEngine(EngineShape(forks={"max_requests": 1}), model_dir)
    for name in ("a", "b", "c"):
        engine.add(name, PROMPT, FORKING)
    engine.step()

    assert core_state(engine.scheduler).waiting_threads == 2
    engine.abort("b")
    assert core_state(engine.scheduler).waiting_threads == 1
    engine.run()

    assert set(engine.finish_reasons) == {"a", "c"}
    engine.assert_nothing_is_left()


def test_an_aborted_request_frees_its_place(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(forks={"max_requests": 1}), model_dir)
    for name in ("a", "b"):
        engine.add(name, PROMPT, FORKING)
    for _ in range(5):
        engine.step()

    engine.abort("a")
    engine.run()

    assert set(engine.finish_reasons) == {"b"}
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_request_that_ends_with_waiting_forks_frees_its_place(
    model_dir: Path, run_ahead: bool
) -> None:
    shape = EngineShape(run_ahead=run_ahead, forks={"max_requests": 1})
    engine = ScriptedEngine(shape, model_dir)
    one_thread = fork_parameters(max_threads=1)
    for name in ("a", "b"):
        engine.add(name, PROMPT, FORKING, max_tokens=5, parameters=one_thread)

    engine.run()

    assert engine.finish_reasons == {"a": "length", "b": "length"}
    engine.assert_nothing_is_left()


def test_held_requests_do_not_delay_forks(model_dir: Path) -> None:
    shape = EngineShape(forks={"max_requests": 1, "max_replica_threads": 3})
    engine = ScriptedEngine(shape, model_dir)
    for number in range(6):
        engine.add(f"r{number}", PROMPT, FORKING)
    engine.run()

    assert engine.scheduler.admission.counters.delayed["replica"] == 0
    assert engine.scheduler.admission.counters.accepted == 12


def test_a_preempted_request_keeps_its_place(model_dir: Path) -> None:
    long = {"": [*range(30, 90), END]}
    # Room for three prompts and one answer: the others are preempted and resumed.
    engine = ScriptedEngine(EngineShape(num_blocks=24, forks={"max_requests": 3}), model_dir)
    for number in range(4):
        engine.add(f"r{number}", PROMPT, long, arrival_time=float(number))
    engine.run()

    assert set(engine.finish_reasons.values()) == {"stop"}
    assert len(engine.finish_reasons) == 4
    engine.assert_nothing_is_left()


def test_a_limit_of_zero_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="max_requests"):
        ForkSettings(max_requests=0)


def test_requests_without_memory_do_not_count_in_the_coming_batch(model_dir: Path) -> None:
    shape = EngineShape(num_blocks=24, forks={"policy": "adaptive", "token_time_ms": 20.0})
    engine = ScriptedEngine(shape, model_dir)
    engine.step_s = lambda rows: 0.004 + 0.001 * rows
    for number in range(4):
        engine.add(f"first{number}", PROMPT, FORKING)
        engine.run()
    for number in range(30):
        prompt = list(range(200 + 10 * number, 210 + 10 * number))
        engine.add(f"r{number}", prompt, FORKING, arrival_time=1.0 + number)
    engine.run()

    # If all waiting requests counted as rows, a step would take more than 30 ms. Memory lets few of
    # them run, and their steps stay well below the policy's 20 ms.
    assert engine.scheduler.step_clock.num_rows / engine.scheduler.step_clock.num_steps < 10
    assert engine.scheduler.admission.counters.delayed["policy"] == 0
