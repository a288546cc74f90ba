"""Hand-written content about dozens of topics, read from the YAML files beside this module."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NUM_POINTS = 8

_FOLDER = Path(__file__).parent


def _split_columns(value: object) -> object:
    """Turn the file's "title | detail" lines into the fields of a model."""
    return [part.strip() for part in value.split("|")] if isinstance(value, str) else value


class Point(BaseModel):
    """One tip or fact: a short title and the detail that follows from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(min_length=3)
    detail: str = Field(min_length=3)


class Passage(BaseModel):
    """One paragraph: its topic sentence and the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sentence: str = Field(min_length=3)
    rest: str = Field(min_length=3)


class Stage(BaseModel):
    """One section of a guide: a title, a leading sentence and the points it holds (from 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    lead: str
    points: tuple[Annotated[int, Field(ge=1, le=NUM_POINTS)], ...] = Field(min_length=1)


def _point(value: object) -> object:
    columns = _split_columns(value)
    return (
        dict(zip(("title", "detail"), columns, strict=True))
        if isinstance(columns, list)
        else columns
    )


def _passage(value: object) -> object:
    columns = _split_columns(value)
    return (
        dict(zip(("sentence", "rest"), columns, strict=True))
        if isinstance(columns, list)
        else columns
    )


def _stage(value: object) -> object:
    columns = _split_columns(value)
    if not isinstance(columns, list):
        return columns
    title, lead, points = columns
    return {"title": title, "lead": lead, "points": tuple(int(part) for part in points.split())}


class Topic(BaseModel):
    """All content about one topic.

    `name` follows "tips for" (`item` tip) or "facts about" (`item` fact).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    item: Literal["tip", "fact"] = "tip"
    points: tuple[Annotated[Point, BeforeValidator(_point)], ...] = Field(
        alias="tips", min_length=NUM_POINTS, max_length=NUM_POINTS
    )
    passages: tuple[Annotated[Passage, BeforeValidator(_passage)], ...] = Field(
        alias="paragraphs", min_length=3, max_length=3
    )
    stages: tuple[Annotated[Stage, BeforeValidator(_stage)], ...] = Field(
        min_length=2, max_length=3
    )
    closing: str


def _read_topics() -> Iterator[Topic]:
    for path in sorted(_FOLDER.glob("topics_*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            yield Topic.model_validate(entry)


@cache
def load_topics() -> tuple[Topic, ...]:
    """Return all topics, in the order of the files' names."""
    return tuple(_read_topics())
