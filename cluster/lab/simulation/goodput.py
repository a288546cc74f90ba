"""Goodput: the highest request rate at which a share of the requests meets an SLO.

A simulated cluster serves requests in an open loop. The rate is bisected on a grid, the same for
all methods, with the same requests in the same order: only the gaps between arrivals are scaled.
Times are those of the reader of an ordered stream, where text arrives when it is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from apar_core.errors import EvaluationError
from apar_core.reporting import PLOT_SETTINGS, RUN_COLOURS, Cell, Column, Report, ReportTable
from apar_core.step_costs.costs import StepBatch
from cluster.durations import parse_duration
from cluster.lab.experiments.parts import PartStore
from cluster.lab.experiments.settings import file_digest
from cluster.lab.grid import grid
from cluster.lab.simulation.cluster import Cluster, Outcome
from cluster.lab.simulation.measures import MEASURED
from cluster.lab.simulation.runs import NO_FORKS, Case, SimulationSettings, replica_capacity
from cluster.lab.simulation.workload import RecordedData, SimRequest, read_data
from cluster.lab.sizing.search import grid_rate, highest, rate_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADAPTIVE, PACED = "adaptive", "paced"
METHODS = {
    NO_FORKS: "no forks",
    PACED: "no forks, adaptive",
    "eager": "eager forks",
    ADAPTIVE: "adaptive forks",
}
"""Titles of the methods to compare: whether requests fork, and the policy of the engines."""
_UNFORKED, _TIMED = (NO_FORKS, PACED), (PACED, ADAPTIVE)
TIMES = {
    "ttft": "time to the first token",
    "certain": "time to certain token, mean over the tokens of a request",
    "tpot": "time per token as the reader sees it",
    "path": "time per step of the critical path",
    "tbt": "95th percentile of the time between two pieces of text",
    "silence": "longest time between two pieces of text",
    "e2e": "end-to-end latency",
}
"""Times of a request by their names in an SLO."""
SLOS = (
    *(f"ttft=1s,tpot={multiple:g}x" for multiple in (0.75, 1.5, 3)),
    *(f"ttft=1s,tpot=3x,silence={multiple:g}x" for multiple in (5, 10)),
)
"""Default SLOs. Fewer than 1x per token can be met with forks only."""
_TOKEN_TIMES = ("tpot", "path", "tbt")
# The step of the fork token, the one scheduled before it was seen, and the child's first step.
_FORK_STEPS = 3
_IDLE_CONTEXT = 400
_FLAT, _FORKED = "one thread", "forked"
_START = 0.7
# Answers take up to half a minute where the machine is full.
_LEAST_S = 60.0
# Grid steps of 3 %: the first jump is 27 %, and the lowest rate a thirtieth of the capacity.
_JUMP, _LOWEST, _HIGHEST = 8, 115, 12


@dataclass(frozen=True, slots=True)
class Objective:
    """One SLO: limits in seconds by name, and the text that it was parsed from."""

    text: str
    limits: Mapping[str, float]

    def meets(self, times: Mapping[str, float] | None) -> bool:
        """Return whether a request with these times meets the SLO; None has failed."""
        return times is not None and all(
            times[name] <= limit for name, limit in self.limits.items()
        )

    @property
    def token_s(self) -> float | None:
        """The step time that the adaptive policy keeps to; None without a limit per token."""
        limits = [self.limits[name] for name in _TOKEN_TIMES if name in self.limits]
        if "silence" in self.limits:
            limits.append(self.limits["silence"] / _FORK_STEPS)
        return min(limits, default=None)


def parse_objective(text: str, step_s: float) -> Objective:
    """Parse an SLO such as `ttft=1s,tpot=1.5x`; `x` is the step time of a request that runs alone.

    Raises EvaluationError for an unknown or repeated name and an invalid value.
    """
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if name not in TIMES or name in limits:
            raise EvaluationError(
                f"--slo {text!r}: {name!r} is unknown or repeated; known: {', '.join(TIMES)}"
            )
        try:
            is_multiple = value.endswith("x")
            limits[name] = float(value[:-1]) * step_s if is_multiple else parse_duration(value)
        except ValueError as error:
            raise EvaluationError(
                f"--slo {text!r}: {value!r} is neither a time, such as 50ms, nor a multiple of the "
                "step time, such as 1.5x"
            ) from error
        if not 0 < limits[name] < math.inf:
            raise EvaluationError(f"--slo {text!r}: the limit of {name} must be above 0")
    if not limits:
        raise EvaluationError(f"--slo {text!r} has no limit; example: ttft=1s,tpot=1.5x")
    return Objective(text, limits)


@dataclass(frozen=True, slots=True)
class GoodputSettings:
    """What is searched: SLOs, methods, and the size of a run.

    base: cluster and recorded data; its rates, policies and duration are unused.
    share: of the requests that must meet the SLO. requests: of a run, per replica. seed: of the
    draw of requests and arrivals.
    """

    base: SimulationSettings
    slos: tuple[str, ...]
    methods: tuple[str, ...] = tuple(METHODS)
    share: float = 0.95
    requests: int = 1000
    seed: int = 0

    @property
    def first_token_s(self) -> float:
        """Time to first token that the adaptive policy may use: the strictest of the SLOs."""
        return min((each.limits.get("ttft", 1.0) for each in self.objectives), default=1.0)

    @property
    def step_s(self) -> float:
        """Step time of a request that runs alone."""
        return self.base.costs.step_s(StepBatch(1, _IDLE_CONTEXT), overlapped=True)

    def as_text(self) -> dict[str, str]:
        """Return the settings that all searches of a folder share."""
        base = self.base
        return {
            "costs": repr(base.costs),
            "kv_tokens": str(base.kv_tokens),
            "traces": ", ".join(map(file_digest, base.traces)),
            "arrivals": "Poisson" if base.arrivals is None else file_digest(base.arrivals),
            "replicas": str(base.replicas),
            "router": str(base.routers),
            "concurrency": str(base.concurrency),
            "attention": str(base.family),
            "slos": "; ".join(self.slos),
            "share": str(self.share),
            "requests": str(self.requests),
            "seed": str(self.seed),
            "times": ", ".join(TIMES),
        }

    @property
    def objectives(self) -> list[Objective]:
        """The SLOs with their limits in seconds."""
        return [parse_objective(text, self.step_s) for text in self.slos]


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
    mean step are the tokens that arrive during it, so no order of the work changes a mean step, and
    uneven steps are longer where costs are convex: up to the largest CUDA graph. The bound is the
    rate at which a mean step is as long as the SLO allows for the share of the requests, each of
    which has all its threads in every step. Shared prefixes cost nothing.
    """
    limit_s = slo.limits.get("tpot")
    if limit_s is None:
        return None
    (replicas,) = settings.base.replicas
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
    costs = settings.base.costs
    low, high = 0.0, 1e5
    while high - low > 1e-3 * high:
        rate = (low + high) / 2
        arriving = rate * step_s / replicas / number
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
    (replicas,) = settings.base.replicas
    rate = _START * capacity
    number = max(settings.requests * replicas, _LEAST_S * capacity)
    return data.workload(settings.seed).requests(
        [(number / rate, rate)], forked=method not in _UNFORKED
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
    requests = scaled(nominal, rate)
    if token_s is not None:
        base = replace(
            base, token_time_ms=1000 * token_s, first_token_ms=1000 * settings.first_token_s
        )
    (replicas,) = base.replicas
    policy = ADAPTIVE if method == PACED else method
    case = Case(replicas, rate, None, base.routers[0], policy)
    run = Cluster(base.cluster(case)).run(requests)
    number = len(run.outcomes)
    outcomes = run.outcomes[int(MEASURED[0] * number) : math.ceil(MEASURED[1] * number)]
    times = [times_of(outcome) for outcome in outcomes]
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
            found.append(Search(method, settings.slos))
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
    settings: GoodputSettings, data: RecordedData, search: Search, capacity: float
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


class _Worker:
    """Searches with shared settings and recorded data."""

    def __init__(self, settings: GoodputSettings, data: RecordedData, capacity: float) -> None:
        self._settings, self._data, self._capacity = settings, data, capacity

    def run(self, search: Search) -> list[RateRun]:
        """Search one method."""
        return search_rates(self._settings, self._data, search, self._capacity)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of one method and SLO; `best` is None if no rate meets the SLO.

    bound: `rate_bound` of the method's requests.
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
    settings: GoodputSettings,
    store: PartStore,
    jobs: int,
    begin: Callable[[str, int], Callable[[], None]],
) -> list[Goodput]:
    """Search all methods in `jobs` processes; results in the store are not searched again.

    The results do not depend on `jobs`. Raises EvaluationError for missing data.
    """
    searches = searches_of(settings)
    missing = [search for search in searches if not store.has(search.name)]
    if missing:
        data = read_data(settings.base.traces, settings.base.arrivals)
        done = begin("saturated rate", 1)
        capacity = store.get_or_do(
            "capacity", lambda: {"rate": replica_capacity(settings.base, data)}
        )["rate"]
        done()
        (replicas,) = settings.base.replicas
        store.get_or_do("bounds", lambda: _bounds(settings, data, replicas * capacity))
        done = begin("searches", len(missing))
        with grid(jobs, _Worker, settings, data, replicas * capacity) as search_all:
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
    base = settings.base
    (replicas,) = base.replicas
    label = f"predicted for {base.costs.name}"
    facts = {
        "Step costs": f"{base.costs.kind}: {base.costs.source}",
        "Cluster": f"{replicas} replica(s) with {base.kv_tokens:,} tokens of KV cache and at most "
        f"{base.concurrency} requests each; router {base.routers[0]}",
        "Answers": ", ".join(str(path) for path in base.traces),
        "Arrivals": "Poisson process"
        if base.arrivals is None
        else f"{base.arrivals}, compressed to the rate, with the recorded prompt lengths",
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
    methods = settings.methods
    columns = [Column("SLO"), *(Column(f"{METHODS[each]}, requests/s", ".2f") for each in methods)]
    pairs = [(over, under) for over in methods for under in methods if over != under]
    wanted = [("eager", NO_FORKS), (ADAPTIVE, NO_FORKS), (ADAPTIVE, PACED), (ADAPTIVE, "eager")]
    pairs = [pair for pair in wanted if pair in pairs]
    columns += [Column(f"{over} over {METHODS[under]}") for over, under in pairs]
    bounds = {each.slo: each.bound for each in results if each.method not in _UNFORKED}
    columns.append(Column("bound with forks, requests/s", ".2f"))
    rows = []
    for slo in settings.slos:
        row: list[Cell] = [slo, *(found[method, slo] for method in methods)]
        for over, under in pairs:
            high, low = found[over, slo], found[under, slo]
            row.append(f"{high / low:.2f}x" if low else "-" if not high else "only with forks")
        row.append(bounds.get(slo))
        rows.append(tuple(row))
    return ReportTable(
        "goodput",
        "Goodput",
        tuple(columns),
        tuple(rows),
        note="0: no rate meets the SLO. Bound: the rate at which a mean step is as long as the SLO "
        "allows. No order of the same work changes a mean step, and uneven steps are longer. It "
        "holds where every request is served.",
    )


def _detail_table(results: Sequence[Goodput]) -> ReportTable:
    columns = [Column("SLO"), Column("method"), Column("requests/s", ".2f")]
    columns += [Column(f"{name} p95 (ms)", ".0f") for name in TIMES]
    columns += [
        Column("mean e2e (s)", ".2f"), Column("rows a step", ".0f"),
        Column("forks delayed (%)", ".0f"), Column("within SLO (%)", ".1f"),
        Column("one step higher (%)", ".1f"),
    ]  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for each in results:
        best = each.best
        if best is None:
            continue
        above = [run for run in each.runs if run.place == best.place + 1]
        rows.append(
            (
                each.slo, METHODS[each.method], best.rate,
                *(1000 * best.p95[name] for name in TIMES),
                best.mean_e2e_s, best.rows, 100 * best.forks_delayed, 100 * best.shares[each.slo],
                100 * above[0].shares[each.slo] if above else None,
            )
        )  # fmt: skip
    return ReportTable("details", "At the highest rate", tuple(columns), tuple(rows))


def _attainment_figure(settings: GoodputSettings, results: Sequence[Goodput], label: str) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context(PLOT_SETTINGS):
        columns = min(3, len(settings.slos))
        lines = math.ceil(len(settings.slos) / columns)
        figure = NewFigure(figsize=(4.6 * columns, 3.4 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).ravel()
        for ax in axes[len(settings.slos) :]:
            ax.set_visible(False)
        for ax, slo in zip(axes, settings.slos, strict=False):
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
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(label)
    return figure


def report_goodput(
    settings: GoodputSettings,
    folder: Path,
    jobs: int,
    begin: Callable[[str, int], Callable[[], None]],
) -> Report:
    """Do the searches that the folder does not have, and report all of them.

    Raises EvaluationError for missing data, and for results of other settings in the folder.
    """
    store = PartStore(folder, settings.as_text())
    return goodput_report(settings, find_goodput(settings, store, jobs, begin))
