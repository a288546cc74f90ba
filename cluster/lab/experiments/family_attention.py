"""Predictions for family attention, in which rows read the KV blocks that they share once.

Recorded answers are replayed in virtual time, forked and sequentially, at several sizes of the KV
cache and at several concurrencies. The steps of a run depend only on its number of KV blocks. So
each run is executed once, and `recorded_steps.py` applies the times of every GPU, with and without
groups of rows. All times are predicted, and so is the cost of a group (`step_costs/predict.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from apar_core.attention.settings import FamilySettings
from apar_core.errors import EvaluationError
from apar_core.reporting import Report, ReportTable
from apar_core.step_costs.models import find_model
from cluster.lab.experiments.methods import EAGER, METHODS, SEQUENTIAL, Workload
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.experiments.recorded_steps import (
    ROW_BY_ROW,
    UNIT_COSTS,
    RecordedSteps,
    StepRecorder,
    Timed,
    device_times,
    timed,
)
from cluster.lab.experiments.runs import freeze_garbage, run_plan
from cluster.lab.experiments.settings import STRUCTURED, FamilyAttentionSettings
from cluster.lab.grid import grid
from cluster.lab.settings import ModelOnGpu
from cluster.lab.tables import Value, table_of
from cluster.loadtest.trace import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cluster.lab.virtual.shared_reads import Grouping, Levels

FAMILY: Literal["family"] = "family"
REQUEST: Literal["request"] = "request"
NESTED: Literal["nested"] = "nested"
ACROSS: Literal["across"] = "across"
LEVELS: tuple[Levels, ...] = (FAMILY, REQUEST, NESTED, ACROSS)
STEPS_FOLDER = "steps"
BLOCK_SIZE = 16
# Thresholds to try, in runs that are recorded with all of them.
PREFIX_BLOCKS = (1, 2, 4, 8, 16, 32)
LEAST_ROWS = (2, 3, 4, 6)
# Context length, with room beyond the 2,048 tokens of the answers.
_CONTEXT = 4096


class RunName(NamedTuple):
    """Inputs that determine the steps of a run; its text names the run's file."""

    trace: str
    method: str
    num_blocks: int
    concurrency: int
    is_closed_loop: bool = False
    system_tokens: int = 0
    has_thresholds: bool = False

    @property
    def richer(self) -> RunName:
        """The run with the same steps that is also recorded with thresholds."""
        return self._replace(has_thresholds=self.method == EAGER)

    def __str__(self) -> str:
        trace, method, blocks, concurrency, is_closed, system_tokens, has_thresholds = self
        load = "closed" if is_closed else "open"
        return (
            f"{trace}-{method}-{blocks}-{concurrency}-{load}-{system_tokens}-{int(has_thresholds)}"
        )


class Point(NamedTuple):
    """An engine under a load, at a share of its KV cache, by its forked run."""

    engine: ModelOnGpu
    share: float
    forked: RunName

    def run(self, method: str) -> RunName:
        """Return the run whose steps a method runs at this point."""
        has_thresholds = self.forked.has_thresholds and method == EAGER
        return self.forked._replace(method=method, has_thresholds=has_thresholds)

    @property
    def model(self) -> str:
        """The model's name, with its number of GPUs if it has several."""
        engine = self.engine
        parallel = engine.tensor_parallel
        return engine.model if parallel == 1 else f"{engine.model}:{parallel}"


def engines(settings: FamilyAttentionSettings) -> list[ModelOnGpu]:
    """Return every model on every GPU."""
    named = [name.partition(":") for name in settings.models]
    return [
        ModelOnGpu(model, gpu, int(parallel or 1), BLOCK_SIZE)
        for model, _, parallel in named
        for gpu in settings.gpus
    ]


def points(settings: FamilyAttentionSettings) -> Iterator[Point]:
    """Yield all points: shares of the cache, concurrencies in a closed loop, a system prompt."""
    closed_blocks = settings.closed_kv_tokens // BLOCK_SIZE
    # The share of the KV cache with which thresholds are tried.
    middle = sorted(settings.kv_shares)[len(settings.kv_shares) // 2]
    for engine in engines(settings):
        limit, kv_blocks = settings.limit(engine.model), engine.kv_tokens // BLOCK_SIZE
        for trace in settings.traces:
            for share in settings.kv_shares:
                run = RunName(trace, EAGER, round(share * kv_blocks), limit)
                is_swept = trace == STRUCTURED and share == middle
                yield Point(engine, share, run._replace(has_thresholds=is_swept))
        if settings.system_tokens:
            share = settings.system_share
            run = RunName(STRUCTURED, EAGER, round(share * kv_blocks), limit)
            yield Point(engine, share, run._replace(system_tokens=settings.system_tokens))
        if kv_blocks >= closed_blocks:
            for concurrency in sorted({min(each, limit) for each in settings.concurrencies}):
                run = RunName(STRUCTURED, EAGER, closed_blocks, concurrency, is_closed_loop=True)
                share = round(settings.closed_kv_tokens / BLOCK_SIZE / kv_blocks, 2)
                yield Point(engine, share, run)


def groupings(run: RunName) -> dict[str, Grouping]:
    """Return the groupings that are counted in a run, by name."""
    from cluster.lab.virtual.shared_reads import Grouping

    if run.method == SEQUENTIAL:
        return {FAMILY: Grouping(FAMILY)}
    found: dict[str, Grouping] = {name: Grouping(name) for name in LEVELS}
    if run.has_thresholds:
        for blocks in PREFIX_BLOCKS:
            found[f"blocks {blocks}"] = Grouping(FAMILY, FamilySettings(2, blocks))
        for rows in LEAST_ROWS:
            found[f"rows {rows}"] = Grouping(FAMILY, FamilySettings(rows, 1))
    return found


# ---- runs ---------------------------------------------------------------------------------------


class Worker:
    """Executes runs in this process; keeps its engine and the questions from run to run."""

    def __init__(self, settings: FamilyAttentionSettings) -> None:
        # Imports vLLM, which takes seconds.
        from cluster.lab.experiments.engine import ExperimentEngine, hidden_ids
        from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec

        logging.getLogger("vllm").setLevel(logging.ERROR)
        self._settings = settings
        spec = VirtualSpec(
            find_model("llama-7b").config,
            UNIT_COSTS,
            max(each.forked.num_blocks for each in points(settings)) * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_model_len=_CONTEXT,
        )
        engine = VirtualEngine(spec)
        self._engine = ExperimentEngine(engine, hidden_ids(engine, settings.models[0]))
        self._workloads: dict[tuple[str, int], Workload] = {}

    def run(self, name: RunName) -> RecordedSteps:
        """Execute a run. Raises EvaluationError for a KV cache too small for the questions."""
        from cluster.lab.experiments.driver import drive

        workload = self._workload(name.trace, name.system_tokens)
        if name.num_blocks * BLOCK_SIZE < workload.longest_tokens:
            raise EvaluationError(
                f"{name.num_blocks} KV blocks hold {name.num_blocks * BLOCK_SIZE} tokens, but a "
                f"question of the {name.trace} trace may need {workload.longest_tokens}: give "
                "larger --kv-shares"
            )
        plan = run_plan(
            METHODS[name.method],
            workload,
            num_blocks=name.num_blocks,
            concurrency=name.concurrency,
            is_closed_loop=name.is_closed_loop,
            reserve_tokens=self._settings.growth_reserve_tokens,
            costs=UNIT_COSTS,
        )
        device = self._engine.device
        assert device is not None
        recorder = StepRecorder(device, BLOCK_SIZE, groupings(name))
        # One sample per step.
        return recorder.steps(drive(self._engine, plan, sample_s=1.0))

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()

    def _workload(self, trace: str, system_tokens: int) -> Workload:
        """Return the questions of a trace, after a system prompt of so many tokens."""
        from cluster.lab.experiments.engine import load_questions
        from cluster.lab.virtual.text import TEXT_IDS

        key = (trace, system_tokens)
        if key not in self._workloads:
            found = load_questions(
                self._settings, trace, self._engine, reserved_tokens=system_tokens
            )
            system = tuple(TEXT_IDS[index % len(TEXT_IDS)] for index in range(system_tokens))
            questions = [
                replace(each, answer=replace(answer, prompt_ids=system + answer.prompt_ids))
                for each in found.questions
                for answer in (each.answer,)
            ]
            self._workloads[key] = Workload(questions, found.marker_id)
            freeze_garbage()
        return self._workloads[key]


def do_runs(
    settings: FamilyAttentionSettings, folder: Path, start_stage: StartStage, workers: int
) -> PartStore:
    """Execute the runs whose steps the folder does not have, and return which it has."""
    # Refuses a folder with other settings, and marks completed runs.
    store = PartStore(folder, settings.as_text())
    names = dict.fromkeys(
        each.run(method) for each in points(settings) for method in (SEQUENTIAL, EAGER)
    )
    # Thresholds do not change steps, so a run with them also serves where they are not needed.
    missing = [
        name
        for name in names
        if not store.has(str(name))
        and not store.has(str(name.richer))
        and (name == name.richer or name.richer not in names)
    ]
    if missing:
        done = start_stage("runs", len(missing))
        (folder / STEPS_FOLDER).mkdir(parents=True, exist_ok=True)
        with grid(min(workers, len(missing)), Worker, settings) as run_all:
            for (name,), steps in run_all([(name,) for name in missing]):
                steps.save(_path(folder, name))
                store.add(str(name), {})
                done()
        store.sort()
    return store


def load_run(folder: Path, store: PartStore, name: RunName) -> RecordedSteps:
    """Return the stored steps of a run, or those of the same run with thresholds."""
    return RecordedSteps.load(_path(folder, name if store.has(str(name)) else name.richer))


def _path(folder: Path, name: RunName) -> Path:
    return folder / STEPS_FOLDER / f"{name}.npz"


# ---- predictions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A variant of attention.

    is_free: groups cost nothing. saved_share: share of the ideal saving. has_least_saving: steps
    that save too few blocks are not grouped.
    """

    method: str
    grouping: str = ROW_BY_ROW
    is_free: bool = False
    saved_share: float = 1.0
    has_least_saving: bool = True


VARIANTS = {
    "sequential": Variant(SEQUENTIAL),
    "sequential_family": Variant(SEQUENTIAL, FAMILY),
    "today": Variant(EAGER),
    "family": Variant(EAGER, FAMILY),
    "family_always": Variant(EAGER, FAMILY, has_least_saving=False),
    "family_80": Variant(EAGER, FAMILY, saved_share=0.8),
    "family_free": Variant(EAGER, FAMILY, is_free=True),
    **{
        level + suffix: Variant(EAGER, level, is_free=suffix != "")
        for level in (REQUEST, NESTED, ACROSS)
        for suffix in ("", "_free")
    },
}


def predict(point: Point, runs: Mapping[str, RecordedSteps], sample_s: float) -> dict[str, Any]:
    """Predict a point's runs, by method, with every variant of attention.

    rows, attended_tokens: means over the steps of forked decoding.
    grouped_steps: share of its steps whose rows are grouped. groups, grouped_rows: means over steps
        with any group.
    saved_share: share of the block reads of a step's rows that groups save.
    step_ms: mean of forked decoding today. saved_ms, cost_ms: mean saving and modeled cost over all
        steps if the rows of every step are grouped; there is a gain if the saving is larger.
    ratios: each variant relative to sequential decoding as it is today; throughput is sampled as in
        appendix C.2, and None if fewer than three samples are left.
    """
    engine, costs, forked = point.engine, point.engine.costs, runs[EAGER]
    least = engine.family.min_saved_blocks
    free = replace(costs, group_pass_s=0.0, group_s=0.0, grouped_row_s=0.0)

    def times(variant: Variant) -> Timed:
        steps = runs[variant.method]
        device_s = device_times(
            steps,
            free if variant.is_free else costs,
            variant.grouping,
            saved_share=variant.saved_share,
            min_saved_blocks=least if variant.has_least_saving and not variant.is_free else 0,
        )
        return timed(steps, costs, device_s, sample_s=sample_s)

    found = {name: times(variant) for name, variant in VARIANTS.items()}
    base = found.pop("sequential")
    saved, passes, groups, grouped_rows = forked.shared[FAMILY].T
    rows, _, attended, *_ = forked.batches.T
    # Attended tokens in blocks, the unit of saved reads.
    num_blocks = (attended / BLOCK_SIZE).sum()
    cost_s = (
        costs.group_pass_s * passes + costs.group_s * groups + costs.grouped_row_s * grouped_rows
    )
    num_grouped = max(int((passes > 0).sum()), 1)
    taken = (passes > 0) & (saved >= least)
    today_s = device_times(forked, costs)
    swept = [name for name in forked.shared if " " in name] if point.forked.has_thresholds else []
    figures = {
        "sequential_tokens_per_s": base.whole_tokens_per_s,
        "sequential_latency_s": base.mean_latency_s,
        "rows": rows.mean(),
        "attended_tokens": attended.mean(),
        "grouped_steps": taken.sum() / len(taken),
        "groups": groups.sum() / num_grouped,
        "grouped_rows": grouped_rows.sum() / num_grouped,
        "saved_share": saved.sum() / num_blocks,
        **{
            f"{level}_saved_share": forked.shared[level][:, 0].sum() / num_blocks
            for level in (REQUEST, NESTED, ACROSS)
        },
        "step_ms": 1000 * today_s.mean(),
        "attention_ms": 1000 * costs.attended_token_s * attended.mean(),
        "saved_ms": 1000 * costs.attended_token_s * BLOCK_SIZE * saved.mean(),
        "cost_ms": 1000 * cost_s.mean(),
    }
    run = point.forked
    return {
        "model": point.model,
        "gpu": engine.gpu,
        "trace": run.trace,
        "share": point.share,
        "concurrency": run.concurrency,
        "is_closed_loop": run.is_closed_loop,
        "system_tokens": run.system_tokens,
        "kv_tokens": run.num_blocks * BLOCK_SIZE,
        **{name: _rounded(value) for name, value in figures.items()},
        "ratios": {
            name: {
                "throughput": (
                    _rounded(each.throughput / base.throughput)
                    if each.throughput and base.throughput
                    else None
                ),
                "whole": _rounded(each.whole_tokens_per_s / base.whole_tokens_per_s),
                "latency": _rounded(each.mean_latency_s / base.mean_latency_s),
            }
            for name, each in found.items()
        },
        "thresholds": {
            name: round(float(today_s.sum() / device_times(forked, costs, name).sum()), 4)
            for name in swept
        },
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# ---- report -------------------------------------------------------------------------------------

PREDICTIONS_FILE = "predictions.jsonl"


def report_family_attention(
    settings: FamilyAttentionSettings, folder: Path, start_stage: StartStage, *, workers: int = 1
) -> Report:
    """Execute missing runs, predict all points, and report them, also as JSON lines in the folder.

    Raises EvaluationError for a trace that cannot be read, and a folder with other settings.
    """
    for path in settings.traces.values():
        # Fail before engines are started.
        read_trace(path, limit=1)
    store = do_runs(settings, folder, start_stage, workers)
    every = list(points(settings))
    done = start_stage("predictions", len(every))
    found: list[dict[str, Any]] = []
    for point in every:
        runs = {way: load_run(folder, store, point.run(way)) for way in (SEQUENTIAL, EAGER)}
        found.append(predict(point, runs, settings.sample_s))
        done()
    lines = "".join(f"{json.dumps(each, separators=(',', ':'))}\n" for each in found)
    (folder / PREDICTIONS_FILE).write_text(lines, encoding="utf-8")
    facts = {
        "Requests": f"{settings.answers} from "
        + " and ".join(path.name for path in settings.traces.values())
        + ", all at once, or in a closed loop",
        "Times": "predicted: the scheduler, the KV-cache manager and the groups of rows are real, "
        "and the duration of each step is modeled; no GPU has measured the cost of groups",
    }
    for model, engine in {(each.model, each.engine): None for each in every}:
        costs = engine.costs
        facts[f"{model} on {engine.gpu}"] = (
            f"a pass over groups {1e3 * costs.group_pass_s:.2f} ms, a group "
            f"{1e6 * costs.group_s:.1f} us, a row in it {1e6 * costs.grouped_row_s:.2f} us, a KV "
            f"block {1e6 * BLOCK_SIZE * costs.attended_token_s:.2f} us; {costs.source}"
        )
    return Report(
        "Family attention over sequential decoding, predicted",
        facts,
        [ratio_table(found), cost_table(found), *_threshold_tables(found)],
        _figures(found),
        {"settings": settings.as_text()},
    )


def _load(each: Mapping[str, Any]) -> str:
    system = f", system prompt of {each['system_tokens']}" if each["system_tokens"] else ""
    concurrency = each["concurrency"]
    return (f"{concurrency} in a loop" if each["is_closed_loop"] else each["trace"]) + system


def _value(title: str, name: str, form: str = ".2f") -> Value:
    return Value(title, form, itemgetter(name))


_PLACE = (
    _value("model", "model"),
    _value("GPU", "gpu"),
    Value("load", "", _load),
    _value("KV cache", "share"),
)


def _shown(title: str, name: str) -> Value:
    def text(each: Mapping[str, Any]) -> str:
        ratio = each["ratios"][name]
        sampled = "-" if ratio["throughput"] is None else f"{ratio['throughput']:.2f}"
        return f"{sampled} / {ratio['whole']:.2f} / {ratio['latency']:.2f}"

    return Value(title, "", text)


def ratio_table(found: Sequence[Mapping[str, Any]]) -> ReportTable:
    """Return every variant of attention relative to sequential decoding as it is today."""
    return table_of(
        "ratios",
        "Over sequential decoding today: throughput sampled / of the whole run / mean latency",
        found,
        (
            *_PLACE,
            _shown("today", "today"),
            _shown("family", "family"),
            _shown("family, 80 %", "family_80"),
            _shown("family, free", "family_free"),
            _shown("nested", "nested"),
            _shown("system + family", "across"),
            _shown("sequential, family", "sequential_family"),
        ),
        note="Forked, except for the last column. today: each row reads its own KV blocks. family: "
        "rows are grouped as by `attention: family`. 80 %: a kernel that achieves 80 % of the "
        "saving. free: groups cost nothing. nested: several levels within a request. system + "
        "family: two levels, the first across requests.",
    )


def cost_table(found: Sequence[Mapping[str, Any]]) -> ReportTable:
    """Return the saving of groups per step, and their modeled cost."""
    return table_of(
        "costs",
        "Forked decoding, means over its steps",
        found,
        (
            *_PLACE,
            _value("rows a step", "rows", ".0f"),
            _value("groups", "groups", ".0f"),
            _value("saved share of reads", "saved_share"),
            _value("the same, by request", "request_saved_share"),
            _value("nested", "nested_saved_share"),
            _value("system + family", "across_saved_share"),
            _value("step (ms)", "step_ms"),
            _value("saved (ms)", "saved_ms"),
            _value("cost (ms)", "cost_ms"),
            _value("grouped steps", "grouped_steps"),
        ),
        note="saved: time of the reads that groups save if every step is grouped; there is a gain "
        "as long as groups cost less. cost: their modeled cost. grouped steps: share of the steps "
        "that save at least 64 MiB per layer; rows of other steps are read one by one.",
    )


def _threshold_tables(found: Sequence[Mapping[str, Any]]) -> list[ReportTable]:
    swept = [each for each in found if each["thresholds"]]
    if not swept:
        return []

    def value(name: str) -> Value:
        return Value(name, ".3f", lambda each: each["thresholds"][name])

    return [
        table_of(
            "thresholds",
            "Thresholds: speed of forked decoding over today's, with every step grouped",
            swept,
            [*_PLACE, *map(value, swept[0]["thresholds"])],
            note="blocks N: groups of 2 or more rows with at least N common blocks. rows N: groups "
            "of at least N rows with 1 or more common blocks.",
        )
    ]


def _figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Draw throughput over sequential decoding by share of the KV cache, for each engine."""
    # matplotlib takes a second to import.
    from cluster.lab.experiments.plots import family_figure

    labels = {
        "today": "forked, today",
        "family": "family attention",
        "family_80": "80 % of its saving",
        "family_free": "groups cost nothing",
    }
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in found:
        if each["trace"] == STRUCTURED and not each["is_closed_loop"] and not each["system_tokens"]:
            lines = panels.setdefault(f"{each['model']}, {each['gpu']}", {})
            for name, label in labels.items():
                line = lines.setdefault(label, [])
                line.append((each["share"], each["ratios"][name]["whole"]))
    shown = {title: own for title, own in panels.items() if len(own["forked, today"]) > 1}
    return {"family-attention": family_figure(shown)} if shown else {}
