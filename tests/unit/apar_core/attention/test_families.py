"""Families of rows, compared with every possible partition of small steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from apar_core.attention import families as grouping
from apar_core.attention.families import Families, group_rows, partition
from apar_core.attention.settings import FamilySettings
from tests.fakes.examples import num_examples
from tests.fakes.scripted_engine import (
    END,
    FIRST_TEXT_ID,
    FORK,
    EngineShape,
    Script,
    ScriptedEngine,
    fork_parameters,
    write_model_config,
)

ANY_PREFIX = FamilySettings(min_prefix_blocks=1)
# Steps with at most so many rows are compared with all partitions of them.
MOST_ROWS = 6
compiled = grouping._compiled


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the same function without numba, which takes four seconds to compile it."""
    monkeypatch.setattr(grouping, "_compiled", lambda: partition)


def families_of(
    tables: list[list[int]],
    seq_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    block_size: int = 4,
    settings: FamilySettings = ANY_PREFIX,
) -> Families:
    width = max(map(len, tables)) + 1
    # What lies behind a row's blocks is the same for all rows, and must not matter.
    table = [[*blocks, *[9999] * (width - len(blocks))] for blocks in tables]
    return group_rows(
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor(query_lens or [1] * len(tables), dtype=torch.int32),
        block_size=block_size,
        settings=settings,
    )


def by_rows(families: Families) -> dict[tuple[int, ...], int]:
    """Return the prefix of each family by its rows."""
    starts = families.starts.tolist()
    rows = families.rows.tolist()
    return {
        tuple(sorted(rows[first:end])): blocks
        for first, end, blocks in zip(
            starts[:-1], starts[1:], families.prefix_blocks.tolist(), strict=True
        )
    }


def common_blocks(tables: list[list[int]], num_full: list[int], rows: list[int]) -> int:
    length = min(num_full[row] for row in rows)
    first = tables[rows[0]]
    for column in range(length):
        if any(tables[row][column] != first[column] for row in rows):
            return column
    return length


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    first, *others = rows
    for parts in partitions(others):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


def best_saving(tables: list[list[int]], num_full: list[int]) -> int:
    return max(
        sum((len(part) - 1) * common_blocks(tables, num_full, part) for part in parts)
        for parts in partitions(list(range(len(tables))))
    )


def assert_sound(families: Families, tables: list[list[int]], num_full: list[int]) -> None:
    """Check what attention relies on."""
    found = by_rows(families)
    rows = [row for members in found for row in members]
    assert len(rows) == len(set(rows)) == families.num_rows
    expected = [0] * len(tables)
    for members, blocks in found.items():
        assert len(members) >= 2
        assert 0 < blocks <= common_blocks(tables, num_full, list(members))
        for row in members:
            expected[row] = blocks
    assert families.row_prefix_blocks.tolist() == expected


def test_siblings_share_their_path_down_to_the_first_living_fork() -> None:
    # Two requests behind one system prompt (block 1); the second has three threads.
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7, 8], [1, 6, 7, 9], [1, 6, 7, 10]]

    assert by_rows(families_of(tables, [16] * 5)) == {(0, 1): 3, (2, 3, 4): 3}


def test_a_system_prompt_is_shared_by_requests_with_one_thread_each() -> None:
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]

    assert by_rows(families_of(tables, [12] * 3)) == {(0, 1, 2): 2}


def test_rows_that_no_deep_family_takes_share_what_they_have_in_common() -> None:
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7], [1, 8]]

    assert by_rows(families_of(tables, [20, 20, 8, 8])) == {(0, 1): 4, (2, 3): 1}


def test_the_rest_of_a_row_is_never_empty() -> None:
    # Eight tokens fill both blocks, but the newest one is computed in this step.
    assert by_rows(families_of([[1, 2], [1, 2]], [8, 8])) == {(0, 1): 1}
    assert by_rows(families_of([[1, 2, 3], [1, 2, 4]], [9, 9])) == {(0, 1): 2}


def test_a_block_that_is_not_full_is_not_shared() -> None:
    assert by_rows(families_of([[1, 2], [1, 3]], [4, 7])) == {}


@pytest.mark.parametrize("query_len", [0, 2, 5])
def test_prefill_chunks_drafts_and_padding_are_in_no_family(query_len: int) -> None:
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]

    assert by_rows(families_of(tables, [11] * 3, [1, query_len, 1])) == {(0, 2): 2}


def test_dummy_rows_of_the_null_block_are_in_no_family() -> None:
    assert by_rows(families_of([[0, 0, 0], [0, 0, 0]], [12, 12])) == {}


def test_equal_blocks_behind_different_ones_are_not_shared() -> None:
    assert by_rows(families_of([[1, 2, 3], [1, 7, 3]], [13, 13])) == {(0, 1): 1}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("min_rows", 3, {(0, 1, 2): 2}),
        ("min_prefix_blocks", 3, {(3, 4): 3}),
        ("min_saved_blocks", 7, {(0, 1, 2): 2, (3, 4): 3}),
        ("min_saved_blocks", 8, {}),
    ],
)
def test_settings(name: str, value: int, expected: dict[tuple[int, ...], int]) -> None:
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5], [6, 7, 8, 9], [6, 7, 8, 10]]
    limits: dict[str, int] = {"min_prefix_blocks": 1, name: value}

    found = families_of(tables, [12, 12, 12, 16, 16], settings=FamilySettings(**limits))

    assert by_rows(found) == expected


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Draw rows that continue a prefix of an earlier row, and their numbers of full blocks."""
    tables: list[list[int]] = []
    block_ids = iter(range(1, 1000))
    for _ in range(draw(st.integers(1, MOST_ROWS))):
        continues = bool(tables) and draw(st.booleans())
        parent = draw(st.sampled_from(tables)) if continues else []
        shared = draw(st.integers(0, len(parent)))
        own = [next(block_ids) for _ in range(draw(st.integers(0, 4)))]
        tables.append([*parent[:shared], *own])
    num_full = [draw(st.integers(len(blocks) // 2, len(blocks))) for blocks in tables]
    return tables, num_full


@settings(max_examples=num_examples(200))
@given(tree=trees(), tokens=st.integers(1, 4))
def test_no_partition_saves_more(tree: tuple[list[list[int]], list[int]], tokens: int) -> None:
    tables, num_full = tree

    found = families_of(tables, [4 * full + tokens for full in num_full])

    assert_sound(found, tables, num_full)
    assert found.num_saved_blocks == best_saving(tables, num_full)


@pytest.mark.slow
def test_compiled_code_finds_the_same_families() -> None:
    source = random.Random(0)
    for _ in range(300):
        num_rows = source.randint(1, 60)
        table = np.zeros((num_rows, 40), np.int32)
        for row in range(num_rows):
            shared = source.randint(0, 39)
            if row and source.random() < 0.8:
                table[row, :shared] = table[source.randrange(row), :shared]
            else:
                shared = 0
            table[row, shared:] = range(40 * row + shared + 1, 40 * row + 41)
        num_full = np.array([source.randint(0, 39) for _ in range(num_rows)], np.int32)
        for limits in ((2, 1), (3, 4)):
            expected = partition(table, num_full, *limits)
            found = compiled()(table, num_full, *limits)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


class GroupingEngine(ScriptedEngine):
    """Groups the rows of each step, and checks the families against the KV blocks of the rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_families = 0
        self.num_compared = 0

    def _execute(self, scheduled: SchedulerOutput) -> Any:
        size = self.shape.block_size
        tables, seq_lens, query_lens = [], [], []
        for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            tables.append(list(blocks))
            seq_lens.append(self.scheduler.requests[request_id].num_computed_tokens)
            query_lens.append(num_scheduled)
        if tables:
            found = families_of(tables, seq_lens, query_lens, block_size=size)
            num_full = [
                (seq_len - query_len) // size if query_len == 1 else 0
                for seq_len, query_len in zip(seq_lens, query_lens, strict=True)
            ]
            assert_sound(found, tables, num_full)
            self.num_families += found.num_families
            if len(tables) <= MOST_ROWS:
                self.num_compared += 1
                assert found.num_saved_blocks == best_saving(tables, num_full)
        # Checks the tokens of every slot that a row reads, so that rows with one block have one
        # text.
        return super()._execute(scheduled)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Draw the threads of a tree of depth up to two."""
    script: dict[str, list[int]] = {}
    next_id = iter(range(FIRST_TEXT_ID, 4000))

    def thread(path: str, depth: int) -> None:
        tokens: list[int] = []
        for ordinal in range(draw(st.integers(0, 3 - depth)) if depth < 2 else 0):
            tokens += [next(next_id) for _ in range(draw(st.integers(0, 6)))]
            tokens.append(FORK)
            thread(f"{path}.{ordinal}" if path else str(ordinal), depth + 1)
        script[path] = [*tokens, *(next(next_id) for _ in range(draw(st.integers(0, 9)))), END]

    thread("", 0)
    return script


shapes = st.builds(
    EngineShape,
    # Short memory, so that threads are preempted and return with other blocks.
    num_blocks=st.integers(30, 90),
    block_size=st.sampled_from([4, 16]),
    max_num_seqs=st.integers(2, 10),
    max_num_batched_tokens=st.integers(13, 48),
    run_ahead=st.booleans(),
)
# Script, which of three system prompts, own prompt length, thread limit. Two requests of one
# script and prompt stand for the choices of a request with n = 2.
requests = st.lists(
    st.tuples(scripts(), st.integers(0, 2), st.integers(0, 12), st.integers(1, 6)),
    min_size=1,
    max_size=4,
)


def run_any_schedule(
    shape: EngineShape,
    wanted: list[tuple[Script, int, int, int]],
    aborts: list[tuple[int, int]],
    twice: bool,
    model_dir: Path,
) -> GroupingEngine:
    engine = GroupingEngine(shape, model_dir)
    wanted = wanted * 2 if twice else wanted
    for number, (script, system, length, max_threads) in enumerate(wanted):
        engine.add(
            f"r{number}",
            [*[2000 + system] * 12, *[1000 + number // (1 + twice)] * length, 999],
            script,
            parameters=fork_parameters(max_threads=max_threads),
            arrival_time=float(number),
        )
    for step in range(41):
        for at_step, number in aborts:
            if at_step == step and number < len(wanted):
                engine.abort(f"r{number}")
        engine.step()
    engine.run()
    engine.assert_nothing_is_left()
    return engine


schedules = given(
    shape=shapes,
    wanted=requests,
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=2),
    twice=st.booleans(),
)
function_fixtures = HealthCheck.function_scoped_fixture


@settings(max_examples=15, suppress_health_check=[function_fixtures])
@schedules
def test_families_of_scheduled_steps(model_dir: Path, **drawn: Any) -> None:
    run_any_schedule(**drawn, model_dir=model_dir)


@pytest.mark.slow
@settings(max_examples=num_examples(400), suppress_health_check=[function_fixtures])
@schedules
def test_families_of_many_schedules(model_dir: Path, **drawn: Any) -> None:
    run_any_schedule(**drawn, model_dir=model_dir)


def test_scheduled_steps_have_families(model_dir: Path) -> None:
    script = {
        "": [*range(10, 20), FORK, *range(20, 24), FORK, *range(24, 30), END],
        "0": [*range(30, 38), END],
        "1": [*range(40, 48), END],
    }

    engine = run_any_schedule(EngineShape(), [(script, 0, 3, 6)] * 2, [], True, model_dir)

    assert engine.num_families > 10
    assert engine.num_compared > 10
