"""`apar_*` metrics of vLLM's own server."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from apar_core.engine.server_metrics import ServerMetrics
from apar_core.tree.statistics import TreeStatistics, unforked_statistics
from deployments.metrics import catalogue
from tests.fakes.core_states import a_core_state

FORKED = TreeStatistics(
    threads=6,
    forks=5,
    max_depth=1,
    decode_steps=40,
    sequential_steps=100,
    attended_tokens=1000,
    sequential_attended_tokens=3000,
    max_cached_tokens=50,
    sequential_max_cached_tokens=110,
    text_tokens=99,
    control_tokens=11,
)
# A server with two engines, in a process of its own.
PROCESS = """
import sys
from types import SimpleNamespace
from apar_core.engine.server_metrics import ServerMetrics
from tests.fakes.core_states import a_core_state
from tests.unit.apar_core.engine.test_server_metrics import FORKED, a_config
metrics = ServerMetrics(a_config("m", engines=2))
metrics.finished(FORKED, 7)
if sys.argv[1] == "first":
    for engine in (0, 1):
        metrics.take_state(engine, a_core_state(
            running_threads=4, running_requests=2,
            steps={"num_steps": 5, "num_rows": 5, "busy_s": 0.5},
            admission_counters={"accepted": 3 + engine},
        ))
"""


def a_config(model: str, *, engines: int = 1) -> Any:
    parallel = SimpleNamespace(
        data_parallel_size=engines,
        data_parallel_size_local=engines,
        data_parallel_index=0,
        local_engines_only=False,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=model), parallel_config=parallel
    )


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_every_series_exists_before_the_first_request() -> None:
    ServerMetrics(a_config("idle", engines=2))

    for engine in ("0", "1"):
        of = {"model": "idle", "engine": engine}
        assert value("apar_forks_total", **of, outcome="accepted") == 0
        assert value("apar_fork_delays_total", **of, reason="policy") == 0
        assert value("apar_engine_requests", **of, state="running") == 0
        assert value("apar_threads", **of, state="deferred") == 0
    assert value("apar_request_threads_count", model="idle") == 0
    assert value("apar_prompt_tokens_total", model="idle") == 0


def test_states_and_answers_are_counted() -> None:
    metrics = ServerMetrics(a_config("busy"))
    for accepted in (2, 5):
        state = a_core_state(
            running_threads=8,
            deferred_threads=1,
            running_requests=3,
            waiting_requests=2,
            free_blocks=4,
            child_tokens=90,
            steps={"num_steps": 5, "num_rows": 5, "busy_s": 0.5},
            admission_counters={"accepted": accepted},
        )
        metrics.take_state(0, state)
    metrics.finished(FORKED, 7)
    metrics.finished(unforked_statistics(10, 7, ended=True), 7)

    of = {"model": "busy", "engine": "0"}
    assert value("apar_engine_requests", **of, state="running") == 3
    assert value("apar_engine_requests", **of, state="waiting") == 2
    assert value("apar_threads", **of, state="running") == 8
    assert value("apar_threads", **of, state="deferred") == 1
    assert value("apar_forks_total", **of, outcome="accepted") == 5
    assert value("apar_child_tokens_total", **of) == 90
    assert value("apar_kv_free_blocks", **of) == 4
    # Of two answers one is forked.
    assert value("apar_request_threads_bucket", model="busy", le="1.0") == 1
    assert value("apar_request_threads_count", model="busy") == 2
    assert value("apar_sequential_steps_total", model="busy") == 100 + 11
    assert value("apar_prompt_tokens_total", model="busy") == 14


def test_names_are_those_of_a_replica() -> None:
    ServerMetrics(a_config("names"))
    known = {metric.name.removesuffix("_total") for metric in catalogue.metrics()}

    ours = {family.name for family in REGISTRY.collect() if family.name.startswith("apar_")}

    assert ours
    assert ours <= known


@pytest.mark.slow
@pytest.mark.ci
def test_several_api_processes_are_added_up(tmp_path: Path) -> None:
    for name in ("first", "second"):
        subprocess.run(
            [sys.executable, "-c", PROCESS, name],
            env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
            check=True,
        )
    registry: Any = CollectorRegistry()
    collector: Any = MultiProcessCollector
    collector(registry, str(tmp_path))
    merged = registry.get_sample_value

    for engine, accepted in (("0", 3), ("1", 4)):
        of = {"model": "m", "engine": engine}
        assert merged("apar_forks_total", of | {"outcome": "accepted"}) == accepted
        assert merged("apar_engine_requests", of | {"state": "running"}) == 2
    assert merged("apar_request_threads_count", {"model": "m"}) == 2
    assert merged("apar_critical_path_steps_total", {"model": "m"}) == 80
