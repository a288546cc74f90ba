"""Report of a speed evaluation, with the paper's tables 1, 2 and 7 to 16 and figures 4 and 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.intervals import Floats, of_sums
from apar_core.offline.evaluation.layout import INTERVAL, columns
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
from apar_core.reporting import (
    PLOT_SETTINGS,
    RUN_COLOURS,
    Cell,
    Column,
    Report,
    ReportTable,
    file_name,
)

_MIN_SAVING = 0.01

_BENCHMARK_NAMES = {"vicuna-bench": "Vicuna Bench", "mt-bench": "MT Bench"}

_BASELINE_COLOUR = "#9aa5b1"
_GROUP_WIDTH = 0.8
_MAX_AXIS_CHARACTERS = 90
_NUM_LENGTH_BINS = 18

_OWN_HEADER = "APAR :.1f | Flattened :.1f | Saved :.1%"
_PAPER_HEADER = "Paper APAR :.1f | Paper flattened :.1f | Paper saved :.1%"


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One decoder's answers of a model to a set of prompts.

    `baseline` has the answers of the decoder that speeds are compared with; it may be empty.
    `decoder` is set if the report has several decoders of one model. `left_out` says which
    questions could not be answered, and why.
    """

    model: str
    prompts: str
    answers: Sequence[AnswerMeasurement]
    baseline: Sequence[AnswerMeasurement] = field(default=())
    decoder: str | None = None
    left_out: Sequence[str] = ()

    @property
    def label(self) -> str:
        """Name of the model, and of the decoder if there are several."""
        return self.model if self.decoder is None else f"{self.model} ({self.decoder})"

    @property
    def benchmark(self) -> str:
        """Display name of the prompts."""
        return _BENCHMARK_NAMES.get(self.prompts, self.prompts)

    @property
    def title(self) -> str:
        """Heading: the run and its prompts."""
        return self.label if self.model == self.prompts else f"{self.label} on {self.benchmark}"

    @property
    def paper_key(self) -> tuple[str, str]:
        """Key of the comparable run in the paper's tables; may be missing there."""
        return self.prompts, paper_model(self.model) or ""

    @property
    def file_key(self) -> str:
        """Part of file names."""
        return file_name(f"{self.label}-{self.prompts}")


@dataclass(frozen=True, slots=True)
class SavingKind:
    """Quantity that forking saves compared with the flattened answer.

    `name` is that of a field of `CategoryAverages`, and `sequential_...` of its counterpart.
    `per` are the fields of an answer over which both are averaged; by default, over answers.
    """

    name: str
    title: str
    paper: PaperTables
    per: tuple[str, str] | None = None

    def cells(self, row: CategoryAverages | None) -> tuple[float, float, float] | tuple[None, ...]:
        """Return the averages with forks and flattened, and the share saved, 0 of nothing."""
        if row is None:
            return None, None, None
        apar = getattr(row, self.name)
        flattened = getattr(row, f"sequential_{self.name}")
        return apar, flattened, 1 - apar / flattened if flattened else 0.0

    def interval(self, answers: Sequence[AnswerMeasurement]) -> str | None:
        """Return the 95 % interval of the share saved, bootstrapped over answers."""
        if not answers:
            return None
        names = (self.name, f"sequential_{self.name}")
        sums_NK = [
            [getattr(each, name) for name in names]
            + [getattr(each, name) if name else 1 for name in self.per or ("", "")]
            for each in answers
        ]

        def saved(sums: Floats) -> Floats:
            apar, flattened = sums[..., 0] / sums[..., 2], sums[..., 1] / sums[..., 3]
            return 1 - apar / flattened

        return of_sums(sums_NK, saved, seed=0).interval(".1%")


CACHED = SavingKind("max_cached_tokens", "Max cached tokens", CACHED_TOKENS)
ATTENDED = SavingKind(
    "attended_tokens", "Attended tokens", ATTENDED_TOKENS, ("predicted_tokens", "sequential_steps")
)


def category_rows(answers: Sequence[AnswerMeasurement]) -> list[tuple[str, CategoryAverages]]:
    """Return the averages of each category under the paper's names, then of all answers."""
    groups = by_category(answers)
    rows = [(category_label(category), averages(group)) for category, group in groups.items()]
    return [*rows, (MEAN, averages(answers))]


def accelerated(answers: Sequence[AnswerMeasurement], kind: SavingKind) -> list[AnswerMeasurement]:
    """Return the answers of the categories that save more than 1 %: those of row Mean(>1%)."""
    kept: list[AnswerMeasurement] = []
    for group in by_category(answers).values():
        saved = kind.cells(averages(group))[2]
        if saved is not None and saved > _MIN_SAVING:
            kept += group
    return kept


def _average(answers: Sequence[AnswerMeasurement]) -> CategoryAverages | None:
    return averages(answers) if answers else None


def summary_table(runs: Sequence[SpeedRun], kind: SavingKind, number: int) -> ReportTable:
    """Return table 1 or 2: Mean(>1%) of each run."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        kept = accelerated(run.answers, kind)
        cells = (*kind.cells(_average(kept)), kind.interval(kept))
        paper = _paper_cells(kind.paper.get(run.paper_key, {}), MEAN_ACCELERATED)
        rows.append((run.benchmark, run.label, *cells, *paper))
    return ReportTable(
        f"table{number}_{kind.name}",
        f"Table {number}: average {kind.title.lower()}",
        columns(f"Benchmark | Model | {_OWN_HEADER} | {INTERVAL} | {_PAPER_HEADER}"),
        tuple(rows),
        "Means over the categories that save more than 1 %. The interval is bootstrapped over "
        "answers. Paper: the model of the same size.",
    )


def saving_table(run: SpeedRun, kind: SavingKind) -> ReportTable:
    """Return one of tables 9 to 16: APAR and flattened by category."""
    paper = kind.paper.get(run.paper_key, {})
    named: list[tuple[str, CategoryAverages | None]] = [*category_rows(run.answers)]
    named.append((MEAN_ACCELERATED, _average(accelerated(run.answers, kind))))
    return ReportTable(
        f"{kind.name}_{run.file_key}",
        f"{kind.title}: {run.title}",
        columns(f"Task | Answers :d | {_OWN_HEADER} | {_PAPER_HEADER}"),
        tuple(
            (name, row.num_answers if row else None, *kind.cells(row), *_paper_cells(paper, name))
            for name, row in named
        ),
    )


def threads_table(runs: Sequence[SpeedRun]) -> ReportTable:
    """Return table 7 or 8: threads and share of forking answers, for one benchmark's runs."""
    titles = [Column("Task")]
    values: dict[str, list[Cell]] = {}
    for number, run in enumerate(runs):
        titles.append(Column(f"{run.label} #T"))
        titles += columns("%P :.2f | Paper #T :.1f | Paper %P :.2f")
        paper = THREADS.get(run.paper_key, {})
        for name, row in category_rows(run.answers):
            cells = values.setdefault(name, [None] * (4 * number))
            cells += [row.threads, row.forking_share, *paper.get(name, (None, None))]
        for cells in values.values():
            cells += [None] * (4 * (number + 1) - len(cells))
    # The mean stays last if a later run adds categories.
    ordered = sorted(values.items(), key=lambda item: item[0] == MEAN)
    return ReportTable(
        f"threads_{runs[0].prompts}",
        f"Parallel generation: {runs[0].benchmark}",
        tuple(titles),
        tuple((name, *cells) for name, cells in ordered),
        "#T: threads per answer. %P: share of answers with at least two.",
    )


def steps_table(run: SpeedRun) -> ReportTable:
    """Return steps, lengths and speed by category: the numbers of figures 4 and 6."""
    baseline = dict(category_rows(run.baseline)) if run.baseline else {}
    groups = {
        **{category_label(name): group for name, group in by_category(run.answers).items()},
        MEAN: run.answers,
    }
    rows = []
    for name, group in groups.items():
        row = averages(group)
        slow = baseline[name].tokens_per_s if name in baseline else None
        speedup = row.tokens_per_s / slow if row.tokens_per_s is not None and slow else None
        rows.append(
            (name, row.num_answers, row.text_tokens, row.steps, row.fewer_steps,
             row.tokens_per_s, slow, speedup, _speedup_interval(group, run.baseline))
        )  # fmt: skip
    return ReportTable(
        f"speed_{run.file_key}",
        f"Generation speed: {run.title}",
        columns(
            "Task | Answers :d | Text tokens :.1f | Steps :.1f | Fewer steps :.2f | "
            f"Tokens/s :.1f | Baseline tokens/s :.1f | Speed-up :.2f | Speed-up {INTERVAL}"
        ),
        tuple(rows),
        "Fewer steps: steps of a single thread / steps taken. Speeds exclude the prefill. "
        "Intervals are bootstrapped over questions, with both answers to a question together.",
    )


def _speedup_interval(
    answers: Sequence[AnswerMeasurement], baseline: Sequence[AnswerMeasurement]
) -> str | None:
    """Return the 95 % interval of the speed-up over the questions that both have answered."""
    slow = {(each.question_id, each.turn): each for each in baseline}
    pairs = [
        (fast, slow[key]) for fast in answers if (key := (fast.question_id, fast.turn)) in slow
    ]
    sums_NK = [
        [float(value or 0) for each in pair for value in (each.timed_tokens, each.decode_s)]
        for pair in pairs
    ]
    if not sums_NK or not np.all(np.asarray(sums_NK) > 0):
        return None

    def speedup(sums: Floats) -> Floats:
        return sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3])

    return of_sums(sums_NK, speedup, seed=0).interval(".2f")


def all_tables(runs: Sequence[SpeedRun]) -> list[ReportTable]:
    """Return all tables of the report."""
    tables = [
        summary_table(runs, CACHED, 1),
        summary_table(runs, ATTENDED, 2),
        *(threads_table(group) for group in _by_prompts(runs).values()),
        *(saving_table(run, CACHED) for run in runs),
        *(saving_table(run, ATTENDED) for run in runs),
        *(steps_table(run) for run in runs),
    ]
    for title in ("Paper", "Baseline", "Tokens", "Speed-up"):
        tables = [table.without_empty(title) for table in tables]
    return tables


def _paper_cells(rows: PaperRows, name: str) -> tuple[Cell, Cell, Cell]:
    if name not in rows:
        return None, None, None
    apar, flattened = rows[name]
    return apar, flattened, 1 - apar / flattened


def speed_figure(runs: Sequence[SpeedRun]) -> Figure | None:
    """Return figure 4 with a panel for each model and set of prompts.

    None if no run was timed together with a baseline.
    """
    groups: dict[tuple[str, str], list[SpeedRun]] = {}
    for run in runs:
        both = (run.answers, run.baseline)
        if run.baseline and all(answers[0].decode_s is not None for answers in both):
            groups.setdefault((run.model, run.prompts), []).append(run)
    if not groups:
        return None
    width = 8.5 + max(map(len, groups.values()))
    return _figure(width, 3.6, _draw_speeds, list(groups.values()))


def length_figure(runs: Sequence[SpeedRun]) -> Figure:
    """Return figure 6: answer lengths, with a panel for each set of prompts."""
    return _figure(9.5, 3.4, _draw_lengths, list(_by_prompts(runs).values()))


def _by_prompts(runs: Sequence[SpeedRun]) -> dict[str, list[SpeedRun]]:
    return {run.prompts: [each for each in runs if each.prompts == run.prompts] for run in runs}


def _figure(
    width: float,
    height: float,
    draw: Callable[[Axes, Sequence[SpeedRun]], None],
    groups: Sequence[Sequence[SpeedRun]],
) -> Figure:
    """Return a panel of the given height for each group of runs, one below the other."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(width, height * len(groups)), layout="constrained")
        panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
        for panel, group in zip(panels, groups, strict=True):
            draw(panel, group)
    return figure


def _draw_speeds(panel: Axes, runs: Sequence[SpeedRun]) -> None:
    base = _speeds(runs[0].baseline)
    names = list(dict.fromkeys(name for run in runs for name in _speeds(run.answers)))
    # The mean comes last, with a gap.
    names.sort(key=lambda name: name == MEAN)
    places = np.arange(len(names), dtype=float)
    places[-1] += 0.5
    width = _GROUP_WIDTH / (1 + len(runs))
    first = -_GROUP_WIDTH / 2 + width / 2
    slow = [base.get(name, 0.0) for name in names]
    decoder = runs[0].baseline[0].decoder
    panel.bar(places + first, slow, width, color=_BASELINE_COLOUR, label=decoder)
    fastest = max(slow)
    # Narrow bars only have room for the number.
    unit, size = ("x", 9.0) if len(runs) == 1 else ("", 6.5)
    for index, run in enumerate(runs):
        speeds = [_speeds(run.answers).get(name, 0.0) for name in names]
        fastest = max(fastest, *speeds)
        bars = panel.bar(
            places + first + (1 + index) * width,
            speeds,
            width,
            color=RUN_COLOURS[index],
            label=run.answers[0].decoder,
        )
        ratios = [fast / base if base else 0.0 for fast, base in zip(speeds, slow, strict=True)]
        labels = [f"{ratio:.2f}{unit}" if ratio else "" for ratio in ratios]
        panel.bar_label(bars, labels, padding=2, fontsize=size)
    panel.set_xticks(places, names)
    if max(map(len, names)) * len(names) > _MAX_AXIS_CHARACTERS:
        panel.tick_params(axis="x", rotation=30)
        for tick in panel.get_xticklabels():
            tick.set_horizontalalignment("right")
    panel.set_ylabel("tokens per second")
    panel.set_ylim(0, 1.18 * fastest)
    panel.set_title(f"{runs[0].model} on {runs[0].benchmark}")
    panel.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0)


def _speeds(answers: Sequence[AnswerMeasurement]) -> dict[str, float]:
    return {name: row.tokens_per_s or 0.0 for name, row in category_rows(answers)}


def _draw_lengths(panel: Axes, runs: Sequence[SpeedRun]) -> None:
    # Baselines with other texts are shown too.
    series: dict[str, list[int]] = {}
    for run in runs:
        decoder = run.baseline[0].decoder if run.baseline else ""
        # The baseline of another model is named "plain of NAME".
        baseline = decoder if " of " in decoder else f"{run.model} ({decoder})"
        for label, answers in ((run.label, run.answers), (baseline, run.baseline)):
            lengths = [answer.text_tokens for answer in answers]
            if lengths and lengths not in series.values():
                series[label] = lengths
    longest = max(max(lengths) for lengths in series.values())
    bins = list(np.linspace(0, longest + 1, _NUM_LENGTH_BINS + 1))
    for index, (label, lengths) in enumerate(series.items()):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        mean = sum(lengths) / len(lengths)
        shown: Any = {"weights": [1 / len(lengths)] * len(lengths), "color": colour}
        panel.hist(lengths, bins, histtype="stepfilled", alpha=0.18, **shown)
        label = f"{label}: mean {mean:.0f}"
        panel.hist(lengths, bins, histtype="step", linewidth=1.6, label=label, **shown)
        panel.axvline(mean, color=colour, linestyle="--", linewidth=1.1)
    panel.set_xlim(0, 1.01 * (longest + 1))
    panel.set_xlabel("tokens of an answer")
    panel.set_ylabel("share of the answers")
    panel.set_title(f"Response length on {runs[0].benchmark}")
    # Above the panel, where no bar or mean is.
    panel.legend(
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=2,
        borderaxespad=0,
        fontsize=8,
    )


def speed_report(title: str, facts: Mapping[str, str], runs: Sequence[SpeedRun]) -> Report:
    """Return the report of one or more runs."""
    speeds = speed_figure(runs)
    figures = {"figure6_response_length": length_figure(runs)}
    if speeds is not None:
        figures = {"figure4_speed": speeds, **figures}
    return Report(
        title=title,
        facts=facts,
        tables=all_tables(runs),
        figures=figures,
        data={
            "runs": [
                {
                    "model": run.model,
                    "prompts": run.prompts,
                    "answers": _averages(run.answers),
                    "baseline": _averages(run.baseline),
                }
                for run in runs
            ]
        },
    )


def _averages(answers: Sequence[AnswerMeasurement]) -> dict[str, object]:
    if not answers:
        return {}
    groups = {**by_category(answers), "all": answers}
    return {
        "decoder": answers[0].decoder,
        "averages": {name: averages(group).model_dump() for name, group in groups.items()},
    }
