"""The tables of the paper's sections 3.3 to 3.4 and appendix D, from measured answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from apar_core.offline.evaluation.measurement import (
    AnswerMeasurement,
    CategoryAverages,
    averages,
    by_category,
)
from apar_core.offline.evaluation.paper_figures import (
    ATTENDED_TOKENS,
    CACHED_TOKENS,
    MEAN,
    MEAN_ACCELERATED,
    THREADS,
    PaperRows,
    PaperTables,
    category_label,
    paper_model,
)
from apar_core.offline.evaluation.report_files import file_name
from apar_core.offline.evaluation.report_table import Cell, Column, ReportTable

_MIN_SAVING = 0.01

NameOfBenchmark = {"vicuna-bench": "Vicuna Bench", "mt-bench": "MT Bench"}


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One decoder's answers of a model to a set of prompts, and those that they are compared with.

    `baseline` holds the answers of the decoder that speeds are divided by; it may be empty.
    `decoder` is named where a report has several of one model. `left_out` tells which questions
    could not be answered, and why.
    """

    model: str
    prompts: str
    answers: Sequence[AnswerMeasurement]
    baseline: Sequence[AnswerMeasurement] = field(default=())
    decoder: str | None = None
    left_out: Sequence[str] = ()

    @property
    def label(self) -> str:
        """The run by the name that a reader knows it by."""
        return self.model if self.decoder is None else f"{self.model} ({self.decoder})"

    @property
    def benchmark(self) -> str:
        """The prompts by the name that a reader knows them by."""
        return NameOfBenchmark.get(self.prompts, self.prompts)

    @property
    def title(self) -> str:
        """The run with its prompts, as headings have it."""
        return self.label if self.model == self.prompts else f"{self.label} on {self.benchmark}"

    @property
    def paper_key(self) -> tuple[str, str]:
        """Which of the paper's runs this one stands beside, if it has it."""
        return self.prompts, paper_model(self.model) or ""

    @property
    def file_key(self) -> str:
        """Names the run in the name of a file."""
        return file_name(f"{self.label}-{self.prompts}")


@dataclass(frozen=True, slots=True)
class SavingKind:
    """What is compared with the flattened answer: cached tokens, or attended ones."""

    name: str
    title: str
    paper: PaperTables
    apar: Callable[[CategoryAverages], float]
    flattened: Callable[[CategoryAverages], float]

    def saving(self, row: CategoryAverages) -> float:
        """Return the share that forking saved; 0 where there was nothing to save."""
        flattened = self.flattened(row)
        return 1 - self.apar(row) / flattened if flattened else 0.0


CACHED = SavingKind(
    "max_cached_tokens",
    "Max cached tokens",
    CACHED_TOKENS,
    lambda row: row.max_cached_tokens,
    lambda row: row.sequential_max_cached_tokens,
)
ATTENDED = SavingKind(
    "attended_tokens",
    "Attended tokens",
    ATTENDED_TOKENS,
    lambda row: row.attended_tokens,
    lambda row: row.sequential_attended_tokens,
)


def category_rows(answers: Sequence[AnswerMeasurement]) -> list[tuple[str, CategoryAverages]]:
    """Return the averages of each category under the paper's names, then those of all answers."""
    groups = by_category(answers)
    rows = [(category_label(category), averages(group)) for category, group in groups.items()]
    return [*rows, (MEAN, averages(answers))]


def accelerated_average(
    answers: Sequence[AnswerMeasurement], kind: SavingKind
) -> CategoryAverages | None:
    """Return the averages without the categories that save at most 1 %: the row Mean(>1%)."""
    kept = [
        answer
        for group in by_category(answers).values()
        if kind.saving(averages(group)) > _MIN_SAVING
        for answer in group
    ]
    return averages(kept) if kept else None


def summary_table(runs: Sequence[SpeedRun], kind: SavingKind, number: int) -> ReportTable:
    """Return table 1 or 2: each run's Mean(>1%)."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        row = accelerated_average(run.answers, kind)
        cells = _saving_cells(kind, row)
        paper = _paper_cells(kind.paper.get(run.paper_key, {}), MEAN_ACCELERATED)
        rows.append((run.benchmark, run.label, *cells, *paper))
    return ReportTable(
        f"table{number}_{kind.name}",
        f"Table {number}: average {kind.title.lower()}",
        (Column("Benchmark"), Column("Model"), *_SAVING_COLUMNS),
        tuple(rows),
        "Means over the categories that save more than 1 %. Paper: its model of the same size.",
    )


def saving_table(run: SpeedRun, kind: SavingKind) -> ReportTable:
    """Return one of tables 9 to 16: a run's categories, APAR beside flattened."""
    paper = kind.paper.get(run.paper_key, {})
    named: list[tuple[str, CategoryAverages | None]] = [*category_rows(run.answers)]
    named.append((MEAN_ACCELERATED, accelerated_average(run.answers, kind)))
    return ReportTable(
        f"{kind.name}_{run.file_key}",
        f"{kind.title}: {run.title}",
        (Column("Task"), Column("Answers", "d"), *_SAVING_COLUMNS),
        tuple(
            (
                name,
                row.num_answers if row else None,
                *_saving_cells(kind, row),
                *_paper_cells(paper, name),
            )
            for name, row in named
        ),
    )


def threads_table(runs: Sequence[SpeedRun]) -> ReportTable:
    """Return table 7 or 8: threads and forkable share of the runs of one benchmark."""
    columns = [Column("Task")]
    values: dict[str, list[Cell]] = {}
    for number, run in enumerate(runs):
        columns += [Column(f"{run.label} #T"), Column("%P", ".2f")]
        paper = THREADS.get(run.paper_key, {})
        columns += [Column("Paper #T"), Column("Paper %P", ".2f")]
        for name, row in category_rows(run.answers):
            cells = values.setdefault(name, [None] * (4 * number))
            known = paper.get(name, (None, None))
            cells += [row.threads, row.forking_share, *known]
        for cells in values.values():
            cells += [None] * (4 * (number + 1) - len(cells))
    # A run without a category of an earlier one must not push its mean up.
    ordered = sorted(values.items(), key=lambda item: item[0] == MEAN)
    return ReportTable(
        f"threads_{runs[0].prompts}",
        f"Parallel generation: {runs[0].benchmark}",
        tuple(columns),
        tuple((name, *cells) for name, cells in ordered),
        "#T: threads of an answer. %P: share of answers with at least two.",
    )


def steps_table(run: SpeedRun) -> ReportTable:
    """Return steps, lengths and tokens a second by category: the numbers of figures 4 and 6."""
    speeds = (
        {name: row.tokens_per_s for name, row in category_rows(run.baseline)}
        if run.baseline
        else {}
    )
    return ReportTable(
        f"speed_{run.file_key}",
        f"Generation speed: {run.title}",
        (
            Column("Task"),
            Column("Answers", "d"),
            Column("Text tokens"),
            Column("Steps"),
            Column("Fewer steps", ".2f"),
            Column("Tokens/s"),
            Column("Baseline tokens/s"),
            Column("Speed-up", ".2f"),
        ),
        tuple(
            (
                name,
                row.num_answers,
                row.text_tokens,
                row.steps,
                row.fewer_steps,
                row.tokens_per_s,
                speeds.get(name),
                _ratio(row.tokens_per_s, speeds.get(name)),
            )
            for name, row in category_rows(run.answers)
        ),
        "Fewer steps: those of one thread by those taken. Speeds leave the prefill out.",
    )


def all_tables(runs: Sequence[SpeedRun]) -> list[ReportTable]:
    """Return the tables of a report in its order."""
    benchmarks = {
        run.prompts: [other for other in runs if other.prompts == run.prompts] for run in runs
    }
    tables = [
        summary_table(runs, CACHED, 1),
        summary_table(runs, ATTENDED, 2),
        *(threads_table(group) for group in benchmarks.values()),
        *(saving_table(run, CACHED) for run in runs),
        *(saving_table(run, ATTENDED) for run in runs),
        *(steps_table(run) for run in runs),
    ]
    for title in ("Paper", "Baseline", "Tokens", "Speed-up"):
        tables = [table.without_empty(title) for table in tables]
    return tables


_SAVING_COLUMNS = (
    Column("APAR"),
    Column("Flattened"),
    Column("Saved", ".1%"),
    Column("Paper APAR"),
    Column("Paper flattened"),
    Column("Paper saved", ".1%"),
)


def _saving_cells(kind: SavingKind, row: CategoryAverages | None) -> tuple[Cell, Cell, Cell]:
    if row is None:
        return None, None, None
    return kind.apar(row), kind.flattened(row), kind.saving(row)


def _paper_cells(rows: PaperRows, name: str) -> tuple[Cell, Cell, Cell]:
    if name not in rows:
        return None, None, None
    apar, flattened = rows[name]
    return apar, flattened, 1 - apar / flattened


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
