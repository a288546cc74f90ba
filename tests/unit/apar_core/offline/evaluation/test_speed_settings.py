"""Wishes that cannot be had together are refused with the options' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.evaluation.speed_run import SpeedSettings, check_settings

HERE = (Path(__file__),)


def settings(**fields: Any) -> SpeedSettings:
    return SpeedSettings(model="m", model_name="m", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"decoders": ("fast",)},
            "--decoders 'fast' is not one of plain, vanilla_apar, medusa_apar",
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
        ({"baseline": None, "baseline_model": "o"}, "--against-model needs --against plain or"),
        (
            {"baseline_model": "o", "replay": HERE, "random_weights": "tiny"},
            "--against-model is compared with a checkpoint",
        ),
        ({"replay": (Path("nowhere.jsonl"),)}, "--replay nowhere.jsonl: no such file"),
    ],
)
def test_what_cannot_be_had_together_is_refused(fields: dict[str, Any], message: str) -> None:
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
def test_what_is_measured_is_said_in_words(fields: dict[str, Any], subject: str) -> None:
    check_settings(settings(**fields))

    assert settings(**fields).subject.startswith(subject)


def test_a_run_may_go_on_with_more_questions_and_from_another_folder() -> None:
    first = settings(limit=5, questions=Path("a")).as_facts()

    assert settings(limit=9, questions=Path("b")).as_facts() == first
    assert settings(dtype="float16").as_facts() != first


def test_the_baselines_checkpoint_gives_it_a_name_of_its_own() -> None:
    other = settings(decoders=("plain",), baseline_model="/models/o", baseline_model_name="o")

    check_settings(other)

    assert other.baseline_name == "plain of o"
    assert not other.repeats_text
    assert settings().baseline_name == "plain"
