"""Tables and figures of a simulation, for its report page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from apar_core.intervals import half_width
from apar_core.reporting import PLOT_SETTINGS, RUN_COLOURS, Cell, Column, Report, ReportTable
from cluster.lab.simulation.measures import Measures, ratio, summarise
from cluster.lab.simulation.runs import Case, CaseResult, SimulationSettings
from cluster.lab.simulation.workload import SHARE_OF_APPLICATIONS, SHARE_OF_CONTINUATIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Get = Callable[[Measures], float]

_LATENCY: tuple[tuple[str, str, Get], ...] = (
    ("mean s", ".2f", lambda m: m.mean_s),
    ("p50 s", ".2f", lambda m: m.p50_s),
    ("p99 s", ".2f", lambda m: m.p99_s),
    ("first token p50 s", ".2f", lambda m: m.first_token_p50_s),
    ("first token p99 s", ".2f", lambda m: m.first_token_p99_s),
    ("per token p50 ms", ".1f", lambda m: 1000 * m.token_p50_s),
    ("per token p99 ms", ".1f", lambda m: 1000 * m.token_p99_s),
    ("step p99 ms", ".1f", lambda m: 1000 * m.step_p99_s),
    ("in SLO %", ".1f", lambda m: 100 * m.goodput),
    ("failed %", ".1f", lambda m: 100 * m.failed),
)
_BALANCE: tuple[tuple[str, str, Get], ...] = (
    ("threads cv", ".3f", lambda m: m.imbalance),
    ("fullest/mean", ".2f", lambda m: m.max_over_mean),
    ("prompt cached %", ".1f", lambda m: 100 * m.cached),
    ("preempted per 1000", ".0f", lambda m: m.preemptions),
    ("rows a step", ".0f", lambda m: m.rows),
)
# Measures whose interval is shown when there are several seeds.
_WITH_INTERVAL = {"mean s", "p99 s", "in SLO %"}
_PANELS = (
    ("latency, mean (s)", True, "mean_s", 1),
    ("latency, p99 (s)", True, "p99_s", 1),
    ("time to first token, p99 (s)", True, "first_token_p99_s", 1),
    ("latency per token, p99 (ms)", True, "token_p99_s", 1000),
    ("requests within the SLO (%)", False, "goodput", 100),
    ("threads, coefficient of variation", False, "imbalance", 1),
)


def simulation_report(
    settings: SimulationSettings, results: Sequence[CaseResult], capacity: float | None
) -> Report:
    """Return the report of all cases; every number in it is predicted."""
    costs = settings.costs
    label = f"predicted for {costs.name}"
    tables = [
        _table("latency", f"Latency and goodput, {label}", settings, results, _LATENCY),
        _table("balance", f"Balance and cache, {label}", settings, results, _BALANCE),
        _counts(settings, results, label),
    ]
    compared = _comparison(settings, results)
    if compared is not None:
        tables.insert(1, compared)
    facts = _facts(settings, capacity)
    figures = {}
    if len({each.case.rate for each in results}) > 1:
        figures["loads"] = _load_figure(results, label)
    else:
        figures["timeline"] = _timeline(results, label)
    data = [
        {
            "case": asdict(each.case),
            "seeds": [
                {name: value for name, value in asdict(run).items() if name != "samples"}
                for run in each.seeds
            ],
        }
        for each in results
    ]
    return Report(f"Simulated cluster ({label})", facts, tables, figures, {"cases": data})


def _facts(settings: SimulationSettings, capacity: float | None) -> dict[str, str]:
    facts = {
        "Step costs": f"{settings.costs.kind}: {settings.costs.source}",
        "Replica": f"{settings.kv_tokens:,} tokens of KV cache, at most {settings.concurrency} "
        "requests",
        "Answers": ", ".join(str(path) for path in settings.traces),
        "Arrivals": "Poisson process"
        if settings.arrivals is None
        else f"{settings.arrivals}, compressed to the rate, with the recorded prompt lengths",
        "Shared prompts": f"synthetic: {SHARE_OF_APPLICATIONS:.0%} of the requests come from 20 "
        f"applications with a system prompt each, {SHARE_OF_CONTINUATIONS:.0%} continue a "
        "conversation",
        "SLO": str(settings.slo),
        "Duration": f"{settings.duration_s:g} s of arrivals, {settings.seeds} seeds; ± is the "
        "95% confidence interval over seeds",
    }
    if settings.family is not None:
        facts["Attention"] = "family: rows that begin with the same KV blocks read them once"
    if capacity is not None:
        facts["Load 1"] = (
            f"{capacity:.2f} requests/s per replica: the rate of a replica that always runs "
            f"{settings.concurrency} requests, with eager forks"
        )
    if settings.slow:
        facts["Slow replicas"] = f"{settings.slow}, {settings.slowness:g} times slower"
    if settings.kills or settings.joins:
        facts["Replicas die at"] = ", ".join(f"{at_s:g} s" for at_s in settings.kills) or "-"
        facts["Replicas join at"] = ", ".join(f"{at_s:g} s" for at_s in settings.joins) or "-"
    if settings.surge != 1.0:
        facts["Surge"] = f"{settings.surge:g} times the rate in the middle third"
    return facts


def _names(results: Sequence[CaseResult]) -> tuple[list[Column], Callable[[Case], list[Cell]]]:
    """Return the columns that distinguish the cases, and a function that fills them."""
    columns = [
        Column("replicas", "d"),
        Column("load", ".2f"),
        Column("requests/s", ".1f"),
        Column("router"),
        Column("forks"),
        Column("target threads", ".0f"),
        Column("catch-up s", ".0f"),
    ]

    def cells(case: Case) -> list[Cell]:
        return [
            case.replicas, case.load, case.rate, case.router, case.fork_policy,
            case.target_threads, case.catch_up_s,
        ]  # fmt: skip

    rows = [cells(each.case) for each in results]
    kept = [
        index
        for index, column in enumerate(columns)
        if column.title in ("router", "forks") or any(row[index] is not None for row in rows)
    ]
    return [columns[index] for index in kept], lambda case: [cells(case)[index] for index in kept]


def _table(
    name: str,
    title: str,
    settings: SimulationSettings,
    results: Sequence[CaseResult],
    measures: Sequence[tuple[str, str, Get]],
) -> ReportTable:
    columns, cells = _names(results)
    rows = []
    for each in results:
        row = cells(each.case)
        for title_, form, get in measures:
            values = [get(run.measures) for run in each.seeds]
            mean = sum(values) / len(values)
            if title_ in _WITH_INTERVAL and settings.seeds > 1:
                row.append(f"{mean:{form}} ± {half_width(values):{form}}")
            else:
                row.append(mean)
        rows.append(tuple(row))
    columns = [*columns, *(Column(title_, form) for title_, form, _ in measures)]
    return ReportTable(name, title, tuple(columns), tuple(rows))


def _comparison(settings: SimulationSettings, results: Sequence[CaseResult]) -> ReportTable | None:
    """Compare each case with the first of its load, seed by seed; None for one case per load."""
    first: dict[tuple[int, float], CaseResult] = {}
    rows = []
    columns, cells = _names(results)
    for each in results:
        base = first.setdefault((each.case.replicas, each.case.rate), each)
        if base is each:
            continue
        row = cells(each.case)
        for get in (
            lambda m: m.mean_s,
            lambda m: m.p99_s,
            lambda m: m.first_token_p99_s,
            lambda m: m.token_p99_s,
        ):
            mean, half = ratio(
                [run.measures for run in each.seeds], [run.measures for run in base.seeds], get
            )
            row.append(f"{mean:.3f} ± {half:.3f}" if settings.seeds > 1 else f"{mean:.3f}")
        rows.append(tuple(row))
    if not rows:
        return None
    columns += [Column(f"{name} x") for name in ("mean", "p99", "first token p99", "per token p99")]
    case = results[0].case
    return ReportTable(
        "ratios",
        f"Over the first case of each load ({case.router}, {case.fork_policy})",
        tuple(columns),
        tuple(rows),
        note="Latencies relative to the first case, with the same requests for each seed.",
    )


def _counts(settings: SimulationSettings, results: Sequence[CaseResult], label: str) -> ReportTable:
    columns, cells = _names(results)
    columns += [
        Column("requests", ".0f"), Column("refused or lost", ".0f"), Column("continued", ".0f"),
        Column("forks", ".0f"), Column("forks delayed", ".0f"), Column("most queued", ".0f"),
        Column("most replicas", ".0f"), Column("last replicas", ".0f"),
        Column("replica hours", ".2f"), Column("end s", ".0f"),
    ]  # fmt: skip
    rows = []
    for each in results:
        counts = [
            (run.requests, sum(run.errors.values()), run.continued, run.forks, run.forks_delayed,
             run.most_queued, run.most_replicas, run.last_replicas, run.replica_hours, run.end_s)
            for run in each.seeds
        ]  # fmt: skip
        means = [sum(values) / len(counts) for values in zip(*counts, strict=True)]
        rows.append((*cells(each.case), *means))
    return ReportTable("counts", f"Counts, mean per run, {label}", tuple(columns), tuple(rows))


def _series(case: Case) -> str:
    parts = [case.router, case.fork_policy]
    if case.target_threads is not None:
        parts.append(f"target {case.target_threads:g}")
    if case.catch_up_s is not None:
        parts.append(f"catch-up {case.catch_up_s:g} s")
    return f"{case.replicas} x {', '.join(parts)}"


def _load_figure(results: Sequence[CaseResult], label: str) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context(PLOT_SETTINGS):
        figure = NewFigure(figsize=(13, 8), layout="constrained")
        axes = figure.subplots(2, 3).ravel()
        names = list(dict.fromkeys(_series(each.case) for each in results))
        for ax, (title, logarithmic, field, scale) in zip(axes, _PANELS, strict=True):
            for number, name in enumerate(names):
                own = [each for each in results if _series(each.case) == name]
                own.sort(key=lambda each: each.case.rate)
                summaries = [summarise([run.measures for run in each.seeds]) for each in own]
                ax.errorbar(
                    [each.case.load or each.case.rate for each in own],
                    [scale * getattr(each.mean, field) for each in summaries],
                    yerr=[scale * getattr(each.half_width, field) for each in summaries],
                    label=name,
                    color=RUN_COLOURS[number % len(RUN_COLOURS)],
                    marker=".",
                    capsize=2,
                )
            if logarithmic:
                ax.set_yscale("log")
            has_loads = results[0].case.load is not None
            ax.set_xlabel("load (share of the saturated rate)" if has_loads else "requests/s")
            ax.set_title(title)
            ax.grid(visible=True, which="both", alpha=0.25)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(label)
    return figure


def _timeline(results: Sequence[CaseResult], label: str) -> Figure:
    """Draw threads, replicas and waiting requests over time, for the first seed of each case."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context(PLOT_SETTINGS):
        figure = NewFigure(figsize=(10, 9), layout="constrained")
        axes: list[Axes] = list(figure.subplots(3, 1, sharex=True))
        for number, each in enumerate(results):
            samples = each.seeds[0].samples
            times = [sample.at_s for sample in samples]
            style: Any = {"color": RUN_COLOURS[number % len(RUN_COLOURS)]}
            axes[0].plot(
                times,
                [sum(sample.threads) for sample in samples],
                label=_series(each.case),
                **style,
            )
            axes[1].plot(
                times, [len(sample.threads) for sample in samples], drawstyle="steps-post", **style
            )
            axes[2].plot(times, [sample.queued for sample in samples], **style)
        titles = ("threads on all replicas", "serving replicas", "requests without a replica")
        for ax, title in zip(axes, titles, strict=True):
            ax.set_title(title)
            ax.set_ylim(bottom=0)
            ax.grid(visible=True, alpha=0.25)
        axes[2].set_xlabel("time (s)")
        axes[0].legend(frameon=False)
        figure.suptitle(label)
    return figure
