from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from apar_core.errors import CheckpointError
from apar_core.offline.speculation.acceptance import (
    ACCEPTANCE_FILE,
    VICUNA_7B,
    AcceptanceTable,
    read_table,
)

TABLE = AcceptanceTable.from_counts([[50, 20, 10], [20, 10, 0]], [100, 50], source="test")


def test_counts_become_shares_of_the_observed_positions() -> None:
    assert TABLE.probabilities == ((0.5, 0.2, 0.1), (0.4, 0.2, 0.0))
    assert (TABLE.num_distances, TABLE.num_ranks) == (2, 3)


def test_top_k_accuracy_adds_up_the_ranks() -> None:
    assert TABLE.top_k()[0] == pytest.approx((0.5, 0.7, 0.8))


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    TABLE.write(tmp_path)

    assert read_table(tmp_path) == TABLE


def test_a_table_without_known_observations_is_read_back(tmp_path: Path) -> None:
    VICUNA_7B.write(tmp_path)

    assert read_table(tmp_path) == VICUNA_7B


def test_a_missing_table_names_its_file_and_the_command_that_measures_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"acceptance\.json.*apar evaluate acceptance"):
        read_table(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probabilities": []}, "probabilities"),
        ({"probabilities": [[0.5], [0.5, 0.1]]}, "distance 2 has 2 ranks, distance 1 has 1"),
        ({"probabilities": [[0.5], [1.5]]}, "distance 2 has a probability outside 0 to 1"),
        ({"probabilities": [[0.7, 0.7], [0.5, 0.1]]}, "distance 1 adds up to 1.4"),
        ({"probabilities": [["many"], [0.5]]}, r"probabilities\.0\.0"),
        ({"observations": [10]}, "observations"),
        ({"observations": [10, 0]}, "observations"),
        ({"ranks": 3}, "ranks"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    fields = {"probabilities": [[0.5], [0.4]], "observations": [100, 50], "source": ""} | change
    (tmp_path / ACCEPTANCE_FILE).write_text(json.dumps(fields))

    with pytest.raises(CheckpointError, match=message):
        read_table(tmp_path)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / ACCEPTANCE_FILE).write_text("{")

    with pytest.raises(CheckpointError, match="JSON"):
        read_table(tmp_path)


def test_more_hits_than_positions_are_refused() -> None:
    with pytest.raises(ValidationError, match="more than 1"):
        AcceptanceTable.from_counts([[60, 60]], [100])
