"""Every command on the sizing page prints what stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config import ClusterConfig

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sizing.md"
TEXT = PAGE.read_text(encoding="utf-8")
# As wide as the page's own lines.
WIDTH = "108"
BLOCKS = re.findall(r"^```console\n\$ (.+)\n((?:.*\n)*?)```$", TEXT, re.MULTILINE)


def plan(*arguments: str) -> dict[str, dict[str, int]] | None:
    """The plan as JSON; None where there is none."""
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    return dict(json.loads(result.output)) if result.exit_code == 0 else None


def test_the_page_has_its_commands() -> None:
    assert len(BLOCKS) == TEXT.count("$ apar plan") == 3


@pytest.mark.parametrize(("command", "output"), BLOCKS)
def test_each_command_prints_what_stands_below_it(command: str, output: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": WIDTH, "PATH": path},
    )

    assert [line.rstrip() for line in done.stdout.splitlines()] == output.splitlines()


@pytest.mark.parametrize(("command", "output"), BLOCKS)
def test_the_settings_on_the_page_are_a_configuration(command: str, output: str) -> None:
    text = output[output.index("models:") : output.index("# For the overlay")]

    (model,) = ClusterConfig.model_validate(yaml.safe_load(text)).models

    assert model.checkpoint in command


def test_the_table_of_caps_is_what_the_command_gives() -> None:
    names, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TEXT.splitlines()
        if line.startswith(("| | l4", "| apar-"))
    )
    assert [row[0] for row in rows] == ["apar-7b", "apar-13b"]
    for model, *caps in rows:
        for gpu, cap in zip(names[1:], caps, strict=True):
            found = plan("--rate", "1", "--model", model, "--gpu", gpu)
            assert cap == ("-" if found is None else str(found["caps"]["by_memory"])), (model, gpu)


def test_the_papers_caps_are_compared_as_the_command_compares_them() -> None:
    for model, paper in (("apar-7b", 350), ("apar-13b", 180)):
        found = plan(
            "--rate", "1", "--model", model, "--gpu", "a100-80g", "--forks", "structured",
            "--prompt-tokens", "175", "--answer-tokens", "410",
        )  # fmt: skip
        assert found is not None
        cap = found["caps"]["by_memory"]
        sentence = re.sub(r"\s+", " ", TEXT)
        assert re.search(rf"\b{cap}\b[^.]* requests fit there", sentence)
        assert f"{paper / cap:.2f}" in sentence
