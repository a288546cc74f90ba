"""Numbers on the command line."""

from __future__ import annotations

import math

import typer


def check_finite(context: typer.Context) -> None:
    """Refuse `inf` and `nan`, which pass an option's bounds; raises typer.BadParameter with it."""
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            option = parameter.opts[0]
            raise typer.BadParameter(f"{value} is no finite number.", param_hint=f"'{option}'")
