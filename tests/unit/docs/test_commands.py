"""Every `apar` command in a code block of the documentation is one that the program takes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.cli.main import app
from docs.build import ROOT, documents

# Entries of the log name commands of their commit.
PAGES = [page for page in documents() if page.parent.name != "experiments"]
BLOCK = re.compile(r"^ *```(?:bash|console|sh)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    """The `apar` command lines of a page, without prompts; continuation lines are joined."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.strip().removeprefix("$ ").split(" | ")[0]
            if re.match(r"(\S*bin/)?apar\s", command):
                found.append(command)
    return found


COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})


def parse(command: Any, name: str, arguments: list[str], parent: Any = None) -> None:
    """Parse a command line as the program does, down to the last subcommand; runs nothing."""
    try:
        context = command.make_context(name, list(arguments), parent=parent)
    except Exception as error:
        # Files of examples are not here.
        if "does not exist" in str(error):
            return
        raise
    rest = [*context._protected_args, *context.args]
    if rest and hasattr(command, "commands"):
        sub_name, subcommand, rest = command.resolve_command(context, rest)
        parse(subcommand, sub_name, rest, context)


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_documentation_is_understood(line: str) -> None:
    parse(typer.main.get_command(app), "apar", shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("line", ["serve --modell x", "nothing", "serve --port many"])
def test_a_wrong_command_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"No such|should be a valid"):
        parse(typer.main.get_command(app), "apar", shlex.split(line))


def test_the_readme_is_among_the_pages() -> None:
    assert ROOT / "README.md" in PAGES
