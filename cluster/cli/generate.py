"""`apar generate`: one answer, generated in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from apar_core.errors import AparError
from cluster.cli.decoder_generate import Asked, generate_by_decoder
from cluster.cli.thread_view import statistics_line, thread_view
from cluster.config.model import DEFAULT_MODEL, PRESETS, ModelConfig

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import Answer, OfflineEngine


def generate(
    prompt: Annotated[
        str, typer.Argument(help="The question, or with --raw a text to go on with.")
    ],
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(PRESETS)}, a checkpoint folder or a hub name.")
    ] = DEFAULT_MODEL,
    show_threads: Annotated[
        bool, typer.Option("--show-threads", help="Show the threads as a tree and what they saved.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of all threads together.")
    ] = 1024,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Makes an answer at a temperature above 0 repeatable.")
    ] = None,
    fork: Annotated[
        bool, typer.Option("--fork/--no-fork", help="Whether the model may open threads.")
    ] = True,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")
    ] = False,
    decoder: Annotated[
        str, typer.Option(help="vllm, or without vLLM plain, vanilla_apar or medusa_apar.")
    ] = "vllm",
    medusa_heads: Annotated[
        Path | None, typer.Option(help="Folder of the heads that medusa_apar uses.")
    ] = None,
) -> None:
    """Generate one answer in this process, without a server.

    Starting the engine takes about 10 seconds. Example:
    [bold]apar generate "Give me 5 tips for learning guitar." --show-threads[/bold]
    """
    asked = Asked(prompt, max_tokens, temperature, seed, fork, raw, show_threads)
    try:
        if decoder == "vllm" and medusa_heads is None:
            _generate_by_engine(model, asked)
        else:
            generate_by_decoder(decoder, model, medusa_heads, asked)
    except (AparError, OSError, ValueError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {model}: {error}", soft_wrap=True)
        raise typer.Exit(1) from error


def _generate_by_engine(model: str, asked: Asked) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "extra_args": {"apar_enabled": asked.fork},
    }
    with Console(stderr=True).status(f"Starting {model} ..."):
        engine = start_engine(model)
    question = asked.prompt if asked.raw else engine.chat_prompt(asked.prompt)
    answer = engine.generate([question], sampling)[0]
    print_answer(Console(), answer, engine, show_threads=asked.show_threads)
    engine.shutdown()


def start_engine(model: str) -> OfflineEngine:
    """The engine for a preset, folder or hub name, quiet and without compiling anything."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM takes seconds to import, and `apar --help` should not wait for it.
    from apar_core.engine.offline_engine import OfflineEngine

    settings = ModelConfig(checkpoint=model)
    engine_args: dict[str, Any] = {**settings.preset.engine, "enforce_eager": True}
    if model == DEFAULT_MODEL:
        engine_args["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    return OfflineEngine(settings.preset.path, **engine_args)


def print_answer(
    console: Console, answer: Answer, engine: OfflineEngine, *, show_threads: bool
) -> None:
    """Print the text, or the threads that it was made of."""
    if not show_threads:
        console.print(answer.text, markup=False, highlight=False, soft_wrap=True)
        return
    if answer.record is None:
        console.print("This model has no control tokens: one thread, nothing to show.\n")
        console.print(answer.text, markup=False, highlight=False, soft_wrap=True)
        return

    def decode(tokens: Any) -> str:
        return str(engine.tokenizer.decode([token.token_id for token in tokens]))

    for tree in answer.record.trees:
        console.print(thread_view(tree, decode))
    console.print(statistics_line(answer.record.statistics), highlight=False, soft_wrap=True)
