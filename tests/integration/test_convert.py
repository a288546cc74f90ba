"""Run `apar convert` as a user does: on a model that has learned nothing, interrupted once."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from apar_core.engine.offline_engine import OfflineEngine
from tests.fakes.apar_command import APAR
from tests.integration.engine_process import EngineProcess
from tests.unit.apar_core.offline.training.plain_tokenizer import plain_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RECIPE = {
    "batch_size": 2,
    "micro_batch_size": 1,
    "num_steps": 6,
    "save_every_steps": 1,
    "validate_every_steps": 3,
    "learning_rate": 1e-3,
    "context_length": 512,
    "dtype": "float32",
    "vocabulary_multiple": 8,
    "lora": {"rank": 4, "alpha": 8, "merge": False},
}
TEMPLATE = """\
{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}\
{% if add_generation_prompt %}assistant: {% endif %}"""
TIMEOUT_S = 900


def write_model(folder: Path) -> Path:
    """Write a model of Qwen's family, with a head of its own."""
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def write_chats(file: Path) -> Path:
    lines = []
    for number in range(12):
        answer = "1. Tune: play slowly.\n2. Play: tune the guitar.\n3. Stop: then play."
        if number % 3 == 0:
            answer = "Play slowly."
        messages = [
            {"role": "user", "content": f"How do I play song {number} on the guitar?"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines))
    return file


def answers(engine: OfflineEngine) -> tuple[bool, int]:
    """Return whether the engine has a fork adapter, and answer. Runs in the engine's process."""
    found = engine.generate([engine.chat_prompt("Play?")], {"temperature": 0.0, "max_tokens": 8})
    processor = engine._engine.input_processor
    return processor._fork_adapter is not None, len(found[0].token_ids)


def test_a_model_of_another_family_is_converted_although_training_was_interrupted(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    out = tmp_path / "out"
    command = [
        *(*APAR, "convert", str(write_model(tmp_path / "qwen")), "--out", str(out)),
        *("--chats", str(write_chats(tmp_path / "chats.jsonl")), "--recipe", str(recipe)),
        *("--hold-out", "3", "--answers", "2", "--max-tokens", "24"),
    ]

    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not any((out / "model").glob("checkpoints/checkpoint-*/trainer_state.json")):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 130, said
    assert f"the same command with --out {out} continues" in said.replace("\n", " ")

    again = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert again.returncode == 0, again.stdout + again.stderr
    assert "1/3 training trees: done before" in again.stdout
    assert f"apar serve {out / 'model'}" in again.stdout.replace("\n", "")
    card = (out / "model" / "README.md").read_text()
    assert "Chats of chats.jsonl." in card
    stages = json.loads((out / "stages.json").read_text())
    assert all(stage["is_done"] for stage in stages.values())
    assert list(stages) == ["prepare", "train", "evaluate"]

    engine = EngineProcess(
        model=str(out / "model"),
        max_model_len=512,
        additional_config={"apar": {"fork_adapter": str(out / "model" / "adapter")}},
    )
    try:
        has_adapter, num_tokens = engine.call(answers)
    finally:
        engine.close()
    assert has_adapter
    assert num_tokens > 0
