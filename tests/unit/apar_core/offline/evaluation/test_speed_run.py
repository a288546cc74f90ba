"""Speed evaluation with real decoders of a small model, and its option checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.evaluation.measurement import AnswerMeasurement
from apar_core.offline.evaluation.speed_run import SpeedSettings, check_settings, run_speed
from apar_core.reporting import Report
from tests.fakes.progress import NoProgress

HERE = (Path(__file__),)


def settings(**fields: Any) -> SpeedSettings:
    return SpeedSettings(model="m", model_name="m", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"decoders": ("fast",)},
            "--decoders 'fast' is not one of plain, vanilla_apar, medusa, medusa_apar, ppd",
        ),
        ({"baseline": "slow"}, "--against 'slow' is not one of"),
        ({"decoders": ("plain",)}, "the same decoder twice"),
        ({"count_only": True}, "--count-only needs answers to --replay"),
        ({"random_weights": "tiny"}, "--random-weights needs answers to --replay"),
        (
            {"count_only": True, "random_weights": "tiny", "replay": HERE},
            "omit --random-weights",
        ),
        ({"tokenizer": "llama"}, "omit --tokenizer"),
        ({"decoders": ("medusa_apar",)}, "medusa_apar needs --medusa-heads"),
        ({"decoders": ("ppd_apar",)}, "ppd_apar needs --prompt-tokens"),
        ({"baseline": "ppd"}, "ppd needs --prompt-tokens"),
        ({"baseline": None, "baseline_model": "o"}, "--against-model needs --against plain or"),
        (
            {"baseline_model": "o", "replay": HERE, "random_weights": "tiny"},
            "--against-model is compared with a checkpoint",
        ),
        ({"replay": (Path("nowhere.jsonl"),)}, "--replay nowhere.jsonl: no such file"),
    ],
)
def test_invalid_option_combinations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        check_settings(settings(**fields))


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({}, "m"),
        ({"replay": HERE}, "m"),
        (
            {"replay": HERE, "count_only": True, "decoders": ("medusa_apar",)},
            "the paper's schedule",
        ),
        ({"replay": HERE, "random_weights": "llama-7b"}, "random weights of llama-7b"),
    ],
)
def test_the_report_says_what_is_measured(fields: dict[str, Any], subject: str) -> None:
    check_settings(settings(**fields))

    assert settings(**fields).subject.startswith(subject)


def test_a_run_may_be_resumed_with_more_questions_and_another_folder() -> None:
    first = settings(limit=5, questions=Path("a")).as_facts()

    assert settings(limit=9, questions=Path("b")).as_facts() == first
    assert settings(dtype="float16").as_facts() != first


def test_a_baseline_checkpoint_is_part_of_the_baselines_name() -> None:
    other = settings(decoders=("plain",), baseline_model="/models/o", baseline_model_name="o")

    check_settings(other)

    assert other.baseline_name == "plain of o"
    assert not other.repeats_text
    assert settings().baseline_name == "plain"


LIST = (
    "Here are three ideas for a quiet evening:\n\n"
    "1. Read: Take a book that you have wanted to open for a long time.\n"
    "2. Cook: Try a soup with lentils, onions and a little cumin.\n"
    "3. Walk: Go once around the block before it gets dark.\n\n"
    "Any of these will do."
)
PARAGRAPHS = (
    "Sleep helps memory. While you sleep, the brain repeats what it has seen during the day.\n\n"
    "Light matters too. Bright screens late in the evening keep you awake for longer.\n\n"
    "Short."
)
PLAIN = "12 + 30 = 42"
TRACE = [
    {"id": 1, "prompt": "Ideas?", "response": LIST, "category": "tips"},
    {"id": 2, "prompt": "How to sleep?", "response": PARAGRAPHS, "category": "tips"},
    {"id": 3, "prompt": "12 + 30?", "response": PLAIN, "category": "math", "turn": 2},
]


def trace_file(folder: Path, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return path


def run(folder: Path, **fields: Any) -> Report:
    plain = {"model": str(checkpoint_path()), "model_name": "apar-tiny", "device": "cpu"}
    return run_speed(SpeedSettings(**{**plain, **fields}), folder, NoProgress())


def answers(path: Path, decoder: str) -> list[AnswerMeasurement]:
    return [line for line in read_lines(path, AnswerMeasurement) if line.decoder == decoder]


def schedule(answer: AnswerMeasurement) -> dict[str, Any]:
    """Return a measurement without decoder name and times."""
    return answer.model_dump(exclude={"decoder", "prefill_s", "decode_s", "timed_tokens"})


def test_counting_agrees_with_the_decoders_trace(tmp_path: Path) -> None:
    trace = trace_file(tmp_path)
    run(tmp_path / "counted", replay=(trace,), count_only=True)
    run(tmp_path / "replayed", replay=(trace,), random_weights="tiny", dtype="float32")

    counted = answers(tmp_path / "counted/answers-trace.jsonl", "count")
    replayed = answers(tmp_path / "replayed/answers-trace.jsonl", "vanilla_apar")
    flat = answers(tmp_path / "replayed/answers-trace.jsonl", "plain")

    assert [answer.threads for answer in counted] == [4, 3, 1]
    assert [schedule(answer) for answer in replayed] == [schedule(answer) for answer in counted]
    assert [
        (answer.steps, answer.max_cached_tokens, answer.attended_tokens) for answer in flat
    ] == [
        (
            answer.sequential_steps,
            answer.sequential_max_cached_tokens,
            answer.sequential_attended_tokens,
        )
        for answer in counted
    ]
    assert all(answer.decode_s and answer.decode_s > 0 for answer in replayed + flat)


def test_a_checkpoint_replays_with_its_own_tokenizer(tmp_path: Path) -> None:
    report = run(tmp_path / "out", replay=(trace_file(tmp_path),), limit=1)

    [answer] = answers(tmp_path / "out/answers-trace.jsonl", "vanilla_apar")
    assert answer.threads == 4
    assert answer.ended
    assert "figure4_speed" in report.figures
    assert report.facts["Decoder"] == "vanilla_apar, compared with plain"


def test_decoder_and_baseline_answer_the_prompts_and_a_run_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    settings = {"prompts": "held-out", "max_tokens": 300}
    run(folder, limit=1, **settings)
    first = (folder / "answers.jsonl").read_text()
    report = run(folder, limit=2, **settings)

    lines = [json.loads(line) for line in (folder / "answers.jsonl").open()]
    assert (folder / "answers.jsonl").read_text().startswith(first)
    assert [(line["question_id"], line["decoder"]) for line in lines] == [
        ("1", "vanilla_apar"),
        ("1", "plain"),
        ("2", "vanilla_apar"),
        ("2", "plain"),
    ]
    # Plain decoding generates the same text in one thread.
    for forked, plain in zip(lines[::2], lines[1::2], strict=True):
        assert plain["threads"] == 1
        assert plain["text"] == forked["text"]
        assert plain["steps"] == forked["sequential_steps"] >= forked["steps"]
    assert report.data["runs"][0]["answers"]["averages"]["all"]["num_answers"] == 2
    with pytest.raises(EvaluationError, match="holds another run"):
        run(folder, prompts="held-out", max_tokens=20)


def test_a_second_turn_follows_the_first_answer(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    line = {"question_id": 1, "turns": ["Give me 3 tips for sleeping well.", "Shorter, please."]}
    questions.write_text(json.dumps(line))

    run(tmp_path / "out", prompts=str(questions), baseline=None, max_tokens=60)

    first, second = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").open()]
    assert (first["turn"], second["turn"]) == (1, 2)
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"] + first["text_tokens"]


def test_a_prompt_beyond_the_context_is_skipped_and_reported(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"prompt": "word " * 3000}, {"prompt": "Give me 3 tips for sleeping well."}]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    report = run(tmp_path / "out", prompts=str(questions), max_tokens=30)

    assert report.facts["Left out"].startswith("1 questions; question 1: prompt has ")
    assert report.facts["Cut off"].startswith("2 answers")
    assert report.data["runs"][0]["answers"]["averages"]["all"]["num_answers"] == 1
    questions.write_text(json.dumps(lines[0]))
    with pytest.raises(EvaluationError, match="answers none of questions: question 1: prompt has"):
        run(tmp_path / "other", prompts=str(questions))


def test_two_files_with_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = (trace_file(tmp_path), trace_file(tmp_path / "b"))

    with pytest.raises(EvaluationError, match="have the same name"):
        run(tmp_path / "out", replay=files, count_only=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cuda"}, "no CUDA GPU"),
        ({"dtype": "int8"}, "--dtype 'int8' is not one of"),
        ({"model": "/nowhere/model"}, "no tokenizer in '/nowhere/model'"),
    ],
)
def test_unavailable_models_and_devices_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        run(tmp_path / "out", prompts="held-out", **fields)
