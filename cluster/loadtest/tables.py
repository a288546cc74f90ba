"""The tables of one run's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from apar_core.reporting import Cell, Column, ReportTable
from cluster.loadtest.all_figures import (
    CLUSTER,
    FORKING,
    PERCENTILES,
    THROUGHPUT,
    time_figure,
)
from cluster.loadtest.figures import Figure, repeats_of
from cluster.loadtest.run_file import Run
from cluster.loadtest.samples import LEAST_SAMPLES, sampled, spread
from cluster.loadtest.statistics import LEAST_REPEATS, Estimate
from cluster.loadtest.times import TITLES

_INTERVAL = "95 % interval"
_FIGURE_COLUMNS = (
    Column("Figure"),
    Column("Value", ",.2f"),
    Column("Unit"),
    Column(_INTERVAL),
    Column("Repeats"),
)


def interval_cell(estimate: Estimate | None, form: str = ",.1f") -> str | None:
    """Return an interval in words; None where there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return None
    return f"{estimate.low:{form}} to {estimate.high:{form}}"


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
    """Return all times: mean, and percentiles with their intervals."""
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
        if len(repeats_of(run)) >= LEAST_REPEATS
        else "by resampling the requests of all repeats"
    )
    return ReportTable(
        "times",
        "Times of requests that ended well",
        tuple(columns),
        tuple(rows),
        f"Intervals {source}. Inter-token: between two pieces of text as they came; a piece may "
        "hold several tokens. Critical path: the last step of the last thread.",
    )


def errors_table(run: Run) -> ReportTable | None:
    """Return the errors by kind; None without any."""
    kinds = Counter(record.error for record in run.records if record.error is not None)
    if not kinds:
        return None
    first = {
        record.error: record.message for record in reversed(run.records) if record.error is not None
    }
    return ReportTable(
        "errors",
        "Requests without a whole answer",
        (Column("Kind"), Column("Requests", "d"), Column("Share, %"), Column("The first says")),
        tuple(
            (kind, count, 100 * count / len(run.records), first[kind] or "")
            for kind, count in kinds.most_common()
        ),
    )


def forking_table(run: Run) -> ReportTable | None:
    """Return what the `apar` objects of the answers say; None where no answer has one."""
    rows = _figure_rows(run, FORKING)
    if not rows:
        return None
    return ReportTable(
        "forking",
        "Forking, by the answers' own statistics",
        _FIGURE_COLUMNS[:-1],
        tuple(row[:-1] for row in rows),
        "Saved: against one thread that writes the same text (section 3.4 of the paper).",
    )


def cluster_table(run: Run) -> ReportTable | None:
    """Return what the cluster's own metrics say; None where none were read."""
    rows = _figure_rows(run, CLUSTER)
    if not rows:
        return None
    return ReportTable(
        "cluster",
        "What the servers counted",
        _FIGURE_COLUMNS,
        tuple(rows),
        "From the exported metrics, other clients' requests included. Generated: text, fork and "
        "end tokens. KV cache: of the fullest replica.",
    )


def client_table(run: Run) -> ReportTable:
    """Return whether the client kept up, for each repeat."""
    return ReportTable(
        "client",
        "This client",
        (
            Column("Repeat"),
            Column("Requests", ",.0f"),
            Column("Seconds", ",.1f"),
            Column("CPU, cores", ".2f"),
            Column("busiest second", ".2f"),
            Column("Loop late, p50 ms", ".1f"),
            Column("p99 ms", ".1f"),
            Column("Sent late, p99 ms", ".1f"),
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
                "did not keep up" if facts.client.marks else "kept up",
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
            f"Fewer than {LEAST_SAMPLES} samples of {seconds:g} s between warm-up and cool-down, "
            "when the last request has begun to be answered: send more requests."
        )
    quartiles = "; ".join(f"{each.p25:,.1f} to {each.p75:,.1f}" for each in spreads)
    numbers = ", ".join(str(each.num_samples) for each in spreads)
    return (
        f"Samples of {seconds:g} s, without the first third and those after the last request has "
        f"begun to be answered: {numbers} kept; 25th to 75th percentile {quartiles} tokens/s."
    )
