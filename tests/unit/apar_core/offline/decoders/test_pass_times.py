from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.decoders.interface import DecodedAnswer, StepRecord, TokenChoice
from apar_core.offline.decoders.load import DecoderName, ThreadDecoder
from apar_core.offline.decoders.pass_times import (
    PassTimes,
    measure_passes,
    measured_trees,
    read_passes,
    write_passes,
)
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.sparse_tree import TreeFamily
from tests.fakes.progress import NoProgress
from tests.unit.apar_core.offline.decoders.small_decoders import FORK, prompt_decoder

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


def test_pass_times_are_read_as_written(tmp_path: Path) -> None:
    write_passes({"prompt_tokens": TIMES}, tmp_path / "passes.json")

    assert read_passes(tmp_path / "passes.json") == {"prompt_tokens": TIMES}


@pytest.mark.parametrize(("name", "fork_id"), [("ppd_apar", FORK), ("ppd", None)])
def test_decoders_are_measured_at_every_size_and_number_of_rows(
    name: DecoderName, fork_id: int | None
) -> None:
    trees = measured_trees(TABLE, 1)

    def load(family: TreeFamily) -> ThreadDecoder:
        return prompt_decoder(name, trees=lambda rows: family.for_rows(rows).trees)

    progress = NoProgress()
    on_round = progress.start("passes", 2)
    times = measure_passes(
        load, trees, 3, range(5, 24), fork_id, repeats=1, rows=(1, 3), on_round=on_round
    )

    assert progress.steps == 2
    assert set(trees) == {tree.num_inputs() for tree in trees.values()}
    assert set(times.seconds) == ({1, 3} if fork_id is not None else {1})
    # Sizes that are too slow are left out.
    assert all({1} <= set(row) <= set(trees) for row in times.seconds.values())
    assert all(seconds > 0 for row in times.seconds.values() for seconds in row.values())


def test_sizes_beyond_two_that_cannot_pay_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trees = measured_trees(TABLE, 1)
    longest = max(tree.expected_length() for tree in trees.values())
    asked: list[int] = []

    def answer(inputs: int, _prompt: object, choice: TokenChoice) -> DecodedAnswer:
        """Return passes that take 1 s for each of one row, and so many inputs for two rows."""
        rows = len(choice.tokens_of_thread or {})
        asked.append(rows * 100 + inputs)
        seconds = 1.0 if rows == 1 else float(inputs)
        records = [StepRecord(step, rows, rows, seconds, 1, 1) for step in range(1, 5)]
        return DecodedAnswer((), tuple(records), 1, FORK)

    monkeypatch.setattr("apar_core.offline.decoders.pass_times.decode_answer", answer)
    load: Any = lambda family: family.for_rows(1).num_inputs()  # noqa: E731
    times = measure_passes(load, trees, 3, range(5, 24), FORK, rows=(1, 2)).seconds

    assert list(times[1]) == sorted(trees)
    second = sorted(inputs for inputs in trees if inputs > longest)[1]
    assert list(times[2]) == [inputs for inputs in sorted(trees) if inputs <= second]
    assert max(asked) == 200 + second


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no pass times in .* `apar evaluate passes` measures them"),
        ("{", "JSON"),
        ("{}", "has no pass times"),
        ('{"medusa_heads": {}}', "has no pass times"),
        ('{"prompt_tokens": {"1": {}}}', "has no pass times"),
        ('{"prompt_tokens": {"1": {"1": -1.0}}}', "greater than 0"),
        ('{"prompt_tokens": {"0": {"1": 1.0}}}', "greater than 0"),
        ('{"heads": {"1": {"1": 1.0}}}', "prompt_tokens"),
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
