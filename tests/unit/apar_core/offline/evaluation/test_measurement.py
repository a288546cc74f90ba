"""Measurements by schedule and by trace, their averages, and the folder of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.decoders.interface import DecodedAnswer, DecodedThread, StepRecord
from apar_core.offline.evaluation.measurement import (
    AnswerKey,
    AnswerMeasurement,
    averages,
    by_category,
    measured,
)
from apar_core.reporting import LineStore, claim_folder
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId

FORK = 99


def measurement(**fields: Any) -> AnswerMeasurement:
    """Return an answer; by default a thread of nine tokens after a prompt of ten."""
    plain: dict[str, Any] = {
        "question_id": "1",
        "turn": 1,
        "category": "writing",
        "decoder": "vanilla_apar",
        "num_prompt_tokens": 10,
        "threads": 1,
        "forks": 0,
        "max_depth": 0,
        "text_tokens": 9,
        "control_tokens": 1,
        "steps": 10,
        "sequential_steps": 10,
        "max_cached_tokens": 19,
        "sequential_max_cached_tokens": 19,
        "attended_tokens": 145,
        "sequential_attended_tokens": 145,
        "prefill_s": 0.5,
        "decode_s": 2.0,
        "timed_tokens": 8,
    }
    return AnswerMeasurement(**{**plain, **fields})


FORKED = measurement(
    question_id="2",
    threads=3,
    forks=2,
    text_tokens=29,
    control_tokens=7,
    steps=12,
    sequential_steps=30,
    max_cached_tokens=25,
    sequential_max_cached_tokens=39,
    attended_tokens=510,
    sequential_attended_tokens=735,
    decode_s=1.0,
    timed_tokens=28,
)


def test_averages_are_over_answers_but_attended_tokens_over_predicted_tokens() -> None:
    row = averages([measurement(), FORKED])

    assert (row.num_answers, row.threads, row.forking_share) == (2, 2.0, 0.5)
    assert (row.text_tokens, row.steps, row.sequential_steps) == (19, 11, 20)
    assert (row.max_cached_tokens, row.sequential_max_cached_tokens) == (22, 29)
    # 10 predicted tokens by one thread; 29 + 7 without the two child tokens by three.
    assert row.attended_tokens == (145 + 510) / (10 + 34)
    assert row.sequential_attended_tokens == (145 + 735) / (10 + 30)
    assert row.tokens_per_s == (8 + 28) / 3
    assert row.fewer_steps == pytest.approx(20 / 11)


def test_without_times_there_is_no_speed() -> None:
    answer = measurement(prefill_s=None, decode_s=None, timed_tokens=None)

    assert averages([answer]).tokens_per_s is None


def test_categories_are_sorted_with_other_last() -> None:
    names = ["writing", "other", "coding", "common-sense", "writing"]
    answers = [measurement(question_id=str(i), category=name) for i, name in enumerate(names)]

    groups = by_category(answers)

    assert list(groups) == ["coding", "common-sense", "writing", "other"]
    assert len(groups["writing"]) == 2


def test_the_speed_excludes_the_prefill() -> None:
    child = ThreadId("root.0")
    answer = DecodedAnswer(
        threads=(
            DecodedThread(ROOT_THREAD, None, 0, (1, FORK, 2), ended=True),
            DecodedThread(child, ROOT_THREAD, 0, (3, 4), ended=True),
        ),
        trace=(
            StepRecord(1, 1, 1, 5.0, 10, 10),
            StepRecord(2, 1, 1, 0.1, 11, 11),
            StepRecord(3, 2, 2, 0.2, 14, 25),
            StepRecord(4, 2, 2, 0.3, 16, 27),
            StepRecord(5, 1, 1, 0.4, 15, 15),
        ),
        num_prompt_tokens=10,
        fork_id=FORK,
    )

    result = measured(AnswerKey("7", 2, "stem"), "medusa_apar", answer, "text")

    assert result.key == ("7", 2, "medusa_apar")
    assert (result.threads, result.forks, result.text_tokens) == (2, 1, 4)
    assert (result.steps, result.sequential_steps) == (5, 5)
    assert (result.max_cached_tokens, result.attended_tokens) == (16, 88)
    assert (result.prefill_s, result.timed_tokens) == (5.0, 3)
    assert result.decode_s == pytest.approx(1.0)
    assert result.ended


def store(folder: Path) -> LineStore[tuple[str, int, str], AnswerMeasurement]:
    return LineStore(folder / "answers.jsonl", {}, AnswerMeasurement, lambda line: line.key)


def test_answers_are_stored_on_disk_without_an_incomplete_last_line(tmp_path: Path) -> None:
    store(tmp_path).add(FORKED)
    path = tmp_path / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])

    store(tmp_path).add(measurement(text="Ünïcode\n"))

    assert len(path.read_bytes().splitlines()) == 2
    assert store(tmp_path).lines == {
        ("2", 1, "vanilla_apar"): FORKED,
        ("1", 1, "vanilla_apar"): measurement(text="Ünïcode\n"),
    }


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"question_id": "1"}\n')

    with pytest.raises(EvaluationError, match="line 1: turn: Field required"):
        store(tmp_path)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"

    assert not claim_folder(folder, {"model": "a", "decoder": "plain"})
    assert claim_folder(folder, {"model": "a", "decoder": "plain"})
    with pytest.raises(EvaluationError, match=r"model was 'a', is 'b'.*another --out"):
        claim_folder(folder, {"model": "b", "decoder": "plain"})


def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from apar_core.reporting import claim_folder; "
        "claim_folder(Path(sys.argv[1]), {}); print('mine', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "mine\n"

    with pytest.raises(EvaluationError, match=r"another process writes to .*: wait for its end"):
        claim_folder(tmp_path, {})

    other.communicate()
    assert claim_folder(tmp_path, {})


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")

    with pytest.raises(EvaluationError, match=r"run.json is damaged"):
        claim_folder(tmp_path, {})
