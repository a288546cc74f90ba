"""Report of an evaluation of forks; `docs/evaluation.md` says what each number means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.intervals import (
    Estimate,
    Floats,
    of_sums,
    over_repeats,
    ratio_over_repeats,
    share,
)
from apar_core.offline.data.structure import StructureRules
from apar_core.offline.evaluation.fork_answers import (
    ForkAnswer,
    KindCounts,
    kind_counts,
    num_repeated,
)
from apar_core.offline.evaluation.fork_forcing import ForcedCounts, sums_by
from apar_core.offline.evaluation.forks import (
    BASE,
    BASE_ANSWERS,
    FORKED,
    MODEL,
    SEQUENTIAL,
    ForkResults,
    Method,
    SpeedRun,
)
from apar_core.offline.evaluation.layout import INTERVAL, columns, figure
from apar_core.offline.evaluation.speed_run import machine_name
from apar_core.reporting import RUN_COLOURS, Cell, Report, ReportTable

_ALL = "Mean of all"
_TITLES: dict[Method, str] = {
    FORKED: "forked",
    SEQUENTIAL: "the same text, one thread",
    BASE_ANSWERS: "the base model's answers, one thread",
}


@dataclass(frozen=True, slots=True)
class _Measure:
    """A number of the summary; `form` is its format."""

    title: str
    found: Estimate | None
    form: str = ".1%"


def fork_report(results: ForkResults) -> Report:
    """Return tables, a figure of the speed, and the numbers of the summary by name in `data`."""
    settings = results.settings
    facts = {
        "Model": f"{settings.model_name}, format {results.format_name}",
        "Answers": f"{len(results.answers)} to {settings.prompts}, "
        + ("greedy" if settings.is_greedy else f"temperature {settings.temperature:g}")
        + f", at most {settings.max_tokens} tokens",
        "Rules": settings.rules.name,
        **({"Base": settings.base_name or ""} if results.base else {}),
        "Machine": machine_name("auto"),
        **results.missing,
    }
    measures: dict[str, _Measure] = {}
    tables = [_answers_table(results)]
    if len({each.category for each in results.answers}) > 1:
        tables.append(_category_table(results.answers))
    if not results.waits:
        tables += _rule_tables(results, measures)
    if results.forced:
        tables.append(_forced_table(results.forced, measures))
    if results.recorded:
        tables.append(_recorded_loss_table(results, measures))
    if results.base:
        tables.append(_equality_table(results, measures))
        tables += _loss_table(results, measures)
    figures = {}
    if results.runs:
        tables.append(_speed_table(results.runs, measures))
        figures["speed"] = _speed_figure(results.runs)
    numbers = {
        name: None if each.found is None else asdict(each.found) for name, each in measures.items()
    }
    return Report(
        f"Forks of {settings.model_name}",
        facts,
        [_summary_table(measures), *tables] if measures else tables,
        figures,
        {"numbers": numbers},
    )


def _summary_table(measures: dict[str, _Measure]) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    for each in measures.values():
        found = each.found
        value = None if found is None else f"{found.value:{each.form}}"
        rows.append((each.title, value, None if found is None else found.interval(each.form)))
    header = f"measure | value | {INTERVAL}"
    note = "Dashes: nothing to count."
    return ReportTable("summary", "Summary", columns(header), tuple(rows), note)


def _answers_table(results: ForkResults) -> ReportTable:
    forked = [each for each in results.answers if each.forked]
    alone = [each for each in results.answers if not each.forked]
    groups = {
        _ALL: results.answers, "forked": forked, "without forks": alone, "base model": results.base
    }  # fmt: skip
    return ReportTable(
        "answers",
        "Answers",
        columns(
            "answers | number :d | threads :.2f | depth :d | tokens :.1f | steps :.1f | "
            "tokens/step :.2f | cut off :.1% | threads cut off :d | misplaced control tokens :d | "
            "with a repeated item :.1% | repeated items :d | items :d"
        ),
        tuple(
            (name, *_answer_cells(group, results.settings.rules))
            for name, group in groups.items()
            if group
        ),
        "Threads, tokens and steps are means; depth is the largest. Items are heads and details of "
        "forks, and in answers without forks those of the rules.",
    )


def _answer_cells(answers: Sequence[ForkAnswer], rules: StructureRules) -> tuple[Cell, ...]:
    def mean(value: Callable[[ForkAnswer], float]) -> float:
        return statistics.fmean(map(value, answers))

    tokens = mean(lambda each: len(each.token_ids))
    # A model that cannot fork takes a step per token, and one to end.
    steps = mean(lambda each: each.statistics.get("decode_steps", len(each.token_ids) + 1))
    misplaced = [each.misplaced for each in answers if each.misplaced is not None]
    items = [each.items(rules) for each in answers]
    repeated = [num_repeated(each) for each in items]
    return (
        len(answers),
        mean(lambda each: each.num_threads),
        max(each.statistics.get("max_depth", 0) for each in answers),
        tokens,
        steps,
        tokens / steps if steps else None,
        mean(lambda each: each.is_cut),
        sum(each.num_unended for each in answers),
        sum(misplaced) if misplaced else None,
        sum(map(bool, repeated)) / len(answers),
        sum(repeated),
        sum(len(each.heads) + len(each.details) for each in items),
    )


def _category_table(answers: Sequence[ForkAnswer]) -> ReportTable:
    rows = []
    for category in sorted({each.category for each in answers}):
        some = [each for each in answers if each.category == category]
        forked = share(sum(each.forked for each in some), len(some))
        threads = statistics.fmean(each.num_threads for each in some)
        rows.append((category, len(some), *_share_cells(forked), threads))
    return ReportTable(
        "categories",
        "Forks by category of the question",
        columns(f"category | answers :d | forked :.1% | {INTERVAL} | threads :.2f"),
        tuple(rows),
    )


def _rule_tables(
    results: ForkResults, measures: dict[str, _Measure]
) -> tuple[ReportTable, ReportTable]:
    counts = kind_counts(results.answers, results.settings.rules)
    total = KindCounts("all")
    for each in counts:
        total.places += each.places
        total.rule_places += each.rule_places
        total.common += each.common
    wanted = [each for each in counts if each.should_fork]
    others = [each for each in counts if not each.should_fork]
    right, wrong = (sum(each.forked for each in some) for some in (wanted, others))
    for name, title, hits, number in (
        ("answer_precision", "forked answers whose text the rules fork (precision)",
         right, right + wrong),
        ("answer_recall", "forked, of the answers whose text the rules fork (recall)",
         right, sum(each.answers for each in wanted)),
        ("others_forked", "forked, of the other answers",
         wrong, sum(each.answers for each in others)),
        ("place_precision", "forks at a place of the rules (precision)",
         total.common, total.places),
        ("place_recall", "places of the rules with a fork (recall)",
         total.common, total.rule_places),
    ):  # fmt: skip
        measures[name] = _Measure(title, share(hits, number))
    return (
        ReportTable(
            "rules-by-answer",
            "Forked answers, by what the rules make of their text",
            columns(
                f"kind by the rules | rules fork | answers :d | forked :d | share :.1% | {INTERVAL}"
            ),
            tuple(
                (
                    *(each.kind, "yes" if each.should_fork else "no", each.answers, each.forked),
                    *_share_cells(share(each.forked, each.answers)),
                )
                for each in counts
            ),
        ),
        ReportTable(
            "rules-by-place",
            "Places of forks, compared with the rules in the same text",
            columns(
                "kind by the rules | forks :d | places of the rules :d | both :d | "
                f"precision :.1% | {INTERVAL} | recall :.1% | {INTERVAL}"
            ),
            tuple(
                (
                    *(each.kind, each.places, each.rule_places, each.common),
                    *_share_cells(share(each.common, each.places)),
                    *_share_cells(share(each.common, each.rule_places)),
                )
                for each in (*counts, total)
            ),
            "White space between two places does not count. Intervals take places as independent.",
        ),
    )


def _forced_table(forced: Sequence[ForcedCounts], measures: dict[str, _Measure]) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    total = sums_by(forced, lambda each: "all")["all"]
    for kind, counts in (*sums_by(forced, lambda each: each.kind).items(), ("all", total)):
        rows.append(
            (
                *(kind, counts.answers, counts.rule_places, counts.forks),
                *_share_cells(share(counts.forks, counts.rule_places)),
                *(counts.other_places, counts.stray_forks, counts.misplaced),
            )
        )
    measures["recorded_recall"] = _Measure(
        "recorded answers: fork is first, of the places of the rules",
        share(total.forks, total.rule_places),
    )
    measures["recorded_stray"] = _Measure(
        "recorded answers: fork is first, of the other tokens",
        share(total.stray_forks, total.other_places),
        ".2%",
    )
    return ReportTable(
        "recorded",
        "First choices within recorded answers, which are read with the forks of the rules",
        columns(
            f"kind | answers :d | places of the rules :d | fork is first :d | share :.1% | "
            f"{INTERVAL} | other tokens :d | fork is first there :d | misplaced control tokens :d"
        ),
        tuple(rows),
        "Misplaced: a control token that the engine bans there is first.",
    )


def _recorded_loss_table(results: ForkResults, measures: dict[str, _Measure]) -> ReportTable:
    groups = {
        "the rules fork": [pair for pair in results.recorded if pair[0].forks],
        "the rules do not fork": [pair for pair in results.recorded if not pair[0].forks],
    }
    statistics_of: tuple[Callable[[Floats], Floats], ...] = (
        lambda sums: sums[..., 0] / sums[..., 2],
        lambda sums: sums[..., 1] / sums[..., 2],
        lambda sums: sums[..., 0] / sums[..., 1],
    )
    rows: list[tuple[Cell, ...]] = []
    for name, pairs in groups.items():
        if not pairs:
            continue
        # Per token of the base model: the two may cut the same text into other tokens.
        values = [(ours.nats, theirs.nats, theirs.tokens) for ours, theirs in pairs]
        found = [
            of_sums(values, statistic, seed=results.settings.seed) for statistic in statistics_of
        ]
        intervals = [cell for each in found for cell in (each.value, each.interval(".3f"))]
        rows.append((name, len(pairs), *intervals))
        if pairs[0][0].forks:
            title = "log-loss of recorded answers that the rules fork: with forks / under the base"
            measures["recorded_loss_ratio"] = _Measure(title, found[-1], ".3f")
    return ReportTable(
        "recorded-loss",
        "Log-loss of the text of recorded answers",
        columns(
            f"answers | number :d | nats/token, with forks :.3f | {INTERVAL} | base model :.3f | "
            f"{INTERVAL} | ratio :.3f | {INTERVAL}"
        ),
        tuple(rows),
        "The model reads each thread as it would write it: without the threads beside it. The base "
        "model reads the text in one thread unless it forks too. Both per token of the base model, "
        "without control and end tokens. Intervals are bootstrapped over answers.",
    )


def _equality_table(results: ForkResults, measures: dict[str, _Measure]) -> ReportTable:
    pairs = [
        (each, base)
        for each, base in zip(results.answers, results.base, strict=True)
        if not each.forked
    ]
    equal, begun = None, None
    note = "Not counted: answers are sampled (--temperature)."
    if results.settings.is_greedy:
        equal = share(sum(each.text == base.text for each, base in pairs), len(pairs))
        if pairs:
            shares = (_equal_share(each.token_ids, base.token_ids) for each, base in pairs)
            begun = statistics.fmean(shares)
        note = "Equal from the start: mean share of an answer's tokens before the first difference."
    title = "answers without forks that equal the base model's"
    measures["equal_to_base"] = _Measure(title, equal)
    return ReportTable(
        "equality",
        "Answers without forks, compared with the base model's",
        columns(f"answers :d | equal :.1% | {INTERVAL} | equal from the start :.1%"),
        ((len(pairs), *_share_cells(equal), begun),),
        note,
    )


def _equal_share(these: Sequence[int], those: Sequence[int]) -> float:
    longest = max(len(these), len(those))
    if longest == 0:
        return 1.0
    pairs = enumerate(zip(these, those, strict=False))
    first = next((place for place, (a, b) in pairs if a != b), min(len(these), len(those)))
    return first / longest


def _loss_table(results: ForkResults, measures: dict[str, _Measure]) -> list[ReportTable]:
    values = []
    for answer in results.answers:
        if not answer.forked:
            continue
        ours = results.losses[MODEL, answer.question_id]
        theirs = results.losses[BASE, answer.question_id]
        if ours.tokens and theirs.tokens:
            values.append((ours.loss, ours.tokens, theirs.loss, theirs.tokens))
    if not values:
        return []
    statistics_of: dict[str, Callable[[Floats], Floats]] = {
        "forked answers": lambda sums: sums[..., 0] / sums[..., 1],
        "the base model's own": lambda sums: sums[..., 2] / sums[..., 3],
        "difference": lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3],
        "ratio": lambda sums: sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3]),
    }
    # A base model that is certain of all its own tokens would make the ratio infinite.
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            name: of_sums(values, statistic, seed=results.settings.seed)
            for name, statistic in statistics_of.items()
        }
    measures["loss_ratio"] = _Measure(
        "log-loss of forked answers / of the base model's own", found["ratio"], ".3f"
    )
    return [
        ReportTable(
            "log-loss",
            f"Log-loss per token under {results.settings.base_name}",
            columns(f" | nats :.3f | {INTERVAL}"),
            tuple((name, each.value, each.interval(".3f")) for name, each in found.items()),
            f"Of {len(values)} questions whose answer forks. Intervals are bootstrapped over "
            "questions, with both answers to a question together.",
        )
    ]


def _speed_table(runs: Sequence[SpeedRun], measures: dict[str, _Measure]) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    for requests in dict.fromkeys(run.key.requests for run in runs):
        forked = _values(runs, requests, FORKED)
        for method, title in _TITLES.items():
            some = [run.figures for run in _runs_of(runs, requests, method)]
            if not some:
                continue
            speeds = [each.tokens_per_s for each in some]
            speed = over_repeats(speeds)
            ratio = None if method == FORKED else ratio_over_repeats(forked, speeds)
            attended = [each.attended_tokens for each in some if each.attended_tokens is not None]
            rows.append(
                (
                    *(requests, title, speed.value, speed.interval(".1f")),
                    *((None, None) if ratio is None else (ratio.value, ratio.interval(".2f"))),
                    statistics.fmean(each.latency_s for each in some),
                    statistics.fmean(each.peak_kv_tokens for each in some),
                    statistics.fmean(attended) if attended else None,
                )
            )
            if ratio is not None:
                at_once = "1 request" if requests == 1 else f"{requests} requests at once"
                measures[f"speed_{method}_{requests}"] = _Measure(
                    f"speed forked / {title}, {at_once}", ratio, ".2f"
                )
    repeats = max(run.key.round for run in runs) + 1
    return ReportTable(
        "speed",
        "Speed of answers that fork, replayed in the engine",
        columns(
            f"requests :d | way | tokens/s :.1f | {INTERVAL} | forked / this :.2f | {INTERVAL} | "
            "latency s :.2f | peak KV tokens :,.0f | attended/answer :,.0f"
        ),
        tuple(rows),
        f"Intervals over {repeats} repeats. Requests: running at once, each followed by the next.",
    )


def _speed_figure(runs: Sequence[SpeedRun]) -> Figure:
    numbers = list(dict.fromkeys(run.key.requests for run in runs))
    methods = [method for method in _TITLES if _runs_of(runs, numbers[0], method)]
    places, width = np.arange(len(numbers)), 0.8 / len(methods)

    def draw(panel: Axes) -> None:
        for index, (method, colour) in enumerate(zip(methods, RUN_COLOURS, strict=False)):
            found = [over_repeats(_values(runs, number, method)) for number in numbers]
            panel.bar(
                places + (index - (len(methods) - 1) / 2) * width,
                [each.value for each in found],
                width,
                yerr=[0.0 if each.high is None else each.high - each.value for each in found],
                capsize=3,
                color=colour,
                label=_TITLES[method],
            )
        panel.set_xticks(places, [str(number) for number in numbers])
        panel.figure.legend(loc="outside lower center", ncols=len(methods), frameon=False)

    title = "Speed of answers that fork"
    axes = ("requests at once", "text tokens per second")
    return figure((7.2, 3.8), (title, *axes, draw), legend=False)


def _runs_of(runs: Sequence[SpeedRun], requests: int, method: Method) -> list[SpeedRun]:
    """Return the runs in the order of their rounds."""
    found = [run for run in runs if (run.key.requests, run.key.method) == (requests, method)]
    return sorted(found, key=lambda run: run.key.round)


def _values(runs: Sequence[SpeedRun], requests: int, method: Method) -> list[float]:
    return [run.figures.tokens_per_s for run in _runs_of(runs, requests, method)]


def _share_cells(found: Estimate | None) -> tuple[Cell, Cell]:
    return (None, None) if found is None else (found.value, found.interval(".1%"))
