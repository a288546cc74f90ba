"""What is drawn and reported of more replicas, from made-up runs and simulated clusters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster.experiments.scale_out import ReplicasRun, ScaleOutSettings
from cluster.experiments.scale_out_plot import scale_out_figure
from cluster.experiments.scale_out_report import report_scale_out
from cluster.experiments.simulated_scale_out import (
    SimulatedCluster,
    SimulatedClusters,
    simulated_table,
)


def replicas_run(replicas: int, *, forked: bool, tokens: int) -> ReplicasRun:
    return ReplicasRun(
        replicas=replicas,
        forked=forked,
        text_tokens=tokens,
        duration_s=10.0,
        latency_mean_s=1.0,
        server_cpu_s=12.0,
        client_cpu_s=3.0,
    )


RUNS = [
    replicas_run(2, forked=True, tokens=9000),
    replicas_run(1, forked=False, tokens=4000),
    replicas_run(1, forked=True, tokens=6000),
    replicas_run(2, forked=False, tokens=5000),
]
SIMULATED = SimulatedClusters(
    "7b-roofline",
    "Goals: soon.",
    (
        SimulatedCluster("threads", 1, 3.0, 1.0, 1.0, 2.0, 0.1),
        SimulatedCluster("threads", 4, 12.0, 0.9, 1.0, 2.0, 0.1),
        SimulatedCluster("round_robin", 1, 3.0, 0.8, 1.0, 2.0, 0.1),
        SimulatedCluster("round_robin", 4, 12.0, 0.6, 1.0, 2.0, 0.1),
    ),
)


def test_throughput_stands_over_its_number_of_replicas_with_its_ratio_to_the_fewest() -> None:
    (panel,) = scale_out_figure(RUNS, None).axes

    sequential, forked = ([bar.get_height() for bar in bars] for bars in panel.containers)
    assert (sequential, forked) == ([400.0, 500.0], [600.0, 900.0])
    assert [bars.get_label() for bars in panel.containers] == ["sequential", "forked"]
    assert [text.get_text() for text in panel.texts] == [
        "400\n1.00x",
        "500\n1.25x",
        "600\n1.00x",
        "900\n1.50x",
    ]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "2"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("replicas", "text tokens / s")


def test_simulated_replicas_are_drawn_beside_what_arrives_at_each() -> None:
    _, panel = scale_out_figure(RUNS, SIMULATED).axes

    lines = {line.get_label(): list(np.asarray(line.get_ydata())) for line in panel.get_lines()}
    assert lines["all that arrive"] == [3.0, 3.0]
    assert lines["router threads"] == pytest.approx([3.0, 2.7])
    assert lines["router round_robin"] == pytest.approx([2.4, 1.8])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "4"]
    assert panel.get_title(loc="left") == "Simulated, 7b-roofline"
    assert panel.get_ylim()[0] == 0


def test_simulated_clusters_are_compared_with_the_smallest_of_the_same_router() -> None:
    table = simulated_table(SIMULATED)

    assert [row[:2] for row in table.rows] == [
        ("threads", 1), ("threads", 4), ("round_robin", 1), ("round_robin", 4)
    ]  # fmt: skip
    assert table.rows[1][2:6] == pytest.approx((12.0, 90.0, 10.8, 0.9))
    assert table.rows[3][2:6] == pytest.approx((12.0, 60.0, 7.2, 0.75))
    assert table.title == "Simulated replicas at 0.85 of their capacity, 7b-roofline"
    assert table.note == "Goals: soon."


@pytest.mark.parametrize(("simulated", "panels"), [(None, 1), (SIMULATED, 2)])
def test_the_report_has_a_table_and_a_panel_for_what_there_is(
    simulated: SimulatedClusters | None, panels: int
) -> None:
    settings = ScaleOutSettings(trace=Path("t.jsonl"))

    report = report_scale_out(settings, RUNS, simulated, wanted=True)

    assert len(report.figures["scale-out"].axes) == panels
    assert len(report.tables) == panels
    assert report.facts["Load"] == "96 answers of t.jsonl, 32 under way at once, 3 repeats"
    assert len(report.data["runs"]) == len(RUNS)
    assert ("More replicas" in report.facts) == (simulated is None)
