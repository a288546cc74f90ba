"""Properties of waiting forks, with any limits and any fork policy."""

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from apar_core.scheduler.fork_policy import EagerPolicy
from apar_core.step_costs.costs import StepBatch
from tests.fakes.scripted_engine import (
    EngineShape,
    Script,
    ScriptedEngine,
    fork_parameters,
)
from tests.unit.apar_core.scheduler.test_any_schedule import any_schedule, scripts

KEYS = (None, "k", "l")


class MoodyPolicy(EagerPolicy):
    """Admits a fork, or a step without rest, with a probability from seeded random numbers."""

    counts_attended = True
    token_time_s, first_token_s = 0.001, 0.01

    def __init__(self, seed: int, chance: float) -> None:
        self._numbers = random.Random(seed)
        self._chance = chance

    def step_s(self, batch: StepBatch) -> float:
        return 0.002 * (self._numbers.random() > self._chance)

    def admits(self, batch: StepBatch, limit_s: float | None = None) -> bool:
        return self._numbers.random() < self._chance

    def observe(self, batch: StepBatch, seconds: float) -> None:
        assert batch.rows > 0


# (script, text), thread limit, key, priority.
Wanted = tuple[tuple[Script, list[int]], int, str | None, int]
requests: st.SearchStrategy[list[Wanted]] = st.lists(
    st.tuples(scripts(), st.integers(1, 6), st.sampled_from(KEYS), st.integers(0, 1)),
    min_size=1,
    max_size=6,
)
key_caps = st.none() | st.integers(1, 4)
request_caps = st.none() | st.integers(1, 3)


def engine_with(
    wanted: list[Wanted], shape: EngineShape, model_dir: Path, key_cap: int | None
) -> ScriptedEngine:
    """Return an engine with requests r0, r1, ... in order of arrival."""
    engine = ScriptedEngine(shape, model_dir)
    for number, ((script, _), max_threads, key, priority) in enumerate(wanted):
        engine.add(
            f"r{number}",
            [1000 + number] * 7,
            script,
            parameters=fork_parameters(
                max_threads=max_threads, key=key, key_max_threads=key_cap if key else None
            ),
            arrival_time=float(number),
            priority=priority,
        )
    return engine


def assert_caps_hold(
    engine: ScriptedEngine, wanted: list[Wanted], replica_cap: int | None, key_cap: int | None
) -> None:
    """Check that only roots, and the single thread of a request without others, exceed limits."""
    groups = engine.scheduler.threads.groups
    for group in groups:
        assert len(group.live) <= group.parameters.max_threads
        assert group.live or group.closed
    if replica_cap is not None:
        num_inside = len(engine.scheduler.requests) - engine.scheduler.gate.num_held
        assert num_inside <= max(replica_cap, len(wanted))
    if key_cap is not None:
        for name in ("k", "l"):
            alive = [group for group in groups if group.parameters.key == name]
            num_roots = sum(key == name for _, _, key, _ in wanted)
            assert sum(len(group.live) for group in alive) <= max(key_cap, num_roots)
            assert engine.scheduler.admission.queue.key_threads[name] == sum(
                len(group.live) for group in alive
            )


@any_schedule
@given(
    wanted=requests,
    run_ahead=st.booleans(),
    max_num_seqs=st.integers(1, 12),
    replica_cap=st.none() | st.integers(1, 8),
    key_cap=key_caps,
    max_requests=request_caps,
    policy=st.builds(MoodyPolicy, st.integers(0, 99), st.sampled_from([0.0, 0.2, 1.0])),
)
def test_delayed_forks_keep_the_text_complete_and_the_limits(
    model_dir: Path,
    wanted: list[Wanted],
    run_ahead: bool,
    max_num_seqs: int,
    replica_cap: int | None,
    key_cap: int | None,
    max_requests: int | None,
    policy: MoodyPolicy,
) -> None:
    shape = EngineShape(
        num_blocks=500,
        max_num_seqs=max_num_seqs,
        run_ahead=run_ahead,
        forks={"max_replica_threads": replica_cap, "max_requests": max_requests},
    )
    engine = engine_with(wanted, shape, model_dir, key_cap)
    engine.scheduler.admission.policy = policy

    # At worst one token per step: no request may wait forever.
    num_tokens = sum(len(thread) for (script, _), *_ in wanted for thread in script.values())
    max_steps = 10 + 2 * num_tokens + 2 * sum(len(script) for (script, _), *_ in wanted)
    steps = 0
    while engine.step():
        assert_caps_hold(engine, wanted, replica_cap, key_cap)
        steps += 1
        assert steps <= max_steps

    for number, ((_, text), *_) in enumerate(wanted):
        assert engine.texts[f"r{number}"] == text
        assert engine.finish_reasons[f"r{number}"] == "stop"
    engine.assert_nothing_is_left()
    counters = engine.scheduler.admission.counters
    num_forks = sum(len(script) - 1 for (script, _), *_ in wanted)
    assert counters.accepted + sum(counters.delayed.values()) == num_forks
    assert counters.refused == 0


@any_schedule
@given(
    wanted=requests,
    replica_cap=st.integers(1, 8),
    key_cap=key_caps,
    max_requests=request_caps,
    run_ahead=st.booleans(),
    chance=st.sampled_from([0.0, 0.3, 1.0]),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=4),
    max_tokens=st.integers(1, 60),
)
def test_aborts_and_budgets_leave_no_fork_waiting(
    model_dir: Path,
    wanted: list[Wanted],
    replica_cap: int,
    key_cap: int | None,
    max_requests: int | None,
    run_ahead: bool,
    chance: float,
    aborts: list[tuple[int, int]],
    max_tokens: int,
) -> None:
    shape = EngineShape(
        num_blocks=60,
        run_ahead=run_ahead,
        forks={"max_replica_threads": replica_cap, "max_requests": max_requests},
    )
    engine = engine_with(wanted, shape, model_dir, key_cap)
    engine.scheduler.admission.policy = MoodyPolicy(1, chance)
    for step in range(31):
        for at_step, number in aborts:
            if at_step == step:
                engine.abort(f"r{number}")
        engine.step()

    engine.run()

    aborted = {f"r{number}" for _, number in aborts}
    assert {f"r{number}" for number in range(len(wanted))} <= engine.finish_reasons.keys() | aborted
    for number, ((_, text), *_) in enumerate(wanted):
        remaining = iter(text)
        assert all(token_id in remaining for token_id in engine.texts[f"r{number}"])
    engine.assert_nothing_is_left()
