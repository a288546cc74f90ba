"""Suggestions for misspelt names and fields."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from apar_core.suggestions import did_you_mean, did_you_mean_field


class Engine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_rows: int = 1


class Pipe(BaseModel):
    model_config = ConfigDict(extra="forbid")

    stages: int = 1


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    engine: Engine | None = None
    listed: tuple[Engine, ...] = ()
    named: dict[str, Engine] = {}
    either: Engine | Pipe = Engine()
    words: dict[str, str] = {}


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("apar-tniy", "; did you mean apar-tiny?"),
        ("APAR-Tiny", "; did you mean apar-tiny?"),
        ("llama", ""),
    ],
)
def test_only_a_similar_name_is_suggested(name: str, suggestion: str) -> None:
    assert did_you_mean(name, ("apar-tiny", "smollm2-135m")) == suggestion


def test_a_similar_folder_is_shown_with_its_path() -> None:
    said = did_you_mean("modle", ("model", "data"), folder=Path("/out"))

    assert said == "; did you mean /out/model?"


@pytest.mark.parametrize(
    ("values", "suggestion"),
    [
        ({"engin": {}}, "; did you mean engine?"),
        ({"engine": {"max_row": 2}}, "; did you mean max_rows?"),
        ({"listed": [{}, {"max_row": 2}]}, "; did you mean max_rows?"),
        ({"named": {"a": {"max_row": 2}}}, "; did you mean max_rows?"),
        ({"either": {"stage": 2}}, "; did you mean stages?"),
        ({"engine": {"listed": 2}}, ""),
        ({"engine": {"max_rows": "x"}}, ""),
    ],
)
def test_an_unknown_field_is_compared_with_those_of_its_own_model(
    values: dict[str, object], suggestion: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(values)

    assert did_you_mean_field(caught.value.errors()[-1], Settings) == suggestion
