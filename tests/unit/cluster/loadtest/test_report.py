"""Figures of synthetic runs, worked out by hand, and their report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from apar_core.reporting import write_report
from cluster.loadtest.figures import ALL_FIGURES
from cluster.loadtest.report import compared, run_report, summary, warnings_of
from cluster.loadtest.run_file import ClusterFigures, ClusterMoment, RequestRecord, Run
from tests.unit.cluster.loadtest.load_records import KEPT_UP, record, run_of

APAR = {
    "threads": 4,
    "text_tokens": 5,
    "decode_steps": 3,
    "sequential_steps": 6,
    "attended_tokens": 60,
    "sequential_attended_tokens": 100,
    "max_cached_tokens": 9,
    "sequential_max_cached_tokens": 12,
}
CLUSTER = ClusterFigures(
    generated_tokens=600.0,
    engine_steps=150.0,
    engine_busy_s=9.0,
    forks={"accepted": 20.0, "delayed": 5.0},
    shared_blocks=10.0,
    copied_blocks=5.0,
    attended_tokens=600.0,
    sequential_attended_tokens=1000.0,
    cached_tokens=75.0,
    sequential_cached_tokens=100.0,
    moments=[
        ClusterMoment(at_s=3.0, kv_share=0.2, running=4.0, waiting=0.0, deferred=0.0),
        ClusterMoment(at_s=6.0, kv_share=0.4, running=8.0, waiting=2.0, deferred=0.0),
    ],
)


def answers(number: int, factor: float = 1.0) -> list[RequestRecord]:
    return [
        record(
            index=index,
            sent_s=0.1 * index,
            pieces=[(factor * (1.0 + 0.5 * piece), 4) for piece in range(5)],
            apar=APAR,
        )
        for index in range(number)
    ]


def value(run: Run, name: str) -> float:
    return float(summary(run)[name]["value"])


def test_throughput_counts_complete_answers_per_second() -> None:
    run = run_of([*answers(4), record(error="http_503", pieces=[])])

    assert value(run, "tokens_per_s") == pytest.approx(20 / 10)
    assert value(run, "requests_per_s") == pytest.approx(0.4)


def test_goodput_counts_requests_that_met_every_objective() -> None:
    slow = record(pieces=[(5.0, 4), (9.0, 4)])
    run = run_of([*answers(3), slow, record(error="cut")], slo={"ttft": 2.0, "e2e": 4.0})

    assert value(run, "goodput") == pytest.approx(0.3)
    assert value(run, "good_share") == pytest.approx(60.0)
    assert "goodput" not in summary(run_of(answers(3)))


def test_goodput_needs_the_times_of_its_objectives() -> None:
    slo = {"ttft": 2.0, "path": 0.1}
    run = run_of([record(), record()], slo=slo)

    assert not {"goodput", "good_share"} & summary(run).keys()
    assert "no answer has the time of objective path" in warnings_of(run)[0]
    measured = run_of([record(), record(apar={"decode_steps": 3})], slo=slo)
    assert value(measured, "good_share") == pytest.approx(50.0)
    assert warnings_of(measured) == []
    failed = run_of([record(error="cut")], slo=slo)
    assert value(failed, "goodput") == 0.0


def test_an_answer_without_text_misses_the_first_token_objective() -> None:
    run = run_of([*answers(3), record(pieces=[])], slo={"ttft": 2.0})

    assert value(run, "good_share") == pytest.approx(75.0)
    assert value(run_of([record(pieces=[])], slo={"ttft": 2.0}), "goodput") == 0.0


def test_times_are_percentiles_in_milliseconds() -> None:
    run = run_of([record(pieces=[(float(second), 4)], end_s=10.0) for second in range(1, 12)])

    assert value(run, "ttft.p50") == 6000.0
    assert value(run, "ttft.p90") == 10000.0
    assert value(run, "ttft.mean") == 6000.0
    low, high = summary(run)["ttft.p50"]["low"], summary(run)["ttft.p50"]["high"]
    assert 2000 <= low < 6000 < high <= 10000
    # The gaps of an answer depend on each other: no interval without repeats.
    assert summary(run_of(answers(5)))["itl.p50"]["low"] is None


def test_repeats_give_the_mean_and_student_s_interval() -> None:
    run = run_of(answers(5), answers(5, 1.2), answers(5, 1.4))

    e2e = summary(run)["e2e.p50"]
    assert e2e["repeats"] == pytest.approx([3000, 3600, 4200])
    assert e2e["value"] == pytest.approx(3600)
    assert e2e["high"] == pytest.approx(3600 + 4.302653 * 600 / 3**0.5, rel=1e-5)


def test_forking_comes_from_the_answers_own_statistics() -> None:
    run = run_of(answers(4))

    assert value(run, "threads") == 4.0
    assert value(run, "steps_saved") == pytest.approx(50.0)
    assert value(run, "attention_saved") == pytest.approx(40.0)
    assert value(run, "cache_saved") == pytest.approx(25.0)
    assert "threads" not in summary(run_of([record()]))


def test_a_client_that_did_not_keep_up_marks_the_run() -> None:
    late = KEPT_UP.model_copy(update={"cpu_share": 0.97, "lag_p99_s": 0.4, "late_p99_s": 0.5})

    warnings = warnings_of(run_of(answers(3), client=late))

    assert len(warnings) == 3
    assert "used 0.97 of a core" in warnings[0]
    assert "lagged by 400 ms" in warnings[1]
    assert "sent 500 ms late" in warnings[2]
    assert warnings_of(run_of(answers(3))) == []


def test_failures_and_uncounted_tokens_are_marked() -> None:
    (mark, other) = warnings_of(run_of([record(counted=False), record(error="cut")]))

    assert "reports no token counts" in mark
    assert "1 of 2 requests have no complete answer" in other


def test_skipped_and_repeated_answers_are_marked() -> None:
    run = run_of(answers(3))
    facts = run.facts.model_copy(update={"left_out": 7, "repeated": 2})

    left_out, repeated = warnings_of(replace(run, facts=facts))

    assert "7 recorded answers were skipped" in left_out
    assert "2 requests per repeat are repetitions" in repeated


def test_the_report_is_a_page_with_everything_in_it(tmp_path: Path) -> None:
    broken = [record(error="http_429", message="slow down", pieces=[])] * 2
    run = run_of([*answers(30), *broken], sample_s=0.5, slo={"ttft": 2.0})
    run.facts.repeats[0] = run.facts.repeats[0].model_copy(update={"cluster": CLUSTER})

    page = write_report(run_report(run), tmp_path)

    text = page.read_text()
    for said in ("http_429", "slow down", "goodput", "kept up", "KV cache in use", "Attention"):
        assert said in text
    assert text.count("data:image/png") == 3
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["figures"]["threads"]["value"] == 4.0
    shown = {row[0]: row[1] for row in data["tables"]["cluster"]["rows"]}
    assert shown == pytest.approx(
        {
            "tokens generated by all threads": 60.0,
            "tokens per engine step": 4.0,
            "KV cache in use, mean": 30.0,
            "KV cache in use, maximum": 40.0,
            "threads running, mean": 6.0,
            "threads running, maximum": 8.0,
            "threads waiting, mean": 1.0,
            "forks": 25.0,
            "delayed forks": 5.0,
            "attended tokens saved, from the servers' metrics": 40.0,
            "cached tokens saved, from the servers' metrics": 25.0,
        }
    )


def test_a_run_without_successes_has_a_report(tmp_path: Path) -> None:
    run = run_of([record(error="connection", pieces=[]) for _ in range(3)])

    report = run_report(run)
    write_report(report, tmp_path)

    assert summary(run)["tokens_per_s"]["value"] == 0.0
    assert list(report.figures) == ["throughput"]
    assert "no text" in [text.get_text() for text in report.figures["throughput"].axes[0].texts]


def test_a_report_has_no_empty_plots() -> None:
    read_late = CLUSTER.model_copy(update={"moments": []})
    run = run_of(answers(30), sample_s=0.5)
    run.facts.repeats[0] = run.facts.repeats[0].model_copy(update={"cluster": read_late})

    assert list(run_report(run).figures) == ["throughput", "times"]
    assert run_report(run_of([])).figures == {}


def test_every_axis_of_the_plots_has_a_unit() -> None:
    run = run_of(answers(30), sample_s=0.5)
    run.facts.repeats[0] = run.facts.repeats[0].model_copy(update={"cluster": CLUSTER})
    plots = run_report(run).figures

    labels = {
        name: {
            label
            for panel in plot.axes
            if panel.get_visible()
            for label in (panel.get_xlabel(), panel.get_ylabel())
        }
        for name, plot in plots.items()
    }
    since_start = "time since the start of the repeat (s)"
    assert labels == {
        # Panels above one another share the lowest one's axis of time.
        "throughput": {"", "tokens/s", "requests", since_start},
        "cluster": {"", "share of the KV cache", "threads", since_start},
        "times": {"share of the values", "time (s)", "time (ms)"},
    }


def test_the_report_names_versions_and_machines() -> None:
    run = run_of(answers(3))
    known = {"client": "apar-serve 1.0, 2 cores of X", "server_version": "0.32.0"}

    facts = run_report(replace(run, facts=run.facts.model_copy(update=known))).facts

    assert facts["Client"] == "apar-serve 1.0, 2 cores of X"
    assert facts["Server"] == "vLLM 0.32.0, on the client's machine"
    assert run_report(run).facts["Server"] == "version unknown, on the client's machine"


def test_two_runs_are_compared_figure_by_figure(tmp_path: Path) -> None:
    slow = run_of(answers(20), answers(20, 1.01), answers(20, 1.02), name="slow")
    fast = run_of(answers(20, 0.5), answers(20, 0.505), answers(20, 0.51), name="fast")

    report = compared([slow, fast])
    write_report(report, tmp_path)

    rows = {str(row[0]): row for row in report.tables[0].rows}
    e2e = rows["end-to-end latency, p50 (ms)"]
    assert e2e[3] == pytest.approx(0.5)
    assert str(e2e[4]).startswith("0.4")
    assert rows["requests (requests/s)"][3] == pytest.approx(1.0)
    assert (tmp_path / "report.html").exists()


def test_runs_of_one_repeat_are_compared_by_resampling() -> None:
    slow, fast = run_of(answers(20), name="slow"), run_of(answers(20, 0.5), name="fast")
    figure = next(figure for figure in ALL_FIGURES if figure.name == "e2e.mean")

    ratio = figure.ratio(fast, slow)

    assert ratio is not None
    assert ratio.value == pytest.approx(0.5)
    assert ratio.low is not None


def test_throughput_samples_are_not_resampled() -> None:
    slow = run_of(answers(100), sample_s=0.5, name="slow")
    fast = run_of(answers(100, 0.5), sample_s=0.5, name="fast")
    figure = next(figure for figure in ALL_FIGURES if figure.name == "tokens_per_s_kept")

    estimate, ratio = figure.estimate(slow), figure.ratio(fast, slow)

    assert estimate is not None
    assert ratio is not None
    assert min(estimate.value, ratio.value) > 0
    assert estimate.low is ratio.low is None
    repeated = figure.estimate(run_of(*[answers(100)] * 3, sample_s=0.5))
    assert repeated is not None
    assert repeated.low == pytest.approx(estimate.value)


@pytest.mark.parametrize("names", [("one",), ("same", "same")])
def test_fewer_than_two_different_runs_cannot_be_compared(names: tuple[str, ...]) -> None:
    with pytest.raises(EvaluationError, match="at least two runs with different names"):
        compared([run_of(answers(2), name=name) for name in names])
