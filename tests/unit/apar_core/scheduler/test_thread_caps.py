"""Limits on threads and the fork policy, in vLLM's real scheduler with a scripted model."""

from pathlib import Path

import pytest

from apar_core.scheduler.core_state import core_state
from apar_core.step_costs.costs import StepBatch
from tests.fakes.scripted_engine import (
    END,
    FORK,
    EngineShape,
    ScriptedEngine,
    fork_parameters,
)

PROMPT = list(range(100, 110))


def forking(num_forks: int, *, child_tokens: int = 8, tail: int = 8) -> dict[str, list[int]]:
    """Return a script whose root forks at every second token and then continues."""
    script = {"": [*(token for i in range(num_forks) for token in (10 + i, FORK))]}
    script[""] += [*range(30, 30 + tail), END]
    for child in range(num_forks):
        first = 100 * (child + 1)
        script[str(child)] = [*range(first, first + child_tokens), END]
    return script


def most_running(engine: ScriptedEngine) -> int:
    """Return the most threads in one step of eight requests, which could have 40 in total.

    Before them, three requests run one at a time, from which the fork policy learns step times.
    """
    engine.step_s = lambda rows: 0.004 + 0.001 * rows
    for number in range(3):
        engine.add(f"first{number}", PROMPT, forking(3, child_tokens=12))
        engine.run()
    for number in range(8):
        script = forking(4, child_tokens=20, tail=30)
        engine.add(f"r{number}", PROMPT, script, max_tokens=999, arrival_time=10.0 + number)
    most = 0
    while engine.step():
        scheduler = engine.scheduler
        most = max(most, len(scheduler.running) - len(scheduler.step_plan.resting))
    return most


def started(engine: ScriptedEngine) -> list[str]:
    """Run the engine to its end; return the threads in the order of their start."""
    order: list[str] = []
    while engine.step():
        order += [name for name in engine.scheduler.requests if name not in order]
    return order


def test_the_replica_limit_is_shared_by_all_requests_in_order_of_arrival(
    model_dir: Path,
) -> None:
    engine = ScriptedEngine(EngineShape(forks={"max_replica_threads": 3}), model_dir)
    # The newer request is first in the batch, and forks in the same steps.
    engine.add("new", PROMPT, forking(2), arrival_time=2.0)
    engine.add("old", PROMPT, forking(2), arrival_time=1.0)
    engine.scheduler.waiting = type(engine.scheduler.waiting)()
    for name in ("new", "old"):
        engine.scheduler.waiting.add_request(engine.scheduler.requests[name])

    order = started(engine)

    children = [name for name in order if "~" in name]
    assert children == ["old~0", "old~1", "new~0", "new~1"]
    engine.assert_nothing_is_left()


def test_a_waiting_child_starts_when_a_sibling_ends(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    script = forking(3, child_tokens=4, tail=60)
    engine.add("a", PROMPT, script, parameters=fork_parameters(max_threads=2))

    # The children run one after another beside the root, which takes 3 * 2 + 60 + 1 steps.
    assert engine.run() == 3 * 2 + 60 + 1 + 1
    engine.assert_nothing_is_left()


def test_the_limit_of_a_key_counts_all_its_requests(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    for number, key in enumerate(["k", "k", "l"]):
        parameters = fork_parameters(key=key, key_max_threads=3)
        engine.add(key + str(number), PROMPT, forking(3), parameters=parameters)
    most = {"k": 0, "l": 0}
    while engine.step():
        for key in most:
            most[key] = max(most[key], engine.scheduler.admission.queue.key_threads[key])

    assert most == {"k": 3, "l": 3}
    engine.assert_nothing_is_left()


def test_an_unforked_request_counts_for_its_key(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    parameters = fork_parameters(key="k", key_max_threads=2)
    engine.add("plain", PROMPT, {"": [*range(30, 60), END]}, parameters=parameters)
    engine.add("forking", PROMPT, forking(2), parameters=parameters)

    started(engine)

    assert engine.scheduler.admission.counters.delayed["key"] == 2
    engine.assert_nothing_is_left()


def test_a_request_without_live_threads_starts_a_child_above_every_limit(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(forks={"max_replica_threads": 1}), model_dir)
    parameters = fork_parameters(key="k", key_max_threads=1)
    engine.add("long", PROMPT, {"": [*range(30, 130), END]}, parameters=parameters)
    engine.add("forking", PROMPT, forking(2, tail=1), parameters=parameters, arrival_time=1.0)
    # Root and children run one after another, and end well before the long request.
    for _ in range(40):
        engine.step()

    assert engine.finish_reasons == {"forking": "stop"}
    engine.run()
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_adaptive_policy_keeps_steps_within_the_time_per_token(
    model_dir: Path, run_ahead: bool
) -> None:
    forks = {"policy": "adaptive", "token_time_ms": 12.0}
    shape = EngineShape(
        num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=512, run_ahead=run_ahead,
        forks=forks,
    )  # fmt: skip
    engine = ScriptedEngine(shape, model_dir)

    most = most_running(engine)

    # The eight roots themselves take 12 ms: each has one row, for the thread that is read first.
    assert most == 8
    # A root rests while its child writes, so that no fork has to wait.
    assert engine.scheduler.admission.counters.accepted == 3 * 3 + 8 * 4
    learned = core_state(engine.scheduler).step_costs
    assert learned is not None
    for rows in (1, 4, 8):
        assert learned.device_s(StepBatch(rows, 0)) == pytest.approx(0.004 + 0.001 * rows, rel=0.2)
    engine.assert_nothing_is_left()


@pytest.mark.parametrize(("policy", "most"), [("eager", 40), ("adaptive", 12)])
def test_policy_and_token_time_decide_how_many_threads_run(
    model_dir: Path, policy: str, most: int
) -> None:
    forks = {"policy": policy, "token_time_ms": 16.5}
    shape = EngineShape(
        num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=512, forks=forks
    )  # fmt: skip
    engine = ScriptedEngine(shape, model_dir)

    assert most_running(engine) == most
    engine.assert_nothing_is_left()


def test_core_state_counts_waiting_forks_by_reason(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(forks={"max_replica_threads": 4}), model_dir)
    keyed = fork_parameters(key="k", key_max_threads=1)
    engine.add("a", PROMPT, forking(2), parameters=fork_parameters(max_threads=1))
    engine.add("b", PROMPT, forking(2), parameters=keyed, arrival_time=1.0)
    engine.add("c", PROMPT, forking(2), arrival_time=2.0)
    for _ in range(5):
        engine.step()

    state = core_state(engine.scheduler)

    assert state.deferred_by_reason == {"request": 2, "key": 2, "replica": 1, "policy": 0}
    assert state.deferred_threads == 5
    counters = state.admission_counters
    assert counters.accepted == 1
    assert counters.delayed == state.deferred_by_reason
    assert state.step_s == pytest.approx(0.001)
    assert state.step_costs is None
    engine.run()
    engine.assert_nothing_is_left()


def test_refused_forks_are_counted(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, forking(5), parameters=fork_parameters(max_forks=2))

    engine.run()

    assert core_state(engine.scheduler).admission_counters.refused == 3


def test_a_fork_in_the_step_that_uses_up_the_tokens_is_not_accepted(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    script = {"": [10, FORK, 11, FORK, 12, END], "0": [20, 21, 22, END], "1": [30, END]}
    # The fourth token is the child's 21; in that step the root forks again.
    engine.add("a", PROMPT, script, max_tokens=4)

    engine.run()

    assert engine.texts["a"] == [10, 20, 21, 11]
    assert engine.scheduler.admission.counters.accepted == 1
    engine.assert_nothing_is_left()


def test_children_inherit_the_priority_of_their_request(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(max_num_seqs=2), model_dir)
    engine.add("usual", PROMPT, forking(2), arrival_time=0.0, priority=1)
    engine.add("urgent", PROMPT, forking(2), arrival_time=9.0, priority=0)
    for number in range(2):
        engine.add(f"later{number}", PROMPT, forking(0), arrival_time=1.0, priority=0)

    while "urgent" not in engine.finish_reasons:
        engine.step()
        # Its children take the free places before older requests of lower priority.
        running = {request.request_id for request in engine.scheduler.running}
        assert not running & {"usual~0", "usual~1"}

    assert engine.finish_reasons.keys() >= {"urgent"}
    engine.run()
    engine.assert_nothing_is_left()


def test_the_least_urgent_request_is_preempted_regardless_of_age(model_dir: Path) -> None:
    script = {"": [*range(10, 15), FORK, *range(15, 45), END], "0": [*range(50, 80), END]}
    engine = ScriptedEngine(EngineShape(num_blocks=30), model_dir)
    engine.add("old", [200] * 9, script, arrival_time=0.0, priority=1)
    for number in range(2):
        engine.add(f"urgent{number}", [300 + number] * 9, script, arrival_time=1.0 + number)
    preempted: dict[str, int] = {}
    while engine.step():
        for request in engine.scheduler.requests.values():
            preempted[request.request_id] = request.num_preemptions

    assert preempted["old"] + preempted["old~0"] > 0
    assert preempted["urgent0"] == preempted["urgent0~0"] == 0
    engine.assert_nothing_is_left()
