from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from apar_core.offline.data.sampling import LineReservoir

LINES = [f"{number}\n".encode() for number in range(20)]


def sample(
    folder: Path, capacity: int | None, seed: str, lines: list[bytes] = LINES
) -> list[bytes]:
    with (folder / "spool").open("w+b") as spool:
        reservoir = LineReservoir(spool, capacity, seed)
        for line in lines:
            reservoir.offer(line)
        reservoir.write(folder / "out")
        assert reservoir.num_seen == len(lines)
        kept = (folder / "out").read_bytes().splitlines(keepends=True)
        assert len(reservoir) == len(kept)
    return kept


@pytest.mark.parametrize("capacity", [None, 20, 21])
def test_everything_is_kept_in_order_below_the_capacity(
    tmp_path: Path, capacity: int | None
) -> None:
    assert sample(tmp_path, capacity, "0") == LINES


def test_a_sample_depends_only_on_the_seed(tmp_path: Path) -> None:
    first = sample(tmp_path, 5, "0")

    assert len(set(first)) == 5
    assert sample(tmp_path, 5, "0") == first
    assert sample(tmp_path, 5, "1") != first


def test_each_line_has_the_same_probability(tmp_path: Path) -> None:
    counts = Counter(line for seed in range(1000) for line in sample(tmp_path, 5, str(seed)))

    # 250 expected, standard deviation 14.
    assert len(counts) == 20
    assert min(counts.values()) > 190
    assert max(counts.values()) < 310
