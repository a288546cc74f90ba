"""Report of `apar evaluate ppd`: the paper's tables and figures as far as a small model shows them.

Tables 1 (sizes), 2, 3, 6, 7 and 8 (variants), figures 6a, 7 and 8, and speculation by live rows:
measured on this machine next to predictions for GPUs.
Source: Parallel Prompt Decoding (arXiv 2405.18628).
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice
from apar_core.offline.decoders.load import SINGLE_THREAD
from apar_core.offline.decoders.pass_times import (
    PASSES_FILE,
    PassTimes,
    ProposerName,
    read_passes,
    write_passes,
)
from apar_core.offline.evaluation.acceptance_report import read_guesses
from apar_core.offline.evaluation.passes_report import measured_passes
from apar_core.offline.evaluation.ppd_measurements import (
    DRAFT,
    MEDUSA,
    MEDUSA_APAR,
    PLAIN,
    PPD,
    PPD_APAR,
    VANILLA,
    WEIGHTLESS,
    LivePasses,
    Method,
    MethodAnswer,
    MethodStore,
    PpdSettings,
    TrainedVariant,
    build_methods,
    compared_trees,
    length_interval,
    measure_methods,
    sized_tree,
    train_variants,
    variants,
)
from apar_core.offline.evaluation.ppd_predictions import (
    MEDUSA_LENGTH,
    PAPER_TABLES,
    PUBLISHED_TABLE_1,
    answer_speedups,
    medusa_heads_s,
    memory_table,
    paper_model,
    predict_best,
    predict_sizes,
    predicted_table_1,
    prediction_tables,
)
from apar_core.offline.evaluation.prompt_sets import load_prompts
from apar_core.offline.evaluation.replay_text import load_text
from apar_core.offline.evaluation.speed_run import choose_device, choose_dtype
from apar_core.offline.speculation.acceptance import (
    STARTING_PLACES,
    VICUNA_7B,
    AcceptanceTable,
    read_table,
)
from apar_core.offline.speculation.prompt_tokens import load_prompt_tokens
from apar_core.offline.speculation.sparse_tree import FAMILY_ROWS, best_size
from apar_core.reporting import (
    PLOT_SETTINGS,
    RUN_COLOURS,
    Cell,
    Column,
    Report,
    ReportTable,
    ShowProgress,
    claim_folder,
)
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import step_costs

_TOP = 5
_VARIANT_SETTINGS = ("train_steps", "data", "recipe", "many", "seeds")
_ROW_BINS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16))
_GPUS = ("a100-80gb", "h100")
_PAPER_GPUS = ("a100-40gb", "rtx-4090")
_PREDICTED = (PLAIN, PPD, VANILLA, PPD_APAR, MEDUSA_APAR)
_TREE_KINDS = ("optimal", "dynamic", "static", "random")


@dataclass(frozen=True)
class Measurements:
    """Everything that a run has measured, for the report."""

    settings: PpdSettings
    methods: Sequence[Method]
    store: MethodStore
    prompts: AcceptanceTable
    medusa: AcceptanceTable | None
    draft: AcceptanceTable | None
    variants: Mapping[str, Sequence[TrainedVariant]]
    times: Mapping[ProposerName, PassTimes]
    ensemble: int

    @property
    def forks(self) -> bool:
        """Whether the model has control tokens."""
        return any(method.name == VANILLA for method in self.methods)


def run_ppd(settings: PpdSettings, folder: Path, progress: ShowProgress) -> Report:
    """Measure what the folder does not contain yet; return the report.

    Raises EvaluationError or CheckpointError for invalid settings, weights or folder.
    """
    is_tiny = Path(settings.model) == checkpoint_path()
    if settings.train_steps and not is_tiny and settings.data is None:
        raise EvaluationError(
            f"--train-steps needs --data to train variants for {settings.model_name}"
        )
    if settings.data is not None and (is_tiny or not settings.train_steps):
        raise EvaluationError("--data is for --train-steps with another model than apar-tiny")
    if settings.draft_model is not None and settings.temperature > 0:
        raise EvaluationError("--draft-model is for greedy decoding: omit it or --temperature")
    questions = load_prompts(settings.prompts, settings.questions)[: settings.limit]
    text = load_text(settings.model)
    device = choose_device(settings.device)
    loaded: Any = load_causal_model(settings.model, dtype=choose_dtype(settings.dtype, device))
    model = loaded.to(device).eval()
    prompts, medusa = read_table(settings.prompt_tokens), None
    if settings.medusa_heads is not None:
        medusa = read_table(settings.medusa_heads)
    ensemble = load_prompt_tokens(settings.prompt_tokens).settings.ensemble
    facts = settings.model_dump(
        mode="json", exclude={"limit", "questions", "model", *_VARIANT_SETTINGS, "repeats"}
    )
    claim_folder(folder, {name: str(value) for name, value in facts.items()})
    passes = folder / PASSES_FILE
    if not passes.is_file():
        show = progress.start("pass times", 1)
        guesses = read_guesses(settings.prompt_tokens, settings.medusa_heads)
        write_passes(measured_passes(model, text.tokenizer, guesses, settings.context), passes)
        show()
    times = read_passes(passes)
    methods = build_methods(settings, model, text, prompts, medusa, times, ensemble)
    store = MethodStore(folder / "answers.jsonl")
    show = progress.start(f"answers to {settings.prompts}", len(questions) * settings.repeats)
    limits = DecodeLimits(max_tokens=settings.max_tokens)
    choice = TokenChoice.sampled(settings.temperature, seed=settings.seed)
    measure_methods(methods, questions, text, limits, store, show, settings.repeats, choice)
    found: dict[str, list[TrainedVariant]] = {}
    if settings.train_steps:
        show = progress.start(
            "variants of prompt tokens", len(variants(settings.many)) * settings.seeds
        )
        inputs = f"{settings.data and settings.data.resolve()} {settings.recipe}"
        digest = hashlib.sha256(inputs.encode()).hexdigest()[:8]
        trained = folder / f"variants-{settings.train_steps}-{settings.many}-{digest}"
        found = train_variants(settings, settings.model, trained, show)
    draft = None if settings.draft_prompts is None else read_table(settings.draft_prompts)
    run = Measurements(settings, methods, store, prompts, medusa, draft, found, times, ensemble)
    return ppd_report(run, _machine(device), len(questions))


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def ppd_report(run: Measurements, machine: str, num_prompts: int) -> Report:
    """Return the report of a run."""
    settings = run.settings
    by_method = {method.name: run.store.of_method(method.name) for method in run.methods}
    cut = sum(not answer.ended for answers in by_method.values() for answer in answers)
    facts = {
        "Model": settings.model_name,
        "Prompts": f"{num_prompts} of {settings.prompts}, first turns, {_choice_text(settings)}, "
        f"each measured {settings.repeats} times in turn",
        "Machine": machine,
        "Acceptance of prompt tokens": run.prompts.source,
    }
    if run.medusa is not None:
        facts["Acceptance of Medusa heads"] = run.medusa.source
    if cut:
        facts["Cut off"] = f"{cut} answers, by the token limit or the model's context"
    if not _prefers_likely_text(settings):
        different = differing_texts(by_method)
        facts["Texts"] = (
            "those of plain for all methods without forks, of vanilla_apar for all with forks"
            if not different
            else f"{different} answers differ from those without speculation"
        )
    tables = [
        methods_table(run, by_method),
        table_1(run, by_method),
        trees_table(run, by_method),
        *([live_rows_measured(run, by_method)] if run.forks else []),
        sizes_table(run, by_method),
        accuracy_table(run),
        *([variants_table(run)] if run.variants else []),
        *([answers_on_gpu(run, by_method[VANILLA])] if run.forks else []),
        *prediction_tables(settings.context),
    ]
    figures = {
        "accuracy": accuracy_figure(run),
        "memory": memory_figure(),
        "tree-size": tree_size_figure(run, by_method),
        "gpu-sizes": gpu_sizes_figure(settings.context),
        **({"live-rows": live_rows_figure(run, by_method)} if run.forks else {}),
        **({"losses": losses_figure(run)} if run.variants else {}),
    }
    return Report("Parallel Prompt Decoding", facts, tables, figures, {})


def _prefers_likely_text(settings: PpdSettings) -> bool:
    """Return whether speculation changes the distribution of the texts."""
    return settings.temperature > 0 and settings.acceptance == "typical"


def _choice_text(settings: PpdSettings) -> str:
    if not settings.temperature:
        return "greedy"
    return f"temperature {settings.temperature:g}, {settings.acceptance} acceptance"


def differing_texts(by_method: Mapping[str, Sequence[MethodAnswer]]) -> int:
    """Return how many answers differ from those of the same threads without speculation.

    Answers with forks that a limit cut off are left out: where their threads end depends on the
    order of the passes. A single thread is cut after the same token.
    """
    number = 0
    for name, answers in by_method.items():
        reference = _unspeculated(name)
        base = {each.question_id: each for each in by_method[reference]}
        for answer in answers:
            other = base[answer.question_id]
            whole = reference == PLAIN or (answer.ended and other.ended)
            number += whole and answer.text != other.text
    return number


def _unspeculated(name: str) -> str:
    """Return the decoder that writes the same text without speculation."""
    return PLAIN if name.partition(",")[0] in (*SINGLE_THREAD, DRAFT) else VANILLA


def _is_predicted(method: Method) -> bool:
    """Return whether tokens per pass are predicted: by a measured table, in a single thread."""
    return method.name.partition(",")[0] in SINGLE_THREAD and method.name not in WEIGHTLESS


# ---- tables ------------------------------------------------------------------------------------


def _total(answers: Sequence[MethodAnswer]) -> LivePasses:
    return sum((answer.total for answer in answers), LivePasses())


def methods_table(
    run: Measurements, by_method: Mapping[str, Sequence[MethodAnswer]]
) -> ReportTable:
    """Return steps, tokens per pass, pass time and speed of all methods."""

    def gain(answers: Sequence[MethodAnswer], reference: Sequence[MethodAnswer]) -> float:
        """Return tokens per second relative to those of the reference."""
        speeds = (
            sum(each.text_tokens for each in part) / _total(part).seconds
            for part in (answers, reference)
        )
        return next(speeds) / next(speeds)

    rows = []
    for method in run.methods:
        answers = by_method[method.name]
        total = _total(answers)
        reference = by_method[_unspeculated(method.name)]
        same = _total(reference)
        gains = [
            gain(*([each for each in part if each.repeat == n] for part in (answers, reference)))
            for n in range(run.settings.repeats)
        ]
        length, low, high = length_interval(answers)
        num_text = sum(answer.text_tokens for answer in answers)
        plain = by_method[PLAIN]
        plain_speed = sum(answer.text_tokens for answer in plain) / _total(plain).seconds
        rows.append(
            (
                method.name,
                float(method.num_inputs),
                1 + total.passes / len(answers),
                length,
                f"{low:.2f} to {high:.2f}",
                method.expected_length if _is_predicted(method) else None,
                1e3 * total.seconds / max(total.passes, 1),
                num_text / total.seconds,
                same.passes
                / sum(each.text_tokens for each in reference)
                * num_text
                / max(total.passes, 1),
                gain(answers, reference),
                f"{min(gains):.2f} to {max(gains):.2f}",
                num_text / total.seconds / plain_speed,
                sum(answer.draft_passes for answer in answers) / len(answers)
                if method.name.startswith(DRAFT)
                else None,
            )
        )
    return ReportTable(
        "methods",
        "Decoders, measured in turn",
        (
            Column("Method"),
            Column("Inputs", ".0f"),
            Column("Steps per answer", ".1f"),
            Column("Tokens per thread and pass", ".3f"),
            Column("95% interval"),
            Column("Predicted", ".3f"),
            Column("ms per pass", ".2f"),
            Column("Tokens/s", ".0f"),
            Column("Fewer steps", ".2f"),
            Column("Speed-up", ".2f"),
            Column("by repeat"),
            Column("Speed against plain", ".2f"),
            Column("Draft passes per answer", ".1f"),
        ),
        tuple(rows),
        "Inputs: the largest number of a row at one live row; trees sized by hardware change with "
        "the live rows. Fewer steps and speed-up: relative to the answers without speculation "
        "(plain without forks, vanilla_apar with them), the prefill left out. Speed against plain: "
        "text tokens per second, where texts with and without forks differ.",
    )


def table_1(run: Measurements, by_method: Mapping[str, Sequence[MethodAnswer]]) -> ReportTable:
    """Return table 1: throughput, accepted tokens, pass time, quality and sizes of the trees."""
    rows: list[tuple[Cell, ...]] = [
        (row.model, row.method, "paper, A100-40GB", row.throughput, row.length, 1e3 * row.pass_s,
         row.quality, row.candidates, row.inputs)
        for row in PUBLISHED_TABLE_1
    ]  # fmt: skip
    rows += predicted_table_1("a100-40gb", run.settings.context)
    sampled = _prefers_likely_text(run.settings)
    for method in run.methods:
        if method.name not in (PLAIN, PPD, MEDUSA, *WEIGHTLESS):
            continue
        answers = by_method[method.name]
        total = _total(answers)
        trees = () if method.tree is None else method.tree.trees[1:]
        same = not sampled and not differing_texts({PLAIN: by_method[PLAIN], method.name: answers})
        quality = None if method.name == PLAIN else "Same" if same else "judge"
        rows.append(
            (run.settings.model_name, method.name, "measured here",
             sum(each.text_tokens for each in answers) / total.seconds,
             length_interval(answers)[0], 1e3 * total.seconds / max(total.passes, 1), quality,
             ", ".join(str(tree.num_candidates) for tree in trees) or None,
             ", ".join(str(tree.num_inputs(method.ensemble) - 1) for tree in trees) or "1")
        )  # fmt: skip
    return ReportTable(
        "table-1",
        "Throughput, accepted tokens and pass time (table 1)",
        (
            Column("Model"),
            Column("Method"),
            Column("Where"),
            Column("Tokens/s", ".1f"),
            Column("Tokens per step", ".2f"),
            Column("ms per pass", ".1f"),
            Column("Quality"),
            Column("Candidates of states 1 to M"),
            Column("Inputs"),
        ),
        tuple(rows),
        "The paper's quality is the score on MT-Bench; Same: the texts are those without "
        "speculation. judge: texts differ, so `apar evaluate quality` must score them. Predicted: "
        "the paper's trees, with the authors' acceptance and step costs; the host's time between "
        "passes is left out.",
    )


def trees_table(run: Measurements, by_method: Mapping[str, Sequence[MethodAnswer]]) -> ReportTable:
    """Return optimal, dynamic, static and random trees of the same size (figure 8a)."""
    rows = []
    for method in run.methods:
        if method.sized in _TREE_KINDS and method.name.startswith(f"{PPD},"):
            assert method.tree is not None
            length, low, high = length_interval(by_method[method.name])
            last = method.tree.trees[-1]
            inside = "yes" if low <= method.expected_length <= high else "no"
            rows.append(
                (method.name.split(", ")[2], method.sized, float(method.num_inputs),
                 float(last.num_candidates), float(last.num_prompts), method.expected_length,
                 length, f"{low:.3f} to {high:.3f}", inside)
            )  # fmt: skip
    return ReportTable(
        "trees",
        "Kinds of trees (figure 8a), one live row",
        (
            Column("At most"),
            Column("Tree"),
            Column("Inputs", ".0f"),
            Column("Candidates, state M", ".0f"),
            Column("Prompt tokens, state M", ".0f"),
            Column("Predicted tokens per pass", ".3f"),
            Column("Measured", ".3f"),
            Column("95% interval"),
            Column("Prediction inside"),
        ),
        tuple(rows),
        "Optimal: the best tree of a size. Dynamic: the paper's construction. Random trees: seed "
        f"{run.settings.seed}. Intervals are bootstrapped over answers.",
    )


def _binned(answers: Sequence[MethodAnswer], low: int, high: int) -> tuple[LivePasses, int]:
    """Return the passes with `low` to `high` live threads, and their sum over threads."""
    parts = [
        (rows, part)
        for answer in answers
        for rows, part in answer.live.items()
        if low <= rows <= high
    ]
    total = sum((part for _, part in parts), LivePasses())
    return total, sum(rows * part.passes for rows, part in parts)


def _fixed_size(run: Measurements) -> int:
    """Return the middle one of the compared tree sizes."""
    return sorted(run.settings.tree_sizes)[len(run.settings.tree_sizes) // 2]


def _measured_gain(
    by_method: Mapping[str, Sequence[MethodAnswer]], name: str, low: int, high: int
) -> float | None:
    """Return tokens per second relative to vanilla_apar in passes with as many live threads."""
    speeds = []
    for each in (name, VANILLA):
        part, _ = _binned(by_method.get(each, ()), low, high)
        if not part.passes or not part.tokens:
            return None
        speeds.append(part.tokens / part.seconds)
    return speeds[0] / speeds[1]


def live_rows_measured(
    run: Measurements, by_method: Mapping[str, Sequence[MethodAnswer]]
) -> ReportTable:
    """Return where speculation pays by live rows: measured here, and predicted for GPUs."""
    size = _fixed_size(run)
    costs = [step_costs(find_model("llama-7b"), find_gpu(gpu)) for gpu in _GPUS]
    context = run.settings.context
    rows = []
    for low, high in _ROW_BINS:
        vanilla, _threads = _binned(by_method[VANILLA], low, high)
        pass_s = run.times["prompt_tokens"].pass_s(high)
        best = best_size(run.prompts, pass_s, high, ensemble=run.ensemble)
        heads_gain = None
        if run.medusa is not None:
            heads_pass_s = run.times["medusa_heads"].pass_s(high)
            heads = best_size(run.medusa, heads_pass_s, high, ensemble=0)
            heads_gain = heads.tokens_per_s * heads_pass_s(high)
        rows.append(
            (
                str(low) if low == high else f"{low} to {high}",
                float(vanilla.passes),
                1e3 * vanilla.seconds / vanilla.passes if vanilla.passes else None,
                _measured_gain(by_method, PPD_APAR, low, high),
                _measured_gain(by_method, f"{PPD_APAR}, {size}", low, high),
                _measured_gain(by_method, MEDUSA_APAR, low, high),
                _measured_gain(by_method, f"{MEDUSA_APAR}, {size}", low, high),
                float(best.num_inputs),
                best.tokens_per_s * pass_s(high),
                heads_gain,
                *(
                    predict_best(each, table, high, context).speedup
                    for table in (run.prompts, VICUNA_7B)
                    for each in costs
                ),
            )
        )
    return ReportTable(
        "live-rows",
        "Speed-up of speculation by live rows",
        (
            Column("Live rows"),
            Column("Passes measured", ".0f"),
            Column("vanilla_apar, ms per pass", ".2f"),
            Column("ppd_apar", ".2f"),
            Column(f"ppd_apar, {size} inputs", ".2f"),
            Column("medusa_apar", ".2f"),
            Column(f"medusa_apar, {size} inputs", ".2f"),
            Column("Best inputs here", ".0f"),
            Column("predicted: prompts", ".2f"),
            Column("predicted: Medusa", ".2f"),
            *(Column(f"7B on {gpu}, this table", ".2f") for gpu in _GPUS),
            *(Column(f"7B on {gpu}, Vicuna's table", ".2f") for gpu in _GPUS),
        ),
        tuple(rows),
        "Measured: tokens per second in passes with so many live threads, relative to vanilla_apar "
        "in such passes. Predicted here: from the measured pass times and the acceptance table, at "
        "the upper end of the range. GPUs: predicted from step costs with this model's acceptance "
        "table and with the one of Vicuna-7B's authors.",
    )


def sizes_table(run: Measurements, by_method: Mapping[str, Sequence[MethodAnswer]]) -> ReportTable:
    """Return predicted and measured speed by tree size at one live row (figures 8b and 8c)."""
    pass_s = run.times["prompt_tokens"].pass_s(1)
    plain = by_method[PLAIN]
    plain_speed = sum(each.text_tokens for each in plain) / _total(plain).seconds
    rows = []
    for size in (1, *run.settings.tree_sizes):
        name = PLAIN if size == 1 else f"{PPD}, optimal, {size}"
        method = next(each for each in run.methods if each.name == name)
        total = _total(by_method[name])
        speed = sum(each.text_tokens for each in by_method[name]) / total.seconds
        rows.append(
            (
                float(method.num_inputs),
                method.expected_length,
                1e3 * pass_s(method.num_inputs),
                method.expected_length * pass_s(1) / pass_s(method.num_inputs),
                1e3 * total.seconds / total.passes,
                speed / plain_speed,
            )
        )
    best = best_size(run.prompts, pass_s, 1, ensemble=run.ensemble)
    measured = max(rows, key=lambda row: row[-1])
    return ReportTable(
        "sizes",
        "Tree size and speed at one live row (figures 8b and 8c)",
        (
            Column("Inputs", ".0f"),
            Column("Tokens per pass", ".3f"),
            Column("Predicted: pass (ms)", ".2f"),
            Column("speed-up", ".2f"),
            Column("Measured: pass (ms)", ".2f"),
            Column("speed-up", ".2f"),
        ),
        tuple(rows),
        f"Predicted best of all sizes: {best.num_inputs} inputs. Measured best of these: "
        f"{measured[0]:.0f}. Predicted passes were measured beforehand, with random tokens after "
        f"{run.settings.context} others.",
    )


def accuracy_table(run: Measurements) -> ReportTable:
    """Return top-1 and top-5 accuracy by distance (figures 6a and 6c)."""
    rows: list[tuple[Cell, ...]] = [
        (name, places, *_accuracies(table, (1, 2, 3), at_start=at_start))
        for name, table in _tables(run)
        for places, at_start in (("all", False), (f"first {STARTING_PLACES}", True))
        if not at_start or table.accuracy_at_start is not None
    ]
    rows += [
        (f"{name}, the authors' trees", "all", *_accuracies(table, (1,)), *(None,) * 4)
        for name, table in PAPER_TABLES.items()
    ]
    return ReportTable(
        "accuracy",
        "Accuracy by distance on held-out prompts (figures 6a and 6c)",
        (Column("Weights"), Column("Places"), *_accuracy_columns((1, 2, 3))),
        tuple(rows),
        _ACCURACY_NOTE,
    )


def variants_table(run: Measurements) -> ReportTable:
    """Return the accuracy of trained variants (tables 2 to 8)."""
    rows = []
    kinds = variants(run.settings.many)
    for name, found in run.variants.items():
        variant = kinds[name]
        tables = [each.table for each in found]
        firsts = [_accuracies(table, (1,), at_start=True)[0] or 0.0 for table in tables]
        shares = [_accuracies(table, (1, 2), at_start=True) for table in tables]
        anywhere = fmean(_accuracies(table, (1,))[0] or 0.0 for table in tables)
        rows.append(
            (name, variant.place, float(len(found[0].losses)),
             *(fmean(share or 0.0 for share in column) for column in zip(*shares, strict=True)),
             f"{min(firsts):.3f} to {max(firsts):.3f}", anywhere,
             *(variant.paper or (None,) * 4))
        )  # fmt: skip
    source = next(iter(run.variants.values()))[0].table.source
    return ReportTable(
        "variants",
        "Variants of prompt tokens (tables 2 to 8)",
        (
            Column("Variant"),
            Column("In the paper"),
            Column("Steps", ".0f"),
            *_accuracy_columns((1, 2)),
            Column("@1 Top-1 by seed"),
            Column("all places: @1 Top-1", ".3f"),
            *(
                Column(f"Paper: @{distance} Top-{top}", ".3f")
                for distance in (1, 2)
                for top in (1, _TOP)
            ),
        ),
        tuple(rows),
        f"Accuracy of the first {STARTING_PLACES} tokens of a thread, as in the paper, mean of "
        f"{run.settings.seeds} seeds. Measured on {source}. The paper's values are of Vicuna-7B on "
        f"Alpaca, with 100 EPTs where these have {run.settings.many}: only their order can be "
        "compared.",
    )


def _tables(run: Measurements) -> list[tuple[str, AcceptanceTable]]:
    """Return the acceptance tables of the run by the name of the weights."""
    tables = {
        "prompt tokens": run.prompts,
        "Medusa heads": run.medusa,
        "prompt tokens of the draft model": run.draft,
    }
    return [(name, table) for name, table in tables.items() if table is not None]


_ACCURACY_NOTE = (
    f"Share of places where the token is among the first k. The paper counts the first "
    f"{STARTING_PLACES} tokens of an answer."
)


def _accuracy_columns(distances: Sequence[int]) -> list[Column]:
    return [Column(f"@{distance} Top-{top}", ".3f") for distance in distances for top in (1, _TOP)]


def _accuracies(
    table: AcceptanceTable, distances: Sequence[int], *, at_start: bool = False
) -> list[float | None]:
    shares = (table.accuracy_at_start if at_start else None) or table.accuracy or table.top_k()
    return [
        shares[distance - 1][min(top, table.num_ranks) - 1] if distance <= len(shares) else None
        for distance in distances
        for top in (1, _TOP)
    ]


def answers_on_gpu(run: Measurements, vanilla: Sequence[MethodAnswer]) -> ReportTable:
    """Return the predicted speed-up of each decoder on a GPU for the answers of this run."""
    live = [{rows: part.passes for rows, part in answer.live.items()} for answer in vanilla]
    sequential = sum(answer.text_tokens + answer.ended for answer in vanilla)
    rows = []
    for name, published in PAPER_TABLES.items():
        for gpu in _GPUS:
            model = paper_model(name)
            for source, table, medusa_length in (
                (f"{name}'s", published, MEDUSA_LENGTH[name]),
                ("this model's", run.prompts, None),
            ):
                speedups = answer_speedups(
                    step_costs(model, find_gpu(gpu)),
                    table,
                    live,
                    sequential,
                    run.settings.context,
                    heads_s=medusa_heads_s(model, gpu),
                    medusa_length=medusa_length,
                )
                rows.append((f"{name} on {gpu}", source, *map(speedups.get, _PREDICTED)))
    return ReportTable(
        "answers-on-gpu",
        "These answers on a GPU, predicted, relative to plain",
        (
            Column("Model and GPU"),
            Column("Acceptance"),
            *(Column(each, ".2f") for each in _PREDICTED),
        ),
        tuple(rows),
        f"One answer at a time, {run.settings.context} tokens of context, from the live threads of "
        "vanilla_apar's passes; plain has to write the same text in one thread. Medusa has table "
        "1's tree of 63 and its tokens per step at any number of rows.",
    )


# ---- figures -----------------------------------------------------------------------------------


def accuracy_figure(run: Measurements) -> Figure:
    """Return accumulated accuracy by rank for prompt tokens and Medusa heads (figure 6a)."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        panel = figure.subplots()
        for (name, table), style in zip(_tables(run), ("-", "--", ":"), strict=False):
            for distance, sums in enumerate(table.accuracy or table.top_k(), start=1):
                panel.plot(
                    range(1, len(sums) + 1), sums, style, color=RUN_COLOURS[distance - 1],
                    label=f"{name} @{distance}",
                )  # fmt: skip
        panel.set(xlabel="Top-k", ylabel="Accuracy", ylim=(0, 1.02))
        panel.set_title("Accuracy of guesses by distance")
        panel.legend(frameon=False, fontsize=8)
    return figure


def memory_figure() -> Figure:
    """Return the bytes beside each model's weights (figure 7), on a logarithmic axis."""
    rows = memory_table().rows[::-1]
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        panel = figure.subplots()
        panel.barh([str(row[0]) for row in rows], [float(row[1] or 0) for row in rows])
        panel.set_xscale("log")
        panel.set(xlabel="Bytes")
        panel.set_title("Memory beside the model's weights, counted")
    return figure


def tree_size_figure(run: Measurements, by_method: Mapping[str, Sequence[MethodAnswer]]) -> Figure:
    """Return tokens per pass by tree size: predicted lines, measured points (figure 8a)."""
    sizes = (4, 6, 8, 12, 16, 24, 32, 48, 64)
    curves: dict[str, list[float]] = {kind: [] for kind in _TREE_KINDS}
    for size in sizes:
        trees = compared_trees(run.prompts, size, run.ensemble, run.settings.seed)
        for kind, tree in trees.items():
            curves[kind].append(tree.expected_length())
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        panel = figure.subplots()
        for colour, (kind, lengths) in zip(RUN_COLOURS, curves.items(), strict=False):
            # The paper's tree often is the optimal one.
            style = "--" if kind == "dynamic" else "-"
            panel.plot(sizes, lengths, style, color=colour, label=f"{kind}, predicted")
            for size in run.settings.tree_sizes:
                length, low, high = length_interval(by_method[f"{PPD}, {kind}, {size}"])
                panel.errorbar(
                    [size], [length], yerr=[[length - low], [high - length]], fmt="o", color=colour
                )
        if run.medusa is not None:
            medusa = [sized_tree(run.medusa, size, 0).expected_length() for size in sizes]
            panel.plot(sizes, medusa, ":", color="#3d4852", label="Medusa heads, predicted")
        panel.set(xlabel="Inputs of a row in a pass", ylabel="Tokens per pass")
        panel.set_title("Tree size: predicted, and measured with 95% intervals")
        panel.legend(frameon=False, fontsize=8)
    return figure


def gpu_sizes_figure(context: int) -> Figure:
    """Return the predicted speed-up of Vicuna-7B by tree size on several GPUs (figure 8b)."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        panel = figure.subplots()
        for colour, gpu in zip(RUN_COLOURS, _PAPER_GPUS + _GPUS, strict=False):
            costs = step_costs(find_model("llama-7b"), find_gpu(gpu))
            sizes = predict_sizes(costs, VICUNA_7B, 1, context)
            best = max(sizes, key=lambda each: each.speedup)
            panel.plot(
                [each.num_inputs for each in sizes], [each.speedup for each in sizes],
                "--" if gpu == "rtx-4090" else "-", color=colour,
                label=f"{gpu}, best with {best.num_inputs}",
            )  # fmt: skip
            panel.plot([best.num_inputs], [best.speedup], "o", color=colour)
        panel.set(xlabel="Inputs of a row in a pass", ylabel="Speed-up over no speculation")
        panel.set_title("Vicuna-7B by tree size, predicted")
        panel.legend(frameon=False, fontsize=8)
    return figure


def losses_figure(run: Measurements) -> Figure:
    """Return the training loss with one EPT and with several (figure 9)."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        panel = figure.subplots()
        for colour, name in zip(RUN_COLOURS, ("1 EPT", f"{run.settings.many} EPTs"), strict=False):
            losses = run.variants[name][0].losses
            panel.plot(range(1, len(losses) + 1), losses, color=colour, label=name)
        panel.set(xlabel="Step", ylabel="Training loss")
        panel.set_title("Training loss of prompt tokens")
        panel.legend(frameon=False, fontsize=8)
    return figure


def live_rows_figure(run: Measurements, by_method: Mapping[str, Sequence[MethodAnswer]]) -> Figure:
    """Return the speed-up of speculation by live rows, measured and predicted."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        panel = figure.subplots()
        for colour, gpu in zip(RUN_COLOURS, _GPUS, strict=False):
            costs = step_costs(find_model("llama-7b"), find_gpu(gpu))
            speedups = [
                predict_best(costs, VICUNA_7B, rows, run.settings.context).speedup
                for rows in FAMILY_ROWS
            ]
            panel.plot(FAMILY_ROWS, speedups, color=colour, label=f"Vicuna-7B on {gpu}, predicted")
        here = []
        for rows in FAMILY_ROWS:
            pass_s = run.times["prompt_tokens"].pass_s(rows)
            best = best_size(run.prompts, pass_s, rows, ensemble=run.ensemble)
            here.append(best.tokens_per_s * pass_s(rows))
        panel.plot(FAMILY_ROWS, here, color=RUN_COLOURS[2], label="this machine, predicted")
        for name, marker in ((PPD_APAR, "o"), (f"{PPD_APAR}, {_fixed_size(run)}", "s")):
            points = [
                (high, gain)
                for low, high in _ROW_BINS
                if (gain := _measured_gain(by_method, name, low, high)) is not None
            ]
            panel.plot(
                [rows for rows, _ in points], [gain for _, gain in points], marker,
                color=RUN_COLOURS[3], label=f"{name} here, measured",
            )  # fmt: skip
        panel.axhline(1.0, color="#9aa5b1", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(FAMILY_ROWS, [str(rows) for rows in FAMILY_ROWS])
        panel.set(xlabel="Live rows", ylabel="Speed-up over no speculation")
        panel.set_title("Where speculation stops paying")
        panel.legend(frameon=False, fontsize=8)
    return figure
