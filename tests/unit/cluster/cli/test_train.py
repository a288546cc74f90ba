"""`apar train` and `apar train-medusa`, for a few steps of the embedded model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.speculation.medusa_heads import load_medusa_heads
from cluster.cli.main import app
from tests.fakes.example_files import write_examples

RECIPE = {
    "batch_size": 2, "micro_batch_size": 1, "num_steps": 3, "learning_rate": 1e-5,
    "dtype": "float32", "context_length": 256, "structured_share": 1.0, "validation_share": 0.5,
    "validate_every_steps": 2, "save_every_steps": 50, "log_every_steps": 1,
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    answer = chain([(f"{i}. Tune it:", ParagraphRecord(" slowly.\n")) for i in range(1, 3)])
    examples = [
        ExampleRecord(
            "ordered_list", (ChatMessage("user", f"Tip {i}?"),), answer, example_id=str(i)
        )
        for i in range(4)
    ]
    write_examples(tmp_path / "structured.jsonl", examples)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def run(command: str, files: Path, *options: str) -> Result:
    return CliRunner().invoke(
        app,
        [
            command, "--model", str(checkpoint_path()), "--data", str(files),
            "--out", str(files / "out"), "--recipe", str(files / "recipe.yaml"), *options,
        ],
    )  # fmt: skip


def test_without_a_terminal_steps_are_plain_lines_and_the_checkpoint_loads(files: Path) -> None:
    result = run("train", files)

    assert result.exit_code == 0, result.output
    assert "step 1/3  loss " in result.output
    assert "step 3/3  loss " in result.output
    assert "tokens/s" in result.output
    assert "4 examples whole, 0 too long and cut at a thread" in result.output
    assert "Validation loss" in result.output
    model = AutoModelForCausalLM.from_pretrained(files / "out")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(files / "out"))


def test_a_preset_can_be_trained(files: Path) -> None:
    result = run("train", files, "--steps", "1", "--model", "apar-tiny")

    assert result.exit_code == 0, result.output
    assert (files / "out" / "model.safetensors").is_file()


def test_medusa_heads_are_trained_and_load(files: Path) -> None:
    result = run("train-medusa", files, "--steps", "2", "--model", "apar-tiny")

    assert result.exit_code == 0, result.output
    assert "step 2/2  loss " in result.output
    assert "Head 1 (token 3 ahead):" in result.output
    assert load_medusa_heads(files / "out").settings.medusa_num_heads == 2


@pytest.mark.parametrize("command", ["train", "train-medusa"])
def test_a_resumed_run_has_to_have_the_model_and_the_data_that_it_began_with(
    files: Path, command: str
) -> None:
    assert run(command, files, "--steps", "1").exit_code == 0
    data, model = files / "structured.jsonl", files / "model"
    whole = data.read_text()
    (files / "moved").mkdir()

    data.write_text(whole.replace("slowly", "faster"))
    other_data = run(command, files, "--steps", "1", "--resume")
    data.write_text(whole)
    shutil.copytree(checkpoint_path(), model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    other_model = run(command, files, "--steps", "1", "--resume", "--model", str(model))
    # Another place for the same files is no other input.
    shutil.copy(data, files / "moved")
    shutil.copytree(checkpoint_path(), model, dirs_exist_ok=True)
    same = run(
        command, files, "--steps", "1", "--resume", "--model", str(model), "--data",
        str(files / "moved"),
    )  # fmt: skip

    assert other_data.exit_code == other_model.exit_code == 1
    for result, named in ((other_data, "data"), (other_model, "model")):
        assert f"cannot go on with other inputs: the {named} is another" in result.output
        assert result.output.count("is another") == 1
    assert same.exit_code == 0, same.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "papar"), "recipe 'papar' is neither a file nor one of apar"),
        (("--model", "nowhere/at-all"), "no tokenizer in 'nowhere/at-all'"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (("--resume",), "nothing to resume"),
    ],
)
@pytest.mark.parametrize("command", ["train", "train-medusa"])
def test_bad_input_ends_in_one_clear_line(
    files: Path, command: str, options: tuple[str, ...], message: str
) -> None:
    result = run(command, files, *options)

    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_options_are_required(files: Path) -> None:
    assert CliRunner().invoke(app, ["train", "--model", "x"]).exit_code == 2
