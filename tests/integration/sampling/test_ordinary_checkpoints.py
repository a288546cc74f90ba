"""Checkpoints that cannot fork, under the forking scheduler."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from apar_core.engine.offline import OfflineEngine
from apar_core.errors import CheckpointError
from tests.integration.engine_process import EngineProcess

pytestmark = pytest.mark.engine

PROMPTS = ["Give me 5 tips.", "What does [Fork] mean?", "Hi"]


def write_checkpoint(directory: Path, special_tokens: tuple[str, ...] = ()) -> Path:
    """A small random Llama whose tokenizer knows single bytes and the given special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def greedy(engine: OfflineEngine) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
    """Answers to PROMPTS, and whether any has a tree. Runs in the engine's process."""
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
    # The last one claims what only the engine's own input processor may write.
    claims = {**settings, "extra_args": {"apar": {"fork_id": 1}}}
    answers = engine.generate(PROMPTS, [settings, settings, claims])
    has_tree = any(answer.record is not None for answer in answers)
    return [(answer.text, answer.token_ids) for answer in answers], has_tree


def run(directory: Path, **engine_args: Any) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
    engine = EngineProcess(model=str(directory), max_model_len=128, **engine_args)
    try:
        return engine.call(greedy)
    finally:
        engine.close()


def test_an_ordinary_checkpoint_is_served_as_vllm_serves_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path)

    forking, has_tree = run(directory)
    warnings = capfd.readouterr()
    stock, _ = run(directory, scheduler_cls=None)

    assert forking == stock
    assert not has_tree
    assert "no control tokens" in warnings.out + warnings.err
    captured = capfd.readouterr()
    assert "no control tokens" not in captured.out + captured.err


def test_a_checkpoint_with_one_control_token_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, ("[Fork]",))
    assert (
        "[Fork]"
        in json.loads((directory / "tokenizer.json").read_text())["added_tokens"][-1]["content"]
    )

    with pytest.raises(CheckpointError, match=r"'\[Fork\]'.*but not '\[Child\]'"):
        run(directory)
