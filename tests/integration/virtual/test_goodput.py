"""Adaptive forks sustain at least the rate of eager forks and of none, whatever the SLO."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.lab.experiments.parts import PartStore
from cluster.lab.simulation import goodput
from cluster.lab.simulation.goodput import find_goodput
from cluster.lab.simulation.settings import ADAPTIVE, NO_FORKS, GoodputSettings

TRACES = Path("../shared/data/traces")
SLOS = ("ttft=1s,tpot=1.5x", "ttft=1s,tpot=3x", "ttft=1s,tpot=3x,silence=5x")
# Rates lie on a grid of 3 %, and the runs are short.
TOLERANCE = 0.04

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"needs {TRACES}"),
]


@pytest.mark.parametrize(("model", "gpu"), [("llama-7b", "a100-80gb"), ("llama-3-8b", "h100")])
@pytest.mark.parametrize("mix", ["mixed", "structured"])
def test_adaptive_forks_sustain_the_rate_of_the_better_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, gpu: str, mix: str
) -> None:
    monkeypatch.setattr(goodput, "_LEAST_S", 15.0)
    settings = GoodputSettings(
        model=model,
        gpu=gpu,
        trace=[TRACES / f"{mix}.jsonl"],
        slo=list(SLOS),
        methods=(NO_FORKS, "eager", ADAPTIVE),
        requests=400,
    )
    store = PartStore(tmp_path, settings.as_text())

    results = find_goodput(settings, store, 2, lambda *_: lambda: None)

    found: Mapping[tuple[str, str], float] = {
        (each.method, each.slo): each.rate for each in results
    }
    for slo in SLOS:
        others = max(found[NO_FORKS, slo], found["eager", slo])
        assert found[ADAPTIVE, slo] >= (1 - TOLERANCE) * others > 0, slo
