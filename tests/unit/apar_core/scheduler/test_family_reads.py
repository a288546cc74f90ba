"""What threads save by reading together, and what fork policies make of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from apar_core.attention.settings import FamilySettings
from apar_core.fork_parameters import ForkParameters
from apar_core.scheduler.family_reads import FamilyReads
from apar_core.scheduler.fork_policy import AdaptivePolicy
from apar_core.scheduler.step_time import LearnedStepCosts
from apar_core.scheduler.thread_table import ThreadGroup, ThreadTable
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.virtual.engine import VirtualEngine, VirtualSpec
from tests.fakes.step_traces import FORK, Asked, run

BLOCK = 4
SETTINGS = FamilySettings(min_prefix_blocks=1)
PARAMETERS = ForkParameters(1, (2,), (2,), enabled=True, max_threads=9, max_forks=9, end_ids=(3,))
# Each part is two blocks long.
PROMPT, FIRST, SECOND, THIRD = ([*range(start, start + 8)] for start in (10, 20, 30, 40))


@dataclass(frozen=True)
class Thread:
    request_id: str
    all_token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def family(
    table: ThreadTable[Any], root: str, sequences: Sequence[list[int]]
) -> tuple[ThreadGroup[Any], list[Thread]]:
    threads = [Thread(f"{root}~{n}" if n else root, ids) for n, ids in enumerate(sequences)]
    group = table.open_group(root, PARAMETERS, 1000)
    for thread in threads[1:]:
        table.add_thread(group, thread.request_id)
    return group, threads


def test_threads_save_the_full_blocks_that_all_of_their_request_begin_with() -> None:
    table: ThreadTable[Any] = ThreadTable()
    _, first = family(table, "a", [[*PROMPT, *FIRST], [*PROMPT, *FIRST, 2, 50], [*PROMPT, *SECOND]])
    _, second = family(table, "b", [[*PROMPT[:7], 99], [*PROMPT[:7], 98]])
    _, alone = family(table, "c", [PROMPT])

    def saved(settings: FamilySettings | None) -> int:
        reads = FamilyReads(table, BLOCK, settings)
        return reads.saved_tokens([*first, *second, *alone, Thread("no forks", PROMPT)])

    # Two blocks for two further threads, and one block for one.
    assert saved(SETTINGS) == 2 * 8 + 4
    assert saved(FamilySettings(min_prefix_blocks=2)) == 2 * 8
    assert saved(FamilySettings(min_rows=3, min_prefix_blocks=1)) == 2 * 8
    assert saved(FamilySettings(min_prefix_blocks=1, min_saved_blocks=6)) == 0
    assert saved(None) == 0


def test_a_child_saves_what_its_siblings_read_and_may_part_earlier_than_they() -> None:
    table: ThreadTable[Any] = ThreadTable()
    group, threads = family(table, "a", [[*PROMPT, *FIRST, 60], [*PROMPT, *FIRST, 61]])
    reads = FamilyReads(table, BLOCK, SETTINGS)

    def saved_by(tokens: list[int], running: Sequence[Thread] = tuple(threads)) -> int:
        return reads.saved_by(group, Thread("a~2", tokens), running)

    assert saved_by([*PROMPT, *FIRST, 62]) == 16
    # All three have the prompt in common: two threads save it, where one saved twice as much.
    assert saved_by([*PROMPT, *THIRD]) == 0
    assert saved_by([*PROMPT, *FIRST], running=[]) == 0
    assert FamilyReads(table, BLOCK, None).saved_by(group, threads[0], threads) == 0


def test_a_family_that_grows_or_loses_threads_is_compared_again() -> None:
    table: ThreadTable[Any] = ThreadTable()
    _, threads = family(table, "a", [[*PROMPT, *FIRST], [*PROMPT, *FIRST], [*PROMPT, *SECOND]])
    reads = FamilyReads(table, BLOCK, SETTINGS)

    found = [reads.saved_tokens(threads[:number]) for number in (2, 3, 1, 2)]

    assert found == [16, 16, 0, 16]


def test_an_adaptive_policy_admits_a_thread_whose_siblings_read_for_it() -> None:
    costs = StepCosts("any", "predicted", "made up", ((1, 5e-3), (64, 5e-3)), 1e-6)
    policy = AdaptivePolicy(0.010, LearnedStepCosts(costs))
    batch = StepBatch(4, 4500)

    assert not policy.admits(batch, extra_attended=600)
    assert policy.admits(batch, extra_attended=600, extra_saved=500)
    assert policy.admits(StepBatch(4, 5500, saved_tokens=1500), extra_attended=600)


@pytest.fixture(scope="module")
def engine() -> Iterator[VirtualEngine]:
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    # A token of KV cache takes 20 us, and everything else next to nothing.
    costs = StepCosts("any", "predicted", "made up", ((1, 1e-4), (64, 1e-4)), 2e-5)
    spec = VirtualSpec(config, costs, 16 * 400, is_async=False)
    with VirtualEngine(spec) as engine:
        yield engine


@pytest.mark.engine
def test_forks_wait_less_where_their_request_reads_its_prompt_once(engine: VirtualEngine) -> None:
    asked = [
        Asked(160, {"": [300, FORK, FORK, *range(301, 330)], "0": [400] * 30, "1": [401] * 30})
    ]
    scheduler = engine.scheduler

    def delayed(settings: FamilySettings | None) -> int:
        # Room for a thread and the prompt, but not for the prompt twice.
        scheduler.admission.policy = AdaptivePolicy(0.006, LearnedStepCosts(engine.spec.costs))
        scheduler.family_reads.settings = settings
        before = sum(scheduler.admission.counters.delayed.values())
        run(engine, asked)
        return int(sum(scheduler.admission.counters.delayed.values()) - before)

    assert delayed(None) == 2
    assert delayed(SETTINGS) == 0
