"""`apar convert`: one command that makes an instruct model fork."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from cluster.cli.data import INTERRUPTED_EXIT_CODE
from cluster.cli.options import MODEL_HELP, Seed, UnorderedLists, preset_names, recipe_names
from cluster.cli.terminal import clear_errors
from cluster.conversion.card import write_card
from cluster.conversion.stages import (
    MODEL,
    RECIPE_FILE,
    ConversionSettings,
    Stage,
    StageRecord,
    planned_stages,
    run_stages,
)
from deployments.config.model import ModelConfig

if TYPE_CHECKING:
    from apar_core.offline.training.recipe import TrainingRecipe

_APAR = (sys.executable, "-m", "cluster.cli.main")
_SMALL_PARAMETERS = 1_000_000_000
_MANY_QUESTIONS = 12_000
"""Of larger models, so that their recipe sees few answers twice."""


def convert(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Model that learns to fork: {MODEL_HELP}", autocompletion=preset_names
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder of the conversion; one in it continues.", file_okay=False
        ),
    ],
    parallel_format: Annotated[
        Literal["apar", "threadweaver"],
        typer.Option(
            "--format",
            help="Format of the answers; with threadweaver the parent waits for threads.",
        ),
    ] = "apar",
    questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of questions.",
            show_default="3000 below a billion parameters, else 12000",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Questions for the model, instead of its own.", exists=True, dir_okay=False
        ),
    ] = None,
    chats: Annotated[
        list[Path] | None,
        typer.Option(
            help="Chats to learn from, instead of the model's own answers. Repeatable.", exists=True
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Training recipe: a name or a YAML file.",
            autocompletion=recipe_names,
            show_default="convert-small below a billion parameters, else convert",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps (default: the recipe's).")
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Merge the adapter into the weights. Requests that may not fork are then answered "
            "by these weights, too, and end early.",
        ),
    ] = False,
    hold_out: Annotated[
        int, typer.Option(min=1, help="Questions kept out of training, for the evaluation.")
    ] = 200,
    answers: Annotated[
        int, typer.Option(min=1, help="Held-out questions that the evaluation asks.")
    ] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Limit on tokens per answer.")] = 512,
    unordered_lists: UnorderedLists = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="Jinja chat template (default: the model's, else Vicuna's).",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seed: Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the commands of the stages.")
    ] = False,
) -> None:
    """Teach an instruct model to fork, from its own answers.

    Runs `apar data generate`, `data prepare`, `train` and `evaluate forks`, and writes a model
    card. Each can also be run alone. The same command continues after an interruption. Examples:

    [bold]apar convert smollm2-135m --out out/forking[/bold]

    [bold]apar convert Qwen/Qwen3-8B --out out/qwen --dry-run[/bold]
    """
    console = Console()
    settings = ConversionSettings(
        model=model,
        parallel_format=parallel_format,
        chats=tuple(chats or ()),
        prompts=prompts,
        questions=questions,
        hold_out=hold_out,
        max_tokens=max_tokens,
        unordered_lists=unordered_lists,
        chat_template=chat_template,
        evaluated=answers,
        seed=seed,
    )
    try:
        with clear_errors():
            _check(settings)
            is_small = _is_small(model)
            name = recipe or ("convert-small" if is_small else "convert")
            chosen = _recipe(settings, name, steps, merge=merge)
            if not is_small and questions is None and prompts is None and not chats:
                settings = settings.model_copy(update={"questions": _MANY_QUESTIONS})
            settings = settings.model_copy(update={"context_length": chosen.context_length})
            stages = planned_stages(settings, out, num_gpus=_num_gpus())
            if dry_run:
                for stage in stages:
                    console.print(stage.shown, soft_wrap=True, highlight=False, markup=False)
                return
            _claim(settings, chosen, out)

            def announce(number: int, stage: Stage, record: StageRecord) -> None:
                _announce(console, f"{number}/{len(stages)}", stage, record)

            records = run_stages(stages, out, announce, _APAR)
            card = write_card(settings, out, records)
    except KeyboardInterrupt as error:
        typer.echo(f"Interrupted; the same command with --out {out} continues.", err=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from error
    console.print(
        f"\nConverted in {_minutes(records.seconds)}; model card: "
        f"[bold]{escape(str(card))}[/bold]\nServe it with: [bold]apar serve "
        f"{escape(str(out / MODEL))}[/bold]",
        soft_wrap=True,
        highlight=False,
    )


def _check(settings: ConversionSettings) -> None:
    """Refuse at once what a later stage would refuse after hours."""
    from apar_core.errors import DataError, TrainingError
    from apar_core.offline.training.chat_format import turn_end_id
    from apar_core.offline.training.pretrained import check_model, load_tokenizer

    if settings.chats and (settings.prompts is not None or settings.questions is not None):
        raise DataError("--chats has answers already: leave out --prompts and --questions")
    configured = ModelConfig(checkpoint=settings.model)
    configured.check_checkpoint()
    if configured.fork_adapter_folder is not None:
        raise TrainingError(
            f"{settings.model} already has an adapter that forks: convert its base model"
        )
    path = configured.preset.path
    check_model(path, 1)
    turn_end_id(load_tokenizer(path, settings.chat_template))


def _is_small(model: str) -> bool:
    from apar_core.offline.causal_model import count_parameters

    return count_parameters(ModelConfig(checkpoint=model).preset.path) < _SMALL_PARAMETERS


def _recipe(
    settings: ConversionSettings, name: str, steps: int | None, *, merge: bool
) -> TrainingRecipe:
    """Return a recipe with the changes that were asked for."""
    from apar_core.offline.training.recipe import TrainingRecipe, load_recipe

    found = load_recipe(name, TrainingRecipe)
    changes: dict[str, object] = {"seed": settings.seed}
    if steps is not None:
        changes["num_steps"] = steps
    if merge and found.lora is not None:
        changes["lora"] = found.lora.model_copy(update={"merge": True})
    return found.model_copy(update=changes)


def _claim(settings: ConversionSettings, recipe: TrainingRecipe, out: Path) -> None:
    """Record settings and recipe. Raises EvaluationError if the folder has another conversion."""
    import yaml

    from apar_core.reporting import claim_folder

    text = yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True), sort_keys=False)
    claim_folder(out, settings.facts() | {"recipe": text})
    (out / RECIPE_FILE).write_text(text, encoding="utf-8")


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip()])
    import torch

    return torch.cuda.device_count()


def _announce(console: Console, number: str, stage: Stage, record: StageRecord) -> None:
    heading = f"[bold]{number} {stage.title}[/bold]"
    if record.is_done:
        console.print(f"{heading}: done before, in {_minutes(record.seconds)}", highlight=False)
        return
    console.print(f"\n{heading}\n{escape(stage.shown)}", highlight=False, soft_wrap=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes"
