"""Reports of one run, and of several runs side by side: tables and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plot
from matplotlib.ticker import PercentFormatter

from apar_core.errors import EvaluationError
from apar_core.intervals import MIN_REPEATS, Estimate
from apar_core.reporting import (
    PLOT_SETTINGS,
    RUN_COLOURS,
    Cell,
    Column,
    Report,
    ReportTable,
    file_name,
)
from cluster.loadtest.figures import (
    ALL_FIGURES,
    CLUSTER,
    FORKING,
    PERCENTILES,
    THROUGHPUT,
    Figure,
    Repeat,
    repeats_of,
    time_figure,
)
from cluster.loadtest.run_file import ClusterMoment, Run
from cluster.loadtest.statistics import (
    ITL,
    MIN_SAMPLES,
    TITLES,
    sampled,
    spread,
    unmeasured,
    values_of,
)


def run_report(run: Run) -> Report:
    """Return the report of one run."""
    tables = (
        throughput_table(run),
        times_table(run),
        forking_table(run),
        cluster_table(run),
        errors_table(run),
        client_table(run),
    )
    return Report(
        title=f"Load test: {run.name}",
        facts=facts_of(run),
        tables=[table for table in tables if table is not None],
        figures=_plots([run]),
        data={"settings": run.facts.settings.model_dump(mode="json"), "figures": summary(run)},
    )


def compared(runs: Sequence[Run]) -> Report:
    """Return a report that compares runs with the first one.

    Raises EvaluationError for fewer than two runs, or for equal names.
    """
    names = [run.name for run in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise EvaluationError(f"comparing needs at least two runs with different names: {names}")
    facts = {
        run.name: "; ".join(f"{name} {value}" for name, value in facts_of(run).items())
        for run in runs
    }
    return Report(
        title=f"Load tests: {', '.join(names)}",
        facts=facts,
        tables=[ratio_table(runs), *map(_client_table_of, runs)],
        figures=_plots(runs),
        data={"runs": {run.name: summary(run) for run in runs}},
    )


def ratio_table(runs: Sequence[Run]) -> ReportTable:
    """Return all figures of all runs, with ratios to the first run and their intervals."""
    base, *others = runs
    columns = [Column("Figure"), Column(base.name, ",.2f")]
    for run in others:
        columns += [Column(run.name, ",.2f"), Column("Ratio", ".3f"), Column("95 % interval")]
    rows: list[tuple[Cell, ...]] = []
    for figure in ALL_FIGURES:
        first = figure.estimate(base)
        if first is None and not any(figure.estimate(run) for run in others):
            continue
        title = f"{figure.title} ({figure.unit})" if figure.unit else figure.title
        row: list[Cell] = [title, first.value if first else None]
        for run in others:
            row += _compared_cells(figure, run, base)
        rows.append(tuple(row))
    return ReportTable(
        "ratios",
        f"Side by side; ratios to {base.name}",
        tuple(columns),
        tuple(rows),
        "Intervals of ratios: Welch's, on the logarithms of repeats. If a run has fewer than three "
        "repeats: by resampling the requests of both runs for times, none for other figures.",
    )


def facts_of(run: Run) -> Mapping[str, str]:
    """Return the header of a report, warnings first."""
    settings = run.facts.settings
    workload = settings.workload.spec + (" (without forks)" if settings.workload.flat else "")
    facts: dict[str, str] = {}
    if warnings := warnings_of(run):
        facts["Attention"] = "; ".join(warnings)
    facts |= {
        "Target": f"{settings.target.url}, model {settings.model}",
        "Workload": workload,
        "Arrivals": settings.arrivals,
        "Requests": f"{len(run.records)}, {len(run.whole)} with a complete answer, in "
        f"{len(run.facts.repeats)} repeats",
        "Started": run.facts.started,
    }
    if run.facts.client is not None:
        facts["Client"] = run.facts.client
    server = run.facts.server_version
    place = "the client's machine" if settings.target.is_local else "another machine"
    facts["Server"] = f"{'version unknown' if server is None else f'vLLM {server}'}, on {place}"
    if settings.slo:
        facts["Objectives"] = ", ".join(
            f"{name} {seconds:g} s" for name, seconds in settings.slo.items()
        )
    return facts


def warnings_of(run: Run) -> list[str]:
    """Return warnings about a run."""
    warnings = [
        f"repeat {facts.repeat + 1}: {warning}"
        for facts in run.facts.repeats
        for warning in facts.client.warnings
    ]
    warnings += [
        f"repeat {facts.repeat + 1} was interrupted after {len(run.of_repeat(facts.repeat))} of "
        f"{facts.planned} requests"
        for facts in run.facts.repeats
        if facts.interrupted
    ]
    if any(not record.counted for record in run.whole):
        warnings.append("the server reports no token counts: chunks of text are counted instead")
    if left_out := run.facts.left_out:
        warnings.append(f"{left_out} recorded answers were skipped because they exceed the context")
    if repeated := run.facts.repeated:
        warnings.append(
            f"{repeated} requests per repeat are repetitions, which prefix caches speed up"
        )
    if unknown := unmeasured(run.records, run.facts.settings.slo):
        warnings.append(f"no goodput: no answer has the time of objective {', '.join(unknown)}")
    if failed := len(run.records) - len(run.whole):
        warnings.append(f"{failed} of {len(run.records)} requests have no complete answer")
    return warnings


def summary(run: Run) -> dict[str, Any]:
    """Return all figures with intervals and repeats, for JSON."""
    found = {figure: figure.estimate(run) for figure in ALL_FIGURES}
    return {
        figure.name: {"unit": figure.unit, **asdict(estimate), "repeats": figure.each(run)}
        for figure, estimate in found.items()
        if estimate is not None
    }


def _compared_cells(figure: Figure, run: Run, base: Run) -> list[Cell]:
    estimate, ratio = figure.estimate(run), figure.ratio(run, base)
    return [
        None if estimate is None else estimate.value,
        None if ratio is None else ratio.value,
        interval_cell(ratio, ".3f"),
    ]


def _client_table_of(run: Run) -> ReportTable:
    table = client_table(run)
    name = f"client-{file_name(run.name)}"
    return replace(table, name=name, title=f"{table.title}: {run.name}")


def _plots(runs: Sequence[Run]) -> dict[str, Plot]:
    plots = {
        "throughput": throughput_plot(runs),
        "times": times_plot(runs),
        "cluster": cluster_plot(runs),
    }
    return {name: plot for name, plot in plots.items() if plot is not None}


_INTERVAL = "95 % interval"
_FIGURE_COLUMNS = (
    Column("Figure"),
    Column("Value", ",.2f"),
    Column("Unit"),
    Column(_INTERVAL),
    Column("Repeats"),
)


def interval_cell(estimate: Estimate | None, form: str = ",.1f") -> str | None:
    """Format an interval; None if there is none."""
    return None if estimate is None else estimate.interval(form)


def throughput_table(run: Run) -> ReportTable:
    """Return throughput and goodput."""
    rows = [*_figure_rows(run, THROUGHPUT)]
    return ReportTable(
        "throughput",
        "Throughput",
        _FIGURE_COLUMNS,
        tuple(rows),
        _throughput_note(run),
    )


def times_table(run: Run) -> ReportTable:
    """Return all times: mean, and percentiles with intervals."""
    columns = [Column("Milliseconds"), Column("Mean", ",.1f")]
    for share in PERCENTILES:
        columns += [Column(f"p{share}", ",.1f"), Column(_INTERVAL)]
    rows: list[tuple[Cell, ...]] = []
    for name, title in TITLES.items():
        average = time_figure(name, None).estimate(run)
        row: list[Cell] = [title, None if average is None else average.value]
        for share in PERCENTILES:
            estimate = time_figure(name, share).estimate(run)
            row += [None if estimate is None else estimate.value, interval_cell(estimate)]
        rows.append(tuple(row))
    source = (
        "over repeats (Student's t)"
        if len(repeats_of(run)) >= MIN_REPEATS
        else "by resampling the requests of all repeats"
    )
    return ReportTable(
        "times",
        "Times of complete answers",
        tuple(columns),
        tuple(rows),
        f"Intervals {source}. Inter-token latency: between two chunks of text; a chunk may "
        "contain several tokens. Critical path: up to the last step of the last thread.",
    )


def errors_table(run: Run) -> ReportTable | None:
    """Return errors by kind; None without errors."""
    kinds = Counter(record.error for record in run.records if record.error is not None)
    if not kinds:
        return None
    first = {
        record.error: record.message for record in reversed(run.records) if record.error is not None
    }
    return ReportTable(
        "errors",
        "Requests without a complete answer",
        (Column("Kind"), Column("Requests", "d"), Column("Share, %"), Column("First message")),
        tuple(
            (kind, count, 100 * count / len(run.records), first[kind] or "")
            for kind, count in kinds.most_common()
        ),
    )


def forking_table(run: Run) -> ReportTable | None:
    """Return statistics from the answers' `apar` objects; None if there are none."""
    rows = _figure_rows(run, FORKING)
    if not rows:
        return None
    return ReportTable(
        "forking",
        "Forking, from the statistics in the answers",
        _FIGURE_COLUMNS[:-1],
        tuple(row[:-1] for row in rows),
        "Saved: relative to one thread with the same text (paper, section 3.4).",
    )


def cluster_table(run: Run) -> ReportTable | None:
    """Return figures from the cluster's metrics; None if none were read."""
    rows = _figure_rows(run, CLUSTER)
    if not rows:
        return None
    return ReportTable(
        "cluster",
        "Metrics of the servers",
        _FIGURE_COLUMNS,
        tuple(rows),
        "From the exported metrics, including requests of other clients. Generated tokens: text, "
        "fork and end tokens. KV cache: of the fullest replica.",
    )


def client_table(run: Run) -> ReportTable:
    """Return the load of the client per repeat."""
    return ReportTable(
        "client",
        "Client",
        (
            Column("Repeat"),
            Column("Requests", ",.0f"),
            Column("Seconds", ",.1f"),
            Column("CPU, cores", ".2f"),
            Column("Busiest second", ".2f"),
            Column("Loop lag, p50 ms", ".1f"),
            Column("p99 ms", ".1f"),
            Column("Send delay, p99 ms", ".1f"),
            Column("Verdict"),
        ),
        tuple(
            (
                str(facts.repeat + 1),
                len(run.of_repeat(facts.repeat)),
                facts.duration_s,
                facts.client.cpu_share,
                facts.client.busiest_cpu_share,
                facts.client.lag_p50_s * 1000,
                facts.client.lag_p99_s * 1000,
                None if facts.client.late_p99_s is None else facts.client.late_p99_s * 1000,
                "did not keep up" if facts.client.warnings else "kept up",
            )
            for facts in run.facts.repeats
        ),
    )


def _figure_rows(run: Run, figures: Sequence[Figure]) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for figure in figures:
        estimate = figure.estimate(run)
        if estimate is not None:
            each = ", ".join(f"{value:,.2f}" for value in figure.each(run))
            interval = interval_cell(estimate, ",.2f")
            rows.append((figure.title, estimate.value, figure.unit, interval, each))
    return rows


def _throughput_note(run: Run) -> str:
    seconds = run.facts.settings.sample_s
    spreads = [
        found
        for repeat in repeats_of(run)
        if (found := spread(sampled(repeat.records, seconds))) is not None
    ]
    if not spreads:
        return (
            f"Fewer than {MIN_SAMPLES} samples of {seconds:g} s between warm-up and the first "
            "text of the last request: send more requests."
        )
    quartiles = "; ".join(f"{each.p25:,.1f} to {each.p75:,.1f}" for each in spreads)
    numbers = ", ".join(str(each.num_samples) for each in spreads)
    return (
        f"Samples of {seconds:g} s, without the first third and those after the first text of the "
        f"last request: {numbers} kept; 25th to 75th percentile {quartiles} tokens/s."
    )


_CURVE_POINTS = 400
# A few slow requests would compress the rest of the curve.
_LARGEST_SHOWN = 99.5


def throughput_plot(runs: Sequence[Run]) -> Plot | None:
    """Plot tokens per second and running requests over time, for each repeat of each run.

    Samples that count for the mean are in full colour, warm-up and cool-down are pale. Returns None
    without requests.
    """
    if not any(repeats_of(run) for run in runs):
        return None
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Plot(figsize=(9.5, 6.4), layout="constrained")
        speed, running = figure.subplots(2, 1, sharex=True)
        for index, run in enumerate(runs):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            for number, repeat in enumerate(repeats_of(run)):
                label = run.name if number == 0 else None
                _draw_samples(speed, repeat, colour, label)
                _draw_running(running, repeat, colour)
        speed.set_title("Text tokens per second")
        speed.set_ylabel("tokens/s")
        if not speed.patches:
            speed.text(0.5, 0.5, "no text", ha="center", va="center", transform=speed.transAxes)
        speed.set_ylim(bottom=0)
        speed.margins(x=0.01)
        if len(runs) > 1 and speed.get_legend_handles_labels()[0]:
            speed.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
        running.set_title("Requests running")
        running.set_ylabel("requests")
        running.set_ylim(bottom=0)
        running.set_xlabel("time since the start of the repeat (s)")
    return figure


def times_plot(runs: Sequence[Run]) -> Plot | None:
    """Plot the cumulative distribution of every time; None if no answer has any."""
    names = [name for name in TITLES if any(values_of(name, run.records) for run in runs)]
    if not names:
        return None
    num_rows = -(-len(names) // 2)
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Plot(figsize=(9.5, 2.9 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, 2, squeeze=False).flatten()
        for panel, name in zip(panels, names, strict=False):
            _draw_curves(panel, name, runs)
        for panel in panels[len(names) :]:
            panel.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        if len(runs) > 1:
            figure.legend(handles, labels, frameon=False, loc="outside upper right", ncols=4)
    return figure


def cluster_plot(runs: Sequence[Run]) -> Plot | None:
    """Plot KV usage and running threads over time; None if no metrics were read."""
    clusters = [repeat.facts.cluster for run in runs for repeat in repeats_of(run)]
    if not any(cluster is not None and cluster.moments for cluster in clusters):
        return None
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Plot(figsize=(9.5, 5.6), layout="constrained")
        share, threads = figure.subplots(2, 1, sharex=True)
        for index, run in enumerate(runs):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            for number, repeat in enumerate(repeats_of(run)):
                moments = repeat.facts.cluster.moments if repeat.facts.cluster else []
                label = run.name if number == 0 else None
                _draw_moments(share, moments, lambda moment: moment.kv_share, colour, label)
                _draw_moments(threads, moments, lambda moment: moment.running, colour, label)
        share.set_title("KV cache in use, fullest replica")
        share.set_ylabel("share of the KV cache")
        share.yaxis.set_major_formatter(PercentFormatter(1.0))
        share.set_ylim(bottom=0)
        if len(runs) > 1:
            share.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
        threads.set_title("Threads running")
        threads.set_ylabel("threads")
        threads.set_ylim(bottom=0)
        threads.set_xlabel("time since the start of the repeat (s)")
    return figure


def _draw_samples(panel: Axes, repeat: Repeat, colour: str, label: str | None) -> None:
    samples = sampled(repeat.records, repeat.sample_s)
    values = samples.tokens_per_s
    if not values:
        return
    edges = np.arange(len(values) + 1) * samples.seconds
    pale_label = None if samples.kept else label
    panel.stairs(
        values, edges, color=colour, alpha=0.35, linewidth=1.2, baseline=None, label=pale_label
    )
    if samples.kept:
        kept = edges[samples.first : samples.end + 1]
        panel.stairs(samples.kept, kept, color=colour, linewidth=1.8, label=label, baseline=None)
        mean = float(np.mean(samples.kept))
        panel.hlines(mean, kept[0], kept[-1], colors=colour, linestyles="--", linewidth=1.0)


def _draw_running(panel: Axes, repeat: Repeat, colour: str) -> None:
    begun = [(record.sent_s, 1) for record in repeat.records]
    ended = [(record.finished_s, -1) for record in repeat.records]
    changes = sorted([*begun, *ended])
    times = [time_s for time_s, _ in changes]
    panel.step(times, np.cumsum([step for _, step in changes]), where="post", color=colour,
               linewidth=1.3)  # fmt: skip


def _draw_curves(panel: Axes, name: str, runs: Sequence[Run]) -> None:
    scale, unit = (1000.0, "ms") if name in (ITL, "tpot", "path") else (1.0, "s")
    shares = np.linspace(0, 100, _CURVE_POINTS)
    largest = 0.0
    for index, run in enumerate(runs):
        values = np.asarray(values_of(name, run.records)) * scale
        if values.size:
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            panel.plot(np.percentile(values, shares), shares / 100, color=colour, label=run.name)
            largest = max(largest, float(np.percentile(values, _LARGEST_SHOWN)))
    panel.set_title(TITLES[name].capitalize())
    panel.set_xlabel(f"time ({unit})")
    panel.set_ylabel("share of the values")
    panel.set_xlim(0, largest * 1.02 or 1)
    panel.set_ylim(0, 1)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.grid(alpha=0.25)


def _draw_moments(
    panel: Axes,
    moments: Sequence[ClusterMoment],
    value: Callable[[ClusterMoment], float],
    colour: str,
    label: str | None,
) -> None:
    times = [moment.at_s for moment in moments]
    panel.plot(times, [value(moment) for moment in moments], color=colour, linewidth=1.5,
               label=label)  # fmt: skip
