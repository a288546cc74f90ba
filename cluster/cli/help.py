"""Help pages of commands, readable in 80 columns.

Typer's own pages have up to seven columns, which cuts the names of options in narrow terminals, and
keep the line breaks of docstrings.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

_MAX_NAMES_WIDTH = 32


def use_help_pages(app: typer.Typer) -> None:
    """Give an application and all that it contains these help pages."""
    app.info.cls = _Group
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        assert group.typer_instance is not None
        use_help_pages(group.typer_instance)


class _Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, ctx)


class _Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, ctx)


def _print_help(command: Any, context: Any) -> None:
    console = Console(highlight=False)
    console.print(Padding(Text(command.get_usage(context), style="bold"), 1))
    for paragraph in _paragraphs(command.help):
        console.print(Padding(paragraph, (0, 1, 1, 1)))
    panels: dict[str, list[tuple[Text, Text]]] = defaultdict(list)
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is None:
            continue
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        names = Text(record[0])
        names.highlight_regex(r"(?<!\S)--?\w[\w-]*", "bold cyan")
        panels[parameter.rich_help_panel or usual].append((names, Text(record[1])))
    for name in getattr(command, "commands", {}):
        inner = command.get_command(context, name)
        panels["Commands"].append((Text(name, style="bold cyan"), _paragraphs(inner.help)[0]))
    for title in sorted(panels, key=lambda title: title not in ("Arguments", "Options")):
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(max_width=_MAX_NAMES_WIDTH, overflow="fold")
        table.add_column(ratio=1, overflow="fold")
        for names, meaning in panels[title]:
            table.add_row(names, meaning)
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def _paragraphs(text: str | None) -> list[Text]:
    """Return the paragraphs of a docstring without its line breaks."""
    parts = inspect.cleandoc(text or "").split("\n\n")
    return [Text.from_markup(" ".join(part.split())) for part in parts]
