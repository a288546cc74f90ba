"""An engine with a model and one in virtual time take the same steps, one by one."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import REPLAY
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.step_costs.costs import StepCosts
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from tests.fakes.step_traces import FORK, Asked, RunSeen, run
from tests.integration.engine_process import EngineProcess

pytestmark = pytest.mark.engine
COSTS = StepCosts("any", "predicted", "made up", ((1, 1e-3),), 0.0)
NUM_BLOCKS = 129
TREE = {
    "": [300, 301, FORK, 302, 303, FORK, *range(304, 325)],
    "0": [*range(310, 330), FORK, *range(340, 365)],
    "0.0": [*range(320, 340)],
    "1": [*range(330, 365)],
}
FLAT = {"": [*range(300, 360)]}

RUNS: dict[str, tuple[Sequence[Asked], int | None]] = {
    "sequential": ([Asked(20 + i, FLAT, forks=False, at_step=i) for i in range(4)], None),
    "sequential, preempted": ([Asked(20, FLAT, forks=False) for _ in range(6)], 9),
    "eager": ([Asked(20 + i, TREE, at_step=i) for i in range(4)], None),
    "eager, preempted": ([Asked(20, TREE) for _ in range(5)], 10),
    "two threads a request, preempted": ([Asked(20, TREE, max_threads=2) for _ in range(5)], 10),
    "several completions": ([Asked(20, TREE, n=3, at_step=3 * i) for i in range(2)], 16),
    "aborted": ([Asked(20, TREE, abort_at_step=(9, None)[i % 2]) for i in range(5)], 10),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(
        logits_processors=[REPLAY], num_gpu_blocks_override=NUM_BLOCKS, max_num_batched_tokens=512
    )
    yield process
    process.close()


@cache
def virtual_engine() -> VirtualEngine:
    """Return a virtual engine with the settings of the process's real one."""
    config = json.loads((checkpoint_path() / "config.json").read_text(encoding="utf-8"))
    spec = VirtualSpec(
        config,
        COSTS,
        kv_tokens=32 * (NUM_BLOCKS - 1),
        block_size=32,
        max_model_len=768,
        max_rows=128,
        max_step_tokens=512,
        is_async=False,
    )
    return VirtualEngine(spec)


def both(
    engine: OfflineEngine, asked: Sequence[Asked], kv_blocks: int | None
) -> tuple[RunSeen, RunSeen]:
    """Do a run in the process's engine and in a virtual one."""
    real = run(engine, asked, kv_blocks=kv_blocks)
    return real, replace(run(virtual_engine(), asked, kv_blocks=kv_blocks), end_s=None)


def assert_same(real: RunSeen, virtual: RunSeen) -> None:
    for number, (one, other) in enumerate(zip_longest(real.steps, virtual.steps)):
        assert one == other, f"step {number}"
    assert real == virtual


@pytest.mark.parametrize("name", RUNS)
def test_both_take_the_same_steps(engine: EngineProcess, name: str) -> None:
    asked, kv_blocks = RUNS[name]

    real, virtual = engine.call(both, asked, kv_blocks)

    assert_same(real, virtual)
    assert any(step.preempted for step in real.steps) == (kv_blocks is not None)
    assert real.free_after == real.free_before


def drawn(seed: int) -> tuple[list[Asked], int]:
    """Return a larger run: many trees, limits, completions and aborts at any time."""
    generator = random.Random(seed)

    def text(most: int) -> list[int]:
        return [generator.randrange(300, 400) for _ in range(generator.randint(1, most))]

    def tree() -> dict[str, list[int]]:
        scripts: dict[str, list[int]] = {}

        def thread(key: str, level: int) -> None:
            tokens = text(30)
            for ordinal in range(generator.randint(0, 3) if level < 2 else 0):
                tokens += [FORK, *text(20)]
                thread(f"{key}.{ordinal}" if key else str(ordinal), level + 1)
            scripts[key] = tokens

        thread("", 0)
        return scripts

    asked = [
        Asked(
            generator.randint(1, 200),
            tree(),
            forks=True,
            n=generator.choice((1, 1, 1, 2)),
            max_threads=generator.choice((None, None, 2, 3)),
            at_step=generator.randint(0, 150),
            abort_at_step=generator.choice((None, None, None, generator.randint(10, 300))),
        )
        for _ in range(30)
    ]
    return asked, generator.choice((20, 30, 60))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_both_take_the_same_steps_in_larger_runs(engine: EngineProcess, seed: int) -> None:
    asked, kv_blocks = drawn(seed)

    real, virtual = engine.call(both, asked, kv_blocks, timeout_s=600)

    assert_same(real, virtual)
