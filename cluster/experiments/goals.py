"""What the figures have to show, as ratios of runs of one folder, and what they do show.

A ratio is of two runs of the same round; with several rounds it is the median of theirs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.experiments.cells import Cell, CellKey, pick
from cluster.experiments.settings import Mode

LEAST_RATIO = 1.5
BEST_RATIO = 1.7
SMALL_SHARE = 0.2
# The ends of the range of memory that claims about all of it need.
END_SHARES = (0.1, 0.9)
LATENCY_RATIO = 0.65
MIXED_RATIO = 1.0
WHOLE_RUNS = " (whole runs)"
"""Said of a throughput where a run has too few samples with questions waiting."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A claim about ratios; `is_met` None where not all its runs are there."""

    text: str
    measured: str
    is_met: bool | None

    @property
    def line(self) -> str:
        """The claim, what was measured, and whether it holds."""
        mark = {True: "met", False: "MISSED", None: "not measured"}[self.is_met]
        return f"{self.text}: {self.measured} ({mark})"


def throughput_goals(structured: Sequence[Cell], mixed: Sequence[Cell], mode: Mode) -> list[Goal]:
    """Return the goals of figure 5a for one way of forking.

    Where a run has no samples that count, all runs of its trace are compared as a whole.
    """
    speed, said = _speed(structured)
    mixed_speed, mixed_said = _speed(mixed)
    ratios = _ratios(structured, mode, speed, lambda key: key.kv_share)
    mixed_ratios = _ratios(mixed, mode, mixed_speed, lambda key: key.kv_share).values()
    return [
        Goal(
            f"{mode}: throughput at least {LEAST_RATIO}x sequential at equal KV memory, from "
            f"{END_SHARES[0]:g} to {END_SHARES[1]:g} of the KV cache",
            _list((f"{share:g}: {ratio:.2f}x" for share, ratio in sorted(ratios.items())), said),
            min(ratios.values()) >= LEAST_RATIO if _has_ends(ratios) else None,
        ),
        Goal(
            f"{mode}: at least {BEST_RATIO}x at its best",
            _list([f"{max(ratios.values()):.2f}x"] if ratios else [], said),
            max(ratios.values()) >= BEST_RATIO if ratios else None,
        ),
        _small_memory_goal(structured, mode),
        Goal(
            f"{mode}: on the mixed trace at least {MIXED_RATIO}x sequential",
            _list((f"{ratio:.2f}x" for ratio in mixed_ratios), mixed_said),
            min(mixed_ratios) >= MIXED_RATIO if mixed_ratios else None,
        ),
    ]


def latency_goals(cells: Sequence[Cell], mode: Mode) -> list[Goal]:
    """Return the goal of figure 5b for one way of forking."""
    ratios = _ratios(
        cells, mode, lambda cell: cell.latency_s.mean, lambda key: key.concurrency or 0
    )
    return [
        Goal(
            f"{mode}: mean latency at most {LATENCY_RATIO}x sequential at equal concurrency",
            _list(f"{number:g}: {ratio:.2f}x" for number, ratio in ratios.items()),
            max(ratios.values()) <= LATENCY_RATIO if ratios else None,
        )
    ]


def _small_memory_goal(cells: Sequence[Cell], mode: Mode) -> Goal:
    text = (
        f"{mode}: sequential decoding's best throughput, from {END_SHARES[0]:g} to "
        f"{END_SHARES[1]:g} of the KV cache, surpassed with {SMALL_SHARE:g}"
    )
    speed, said = _speed(cells)
    ratios = []
    for number in sorted({cell.key.round for cell in cells}):
        small = pick(cells, mode, kv_share=SMALL_SHARE, round=number)
        sequential = {
            cell.key.kv_share: speed(cell)
            for cell in cells
            if (cell.key.mode, cell.key.round) == ("sequential", number)
        }
        if small is not None and _has_ends(sequential):
            ratios.append(speed(small) / max(sequential.values()))
    if not ratios:
        return Goal(text, "", None)
    ratio = statistics.median(ratios)
    return Goal(text, _list([f"{ratio:.2f}x"], said), ratio > 1)


def _has_ends(shares: Iterable[float]) -> bool:
    return set(END_SHARES) <= set(shares)


def _speed(cells: Sequence[Cell]) -> tuple[Callable[[Cell], float], str]:
    """What throughput these runs are compared by, and what has to be said of it."""
    if all(cell.kept_samples for cell in cells):
        return lambda cell: cell.throughput.mean, ""
    return lambda cell: cell.overall_tokens_per_s, WHOLE_RUNS


def _ratios(
    cells: Sequence[Cell],
    mode: Mode,
    value: Callable[[Cell], float],
    place: Callable[[CellKey], float],
) -> dict[float, float]:
    """A mode's value over the sequential one by place: the median of the rounds' ratios."""
    found: dict[float, list[float]] = {}
    sequential = {cell.key: cell for cell in cells if cell.key.mode == "sequential"}
    for cell in cells:
        beside = sequential.get(cell.key.sequential)
        if cell.key.mode == mode and beside is not None:
            found.setdefault(place(cell.key), []).append(value(cell) / value(beside))
    return {where: statistics.median(ratios) for where, ratios in found.items()}


def _list(texts: Iterable[str], said: str = "") -> str:
    listed = ", ".join(texts)
    return listed + said if listed else ""
