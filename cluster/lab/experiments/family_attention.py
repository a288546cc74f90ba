"""Predictions for family attention, in which rows read the KV blocks that they share once.

Recorded answers are replayed in virtual time, forked and sequentially, at several sizes of the KV
cache and at several concurrencies. The steps of a run depend only on its number of KV blocks. So
each run is executed once, and `recorded_steps.py` applies the times of every GPU, with and without
groups of rows. All times are predicted, and so is the cost of a group (`step_costs/predict.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from apar_core.attention.settings import FamilySettings
from apar_core.errors import EvaluationError, StepCostsError
from apar_core.reporting import Column, Report, ReportTable
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import ModelSize, find_model
from apar_core.step_costs.predict import kv_tokens, step_costs
from cluster.lab.experiments.methods import EAGER, METHODS, SEQUENTIAL, Question, Workload
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
from cluster.lab.experiments.runs import freeze_garbage
from cluster.lab.experiments.settings import (
    LARGE_MODEL_REQUESTS,
    MIXED,
    SMALL_MODEL_REQUESTS,
    STRUCTURED,
    GpuNames,
    KvShares,
    closed_loop_answers,
    file_digest,
)
from cluster.lab.grid import grid
from cluster.loadtest.trace import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cluster.lab.experiments.engine import ExperimentEngine
    from cluster.lab.virtual.shared_reads import Grouping, Levels

FAMILY: Literal["family"] = "family"
REQUEST: Literal["request"] = "request"
NESTED: Literal["nested"] = "nested"
ACROSS: Literal["across"] = "across"
STEPS_FOLDER = "steps"
BLOCK_SIZE = 16
# Thresholds to try, in runs that are recorded with all of them.
PREFIX_BLOCKS = (1, 2, 4, 8, 16, 32)
LEAST_ROWS = (2, 3, 4, 6)
# Context length, with room beyond the 2,048 tokens of the answers.
_CONTEXT = 4096


class FamilyAttentionSettings(BaseModel):
    """Models, GPUs, load and points."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[str, ...] = Field(
        ("llama-7b", "llama-13b", "llama-3-8b", "llama-3-70b:4"), min_length=1
    )
    gpus: GpuNames = Field(("a100-80gb", "h100", "h200"), min_length=1)
    trace: Path
    mixed_trace: Path | None = None
    answers: PositiveInt = 1000
    max_tokens: PositiveInt = 2048
    max_requests: PositiveInt | None = None
    kv_shares: KvShares = Field((0.1, 0.3, 0.5, 0.9), min_length=1)
    concurrencies: tuple[PositiveInt, ...] = (1, 8, 32, 128, 350)
    closed_kv_tokens: PositiveInt = Field(
        98_304, description="Tokens of KV cache in closed loops, on engines with at least as many."
    )
    system_tokens: NonNegativeInt = Field(512, description="Tokens of a shared system prompt.")
    system_share: PositiveFloat = Field(0.3, description="Share of the KV cache with it.", le=1)
    sample_s: PositiveFloat = 3.0
    growth_reserve_tokens: NonNegativeInt = 8
    seed: int = 0

    @field_validator("models")
    @classmethod
    def _check_models(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            size, colon, number = name.partition(":")
            if colon and not (number.isdecimal() and int(number) > 0):
                raise ValueError(f"{name!r}: the number of GPUs after ':' must be 1 or more")
            try:
                find_model(size)
            except StepCostsError as error:
                raise ValueError(str(error)) from error
        return names

    @property
    def traces(self) -> dict[str, Path]:
        """The traces by their names."""
        mixed = {} if self.mixed_trace is None else {MIXED: self.mixed_trace}
        return {STRUCTURED: self.trace, **mixed}

    def as_text(self) -> dict[str, str]:
        """Return the settings that all runs of a folder share; points may be added."""
        own = {"answers", "max_tokens", "growth_reserve_tokens", "seed"}
        values = {name: str(getattr(self, name)) for name in sorted(own)}
        # Only of the forking trace: the mixed trace may be added.
        values["trace_sha256"] = file_digest(self.trace)
        return values | {"block_size": str(BLOCK_SIZE)}

    @cached_property
    def engines(self) -> tuple[Engine, ...]:
        """Every model on every GPU."""
        return tuple(Engine(name, gpu) for name in self.models for gpu in self.gpus)

    def limit(self, engine: Engine) -> int:
        """Return the maximum number of concurrent requests."""
        if self.max_requests is not None:
            return self.max_requests
        is_large = engine.size.name.endswith("13b")
        return LARGE_MODEL_REQUESTS if is_large else SMALL_MODEL_REQUESTS


@dataclass(frozen=True)
class Engine:
    """A model on one GPU, or on several, with a name such as "llama-3-70b:4"."""

    model: str
    gpu: str

    @property
    def tensor_parallel(self) -> int:
        """GPUs of the engine."""
        return int(self.model.partition(":")[2] or 1)

    @cached_property
    def size(self) -> ModelSize:
        """The model's dimensions."""
        return find_model(self.model.partition(":")[0])

    @cached_property
    def costs(self) -> StepCosts:
        """Its predicted step costs."""
        return step_costs(self.size, find_gpu(self.gpu), self.tensor_parallel, BLOCK_SIZE)

    @cached_property
    def kv_blocks(self) -> int:
        """Blocks of the whole KV cache."""
        gpu, parallel = find_gpu(self.gpu), self.tensor_parallel
        return kv_tokens(self.size, gpu, parallel, block_size=BLOCK_SIZE) // BLOCK_SIZE

    @property
    def block_layer_bytes(self) -> int:
        """Bytes of a KV block in one layer and on one GPU."""
        return self.size.block_layer_bytes(BLOCK_SIZE, self.tensor_parallel)


class RunName(BaseModel):
    """Inputs that determine the steps of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_blocks: int
    trace: str
    method: str
    concurrency: int
    is_closed_loop: bool = False
    system_tokens: int = 0
    has_thresholds: bool = False

    @property
    def richer(self) -> RunName:
        """The run with the same steps that is also recorded with thresholds."""
        return self.model_copy(update={"has_thresholds": self.method == EAGER})

    def __str__(self) -> str:
        load = "closed" if self.is_closed_loop else "open"
        return (
            f"{self.trace}-{self.method}-{self.num_blocks}-{self.concurrency}-{load}"
            f"-{self.system_tokens}-{int(self.has_thresholds)}"
        )


@dataclass(frozen=True)
class Point:
    """An engine under a load, at a share of its KV cache."""

    engine: Engine
    share: float
    trace: str
    concurrency: int
    closed_kv_tokens: int | None = None
    system_tokens: int = 0
    has_thresholds: bool = False

    @property
    def kv_blocks(self) -> int:
        """KV blocks of the engine at this point."""
        if self.closed_kv_tokens is not None:
            return self.closed_kv_tokens // BLOCK_SIZE
        return round(self.share * self.engine.kv_blocks)

    @property
    def is_closed_loop(self) -> bool:
        """Whether each answer is followed by the next question."""
        return self.closed_kv_tokens is not None

    def run(self, method: str) -> RunName:
        """Return the run whose steps a method runs at this point."""
        return RunName(
            num_blocks=self.kv_blocks,
            trace=self.trace,
            method=method,
            concurrency=self.concurrency,
            is_closed_loop=self.is_closed_loop,
            system_tokens=self.system_tokens,
            has_thresholds=self.has_thresholds and method == EAGER,
        )


def points(settings: FamilyAttentionSettings) -> Iterator[Point]:
    """Yield all points: shares of the cache, concurrencies in a closed loop, a system prompt."""
    for engine in settings.engines:
        limit = settings.limit(engine)
        for trace in settings.traces:
            for share in settings.kv_shares:
                is_swept = trace == STRUCTURED and share == _middle(settings.kv_shares)
                yield Point(engine, share, trace, limit, has_thresholds=is_swept)
        if settings.system_tokens:
            yield Point(
                engine,
                settings.system_share,
                STRUCTURED,
                limit,
                system_tokens=settings.system_tokens,
            )
        closed = settings.closed_kv_tokens
        if engine.kv_blocks >= closed // BLOCK_SIZE:
            for concurrency in sorted({min(each, limit) for each in settings.concurrencies}):
                share = round(closed / BLOCK_SIZE / engine.kv_blocks, 2)
                yield Point(engine, share, STRUCTURED, concurrency, closed)


def _middle(shares: Sequence[float]) -> float:
    """Return the share of the KV cache with which thresholds are tried."""
    return sorted(shares)[len(shares) // 2]


def groupings(run: RunName) -> dict[str, Grouping]:
    """Return the groupings that are counted in a run, by name."""
    from cluster.lab.virtual.shared_reads import Grouping

    if run.method == SEQUENTIAL:
        return {FAMILY: Grouping(FAMILY)}
    levels: tuple[Levels, ...] = (FAMILY, REQUEST, NESTED, ACROSS)
    found: dict[str, Grouping] = {name: Grouping(name) for name in levels}
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
        name = settings.engines[0].size.name
        most = max(each.run(EAGER).num_blocks for each in points(settings))
        spec = VirtualSpec(
            find_model("llama-7b").config,
            UNIT_COSTS,
            most * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_model_len=_CONTEXT,
        )
        engine = VirtualEngine(spec)
        self._engine: ExperimentEngine = ExperimentEngine(engine, hidden_ids(engine, name))
        self._workloads: dict[tuple[str, int], Workload] = {}

    def run(self, name: RunName) -> RecordedSteps:
        """Execute a run. Raises EvaluationError for a KV cache too small for the questions."""
        from cluster.lab.experiments.driver import RunPlan, drive
        from cluster.lab.experiments.engine import Conditions

        settings, method = self._settings, METHODS[name.method]
        workload = self._workload(name)
        if name.num_blocks * BLOCK_SIZE < workload.longest_tokens:
            raise EvaluationError(
                f"{name.num_blocks} KV blocks hold {name.num_blocks * BLOCK_SIZE} tokens, but a "
                f"question of the {name.trace} trace may need {workload.longest_tokens}: give "
                "larger --kv-shares"
            )
        questions, marker = workload.questions, workload.marker_id
        number = len(questions)
        if name.is_closed_loop:
            number = closed_loop_answers(name.concurrency, number)
        plan = RunPlan(
            conditions=Conditions(
                num_blocks=name.num_blocks,
                max_requests=None if name.is_closed_loop else name.concurrency,
                growth_reserve_tokens=settings.growth_reserve_tokens if method.reserves else 0,
            ),
            make=lambda index: method.build(questions[index], marker),
            num_questions=number,
            clients=name.concurrency if name.is_closed_loop else None,
            is_closed_loop=name.is_closed_loop,
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

    def _workload(self, name: RunName) -> Workload:
        key = (name.trace, name.system_tokens)
        if key not in self._workloads:
            self._workloads[key] = _workload(self._settings, self._engine, *key)
            freeze_garbage()
        return self._workloads[key]


def _workload(
    settings: FamilyAttentionSettings, engine: ExperimentEngine, trace: str, system_tokens: int
) -> Workload:
    """Return the questions of a trace, after a system prompt of `system_tokens` tokens."""
    from cluster.lab.experiments.methods import load_workload, marker_id
    from cluster.lab.virtual.text import TEXT_IDS, virtual_text

    text = virtual_text()
    tokens, tokenizer = text.tokens, engine.engine.tokenizer
    workload = load_workload(
        settings.traces[trace],
        text,
        tokens,
        marker_id(tokenizer, (tokens.fork_id, tokens.child_id, tokens.end_id)),
        number=settings.answers,
        max_tokens=settings.max_tokens,
        max_sequence_tokens=_CONTEXT - system_tokens,
        seed=settings.seed,
    )
    system = tuple(TEXT_IDS[index % len(TEXT_IDS)] for index in range(system_tokens))

    def with_system_prompt(question: Question) -> Question:
        answer = question.answer
        return replace(question, answer=replace(answer, prompt_ids=system + answer.prompt_ids))

    return Workload([with_system_prompt(each) for each in workload.questions], workload.marker_id)


def do_runs(
    settings: FamilyAttentionSettings, folder: Path, start_stage: StartStage, workers: int
) -> None:
    """Execute the runs whose steps the folder does not have."""
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
    if not missing:
        return
    done = start_stage("runs", len(missing))
    (folder / STEPS_FOLDER).mkdir(parents=True, exist_ok=True)

    with grid(min(workers, len(missing)), Worker, settings) as run_all:
        for (name,), steps in run_all([(name,) for name in missing]):
            steps.save(_path(folder, name))
            store.add(str(name), {})
            done()
    store.sort()


def load_run(folder: Path, settings: FamilyAttentionSettings, name: RunName) -> RecordedSteps:
    """Return the stored steps of a run, or those of the same run with thresholds."""
    has_own = PartStore(folder, settings.as_text()).has(str(name))
    return RecordedSteps.load(_path(folder, name if has_own else name.richer))


def _path(folder: Path, name: RunName) -> Path:
    return folder / STEPS_FOLDER / f"{name}.npz"


# ---- predictions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A variant of attention.

    is_free: groups cost nothing. saved_share: share of the ideal saving. has_least_saving: steps
    that save too few blocks are not grouped.
    """

    title: str
    method: str
    grouping: str = ROW_BY_ROW
    is_free: bool = False
    saved_share: float = 1.0
    has_least_saving: bool = True


TODAY = Variant("forked, today", EAGER)
FORKED = Variant("forked, family attention", EAGER, FAMILY)
VARIANTS = {
    "sequential": Variant("sequential, today", SEQUENTIAL),
    "sequential_family": Variant("sequential, family attention", SEQUENTIAL, FAMILY),
    "today": TODAY,
    "family": FORKED,
    "family_always": replace(FORKED, title="the same, in every step", has_least_saving=False),
    "family_80": replace(FORKED, title="the same, with 80 % of the saving", saved_share=0.8),
    "family_free": replace(FORKED, title="the same, groups cost nothing", is_free=True),
    "request": Variant("forked, groups within requests", EAGER, REQUEST),
    "request_free": Variant("the same, groups cost nothing", EAGER, REQUEST, is_free=True),
    "nested": Variant("forked, nested levels", EAGER, NESTED),
    "nested_free": Variant("the same, groups cost nothing", EAGER, NESTED, is_free=True),
    "across": Variant("forked, system prompt and family", EAGER, ACROSS),
    "across_free": Variant("the same, groups cost nothing", EAGER, ACROSS, is_free=True),
}


class Ratio(BaseModel):
    """A variant relative to sequential decoding as it is today.

    throughput: sampled as in appendix C.2; None if fewer than three samples are left.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    throughput: float | None
    whole: float
    latency: float


class Prediction(BaseModel):
    """Predictions at one point.

    kv_tokens: tokens of the point's share. rows, attended_tokens: means over the steps of forked
        decoding.
    grouped_steps: share of its steps whose rows are grouped. groups, grouped_rows: means over steps
        with any group.
    saved_share: share of the block reads of a step's rows that groups save.
    step_ms: mean of forked decoding today. saved_ms, cost_ms: mean saving and modeled cost over all
        steps if the rows of every step are grouped; there is a gain if the saving is larger.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    gpu: str
    trace: str
    share: float
    concurrency: int
    is_closed_loop: bool
    system_tokens: int
    kv_tokens: int
    sequential_tokens_per_s: float
    sequential_latency_s: float
    rows: float
    attended_tokens: float
    grouped_steps: float
    groups: float
    grouped_rows: float
    saved_share: float
    request_saved_share: float
    nested_saved_share: float
    across_saved_share: float
    step_ms: float
    attention_ms: float
    saved_ms: float
    cost_ms: float
    ratios: dict[str, Ratio]
    thresholds: dict[str, float] = {}


def predict(point: Point, runs: dict[RunName, RecordedSteps], sample_s: float) -> Prediction:
    """Predict a point's runs with every variant of attention."""
    engine, costs = point.engine, point.engine.costs
    settings = FamilySettings.for_blocks(engine.block_layer_bytes)
    free = replace(costs, group_pass_s=0.0, group_s=0.0, grouped_row_s=0.0)

    def times(variant: Variant) -> Timed:
        steps = runs[point.run(variant.method)]
        least = settings.min_saved_blocks if variant.has_least_saving else 0
        device_s = device_times(
            steps,
            free if variant.is_free else costs,
            variant.grouping,
            saved_share=variant.saved_share,
            min_saved_blocks=0 if variant.is_free else least,
        )
        return timed(steps, costs, device_s, sample_s=sample_s)

    found = {name: times(variant) for name, variant in VARIANTS.items()}
    base = found["sequential"]
    forked = runs[point.run(EAGER)]
    batches, shared = forked.batches, forked.shared
    saved, passes, groups, grouped_rows = shared[FAMILY].T
    # Attended tokens in blocks, the unit of saved reads.
    blocks = batches[:, 2] / BLOCK_SIZE
    cost_s = (
        costs.group_pass_s * passes + costs.group_s * groups + costs.grouped_row_s * grouped_rows
    )
    is_grouped = passes > 0
    num_steps = len(batches)
    num_grouped = max(int(is_grouped.sum()), 1)
    taken = is_grouped & (saved >= settings.min_saved_blocks)
    today_s = device_times(forked, costs)
    thresholds = {}
    if point.has_thresholds:
        names = [name for name in shared if " " in name]
        thresholds = {
            name: round(float(today_s.sum() / device_times(forked, costs, name).sum()), 4)
            for name in names
        }
    return Prediction(
        model=engine.model,
        gpu=engine.gpu,
        trace=point.trace,
        share=point.share,
        concurrency=point.concurrency,
        is_closed_loop=point.is_closed_loop,
        system_tokens=point.system_tokens,
        kv_tokens=point.kv_blocks * BLOCK_SIZE,
        sequential_tokens_per_s=_rounded(base.whole_tokens_per_s),
        sequential_latency_s=_rounded(base.mean_latency_s),
        rows=_rounded(batches[:, 0].mean()),
        attended_tokens=_rounded(batches[:, 2].mean()),
        grouped_steps=_rounded(taken.sum() / num_steps),
        groups=_rounded(groups.sum() / num_grouped),
        grouped_rows=_rounded(grouped_rows.sum() / num_grouped),
        saved_share=_rounded(saved.sum() / blocks.sum()),
        request_saved_share=_rounded(shared[REQUEST][:, 0].sum() / blocks.sum()),
        nested_saved_share=_rounded(shared[NESTED][:, 0].sum() / blocks.sum()),
        across_saved_share=_rounded(shared[ACROSS][:, 0].sum() / blocks.sum()),
        step_ms=_rounded(1000 * today_s.mean()),
        attention_ms=_rounded(1000 * costs.attended_token_s * batches[:, 2].mean()),
        saved_ms=_rounded(1000 * costs.attended_token_s * BLOCK_SIZE * saved.mean()),
        cost_ms=_rounded(1000 * cost_s.mean()),
        ratios={
            name: Ratio(
                throughput=(
                    _rounded(each.throughput / base.throughput)
                    if each.throughput and base.throughput
                    else None
                ),
                whole=_rounded(each.whole_tokens_per_s / base.whole_tokens_per_s),
                latency=_rounded(each.mean_latency_s / base.mean_latency_s),
            )
            for name, each in found.items()
            if name != "sequential"
        },
        thresholds=thresholds,
    )


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
    do_runs(settings, folder, start_stage, workers)
    every = list(points(settings))
    done = start_stage("predictions", len(every))
    found: list[Prediction] = []
    for point in every:
        names = (point.run(method) for method in (SEQUENTIAL, EAGER))
        runs = {name: load_run(folder, settings, name) for name in names}
        found.append(predict(point, runs, settings.sample_s))
        done()
    lines = "".join(f"{each.model_dump_json()}\n" for each in found)
    (folder / PREDICTIONS_FILE).write_text(lines, encoding="utf-8")
    facts = {
        "Requests": f"{settings.answers} from "
        + " and ".join(path.name for path in settings.traces.values())
        + ", all at once, or in a closed loop",
        "Times": "predicted: the scheduler, the KV-cache manager and the groups of rows are real, "
        "and the duration of each step is modeled; no GPU has measured the cost of groups",
    }
    for engine in settings.engines:
        facts[f"{engine.model} on {engine.gpu}"] = (
            f"a pass over groups {1e3 * engine.costs.group_pass_s:.2f} ms, a group "
            f"{1e6 * engine.costs.group_s:.1f} us, a row in it "
            f"{1e6 * engine.costs.grouped_row_s:.2f} us, a KV block "
            f"{1e6 * BLOCK_SIZE * engine.costs.attended_token_s:.2f} us; {engine.costs.source}"
        )
    return Report(
        "Family attention over sequential decoding, predicted",
        facts,
        [ratio_table(found), cost_table(found), *_threshold_tables(found)],
        _figures(found),
        {"settings": settings.as_text()},
    )


_PLACE = (
    Column("model"),
    Column("GPU"),
    Column("load"),
    Column("KV cache", ".2f"),
)


def _place(each: Prediction) -> tuple[str, str, str, float]:
    load = f"{each.concurrency} in a loop" if each.is_closed_loop else each.trace
    if each.system_tokens:
        load += f", system prompt of {each.system_tokens}"
    return each.model, each.gpu, load, each.share


_SHOWN = (
    ("today", "today"),
    ("family", "family"),
    ("family_80", "family, 80 %"),
    ("family_free", "family, free"),
    ("nested", "nested"),
    ("across", "system + family"),
    ("sequential_family", "sequential, family"),
)


def ratio_table(found: Sequence[Prediction]) -> ReportTable:
    """Return every variant of attention relative to sequential decoding as it is today."""

    def text(ratio: Ratio) -> str:
        sampled = "-" if ratio.throughput is None else f"{ratio.throughput:.2f}"
        return f"{sampled} / {ratio.whole:.2f} / {ratio.latency:.2f}"

    return ReportTable(
        "ratios",
        "Over sequential decoding today: throughput sampled / of the whole run / mean latency",
        (*_PLACE, *(Column(title) for _, title in _SHOWN)),
        tuple((*_place(each), *(text(each.ratios[name]) for name, _ in _SHOWN)) for each in found),
        note="Forked, except for the last column. today: each row reads its own KV blocks. family: "
        "rows are grouped as by `attention: family`. 80 %: a kernel that achieves 80 % of the "
        "saving. free: groups cost nothing. nested: several levels within a request. system + "
        "family: two levels, the first across requests.",
    )


def cost_table(found: Sequence[Prediction]) -> ReportTable:
    """Return the saving of groups per step, and their modeled cost."""
    columns = (
        Column("rows a step", ".0f"),
        Column("groups", ".0f"),
        Column("saved share of reads", ".2f"),
        Column("the same, by request", ".2f"),
        Column("nested", ".2f"),
        Column("system + family", ".2f"),
        Column("step (ms)", ".2f"),
        Column("saved (ms)", ".2f"),
        Column("cost (ms)", ".2f"),
        Column("grouped steps", ".2f"),
    )
    rows = (
        (
            *_place(each), each.rows, each.groups, each.saved_share, each.request_saved_share,
            each.nested_saved_share, each.across_saved_share, each.step_ms, each.saved_ms,
            each.cost_ms, each.grouped_steps,
        )
        for each in found
    )  # fmt: skip
    return ReportTable(
        "costs",
        "Forked decoding, means over its steps",
        (*_PLACE, *columns),
        tuple(rows),
        note="saved: time of the reads that groups save if every step is grouped; there is a gain "
        "as long as groups cost less. cost: their modeled cost. grouped steps: share of the steps "
        "that save at least 64 MiB per layer; rows of other steps are read one by one.",
    )


def _threshold_tables(found: Sequence[Prediction]) -> list[ReportTable]:
    swept = [each for each in found if each.thresholds]
    if not swept:
        return []
    names = list(swept[0].thresholds)
    return [
        ReportTable(
            "thresholds",
            "Thresholds: speed of forked decoding over today's, with every step grouped",
            (*_PLACE, *(Column(name, ".3f") for name in names)),
            tuple((*_place(each), *(each.thresholds[name] for name in names)) for each in swept),
            note="blocks N: groups of 2 or more rows with at least N common blocks. rows N: groups "
            "of at least N rows with 1 or more common blocks.",
        )
    ]


def _figures(found: Sequence[Prediction]) -> dict[str, Figure]:
    # matplotlib takes a second to import.
    from cluster.lab.experiments.plots import family_figure

    panels: dict[str, list[Prediction]] = {}
    for each in found:
        is_plain = each.trace == STRUCTURED and not each.is_closed_loop and not each.system_tokens
        if is_plain:
            panels.setdefault(f"{each.model}, {each.gpu}", []).append(each)
    labels = {
        "today": "forked, today",
        "family": "family attention",
        "family_80": "80 % of its saving",
        "family_free": "groups cost nothing",
    }
    shown = {
        title: {
            label: [(each.share, each.ratios[name].whole) for each in group]
            for name, label in labels.items()
        }
        for title, group in panels.items()
        if len(group) > 1
    }
    return {"family-attention": family_figure(shown)} if shown else {}
