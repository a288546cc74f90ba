"""What a run leaves in its folder, and what the next run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.evaluation.measurement import AnswerKey, AnswerStore
from apar_core.reporting import claim_folder
from tests.unit.apar_core.offline.evaluation.test_measurement import FORKED, measurement


def test_answers_outlast_the_process_that_measured_them(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    store = AnswerStore(path)
    store.add(FORKED)
    store.add(measurement(text="Ünïcode\n"))

    again = AnswerStore(path)

    assert again.find("2", 1, "vanilla_apar") == FORKED
    assert again.find("2", 2, "vanilla_apar") is None
    assert again.find("2", 1, "plain") is None
    keys = [AnswerKey("1", 1, "writing"), AnswerKey("2", 1, "writing")]
    assert [answer.text for answer in again.of_decoder("vanilla_apar", keys)] == ["Ünïcode\n", ""]


def test_a_line_that_was_not_finished_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerStore(path).add(FORKED)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])

    store = AnswerStore(path)
    store.add(measurement())

    assert len(path.read_bytes().splitlines()) == 2
    assert AnswerStore(path).find("1", 1, "vanilla_apar") == measurement()


def test_a_damaged_line_within_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerStore(path).add(FORKED)
    path.write_text('{"question_id": "1"}\n' + path.read_text())

    with pytest.raises(EvaluationError, match="line 1: turn: Field required"):
        AnswerStore(path)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"

    assert not claim_folder(folder, {"model": "a", "decoder": "plain"})
    assert claim_folder(folder, {"model": "a", "decoder": "plain"})
    with pytest.raises(EvaluationError, match=r"model was 'a', is 'b'.*another --out"):
        claim_folder(folder, {"model": "b", "decoder": "plain"})


def test_damaged_settings_of_a_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")

    with pytest.raises(EvaluationError, match=r"run.json is damaged"):
        claim_folder(tmp_path, {})
