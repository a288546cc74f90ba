"""Reads YAML files, and words the errors in them without showing secrets."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from apar_core.errors import AparError

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


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but duplicate keys are errors."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError if it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error


def problems_of(error: ValidationError) -> str:
    """Return all problems of a file, each with its field."""
    return "; ".join(
        _problem(problem)
        for problem in error.errors()
        # A list whose only items are invalid is not also too short.
        if not (problem["type"] == "too_short" and problem["input"] and problem["loc"] == _MODELS)
    )


def _problem(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if not place:
        return str(message)
    shown = f" (got {problem['input']!r})" if _may_be_shown(problem) else ""
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
