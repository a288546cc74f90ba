from __future__ import annotations

from pathlib import Path

import pytest

from apar_core.errors import CheckpointError, EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_PROMPTS
from apar_core.offline.decoders.pass_times import PassTimes
from apar_core.offline.evaluation.acceptance_report import Guesses
from apar_core.offline.evaluation.passes_report import passes_report, run_passes
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.reporting import write_report
from tests.fakes.progress import NoProgress

TABLE = AcceptanceTable(probabilities=((0.5, 0.2, 0.1), (0.4, 0.2, 0.1)))
# One row is free up to 8 inputs; four rows take time for each input.
TIMES = PassTimes({1: {1: 0.010, 8: 0.010, 16: 0.020}, 4: {1: 0.010, 8: 0.080, 16: 0.160}})


def test_the_best_size_is_named_for_each_number_of_rows(tmp_path: Path) -> None:
    report = passes_report(
        {"prompt_tokens": TIMES}, [Guesses("prompt_tokens", TABLE, 1)], {"Model": "test"}
    )

    passes, sizes = report.tables
    assert passes.rows == (
        ("Prompt tokens", 1, 10.0, 10.0, 20.0),
        ("Prompt tokens", 4, 10.0, 80.0, 160.0),
    )
    assert [row[:3] for row in sizes.rows] == [("Prompt tokens", 1, 8), ("Prompt tokens", 4, 1)]
    one, four = (row[-1] for row in sizes.rows)
    assert one == pytest.approx(sizes.rows[0][3])  # A pass takes as long as with one input.
    assert four == 1.0
    write_report(report, tmp_path)
    assert (tmp_path / "passes.png").is_file()


def test_without_weights_there_is_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="give --prompt-tokens or --medusa-heads"):
        run_passes(tmp_path, "no-such-model", "none", NoProgress())


def test_a_context_that_leaves_no_room_for_the_inputs_is_refused(tmp_path: Path) -> None:
    model, prompts = str(checkpoint_path()), SHIPPED_PROMPTS["apar-tiny"]

    with pytest.raises(EvaluationError, match=r"2040 and 112 measured tokens exceed .* 2048"):
        run_passes(tmp_path, model, "apar-tiny", NoProgress(), prompt_tokens=prompts, context=2040)


def test_weights_without_a_table_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no acceptance table"):
        run_passes(tmp_path, "no-such-model", "none", NoProgress(), medusa_heads=tmp_path)
