"""Reads YAML files, and words the errors in them without showing secrets."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from apar_core.errors import AparError
from apar_core.suggestions import did_you_mean_field
from apar_core.yaml_files import load_yaml

_MODELS = ("models",)
# Fields in which somebody may have written a secret by mistake.
_SECRET_FIELDS = (
    "keys",
    "hash",
    "cache_secret",
    "rate_storage",
    "rate_storage_password",
    "env",
    "endpoint",
)


class ConfigError(AparError):
    """The configuration is invalid; the message names the field."""


class SecretError(AparError):
    """A secret is unreadable or unusable; the message names its field, never its value."""


class StartError(AparError):
    """The application did not start."""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError if it cannot be read."""
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error


def check_plain_values(given: Any, read: Any, place: str = "") -> None:
    """Compare the values of a file with the settings made of them.

    Raises ConfigError for a boolean where a number is expected, which pydantic takes as 0 or 1, for
    another value where a boolean is expected, and for a variable such as `${MODEL}` that nobody has
    replaced.
    """
    if isinstance(given, bool) and isinstance(read, int | float) and not isinstance(read, bool):
        raise ConfigError(f"{place}: a number is expected (got {str(given).lower()})")
    if isinstance(read, bool) and not isinstance(given, bool):
        raise ConfigError(f"{place}: true or false is expected (got {given!r:.40})")
    if isinstance(given, str) and (variable := _VARIABLE.search(given)):
        raise ConfigError(
            f"{place}: {variable[0]} is not replaced: variables are not expanded in this file; "
            "write the value, or expand it before (envsubst)"
        )
    for key, value in _items(given):
        part = getattr(read, str(key), None) if isinstance(read, BaseModel) else None
        if isinstance(read, dict):
            part = read.get(key)
        elif isinstance(read, list | tuple) and isinstance(key, int) and key < len(read):
            part = read[key]
        check_plain_values(value, part, f"{place}.{key}" if place else str(key))


_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def problems_of(error: ValidationError, kind: type[BaseModel] | None = None) -> str:
    """Return all problems of a file, each with its field.

    With the validated model, an unknown key gets the nearest known one as a suggestion.
    """
    return "; ".join(
        _problem(problem) + ("" if kind is None else did_you_mean_field(problem, kind))
        for problem in error.errors()
        # A list whose only items are invalid is not also too short.
        if not (problem["type"] == "too_short" and problem["input"] and problem["loc"] == _MODELS)
    )


def _problem(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if not place:
        return str(message)
    given = problem["input"]
    is_named = isinstance(given, str) and repr(given) in message
    shown = f" (got {given!r})" if _may_be_shown(problem) and not is_named else ""
    return f"{place}: {message}{shown}"


def _may_be_shown(problem: Any) -> bool:
    """Whether the invalid value is a plain one and cannot be a secret.

    A record, or an item of a list, may be or contain an API key.
    """
    field = problem["loc"][-1]
    if problem["type"] == "extra_forbidden" or field in _SECRET_FIELDS or isinstance(field, int):
        return False
    if "headers" in problem["loc"]:
        return False
    return not isinstance(problem["input"], dict | list | tuple)
