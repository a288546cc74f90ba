from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import CompilationMode

from apar_core.errors import EngineError
from apar_core.scheduler.fork_policy import AdaptivePolicy, EagerPolicy
from apar_core.scheduler.fork_scheduler import ForkScheduler
from apar_core.scheduler.fork_settings import ForkSettings, check_engine
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
        ({"attention": "families"}, "apar.attention"),
        ({"family": {"min_rows": 1}}, "min_rows must be 2 or more, not 1"),
        ({"family": {"rows": 2}}, "apar.family.rows"),
    ],
)
def test_a_wrong_setting_is_named(model_dir: Path, values: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineError, match=field):
        engine(model_dir, **values)


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValidationError):
        ForkSettings().policy = "adaptive"  # type: ignore[misc]


def unchecked(**sections: dict[str, Any]) -> Any:
    """Return the parts of a vLLM configuration that are checked, of an engine that can fork."""
    given: dict[str, dict[str, Any]] = {
        "model_config": {"runner_type": "generate"},
        "cache_config": {"enable_prefix_caching": True},
        "parallel_config": {"pipeline_parallel_size": 1},
        "device_config": {"device_type": "cpu"},
        "compilation_config": {"mode": CompilationMode.NONE},
        "scheduler_config": {"scheduler_cls": ForkScheduler},
    }
    return SimpleNamespace(
        **{name: SimpleNamespace(**given[name] | sections.get(name, {})) for name in given}
    )


def test_an_engine_without_prefix_caching_is_refused() -> None:
    off = {"enable_prefix_caching": False}

    with pytest.raises(EngineError, match="needs prefix caching"):
        ForkScheduler(unchecked(cache_config=off))

    # An embedding model has nothing to fork.
    check_engine(unchecked(cache_config=off, model_config={"runner_type": "pooling"}))


def test_a_pipeline_on_a_cpu_needs_a_compiled_model() -> None:
    two = {"pipeline_parallel_size": 2}

    with pytest.raises(EngineError, match="pipeline_parallel_size=2: without compilation"):
        ForkScheduler(unchecked(parallel_config=two))

    check_engine(unchecked())
    check_engine(unchecked(parallel_config=two, device_config={"device_type": "cuda"}))
    compiled = {"mode": CompilationMode.DYNAMO_TRACE_ONCE}
    check_engine(unchecked(parallel_config=two, compilation_config=compiled))
