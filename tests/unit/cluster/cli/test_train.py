"""The training commands for a few steps, and how steps are shown."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import get_args

import pytest
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from apar_core.formats.resolved_format import find_format
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.speculation.acceptance import read_table
from apar_core.offline.speculation.medusa_heads import load_medusa_heads
from apar_core.offline.speculation.prompt_tokens import load_prompt_tokens
from apar_core.offline.training.trained_formats import TRAINED_FORMATS
from apar_core.offline.training.tree_trainer import StepReport
from cluster.cli.options import Format
from cluster.cli.train import StepLines, step_progress
from tests.fakes.apar_command import apar
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
    return apar(
            command, "--model", str(checkpoint_path()), "--data", str(files),
            "--out", str(files / "out"), "--recipe", str(files / "recipe.yaml"), *options,
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


def test_the_format_of_the_answers_can_be_chosen(files: Path) -> None:
    result = run("train", files, "--steps", "1", "--format", "threadweaver")

    assert result.exit_code == 0, result.output
    assert "the tokens of format 'threadweaver' replace" in " ".join(result.output.split())
    found = find_format(AutoTokenizer.from_pretrained(files / "out").get_vocab())
    assert found is not None
    assert found.definition.name == "threadweaver"
    assert get_args(get_args(Format)[0]) == tuple(TRAINED_FORMATS)


def test_a_baseline_learns_the_same_answers_as_one_thread(files: Path) -> None:
    lora = {"rank": 2, "alpha": 4, "target_modules": "all-linear", "merge": False}
    (files / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "lora": lora}))

    result = run("train", files, "--steps", "1", "--format", "flat")

    assert result.exit_code == 0, result.output
    assert "4 examples whole" in result.output
    # A server would give an adapter only requests that may fork.
    assert not (files / "out" / "adapter").exists()
    before = AutoTokenizer.from_pretrained(checkpoint_path()).get_vocab()
    assert AutoTokenizer.from_pretrained(files / "out").get_vocab() == before


@pytest.mark.parametrize("command", ["train", "train-medusa", "train-prompts"])
def test_a_model_of_another_format_is_refused(files: Path, command: str) -> None:
    result = run(command, files, "--steps", "1", "--model", "apar-tiny-threadweaver")

    assert result.exit_code == 1
    assert "format 'threadweaver'" in result.output
    assert "Traceback" not in result.output


def test_medusa_heads_are_trained_and_load(files: Path) -> None:
    result = run("train-medusa", files, "--steps", "2", "--model", "apar-tiny")

    assert result.exit_code == 0, result.output
    assert "step 2/2  loss " in result.output
    assert "Distance 2:" in result.output
    assert load_medusa_heads(files / "out").settings.medusa_num_heads == 2


def test_prompt_tokens_are_trained_and_load_with_their_table(files: Path) -> None:
    # The table comes from the model's own answers: long ones, so that some guesses are right.
    data = files / "structured.jsonl"
    data.write_text(data.read_text().replace("Tip ", "Give me a detailed guide to singing "))

    result = run("train-prompts", files, "--steps", "2", "--model", "apar-tiny")

    assert result.exit_code == 0, result.output
    assert "step 2/2  loss " in result.output
    assert "Distance 3: " in result.output
    assert load_prompt_tokens(files / "out").settings.num_prompts == 3
    assert read_table(files / "out").num_distances == 3


@pytest.mark.parametrize("command", ["train", "train-medusa"])
def test_a_run_is_resumed_only_with_the_same_model_and_data(files: Path, command: str) -> None:
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
        assert f"cannot be resumed with other inputs: the {named} has changed" in result.output
        assert result.output.count("has changed") == 1
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
@pytest.mark.parametrize("command", ["train", "train-medusa", "train-prompts"])
def test_bad_input_is_reported_in_one_line(
    files: Path, command: str, options: tuple[str, ...], message: str
) -> None:
    result = run(command, files, *options)

    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_options_are_required(files: Path) -> None:
    assert apar("train", "--model", "x").exit_code == 2


def test_heads_prompt_tokens_and_joins_are_separate_runs(tmp_path: Path) -> None:
    result = apar("train-tiny", "--medusa", "--prompts", "--out", str(tmp_path))

    assert result.exit_code == 2
    assert "--medusa, --prompts and --format threadweaver" in result.output


@pytest.mark.ci
def test_train_tiny_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "tiny"

    result = apar(
        "train-tiny", "--out", str(out), "--steps", "2", "--seed", "3", "--cpu-threads", "1"
    )

    assert result.exit_code == 0, result.output
    assert "step 1/2  loss " in result.output
    assert "step 2/2  loss " in result.output
    assert "Written to" in result.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(out))


@pytest.mark.parametrize("option", [("--steps", "0"), ("--seed", "-1"), ("--cpu-threads", "0")])
def test_numbers_out_of_range_are_refused(option: tuple[str, str]) -> None:
    result = apar("train-tiny", *option)

    assert result.exit_code == 2


def report(step: int, validation: float | None = None) -> StepReport:
    return StepReport(
        step,
        100,
        1.5,
        num_targets=600,
        num_trees=4,
        seconds=2.0,
        padding_share=0.125,
        validation_loss=validation,
    )


def console() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False)


def text_of(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_the_first_the_last_and_validated_steps_always_get_a_line() -> None:
    target = console()
    lines = StepLines(target, interval_s=1000)

    for step in (1, 2, 3, 99, 100):
        lines.show(report(step, validation=0.25 if step == 3 else None))

    shown = text_of(target).splitlines()
    assert [line.split()[1] for line in shown] == ["1/100", "3/100", "100/100"]
    assert shown[0].startswith("step 1/100  loss 1.500  300 tokens/s  2.0 trees/s  padding 12.5%")
    assert "validation 0.250" in shown[1]


def test_other_steps_get_a_line_after_an_interval() -> None:
    target = console()
    lines = StepLines(target, interval_s=0)

    for step in (1, 2, 3):
        lines.show(report(step))

    assert len(text_of(target).splitlines()) == 3


def test_a_terminal_gets_a_bar() -> None:
    target = Console(file=io.StringIO(), width=120, force_terminal=True)

    with step_progress(target, "training", 100) as show:
        show(report(7))

    assert "7/100" in text_of(target)
    assert "loss 1.500" in text_of(target)


def test_an_interrupted_run_says_how_it_continues(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("apar_core.offline.training.fine_tune.fine_tune", interrupt)
    out = files / "out"

    first = " ".join(run("train", files).output.split())
    (out / "checkpoints" / "checkpoint-4").mkdir(parents=True)
    second = " ".join(run("train", files).output.split())

    assert f"Interrupted: no checkpoint yet in {out}" in first
    assert f"continue from the last checkpoint with --resume --out {out}" in second
