from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import CheckpointError, EvaluationError
from apar_core.formats.prompt_file import PromptTokenSettings
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.evaluation.acceptance_report import (
    Guesses,
    acceptance_report,
    run_acceptance,
    tree_lengths,
)
from apar_core.offline.speculation.acceptance import VICUNA_7B, AcceptanceTable, read_table
from apar_core.offline.speculation.prompt_tokens import PromptTokens, save_prompt_tokens
from apar_core.reporting import Report, write_report

TABLE = AcceptanceTable.from_counts([[50, 20], [20, 10]], [100, 50], source="a test")


def rows(report: Report, name: str) -> list[tuple[object, ...]]:
    return [row for table in report.tables if table.name == name for row in table.rows]


def test_accuracy_adds_up_the_ranks_and_has_an_interval() -> None:
    report = acceptance_report([Guesses("prompt_tokens", TABLE, 1)], {}, sizes=(4,))

    first, second = rows(report, "accuracy")
    assert first == ("Prompt tokens", 1, 100, 50.0, pytest.approx(9.8), *[None] * 5)
    assert second[:4] == ("Prompt tokens", 2, 50, 40.0)
    assert rows(report, "probabilities")[1] == ("Prompt tokens", 2, 40.0, 20.0)


def test_tables_of_different_sizes_stand_side_by_side(tmp_path: Path) -> None:
    proposers = [Guesses("prompt_tokens", VICUNA_7B, 1), Guesses("medusa_heads", TABLE, 0)]

    report = acceptance_report(proposers, {"Model": "vicuna-7b"}, sizes=(1, 8))

    page = write_report(report, tmp_path).read_text()
    assert "vicuna-7b" in page
    assert (tmp_path / "acceptance.png").is_file()
    assert rows(report, "accuracy")[0][4] is None  # The paper does not say how many positions.
    assert rows(report, "probabilities")[-1] == ("Medusa heads", 2, 40.0, 20.0, *[None] * 8)
    assert [row[:2] for row in rows(report, "trees")] == [
        (name, size) for name in ("Prompt tokens", "Medusa heads") for size in (1, 8)
    ]
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["acceptance"]["Medusa heads"]["observations"] == [100, 50]


def test_trees_of_a_size_are_ordered_and_plain_decoding_gains_one_token() -> None:
    single, lengths = tree_lengths(VICUNA_7B, 1), tree_lengths(VICUNA_7B, 24)

    assert list(single.values())[:3] == [1.0, 1.0, None]
    optimal, dynamic, static, random = (length or 0.0 for length in lengths.values())
    assert optimal >= dynamic > static > random > 1


def test_heads_predict_without_inputs_so_their_best_tree_is_static() -> None:
    lengths = tree_lengths(TABLE, 3, ensemble=0)

    assert lengths["dynamic"] is None
    assert lengths["optimal"] == lengths["static"] == pytest.approx(1.7)


def heads_without_table(folder: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SHIPPED_HEADS["apar-tiny"] / name, folder)
    return folder


def test_a_missing_table_is_measured_once_and_again_on_demand(tmp_path: Path) -> None:
    heads = heads_without_table(tmp_path)

    def report(**changed: Any) -> Report:
        return run_acceptance(
            str(checkpoint_path()), "apar-tiny", medusa_heads=heads, limit=1, **changed
        )

    facts = report().facts

    measured = read_table(heads)
    assert measured.observations is not None
    assert measured.observations[0] > 20
    # On 200 prompts, 0.81 and 0.73.
    assert [row[0] > 0.5 for row in measured.probabilities] == [True, True]
    assert facts["Medusa heads measured on"] == measured.source
    TABLE.write(heads)
    assert report().facts["Medusa heads measured on"] == "a test"
    report(measure=True)
    assert read_table(heads) == measured


def test_a_table_is_shown_without_its_model(tmp_path: Path) -> None:
    heads = heads_without_table(tmp_path)
    TABLE.write(heads)

    report = run_acceptance("no-such-model", "none", medusa_heads=heads)

    assert rows(report, "accuracy")[0][0] == "Medusa heads"


def test_without_weights_there_is_nothing_to_evaluate() -> None:
    with pytest.raises(EvaluationError, match="give --prompt-tokens or --medusa-heads"):
        run_acceptance("m", "m")


def test_prompt_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    save_prompt_tokens(PromptTokens(PromptTokenSettings(hidden_size=8, fingerprint="")), tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size 8"):
        run_acceptance(str(checkpoint_path()), "apar-tiny", prompt_tokens=tmp_path, limit=1)
