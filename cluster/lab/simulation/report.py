"""Tables and figures of a simulation, for its report page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from apar_core.intervals import half_width
from apar_core.reporting import RUN_COLOURS, Cell, Report, ReportTable
from cluster.lab.plots import panels, shared_legend
from cluster.lab.simulation.measures import SLO, Measures, ratio, summarise
from cluster.lab.simulation.runs import CaseResult, SeedResult
from cluster.lab.simulation.settings import Case, SimulationSettings
from cluster.lab.simulation.workload import SHARE_OF_APPLICATIONS, SHARE_OF_CONTINUATIONS
from cluster.lab.tables import Value, table_of

if TYPE_CHECKING:
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
    label = f"predicted for {settings.step_costs.name}"
    place = _place(results)
    tables = [
        _table("latency", f"Latency and goodput, {label}", results, place, _LATENCY),
        *_comparisons(settings, results, place),
        _table("balance", f"Balance and cache, {label}", results, place, _BALANCE),
        table_of("counts", f"Counts, mean per run, {label}", results, [*place, *_COUNTS]),
    ]
    if len({each.case.rate for each in results}) > 1:
        figures = {"loads": _load_figure(results, label)}
    else:
        figures = {"timeline": _timeline(results, label)}
    data = [
        {
            "case": each.case._asdict(),
            "seeds": [
                {name: value for name, value in asdict(run).items() if name != "samples"}
                for run in each.seeds
            ],
        }
        for each in results
    ]
    facts = _facts(settings, capacity)
    return Report(f"Simulated cluster ({label})", facts, tables, figures, {"cases": data})


def _facts(settings: SimulationSettings, capacity: float | None) -> dict[str, str]:
    costs = settings.step_costs
    facts = {
        "Step costs": f"{costs.kind}: {costs.source}",
        "Replica": f"{settings.cache_tokens:,} tokens of KV cache, at most {settings.concurrency} "
        "requests",
        **settings.facts(),
        "Shared prompts": f"synthetic: {SHARE_OF_APPLICATIONS:.0%} of the requests come from 20 "
        f"applications with a system prompt each, {SHARE_OF_CONTINUATIONS:.0%} continue a "
        "conversation",
        "SLO": SLO,
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
    if settings.kill or settings.join:
        for what, times_s in (("die", settings.kill), ("join", settings.join)):
            facts[f"Replicas {what} at"] = ", ".join(f"{s:g} s" for s in sorted(times_s)) or "-"
    if settings.surge != 1.0:
        facts["Surge"] = f"{settings.surge:g} times the rate in the middle third"
    return facts


def _place(results: Sequence[CaseResult]) -> list[Value]:
    """Return the columns that distinguish the cases."""
    columns = [
        Value("replicas", "d", lambda each: each.case.replicas),
        Value("load", ".2f", lambda each: each.case.load),
        Value("requests/s", ".1f", lambda each: each.case.rate),
        Value("router", "", lambda each: each.case.router),
        Value("forks", "", lambda each: each.case.fork_policy),
        Value("target threads", ".0f", lambda each: each.case.target_threads),
        Value("catch-up s", ".0f", lambda each: each.case.catch_up_s),
    ]
    return [value for value in columns if any(value.of(each) is not None for each in results)]


def _table(
    name: str,
    title: str,
    results: Sequence[CaseResult],
    place: Sequence[Value],
    measures: Sequence[tuple[str, str, Get]],
) -> ReportTable:
    def value(column: str, form: str, get: Get) -> Value:
        def shown(each: CaseResult) -> Cell:
            values = [get(run.measures) for run in each.seeds]
            mean = sum(values) / len(values)
            if column in _WITH_INTERVAL and len(values) > 1:
                return f"{mean:{form}} ± {half_width(values):{form}}"
            return mean

        return Value(column, form, shown)

    return table_of(name, title, results, [*place, *(value(*each) for each in measures)])


def _comparisons(
    settings: SimulationSettings, results: Sequence[CaseResult], place: Sequence[Value]
) -> list[ReportTable]:
    """Compare each case with the first of its load, seed by seed, if there are several."""
    first: dict[tuple[int, float], CaseResult] = {}
    for each in results:
        first.setdefault((each.case.replicas, each.case.rate), each)

    def value(title: str, get: Get) -> Value:
        def shown(each: CaseResult) -> str:
            base = first[each.case.replicas, each.case.rate]
            mean, half = ratio(
                [run.measures for run in each.seeds], [run.measures for run in base.seeds], get
            )
            return f"{mean:.3f} ± {half:.3f}" if settings.seeds > 1 else f"{mean:.3f}"

        return Value(title, "", shown)

    compared = [each for each in results if each not in first.values()]
    if not compared:
        return []
    case = results[0].case
    return [
        table_of(
            "ratios",
            f"Over the first case of each load ({case.router}, {case.fork_policy})",
            compared,
            [
                *place,
                value("mean x", lambda m: m.mean_s),
                value("p99 x", lambda m: m.p99_s),
                value("first token p99 x", lambda m: m.first_token_p99_s),
                value("per token p99 x", lambda m: m.token_p99_s),
            ],
            note="Latencies relative to the first case, with the same requests for each seed.",
        )
    ]


def _mean(title: str, form: str, get: Callable[[SeedResult], float]) -> Value:
    return Value(title, form, lambda each: sum(map(get, each.seeds)) / len(each.seeds))


_COUNTS = (
    _mean("requests", ".0f", lambda run: run.requests),
    _mean("refused or lost", ".0f", lambda run: sum(run.errors.values())),
    _mean("continued", ".0f", lambda run: run.continued),
    _mean("forks", ".0f", lambda run: run.forks),
    _mean("forks delayed", ".0f", lambda run: run.forks_delayed),
    _mean("most queued", ".0f", lambda run: run.most_queued),
    _mean("most replicas", ".0f", lambda run: run.most_replicas),
    _mean("last replicas", ".0f", lambda run: run.last_replicas),
    _mean("replica hours", ".2f", lambda run: run.replica_hours),
    _mean("end s", ".0f", lambda run: run.end_s),
)


def _series(case: Case) -> str:
    parts = [case.router, case.fork_policy]
    if case.target_threads is not None:
        parts.append(f"target {case.target_threads:g}")
    if case.catch_up_s is not None:
        parts.append(f"catch-up {case.catch_up_s:g} s")
    return f"{case.replicas} x {', '.join(parts)}"


def _load_figure(results: Sequence[CaseResult], label: str) -> Figure:
    with panels(2, 3, (13, 8)) as (figure, axes):
        names = list(dict.fromkeys(_series(each.case) for each in results))
        for ax, (title, logarithmic, field, scale) in zip(axes.ravel(), _PANELS, strict=True):
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
        shared_legend(figure, axes[0][0])
        figure.suptitle(label)
    return figure


def _timeline(results: Sequence[CaseResult], label: str) -> Figure:
    """Draw threads, replicas and waiting requests over time, for the first seed of each case."""
    with panels(3, 1, (10, 9), sharex=True) as (figure, axes):
        threads, serving, queued = axes.ravel()
        for number, each in enumerate(results):
            samples = each.seeds[0].samples
            times = [sample.at_s for sample in samples]
            colour = RUN_COLOURS[number % len(RUN_COLOURS)]
            name = _series(each.case)
            threads.plot(times, [sum(s.threads) for s in samples], label=name, color=colour)
            replicas = [len(sample.threads) for sample in samples]
            serving.plot(times, replicas, drawstyle="steps-post", color=colour)
            queued.plot(times, [sample.queued for sample in samples], color=colour)
        for ax, title in (
            (threads, "threads on all replicas"),
            (serving, "serving replicas"),
            (queued, "requests without a replica"),
        ):
            ax.set_title(title)
            ax.set_ylim(bottom=0)
            ax.grid(visible=True, alpha=0.25)
        queued.set_xlabel("time (s)")
        threads.legend(frameon=False)
        figure.suptitle(label)
    return figure
