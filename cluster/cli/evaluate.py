"""`apar evaluate`: speed, quality, and the benchmarks' files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from cluster.cli.evaluate_quality import quality
from cluster.cli.evaluate_speed import speed
from cluster.cli.evaluation_progress import clear_errors

evaluate = typer.Typer(
    no_args_is_help=True, help="Measure speed and quality as the APAR paper does."
)
for command in (speed, quality):
    evaluate.command(no_args_is_help=True)(command)


@evaluate.command()
def fetch(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to keep the files in; a cache folder by default."),
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(help="URL of another home of the same files.")
    ] = None,
) -> None:
    """Download the questions, references and judge prompts of Vicuna-Bench and MT-Bench (135 kB).

    They come from FastChat's public home, at a fixed commit, and are checked.
    """
    from apar_core.offline.evaluation.prompt_sets import (
        BENCHMARK_FILES,
        FASTCHAT_URLS,
        BenchmarkFile,
        cache_folder,
        fetch_benchmark_files,
    )

    folder = out if out is not None else cache_folder()
    console = Console(stderr=True)
    bars = Progress(
        TextColumn("[bold]{task.description}"), BarColumn(), DownloadColumn(), console=console
    )
    with clear_errors(console), bars:
        task = bars.add_task("fetching", total=sum(file.num_bytes for file in BENCHMARK_FILES))

        def show(file: BenchmarkFile, num_bytes: int) -> None:
            bars.update(task, description=file.path, advance=num_bytes)

        homes = FASTCHAT_URLS if mirror is None else (mirror.rstrip("/"),)
        paths = fetch_benchmark_files(folder, base_urls=homes, show=show)
    Console().print(f"{len(paths)} files in [bold]{folder}[/bold]", soft_wrap=True)
