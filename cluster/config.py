"""A cluster's configuration: the address, and the models behind it."""

from collections import Counter
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from apar_core.errors import AparError
from cluster.model_config import ModelConfig


class ConfigError(AparError):
    """The configuration cannot be used; the message names the field."""


class StartError(AparError):
    """The application did not come up."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would let the last of two equal keys win unseen."""

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


class ClusterConfig(BaseModel):
    """One address, and the models that it serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    ray_address: str | None = Field(
        None, min_length=1, description="Running Ray cluster to use; a private one when absent."
    )
    models: tuple[ModelConfig, ...] = Field(
        (ModelConfig(),), min_length=1, description="The models; apar-tiny when absent."
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for names in ("public_name", "deployment_name"):
            counts = Counter(getattr(model, names) for model in self.models)
            name, count = counts.most_common(1)[0]
            if count > 1:
                raise ValueError(f"models: {count} of them are called {name!r}; give each a `name`")
        return self

    @property
    def num_replicas(self) -> int:
        """Most engines of all models together."""
        return sum(model.max_replicas for model in self.models)


def load_config(
    path: Path | None, overrides: dict[str, Any], model_overrides: dict[str, Any]
) -> ClusterConfig:
    """The file's configuration with the command line's values (those not None) over it.

    `model_overrides` are for the only model. Raises ConfigError for an unreadable file, unknown
    keys, values out of range, and model overrides where the file names several models.
    """
    values = _read(path) if path is not None else {}
    values |= _given(overrides)
    model_values = _given(model_overrides)
    models = values.get("models", [{}])
    if model_values and isinstance(models, list) and len(models) != 1:
        raise ConfigError(
            f"{path} names {len(models)} models; set {', '.join(model_values)} there, for each"
        )
    if model_values and isinstance(models, list) and isinstance(models[0], dict):
        values["models"] = [models[0] | model_values]
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            _problem(problem)
            for problem in error.errors()
            # A list whose only items are wrong is not also too short.
            if problem["type"] != "too_short" or not problem["input"]
        )
        raise ConfigError(f"{path}: {problems}" if path is not None else problems) from error


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a mapping of settings is expected")
    return loaded or {}


def _problem(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if not place:
        return str(message)
    shown = f" (got {problem['input']!r})" if problem["type"] != "extra_forbidden" else ""
    return f"{place}: {message}{shown}"
