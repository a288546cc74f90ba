"""What threads save by reading together, and what fork policies make of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from apar_core.attention.settings import FamilySettings
from apar_core.fork_parameters import ForkParameters
from apar_core.scheduler.core_state import core_state
from apar_core.scheduler.family_reads import FamilyReads, ask_workers
from apar_core.scheduler.fork_policy import AdaptivePolicy
from apar_core.scheduler.step_time import LearnedStepCosts
from apar_core.scheduler.thread_table import ThreadGroup, ThreadTable
from apar_core.step_costs.costs import StepBatch, StepCosts
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from cluster.lab.virtual.executor import VirtualExecutor
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

    assert not policy.admits(batch.grown(rows=1, attended_tokens=600))
    assert policy.admits(batch.grown(rows=1, attended_tokens=600, saved_tokens=500))
    assert policy.admits(StepBatch(5, 6100, saved_tokens=1500))


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
        scheduler.admission.policy = AdaptivePolicy(0.007, LearnedStepCosts(engine.spec.costs))
        scheduler.family_reads.settings = settings
        before = sum(scheduler.admission.counters.delayed.values())
        run(engine, asked)
        return int(sum(scheduler.admission.counters.delayed.values()) - before)

    # The first child starts in any case, since its text is read first.
    assert delayed(None) == 1
    assert delayed(SETTINGS) == 0
    # The worker has fallen back: forks wait as without family attention.
    scheduler.family_reads.layer_share = 0.0
    assert delayed(SETTINGS) == 1


class Core:
    """An engine core whose workers run in this process, or answer a call."""

    def __init__(self, reads: FamilyReads | None, *answers: Any, is_here: bool = False) -> None:
        self.scheduler = SimpleNamespace(family_reads=reads) if reads else SimpleNamespace()
        self.answers = list(answers)
        worker = SimpleNamespace(family_layers=lambda: self.answers.pop(0))
        driver = SimpleNamespace(worker=worker)
        self.model_executor = SimpleNamespace(**{"driver_worker": driver} if is_here else {})

    def collective_rpc(self, method: str) -> list[Any]:
        assert method == "family_layers"
        return [self.answers.pop(0), self.answers.pop(0)]


def test_layers_that_the_workers_read_row_by_row_save_nothing() -> None:
    table: ThreadTable[Any] = ThreadTable()
    group, threads = family(table, "a", [[*PROMPT, 60], [*PROMPT, 61]])
    reads = FamilyReads(table, BLOCK, SETTINGS)
    child = Thread("a~2", [*PROMPT, 62])

    def saved() -> tuple[int, int, float]:
        return (
            reads.saved_tokens(threads),
            reads.saved_by(group, child, threads),
            reads.thread_weight,
        )

    assert saved() == (8, 8, 0.6)
    # Two stages of a pipeline. Workers of their own are asked once.
    ask_workers(core := Core(reads, (1, 6), (3, 10), "too late", "too late"))
    assert saved() == (2, 2, 0.9)
    ask_workers(core)
    assert saved() == (2, 2, 0.9)
    # A worker in this process may fall back later.
    ask_workers(core := Core(reads, (2, 4), (0, 4), is_here=True))
    assert saved() == (4, 4, 0.8)
    ask_workers(core)
    assert saved() == (0, 0, 1.0)


def test_workers_are_not_asked_where_each_row_reads_its_own_blocks() -> None:
    table: ThreadTable[Any] = ThreadTable()
    reads = FamilyReads(table, BLOCK, None)

    # Neither has an answer.
    ask_workers(Core(reads))
    ask_workers(Core(None))

    assert reads.thread_weight == 1.0


@pytest.mark.engine
def test_an_engine_core_asks_its_workers_before_its_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    costs = StepCosts("any", "predicted", "made up", ((1, 1e-3), (64, 1e-3)), 1e-6)
    asked: list[Any] = []

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method != "family_layers":
            return list(answer(self, method, *args, **kwargs))
        asked.append(method)
        return [(0, 4)]

    answer = VirtualExecutor.collective_rpc
    monkeypatch.setattr(VirtualExecutor, "collective_rpc", collective_rpc)
    spec = VirtualSpec(config, costs, 16 * 400, is_async=False, forks={"attention": "family"})
    with VirtualEngine(spec) as engine:
        assert engine.scheduler.family_reads.thread_weight == 0.6
        for _ in range(2):
            run(engine, [Asked(20, {"": [300, 301]})])

        assert asked == ["family_layers"]
        assert core_state(engine.scheduler).thread_weight == 1.0
