"""`apar train`, `apar train-medusa`, `apar train-prompts` and `apar train-tiny`."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import TextColumn

from cluster.cli.options import Format, Model, Recipe, Resume, Seed, out_option, recipe_names
from cluster.cli.terminal import clear_errors, step_bars
from deployments.config.model import model_path

if TYPE_CHECKING:
    from apar_core.offline.speculation.acceptance import AcceptanceTable
    from apar_core.offline.speculation.frozen_training import Trained
    from apar_core.offline.training.recipe import TinyTrainingSettings
    from apar_core.offline.training.tree_trainer import OnStep, StepReport

Weights = Literal["Medusa heads", "Prompt tokens"]
Data = Annotated[Path, typer.Option(help="Output folder of `apar data prepare`, or a file in it.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Number of training steps (default: the recipe's).")
]


def train(
    model: Model,
    data: Data,
    out: Annotated[Path, out_option("train", help="Folder for the checkpoint and the log.")],
    recipe: Recipe = "apar",
    parallel_format: Format = "apar",
    steps: Steps = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="Jinja chat template (default: the tokenizer's own, else Vicuna's).",
            dir_okay=False,
        ),
    ] = None,
    resume: Resume = False,
) -> None:
    """Fine-tune a model to fork its answers, with the settings of table 5 of the APAR paper.

    Writes a checkpoint for `apar serve OUT`. An interrupted run continues with the same
    options, --out and --resume. Examples:

    [bold]apar train --model lmsys/vicuna-7b-v1.3 --data out/data --out out/apar-7b[/bold]

    [bold]apar train --model ./my-model --format threadweaver --data out/data --out out/joins[/bold]

    On several GPUs: [bold]accelerate launch --config_file apar_core/offline/training/fsdp.yaml
    --no_python apar train ...[/bold]
    """
    console = process_console()
    with _training(resumable=out):
        # Importing torch takes seconds, and `apar --help` must be fast.
        from apar_core.offline.training.recipe import TrainingRecipe, load_recipe

        settings = load_recipe(recipe, TrainingRecipe)
        if steps is not None:
            settings = settings.model_copy(update={"num_steps": steps})
        from apar_core.offline.training.fine_tune import fine_tune

        with step_progress(console, "training", settings.num_steps) as show:
            result = fine_tune(
                model_path(model), data, out, settings,
                format_name=parallel_format, chat_template=chat_template, resume=resume,
                on_step=show,
            )  # fmt: skip
    console.print(f"{result.counts}; {result.padding}.", highlight=False, soft_wrap=True)
    if result.validation_loss is not None:
        console.print(
            f"Validation loss {result.validation_loss:.4f} on {result.num_validation} examples.",
            highlight=False,
        )
    console.print(f"Checkpoint written to [bold]{out}[/bold].", soft_wrap=True)


def train_medusa(
    model: Model,
    data: Data,
    out: Annotated[Path, out_option("train-medusa", help="Folder for the heads and the log.")],
    recipe: Recipe = "medusa",
    steps: Steps = None,
    resume: Resume = False,
) -> None:
    """Train Medusa heads on a frozen model, with the settings of table 6 of the APAR paper.

    Any causal language model with full attention. One with control tokens learns on trees, every
    other on the same answers as one thread. Writes the heads for the decoders medusa and
    medusa_apar, and for vLLM's medusa method. An interrupted run continues with the same options,
    --out and --resume. Examples:

    [bold]apar train-medusa --model out/apar-7b --data out/data --out out/heads[/bold]

    [bold]apar train-medusa --model smollm2-135m --recipe medusa-small --data out/apar/data --out
    out/heads[/bold]
    """
    _train_beside("Medusa heads", model, data, out, recipe, steps, resume)


def train_prompts(
    model: Model,
    data: Data,
    out: Annotated[
        Path, out_option("train-prompts", help="Folder for the prompt tokens and the log.")
    ],
    recipe: Recipe = "ppd",
    steps: Steps = None,
    resume: Resume = False,
) -> None:
    """Train prompt tokens on a frozen model, with the settings of the PPD paper.

    Any causal language model with full attention. One with control tokens learns on trees, every
    other on the same answers as one thread. Writes the embeddings and their acceptance table for
    the decoders ppd and ppd_apar. An interrupted run continues with the same options, --out and
    --resume. Examples:

    [bold]apar train-prompts --model lmsys/vicuna-7b-v1.3 --data out/data --out out/prompts[/bold]

    [bold]apar train-prompts --model smollm2-135m --recipe ppd-small --data out/apar/data --out
    out/prompts[/bold]
    """
    _train_beside("Prompt tokens", model, data, out, recipe, steps, resume)


def _trained(weights: Weights) -> Trained[Any, Any]:
    from apar_core.offline.speculation.train_medusa import MEDUSA_HEADS
    from apar_core.offline.speculation.train_prompts import PROMPT_TOKENS

    return MEDUSA_HEADS if weights == "Medusa heads" else PROMPT_TOKENS


def _train_beside(
    weights: Weights,
    model: str,
    data: Path,
    out: Path,
    recipe: str,
    steps: int | None,
    resume: bool,
) -> None:
    """Train Medusa heads or prompt tokens beside a model, on data."""
    console = process_console()
    with _training(resumable=out):
        from apar_core.offline.evaluation.own_answers import measure_and_write
        from apar_core.offline.speculation.frozen_training import train_beside
        from apar_core.offline.training.recipe import load_recipe

        trained = _trained(weights)
        settings = load_recipe(recipe, trained.recipe)
        if steps is not None:
            settings = settings.model_copy(update={"num_steps": steps})
        with step_progress(console, f"training {trained.name}", settings.num_steps) as show:
            result = train_beside(
                trained, model_path(model), data, out, settings,
                measure=measure_and_write, resume=resume, on_step=show,
            )  # fmt: skip
    console.print(f"{result.counts}; {result.padding}.", highlight=False, soft_wrap=True)
    _print_acceptance(console, result.table)
    console.print(f"{weights} written to [bold]{out}[/bold].", soft_wrap=True)


def train_tiny(
    out: Annotated[Path, out_option("train-tiny", help="Folder for the checkpoint.")],
    steps: Steps = None,
    seed: Seed = 0,
    cpu_threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads.")] = 2,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Name of a built-in recipe, or a YAML file (default: apar-tiny; with --format "
            "apar-tiny-threadweaver, with --medusa apar-tiny-medusa, with --prompts "
            "apar-tiny-prompts).",
            autocompletion=recipe_names,
        ),
    ] = None,
    parallel_format: Annotated[
        Literal["apar", "threadweaver"],
        typer.Option(
            "--format",
            help="Format of the answers. threadweaver: continue the training of apar-tiny with "
            "threads that the parent waits for.",
        ),
    ] = "apar",
    medusa: Annotated[
        bool, typer.Option("--medusa", help="Train Medusa heads for the embedded model instead.")
    ] = False,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Train prompt tokens for the embedded model instead.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="With --medusa, --prompts or --format threadweaver: another checkpoint of this "
            "command to start from (default: apar-tiny).",
            file_okay=False,
            exists=True,
        ),
    ] = None,
) -> None:
    """Train the embedded model apar-tiny from scratch (16 minutes on 2 cores), or a variant of it.

    Writes a checkpoint for `apar serve OUT`. The same seed, steps and CPU threads give
    the same weights on the same machine. A recipe can have other sizes of the model. Examples:

    [bold]apar train-tiny --out out/apar-tiny[/bold]

    [bold]apar train-tiny --prompts --out out/prompts[/bold]

    [bold]apar train-tiny --format threadweaver --out out/joins[/bold]
    """
    joins = parallel_format == "threadweaver"
    if medusa + prompts + joins > 1:
        raise typer.BadParameter("--medusa, --prompts and --format threadweaver are separate runs")
    if checkpoint is not None and not (medusa or prompts or joins):
        raise typer.BadParameter("--checkpoint needs --medusa, --prompts or --format threadweaver")
    console = Console()
    with _training():
        if joins:
            _train_tiny_joins(checkpoint, console, out, steps, seed, cpu_threads, recipe)
        elif medusa or prompts:
            weights: Weights = "Prompt tokens" if prompts else "Medusa heads"
            _train_tiny_beside(weights, checkpoint, console, out, steps, seed, cpu_threads, recipe)
        else:
            _train_tiny_model(console, out, steps, seed, cpu_threads, recipe)
    console.print(f"Written to [bold]{out}[/bold].", soft_wrap=True)


def _train_tiny_model(
    console: Console, out: Path, steps: int | None, seed: int, cpu_threads: int, recipe: str | None
) -> None:
    from apar_core.offline.training.train_tiny import train_tiny as run_training

    settings = _tiny_settings(recipe or "apar-tiny", steps, seed, cpu_threads)
    with step_progress(console, "training apar-tiny", settings.num_steps) as show:
        run_training(out, settings.model, settings, show)


def _train_tiny_joins(
    checkpoint: Path | None,
    console: Console,
    out: Path,
    steps: int | None,
    seed: int,
    cpu_threads: int,
    recipe: str | None,
) -> None:
    """Train a model of apar-tiny's family to write answers that join."""
    from apar_core.models.apar_tiny import checkpoint_path
    from apar_core.offline.training.train_tiny import train_tiny_joins as run_training

    settings = _tiny_settings(recipe or "apar-tiny-threadweaver", steps, seed, cpu_threads)
    with step_progress(console, "training apar-tiny-threadweaver", settings.num_steps) as show:
        run_training(out, settings, show, checkpoint=checkpoint or checkpoint_path())


def _tiny_settings(
    recipe: str, steps: int | None, seed: int, cpu_threads: int
) -> TinyTrainingSettings:
    from apar_core.offline.training.train_tiny import tiny_recipe

    settings = tiny_recipe(recipe).model_copy(update={"seed": seed, "num_executors": cpu_threads})
    return settings if steps is None else settings.with_num_steps(steps)


def _train_tiny_beside(
    weights: Weights,
    checkpoint: Path | None,
    console: Console,
    out: Path,
    steps: int | None,
    seed: int,
    cpu_threads: int,
    recipe: str | None,
) -> None:
    """Train Medusa heads or prompt tokens for a model of apar-tiny's family."""
    import torch

    from apar_core.models.apar_tiny import checkpoint_path
    from apar_core.offline.evaluation.own_answers import measure_and_write
    from apar_core.offline.speculation.frozen_training import train_tiny_beside

    torch.set_num_threads(cpu_threads)
    trained = _trained(weights)
    settings = trained.tiny_recipe(recipe)
    changes: dict[str, int] = {"seed": seed} | ({} if steps is None else {"num_steps": steps})
    settings = settings.model_copy(update={"recipe": settings.recipe.model_copy(update=changes)})
    with step_progress(console, f"training {trained.name}", settings.recipe.num_steps) as show:
        table = train_tiny_beside(
            trained, checkpoint or checkpoint_path(), out, settings, measure=measure_and_write,
            on_step=show,
        )  # fmt: skip
    _print_acceptance(console, table)


def _print_acceptance(console: Console, table: AcceptanceTable | None) -> None:
    """Print the acceptance of each distance, after which all nearer tokens were right."""
    if table is None:
        return
    for distance, (row, best) in enumerate(zip(table.probabilities, table.top_k(), strict=True), 1):
        console.print(
            f"Distance {distance}: {row[0]:.1%} the first candidate, {best[-1]:.1%} among "
            f"{len(row)}, of the model's own greedy tokens.",
            highlight=False,
        )


@contextmanager
def _training(*, resumable: Path | None = None) -> Iterator[None]:
    """Show warnings of ours only, errors as one line, and how an interrupted run continues."""
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.getLogger("apar_core").addHandler(handler)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"peft\.")
    # Set before transformers is imported: its bars would break ours.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with clear_errors():
            yield
    except KeyboardInterrupt:
        if resumable is not None:
            _print_how_to_resume(Console(stderr=True), resumable)
        raise


def _print_how_to_resume(console: Console, out: Path) -> None:
    hint = f"no checkpoint yet in {out}"
    if any(out.glob("checkpoints/checkpoint-*")):
        hint = f"continue from the last checkpoint with --resume --out {out}"
    console.print(f"Interrupted: {hint}", highlight=False, soft_wrap=True)


def process_console() -> Console:
    """Return the console for results; of several processes only the first prints."""
    return Console(quiet=os.environ.get("RANK", "0") != "0")


@contextmanager
def step_progress(console: Console, title: str, num_steps: int) -> Iterator[OnStep]:
    """Yield a callback that shows the reports of a run's steps."""
    if not console.is_terminal or console.quiet:
        yield StepLines(console).show
        return
    with step_bars(console, TextColumn("{task.fields[numbers]}")) as bars:
        task = bars.add_task(title, total=num_steps, numbers="")

        def show(report: StepReport) -> None:
            bars.update(task, completed=report.step, numbers=_numbers(report))

        yield show


@dataclass
class StepLines:
    """Prints a step's report as a line, at most one per interval.

    The first, the last and every validated step are always printed.
    """

    console: Console
    interval_s: float = 10.0
    started: float = field(default_factory=time.monotonic)
    printed: float = float("-inf")

    def show(self, report: StepReport) -> None:
        """Print this report if it is due."""
        now = time.monotonic()
        due = now - self.printed >= self.interval_s or report.validation_loss is not None
        if not due and report.step not in (1, report.num_steps):
            return
        self.printed = now
        self.console.print(
            f"step {report.step}/{report.num_steps}  {_numbers(report)}  "
            f"{now - self.started:.0f} s",
            highlight=False,
            soft_wrap=True,
        )


def _numbers(report: StepReport) -> str:
    parts = [f"loss {report.loss:.3f}"]
    if report.validation_loss is not None:
        parts.append(f"validation {report.validation_loss:.3f}")
    parts.append(f"{report.learned_tokens_per_s:,.0f} tokens/s")
    parts.append(f"{report.trees_per_s:.1f} trees/s")
    parts.append(f"padding {report.padding_share:.1%}")
    return "  ".join(parts)
