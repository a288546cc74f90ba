"""Reading of the `config.json` beside Medusa heads or prompt tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from apar_core.errors import CheckpointError

CONFIG_FILE = "config.json"

SettingsT = TypeVar("SettingsT", bound=BaseModel)


def read_settings(
    path: Path,
    name: str,
    model_types: Sequence[str],
    kind: type[SettingsT],
    prepare: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None,
) -> SettingsT:
    """Read the settings of heads or prompt tokens; `prepare` checks and renames their fields.

    Raises CheckpointError for a missing or damaged file, a `model_type` that is none of
    `model_types`, and naming the first field that is wrong.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"no configuration of {name} in {path}: {error}") from error
    found = config.get("model_type") if isinstance(config, dict) else config
    if found not in model_types:
        wanted = " or ".join(map(repr, model_types))
        raise CheckpointError(f"{path}: model_type must be {wanted}, got {found!r}")
    try:
        return kind.model_validate(config if prepare is None else prepare(config, path))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{path}: {field}: {first['msg']} (got {first['input']!r})"
        ) from error
