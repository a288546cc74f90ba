"""What forking costs: of a fork, of the scheduler's own step, and of a step by its parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from apar_core.reporting import PLOT_SETTINGS
from cluster.experiments.fork_cost import SHARED
from cluster.experiments.plots import MODE_COLOURS
from cluster.experiments.step_timers import (
    DETOKENISING,
    INPUTS,
    LOGITS,
    MODEL,
    OTHER,
    OUTPUTS,
    PARTS,
    PROCESSORS,
    SAMPLING,
    SCHEDULE,
    TOKENS,
    UPDATE,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from apar_core.scheduler.block_sharing import ForkCounters
    from cluster.experiments.scheduler_cost import SchedulerCosts, WayCost
    from cluster.experiments.step_profile import StepProfile

_HEIGHT = 0.6
_OURS, _OTHERS = MODE_COLOURS["eager"], MODE_COLOURS["sequential"]
# The scheduler's work in orange, the model's in blue, that for clients in green.
_PART_COLOURS = {
    SCHEDULE: "#d1602b",
    UPDATE: "#eda67c",
    INPUTS: "#173f5f",
    MODEL: "#2f6f9f",
    LOGITS: "#7fb0d3",
    PROCESSORS: "#8a5a9e",
    SAMPLING: "#c3a5cf",
    TOKENS: "#c9b458",
    OUTPUTS: "#4b8b3b",
    DETOKENISING: "#a3cf94",
    OTHER: "#9aa5b1",
}
_LIGHT_PARTS = (UPDATE, LOGITS, SAMPLING, TOKENS, DETOKENISING)
_LEAST_NAMED_SHARE = 0.05
"""Part of the longest bar below which a part's share has no room in it."""


def fork_cost_figure(costs: Mapping[str, ForkCounters]) -> Figure:
    """Return tokens computed and blocks copied per fork, a bar for each way of forking."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(11, 2.4), layout="constrained")
        computed, copied = figure.subplots(1, 2, sharey=True)
        _draw_forks(computed, costs, lambda counters: counters.computed_tokens)
        computed.set_title("Tokens computed per fork")
        computed.set_xlabel("tokens")
        _draw_forks(copied, costs, lambda counters: counters.copied_blocks)
        copied.set_title("Blocks copied per fork")
        copied.set_xlabel("blocks")
    return figure


def _draw_forks(
    panel: Axes, costs: Mapping[str, ForkCounters], value: Callable[[ForkCounters], int]
) -> None:
    values = [value(counters) / counters.forks for counters in costs.values()]
    colours = [_OURS if way == SHARED else _OTHERS for way in costs]
    bars = panel.barh(list(costs), values, _HEIGHT, color=colours)
    panel.bar_label(bars, [f"{each:.2f}" for each in values], padding=3)
    _from_top(panel, values)


def scheduler_cost_figure(costs: SchedulerCosts) -> Figure:
    """Return the time of schedule and update a step by scheduler, with the ratio to vLLM's."""
    ways = list(costs.rounds[0])
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(9, 3), layout="constrained")
        panel = figure.subplots()
        schedule = _medians_ms(costs, ways, lambda cost: cost.schedule_s)
        update = _medians_ms(costs, ways, lambda cost: cost.update_s)
        panel.barh(ways, schedule, _HEIGHT, color=_PART_COLOURS[SCHEDULE], label=SCHEDULE)
        bars = panel.barh(
            ways, update, _HEIGHT, schedule, color=_PART_COLOURS[UPDATE], label="update"
        )
        steps = _medians_ms(costs, ways, lambda cost: cost.step_s)
        ratios = [statistics.median(costs.ratios(way)) for way in ways]
        labels = [f"{ms:.2f} ms, {x:.3f}x" for ms, x in zip(steps, ratios, strict=True)]
        panel.bar_label(bars, labels, padding=3)
        _from_top(panel, [a + b for a, b in zip(schedule, update, strict=True)], room=1.25)
        panel.set_title(f"The scheduler's own time of a step, {costs.load.num_threads:,} rows")
        panel.set_xlabel("ms a step")
        figure.legend(frameon=False, loc="outside lower right", ncols=2)
    return figure


def _medians_ms(
    costs: SchedulerCosts, ways: Sequence[str], value: Callable[[WayCost], float]
) -> list[float]:
    return [1000 * statistics.median(value(each[way]) for each in costs.rounds) for way in ways]


def profile_figure(profiles: Mapping[str, StepProfile]) -> Figure:
    """Return where the time of a step goes, and that of a text token, a bar for each mode."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(12, 4), layout="constrained")
        step, token = figure.subplots(1, 2, sharey=True)
        _draw_parts(step, profiles, dict.fromkeys(profiles, 1e3), "ms")
        step.set_title("A step")
        step.set_xlabel("ms")
        scales = {mode: 1e6 / profile.text_tokens for mode, profile in profiles.items()}
        _draw_parts(token, profiles, scales, "us")
        token.set_title("A text token")
        token.set_xlabel("us")
        handles, labels = step.get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=6)
    return figure


def _draw_parts(
    panel: Axes, profiles: Mapping[str, StepProfile], scales: Mapping[str, float], unit: str
) -> None:
    """Draw the parts of each bar behind each other, times `scales`, their shares written in."""
    modes = list(profiles)
    wholes = {mode: profiles[mode].step_s * scales[mode] for mode in modes}
    longest = max(wholes.values())
    ends = dict.fromkeys(modes, 0.0)
    for part in PARTS:
        values = {mode: profiles[mode].seconds[part] * scales[mode] for mode in modes}
        bars = panel.barh(
            modes,
            list(values.values()),
            _HEIGHT,
            list(ends.values()),
            color=_PART_COLOURS[part],
            label=part,
        )
        shares = [
            f"{100 * value / wholes[mode]:.0f}%" if value >= _LEAST_NAMED_SHARE * longest else ""
            for mode, value in values.items()
        ]
        colour = "black" if part in _LIGHT_PARTS else "white"
        panel.bar_label(bars, shares, label_type="center", fontsize=8, color=colour)
        ends = {mode: ends[mode] + values[mode] for mode in modes}
    for place, whole in enumerate(wholes.values()):
        panel.annotate(
            f"{whole:.1f} {unit}", (whole, place), (3, 0), textcoords="offset points", va="center"
        )
    _from_top(panel, list(wholes.values()))


def _from_top(panel: Axes, lengths: Sequence[float], room: float = 1.15) -> None:
    """Put the first bar on top, and leave room for what is written behind the longest."""
    if not panel.yaxis_inverted():
        panel.invert_yaxis()
    panel.set_xlim(0, room * (max(lengths) or 1.0))
