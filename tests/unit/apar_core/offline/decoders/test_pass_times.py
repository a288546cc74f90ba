from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.errors import EvaluationError
from apar_core.offline.decoders.pass_times import (
    PASS_INPUTS,
    PassTimes,
    measure_passes,
    read_passes,
    stored_passes,
)
from apar_core.offline.speculation.acceptance import AcceptanceTable

TABLE = AcceptanceTable(probabilities=((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1)))
TIMES = PassTimes({1: {1: 0.010, 4: 0.010, 8: 0.020}, 4: {1: 0.012, 4: 0.040, 8: 0.080}})


def test_pass_times_are_linear_between_points() -> None:
    assert TIMES.pass_s(1)(1) == pytest.approx(0.010)
    assert TIMES.pass_s(1)(6) == pytest.approx(0.015)
    # Three rows take the time of four, with as many inputs each.
    assert TIMES.pass_s(3)(3 * 8) == pytest.approx(0.080)


def test_trees_shrink_where_passes_become_longer() -> None:
    family = TIMES.family(TABLE, ensemble=1, max_inputs=8)

    assert family.for_rows(1).num_inputs() == 4
    assert family.for_rows(4).num_inputs() == 1


def test_pass_times_are_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "passes.json"
    calls: list[int] = []

    def measure() -> PassTimes:
        calls.append(1)
        return TIMES

    assert stored_passes(path, measure).seconds == stored_passes(path, measure).seconds
    assert len(calls) == 1


def test_a_model_is_measured_with_any_context() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip

    times = measure_passes(LlamaForCausalLM(config).eval(), 3, repeats=1, rows=(1, 2))

    assert set(times.seconds) == {1, 2}
    assert all(set(row) == set(PASS_INPUTS) for row in times.seconds.values())
    assert all(seconds > 0 for row in times.seconds.values() for seconds in row.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no pass times in .* `apar evaluate passes` measures them"),
        ("{", "JSON"),
        ("{}", "has no pass times"),
        ('{"1": {}}', "has no pass times"),
        ('{"1": {"1": -1.0}}', "greater than 0"),
        ('{"0": {"1": 1.0}}', "greater than 0"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "passes.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(EvaluationError, match=message) as error:
        read_passes(path)
    assert str(path) in str(error.value)
