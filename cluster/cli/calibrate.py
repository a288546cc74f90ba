"""`apar experiment calibrate` and `validate`: step costs of a real engine, and their errors."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from apar_core.suggestions import did_you_mean
from cluster.cli.options import (
    RESUMABLE,
    CommaList,
    ContextLength,
    Model,
    Trace,
    list_option,
    out_option,
    wrong_value,
)
from cluster.cli.terminal import clear_errors, show_report, stage_progress

EngineArgs = Annotated[
    str | None,
    typer.Option(help="Further vLLM arguments of a real engine, as a JSON object."),
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        help="Dimensions of a model that gets random weights, in place of --model: llama-7b, "
        "llama-13b, llama-3-8b, or a config.json. Step times do not depend on the weights.",
        metavar="MODEL",
    ),
]


def calibrate(
    out: Annotated[Path, out_option("experiment-calibrate", help=RESUMABLE)],
    model: Model = "apar-tiny",
    rows: Annotated[
        CommaList[int],
        list_option(
            help="Numbers of rows (threads per step), two or more.",
            item=int,
            minimum=1,
            default="1,2,4,...,128",
        ),
    ] = CommaList((1, 2, 4, 8, 16, 32, 64, 128)),
    contexts: Annotated[
        CommaList[int],
        list_option(
            help="Tokens that each row attends to.", item=int, minimum=1, default="64,256,1024"
        ),
    ] = CommaList((64, 256, 1024)),
    prefill: Annotated[
        CommaList[int],
        list_option(
            help="Tokens of a prompt that is computed beside the rows.",
            item=int,
            minimum=1,
            default="16,64,256,1024",
        ),
    ] = CommaList((16, 64, 256, 1024)),
    steps: Annotated[
        int, typer.Option(min=2, help="Decoding steps at each point and repeat.")
    ] = 12,
    repeats: Annotated[
        int, typer.Option(min=1, help="Passes over the grid; a later run with more adds them.")
    ] = 3,
    random_weights: RandomWeights = None,
    engine_args: EngineArgs = None,
) -> None:
    """Measure how long the steps of an engine take, and write them to step-costs.json.

    Other commands take the file as --costs. Measures every number of rows at every context, with
    and without a prompt beside them. For a GPU, give rows up to the largest batch:

    [bold]apar experiment calibrate --random-weights llama-7b --rows 1,8,32,64,128,256[/bold]
    """
    from cluster.lab.experiments.calibrate import Grid
    from cluster.lab.experiments.calibrate import calibrate as measure

    if len(set(rows)) < 2:
        raise wrong_value("--rows", "give two different numbers or more")
    with clear_errors(), stage_progress() as progress:
        checkpoint, engine = _engine(model, random_weights, engine_args, out)
        grid = Grid(
            model=checkpoint,
            rows=tuple(sorted(set(rows))),
            contexts=tuple(sorted(set(contexts))),
            prefill=tuple(sorted(set(prefill))),
            steps=steps,
            repeats=repeats,
            engine=engine,
        )
        show_report(measure(grid, out, progress.start), out)


def validate(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-validate", help=RESUMABLE)],
    model: Model = "apar-tiny",
    answers: Annotated[int, typer.Option(min=1, help="Answers of a run, drawn at random.")] = 32,
    context_length: ContextLength = None,
    concurrency: Annotated[
        CommaList[int],
        list_option(help="Limits on concurrent requests.", item=int, minimum=1, default="2,8"),
    ] = CommaList((2, 8)),
    kv_shares: Annotated[
        CommaList[float],
        list_option(help="Shares of the KV cache to run with.", item=float, default="1,0.4"),
    ] = CommaList((1.0, 0.4)),
    repeats: Annotated[
        int, typer.Option(min=1, help="Repeats of each run; the least time of each step counts.")
    ] = 3,
    random_weights: RandomWeights = None,
    engine_args: EngineArgs = None,
) -> None:
    """Compare the measured duration of whole runs with predictions in virtual time.

    Real runs and step measurements alternate. The step costs are fitted three times: to a grid of
    steps, to sequential runs, and to the smallest limit. Each fit predicts the runs it did not see.
    On a GPU, the grid and, if the GPU is known, its published costs predict all runs.
    step-costs.json holds the grid's costs, for --costs of other commands. Takes about 5 minutes on
    2 idle cores:

    [bold]apar experiment validate --trace TRACE.jsonl --repeats 5[/bold]

    On a GPU, without a checkpoint:

    [bold]apar experiment validate --trace TRACE.jsonl --random-weights llama-7b --answers 400
    --context-length 2048 --concurrency 350 --kv-shares 0.9,0.3 --repeats 1[/bold]
    """
    from cluster.lab.experiments.validate import ValidationSettings
    from cluster.lab.experiments.validate import validate as run

    with clear_errors(), stage_progress() as progress:
        checkpoint, engine = _engine(model, random_weights, engine_args, out)
        settings = ValidationSettings(
            model=checkpoint,
            trace=trace,
            answers=answers,
            max_tokens=context_length or 600,
            limits=tuple(sorted(set(concurrency))),
            kv_shares=tuple(kv_shares),
            repeats=repeats,
            engine=engine,
        )
        show_report(run(settings, out, progress.start), out)


def _engine(
    model: str, random_weights: str | None, engine_args: str | None, out: Path
) -> tuple[str, dict[str, Any]]:
    """Return the checkpoint of an engine to measure, and its further arguments."""
    arguments = engine_arguments(engine_args)
    if random_weights is None:
        return model, arguments
    from cluster.lab.experiments.engine import write_random_model

    folder = write_random_model(random_weights, out / "model")
    return str(folder), {"load_format": "dummy", **arguments}


def engine_arguments(text: str | None) -> dict[str, Any]:
    """Return vLLM's engine arguments in a JSON text. Raises BadParameter for unknown ones."""
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise wrong_value("--engine-args", f"{text!r} is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise wrong_value("--engine-args", f"{text!r} is not a JSON object")
    # Importing vLLM takes seconds.
    from apar_core.vllm_names import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            raise wrong_value(
                "--engine-args", f"vLLM has no engine argument {name!r}{did_you_mean(name, known)}"
            )
    return arguments
