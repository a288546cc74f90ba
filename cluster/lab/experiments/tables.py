"""Tables of experiments: methods against sequential decoding, and tables 1 and 2 of the paper.

A ratio compares two runs of the same round. With several rounds, it is the median of their ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from apar_core.offline.evaluation.paper_figures import (
    ATTENDED_TOKENS,
    CACHED_TOKENS,
    MEAN_ACCELERATED,
    paper_model,
)
from apar_core.reporting import Column, ReportTable
from cluster.lab.experiments.methods import METHODS, SEQUENTIAL
from cluster.lab.experiments.runs import CategoryCounts, Run, total
from cluster.lab.experiments.samples import LEAST_SAMPLES
from cluster.lab.experiments.settings import ExperimentSettings, RunKey
from cluster.lab.tables import Value, table_of

Row = tuple[str | float | None, ...]

PAPER_THROUGHPUT = (1.2, 1.7)
"""The paper's throughput ratios to sequential decoding, at equal KV memory (section 3.4)."""
PAPER_LATENCY = (0.65, 0.8)
"""The paper's mean latency ratios to sequential decoding, at equal concurrency (section 3.4)."""
_SMALL_SHARE = 0.2
_SMALL_MODEL, _LARGE_MODEL = "A-7B", "A-13B"
# The paper leaves these out of the mean, since its models do not fork there.
_LEFT_OUT = ("coding", "extraction", "math")
_SMALLEST_CATEGORY = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method at one point. `pairs` has its run and the sequential run of each round."""

    key: RunKey
    pairs: tuple[tuple[Run, Run], ...]

    @property
    def kept_samples(self) -> int:
        """Steady-state samples of the run with the fewest; 0: whole runs are compared."""
        return min(run.kept_samples for pair in self.pairs for run in pair)

    def median(self, value: Callable[[Run], float | None]) -> float | None:
        """Return the median of a value over rounds; None if no run has it."""
        values = [found for run, _ in self.pairs if (found := value(run)) is not None]
        return statistics.median(values) if values else None

    def ratio(self, value: Callable[[Run], float]) -> float:
        """Return the median, over rounds, of a value's ratio to that of the sequential run."""
        return statistics.median(value(run) / value(base) for run, base in self.pairs)

    @property
    def throughput(self) -> float:
        """Ratio of text tokens per second to sequential decoding, sampled as in the paper."""
        if self.kept_samples:
            return self.ratio(lambda run: run.throughput.mean)
        return self.whole_throughput

    @property
    def whole_throughput(self) -> float:
        """Ratio of text tokens per second to sequential decoding, over whole runs."""
        return self.ratio(lambda run: run.whole_tokens_per_s)

    @property
    def latency(self) -> float:
        """Ratio of mean latency to sequential decoding."""
        return self.ratio(lambda run: run.latency_s.mean)

    @property
    def recomputed_tokens(self) -> float:
        """Prompt tokens computed beyond those of sequential decoding."""
        return statistics.median(run.prompt_tokens - base.prompt_tokens for run, base in self.pairs)


def comparisons(keys: Sequence[RunKey], runs: Mapping[RunKey, Run]) -> list[Comparison]:
    """Pair the runs of these keys with sequential runs, in the order of the keys."""
    rounds: dict[RunKey, list[tuple[Run, Run]]] = {}
    for key in keys:
        pair = (runs[key], runs[key.of_method(SEQUENTIAL)])
        rounds.setdefault(key.model_copy(update={"round": 0}), []).append(pair)
    return [Comparison(key, tuple(pairs)) for key, pairs in rounds.items()]


def device_label(key: RunKey, settings: ExperimentSettings) -> str:
    """Say whether a run's times are predicted for a GPU or measured on this machine."""
    device = key.device if key.tensor_parallel == 1 else f"{key.tensor_parallel} x {key.device}"
    return settings.origin(device)


def _median(title: str, form: str, value: Callable[[Run], float | None]) -> Value:
    return Value(title, form, lambda each: each.median(value))


def _place(settings: ExperimentSettings) -> tuple[Value, ...]:
    """Return the columns that say of which runs a comparison is."""

    def load(key: RunKey) -> str:
        number = key.concurrency
        return f"{number} in a loop" if key.is_closed_loop else f"queue, {number}"

    return (
        Value("model", "", lambda each: each.key.model),
        Value("device", "", lambda each: device_label(each.key, settings)),
        Value("trace", "", lambda each: each.key.trace),
        Value("KV share", "g", lambda each: each.key.kv_share),
        Value("load", "", lambda each: load(each.key)),
        Value("method", "", lambda each: each.key.method),
    )


def _ratios(form: str) -> tuple[Value, ...]:
    return (
        Value("throughput x", form, lambda each: each.throughput),
        Value("whole run x", form, lambda each: each.whole_throughput),
        Value("latency x", form, lambda each: each.latency),
    )


def ratio_table(found: Sequence[Comparison], settings: ExperimentSettings) -> ReportTable:
    """Return every ratio to sequential decoding, losses included.

    Values that are the same in all rows are in the title.
    """
    place = _place(settings)
    varying = [value for value in place if len(set(map(value.of, found))) > 1]
    common = [str(value.of(found[0])) for value in place if value not in varying]
    return table_of(
        "ratios",
        ", ".join(["Each method over sequential decoding", *common]),
        found,
        (
            *varying,
            *_ratios(".2f"),
            _median("tokens/s", ".0f", _text_tokens_per_s),
            _median("latency s", ".1f", _mean_latency_s),
            _median("rows a step", ".0f", lambda run: run.rows / run.steps),
            _median("preempted", ".0f", lambda run: run.preemptions),
            Value("kept samples", ".0f", lambda each: each.kept_samples),
        ),
        note=f"x: ratio to sequential decoding; throughput above 1 and latency below 1 are gains. "
        f"Throughput: samples every {settings.sample_s:g} s, except the first third and samples "
        "without waiting requests (appendix C.2 of the paper). If fewer than "
        f"{LEAST_SAMPLES} are left (kept samples 0), throughput is of the whole run. Latency: mean "
        "from arrival, time in the queue included.",
    )


def run_table(found: Sequence[Comparison], settings: ExperimentSettings) -> ReportTable:
    """Return the counts behind the ratios."""
    return table_of(
        "runs",
        "All runs",
        found,
        (
            *_place(settings),
            *_ratios(".3f"),
            _median("KV tokens", ".0f", lambda run: run.capacity_tokens),
            _median("answers", ".0f", lambda run: run.answers),
            _median("kept samples", ".0f", lambda run: run.kept_samples),
            _median("latency s", ".1f", _mean_latency_s),
            _median("rows a step", ".1f", lambda run: run.rows / run.steps),
            _median("preemptions", ".0f", lambda run: run.preemptions),
            _median("text tokens/s", ".0f", _text_tokens_per_s),
            _median("p25", ".0f", lambda run: run.throughput.p25),
            _median("p75", ".0f", lambda run: run.throughput.p75),
            _median("whole run tokens/s", ".0f", lambda run: run.whole_tokens_per_s),
            _median("p99 latency s", ".1f", lambda run: run.latency_p99_s),
            _median("latency ms a token", ".1f", lambda run: 1000 * run.token_latency_s),
            _median("step ms", ".1f", lambda run: 1000 * run.step_s),
            _median("steps", ".0f", lambda run: run.steps),
            _median("largest rows", ".0f", lambda run: run.largest_rows),
            _median("largest tokens", ".0f", lambda run: run.largest_tokens),
            _median("held-back steps", ".0f", lambda run: run.held_back_steps),
            _median("attended tokens a row", ".0f", lambda run: run.attended_per_row),
            _median("distinct KV blocks %", ".0f", lambda run: run.distinct_percent),
            _median("peak KV tokens", ".0f", lambda run: run.peak_kv_tokens),
            _median("forks", ".0f", lambda run: run.forks),
            _median("forks delayed", ".0f", lambda run: run.forks_delayed),
            Value("recomputed tokens", ".0f", lambda each: each.recomputed_tokens),
        ),
        note="Largest rows and tokens: of any step. Distinct KV blocks: each block counted once "
        "per step, as a share of the blocks that all rows of the step read. Held-back steps: steps "
        "in which the limit on rows or tokens held back a forked thread. Recomputed: prompt tokens "
        "beyond those of sequential decoding.",
    )


def claim_table(found: Sequence[Comparison], settings: ExperimentSettings) -> ReportTable:
    """Return the range of the ratios of each of our methods, with that of the paper."""
    groups = _our_groups(found, settings)
    titles = ("model", "device", "trace", "method", "throughput x", "latency x")
    rows: list[Row] = []
    for place, group in groups.items():
        queued = [each for each in group if not each.key.is_closed_loop]
        latency = [each.latency for each in group if each.key.is_closed_loop]
        throughput = [each.throughput for each in queued]
        rows.append((*place, _range(throughput), _range(latency)))
    rows.append(("Vicuna-7B, 13B", "paper, A100-80GB", "its own", "eager", "1.20 to 1.70",
                 "0.65 to 0.80"))  # fmt: skip
    return ReportTable(
        "claims",
        "Range of the ratios to sequential decoding, beside the paper's",
        tuple(map(Column, titles)),
        tuple(rows),
        note="Throughput over all shares of the KV cache with a full queue (figure 5a), latency "
        "over all concurrencies in a closed loop (figure 5b). The paper (section 3.4, figure 5) "
        "gives ranges.",
    )


def _our_groups(
    found: Sequence[Comparison], settings: ExperimentSettings
) -> dict[tuple[str, str, str, str], list[Comparison]]:
    """Return the points of our methods by model, device, trace and method."""
    groups: dict[tuple[str, str, str, str], list[Comparison]] = {}
    for each in found:
        key = each.key
        if METHODS[key.method].is_ours:
            place = (key.model, device_label(key, settings), key.trace, key.method)
            groups.setdefault(place, []).append(each)
    return groups


def sentence_table(found: Sequence[Comparison], settings: ExperimentSettings) -> ReportTable | None:
    """Return what the paper's text says about figure 5, beside the same of these runs.

    None if the runs do not tell.
    """
    rows: list[Row] = []
    for place, group in _our_groups(found, settings).items():
        queued = [each for each in group if not each.key.is_closed_loop]
        for sentence, paper, value in (
            (_SMALL_MEMORY, "above 1", small_memory_ratio(queued)),
            (_SAVED_MEMORY, "up to 0.50", saved_memory(queued)),
        ):
            if value is not None:
                rows.append((*place, sentence, paper, f"{value:.2f}"))
        ratios = larger_model_latency(group, found)
        if ratios:
            values = ", ".join(f"{ratio:.2f} ({number})" for number, ratio in ratios.items())
            rows.append((*place, _LARGER_MODEL, "similar", values))
    if not rows:
        return None
    titles = ("model", "device", "trace", "method", "claim", "paper", "here")
    return ReportTable(
        "sentences",
        "What the paper says about figure 5",
        tuple(map(Column, titles)),
        tuple(rows),
        note="Throughput as in the table of all ratios. Cache saved: over all sizes of the cache, "
        "the largest share of it that forks can do without at sequential decoding's throughput, "
        "by linear interpolation; with the smallest size that was run, at least this much.",
    )


_SMALL_MEMORY = "throughput at 0.2 of the cache, over sequential's best"
_SAVED_MEMORY = "share of the cache saved at sequential's throughput"
_LARGER_MODEL = "mean latency over the sequential 7B model's (concurrent requests)"


def small_memory_ratio(queued: Sequence[Comparison]) -> float | None:
    """Return the throughput with 0.2 of the cache over sequential decoding's best."""
    small = [each for each in queued if each.key.kv_share == _SMALL_SHARE]
    if not small or len(queued) < 2:
        return None
    best = max(_text_tokens_per_s(base) for each in queued for _, base in each.pairs)
    return statistics.median(_text_tokens_per_s(run) for run, _ in small[0].pairs) / best


def saved_memory(queued: Sequence[Comparison]) -> float | None:
    """Return the largest share of a cache that a method saves at sequential throughput."""
    points = sorted(
        (
            each.key.kv_share,
            statistics.median(_text_tokens_per_s(run) for run, _ in each.pairs),
            statistics.median(_text_tokens_per_s(base) for _, base in each.pairs),
        )
        for each in queued
    )
    forked_line = [(share, forked) for share, forked, _ in points]
    sequential_line = [(share, sequential) for share, _, sequential in points]
    saved = []
    for _, sequential in sequential_line:
        needed, usual = (_first_share(line, sequential) for line in (forked_line, sequential_line))
        if needed is not None and usual is not None:
            saved.append(1 - needed / usual)
    return max(saved) if len(points) > 1 and saved else None


def _first_share(curve: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Return the smallest share with the wanted throughput; None if no share has it."""
    if curve[0][1] >= wanted:
        return curve[0][0]
    for (share, value), (next_share, next_value) in pairwise(curve):
        if next_value >= wanted:
            return share + (next_share - share) * (wanted - value) / (next_value - value)
    return None


def larger_model_latency(
    group: Sequence[Comparison], found: Sequence[Comparison]
) -> dict[int, float]:
    """Return mean latencies of a 13B model over those of a sequential 7B model, by concurrency."""
    latency_s = {
        (key.device, key.trace, key.kv_share, key.concurrency): each.median(_mean_latency_s)
        for each in found
        if (key := each.key).is_closed_loop
        and key.method == SEQUENTIAL
        and paper_model(key.model) == _SMALL_MODEL
    }
    ratios: dict[int, float] = {}
    for each in group:
        key = each.key
        small = latency_s.get((key.device, key.trace, key.kv_share, key.concurrency))
        large = each.median(_mean_latency_s)
        if key.is_closed_loop and paper_model(key.model) == _LARGE_MODEL and small and large:
            ratios[key.concurrency] = large / small
    return ratios


def concurrency_table(
    found: Sequence[Comparison], settings: ExperimentSettings
) -> ReportTable | None:
    """Return figure 5b on the paper's axis, from runs with a full queue; None without samples.

    By Little's law, the time per token of a request being answered is the number of such requests
    over the throughput.
    """
    points: dict[tuple[str, str, str], dict[str, list[tuple[float, float, float]]]] = {}
    for each in found:
        running = each.median(lambda run: run.running_requests)
        if running is None:
            continue
        tokens_per_s = statistics.median(_text_tokens_per_s(run) for run, _ in each.pairs)
        place = (each.key.model, device_label(each.key, settings), each.key.trace)
        line = points.setdefault(place, {}).setdefault(each.key.method, [])
        line.append((each.key.kv_share, running, running / tokens_per_s))
    sequential = {
        place: sorted((running, token_s) for _, running, token_s in lines.get(SEQUENTIAL, ()))
        for place, lines in points.items()
    }
    small = {
        (device, trace): line
        for (model, device, trace), line in sequential.items()
        if paper_model(model) == _SMALL_MODEL
    }
    rows: list[Row] = []
    for place, lines in points.items():
        model, device, trace = place
        others = small.get((device, trace), []) if paper_model(model) == _LARGE_MODEL else []
        for method, line in lines.items():
            for share, running, token_s in line:
                ratios = [
                    None if (same := _at(base, running)) is None else token_s / same
                    for base in (sequential[place], others)
                ]
                rows.append((*place, method, share, running, 1000 * token_s, *ratios))
    if not rows:
        return None
    columns = (
        *(Column(title) for title in ("model", "device", "trace", "method")),
        Column("KV share", "g"),
        Column("concurrent requests", ".0f"),
        Column("ms a token", ".1f"),
        Column("x sequential", ".2f"),
        Column("x sequential 7B", ".2f"),
    )
    return ReportTable(
        "concurrency",
        "Figure 5b by the average number of concurrent requests",
        columns,
        tuple(rows),
        note="Means over the same samples as the throughput. Time per token: concurrent requests "
        "over text tokens/s. x: over sequential decoding of the same model, or of the 7B model, "
        "with as many concurrent requests, by linear interpolation between its runs. The paper "
        "says 0.65 to 0.80, and that its 13B model is similar to the sequential 7B.",
    )


def _at(curve: Sequence[tuple[float, float]], place: float) -> float | None:
    """Return the value of a line at a place, by linear interpolation; None outside of it."""
    for (start, value), (end, next_value) in pairwise(curve):
        if start <= place <= end and end > start:
            return value + (next_value - value) * (place - start) / (end - start)
    return None


def saving_table(
    run: Run, name: Literal["table1", "table2"], settings: ExperimentSettings
) -> ReportTable:
    """Return table 1 (cached tokens) or 2 (attended tokens) of a forked run, with the paper's.

    Table 1 has the peak number of KV slots of an answer, table 2 the number of tokens that a
    predicted token attends to, both as means.
    """
    is_cached = name == "table1"

    def row(title: str, counts: CategoryCounts) -> Row:
        answers = counts.answers
        if is_cached:
            forked = counts.max_cached_tokens / answers
            flat = counts.sequential_max_cached_tokens / answers
        else:
            forked = counts.attended_tokens / counts.predicted_tokens
            flat = counts.sequential_attended_tokens / counts.sequential_predicted_tokens
        saved = 100 * (1 - forked / flat)
        return title, float(answers), counts.threads / answers, forked, flat, saved

    known = run.categories.items()
    rows = [row(name, each) for name, each in known if each.answers >= _SMALLEST_CATEGORY]
    small = [each for _, each in known if each.answers < _SMALLEST_CATEGORY]
    forking = [each for name, each in known if name.lower() not in _LEFT_OUT]
    rows += [
        row(title, total(each)) for title, each in (("others", small), ("Mean", forking)) if each
    ]
    label = paper_model(run.key.model)
    for (benchmark, model), values in (CACHED_TOKENS if is_cached else ATTENDED_TOKENS).items():
        if model == label:
            forked, flat = values[MEAN_ACCELERATED]
            title = f"Mean of the paper, {model} on {benchmark}"
            rows.append((title, None, None, forked, flat, 100 * (1 - forked / flat)))
    columns = ("category", "answers", "threads", "APAR", "flatten", "saved %")
    what = "max cached tokens" if is_cached else "attended tokens"
    return ReportTable(
        f"{name}-{run.key.trace}-{run.key.model.replace('/', '-')}",
        f"Table {name[-1]}: average {what}, {run.key.trace} trace",
        tuple(Column(column, ".0f" if column == "answers" else ".1f") for column in columns),
        tuple(rows),
        f"Counted in the run of {run.key.model} with {run.key.kv_share:g} of the KV cache, method "
        f"{run.key.method}, {device_label(run.key, settings)}; step times do not matter. The mean "
        f"is over all answers except those on {', '.join(_LEFT_OUT)}, as in the paper.",
    )


def _text_tokens_per_s(run: Run) -> float:
    return run.throughput.mean


def _mean_latency_s(run: Run) -> float:
    return run.latency_s.mean


def _range(ratios: Sequence[float]) -> str | None:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else None
