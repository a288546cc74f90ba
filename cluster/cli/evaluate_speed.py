"""`apar evaluate speed`: what forking saves, generated, replayed or counted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.cli.evaluation_progress import clear_errors, rich_table, stage_progress
from cluster.config.model import DEFAULT_MODEL, PRESETS

if TYPE_CHECKING:
    from apar_core.offline.evaluation.speed_run import SpeedSettings

_NUM_SUMMARY_TABLES = 3

Out = Annotated[
    Path, typer.Option(help="Folder of answers and report; run again to go on.", file_okay=False)
]
Model = Annotated[
    str, typer.Option(help=f"One of {', '.join(PRESETS)}, a checkpoint folder or a hub name.")
]
Decoder = Annotated[
    list[str] | None,
    typer.Option(
        "--decoder", help="plain, vanilla_apar (the default) or medusa_apar; several are compared."
    ),
]
Against = Annotated[
    str, typer.Option(help="Decoder that speeds are compared with, in the same run; or none.")
]
AgainstModel = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint of the --against decoder, which gives its own answers: for example the "
        "original model, which needs no control tokens. --model by default."
    ),
]
Prompts = Annotated[
    str,
    typer.Option(help="vicuna-bench, mt-bench, held-out (apar-tiny's) or a file of questions."),
]
Replay = Annotated[
    list[Path] | None,
    typer.Option(
        "--replay",
        help="Recorded answers whose tokens are forced instead of generating; several files for "
        "several models. FastChat's answer files, or trace lines.",
        dir_okay=False,
    ),
]
CountOnly = Annotated[
    bool, typer.Option("--count-only", help="With --replay: follow the schedule, run no model.")
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        help="With --replay: an untrained model, by preset (tiny, llama-7b, llama-13b) or "
        "config.json."
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Of replayed text without a checkpoint: llama, a .model file or a name."),
]
MedusaHeads = Annotated[
    Path | None, typer.Option(help="Folder of the Medusa heads of medusa_apar.", file_okay=False)
]
Questions = Annotated[
    Path | None,
    typer.Option(
        help="Folder of FastChat's files; what apar evaluate fetch fetched by default.",
        file_okay=False,
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first questions or answers.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a generated answer.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")]


def speed(
    out: Out,
    model: Model = DEFAULT_MODEL,
    decoder: Decoder = None,
    against: Against = "plain",
    against_model: AgainstModel = None,
    prompts: Prompts = "vicuna-bench",
    replay: Replay = None,
    count_only: CountOnly = False,
    random_weights: RandomWeights = None,
    tokenizer: Tokenizer = None,
    medusa_heads: MedusaHeads = None,
    questions: Questions = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 1024,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure threads, cached and attended tokens, steps and speed of one answer at a time.

    The report has the paper's tables 1, 2 and 7 to 16 and its figures 4 and 6. Example, without a
    model: [bold]apar evaluate speed --replay ANSWERS.jsonl --count-only --out out/replay[/bold]
    """
    # Torch takes seconds to import, and `apar --help` should not wait for it.
    from apar_core.offline.evaluation.speed_run import SpeedSettings

    with clear_errors(Console(stderr=True)):
        settings = SpeedSettings(
            model=PRESETS[model].path if model in PRESETS else model,
            model_name=model,
            decoders=tuple(decoder or ("vanilla_apar",)),
            baseline=None if against == "none" else against,
            baseline_model=PRESETS[against_model].path
            if against_model in PRESETS
            else against_model,
            baseline_model_name=against_model,
            prompts=prompts,
            replay=tuple(replay or ()),
            count_only=count_only,
            random_weights=random_weights,
            tokenizer=tokenizer,
            medusa_heads=medusa_heads,
            questions=questions,
            limit=limit,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
        )
        _run(settings, out)


def _run(settings: SpeedSettings, out: Path) -> None:
    from apar_core.offline.evaluation.speed_evaluation import run_speed
    from apar_core.reporting import write_report

    with stage_progress(Console(stderr=True)) as progress:
        report = run_speed(settings, out, progress)
    page = write_report(report, out)
    console = Console()
    for table in report.tables[:_NUM_SUMMARY_TABLES]:
        console.print(rich_table(table))
    console.print(f"Report: [bold]{page}[/bold]", soft_wrap=True)
