"""Forks as the server ships them against sequential decoding, and against forks without reserve."""

from pathlib import Path

import pytest

from apar_core.scheduler.fork_settings import ForkSettings
from cluster.lab.experiments.methods import EAGER, METHODS, SEQUENTIAL
from cluster.lab.experiments.runs import RunStore, do_runs
from cluster.lab.experiments.settings import FIGURE_5A, ExperimentSettings, keys_of

TRACES = Path("../shared/data/traces")
UNRESERVED = "eager-unreserved"
TOLERANCE = 0.01
# At one of the points the reserve makes the mean latency 1.05 % longer, and the run 1.05 % faster.
LATENCY_TOLERANCE = 0.015

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"needs {TRACES}"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """Runs at the smallest and the largest share of the cache; they take about 4 minutes."""
    settings = ExperimentSettings(
        models=("llama-7b", "llama-3-8b"),
        gpus=("a100-80gb", "h100"),
        trace=TRACES / "structured.jsonl",
        mixed_trace=TRACES / "mixed.jsonl",
        kv_shares=(0.1, 0.9),
        methods=(SEQUENTIAL, EAGER, UNRESERVED),
    )
    store = RunStore(tmp_path_factory.mktemp("runs"), settings)
    do_runs(keys_of((FIGURE_5A,), settings), settings, store, lambda *_: lambda: None, workers=2)
    return store


def test_the_runs_are_those_of_the_default_settings() -> None:
    default = ExperimentSettings(trace=TRACES / "structured.jsonl")

    assert METHODS[EAGER].policy == ForkSettings().policy
    assert METHODS[EAGER].reserves
    assert default.growth_reserve_tokens == ForkSettings().growth_reserve_tokens


@pytest.mark.parametrize("model", ["llama-7b", "llama-3-8b"])
@pytest.mark.parametrize("other", [SEQUENTIAL, UNRESERVED])
def test_forks_are_as_fast_at_every_point(store: RunStore, model: str, other: str) -> None:
    points = [key for key in store.lines if key.model == model and key.method == EAGER]

    assert len(points) == 8
    for point in points:
        ours, base = store.lines[point], store.lines[point.of_method(other)]
        assert ours.whole_tokens_per_s >= (1 - TOLERANCE) * base.whole_tokens_per_s, point.title
        assert ours.latency_s.mean <= (1 + LATENCY_TOLERANCE) * base.latency_s.mean, point.title
