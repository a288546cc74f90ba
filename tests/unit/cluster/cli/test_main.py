from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app

HEAVY_MODULES = ("ray", "torch", "transformers", "vllm")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def test_without_arguments_the_help_lists_every_command() -> None:
    _, output = run()

    # A row of the table of commands begins with the name.
    listed = re.findall(r"^\W+ ([a-z][a-z-]+)  ", output.partition("Commands")[2], re.MULTILINE)
    assert sorted(listed) == [
        "config", "data", "doctor", "evaluate", "experiment", "generate", "keys", "loadtest",
        "monitor", "plan", "rollout", "serve", "train", "train-medusa", "train-tiny",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ("serve", ["--model", "--port", "--replicas", "--max-concurrency", "--config"]),
        ("generate", ["--show-threads", "--no-fork", "--max-tokens", "--seed", "--raw"]),
        ("train", ["--recipe", "--model", "--data", "--resume", "--chat-template", "fsdp.yaml"]),
        ("train-medusa", ["--recipe", "--model", "--data", "--resume"]),
        ("train-tiny", ["--out", "--steps", "--seed", "--medusa"]),
        ("doctor", ["--model", "exits with 1"]),
        (
            "loadtest",
            ["--target", "--workload", "--arrivals", "--slo", "closed:16", "loadtest compare"],
        ),
        ("monitor", ["--metrics", "--prometheus", "--interval", "--window", "--once", "--json"]),
        ("plan", ["--rate", "--users", "--trace", "--token-ms", "--gpu", "--measure-from"]),
    ],
)
def test_the_help_of_each_command_teaches_its_options(command: str, taught: list[str]) -> None:
    exit_code, output = run(command, "--help")

    assert exit_code == 0
    for words in taught:
        assert words in output


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
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert answer.stdout == "[]\n"
