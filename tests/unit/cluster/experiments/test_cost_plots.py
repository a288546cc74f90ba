"""What the figures of costs draw, from made-up costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.text import Text

from apar_core.scheduler.block_sharing import ForkCounters
from cluster.experiments.cost_plots import fork_cost_figure, profile_figure, scheduler_cost_figure
from cluster.experiments.fork_cost import CACHED, SHARED
from cluster.experiments.fork_cost_report import report_fork_cost
from cluster.experiments.parts import PartStore
from cluster.experiments.profile_report import profile_settings, report_profile
from cluster.experiments.scheduler_cost import (
    ADAPTIVE,
    EAGER,
    PLAIN,
    SchedulerCosts,
    SchedulerLoad,
    WayCost,
)
from cluster.experiments.scheduler_report import SchedulerLoadSettings, report_scheduler_cost
from cluster.experiments.settings import ExperimentSettings
from cluster.experiments.step_profile import ProfileLoad, StepProfile
from cluster.experiments.step_timers import PARTS

COUNTERS = {
    SHARED: ForkCounters(forks=4, computed_tokens=4, copied_blocks=3),
    CACHED: ForkCounters(forks=4, computed_tokens=66),
}
ROUND = {
    PLAIN: WayCost(0.008, 0.002, 0.010, 10, 0.01),
    EAGER: WayCost(0.008, 0.003, 0.011, 10, 0.01),
    ADAPTIVE: WayCost(0.009, 0.003, 0.012, 10, 0.01),
}
SLOW_ROUND = {way: WayCost(0.1, 0.1, 0.2, 10, 0.01) for way in ROUND}
SECONDS = dict.fromkeys(PARTS, 0.0) | {"schedule": 0.01, "model forward": 0.03}
PROFILES = {
    "sequential": StepProfile(SECONDS, rows=100, text_tokens=100),
    "eager": StepProfile({**SECONDS, "model forward": 0.07}, rows=500, text_tokens=400),
    "adaptive": StepProfile(SECONDS, rows=200, text_tokens=200),
}


def widths(panel: Axes) -> list[list[float]]:
    """Lengths of the bars of each drawing, in the order of the names on the axis."""
    containers = [each for each in panel.containers if isinstance(each, BarContainer)]
    return [[patch.get_width() for patch in each] for each in containers]


def written(panel: Axes) -> list[str]:
    return [text.get_text() for text in panel.texts if text.get_text()]


def names(labels: list[Text]) -> list[str]:
    return [label.get_text() for label in labels]


def test_both_ways_of_forking_stand_side_by_side_with_what_a_fork_costs() -> None:
    computed, copied = fork_cost_figure(COUNTERS).axes

    assert computed.get_title(loc="left") == "Tokens computed per fork"
    assert names(computed.get_yticklabels()) == [SHARED, CACHED]
    assert widths(computed) == [[1.0, 16.5]]
    assert written(computed) == ["1.00", "16.50"]
    assert copied.get_title(loc="left") == "Blocks copied per fork"
    assert widths(copied) == [[0.75, 0.0]]
    assert (computed.get_xlabel(), copied.get_xlabel()) == ("tokens", "blocks")
    assert computed.yaxis_inverted()


def test_forks_that_copy_nothing_have_an_axis_still() -> None:
    _, copied = fork_cost_figure({SHARED: ForkCounters(forks=1, computed_tokens=1)}).axes

    assert copied.get_xlim()[1] > 0


def test_each_scheduler_has_its_median_times_and_its_ratio_to_vllm() -> None:
    costs = SchedulerCosts(SchedulerLoad(num_threads=2000), [ROUND, ROUND, SLOW_ROUND])

    (panel,) = scheduler_cost_figure(costs).axes

    assert names(panel.get_yticklabels()) == [PLAIN, EAGER, ADAPTIVE]
    schedule, update = widths(panel)
    assert schedule == pytest.approx([8.0, 8.0, 9.0])
    assert update == pytest.approx([2.0, 3.0, 3.0])
    # The update stands behind the schedule, not before it.
    assert panel.containers[1][2].get_x() == pytest.approx(9.0)
    assert written(panel) == ["10.00 ms, 1.000x", "11.00 ms, 1.100x", "12.00 ms, 1.200x"]
    assert panel.get_title(loc="left").endswith("2,000 rows")
    assert panel.get_xlabel() == "ms a step"


def test_parts_of_a_step_lie_one_behind_the_other_and_add_up() -> None:
    figure = profile_figure(PROFILES)
    step, token = figure.axes

    assert names(step.get_yticklabels()) == list(PROFILES)
    by_part = dict(zip(PARTS, widths(step), strict=True))
    assert by_part["schedule"] == pytest.approx([10.0, 10.0, 10.0])
    assert by_part["model forward"] == pytest.approx([30.0, 70.0, 30.0])
    ends = [bar.get_x() + bar.get_width() for bar in step.containers[-1]]
    assert ends == pytest.approx([40.0, 80.0, 40.0])
    assert written(step)[-3:] == ["40.0 ms", "80.0 ms", "40.0 ms"]
    # A longer step can be a shorter one for each of its tokens.
    assert written(token)[-3:] == ["400.0 us", "200.0 us", "200.0 us"]
    assert sorted(names(figure.legends[0].get_texts())) == sorted(PARTS)


def test_only_parts_that_have_room_for_it_are_named_with_their_share() -> None:
    thin = {**SECONDS, "logits": 0.0005}

    step, _ = profile_figure({"eager": StepProfile(thin, rows=1, text_tokens=1)}).axes

    assert written(step) == ["25%", "74%", "40.5 ms"]


def test_the_report_of_forks_has_the_figure(tmp_path: Path) -> None:
    settings = ExperimentSettings(trace=tmp_path / "trace.jsonl")
    kept = {way: asdict(counters) for way, counters in COUNTERS.items()}
    PartStore(tmp_path, settings.as_text()).add("forks", kept)

    report = report_fork_cost(settings, tmp_path, lambda *_: lambda: None)

    assert widths(report.figures["fork-cost"].axes[0]) == [[1.0, 16.5]]


def test_the_report_of_the_scheduler_has_the_figure(tmp_path: Path) -> None:
    settings = SchedulerLoadSettings(rounds=1)
    store = PartStore(tmp_path, {name: str(value) for name, value in settings})
    store.add("round-0", {way: asdict(cost) for way, cost in ROUND.items()})

    report = report_scheduler_cost(settings, tmp_path, lambda *_: lambda: None)

    assert written(report.figures["scheduler-cost"].axes[0])[1] == "11.00 ms, 1.100x"


def test_the_report_of_a_step_has_the_figure(tmp_path: Path) -> None:
    load = ProfileLoad()
    settings = profile_settings(trace=tmp_path / "t", model="cpu-7b", answers=1, load=load)
    facts = {f"load_{name}": str(value) for name, value in asdict(load).items()}
    store = PartStore(tmp_path, settings.as_text() | facts)
    for mode, profile in PROFILES.items():
        store.add(mode, asdict(profile))

    report = report_profile(settings, load, tmp_path, lambda *_: lambda: None)

    assert written(report.figures["profile"].axes[0])[-1] == "40.0 ms"
