"""The way from one configuration to another, in steps that lose no request."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from cluster.config import ClusterConfig, ConfigError

_FIXED = ("host", "port", "ray_address", "metrics")


@dataclass(frozen=True, slots=True)
class Step:
    """One deployment on the way: the models that have replicas, and what the gateway offers."""

    replicas: ClusterConfig
    served: ClusterConfig


def check_change(old: ClusterConfig, new: ClusterConfig) -> None:
    """Raise ConfigError where only a restart can bring the new configuration."""
    for name in _FIXED:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise ConfigError(
                f"{name}: cannot be changed from {before!r} to {after!r} while serving; "
                "restart `apar serve`"
            )


def steps(old: ClusterConfig, new: ClusterConfig) -> Iterator[Step]:
    """What to deploy, one after the other; nothing where nothing has changed.

    First every model has its replicas, new ones and those that go beside each other, then the
    gateway offers the new ones, and only then those that it no longer offers lose theirs.
    """
    wanted = {model.deployment_name: model for model in new.models}
    known = {model.deployment_name for model in old.models}
    both = (
        *(wanted.get(model.deployment_name, model) for model in old.models),
        *(model for model in new.models if model.deployment_name not in known),
    )
    is_going = bool(known - set(wanted))
    if both != old.models:
        yield Step(old.model_copy(update={"models": both}), old)
    if new != old:
        yield Step(new.model_copy(update={"models": both}) if is_going else new, new)
    if is_going:
        yield Step(new, new)


def changes(old: ClusterConfig, new: ClusterConfig) -> list[str]:
    """What a rollout does, in words."""
    before = {model.public_name: model for model in old.models}
    after = {model.public_name: model for model in new.models}
    said = [f"model {name} is added" for name in after if name not in before]
    said += [f"model {name} is removed" for name in before if name not in after]
    said += [
        f"model {name} is changed: {', '.join(_changed_fields(before[name], model))}"
        for name, model in after.items()
        if name in before and before[name] != model
    ]
    rest = [name for name in _changed_fields(old, new) if name != "models"]
    return said + [f"{name} is changed" for name in rest]


def _changed_fields(old: BaseModel, new: BaseModel) -> list[str]:
    return [name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)]
