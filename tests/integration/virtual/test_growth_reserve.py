"""Memory that is kept free for running threads saves preemptions and recomputed tokens."""

from collections.abc import Iterator

import pytest

from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import step_costs
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from tests.fakes.step_traces import FORK, Asked, RunSeen, run

pytestmark = pytest.mark.engine

MODEL = find_model("llama-7b")
SPEC = VirtualSpec(MODEL.config, step_costs(MODEL, find_gpu("a100-80gb")), kv_tokens=16 * 1200)
TREE = {
    "": [FORK, *range(300, 350), FORK, *range(400, 440)],
    "0": [*range(500, 570)],
    "1": [*range(700, 760)],
}
FLAT = {"": [*range(300, 520)]}
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def engine() -> Iterator[VirtualEngine]:
    with VirtualEngine(SPEC) as engine:
        yield engine


def answered(
    engine: VirtualEngine, reserve_tokens: int, *, forks: bool, kv_blocks: int = 200
) -> RunSeen:
    """Answer requests with so many tokens per running thread in reserve."""
    engine.scheduler.growth_reserve_tokens = reserve_tokens
    scripts = TREE if forks else FLAT
    asked = [Asked(60 + 7 * number, scripts, forks=forks) for number in range(NUM_REQUESTS)]
    seen = run(engine, asked, kv_blocks=kv_blocks)
    assert [seen.answers[f"r{number}"][0][1] for number in range(NUM_REQUESTS)] == [
        "stop"
    ] * NUM_REQUESTS
    return seen


def num_preemptions(seen: RunSeen) -> int:
    return sum(len(step.preempted) for step in seen.steps)


def computed_tokens(seen: RunSeen) -> int:
    return sum(number for step in seen.steps for _, _, number in step.rows)


@pytest.mark.parametrize("forks", [False, True])
def test_a_reserve_saves_preemptions_and_recomputed_tokens(
    engine: VirtualEngine, forks: bool
) -> None:
    without, reserved = (answered(engine, tokens, forks=forks) for tokens in (0, 32))

    assert 0 < num_preemptions(reserved) < num_preemptions(without)
    assert computed_tokens(reserved) < computed_tokens(without)


def test_a_reserve_changes_no_step_where_memory_is_plentiful(engine: VirtualEngine) -> None:
    without, reserved = (
        answered(engine, tokens, forks=True, kv_blocks=1200).steps for tokens in (0, 16)
    )

    assert not any(step.preempted for step in without)
    assert [step.rows for step in without] == [step.rows for step in reserved]


def test_requests_also_start_with_a_reserve_larger_than_the_cache(engine: VirtualEngine) -> None:
    answered(engine, 10**6, forks=True)
