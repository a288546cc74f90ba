"""Tables and reports from made-up runs, with figures that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from apar_core.reporting import Report, ReportTable, write_report
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import write_costs
from cluster.lab.experiments.methods import METHODS
from cluster.lab.experiments.plots import METHOD_COLOURS
from cluster.lab.experiments.report import build_report
from cluster.lab.experiments.runs import CategoryCounts, Run
from cluster.lab.experiments.samples import Sample, Spread
from cluster.lab.experiments.settings import FIGURE_5A, ExperimentSettings, RunKey, keys_of
from cluster.lab.experiments.tables import (
    Comparison,
    comparisons,
    larger_model_latency,
    ratio_table,
    saved_memory,
    small_memory_ratio,
)

SETTINGS = ExperimentSettings(
    trace=Path("answers.jsonl"),
    methods=("sequential", "eager"),
    peer_methods=("sequential", "eager", "skeleton"),
    kv_shares=(0.2, 0.9),
    peer_shares=(0.9,),
    concurrencies=(1, 8, 1000),
)
PLACE = {"model": "llama-7b", "device": "a100-80gb", "concurrency": 350}


def run_of(key: RunKey, tokens_per_s: float = 100.0, **values: Any) -> Run:
    counts = CategoryCounts(
        answers=4, forked=4, threads=12, predicted_tokens=400, sequential_predicted_tokens=400,
        max_cached_tokens=600, sequential_max_cached_tokens=800, attended_tokens=30_000,
        sequential_attended_tokens=40_000,
    )  # fmt: skip
    given: dict[str, Any] = {
        "key": key,
        "capacity_tokens": 1000,
        "token_time_s": None,
        "answers": 4,
        "text_tokens": 400,
        "duration_s": 4.0,
        "kept_samples": 3,
        "throughput": Spread(tokens_per_s, tokens_per_s - 1, tokens_per_s + 1),
        "whole_tokens_per_s": 100.0,
        "kv_tokens": 400.0,
        "rows_per_step": 3.0,
        "latency_s": Spread(2.0, 1.0, 3.0),
        "latency_p99_s": 3.0,
        "token_latency_s": 0.02,
        "steps": 80,
        "rows": 240,
        "sequences": 4,
        "computed_tokens": 600,
        "prompt_tokens": 200,
        "preemptions": 0,
        "peak_kv_tokens": 500,
        "largest_rows": 4,
        "largest_tokens": 200,
        "forks": 0,
        "forks_delayed": 0,
        "attended_tokens": 24_000,
        "blocks": 2000,
        "distinct_blocks": 1000,
        "held_back_steps": 0,
        "categories": {"writing": counts, "math": counts},
        "samples": (Sample(3.0, 100.0, 400.0, 3.0, True),),
    }
    return Run(**{**given, **values})


def all_runs(settings: ExperimentSettings) -> dict[RunKey, Run]:
    """Return runs in which a method is faster with more memory, and forking loses with little."""
    speed = {"sequential": 100.0, "eager": 160.0, "skeleton": 80.0}
    runs = {}
    for key in keys_of(("fig5a", "fig5b", "peers"), settings):
        tokens_per_s = speed[key.method] if key.kv_share > 0.5 or key.method == "eager" else 50.0
        latency_s = 1.4 if key.method == "eager" else 2.0
        runs[key] = run_of(key, tokens_per_s, latency_s=Spread(latency_s, latency_s, latency_s))
    return runs


def table(report: Report, name: str) -> ReportTable:
    [found] = [each for each in report.tables if each.name == name]
    return found


def columns(found: ReportTable, *titles: str) -> list[tuple[Any, ...]]:
    names = [column.title for column in found.columns]
    return [tuple(row[names.index(title)] for title in titles) for row in found.rows]


def test_every_method_but_sequential_has_its_ratios_in_one_table() -> None:
    report = build_report("all", SETTINGS, all_runs(SETTINGS))

    ratios = columns(table(report, "ratios"), "KV share", "load", "method", "throughput x")
    assert ratios == [
        (0.2, "queue, 350", "eager", pytest.approx(3.2)),
        (0.9, "queue, 350", "eager", pytest.approx(1.6)),
        # 1,000 concurrent requests are more than the model's limit.
        (0.9, "1 in a loop", "eager", pytest.approx(1.6)),
        (0.9, "8 in a loop", "eager", pytest.approx(1.6)),
        # Losses stand in the same table.
        (0.9, "queue, 350", "skeleton", pytest.approx(0.8)),
    ]


def test_claims_are_ranges_over_all_points_beside_the_papers() -> None:
    claims = table(build_report("all", SETTINGS, all_runs(SETTINGS)), "claims")

    assert columns(claims, "device", "method", "throughput x", "latency x") == [
        ("predicted for a100-80gb", "eager", "1.60 to 3.20", "0.70 to 0.70"),
        ("paper, A100-80GB", "eager", "1.20 to 1.70", "0.65 to 0.80"),
    ]


def test_what_the_paper_says_about_figure_5_stands_beside_these_runs() -> None:
    settings = SETTINGS.model_copy(update={"models": ("llama-7b", "llama-13b")})
    runs = {
        key: run.model_copy(update={"latency_s": Spread(6.0, 6.0, 6.0)})
        if key.model == "llama-13b" and key.method == "eager" and key.concurrency == 8
        else run
        for key, run in all_runs(settings).items()
    }

    said = table(build_report("all", settings, runs), "sentences")

    small, saved, larger = (
        "throughput at 0.2 of the cache, over sequential's best",
        "share of the cache saved at sequential's throughput",
        "mean latency over the sequential 7B model's (concurrent requests)",
    )
    assert columns(said, "model", "claim", "paper", "here") == [
        ("llama-7b", small, "above 1", "1.60"),
        # Sequential decoding needs 0.9 of the cache for less than forks have with 0.2.
        ("llama-7b", saved, "up to 0.50", "0.78"),
        ("llama-13b", small, "above 1", "1.60"),
        ("llama-13b", saved, "up to 0.50", "0.78"),
        ("llama-13b", larger, "similar", "0.70 (1), 3.00 (8)"),
    ]


def queued(*points: tuple[float, float, float]) -> list[Comparison]:
    """Return comparisons with these shares of the cache, throughputs, and sequential ones."""
    found = []
    for share, forked, sequential in points:
        key = RunKey(**PLACE, method="eager", kv_share=share)
        pair = (run_of(key, forked), run_of(key.of_method("sequential"), sequential))
        found.append(Comparison(key, (pair,)))
    return found


def test_saved_memory_is_interpolated_between_the_sizes_of_the_cache() -> None:
    # Forks have sequential's 100 at 0.2 + 0.5 * 0.2 = 0.3 instead of 0.6.
    assert saved_memory(queued((0.2, 90, 50), (0.4, 110, 80), (0.6, 120, 100))) == pytest.approx(
        0.5
    )
    # Slower forks need more of the cache, or more than there is.
    assert saved_memory(queued((0.2, 40, 60), (0.4, 80, 90))) == pytest.approx(-0.5)
    assert saved_memory(queued((0.2, 40, 90), (0.4, 80, 95))) is None
    assert saved_memory(queued((0.2, 90, 50))) is None


RECORDED = Path(__file__).parents[5] / "docs" / "raw" / "2026-11-23-paper-scale.json"


@pytest.mark.parametrize(
    ("model", "trace", "small", "saved", "larger"),
    [
        ("llama-7b", "structured", 1.04, 0.80, {}),
        ("llama-7b", "mixed", 0.79, 0.58, {}),
        ("llama-13b", "structured", 0.89, 0.72, {1: 0.97, 128: 1.34}),
        ("llama-13b", "mixed", 0.60, 0.45, {}),
    ],
)
def test_the_recorded_runs_give_the_figures_on_the_page_of_results(
    model: str, trace: str, small: float, saved: float, larger: dict[int, float]
) -> None:
    runs: dict[RunKey, Run] = {}
    for line in json.loads(RECORDED.read_text()):
        key = RunKey(**{name: line[name] for name in RunKey.model_fields})
        if key.device == "a100-80gb" and key.method in ("sequential", "eager"):
            latency = Spread(line["latency_s"], 0.0, 0.0)
            runs[key] = run_of(key, line["tokens_per_s"], latency_s=latency)
    found = comparisons(list(runs), runs)
    group = [
        each
        for each in found
        if (each.key.model, each.key.trace, each.key.method) == (model, trace, "eager")
    ]

    in_queue = [each for each in group if not each.key.is_closed_loop]
    assert small_memory_ratio(in_queue) == pytest.approx(small, abs=0.005)
    assert saved_memory(in_queue) == pytest.approx(saved, abs=0.005)
    ratios = larger_model_latency(group, found)
    assert {number: round(ratios[number], 2) for number in larger} == larger


def test_figure_5b_has_the_papers_axis_for_runs_with_a_full_queue() -> None:
    def sampled(key: RunKey, tokens_per_s: float, running: int) -> Run:
        samples = tuple(
            Sample(3.0 * n, tokens_per_s, 400.0, 3.0, True, running) for n in range(1, 6)
        )
        return run_of(key, tokens_per_s, samples=samples)

    given = {
        # With 15 requests, sequential decoding takes 150 ms a token and forks 75.
        ("llama-7b", 0.2, "sequential"): (100.0, 10),
        ("llama-7b", 0.9, "sequential"): (100.0, 20),
        ("llama-7b", 0.2, "eager"): (200.0, 15),
        ("llama-7b", 0.9, "eager"): (250.0, 25),
        ("llama-13b", 0.2, "sequential"): (50.0, 10),
        ("llama-13b", 0.9, "sequential"): (50.0, 20),
        ("llama-13b", 0.2, "eager"): (100.0, 12),
        ("llama-13b", 0.9, "eager"): (100.0, 15),
    }
    settings = SETTINGS.model_copy(update={"models": ("llama-7b", "llama-13b")})
    runs = {
        key: sampled(key, *given[key.model, key.kv_share, key.method])
        for key in keys_of(("fig5a",), settings)
    }

    shown = table(build_report("fig5a", settings, runs), "concurrency")

    titles = ("method", "concurrent requests", "ms a token", "x sequential", "x sequential 7B")
    assert columns(shown, *titles) == [
        ("sequential", 10, pytest.approx(100), pytest.approx(1), None),
        ("sequential", 20, pytest.approx(200), pytest.approx(1), None),
        ("eager", 15, pytest.approx(75), pytest.approx(0.5), None),
        # Sequential decoding had no run with so many requests.
        ("eager", 25, pytest.approx(100), None, None),
        ("sequential", 10, pytest.approx(200), pytest.approx(1), pytest.approx(2)),
        ("sequential", 20, pytest.approx(400), pytest.approx(1), pytest.approx(2)),
        ("eager", 12, pytest.approx(120), pytest.approx(0.5), pytest.approx(1)),
        ("eager", 15, pytest.approx(150), pytest.approx(0.5), pytest.approx(1)),
    ]


def test_without_enough_samples_whole_runs_are_compared_and_the_table_says_so() -> None:
    keys = [RunKey(**PLACE, method=method) for method in ("sequential", "eager")]
    runs = {
        keys[0]: run_of(keys[0], 100.0, kept_samples=9, whole_tokens_per_s=90.0),
        keys[1]: run_of(keys[1], 180.0, kept_samples=0, whole_tokens_per_s=108.0),
    }

    [eager] = [each for each in comparisons(keys, runs) if each.key.method == "eager"]

    assert eager.kept_samples == 0
    assert eager.throughput == eager.whole_throughput == pytest.approx(1.2)
    assert "kept samples 0" in ratio_table([eager], SETTINGS).note


def test_a_ratio_is_the_median_of_those_within_each_round() -> None:
    settings = SETTINGS.model_copy(update={"rounds": 3, "kv_shares": (0.9,)})
    runs = {}
    for key in keys_of(("fig5a",), settings):
        # The machine is slower in later rounds, for both methods.
        speed = (1.0, 0.5, 0.1)[key.round]
        gain = {"sequential": 1.0, "eager": (1.4, 1.6, 1.5)[key.round]}[key.method]
        runs[key] = run_of(key, 100 * speed * gain)

    _, eager = comparisons(list(runs), runs)

    assert len(eager.pairs) == 3
    assert eager.throughput == pytest.approx(1.5)


def test_tables_1_and_2_have_the_papers_means_of_the_same_size() -> None:
    report = build_report("table1", SETTINGS, all_runs(SETTINGS))

    [saved] = report.tables
    rows: dict[Any, tuple[Any, ...]] = {row[0]: row[1:] for row in saved.rows}
    assert rows["writing"] == (4.0, 3.0, 150.0, 200.0, pytest.approx(25.0))
    # As in the paper, without the categories in which its models do not fork.
    assert rows["Mean"] == rows["writing"]
    assert rows["Mean of the paper, A-7B on vicuna-bench"] == (
        None, None, 303.2, 417.2, pytest.approx(27.3, abs=0.05),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["fig5a", "fig5b", "peers", "all"])
def test_every_page_table_and_plot_says_that_it_is_predicted_and_for_which_gpu(
    name: str, tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"gpus": ("a100-80gb", "h100")})
    report = build_report(name, settings, all_runs(settings))
    write_report(report, tmp_path)

    page = (tmp_path / "report.md").read_text()
    assert page.startswith(f"# {report.title}")
    assert report.title.endswith("predicted for a100-80gb, h100")
    assert "AIConfigurator" in page
    for gpu in settings.gpus:
        assert f"predicted for {gpu}" in (tmp_path / "tables" / "runs.csv").read_text()
    parts = ("fig5a", "fig5b", "peers") if name == "all" else (name,)
    for part in parts:
        for gpu in settings.gpus:
            assert f"predicted for {gpu}" in (tmp_path / f"{part}-{gpu}.svg").read_text()


def test_a_real_engine_is_named_as_measured_on_this_machine() -> None:
    settings = SETTINGS.model_copy(update={"engine": "real", "models": ("apar-tiny",)})

    report = build_report("fig5a", settings, all_runs(settings))

    assert report.title.startswith("Figure 5a: throughput by KV memory, measured on ")
    assert "predicted" not in " ".join(report.facts.values())


def test_limits_are_the_papers_unless_given() -> None:
    assert SETTINGS.limit("llama-7b") == 350
    assert SETTINGS.limit("llama-3-8b") == 350
    assert SETTINGS.limit("llama-13b") == 180
    assert SETTINGS.model_copy(update={"max_requests": 9}).limit("llama-13b") == 9


def test_experiments_share_the_runs_of_the_same_conditions() -> None:
    keys = keys_of(("fig5a", "peers"), SETTINGS)

    assert [(key.kv_share, key.method) for key in keys] == [
        (0.2, "sequential"), (0.2, "eager"), (0.9, "sequential"), (0.9, "eager"), (0.9, "skeleton"),
    ]  # fmt: skip


def test_given_costs_name_the_device_in_place_of_a_gpu(tmp_path: Path) -> None:
    costs = StepCosts("my model on my machine", "measured", "a test", ((1, 0.01),), 1e-6)
    write_costs(costs, tmp_path / "costs.json")
    settings = ExperimentSettings(
        trace=Path("answers.jsonl"), costs=tmp_path / "costs.json", kv_tokens=4096
    )

    assert {key.device for key in keys_of((FIGURE_5A,), settings)} == {"my model on my machine"}
    assert settings.virtual_device("llama-7b", "my model on my machine") == (costs, 256)


def test_given_costs_describe_one_device_only(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text("{}")

    with pytest.raises(ValidationError, match="one model and one GPU"):
        ExperimentSettings(
            trace=Path("answers.jsonl"), costs=tmp_path / "costs.json", gpus=("h100", "h200")
        )


def test_every_method_has_a_colour_of_its_own() -> None:
    assert METHOD_COLOURS.keys() == METHODS.keys()
    assert len(set(METHOD_COLOURS.values())) == len(METHODS)
