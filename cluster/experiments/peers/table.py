"""What the methods came to, side by side: medians over the rounds, and ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from apar_core.reporting import Column, ReportTable
from cluster.experiments.goals import WHOLE_RUNS, Goal
from cluster.experiments.peers.methods import METHODS, SEQUENTIAL
from cluster.experiments.peers.runs import PeerRun, RunKey
from cluster.experiments.samples import LEAST_SAMPLES

Runs = Mapping[RunKey, PeerRun]
Value = Callable[[PeerRun], float]

_MEASURES: tuple[tuple[Column, Value], ...] = (
    (Column("text tokens/s", ".0f"), lambda run: run.tokens_per_s),
    (Column("kept samples", ".0f"), lambda run: run.kept_samples),
    (Column("whole run tokens/s", ".0f"), lambda run: run.whole_tokens_per_s),
    (Column("latency s", ".2f"), lambda run: run.latency_mean_s),
    (Column("p99 s", ".2f"), lambda run: run.latency_p99_s),
    (Column("steps", ".0f"), lambda run: run.steps),
    (Column("step ms", ".1f"), lambda run: 1000 * run.step_s),
    (Column("rows a step", ".1f"), lambda run: run.rows / run.steps),
    (Column("prompt tokens", ".0f"), lambda run: run.prompt_tokens),
    (Column("peak KV tokens", ".0f"), lambda run: run.peak_kv_tokens),
    (Column("preemptions", ".0f"), lambda run: run.preemptions),
)


_RECOMPUTED_AT = 10


@dataclass(frozen=True, slots=True)
class Comparison:
    """One share of the KV cache, all methods and rounds."""

    kv_share: float
    rounds: Sequence[Mapping[str, PeerRun]]

    @property
    def methods(self) -> list[str]:
        """The methods, sequential decoding first."""
        return list(self.rounds[0])

    @property
    def has_windows(self) -> bool:
        """Whether every run has samples that count; if not, whole runs are compared."""
        return all(run.kept_samples for runs in self.rounds for run in runs.values())

    def speed(self, run: PeerRun) -> float:
        """The throughput by which runs are compared here, in text tokens a second."""
        return run.tokens_per_s if self.has_windows else run.whole_tokens_per_s

    def median(self, method: str, value: Value) -> float:
        """Median of a method's value over the rounds."""
        return statistics.median(value(runs[method]) for runs in self.rounds)

    def ratio(self, method: str, other: str, value: Value) -> float:
        """Median over the rounds of one method's value over another's in the same round."""
        return statistics.median(value(runs[method]) / value(runs[other]) for runs in self.rounds)

    def recomputed(self, method: str) -> float:
        """Tokens computed beyond what sequential decoding computes of the same questions."""
        return statistics.median(
            runs[method].prompt_tokens - runs[SEQUENTIAL].prompt_tokens for runs in self.rounds
        )


def comparisons(runs: Runs) -> list[Comparison]:
    """Group runs by their share; a round that lacks a method is left out."""
    shares = sorted({key.kv_share for key in runs})
    methods = list(dict.fromkeys(key.method for key in runs))
    found: list[Comparison] = []
    for share in shares:
        by_round = [
            {key.method: run for key, run in runs.items() if (key.kv_share, key.round) == place}
            for place in sorted({(share, key.round) for key in runs})
        ]
        whole = [each for each in by_round if len(each) == len(methods)]
        if whole:
            found.append(Comparison(share, whole))
    return found


def comparison_table(comparison: Comparison) -> ReportTable:
    """Return every measure of every method at one share of the KV cache."""
    columns = [Column("method"), *(column for column, _ in _MEASURES)]
    columns.insert(_RECOMPUTED_AT, Column("recomputed", ".0f"))
    columns += [Column("throughput x", ".2f"), Column("latency x", ".2f")]
    rows: list[tuple[str | float | None, ...]] = []
    for name in comparison.methods:
        cells: list[str | float | None] = [METHODS[name].title]
        cells += [comparison.median(name, value) for _, value in _MEASURES]
        cells.insert(_RECOMPUTED_AT, comparison.recomputed(name))
        cells.append(comparison.ratio(name, SEQUENTIAL, comparison.speed))
        cells.append(comparison.ratio(name, SEQUENTIAL, lambda run: run.latency_mean_s))
        rows.append(tuple(cells))
    first = comparison.rounds[0][SEQUENTIAL]
    return ReportTable(
        name=f"peers-{comparison.kv_share:g}",
        title=f"{comparison.kv_share:g} of the KV cache ({first.kv_capacity_tokens} tokens)",
        columns=tuple(columns),
        rows=tuple(rows),
        note=f"{first.answers} answers, {first.text_tokens} text tokens; medians of "
        f"{len(comparison.rounds)} rounds. Recomputed: prompt tokens beyond those of sequential "
        "decoding, whose own preemptions count in both. Text tokens/s: of samples in "
        "which questions waited that had not begun, warm-up cut; of the whole run where fewer than "
        f"{LEAST_SAMPLES} are kept. x: over sequential in the same round, throughput by "
        f"{'these samples' if comparison.has_windows else 'whole runs'}.",
    )


def standing_table(found: Sequence[Comparison]) -> ReportTable:
    """Return where ours stands against each method: throughput and latency as ratios."""
    ours = [name for name in found[0].methods if METHODS[name].is_ours]
    columns = [Column("against"), Column("share of KV", "g")]
    for name in ours:
        columns.append(Column(f"{name}: throughput x", ".2f"))
        columns.append(Column(f"{name}: latency x", ".2f"))
    rows: tuple[tuple[str | float | None, ...], ...] = tuple(
        (
            METHODS[other].title,
            comparison.kv_share,
            *(
                ratio
                for name in ours
                for ratio in (
                    comparison.ratio(name, other, comparison.speed),
                    comparison.ratio(name, other, lambda run: run.latency_mean_s),
                )
            ),
        )
        for comparison in found
        for other in comparison.methods
        if not METHODS[other].is_ours
    )
    return ReportTable("standing", "Ours over each method, in the same round", tuple(columns), rows)


def peer_goals(found: Sequence[Comparison]) -> list[Goal]:
    """Return whether ours is ahead of every peer: the better of our policies, at every share."""
    goals: list[Goal] = []
    for comparison in found:
        ours = [name for name in comparison.methods if METHODS[name].is_ours]
        others = [name for name in comparison.methods if not METHODS[name].is_ours]
        if not ours or not others:
            continue
        best = max(ours, key=lambda name: comparison.median(name, comparison.speed))
        ratios = {other: comparison.ratio(best, other, comparison.speed) for other in others}
        goals.append(
            Goal(
                f"ours ({best}) ahead of every peer in throughput with {comparison.kv_share:g} of "
                "the KV cache",
                ", ".join(f"{name}: {ratio:.2f}x" for name, ratio in ratios.items())
                + ("" if comparison.has_windows else WHOLE_RUNS),
                min(ratios.values()) > 1,
            )
        )
    return goals
