"""Report of `apar evaluate ppd`: the paper's tables and figures as far as a small model shows them.

Tables 1 (sizes), 2, 3, 6, 7 and 8 (variants), figures 6a, 7 and 8, and speculation by live rows:
measured on this machine next to predictions for GPUs.
Source: Parallel Prompt Decoding (arXiv 2405.18628).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.decoders.interface import DecodedThread
from apar_core.offline.decoders.load import SINGLE_THREAD
from apar_core.offline.decoders.pass_times import (
    PASSES_FILE,
    PassTimes,
    ProposerName,
    read_passes,
    write_passes,
)
from apar_core.offline.evaluation.acceptance_report import Guesses, read_guesses
from apar_core.offline.evaluation.layout import columns, figure
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
    PpdSettings,
    TrainedVariant,
    build_methods,
    check_decoders,
    compared_trees,
    length_interval,
    measure_methods,
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
from apar_core.offline.evaluation.speed_run import (
    choose_device,
    choose_dtype,
    load_checkpoint,
    machine_name,
)
from apar_core.offline.speculation.acceptance import (
    STARTING_PLACES,
    VICUNA_7B,
    AcceptanceTable,
    read_table,
)
from apar_core.offline.speculation.sparse_tree import (
    FAMILY_ROWS,
    SizedTree,
    best_size,
    optimal_tree,
)
from apar_core.reporting import (
    RUN_COLOURS,
    Cell,
    LineStore,
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
_FIGURE = (7.5, 4.2)


@dataclass(frozen=True)
class Measurements:
    """Everything that a run has measured, for the report."""

    settings: PpdSettings
    methods: Sequence[Method]
    answers: Mapping[str, Sequence[MethodAnswer]]
    prompts: Guesses
    medusa: Guesses | None
    draft: AcceptanceTable | None
    variants: Mapping[str, Sequence[TrainedVariant]]
    times: Mapping[ProposerName, PassTimes]

    @property
    def forks(self) -> bool:
        """Whether the model has control tokens."""
        return VANILLA in self.answers

    @property
    def trees(self) -> bool:
        """Whether the kinds of trees were compared."""
        return PPD in self.answers

    @cached_property
    def tables(self) -> dict[str, AcceptanceTable]:
        """Acceptance tables by the name of the weights."""
        found = {
            "prompt tokens": self.prompts.table,
            "Medusa heads": None if self.medusa is None else self.medusa.table,
            "prompt tokens of the draft model": self.draft,
        }
        return {name: table for name, table in found.items() if table is not None}

    @property
    def prefers_likely_text(self) -> bool:
        """Whether speculation changes the distribution of the texts."""
        return self.settings.temperature > 0 and self.settings.acceptance == "typical"

    def best(self, guesses: Guesses, rows: int) -> tuple[SizedTree, float]:
        """Return the best tree for so many rows here, and its predicted speed-up."""
        pass_s = self.times[guesses.proposer].pass_s(rows)
        best = best_size(guesses.table, pass_s, rows, ensemble=guesses.ensemble)
        return best, best.tokens_per_s * pass_s(rows)

    def binned(self, name: str, low: int, high: int) -> LivePasses:
        """Return a method's passes with `low` to `high` live threads."""
        parts = (part for each in self.answers.get(name, ()) for part in each.live.items())
        return sum((part for rows, part in parts if low <= rows <= high), LivePasses())

    def gain(self, name: str, low: int, high: int) -> float | None:
        """Return tokens per second relative to vanilla_apar in passes with as many live threads."""
        these, those = self.binned(name, low, high), self.binned(VANILLA, low, high)
        if not (these.tokens and those.tokens):
            return None
        return these.tokens / these.seconds / (those.tokens / those.seconds)


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
    for name in ("recipe", "many", "seeds"):
        default = PpdSettings.model_fields[name].default
        if not settings.train_steps and getattr(settings, name) != default:
            raise EvaluationError(f"--{name} is for the variants that --train-steps trains")
    if settings.draft_model is not None and settings.temperature > 0:
        raise EvaluationError("--draft-model is for greedy decoding: omit it or --temperature")
    questions = load_prompts(settings.prompts, settings.questions)[: settings.limit]
    text = load_text(settings.model)
    check_decoders(settings, text.tokenizer.get_vocab())
    device = choose_device(settings.device)
    model = load_checkpoint(settings.model, choose_dtype(settings.dtype, device), device)
    guesses = read_guesses(settings.prompt_tokens, settings.medusa_heads)
    prompts, medusa = guesses[0], guesses[1] if len(guesses) > 1 else None
    left_out = {"limit", "questions", "model", "decoders", *_VARIANT_SETTINGS, "repeats"}
    dumped = settings.model_dump(mode="json", exclude=left_out)
    facts = {name: str(value) for name, value in dumped.items()}
    claim_folder(folder, facts)
    passes = folder / PASSES_FILE
    if not passes.is_file():
        measured = measured_passes(model, text.tokenizer, guesses, settings.context, progress)
        write_passes(measured, passes)
    times = read_passes(passes)
    methods = build_methods(settings, model, text, prompts, medusa, times)
    store = LineStore(folder / "answers.jsonl", facts, MethodAnswer, lambda line: line.key)
    show = progress.start(f"answers to {settings.prompts}", len(questions) * settings.repeats)
    measure_methods(settings, methods, questions, text, store, show)
    found: dict[str, list[TrainedVariant]] = {}
    if settings.train_steps:
        number = len(variants(settings.many)) * settings.seeds
        show = progress.start("variants of prompt tokens", number)
        inputs = f"{settings.data and settings.data.resolve()} {settings.recipe}"
        digest = hashlib.sha256(inputs.encode()).hexdigest()[:8]
        trained = folder / f"variants-{settings.train_steps}-{settings.many}-{digest}"
        found = train_variants(settings, settings.model, trained, show)
    draft = None if settings.draft_prompts is None else read_table(settings.draft_prompts)
    # An earlier run in this folder may have asked more, of other decoders.
    names = {question.question_id for question in questions}
    counted = [
        line
        for line in store.lines.values()
        if line.question_id in names and line.repeat < settings.repeats
    ]
    answers = {
        each.name: [line for line in counted if line.method == each.name] for each in methods
    }
    run = Measurements(settings, methods, answers, prompts, medusa, draft, found, times)
    machine = machine_name(device)
    if not device.startswith("cuda"):
        machine += f", {torch.get_num_threads()} threads"
    return ppd_report(run, machine, len(questions))


def ppd_report(run: Measurements, machine: str, num_prompts: int) -> Report:
    """Return the report of a run."""
    settings = run.settings
    choice = f"temperature {settings.temperature:g}, {settings.acceptance} acceptance"
    cut = sum(not answer.ended for answers in run.answers.values() for answer in answers)
    facts = {
        "Model": settings.model_name,
        "Prompts": f"{num_prompts} of {settings.prompts}, first turns, "
        f"{choice if settings.temperature else 'greedy'}, each measured {settings.repeats} times "
        "in turn",
        "Machine": machine,
        "Acceptance of prompt tokens": run.prompts.table.source,
    }
    if run.medusa is not None:
        facts["Acceptance of Medusa heads"] = run.medusa.table.source
    if cut:
        facts["Cut off"] = f"{cut} answers, by the token limit or the model's context"
    if not run.prefers_likely_text:
        equal = compare_threads(run.answers)
        facts["Texts"] = (
            f"{equal.compared} threads of all methods compared with the {equal.known} of plain and "
            f"vanilla_apar: {equal.different or 'none'} differ"
        )
    tables = [
        methods_table(run),
        table_1(run),
        *([trees_table(run)] if run.trees else []),
        *([live_rows_measured(run)] if run.forks else []),
        *([sizes_table(run)] if run.trees else []),
        accuracy_table(run),
        *([variants_table(run)] if run.variants else []),
        *([answers_on_gpu(run)] if run.forks else []),
        *prediction_tables(settings.context),
    ]
    figures = {
        "accuracy": accuracy_figure(run),
        "memory": memory_figure(),
        **({"tree-size": tree_size_figure(run)} if run.trees else {}),
        "gpu-sizes": gpu_sizes_figure(settings.context),
        **({"live-rows": live_rows_figure(run)} if run.forks else {}),
        **({"losses": losses_figure(run)} if run.variants else {}),
    }
    return Report("Parallel Prompt Decoding", facts, tables, figures, {})


class ThreadEquality(NamedTuple):
    """Threads without speculation, threads compared with them, and how many differ."""

    known: int
    compared: int
    different: int


def compare_threads(by_method: Mapping[str, Sequence[MethodAnswer]]) -> ThreadEquality:
    """Compare each thread, token by token, with the same thread without speculation.

    Where a limit cuts the threads of an answer depends on the order of the passes. So of such an
    answer a thread is compared as far as both go, and one that was not opened is not compared. But
    all have as many text tokens: an answer that has not counts as one that differs.
    """
    known = {
        (method, answer.question_id): answer
        for method in (PLAIN, VANILLA)
        for answer in by_method.get(method, ())
    }
    num_known = sum(len(answer.threads) for answer in known.values())
    compared = different = 0
    for method, answers in by_method.items():
        if method in (PLAIN, VANILLA):
            continue
        for answer in answers:
            reference = known[_unspeculated(method), answer.question_id]
            threads, others = (
                {thread.thread: thread for thread in each.threads} for each in (answer, reference)
            )
            both = threads.keys() & others.keys()
            compared += len(both)
            found = sum(_differ(threads[name], others[name]) for name in both)
            if answer.ended and reference.ended:
                found += len(threads.keys() ^ others.keys())
            different += found or answer.text_tokens != reference.text_tokens
    return ThreadEquality(num_known, compared, different)


def _differ(one: DecodedThread, other: DecodedThread) -> bool:
    shorter, longer = sorted((one, other), key=lambda each: len(each.token_ids))
    length = len(shorter.token_ids)
    if longer.token_ids[:length] != shorter.token_ids:
        return True
    return shorter.ended and len(longer.token_ids) > length


def _unspeculated(name: str) -> str:
    """Return the decoder that writes the same text without speculation."""
    return PLAIN if name.partition(",")[0] in (*SINGLE_THREAD, DRAFT) else VANILLA


def _is_predicted(method: Method) -> bool:
    """Return whether tokens per pass are predicted: by a measured table, in a single thread."""
    return method.base in SINGLE_THREAD and method.name not in WEIGHTLESS


# ---- tables ------------------------------------------------------------------------------------


def _total(answers: Sequence[MethodAnswer]) -> LivePasses:
    return sum((answer.total for answer in answers), LivePasses())


def _num_text(answers: Sequence[MethodAnswer]) -> int:
    return sum(answer.text_tokens for answer in answers)


def _speed(answers: Sequence[MethodAnswer]) -> float:
    """Return text tokens per second."""
    return _num_text(answers) / _total(answers).seconds


def _pass_ms(answers: Sequence[MethodAnswer]) -> float:
    total = _total(answers)
    return 1e3 * total.seconds / max(total.passes, 1)


def methods_table(run: Measurements) -> ReportTable:
    """Return steps, tokens per pass, pass time and speed of all methods."""
    rows = []
    for method in run.methods:
        answers = run.answers[method.name]
        reference = run.answers[_unspeculated(method.name)]
        passes = _total(answers).passes
        of_text = _total(reference).passes / _num_text(reference) * _num_text(answers)
        gains = [
            _speed([each for each in answers if each.repeat == repeat])
            / _speed([each for each in reference if each.repeat == repeat])
            for repeat in range(run.settings.repeats)
        ]
        length, low, high = length_interval(answers)
        rows.append(
            (
                method.name,
                float(method.num_inputs),
                1 + passes / len(answers),
                length,
                f"{low:.2f} to {high:.2f}",
                method.expected_length if _is_predicted(method) else None,
                _pass_ms(answers),
                _speed(answers),
                of_text / max(passes, 1),
                _speed(answers) / _speed(reference),
                f"{min(gains):.2f} to {max(gains):.2f}",
                _speed(answers) / _speed(run.answers[PLAIN]),
                sum(answer.draft_passes for answer in answers) / len(answers)
                if method.name.startswith(DRAFT)
                else None,
            )
        )
    return ReportTable(
        "methods",
        "Decoders, measured in turn",
        columns(
            "Method | Inputs :.0f | Steps per answer :.1f | Tokens per thread and pass :.3f | "
            "95% interval | Predicted :.3f | ms per pass :.2f | Tokens/s :.0f | Fewer steps :.2f | "
            "Speed-up :.2f | by repeat | Speed against plain :.2f | Draft passes per answer :.1f"
        ),
        tuple(rows),
        "Inputs: the largest number of a row at one live row; trees sized by hardware change with "
        "the live rows. Fewer steps and speed-up: relative to the answers without speculation "
        "(plain without forks, vanilla_apar with them), the prefill left out. Speed against plain: "
        "text tokens per second, where texts with and without forks differ.",
    )


def table_1(run: Measurements) -> ReportTable:
    """Return table 1: throughput, accepted tokens, pass time, quality and sizes of the trees."""
    rows = [*PUBLISHED_TABLE_1, *predicted_table_1("a100-40gb", run.settings.context)]
    for method in run.methods:
        if method.name not in (PLAIN, PPD, MEDUSA, *WEIGHTLESS):
            continue
        answers = run.answers[method.name]
        trees = () if method.tree is None else method.tree.trees[1:]
        alone = {PLAIN: run.answers[PLAIN], method.name: answers}
        same = not run.prefers_likely_text and not compare_threads(alone).different
        rows.append(
            (run.settings.model_name, method.name, "measured here", _speed(answers),
             length_interval(answers)[0], _pass_ms(answers),
             None if method.name == PLAIN else "Same" if same else "judge",
             ", ".join(str(tree.num_candidates) for tree in trees) or None,
             ", ".join(str(tree.num_inputs(method.ensemble) - 1) for tree in trees) or "1")
        )  # fmt: skip
    return ReportTable(
        "table-1",
        "Throughput, accepted tokens and pass time (table 1)",
        columns(
            "Model | Method | Where | Tokens/s :.1f | Tokens per step :.2f | ms per pass :.1f | "
            "Quality | Candidates of states 1 to M | Inputs"
        ),
        tuple(rows),
        "The paper's quality is the score on MT-Bench; Same: the texts are those without "
        "speculation. judge: texts differ, so `apar evaluate quality` must score them. Predicted: "
        "the paper's trees, with the authors' acceptance and step costs; the host's time between "
        "passes is left out.",
    )


def trees_table(run: Measurements) -> ReportTable:
    """Return optimal, dynamic, static and random trees of the same size (figure 8a)."""
    rows = []
    for method in run.methods:
        if method.sized in _TREE_KINDS and method.name.startswith(f"{PPD},"):
            assert method.tree is not None
            length, low, high = length_interval(run.answers[method.name])
            candidates, prompts = method.tree.division
            inside = "yes" if low <= method.expected_length <= high else "no"
            rows.append(
                (method.name.split(", ")[2], method.sized, float(method.num_inputs),
                 float(candidates), float(prompts), method.expected_length,
                 length, f"{low:.3f} to {high:.3f}", inside)
            )  # fmt: skip
    return ReportTable(
        "trees",
        "Kinds of trees (figure 8a), one live row",
        columns(
            "At most | Tree | Inputs :.0f | Candidates, state M :.0f | Prompt tokens, state M :.0f "
            "| Predicted tokens per pass :.3f | Measured :.3f | 95% interval | Prediction inside"
        ),
        tuple(rows),
        "Optimal: the best tree of a size. Dynamic: the paper's construction. Random trees: seed "
        f"{run.settings.seed}. Intervals are bootstrapped over answers.",
    )


def live_rows_measured(run: Measurements) -> ReportTable:
    """Return where speculation pays by live rows: measured here, and predicted for GPUs."""
    size, context = run.settings.middle_size, run.settings.context
    measured = (PPD_APAR, f"{PPD_APAR}, {size}", MEDUSA_APAR, f"{MEDUSA_APAR}, {size}")
    costs = [step_costs(find_model("llama-7b"), find_gpu(gpu)) for gpu in _GPUS]
    rows = []
    for low, high in _ROW_BINS:
        vanilla = run.binned(VANILLA, low, high)
        best, gain = run.best(run.prompts, high)
        rows.append(
            (
                str(low) if low == high else f"{low} to {high}",
                float(vanilla.passes),
                1e3 * vanilla.seconds / vanilla.passes if vanilla.passes else None,
                *(run.gain(name, low, high) for name in measured),
                float(best.num_inputs),
                gain,
                None if run.medusa is None else run.best(run.medusa, high)[1],
                *(
                    predict_best(each, table, high, context).speedup
                    for table in (run.prompts.table, VICUNA_7B)
                    for each in costs
                ),
            )
        )
    return ReportTable(
        "live-rows",
        "Speed-up of speculation by live rows",
        columns(
            "Live rows | Passes measured :.0f | vanilla_apar, ms per pass :.2f | ppd_apar :.2f | "
            f"ppd_apar, {size} inputs :.2f | medusa_apar :.2f | medusa_apar, {size} inputs :.2f | "
            "Best inputs here :.0f | predicted: prompts :.2f | predicted: Medusa :.2f | "
            + " | ".join(f"7B on {gpu}, this table :.2f" for gpu in _GPUS)
            + " | "
            + " | ".join(f"7B on {gpu}, Vicuna's table :.2f" for gpu in _GPUS)
        ),
        tuple(rows),
        "Measured: tokens per second in passes with so many live threads, relative to vanilla_apar "
        "in such passes. Predicted here: from the measured pass times and the acceptance table, at "
        "the upper end of the range. GPUs: predicted from step costs with this model's acceptance "
        "table and with the one of Vicuna-7B's authors.",
    )


def sizes_table(run: Measurements) -> ReportTable:
    """Return predicted and measured speed by tree size at one live row (figures 8b and 8c)."""
    pass_s = run.times["prompt_tokens"].pass_s(1)
    methods = {method.name: method for method in run.methods}
    rows = []
    for name in (PLAIN, *(f"{PPD}, optimal, {size}" for size in run.settings.tree_sizes)):
        length, inputs = methods[name].expected_length, methods[name].num_inputs
        predicted = length * pass_s(1) / pass_s(inputs)
        speedup = _speed(run.answers[name]) / _speed(run.answers[PLAIN])
        rows.append(
            (float(inputs), length, 1e3 * pass_s(inputs), predicted,
             _pass_ms(run.answers[name]), speedup)
        )  # fmt: skip
    best, _gain = run.best(run.prompts, 1)
    measured = max(rows, key=lambda row: row[-1])
    return ReportTable(
        "sizes",
        "Tree size and speed at one live row (figures 8b and 8c)",
        columns(
            "Inputs :.0f | Tokens per pass :.3f | Predicted: pass (ms) :.2f | speed-up :.2f | "
            "Measured: pass (ms) :.2f | speed-up :.2f"
        ),
        tuple(rows),
        f"Predicted best of all sizes: {best.num_inputs} inputs. Measured best of these: "
        f"{measured[0]:.0f}. Predicted passes were measured beforehand, with random tokens after "
        f"{run.settings.context} others; beyond the sizes that can pay they are extrapolated.",
    )


def accuracy_table(run: Measurements) -> ReportTable:
    """Return top-1 and top-5 accuracy by distance (figures 6a and 6c)."""
    rows: list[tuple[Cell, ...]] = []
    for name, table in run.tables.items():
        rows.append((name, "all", *_accuracies(table, 3)))
        if table.accuracy_at_start is not None:
            rows.append((name, f"first {STARTING_PLACES}", *_accuracies(table, 3, at_start=True)))
    for name, table in PAPER_TABLES.items():
        rows.append((f"{name}, the authors' trees", "all", *_accuracies(table, 1), *(None,) * 4))
    return ReportTable(
        "accuracy",
        "Accuracy by distance on held-out prompts (figures 6a and 6c)",
        columns(f"Weights | Places | {_accuracy_header(3)}"),
        tuple(rows),
        f"Share of places where the token is among the first k. The paper counts the first "
        f"{STARTING_PLACES} tokens of an answer.",
    )


def variants_table(run: Measurements) -> ReportTable:
    """Return the accuracy of trained variants (tables 2 to 8)."""
    rows = []
    kinds = variants(run.settings.many)
    for name, found in run.variants.items():
        shares = [_accuracies(each.table, 2, at_start=True) for each in found]
        firsts = [each[0] or 0.0 for each in shares]
        anywhere = fmean(_accuracies(each.table, 1)[0] or 0.0 for each in found)
        rows.append(
            (name, kinds[name].place, float(len(found[0].losses)),
             *(fmean(share or 0.0 for share in column) for column in zip(*shares, strict=True)),
             f"{min(firsts):.3f} to {max(firsts):.3f}", anywhere,
             *(kinds[name].paper or (None,) * 4))
        )  # fmt: skip
    source = next(iter(run.variants.values()))[0].table.source
    return ReportTable(
        "variants",
        "Variants of prompt tokens (tables 2 to 8)",
        columns(
            f"Variant | In the paper | Steps :.0f | {_accuracy_header(2)} | @1 Top-1 by seed | "
            f"all places: @1 Top-1 :.3f | {_accuracy_header(2, 'Paper: ')}"
        ),
        tuple(rows),
        f"Accuracy of the first {STARTING_PLACES} tokens of a thread, as in the paper, mean of "
        f"{run.settings.seeds} seeds. Measured on {source}. The paper's values are of Vicuna-7B on "
        f"Alpaca, with 100 EPTs where these have {run.settings.many}: only their order can be "
        "compared.",
    )


def _accuracy_header(distances: int, before: str = "") -> str:
    return " | ".join(
        f"{before}@{distance} Top-{top} :.3f"
        for distance in range(1, distances + 1)
        for top in (1, _TOP)
    )


def _accuracies(
    table: AcceptanceTable, distances: int, *, at_start: bool = False
) -> list[float | None]:
    """Return the top-1 and top-5 accuracy of distances from 1 on."""
    shares = (table.accuracy_at_start if at_start else None) or table.accuracy or table.top_k()
    return [
        shares[distance][min(top, table.num_ranks) - 1] if distance < len(shares) else None
        for distance in range(distances)
        for top in (1, _TOP)
    ]


def answers_on_gpu(run: Measurements) -> ReportTable:
    """Return the predicted speed-up of each decoder on a GPU for the answers of this run."""
    vanilla = run.answers[VANILLA]
    live = [{rows: part.passes for rows, part in answer.live.items()} for answer in vanilla]
    sequential = sum(answer.text_tokens + answer.ended for answer in vanilla)
    rows = []
    for name, published in PAPER_TABLES.items():
        for gpu in _GPUS:
            model = paper_model(name)
            for source, table, medusa_length in (
                (f"{name}'s", published, MEDUSA_LENGTH[name]),
                ("this model's", run.prompts.table, None),
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
        columns("Model and GPU | Acceptance | " + " | ".join(f"{n} :.2f" for n in _PREDICTED)),
        tuple(rows),
        f"One answer at a time, {run.settings.context} tokens of context, from the live threads of "
        "vanilla_apar's passes; plain has to write the same text in one thread. Medusa has table "
        "1's tree of 63 and its tokens per step at any number of rows.",
    )


# ---- figures -----------------------------------------------------------------------------------


def accuracy_figure(run: Measurements) -> Figure:
    """Return accumulated accuracy by rank for prompt tokens and Medusa heads (figure 6a)."""

    def draw(panel: Axes) -> None:
        for (name, table), style in zip(run.tables.items(), ("-", "--", ":"), strict=False):
            for distance, sums in enumerate(table.accuracy or table.top_k(), start=1):
                ranks, colour = range(1, len(sums) + 1), RUN_COLOURS[distance - 1]
                panel.plot(ranks, sums, style, color=colour, label=f"{name} @{distance}")
        panel.set(ylim=(0, 1.02))

    return figure(_FIGURE, ("Accuracy of guesses by distance", "Top-k", "Accuracy", draw))


def memory_figure() -> Figure:
    """Return the bytes beside each model's weights (figure 7), on a logarithmic axis."""
    rows = memory_table().rows[::-1]

    def draw(panel: Axes) -> None:
        panel.barh([str(row[0]) for row in rows], [float(row[1] or 0) for row in rows])
        panel.set_xscale("log")

    return figure(_FIGURE, ("Memory beside the model's weights, counted", "Bytes", "", draw))


def tree_size_figure(run: Measurements) -> Figure:
    """Return tokens per pass by tree size: predicted lines, measured points (figure 8a)."""
    sizes = (4, 6, 8, 12, 16, 24, 32, 48, 64)
    prompts, seed = run.prompts, run.settings.seed
    trees = [compared_trees(prompts.table, size, prompts.ensemble, seed) for size in sizes]

    def draw(panel: Axes) -> None:
        for colour, kind in zip(RUN_COLOURS, _TREE_KINDS, strict=False):
            lengths = [each[kind].expected_length() for each in trees]
            # The paper's tree often is the optimal one.
            style = "--" if kind == "dynamic" else "-"
            panel.plot(sizes, lengths, style, color=colour, label=f"{kind}, predicted")
            for size in run.settings.tree_sizes:
                length, low, high = length_interval(run.answers[f"{PPD}, {kind}, {size}"])
                panel.errorbar(
                    [size], [length], yerr=[[length - low], [high - length]], fmt="o", color=colour
                )
        if run.medusa is not None:
            medusa = [optimal_tree(run.medusa.table, size, 0).expected_length() for size in sizes]
            panel.plot(sizes, medusa, ":", color="#3d4852", label="Medusa heads, predicted")

    title = "Tree size: predicted, and measured with 95% intervals"
    return figure(_FIGURE, (title, "Inputs of a row in a pass", "Tokens per pass", draw))


def gpu_sizes_figure(context: int) -> Figure:
    """Return the predicted speed-up of Vicuna-7B by tree size on several GPUs (figure 8b)."""

    def draw(panel: Axes) -> None:
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

    axes = ("Inputs of a row in a pass", "Speed-up over no speculation")
    return figure(_FIGURE, ("Vicuna-7B by tree size, predicted", *axes, draw))


def losses_figure(run: Measurements) -> Figure:
    """Return the training loss with one EPT and with several (figure 9)."""

    def draw(panel: Axes) -> None:
        for colour, name in zip(RUN_COLOURS, ("1 EPT", f"{run.settings.many} EPTs"), strict=False):
            losses = run.variants[name][0].losses
            panel.plot(range(1, len(losses) + 1), losses, color=colour, label=name)

    return figure(_FIGURE, ("Training loss of prompt tokens", "Step", "Training loss", draw))


def live_rows_figure(run: Measurements) -> Figure:
    """Return the speed-up of speculation by live rows, measured and predicted."""
    context = run.settings.context

    def draw(panel: Axes) -> None:
        for colour, gpu in zip(RUN_COLOURS, _GPUS, strict=False):
            costs = step_costs(find_model("llama-7b"), find_gpu(gpu))
            gains = [predict_best(costs, VICUNA_7B, n, context).speedup for n in FAMILY_ROWS]
            panel.plot(FAMILY_ROWS, gains, color=colour, label=f"Vicuna-7B on {gpu}, predicted")
        here = [run.best(run.prompts, rows)[1] for rows in FAMILY_ROWS]
        panel.plot(FAMILY_ROWS, here, color=RUN_COLOURS[2], label="this machine, predicted")
        for name, marker in ((PPD_APAR, "o"), (f"{PPD_APAR}, {run.settings.middle_size}", "s")):
            known = {high: run.gain(name, low, high) for low, high in _ROW_BINS}
            points = {rows: gain for rows, gain in known.items() if gain is not None}
            label = f"{name} here, measured"
            panel.plot([*points], [*points.values()], marker, color=RUN_COLOURS[3], label=label)
        panel.axhline(1.0, color="#9aa5b1", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(FAMILY_ROWS, [str(rows) for rows in FAMILY_ROWS])

    axes = ("Live rows", "Speed-up over no speculation")
    return figure(_FIGURE, ("Where speculation stops paying", *axes, draw))
