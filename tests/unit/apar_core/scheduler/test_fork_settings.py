from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from apar_core.errors import EngineError
from apar_core.scheduler.fork_policy import AdaptivePolicy, EagerPolicy
from apar_core.scheduler.fork_scheduler import ForkScheduler
from apar_core.scheduler.fork_settings import ForkSettings
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine


def engine(model_dir: Path, **forks: Any) -> ScriptedEngine:
    return ScriptedEngine(EngineShape(forks=forks), model_dir)


def test_scheduler_takes_its_policy_from_the_settings(model_dir: Path) -> None:
    assert isinstance(engine(model_dir).scheduler.admission.policy, EagerPolicy)

    policy = engine(model_dir, policy="adaptive", token_time_ms=8.0).scheduler.admission.policy

    assert isinstance(policy, AdaptivePolicy)
    assert policy.token_time_s == 0.008


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"policy": "greedy"}, "apar.policy"),
        ({"token_time_ms": 0}, "apar.token_time_ms"),
        ({"max_replica_threads": 0}, "apar.max_replica_threads"),
        ({"max_treads": 3}, "apar.max_treads"),
    ],
)
def test_a_wrong_setting_is_named(model_dir: Path, values: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineError, match=field):
        engine(model_dir, **values)


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValidationError):
        ForkSettings().policy = "adaptive"  # type: ignore[misc]


def test_an_engine_without_prefix_caching_is_refused() -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate"),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )

    with pytest.raises(EngineError, match="needs prefix caching"):
        ForkScheduler(config)
