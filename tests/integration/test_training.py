"""Training from chats to a checkpoint, also on several processes, with unchanged losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import (  # type: ignore[import-untyped]
    load_config_from_file,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.evaluation.fork_check import TransformersThreadDecoder
from apar_core.offline.training import recipe as recipe_module
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.offline.training.pretrained import tree_tokens
from apar_core.offline.training.recipe import TinyModelSettings
from apar_core.offline.training.train_tiny import tiny_recipe, train_tiny
from apar_core.offline.training.tree_trainer import StepReport
from cluster.cli.main import app
from tests.fakes.example_files import write_examples
from tests.integration.uneven_training import NUM_VALIDATION, run

ROOT = Path(__file__).resolve().parents[2]
MIXED = ROOT.parent / "shared" / "data" / "traces" / "mixed.jsonl"
FSDP = Path(recipe_module.__file__).with_name("fsdp.yaml")
RECIPE = {
    "batch_size": 4, "micro_batch_size": 1, "num_steps": 3, "learning_rate": 1e-5,
    "dtype": "float32", "context_length": 512, "validation_share": 0.05,
    "validate_every_steps": 2, "save_every_steps": 3, "log_every_steps": 1,
}  # fmt: skip
# First losses of the run that made the shipped weights.
LOSSES_BEFORE = [
    8.355895, 8.350328, 8.293461, 8.175691, 8.157182, 7.910452, 7.833801, 7.801377,
]  # fmt: skip


def corpus_data(folder: Path) -> Path:
    folder.mkdir()
    examples = [
        replace(example, example_id=str(number), raw_prompt=False)
        for number, example in enumerate(Corpus(5).examples(40))
    ]
    write_examples(folder / "examples.jsonl", examples)
    return folder / "examples.jsonl"


def arguments(folder: Path, data: Path, out: Path) -> list[str]:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return [
        "train", "--model", str(checkpoint_path()), "--data", str(data), "--out", str(out),
        "--recipe", str(folder / "recipe.yaml"),
    ]  # fmt: skip


def launch(*command: str, timeout_s: float = 300) -> str:
    """Run a command on two processes and return their output.

    The test fails after the timeout, for example if the processes deadlock; none is left behind.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         *command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        stdout, stderr = launcher.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The launcher ends its processes when it is terminated; killed, it would leave them.
        launcher.terminate()
        _, stderr = launcher.communicate()
        pytest.fail(f"two processes did not end within {timeout_s} s:\n{stderr[-3000:]}")
    assert launcher.returncode == 0, stderr[-3000:]
    return stdout


def validations(out: Path) -> list[float]:
    state = json.loads((out / "checkpoints" / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]


class _EnoughStepsError(Exception):
    pass


def first_losses(settings_steps: int, out: Path) -> Sequence[float]:
    losses: list[float] = []

    def keep(report: StepReport) -> None:
        losses.append(report.loss)
        if len(losses) == settings_steps:
            raise _EnoughStepsError

    with pytest.raises(_EnoughStepsError):
        train_tiny(out, TinyModelSettings(), tiny_recipe(), keep)
    return losses


@pytest.mark.ci
def test_the_embedded_model_is_trained_as_when_its_weights_were_made(tmp_path: Path) -> None:
    losses = first_losses(len(LOSSES_BEFORE), tmp_path)

    assert losses == pytest.approx(LOSSES_BEFORE, abs=1e-4)


@pytest.mark.ci
def test_a_checkpoint_of_the_command_still_forks(tmp_path: Path) -> None:
    data = corpus_data(tmp_path / "data")

    result = CliRunner().invoke(app, arguments(tmp_path, data, tmp_path / "out"))

    assert result.exit_code == 0, result.output
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    decode = TransformersThreadDecoder(model.eval(), tree_tokens(tokenizer), tokenizer.pad_token_id)
    questions = [
        example
        for example in Corpus(0, held_out=True).examples(60)
        if example.kind == "numbered" and not example.raw_prompt
    ]
    answers = decode([prompt_token_ids(question, tokenizer) for question in questions[:4]])
    assert all(len(threads) > 2 for threads in answers)


@pytest.mark.slow
@pytest.mark.skipif(not MIXED.is_file(), reason=f"needs the real answers in {MIXED}")
def test_real_chats_are_prepared_and_trained_on(tmp_path: Path) -> None:
    prepared = CliRunner().invoke(
        app, ["data", "prepare", str(MIXED), "--out", str(tmp_path / "d")]
    )
    assert prepared.exit_code == 0, prepared.output

    result = CliRunner().invoke(app, arguments(tmp_path, tmp_path / "d", tmp_path / "out"))

    assert result.exit_code == 0, result.output
    assert "step 3/3" in result.output
    assert "too long and cut at a thread" in result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_configuration_for_fsdp_loads_in_accelerate() -> None:
    loaded = load_config_from_file(str(FSDP))

    assert "FSDP" in str(loaded.distributed_type)
    assert loaded.mixed_precision == "bf16"
    assert loaded.fsdp_config["fsdp_version"] == 2
    assert loaded.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert loaded.fsdp_config["fsdp_cpu_ram_efficient_loading"] is True


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cluster.cli.main", "tests.integration.sharded_command"])
def test_two_processes_train_what_one_does(tmp_path: Path, command: str) -> None:
    data = corpus_data(tmp_path / "data")
    one = CliRunner().invoke(app, arguments(tmp_path, data, tmp_path / "one"))
    assert one.exit_code == 0, one.output

    printed = launch("-m", command, *arguments(tmp_path, data, tmp_path / "two"))  # fmt: skip

    assert printed.count("Checkpoint written") == 1
    assert validations(tmp_path / "two") == pytest.approx(validations(tmp_path / "one"), abs=1e-5)
    checkpoint = Path("checkpoints") / "checkpoint-3" / "model.safetensors"
    alone, together = (load_file(tmp_path / name / checkpoint) for name in ("one", "two"))
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=0, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--shard",)], ids=["replicated", "sharded"])
def test_rows_that_the_processes_cannot_share_evenly_change_nothing(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    out = tmp_path / "runs.pt"

    launch("-m", "tests.integration.uneven_training", str(out), *flags)

    together = torch.load(out)
    for num_validation in NUM_VALIDATION:
        expected, found = run(num_validation), together[num_validation]
        assert found["trees"] == expected["trees"] == [3, 3]
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert found["validation"] == pytest.approx(expected["validation"], abs=1e-5)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_sharded_model_has_the_loss_and_gradients_of_a_whole_one() -> None:
    found = json.loads(launch("-m", "tests.integration.sharded_loss").strip().splitlines()[-1])

    assert found["sharded"] == pytest.approx(found["plain"], abs=1e-5)
    assert found["gradient"] < 1e-5
