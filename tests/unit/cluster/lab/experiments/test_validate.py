"""Predictions of whole runs, with an engine of known costs in place of the real one."""

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.evaluation.replay_text import load_text
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import read_costs
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import step_costs
from cluster.lab.experiments import validate as validation
from cluster.lab.experiments.calibrate import StepTimer, fit_samples
from cluster.lab.experiments.engine import ExperimentEngine, hidden_ids
from cluster.lab.experiments.random_model import write_random_model
from cluster.lab.experiments.settings import ValidationSettings
from cluster.lab.experiments.validate import (
    RunPoint,
    engine_facts,
    load_answers,
    measure_runs,
    predict,
    published_costs,
    replay,
    validate,
)
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec

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


def write_trace(path: Path) -> Path:
    lines = [
        {
            "id": str(i),
            "category": "writing",
            "prompt": f"Give {i} tips." * i,
            "response": LIST.format(number=i),
        }
        for i in range(1, 13)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.ci
def test_a_fit_of_sequential_runs_predicts_forked_ones(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
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


class Stages:
    """Counts the parts of each stage that were done."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}

    def __call__(self, stage: str, total: int) -> Any:
        self.done.setdefault(stage, 0)

        def count() -> None:
            self.done[stage] += 1

        return count


@pytest.mark.ci
def test_published_costs_are_compared_with_a_gpu_that_schedules_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in virtual time, with the published costs of an H100, stands in for the H100."""
    model = str(write_random_model("llama-7b", tmp_path / "model"))
    costs = step_costs(find_model(model), find_gpu("h100"))
    config = find_model(model).config

    def engine(*_: Any, **limits: int) -> VirtualEngine:
        limit = limits["max_num_seqs"]
        return VirtualEngine(VirtualSpec(config, costs, 6_000, max_rows=limit, max_model_len=1000))

    monkeypatch.setattr(validation, "calibrated_engine", engine)
    monkeypatch.setattr(validation, "load_answers", lambda settings, _: load_virtual(settings))
    monkeypatch.setattr(validation, "on_gpu", lambda: True)
    settings = ValidationSettings(
        model=model, trace=write_trace(tmp_path / "trace.jsonl"), answers=12, limits=(20,),
        max_tokens=300, kv_shares=(0.9, 0.2), repeats=1,
    )  # fmt: skip
    h100 = "NVIDIA H100 80GB HBM3"

    measure_runs(settings, tmp_path / "out", Stages(), h100)
    monkeypatch.setattr(validation, "calibrated_engine", None)
    stages = Stages()
    report = validate(settings, tmp_path / "out", stages, h100)

    # The second call measures nothing again.
    assert "runs" not in stages.done
    assert report.facts["Steps"] == "as many in virtual time as measured, in every run"
    # Not 20 * 300: this GPU has less memory.
    assert "6000 tokens of KV cache" in report.facts["Runs"]
    runs, speed_ups = report.tables
    place = [column.title for column in runs.columns].index("published: s") + 1
    for row in runs.rows:
        assert row[place] == pytest.approx(0, abs=0.5)
    assert [row[0] for row in speed_ups.rows] == [
        "20 requests, 0.9 of KV", "20 requests, 0.2 of KV"
    ]  # fmt: skip
    for _, measured, predicted, *_ in speed_ups.rows:
        assert isinstance(measured, float)
        assert measured > 1.2
        assert predicted == pytest.approx(measured, rel=0.005)
    # Rows of the grid that do not fit into the cache are left out, and the fit goes as far.
    found = read_costs(tmp_path / "out" / "step-costs.json")
    assert 16 <= max(tokens for tokens, _ in found.matrix_s) <= 260
    assert found.kind == "measured"


def load_virtual(settings: ValidationSettings) -> Any:
    from cluster.lab.virtual.text import virtual_text

    return load_answers(settings, virtual_text(settings.tokenizer))


def test_a_gpu_without_published_costs_has_none() -> None:
    assert published_costs("llama-7b", "NVIDIA Imaginary 9000", 16) is None
    assert published_costs("llama-7b", "NVIDIA A100-SXM4-80GB", 16) == step_costs(
        find_model("llama-7b"), find_gpu("a100-80gb")
    )
