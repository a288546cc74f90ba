"""`apar train-tiny`, for two steps."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cluster.cli.main import app


def test_the_command_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "tiny"

    result = CliRunner().invoke(
        app, ["train-tiny", "--out", str(out), "--steps", "2", "--seed", "3", "--executors", "1"]
    )

    assert result.exit_code == 0, result.output
    assert "step 1/2  loss " in result.output
    assert "step 2/2  loss " in result.output
    assert "Written to" in result.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(out))


@pytest.mark.parametrize("option", [("--steps", "0"), ("--seed", "-1"), ("--executors", "0")])
def test_numbers_out_of_range_are_refused(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["train-tiny", *option])

    assert result.exit_code == 2
