"""`apar evaluate`: forks, speed, acceptance of guesses, answer quality, and benchmark files."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from apar_core.errors import EvaluationError
from cluster.cli.options import (
    DECODERS,
    RESUMABLE,
    BenchmarkFiles,
    CommaList,
    Concurrency,
    Device,
    Dtype,
    LeastParagraphForks,
    LeastParagraphs,
    MaxTokens,
    MedusaHeads,
    Model,
    ModelName,
    PassTimes,
    PointsWithoutColon,
    Prompts,
    PromptTokens,
    Retries,
    Seed,
    TargetKeyEnv,
    UnorderedLists,
    finite,
    list_option,
    out_option,
)
from cluster.cli.terminal import clear_errors, print_table, show_report, stage_progress
from deployments.config import ConfigError
from deployments.config.model import DEFAULT_MODEL, ModelConfig, model_path

if TYPE_CHECKING:
    from apar_core.offline.evaluation.chat_endpoint import EndpointSettings
    from apar_core.offline.evaluation.quality import QualityPlan
    from cluster.lab.experiments.fork_engine import ReplayingForkEngine

_NUM_SUMMARY_TABLES = 3
_SHOWN_FAILURES = 5
# Of a replica's environment, what an engine in this process reads too.
_ENGINE_VARIABLES = ("TORCH_", "VLLM_CPU_", "VLLM_NO_")

evaluate = typer.Typer(
    no_args_is_help=True, help="Measure speed and quality as the APAR paper does."
)

Answers = Annotated[
    int | None, typer.Option(min=1, help="Number of answers (default: one per question).")
]


@evaluate.command()
def speed(
    out: Annotated[Path, out_option("evaluate-speed", help=RESUMABLE)],
    model: Model = DEFAULT_MODEL,
    decoders: Annotated[
        CommaList[str],
        list_option(
            help=f"Decoders to measure: {', '.join(DECODERS)}.",
            choices=DECODERS,
            default="vanilla_apar",
        ),
    ] = CommaList(("vanilla_apar",)),
    against: Annotated[
        str, typer.Option(help="Decoder to compare with in the same run, or none.")
    ] = "plain",
    against_model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint for the --against decoder, such as the original model, which needs "
            "no control tokens (default: that of --model)."
        ),
    ] = None,
    prompts: Prompts = "vicuna-bench",
    replay: Annotated[
        list[Path] | None,
        typer.Option(
            help="Recorded answers whose tokens are forced instead of generated: FastChat's "
            "answer file or a trace. Repeat it for several models.",
            dir_okay=False,
        ),
    ] = None,
    count_only: Annotated[
        bool,
        typer.Option("--count-only", help="With --replay: only count steps; runs no model."),
    ] = False,
    random_weights: Annotated[
        str | None,
        typer.Option(
            help="With --replay: use random weights of this size: tiny, llama-7b, llama-13b or a "
            "config.json."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="With --count-only or --random-weights: tokenizer of the recorded text: llama, "
            "a .model file or a name."
        ),
    ] = None,
    medusa_heads: MedusaHeads = None,
    prompt_tokens: PromptTokens = None,
    pass_times: PassTimes = None,
    benchmark_files: BenchmarkFiles = None,
    answers: Answers = None,
    max_tokens: MaxTokens = 1024,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure threads, cached and attended tokens, steps and speed of one answer at a time.

    The report has the paper's tables 1, 2 and 7 to 16 and figures 4 and 6. An interrupted run
    continues with the same command and --out. Examples:

    [bold]apar evaluate speed --decoders vanilla_apar,medusa_apar --answers 10[/bold]

    [bold]apar evaluate speed --replay ANSWERS.jsonl --count-only[/bold]
    """
    # Importing torch takes seconds, and `apar --help` must be fast.
    from apar_core.offline.evaluation.speed_run import SpeedSettings, run_speed
    from apar_core.reporting import write_report

    with clear_errors():
        settings = SpeedSettings(
            model=model_path(model),
            model_name=model,
            decoders=tuple(decoders),
            baseline=None if against == "none" else against,
            baseline_model=None if against_model is None else model_path(against_model),
            baseline_model_name=against_model,
            prompts=prompts,
            replay=tuple(replay or ()),
            count_only=count_only,
            random_weights=random_weights,
            tokenizer=tokenizer,
            medusa_heads=medusa_heads,
            prompt_tokens=prompt_tokens,
            pass_times=pass_times,
            questions=benchmark_files,
            limit=answers,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
        )
        with stage_progress() as progress:
            report = run_speed(settings, out, progress)
        page = write_report(report, out)
        console = Console()
        for table in report.tables[:_NUM_SUMMARY_TABLES]:
            print_table(table)
        console.print(f"Report: [bold]{page}[/bold]", soft_wrap=True)


@evaluate.command()
def forks(
    out: Annotated[Path, out_option("evaluate-forks", help=RESUMABLE)],
    model: Model = DEFAULT_MODEL,
    base: Annotated[
        str | None,
        typer.Option(
            help="The original model, from which --model was made: compare with its own answers, "
            "and measure the log-loss of forked answers under it."
        ),
    ] = None,
    prompts: Prompts = "vicuna-bench",
    benchmark_files: BenchmarkFiles = None,
    answers: Answers = None,
    max_tokens: MaxTokens = 1024,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, help="Sampling temperature of the answers; 0 is greedy.", callback=finite
        ),
    ] = 0.0,
    unordered_lists: UnorderedLists = False,
    points_without_colon: PointsWithoutColon = False,
    least_paragraphs: LeastParagraphs = 2,
    least_paragraph_forks: LeastParagraphForks = 1,
    seed: Seed = 0,
    requests: Annotated[
        CommaList[int],
        list_option(
            help="Concurrent requests of the speed runs.", item=int, minimum=1, default="1,8,32"
        ),
    ] = CommaList((1, 8, 32)),
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Repeats of each speed run; three or more give intervals."),
    ] = 5,
) -> None:
    """Measure where a model forks, how good forked answers are, and how much faster they come.

    Forks are compared with the rules of the paper's appendix B: give the same options for them
    as to `apar data prepare`. Prompts with recorded answers, such as held_out.jsonl of
    `apar data prepare --hold-out-mixed`, show the model's choices within these too. Speed is
    that of vLLM with the same answers, forked and in one thread. An interrupted run continues with
    the same command and --out. Examples:

    [bold]apar evaluate forks --prompts held-out --answers 40[/bold]

    [bold]apar evaluate forks --model out/my-model-forks --base my-model --prompts
    out/data/held_out.jsonl[/bold]
    """
    # Importing torch takes seconds, and `apar --help` must be fast.
    from apar_core.offline.data.structure import StructureRules
    from apar_core.offline.evaluation.fork_report import fork_report
    from apar_core.offline.evaluation.forks import ForkEvaluationSettings, run_forks

    with clear_errors():
        _check_checkpoints(model, base)
        settings = ForkEvaluationSettings(
            model=model_path(model),
            model_name=model,
            base=None if base is None else model_path(base),
            base_name=base,
            prompts=prompts,
            questions=benchmark_files,
            limit=answers,
            max_tokens=max_tokens,
            temperature=temperature,
            rules=StructureRules(
                unordered_lists=unordered_lists,
                points_without_colon=points_without_colon,
                least_paragraphs=least_paragraphs,
                least_paragraph_forks=least_paragraph_forks,
            ),
            seed=seed,
            requests=tuple(dict.fromkeys(requests)),
            repeats=repeats,
        )
        names = {settings.model: model} | ({} if base is None else {model_path(base): base})
        with stage_progress() as progress:
            results = run_forks(settings, out, lambda path: _fork_engine(names[path]), progress)
        show_report(fork_report(results), out)


def _check_checkpoints(model: str, base: str | None) -> None:
    """Raise EvaluationError, naming the option, for a model that is not there."""
    for option, name in (("--model", model), ("--base", base)):
        if name is not None:
            try:
                ModelConfig(checkpoint=name).check_checkpoint()
            except ConfigError as error:
                raise EvaluationError(f"{option} {name}: {error}") from error


def _fork_engine(name: str) -> ReplayingForkEngine:
    """Start an engine with the arguments of `apar serve`, that can also replay answers."""
    import torch

    from deployments.app.application import engine_arguments, replica_environment

    # Each output at once, which a run's latencies need.
    config = ModelConfig(checkpoint=name, replay=True, coalesce_s=0.0)
    on_gpu = torch.cuda.is_available()
    environment = replica_environment(config, on_gpu=on_gpu)
    for variable, value in environment.items():
        if variable.startswith(_ENGINE_VARIABLES):
            os.environ.setdefault(variable, value)
    if (threads := environment.get("OMP_NUM_THREADS")) is not None:
        # PyTorch, which is imported, would not read the variable any more.
        torch.set_num_threads(int(threads))
    # Imports vLLM, which takes seconds.
    from apar_core.engine.offline_engine import OfflineEngine
    from cluster.lab.experiments.fork_engine import ReplayingForkEngine

    try:
        # vLLM's own bars would break those of the run.
        arguments = engine_arguments(config, on_gpu=on_gpu) | {"use_tqdm_on_load": False}
        return ReplayingForkEngine(OfflineEngine(config.preset.path, **arguments))
    # vLLM reports unusable models with a ValueError.
    except ValueError as error:
        raise EvaluationError(f"{name}: {error}") from error


@evaluate.command()
def acceptance(
    out: Annotated[Path, out_option("evaluate-acceptance")],
    model: Model = DEFAULT_MODEL,
    prompt_tokens: PromptTokens = None,
    medusa_heads: MedusaHeads = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure again, and replace the tables beside the weights. A missing table is "
            "always measured.",
        ),
    ] = False,
    prompts: Prompts = "held-out",
    benchmark_files: BenchmarkFiles = None,
    answers: Answers = None,
    max_tokens: MaxTokens = 1024,
    device: Device = "auto",
) -> None:
    """Show how often prompt tokens and Medusa heads guess right, and what trees gain from it.

    The table has the acceptance probability by distance and rank. The report compares prompt
    tokens with Medusa heads, and optimal, dynamic, static and random trees of one size. Examples:

    [bold]apar evaluate acceptance[/bold]

    [bold]apar evaluate acceptance --model out/apar-7b --prompt-tokens out/prompts --measure[/bold]
    """
    # Importing torch takes seconds, and `apar --help` must be fast.
    from apar_core.offline.evaluation.acceptance_report import run_acceptance

    prompt_tokens, medusa_heads = _weights(model, prompt_tokens, medusa_heads)
    with clear_errors():
        report = run_acceptance(
            model_path(model),
            model,
            prompt_tokens=prompt_tokens,
            medusa_heads=medusa_heads,
            measure=measure,
            prompts=prompts,
            questions=benchmark_files,
            limit=answers,
            max_tokens=max_tokens,
            device=device,
        )
        show_report(report, out, hidden=("probabilities",))


@evaluate.command()
def passes(
    out: Annotated[Path, out_option("evaluate-passes")],
    model: Model = DEFAULT_MODEL,
    prompt_tokens: PromptTokens = None,
    medusa_heads: MedusaHeads = None,
    context: Annotated[int, typer.Option(min=1, help="Cached tokens of each row.")] = 512,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds of a few passes at each size; the median counts.")
    ] = 3,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure a decoder's passes by live rows and inputs, and size candidate trees for this device.

    Writes passes.json, which --pass-times of other commands reads. Example:

    [bold]apar evaluate passes --out out/passes[/bold]
    """
    # Importing torch takes seconds, and `apar --help` must be fast.
    from apar_core.offline.evaluation.passes_report import run_passes

    prompt_tokens, medusa_heads = _weights(model, prompt_tokens, medusa_heads)
    with clear_errors():
        with stage_progress() as progress:
            report = run_passes(
                out,
                model_path(model),
                model,
                progress,
                prompt_tokens=prompt_tokens,
                medusa_heads=medusa_heads,
                context=context,
                repeats=repeats,
                device=device,
                dtype=dtype,
            )
        show_report(report, out)


def _weights(
    model: str, prompt_tokens: Path | None, medusa_heads: Path | None
) -> tuple[Path | None, Path | None]:
    """Return the folders as given; those that are shipped for the model if none was given."""
    from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS

    if prompt_tokens is None and medusa_heads is None:
        return SHIPPED_PROMPTS.get(model), SHIPPED_HEADS.get(model)
    return prompt_tokens, medusa_heads


@evaluate.command()
def ppd(
    out: Annotated[Path, out_option("evaluate-ppd", help=RESUMABLE)],
    model: Model = DEFAULT_MODEL,
    prompt_tokens: PromptTokens = None,
    medusa_heads: MedusaHeads = None,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint of a smaller model that guesses for --model.", file_okay=False
        ),
    ] = None,
    draft_prompts: Annotated[
        Path | None,
        typer.Option(help="Folder with prompt tokens of --draft-model.", file_okay=False),
    ] = None,
    prompts: Prompts = "held-out",
    benchmark_files: BenchmarkFiles = None,
    answers: Answers = None,
    max_tokens: MaxTokens = 512,
    decoders: Annotated[
        CommaList[str],
        list_option(
            help="Decoders to compare with plain and vanilla_apar (default: all for which there "
            f"are weights): {', '.join(DECODERS)}. More can be added to --out later; their speed "
            "is then compared with answers of the earlier run.",
            choices=DECODERS,
            default=False,
        ),
    ] = CommaList(DECODERS),
    tree_sizes: Annotated[
        CommaList[int],
        list_option(
            help="Inputs of a row in a pass, for comparing trees.",
            item=int,
            minimum=2,
            default="8,16,32",
        ),
    ] = CommaList((8, 16, 32)),
    context: Annotated[
        int, typer.Option(min=1, help="Context for pass times and predictions (tokens).")
    ] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.", callback=finite)
    ] = 0.0,
    acceptance: Annotated[
        Literal["typical", "exact"],
        typer.Option(
            help="At a temperature, accept likely candidates as the paper does (typical), or only "
            "those that equal the token drawn (exact), so that no text changes."
        ),
    ] = "typical",
    repeats: Annotated[
        int, typer.Option(min=1, help="Measurements of each answer, all answers in turn.")
    ] = 1,
    train_steps: Annotated[
        int,
        typer.Option(
            min=0, help="Train the variants of tables 2 to 8 for so many steps (0: none)."
        ),
    ] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="With --train-steps: output folder of `apar data prepare`; apar-tiny needs none."
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="With --data: recipe that the variants change.")
    ] = "ppd-small",
    many: Annotated[
        int, typer.Option(min=2, help="EPTs of the variants where the paper has 100.")
    ] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds that each variant is trained with.")] = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Compare Parallel Prompt Decoding with Medusa heads and plain decoding, alone and with forks.

    The report has tables 1 to 8 and figures 6 to 9 of the PPD paper. It adds the speed-up of
    speculation by live rows, measured here and predicted for GPUs. apar-tiny and smollm2-135m have
    prompt tokens of their own; another model needs --prompt-tokens. Decoders with forks are
    compared if the model has control tokens. An interrupted run continues with the same command and
    --out. Examples:

    [bold]apar evaluate ppd --answers 20 --out out/ppd[/bold]

    [bold]apar evaluate ppd --model smollm2-135m --prompts mt-bench --repeats 3 --out out/ppd[/bold]
    """
    from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
    from apar_core.offline.evaluation.ppd import run_ppd
    from apar_core.offline.evaluation.ppd_measurements import PpdSettings

    with clear_errors():
        prompt_tokens = prompt_tokens or SHIPPED_PROMPTS.get(model)
        medusa_heads = medusa_heads or SHIPPED_HEADS.get(model)
        if prompt_tokens is None:
            raise EvaluationError(
                f"{model} needs --prompt-tokens (`apar train-prompts` makes them)"
            )
        settings = PpdSettings(
            model=model_path(model),
            model_name=model,
            prompt_tokens=prompt_tokens,
            medusa_heads=medusa_heads,
            draft_model=draft_model,
            draft_prompts=draft_prompts,
            prompts=prompts,
            questions=benchmark_files,
            limit=answers,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            decoders=tuple(decoders),
            tree_sizes=tuple(tree_sizes),
            context=context,
            temperature=temperature,
            acceptance=acceptance,
            repeats=repeats,
            train_steps=train_steps,
            data=data,
            recipe=recipe,
            many=many,
            seeds=seeds,
        )
        with stage_progress() as progress:
            report = run_ppd(settings, out, progress)
        show_report(report, out, hidden=("memory", "chain-in-vllm", "gpu-live-rows"))


@evaluate.command(no_args_is_help=True)
def quality(
    judge: Annotated[
        str, typer.Option(help="Base URL (with /v1) of the judge's OpenAI-compatible API.")
    ],
    judge_model: Annotated[str, typer.Option(help="Name of the judge's model.")],
    out: Annotated[Path, out_option("evaluate-quality", help=RESUMABLE)],
    prompts: Prompts = "mt-bench",
    answer_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="Answers to rate, in FastChat's format. Repeat it for several models.",
            dir_okay=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Base URL (with /v1) of a server that answers the questions first."),
    ] = None,
    model_name: ModelName = None,
    benchmark_files: BenchmarkFiles = None,
    answers: Answers = None,
    judge_key_env: Annotated[
        str, typer.Option(help="Environment variable with the judge's API key.")
    ] = "OPENAI_API_KEY",
    target_key_env: TargetKeyEnv = "APAR_API_KEY",
    concurrency: Concurrency = 8,
    retries: Retries = 5,
    rating_attempts: Annotated[
        int, typer.Option(min=1, help="Requests for a judgment until it has a rating.")
    ] = 3,
    max_tokens: MaxTokens = 1024,
    max_judgment_tokens: Annotated[
        int, typer.Option(min=0, help="Limit on tokens per judgment; 0 for no limit.")
    ] = 2048,
    judge_token_field: Annotated[
        str,
        typer.Option(
            help="Request field for --max-judgment-tokens: max_tokens, or max_completion_tokens "
            "for reasoning models."
        ),
    ] = "max_tokens",
    judge_temperature: Annotated[
        str,
        typer.Option(
            help="Temperature of the judge. A retry for a rating uses 0.7 instead of 0. With "
            "`none` the field is not sent, for reasoning models."
        ),
    ] = "0",
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Sampling temperature of the answers (default: FastChat's per category).",
            callback=finite,
        ),
    ] = None,
    prompt_price: Annotated[
        float | None,
        typer.Option(min=0.0, help="Price per million prompt tokens of the judge."),
    ] = None,
    completion_price: Annotated[
        float | None,
        typer.Option(min=0.0, help="Price per million completion tokens of the judge."),
    ] = None,
) -> None:
    """Let a judge model rate answers from 1 to 10, with FastChat's single-answer grading.

    Answers come from files, from a server, or both. An interrupted run continues with the same
    command and --out. Example:

    [bold]apar evaluate quality --judge https://api.openai.com/v1 --judge-model gpt-4 --target
    http://127.0.0.1:8000/v1 --model-name apar-7b[/bold]
    """
    from apar_core.offline.evaluation.prompt_sets import load_prompts
    from apar_core.offline.evaluation.quality import (
        JudgmentRequest,
        QualityPlan,
        TokenPrices,
        load_judge_prompts,
    )

    with clear_errors():
        if target is not None and model_name is None:
            raise EvaluationError(f"--target {target} also needs --model-name")
        plan = QualityPlan(
            prompts=prompts,
            questions=load_prompts(prompts, benchmark_files)[:answers],
            judge_prompts=load_judge_prompts(benchmark_files),
            judge=endpoint_settings(
                judge, judge_model, judge_key_env, concurrency, retries
            ).model_copy(update={"token_limit_field": _token_field(judge_token_field)}),
            folder=out,
            answer_files=answer_file or (),
            model=None
            if target is None or model_name is None
            else endpoint_settings(target, model_name, target_key_env, concurrency, retries),
            max_answer_tokens=max_tokens,
            temperature=temperature,
            judgment=JudgmentRequest(
                max_tokens=max_judgment_tokens or None,
                temperature=_temperature(judge_temperature),
                attempts=rating_attempts,
            ),
            prices=TokenPrices(
                prompt_per_million=prompt_price, completion_per_million=completion_price
            ),
        )
        _rate(plan)


def _token_field(name: str) -> str:
    from apar_core.offline.evaluation.chat_endpoint import TokenLimitField

    known = get_args(TokenLimitField)
    if name not in known:
        raise EvaluationError(f"--judge-token-field {name!r} is none of {', '.join(known)}")
    return name


def _temperature(text: str) -> float | None:
    if text == "none":
        return None
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature < math.inf:
        raise EvaluationError(
            f"--judge-temperature {text!r} is neither a number of at least 0 nor none"
        )
    return temperature


def endpoint_settings(
    url: str, model: str, key_env: str, concurrency: int, retries: int
) -> EndpointSettings:
    """Return the settings of an endpoint, with the key that an environment variable holds.

    Raises EvaluationError if the URL is none.
    """
    from apar_core.offline.evaluation.chat_endpoint import EndpointSettings

    if not url.startswith(("http://", "https://")):
        raise EvaluationError(f"{url!r} is not a URL: it must begin with http:// or https://")
    return EndpointSettings(
        url=url,
        model=model,
        # The OpenAI client requires a key, also for servers that need none.
        api_key=os.environ.get(key_env) or "none",
        concurrency=concurrency,
        retries=retries,
    )


def _rate(plan: QualityPlan) -> None:
    from apar_core.offline.evaluation.quality import run_quality

    if not plan.answer_files and plan.model is None:
        raise EvaluationError("nothing to rate: give --answer-file FILE or --target URL")
    with stage_progress() as progress:
        result = asyncio.run(run_quality(plan, progress))
    console = Console()
    for table in result.report.tables:
        print_table(table)
    console.print(f"Report: [bold]{result.page}[/bold]", soft_wrap=True)
    if result.failures:
        shown = "\n".join(result.failures[:_SHOWN_FAILURES])
        raise EvaluationError(
            f"{len(result.failures)} requests failed; run the same command again to continue:\n"
            f"{shown}"
        )


@evaluate.command()
def fetch(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the files (default: a cache folder).", file_okay=False),
    ] = None,
    mirror: Annotated[str | None, typer.Option(help="Base URL of a mirror of the files.")] = None,
) -> None:
    """Download the questions, references and judge prompts of Vicuna-Bench and MT-Bench (135 kB).

    They come from FastChat's repositories at a fixed commit; checksums are verified. Example:
    [bold]apar evaluate fetch[/bold]
    """
    from apar_core.cache import cache_folder
    from apar_core.offline.evaluation.prompt_sets import (
        BENCHMARK_FILES,
        BENCHMARK_FOLDER,
        FASTCHAT_URLS,
        BenchmarkFile,
        fetch_benchmark_files,
    )

    folder = out if out is not None else cache_folder(BENCHMARK_FOLDER)
    bars = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
    )
    with clear_errors(), bars:
        task = bars.add_task("fetching", total=sum(file.num_bytes for file in BENCHMARK_FILES))

        def show(file: BenchmarkFile, num_bytes: int) -> None:
            bars.update(task, description=file.path, advance=num_bytes)

        homes = FASTCHAT_URLS if mirror is None else (mirror.rstrip("/"),)
        paths = fetch_benchmark_files(folder, base_urls=homes, show=show)
    Console().print(f"{len(paths)} files in [bold]{folder}[/bold]", soft_wrap=True)
