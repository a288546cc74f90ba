"""Predictions of whole runs, with an engine of known costs in place of the real one."""

import json
from pathlib import Path

import pytest

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.evaluation.replay_text import load_text
from apar_core.step_costs.costs import StepCosts
from apar_core.virtual.engine import VirtualEngine, VirtualSpec
from cluster.experiments.calibrate import StepTimer, fit_samples
from cluster.experiments.engine import ExperimentEngine, hidden_ids
from cluster.experiments.validate import (
    RunPoint,
    ValidationSettings,
    engine_facts,
    load_answers,
    predict,
    replay,
)

pytestmark = pytest.mark.engine
LIST = "Here are {number} tips:\n\n" + "\n".join(
    f"{i}. Tip {i}: do this and that, and then do it again." for i in range(1, 6)
)
# Linear over the tokens of a step that forked runs have and sequential ones have not.
COSTS = StepCosts(
    "any",
    "predicted",
    "made up",
    ((1, 3e-3), (4, 3e-3), (64, 48e-3)),
    2e-6,
    launch_s=1e-3,
    # As the fit assumes, which sees only sequential runs.
    repeated_token_s=0.0,
)


def test_a_fit_of_sequential_runs_predicts_forked_ones(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "id": str(i),
            "category": "writing",
            "prompt": f"Give {i} tips." * i,
            "response": LIST.format(number=i),
        }
        for i in range(1, 13)
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    settings = ValidationSettings(
        model="apar-tiny", trace=trace, answers=12, limits=(2, 6), max_tokens=300
    )
    config = json.loads((checkpoint_path() / "config.json").read_text(encoding="utf-8"))
    points = [
        RunPoint(method, limit, share)
        for method in ("sequential", "eager")
        for limit in settings.limits
        for share in (1.0, 0.4)
    ]
    answers = load_answers(settings, load_text(settings.tokenizer))
    with VirtualEngine(VirtualSpec(config, COSTS, 4096, block_size=32, is_async=False)) as engine:
        experiment = ExperimentEngine(engine, hidden_ids(engine, "apar-tiny"))
        timer = StepTimer(engine, clock=lambda: engine.device.clock.now_s)
        measured = {}
        for point in points:
            measured[point] = replay(experiment, answers, settings, point)
            if point == points[3]:
                fit = fit_samples(timer.samples, name="sequential", source="a test")
        facts = engine_facts(engine)

    costs = dict.fromkeys(("grid", "sequential", "smallest limit"), fit.costs)
    predicted = predict(settings, points, costs, facts, lambda *_: lambda: None)

    forked = [point for point in points if point.method == "eager"]
    assert {point for fit_name, point in predicted if fit_name == "sequential"} == set(forked)
    for point in points:
        found = predicted["grid", point]
        assert found.steps == measured[point].steps
        assert found.duration_s == pytest.approx(measured[point].duration_s, rel=0.03)
    assert measured[forked[0]].steps < 0.7 * measured[points[0]].steps
