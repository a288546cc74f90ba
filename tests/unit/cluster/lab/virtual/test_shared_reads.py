"""Shared reads equal those of a brute-force count over any trees of block tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.attention import families as grouping_of_the_engine
from apar_core.attention.families import partition
from apar_core.attention.settings import FamilySettings
from cluster.lab.virtual.shared_reads import (
    NOTHING_SHARED,
    BlockTables,
    Grouping,
    SharedReads,
    shared_reads,
)

Table = list[int]


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    """Run the engine's grouping without numba, which takes four seconds to compile it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping_of_the_engine, "_compiled", lambda: partition)
        yield


Rows = list[tuple[Table, int, int]]
"""Block table, full blocks and family of each row."""


@st.composite
def steps(draw: st.DrawFn) -> Rows:
    """Draw families of rows that fork anywhere, lose their blocks, and share system prompts."""
    new = count(1)
    prompts = [[next(new) for _ in range(draw(st.integers(0, 5)))] for _ in range(2)]
    rows: Rows = []
    for family in range(draw(st.integers(1, 4))):
        tables = [[*draw(st.sampled_from(prompts)), *(next(new) for _ in range(3))]]
        for _ in range(draw(st.integers(0, 6))):
            parent = draw(st.sampled_from(tables))
            kept = draw(st.integers(0, len(parent)))
            tables.append([*parent[:kept], *(next(new) for _ in range(draw(st.integers(0, 4))))])
            parent.extend(next(new) for _ in range(draw(st.integers(0, 2))))
        for table in tables:
            rows.append((table, draw(st.integers(0, len(table))), family))
    return draw(st.permutations(rows))


def brute_force(rows: Rows, grouping: Grouping) -> SharedReads:
    """Follow the definition: groups of rows, level by level, each with its common blocks."""
    limits = grouping.settings
    found: list[tuple[int, int, int]] = []

    def read(members: Rows, done: int, level: int) -> tuple[int, int]:
        """Read a group together if that pays; return its common blocks, and those read so far."""
        full = [table[:number] for table, number, _ in members]
        common = 0
        while all(len(each) > common for each in full) and len({x[common] for x in full}) == 1:
            common += 1
        if common - done >= limits.min_prefix_blocks:
            found.append((level, len(members), common - done))
            done = common
        return common, done

    def parts(members: Rows, key: object) -> list[Rows]:
        split: dict[object, Rows] = defaultdict(list)
        for row in members:
            split[key(row)].append(row)  # type: ignore[operator]
        return [each for each in split.values() if len(each) >= limits.min_rows]

    def nested(members: Rows, done: int, level: int) -> None:
        common, done = read(members, done, level)
        longer = [row for row in members if row[1] > common]
        for part in parts(longer, lambda row: row[0][common]):
            nested(part, done, level + 1)

    # A row that is shorter than any prefix that pays would only shorten those of others.
    long = [row for row in rows if row[1] >= limits.min_prefix_blocks]
    if grouping.levels == "across":
        for part in parts(long, lambda row: row[0][0]):
            _, done = read(part, 0, 0)
            for family in parts(part, lambda row: row[2]):
                read(family, done, 1)
    else:
        for family in parts(long, lambda row: row[2]):
            if grouping.levels == "nested":
                nested(family, 0, 0)
            else:
                read(family, 0, 0)
    saved = sum((size - 1) * gain for _, size, gain in found)
    if not found or saved < limits.min_saved_blocks:
        return NOTHING_SHARED
    levels = {level for level, _, _ in found}
    return SharedReads(saved, len(levels), len(found), sum(size for _, size, _ in found))


def arrays(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tables = BlockTables()
    slots = [tables.open() for _ in rows]
    for slot, (table, _, _) in zip(slots, rows, strict=True):
        tables.append(slot, table)
    full, families = (np.array([row[index] for row in rows], np.int64) for index in (1, 2))
    return tables.ids[slots], full, families


SETTINGS = st.builds(FamilySettings, st.integers(2, 4), st.integers(1, 4), st.integers(0, 12))
GROUPINGS = st.builds(Grouping, st.sampled_from(["request", "nested", "across"]), SETTINGS)


@given(steps(), GROUPINGS)
def test_shared_reads_are_those_of_a_brute_force_count(rows: Rows, grouping: Grouping) -> None:
    assert shared_reads(*arrays(rows), grouping) == brute_force(rows, grouping)


@given(steps(), SETTINGS)
def test_the_engines_own_groups_save_at_least_as_much_as_those_of_requests(
    rows: Rows, settings: FamilySettings
) -> None:
    pairs = replace(settings, min_rows=2)
    engine, requests = (
        shared_reads(*arrays(rows), Grouping(levels, pairs)) for levels in ("family", "request")
    )

    assert engine.saved_blocks >= requests.saved_blocks


@given(steps())
def test_nested_groups_read_each_block_of_a_family_once(rows: Rows) -> None:
    grouping = Grouping("nested", FamilySettings(min_prefix_blocks=1))
    full: dict[int, list[Table]] = defaultdict(list)
    for table, number, family in rows:
        full[family].append(table[:number])
    all_reads = sum(number for _, number, _ in rows)
    distinct = sum(len({each for table in tables for each in table}) for tables in full.values())

    assert shared_reads(*arrays(rows), grouping).saved_blocks == all_reads - distinct


def test_a_forked_family_with_a_system_prompt_worked_out_by_hand() -> None:
    rows: Rows = [
        ([1, 2, 3, 4, 5, 6], 5, 0),
        ([1, 2, 3, 4, 7, 8], 6, 0),
        ([1, 2, 3, 9], 4, 0),
        ([1, 2, 10, 11], 3, 1),
        ([20, 21, 22], 3, 2),
    ]
    one = FamilySettings(min_prefix_blocks=1)

    found = {
        levels: shared_reads(*arrays(rows), Grouping(levels, one))
        for levels in ("family", "request", "nested", "across")
    }

    assert found == {
        # Blocks 1 to 3 for three rows.
        "family": SharedReads(saved_blocks=6, passes=1, groups=1, rows=3),
        "request": SharedReads(saved_blocks=6, passes=1, groups=1, rows=3),
        # Also block 4 for two of them.
        "nested": SharedReads(saved_blocks=7, passes=2, groups=2, rows=5),
        # Blocks 1 and 2 for four rows, then block 3 for three.
        "across": SharedReads(saved_blocks=8, passes=2, groups=2, rows=7),
    }


@pytest.mark.parametrize(
    "settings",
    [FamilySettings(4, 1), FamilySettings(2, 4), FamilySettings(2, 1, min_saved_blocks=7)],
)
def test_what_saves_too_little_is_read_row_by_row(settings: FamilySettings) -> None:
    rows: Rows = [([1, 2, 3, number], 4, 0) for number in (4, 5, 6)]

    assert shared_reads(*arrays(rows), Grouping("request", settings)) == NOTHING_SHARED


def test_a_step_without_rows_shares_nothing() -> None:
    empty = np.zeros((0, 8), np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64)

    assert shared_reads(*empty, Grouping("across")) == NOTHING_SHARED


@given(st.lists(st.lists(st.integers(1, 30), max_size=200), max_size=90))
def test_block_tables_count_blocks_after_they_grew(lists: Sequence[Table]) -> None:
    tables = BlockTables()
    slots = [tables.open() for _ in lists]
    for slot, ids in zip(slots, lists, strict=True):
        tables.append(slot, [99, 98])
        tables.clear(slot)
        tables.append(slot, ids[:3])
        tables.append(slot, ids[3:])

    assert len(set(slots)) == len(slots)
    assert tables.count(slots) == (sum(map(len, lists)), len(set().union(*lists)))
