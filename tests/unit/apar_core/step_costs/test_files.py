"""Step costs survive their file, and a wrong file is told by field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.errors import StepCostsError
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import read_costs, write_costs
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import step_costs

PREDICTED = step_costs(find_model("llama-7b"), find_gpu("h100"))
SECONDS = st.floats(0, 10)


@given(
    st.lists(st.tuples(st.integers(1, 9999), SECONDS), min_size=1, unique_by=lambda each: each[0]),
    SECONDS,
    SECONDS,
    st.none() | st.integers(1, 2048),
    st.text(),
)
def test_costs_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory,
    table: list[tuple[int, float]],
    attended_s: float,
    host_s: float,
    largest_graph: int | None,
    source: str,
) -> None:
    costs = StepCosts(
        "n", "measured", source, tuple(sorted(table)), attended_s, host_row_s=host_s,
        largest_graph=largest_graph,
    )  # fmt: skip
    file = tmp_path_factory.mktemp("costs") / "costs.json"

    write_costs(costs, file)

    assert read_costs(file) == costs


def test_predicted_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_costs(PREDICTED, tmp_path / "a.json")

    assert read_costs(tmp_path / "a.json") == PREDICTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attended_token_s": -1.0}, r"attended_token_s: .*greater than or equal to 0, not -1\.0"),
        ({"matrix_s": []}, r"matrix_s: .*at least 1 item.*, not \[\]"),
        ({"matrix_s": [[1, "slow"]]}, r"matrix_s\.0\.1: .*valid number.*, not 'slow'"),
        ({"matrix_s": [[2, 1.0], [1, 1.0]]}, r"matrix_s: .*must increase, not \[2, 1\]"),
        ({"kind": "guessed"}, r"kind: .*'measured' or 'predicted', not 'guessed'"),
        ({"thread_s": 1}, r"thread_s: .*not permitted, not 1"),
        ({"format": "other"}, r"format: .*'apar step costs 1', not 'other'"),
        ({"largest_graph": 0}, r"largest_graph: .*greater than 0, not 0"),
    ],
)
def test_a_wrong_field_is_told_with_its_value(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "costs.json"
    write_costs(PREDICTED, file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(StepCostsError, match=message) as caught:
        read_costs(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"name": NaN}'])
def test_a_file_of_something_else_is_told(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(content)

    with pytest.raises(StepCostsError, match="step costs"):
        read_costs(file)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(StepCostsError, match="No such file"):
        read_costs(tmp_path / "gone.json")
