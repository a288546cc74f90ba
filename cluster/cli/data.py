"""`apar data`: generates chats, and turns chats into training examples with forks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from apar_core.errors import DataError
from apar_core.installation import has_compiler
from cluster.cli.evaluate import endpoint_settings
from cluster.cli.options import (
    MODEL_HELP,
    RESUMABLE,
    Concurrency,
    LeastParagraphForks,
    LeastParagraphs,
    ModelName,
    PointsWithoutColon,
    Retries,
    Seed,
    TargetKeyEnv,
    UnorderedLists,
    finite,
    out_option,
    preset_names,
    wrong_value,
)
from cluster.cli.terminal import Rate, clear_errors, fail, stage_progress
from deployments.config.model import PRESETS, ModelConfig, model_path

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.offline.data.prepare import PreparationReport, PreparationSettings
    from apar_core.offline.evaluation.chat_endpoint import EndpointSettings
    from apar_core.offline.generation.generate import GenerationReport, TextCounts
    from apar_core.offline.training.trained_formats import ContextFit

data = typer.Typer(
    no_args_is_help=True, help="Generate chats, and turn chats into training examples with forks."
)

INTERRUPTED_EXIT_CODE = 130
DEFAULT_NUM_QUESTIONS = 3000
_DEFAULT_MODEL = "smollm2-135m"
# More rows at once gain nothing on a CPU, and each of them needs KV cache.
_CPU_ROWS = 128
# Number of questions from which compiling, which takes a minute on two cores, pays: 415 tokens/s
# instead of 328.
_COMPILED_FROM = 500
_EXAMPLE_WIDTH = 60


@data.command(no_args_is_help=True)
def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT", help="Files, or folders with .json and .jsonl files.", exists=True
        ),
    ],
    out: Annotated[Path, out_option("data-prepare", help="Output folder for examples and report.")],
    structured: Annotated[
        int, typer.Option(min=0, help="Number of structured examples to sample; 0 keeps all.")
    ] = 16_000,
    unstructured: Annotated[
        int, typer.Option(min=0, help="Number of unstructured examples to sample; 0 keeps all.")
    ] = 9_000,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Model to train: {MODEL_HELP} Examples lose their oldest turns until they fit "
            "its context; longer ones are left out before sampling.",
            autocompletion=preset_names,
        ),
    ] = None,
    context_length: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --model: leave out examples longer than this with their prompt (tokens).",
        ),
    ] = 2048,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="With --model: Jinja chat template (default: the model's); give the same to "
            "`apar train`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    parallel_format: Annotated[
        Literal["apar", "threadweaver"],
        typer.Option(
            "--format",
            help="With --model: format of the answers; give the same to `apar train`. The files "
            "are the same, but examples of threadweaver are longer.",
        ),
    ] = "apar",
    hold_out: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of queries to keep out of training, with their answers, in "
            "held_out.jsonl: for `apar evaluate --prompts` or --replay, and --trace elsewhere. "
            "They are first questions whose answers fork, as in the paper's test set.",
        ),
    ] = 0,
    hold_out_mixed: Annotated[
        bool,
        typer.Option(
            "--hold-out-mixed",
            help="Hold out first questions of all answers in their natural mix, as "
            "`apar evaluate forks` needs.",
        ),
    ] = False,
    seed: Seed = 0,
    question_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="FastChat's questions for the FastChat answers among the inputs. Repeatable.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    unordered_lists: UnorderedLists = False,
    points_without_colon: PointsWithoutColon = False,
    least_paragraphs: LeastParagraphs = 2,
    least_paragraph_forks: LeastParagraphForks = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first item that cannot be used.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")
    ] = False,
) -> None:
    """Turn chats into structured and unstructured examples by the rules of the APAR paper.

    Reads ShareGPT ([i]conversations[/i]), OpenAI ([i]messages[/i]), FastChat answers (with
    --question-file) and traces ([i]prompt[/i], [i]response[/i]), as JSON lines or one JSON array.
    Writes structured.jsonl, unstructured.jsonl and report.json; the report counts unusable items.
    Example:

    [bold]apar data prepare sharegpt.json --model lmsys/vicuna-7b-v1.3 --out out/data[/bold]
    """
    if hold_out_mixed and not hold_out:
        raise wrong_value("--hold-out-mixed", "has no effect without --hold-out")
    from apar_core.offline.data.prepare import PreparationSettings
    from apar_core.offline.data.structure import StructureRules

    settings = PreparationSettings(
        structured=structured or None,
        unstructured=unstructured or None,
        hold_out=hold_out,
        hold_out_mixed=hold_out_mixed,
        seed=seed,
        strict=strict,
        overwrite=overwrite,
        rules=StructureRules(
            unordered_lists=unordered_lists,
            points_without_colon=points_without_colon,
            least_paragraphs=least_paragraphs,
            least_paragraph_forks=least_paragraph_forks,
        ),
        questions=tuple(question_file or ()),
    )
    try:
        with clear_errors():
            fit = (
                None
                if model is None
                else _context_fit(model, context_length, chat_template, parallel_format)
            )
            report = _prepare_with_progress(inputs, out, settings, workers, fit)
    except KeyboardInterrupt as error:
        typer.echo("Interrupted; nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from error
    if not _print_report(report, out):
        raise typer.Exit(1)


def _context_fit(
    model: str, context_length: int, chat_template: Path | None, format_name: str
) -> ContextFit:
    # Importing transformers takes seconds.
    from apar_core.offline.training.trained_formats import ContextFit

    fit = ContextFit(model_path(model), context_length, chat_template, format_name)
    fit.check()
    return fit


def _prepare_with_progress(
    inputs: list[Path],
    out: Path,
    settings: PreparationSettings,
    workers: int,
    fit: ContextFit | None,
) -> PreparationReport:
    from apar_core.offline.data.prepare import prepare as prepare_examples
    from apar_core.offline.data.sources import source_files

    total = sum(path.stat().st_size for path in source_files(inputs))
    console = Console(stderr=True)
    if not console.is_terminal:
        log = _ReadingLog(console, total)
        return prepare_examples(inputs, out, settings, workers, log.add, fit)
    with Progress(
        TextColumn("[bold]reading chats"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=total)
        return prepare_examples(
            inputs, out, settings, workers, lambda num_bytes: progress.advance(task, num_bytes), fit
        )


class _ReadingLog:
    """Progress as plain lines, at most one per interval."""

    def __init__(self, console: Console, num_bytes: int, interval_s: float = 10.0) -> None:
        self._console = console
        self._num_bytes = num_bytes
        self._num_read = 0
        self._interval_s = interval_s
        self._logged_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count read bytes, and print a line if one is due."""
        self._num_read += num_bytes
        now = time.monotonic()
        if now - self._logged_at >= self._interval_s:
            self._logged_at = now
            self._console.print(
                f"read {self._num_read / 1e6:.0f} of {self._num_bytes / 1e6:.0f} MB",
                highlight=False,
            )


def _print_report(report: PreparationReport, out: Path) -> bool:
    """Print the report; return whether every file was read to its end and an answer was usable."""
    from apar_core.offline.data.sources import DAMAGED_ARRAY
    from apar_core.offline.evaluation.paper_figures import LISTED_ANSWERS, LISTED_CHATS

    console = Console()
    table = Table("", "answers", "share", title=f"{report.num_items} items read")
    for kind, count in report.kinds.most_common():
        table.add_row(kind, str(count), f"{count / report.num_answers:.1%}")
    for reason, count in report.unstructured_reasons.most_common():
        table.add_row(f"  unstructured: {reason}", str(count), f"{count / report.num_answers:.1%}")
    console.print(table)
    if report.num_answers:
        listed = report.num_listed_answers / report.num_answers
        chats = report.num_listed_chats / report.num_chats
        console.print(
            f"lists, ordered or not: in {listed:.1%} of the answers (the paper's ShareGPT: "
            f"{LISTED_ANSWERS:.0%}), in {report.num_listed_chats} of {report.num_chats} chats, "
            f"{chats:.1%} ({LISTED_CHATS:.0%})",
            highlight=False,
            soft_wrap=True,
        )
    if report.refusals:
        refused = Table("refused", "number", "first place")
        first = {refusal.reason: refusal for refusal in reversed(report.refusal_examples)}
        for reason, count in report.refusals.most_common():
            refused.add_row(reason, str(count), first[reason].place if reason in first else "")
        console.print(refused)
    for name, sample in (("structured", report.structured), ("unstructured", report.unstructured)):
        line = f"{name}: {sample.written} examples of {sample.found} found"
        if sample.wanted is not None and sample.found < sample.wanted:
            line += f" ({sample.wanted} wanted)"
        console.print(line, highlight=False)
    if report.held_out.wanted is not None:
        console.print(
            f"held out: {report.held_out.written} queries of {report.held_out.wanted} wanted, from "
            f"{report.held_out.found} candidates; {report.num_near_held_out} other examples share "
            "their conversation or query",
            highlight=False,
        )
    if report.context_length is None:
        console.print(
            "Without --model: examples may be longer than the model's context.", highlight=False
        )
    else:
        console.print(
            f"too long for {report.context_length} tokens: {report.num_too_long} answers",
            highlight=False,
        )
    if report.num_not_trained:
        console.print(f"not trained (weight 0): {report.num_not_trained} answers", highlight=False)
    if report.num_answers == 0:
        reason = (
            "The files contain no chats."
            if report.num_items == 0
            else "No answer could be used; see the reasons above."
        )
        console.print(f"[red]{reason} Nothing was written.[/red]")
        return False
    console.print(f"Written to [bold]{out}[/bold].", soft_wrap=True)
    damaged = [each for each in report.refusal_examples if each.reason == DAMAGED_ARRAY]
    for refusal in damaged:
        console.print(
            f"[red]{escape(refusal.place)}: {refusal.message}. What follows in this file is "
            "missing from the examples: repair the file.[/red]",
            soft_wrap=True,
        )
    return not damaged


@data.command()
def generate(
    out: Annotated[Path, out_option("data-generate", help=RESUMABLE)],
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{MODEL_HELP} By default {_DEFAULT_MODEL}.", autocompletion=preset_names
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Questions instead of sampled ones: chats, prompts or traces as JSON lines or an "
            "array, or a .txt file with one per line.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of questions to answer.",
            show_default=f"{DEFAULT_NUM_QUESTIONS}; with --prompts all",
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="System message before sampled questions, which steers what is asked. Answers "
            "are generated without it."
        ),
    ] = None,
    opened_share: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the sampled questions that begin with an opening, such as 'Give me 5'.",
            callback=finite,
            show_default="0.5",
        ),
    ] = None,
    openings: Annotated[
        Path | None,
        typer.Option(
            help="Text file with one opening per line.",
            exists=True,
            dir_okay=False,
            show_default="English ones; most ask for a list",
        ),
    ] = None,
    follow_ups: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the answered chats that go on with a second turn. Its question is the "
            "model's, too.",
            callback=finite,
            show_default="0.3; with --prompts 0",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Base URL (with /v1) of a server that answers instead of --model."),
    ] = None,
    model_name: ModelName = None,
    target_key_env: TargetKeyEnv = "APAR_API_KEY",
    concurrency: Concurrency = 32,
    retries: Retries = 5,
    max_tokens: Annotated[
        int,
        typer.Option(min=1, help="Limit on tokens per answer; longer answers are left out."),
    ] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of the answers.", callback=finite)
    ] = 0.7,
    top_p: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, help="Nucleus of the answers (top-p).", callback=finite),
    ] = 0.9,
    question_temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of sampled questions.", callback=finite)
    ] = 1.0,
    question_top_p: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, help="Nucleus of sampled questions (top-p).", callback=finite
        ),
    ] = 0.95,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="Jinja chat template (default: the model's).", exists=True, dir_okay=False
        ),
    ] = None,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="KV cache on a CPU (GiB).",
            show_default="4; 0.25 for apar-tiny",
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Let a model ask itself questions and answer them, as training data of its own.

    The model continues its chat template's text before a user's message (Magpie, arXiv 2406.08464).
    Fragments, duplicates, repetition and answers that were cut are left out. Writes chats.jsonl for
    `apar data prepare`, questions.jsonl for --prompts of other commands, and report.json with the
    reasons. Examples:

    [bold]apar data generate --model HuggingFaceTB/SmolLM2-135M-Instruct --out out/chats[/bold]

    [bold]apar data generate --prompts questions.jsonl --target http://127.0.0.1:8000/v1
    --model-name my-model --out out/chats[/bold]
    """
    # Importing transformers takes seconds, and `apar --help` must be fast.
    from apar_core.offline.generation.generate import (
        OPENINGS_FILE,
        GenerationSettings,
        generate_chats,
    )

    try:
        with clear_errors(), stage_progress(Rate()) as progress:
            endpoint = _endpoint(target, model_name, target_key_env, concurrency, retries)
            asks = prompts is None or bool(follow_ups)
            chosen = _generating_model(model, is_needed=asks or endpoint is None)
            steering = {
                "--system": system,
                "--opened-share": opened_share,
                "--openings": openings,
            }
            for name, given in steering.items():
                if given is not None and prompts is not None:
                    raise DataError(f"{name} steers sampled questions; --prompts gives other ones")
            if opened_share is None:
                # A run on given questions does not depend on it.
                opened_share = 0.5 if prompts is None else 0.0
            if follow_ups is None:
                follow_ups = 0.3 if prompts is None else 0.0
            wanted = DEFAULT_NUM_QUESTIONS if questions is None and prompts is None else questions
            configured = None if chosen is None else ModelConfig(checkpoint=chosen)
            template = None if configured is None else configured.preset.engine.get("chat_template")
            settings = GenerationSettings(
                model=None if chosen is None else model_path(chosen),
                model_name=configured.public_name if configured else str(model_name),
                chat_template=chat_template or (None if template is None else Path(template)),
                prompts=prompts,
                num_questions=wanted,
                system=system,
                opened_share=opened_share,
                openings=openings or OPENINGS_FILE,
                follow_up_share=follow_ups,
                question_temperature=question_temperature,
                question_top_p=question_top_p,
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                seed=seed,
            )

            def start(context_length: int) -> OfflineEngine:
                return _start_generator(str(chosen), context_length, kv_cache_gib, wanted or 0)

            report = generate_chats(settings, out, start, progress, endpoint)
    except KeyboardInterrupt as error:
        typer.echo(f"Interrupted; the same command with --out {out} continues the run.", err=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from error
    _print_generated(report, out)


def _generating_model(model: str | None, *, is_needed: bool) -> str | None:
    """Return the model that generates in this process, or None."""
    if model is not None or not is_needed:
        return model
    if _DEFAULT_MODEL not in PRESETS:
        raise DataError("no model: give --model, or --prompts with --target")
    return _DEFAULT_MODEL


def _endpoint(
    target: str | None, model_name: str | None, key_env: str, concurrency: int, retries: int
) -> EndpointSettings | None:
    if target is None and model_name is not None:
        raise DataError(f"--model-name {model_name} needs --target")
    if target is None:
        return None
    if model_name is None:
        raise DataError(f"--target {target} also needs --model-name")
    return endpoint_settings(target, model_name, key_env, concurrency, retries)


def _start_generator(
    model: str, context_length: int, kv_cache_gib: float | None, num_questions: int
) -> OfflineEngine:
    """Start an engine that is set up for throughput."""
    import torch

    from cluster.cli.generate import start_engine

    arguments: dict[str, Any] = {"max_model_len": context_length, "use_tqdm_on_load": False}
    if not torch.cuda.is_available():
        settings = ModelConfig(checkpoint=model, kv_cache_gib=kv_cache_gib)
        arguments |= {
            "max_num_seqs": _CPU_ROWS,
            "kv_cache_memory_bytes": settings.kv_cache_bytes,
        }
        if num_questions < _COMPILED_FROM or not has_compiler():
            arguments["enforce_eager"] = True
    try:
        return start_engine(model, **arguments)
    # vLLM reports unusable models with a ValueError.
    except ValueError as error:
        raise DataError(f"{model}: {error}") from error


def _print_generated(report: GenerationReport, out: Path) -> None:
    """Print what was generated, kept and rejected; exit with 1 if requests failed."""
    console = Console()
    parts = {
        "questions": report.questions,
        "questions of second turns": report.follow_ups,
        "answers": report.answers,
    }
    for name, counts in parts.items():
        if counts.generated:
            console.print(_rejections(name, counts))
    kinds = ", ".join(f"{kind} {count}" for kind, count in report.kinds.most_common())
    console.print(f"kinds of the kept answers: {kinds or 'none'}", highlight=False)
    console.print(
        f"Written to [bold]{escape(str(out))}[/bold]. Next: apar data prepare "
        f"{escape(str(out / 'chats.jsonl'))}",
        soft_wrap=True,
        highlight=False,
    )
    if report.num_failed:
        reasons = "\n".join(report.failures)
        fail(
            f"{report.num_failed} requests failed; run the same command again to continue:\n"
            f"{reasons}"
        )


def _rejections(name: str, counts: TextCounts) -> Table:
    table = Table(name, "number", "first example", title_justify="left")
    table.add_row("in all", str(counts.generated), "")
    table.add_row("kept", str(counts.kept), "")
    for reason, rejection in sorted(counts.rejected.items(), key=lambda item: -item[1].count):
        first = " ".join(rejection.examples[0].split())
        table.add_row(reason, str(rejection.count), escape(first[:_EXAMPLE_WIDTH]))
    return table
