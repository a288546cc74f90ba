"""Suggestions for misspelt names and fields, in the words of all error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

# Step costs and other parts without pydantic import this module.
if TYPE_CHECKING:
    from pydantic import BaseModel


def did_you_mean(
    name: str, known: Iterable[str], *, folder: Path | None = None, cutoff: float = 0.6
) -> str:
    """Return `; did you mean NAME?` with the most similar of the known names, or nothing.

    Case is ignored. `folder` is shown before the name; `cutoff` is the least similarity (0 to 1).
    """
    names = {each.lower(): each for each in known}
    similar = get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    if not similar:
        return ""
    found = names[similar[0]]
    return f"; did you mean {found if folder is None else folder / found}?"


def did_you_mean_field(problem: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """Return the suggestion for an unknown field, nothing for another problem.

    `problem` is one of pydantic's errors, `kind` the validated model.
    """
    if problem["type"] != "extra_forbidden":
        return ""
    *sections, key = map(str, problem["loc"])
    models = [kind]
    for section in sections:
        fields = [each.model_fields[section] for each in models if section in each.model_fields]
        # Indices, keys of mappings and members of unions stand between a field and its model.
        if fields:
            models = [model for field in fields for model in _models_in(field.annotation)]
    return did_you_mean(key, [name for model in models for name in model.model_fields])


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models of a field, also of an optional one, a union, a list or a mapping."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models_in(each)]
