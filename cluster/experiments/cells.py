"""The runs of an experiment in its folder: one line each, kept as they end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cluster.experiments.driver import Drive, Served
from cluster.experiments.experiment_engine import Conditions
from cluster.experiments.parts import LineStore
from cluster.experiments.samples import Sample, Spread, spread, steady
from cluster.experiments.settings import ExperimentSettings, Mode

CELLS_FILE = "cells.jsonl"

_MEASURED = ("wall_s", "overall_tokens_per_s", "kv_tokens", "rows", "token_latency_s")
_COUNTED = ("steps", "computed_tokens", "preemptions", "forks", "forks_delayed")


class CellKey(BaseModel):
    """Which run this is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    figure: str
    trace: str
    mode: Mode
    kv_share: float
    concurrency: int | None = None
    round: int = 0

    @property
    def sequential(self) -> CellKey:
        """The run that this one is compared with; the same for all modes of a point and round."""
        return self.model_copy(update={"mode": "sequential"})


class CategoryCounts(BaseModel):
    """Sums over the answers of one category, for tables 1 and 2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int = 0
    forked: int = 0
    threads: int = 0
    predicted_tokens: int = 0
    sequential_predicted_tokens: int = 0
    max_cached_tokens: int = 0
    sequential_max_cached_tokens: int = 0
    attended_tokens: int = 0
    sequential_attended_tokens: int = 0


class Cell(BaseModel):
    """What one run came to.

    `throughput` are text tokens a second over the `kept_samples` samples that count, `kv_tokens`
    and `rows` means over the same; with 0 of them all three are of the whole run, as
    `overall_tokens_per_s` always is. Latencies are means over the answers, in seconds, and a token
    of the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: CellKey
    kv_capacity_tokens: int
    max_requests: int
    token_time_s: float | None
    answers: int
    text_tokens: int
    wall_s: float
    kept_samples: int
    throughput: Spread
    overall_tokens_per_s: float
    kv_tokens: float
    rows: float
    latency_s: Spread
    token_latency_s: float
    steps: int
    computed_tokens: int
    preemptions: int
    forks: int
    forks_delayed: int
    categories: dict[str, CategoryCounts]
    samples: tuple[Sample, ...]

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.wall_s / self.steps


def cell_of(key: CellKey, conditions: Conditions, run: Drive, max_requests: int) -> Cell:
    """Sum a run up."""
    text_tokens = sum(each.text_tokens for each in run.served)
    # A closed loop also generates answers that are not measured.
    counted = run.counts.text_tokens if conditions.concurrency is None else text_tokens
    steady_samples = steady(run.samples)
    kept = steady_samples or [run.whole]
    return Cell(
        key=key,
        kv_capacity_tokens=run.kv_tokens,
        max_requests=max_requests,
        token_time_s=conditions.token_time_s if conditions.policy == "adaptive" else None,
        answers=len(run.served),
        text_tokens=text_tokens,
        wall_s=run.wall_s,
        kept_samples=len(steady_samples),
        throughput=spread([each.tokens_per_s * text_tokens / counted for each in kept]),
        overall_tokens_per_s=run.whole.tokens_per_s * text_tokens / counted,
        kv_tokens=statistics.fmean(each.kv_tokens for each in kept),
        rows=statistics.fmean(each.rows for each in kept),
        latency_s=spread([each.latency_s for each in run.served]),
        token_latency_s=statistics.fmean(each.latency_s / each.text_tokens for each in run.served),
        steps=run.counts.steps,
        computed_tokens=run.counts.computed_tokens,
        preemptions=run.counts.preemptions,
        forks=run.forks,
        forks_delayed=run.forks_delayed,
        categories=_by_category(run.served),
        samples=run.samples,
    )


class CellStore(LineStore[CellKey, Cell]):
    """Cells of one folder."""

    def __init__(self, folder: Path, settings: ExperimentSettings) -> None:
        """Open the folder. Raises EvaluationError if runs with other settings are in it."""
        super().__init__(folder / CELLS_FILE, settings.as_text(), Cell, lambda cell: cell.key)

    def find(self, key: CellKey) -> Cell | None:
        """Return a finished cell."""
        return self.lines.get(key)

    def all(self, figure: str, trace: str) -> list[Cell]:
        """Return the finished cells of a figure and a trace."""
        return [
            cell for key, cell in self.lines.items() if (key.figure, key.trace) == (figure, trace)
        ]


def medians(cells: Sequence[Cell]) -> list[Cell]:
    """Return one cell for the rounds of each point and mode: medians, without their samples.

    A point's throughput is that of whole runs unless all its rounds have samples that count. A
    round that has not all modes yet is left out.
    """
    modes = {cell.key.mode for cell in cells}
    met: dict[CellKey, set[Mode]] = {}
    for cell in cells:
        met.setdefault(cell.key.sequential, set()).add(cell.key.mode)
    rounds: dict[CellKey, list[Cell]] = {}
    for cell in cells:
        if met[cell.key.sequential] == modes:
            rounds.setdefault(cell.key.model_copy(update={"round": 0}), []).append(cell)
    return [_median_cell(key, each) for key, each in rounds.items()]


def _median_cell(key: CellKey, cells: Sequence[Cell]) -> Cell:
    def median(name: str) -> float:
        return float(statistics.median(getattr(cell, name) for cell in cells))

    def spread_of(name: str) -> Spread:
        spreads: list[Spread] = [getattr(cell, name) for cell in cells]
        return Spread(
            statistics.median(each.mean for each in spreads),
            statistics.median(each.p25 for each in spreads),
            statistics.median(each.p75 for each in spreads),
        )

    values: dict[str, object] = {
        "key": key,
        "samples": (),
        "kept_samples": min(cell.kept_samples for cell in cells),
    }
    values |= {name: median(name) for name in _MEASURED}
    values |= {name: round(median(name)) for name in _COUNTED}
    values |= {name: spread_of(name) for name in ("throughput", "latency_s")}
    if not values["kept_samples"]:
        whole = median("overall_tokens_per_s")
        values["throughput"] = Spread(whole, whole, whole)
    return cells[0].model_copy(update=values)


def pick(cells: Sequence[Cell], mode: Mode, **wanted: float | int | None) -> Cell | None:
    """Return the cell of a mode with these values in its key."""
    for cell in cells:
        if cell.key.mode == mode and all(
            getattr(cell.key, name) == value for name, value in wanted.items()
        ):
            return cell
    return None


def write_data(cells: Sequence[Cell], path: Path) -> None:
    """Write cells without their samples as one JSON file."""
    data = [json.loads(cell.model_dump_json(exclude={"samples"})) for cell in cells]
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _by_category(served: Sequence[Served]) -> dict[str, CategoryCounts]:
    sums: dict[str, dict[str, int]] = {}
    for each in served:
        known = each.statistics
        if known is None:
            continue
        counts = sums.setdefault(each.category, dict.fromkeys(CategoryCounts.model_fields, 0))
        values = {
            "answers": 1,
            "forked": int(known.forks > 0),
            "threads": known.threads,
            "predicted_tokens": known.text_tokens + known.forks + known.threads,
            "sequential_predicted_tokens": known.sequential_steps,
            "max_cached_tokens": known.max_cached_tokens,
            "sequential_max_cached_tokens": known.sequential_max_cached_tokens,
            "attended_tokens": known.attended_tokens,
            "sequential_attended_tokens": known.sequential_attended_tokens,
        }
        for name, value in values.items():
            counts[name] += value
    return {name: CategoryCounts(**counts) for name, counts in sums.items()}
