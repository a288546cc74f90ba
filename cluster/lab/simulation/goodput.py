"""Goodput: the highest request rate at which a share of the requests meets an SLO.

A simulated cluster serves requests in an open loop. The rate is bisected on a grid, the same for
all methods, with the same requests in the same order: only the gaps between arrivals are scaled.
Times are those of the reader of an ordered stream, where text arrives when it is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from apar_core.errors import EvaluationError
from apar_core.reporting import RUN_COLOURS, Report, ReportTable
from apar_core.step_costs.costs import StepBatch
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.grid import grid
from cluster.lab.plots import panels, shared_legend
from cluster.lab.simulation.cluster import Cluster, Outcome
from cluster.lab.simulation.measures import middle
from cluster.lab.simulation.runs import cluster_settings, replica_capacity
from cluster.lab.simulation.settings import (
    ADAPTIVE,
    LISTS,
    LISTS_ADAPTIVE,
    NO_FORKS,
    PACED,
    TIMES,
    Case,
    GoodputSettings,
    Objective,
)
from cluster.lab.simulation.workload import RecordedData, SimRequest, read_data
from cluster.lab.sizing.search import grid_rate, highest, rate_place
from cluster.lab.tables import Value, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {
    NO_FORKS: "no forks",
    PACED: "no forks, adaptive",
    "eager": "eager forks",
    ADAPTIVE: "adaptive forks",
    LISTS: "lists without training",
    LISTS_ADAPTIVE: "lists, adaptive",
}
"""Titles of the methods to compare: whether requests fork, and the policy of the engines."""
_UNFORKED, _TIMED = (NO_FORKS, PACED), (PACED, ADAPTIVE, LISTS_ADAPTIVE)
_LISTED = (LISTS, LISTS_ADAPTIVE)
_POLICIES = {PACED: ADAPTIVE, LISTS: "eager", LISTS_ADAPTIVE: ADAPTIVE}
_FLAT, _FORKED = "one thread", "forked"
_START = 0.7
# Answers take up to half a minute where the machine is full.
_LEAST_S = 60.0
# Grid steps of 3 %: the first jump is 27 %, and the lowest rate a thirtieth of the capacity.
_JUMP, _LOWEST, _HIGHEST = 8, 115, 12


@dataclass(frozen=True, slots=True)
class RateRun:
    """A method at one rate: the share of requests within each SLO, by its text.

    p95: the 95th percentile of each time. rows: mean rows of a step.
    """

    place: int
    shares: Mapping[str, float]
    p95: Mapping[str, float]
    mean_e2e_s: float
    rows: float
    forks_delayed: float
    failed: float

    @property
    def rate(self) -> float:
        """Requests per second of the whole cluster."""
        return grid_rate(self.place)


def times_of(outcome: Outcome) -> dict[str, float] | None:
    """Return a request's times in seconds by their names in `TIMES`; None without text."""
    if outcome.error is not None:
        return None
    request, reader = outcome.request, outcome.reader
    if reader is None:
        return None
    seen = reader.times
    first_s, last_s, certain_s = seen.first_s, seen.last_s, seen.certain_s
    if first_s is None or last_s is None or certain_s is None:
        return None
    assert outcome.end_s is not None
    assert outcome.first_token_s is not None
    further = max(1, request.answer.text_tokens - 1)
    return {
        "ttft": first_s - request.arrival_s,
        "certain": certain_s - request.arrival_s,
        "tpot": (last_s - first_s) / further,
        "path": (outcome.end_s - outcome.first_token_s) / max(1, outcome.critical_tokens - 1),
        "tbt": reader.silence_s(0.95),
        "silence": seen.longest_silence_s or 0.0,
        "e2e": outcome.end_s - request.arrival_s,
    }


def rate_bound(
    settings: GoodputSettings, requests: Sequence[SimRequest], slo: Objective
) -> float | None:
    """Return a bound on the rate within a limit on `tpot`; None without this limit.

    It holds for schedulers that serve every request and are never idle. At a rate, the rows of a
    mean step are the tokens that arrive during it. So no order of the work changes a mean step.
    Uneven steps are longer where costs are convex: up to the largest CUDA graph. The bound is the
    rate at which a mean step is as long as the SLO allows for the share of the requests. Each of
    them has all its threads in every step. Shared prefixes cost nothing.
    """
    limit_s = slo.limits.get("tpot")
    if limit_s is None:
        return None
    parts = [(each.answer, each.forked, each.prompt_tokens, each.pieces[-1]) for each in requests]
    ratios = sorted(
        (answer.critical_tokens - 2 if forked else answer.text_tokens - 1)
        / max(1, answer.text_tokens - 1)
        for answer, forked, _, _ in parts
    )
    step_s = limit_s / ratios[math.ceil(settings.share * len(ratios)) - 1]
    number = len(parts)
    tokens = attended = own = 0
    for answer, forked, prompt_tokens, last in parts:
        generated = sum(map(len, answer.threads.values())) if forked else len(answer.flat)
        tokens += generated
        attended += generated * prompt_tokens
        attended += answer.attended_tokens if forked else answer.flat_attended_tokens
        assert isinstance(last, tuple)
        own += last[1]
    costs = settings.step_costs
    low, high = 0.0, 1e5
    while high - low > 1e-3 * high:
        rate = (low + high) / 2
        arriving = rate * step_s / settings.replicas / number
        batch = StepBatch(
            math.floor(arriving * tokens),
            math.floor(arriving * attended),
            math.floor(arriving * own),
        )
        if costs.step_s(batch, overlapped=True) <= step_s:
            low = rate
        else:
            high = rate
    return low


def nominal_requests(
    settings: GoodputSettings, data: RecordedData, method: str, capacity: float
) -> list[SimRequest]:
    """Return the requests of all runs of a method, at the rate where the search starts.

    They are the same for all methods, except whether they fork.
    """
    rate = _START * capacity
    number = max(settings.requests * settings.replicas, _LEAST_S * capacity)
    return data.workload(settings.seed).requests(
        [(number / rate, rate)], forked=method not in _UNFORKED, in_lists=method in _LISTED
    )


def scaled(requests: Sequence[SimRequest], rate: float) -> list[SimRequest]:
    """Return the same requests in the same order, with gaps scaled to exactly this mean rate."""
    scale = len(requests) / rate / requests[-1].arrival_s
    return [replace(each, arrival_s=scale * each.arrival_s) for each in requests]


def run_rate(
    settings: GoodputSettings,
    method: str,
    token_s: float | None,
    nominal: Sequence[SimRequest],
    place: int,
) -> RateRun:
    """Run a method at a rate of the grid; `token_s` is the adaptive policy's time per token.

    `nominal`: the requests, at any rate.
    """
    base, rate = settings.base, grid_rate(place)
    if token_s is not None:
        limits = {"token_time_s": token_s, "first_token_s": settings.first_token_s}
        base = base.model_copy(update=limits)
    base = base.model_copy(update={"lists": method in _LISTED})
    policy = _POLICIES.get(method, method)
    case = Case(settings.replicas, rate, None, base.router[0].value, policy)
    run = Cluster(cluster_settings(base, case)).run(scaled(nominal, rate))
    times = [times_of(outcome) for outcome in middle(run.outcomes)]
    served = [each for each in times if each is not None]
    return RateRun(
        place,
        {slo.text: sum(map(slo.meets, times)) / len(times) for slo in settings.objectives},
        {
            name: float(np.quantile([each[name] for each in served], 0.95)) if served else math.nan
            for name in TIMES
        },
        float(np.mean([each["e2e"] for each in served])) if served else math.nan,
        run.rows / max(1, run.steps),
        run.forks_delayed / max(1, run.forks),
        1 - len(served) / len(times),
    )


@dataclass(frozen=True, slots=True)
class Search:
    """A method and the SLOs whose goodput is searched; the adaptive policy keeps to `token_s`."""

    method: str
    slos: tuple[str, ...]
    token_s: float | None = None

    @property
    def name(self) -> str:
        """Name of the search in the folder of results."""
        return (
            self.method if self.token_s is None else f"{self.method} {1000 * self.token_s:.3f} ms"
        )


def searches_of(settings: GoodputSettings) -> list[Search]:
    """Return the searches of all methods; SLOs with the same time per token share one."""
    found: list[Search] = []
    for method in settings.methods:
        if method not in _TIMED:
            found.append(Search(method, tuple(settings.slo)))
            continue
        by_time: dict[float, list[str]] = {}
        for slo in settings.objectives:
            if slo.token_s is None:
                raise EvaluationError(
                    f"--slo {slo.text!r}: the adaptive policy needs a limit on tpot, path, tbt or "
                    "silence"
                )
            by_time.setdefault(slo.token_s, []).append(slo.text)
        found += [Search(method, tuple(slos), token_s) for token_s, slos in by_time.items()]
    return found


def search_rates(
    settings: GoodputSettings, data: RecordedData, capacity: float, search: Search
) -> list[RateRun]:
    """Return the runs of a search, which include the highest rate within each of its SLOs.

    `capacity`: requests per second of the cluster when it is saturated.
    """
    runs: dict[int, RateRun] = {}
    nominal = nominal_requests(settings, data, search.method, capacity)
    at_capacity = rate_place(capacity)

    def attains(slo: str) -> Callable[[int], bool]:
        def keeps(place: int) -> bool:
            if place not in runs:
                runs[place] = run_rate(settings, search.method, search.token_s, nominal, place)
            return runs[place].shares[slo] >= settings.share

        return keeps

    start = rate_place(_START * capacity)
    for slo in search.slos:
        found = highest(
            attains(slo), start, jump=_JUMP,
            least=at_capacity - _LOWEST, most=at_capacity + _HIGHEST,
        )  # fmt: skip
        start = start if found is None else found
    return [runs[place] for place in sorted(runs)]


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of one method and SLO; `best` is None if no rate meets the SLO.

    bound: `rate_bound` of the method's requests. None also for lists: how many tokens they discard
        depends on the run.
    """

    method: str
    slo: str
    best: RateRun | None
    runs: tuple[RateRun, ...]
    bound: float | None

    @property
    def rate(self) -> float:
        """Requests per second, 0 if no rate meets the SLO."""
        return 0.0 if self.best is None else self.best.rate


def find_goodput(
    settings: GoodputSettings, store: PartStore, jobs: int, begin: StartStage
) -> list[Goodput]:
    """Search all methods in `jobs` processes; results in the store are not searched again.

    The results do not depend on `jobs`. Raises EvaluationError for missing data.
    """
    searches = searches_of(settings)
    missing = [search for search in searches if not store.has(search.name)]
    if missing:
        lists = any(search.method in _LISTED for search in searches)
        data = read_data(settings.trace, settings.arrivals, lists=lists)
        done = begin("saturated rate", 1)
        rate = store.get_or_do("capacity", lambda: {"rate": replica_capacity(settings.base, data)})
        capacity = settings.replicas * rate["rate"]
        done()
        store.get_or_do("bounds", lambda: _bounds(settings, data, capacity))
        done = begin("searches", len(missing))
        with grid(jobs, partial, search_rates, settings, data, capacity) as search_all:
            for (search,), runs in search_all([(each,) for each in missing]):
                store.add(search.name, {"runs": [asdict(run) for run in runs]})
                done()
        store.sort()
    bounds = store.find("bounds")
    results = []
    for search in searches:
        runs = tuple(RateRun(**run) for run in store.find(search.name)["runs"])
        for slo in search.slos:
            # Each search tries the next rate above its result, which is outside the SLO.
            within = [run for run in runs if run.shares[slo] >= settings.share]
            best = max(within, key=lambda run: run.place, default=None)
            bound = None
            if search.method not in _LISTED:
                bound = bounds[_FLAT if search.method in _UNFORKED else _FORKED][slo]
            results.append(Goodput(search.method, slo, best, runs, bound))
    return results


def _bounds(
    settings: GoodputSettings, data: RecordedData, capacity: float
) -> dict[str, dict[str, float | None]]:
    """Return the bounds of requests with and without forks, by SLO."""
    found = {}
    for name, method in ((_FLAT, NO_FORKS), (_FORKED, ADAPTIVE)):
        requests = nominal_requests(settings, data, method, capacity)
        found[name] = {slo.text: rate_bound(settings, requests, slo) for slo in settings.objectives}
    return found


def goodput_report(settings: GoodputSettings, results: Sequence[Goodput]) -> Report:
    """Return the report of all methods and SLOs; every number in it is predicted."""
    costs, replicas = settings.step_costs, settings.replicas
    label = f"predicted for {costs.name}"
    facts = {
        "Step costs": f"{costs.kind}: {costs.source}",
        "Cluster": f"{replicas} replica(s) with {settings.cache_tokens:,} tokens of KV cache and "
        f"at most {settings.concurrency} requests each; router {settings.base.router[0].value}",
        **settings.facts(),
        "Goodput": f"highest rate at which {settings.share:.0%} of the requests meet the SLO; "
        f"{settings.requests * replicas} requests a run, and at least {_LEAST_S:g} s of them, of "
        "which the middle is measured; rates on a grid of 3 %",
        "Step of a request that runs alone": f"{1000 * settings.step_s:.1f} ms (x in the SLOs)",
        "Times": "; ".join(f"{name}: {title}" for name, title in TIMES.items()),
    }
    return Report(
        f"Goodput ({label})",
        facts,
        [_goodput_table(settings, results), _detail_table(results)],
        {"attainment": _attainment_figure(settings, results, label)},
        {"results": [asdict(each) for each in results]},
    )


def _goodput_table(settings: GoodputSettings, results: Sequence[Goodput]) -> ReportTable:
    found = {(each.method, each.slo): each.rate for each in results}
    bounds = {each.slo: each.bound for each in results if each.method not in (*_UNFORKED, *_LISTED)}
    wanted = [
        ("eager", NO_FORKS),
        (ADAPTIVE, NO_FORKS),
        (ADAPTIVE, PACED),
        (ADAPTIVE, "eager"),
        (LISTS, NO_FORKS),
        (LISTS_ADAPTIVE, NO_FORKS),
        (LISTS_ADAPTIVE, PACED),
    ]

    def rate(method: str) -> Value:
        return Value(f"{METHODS[method]}, requests/s", ".2f", lambda slo: found[method, slo])

    def ratio(over: str, under: str) -> Value:
        def shown(slo: str) -> str:
            high, low = found[over, slo], found[under, slo]
            return f"{high / low:.2f}x" if low else "-" if not high else "only with forks"

        return Value(f"{over} over {METHODS[under]}", "", shown)

    return table_of(
        "goodput",
        "Goodput",
        settings.slo,
        [
            Value("SLO", "", str),
            *map(rate, settings.methods),
            *(ratio(*pair) for pair in wanted if set(pair) <= set(settings.methods)),
            Value("bound with forks, requests/s", ".2f", bounds.get),
        ],
        note="0: no rate meets the SLO. Bound: the rate at which a mean step is as long as the SLO "
        "allows. No order of the same work changes a mean step, and uneven steps are longer. It "
        "holds where every request is served.",
    )


def _detail_table(results: Sequence[Goodput]) -> ReportTable:
    def p95(name: str) -> Value:
        return Value(f"{name} p95 (ms)", ".0f", lambda each: 1000 * each.best.p95[name])

    def above(each: Goodput) -> float | None:
        assert each.best is not None
        place = each.best.place + 1
        return next((100 * run.shares[each.slo] for run in each.runs if run.place == place), None)

    return table_of(
        "details",
        "At the highest rate",
        [each for each in results if each.best is not None],
        [
            Value("SLO", "", lambda each: each.slo),
            Value("method", "", lambda each: METHODS[each.method]),
            Value("requests/s", ".2f", lambda each: each.best.rate),
            *map(p95, TIMES),
            Value("mean e2e (s)", ".2f", lambda each: each.best.mean_e2e_s),
            Value("rows a step", ".0f", lambda each: each.best.rows),
            Value("forks delayed (%)", ".0f", lambda each: 100 * each.best.forks_delayed),
            Value("within SLO (%)", ".1f", lambda each: 100 * each.best.shares[each.slo]),
            Value("one step higher (%)", ".1f", above),
        ],
    )


def _attainment_figure(settings: GoodputSettings, results: Sequence[Goodput], label: str) -> Figure:
    columns = min(3, len(settings.slo))
    lines = math.ceil(len(settings.slo) / columns)
    with panels(lines, columns, (4.6 * columns, 3.4 * lines)) as (figure, grid_of_axes):
        axes = grid_of_axes.ravel()
        for ax in axes[len(settings.slo) :]:
            ax.set_visible(False)
        for ax, slo in zip(axes, settings.slo, strict=False):
            for colour, method in zip(RUN_COLOURS, METHODS, strict=False):
                for each in results:
                    if (each.method, each.slo) != (method, slo):
                        continue
                    ax.plot(
                        [run.rate for run in each.runs],
                        [100 * run.shares[slo] for run in each.runs],
                        label=METHODS[method],
                        color=colour,
                        marker=".",
                    )
            ax.axhline(100 * settings.share, color="#9aa5b1", linestyle="--", linewidth=1)
            ax.set(title=slo, xlabel="requests/s", ylabel="requests within the SLO (%)")
            ax.set_ylim(0, 102)
            ax.grid(visible=True, alpha=0.25)
        shared_legend(figure, axes[0])
        figure.suptitle(label)
    return figure


def report_goodput(
    settings: GoodputSettings, folder: Path, begin: StartStage, *, jobs: int = 1
) -> Report:
    """Do the searches that the folder does not have, and report all of them.

    Raises EvaluationError for missing data, and for results of other settings in the folder.
    """
    store = PartStore(folder, settings.as_text())
    return goodput_report(settings, find_goodput(settings, store, jobs, begin))
