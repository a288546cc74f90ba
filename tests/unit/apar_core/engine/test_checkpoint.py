from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from apar_core.engine.checkpoint import inspect_checkpoint
from apar_core.errors import CheckpointError
from apar_core.formats.control_tokens import ControlTokens
from apar_core.formats.shipped_formats import SHIPPED

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_checkpoint(directory: Path, *, added: list[str], num_embeddings: int = 300) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "vocab_size": num_embeddings,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", *added])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    weights = {"a": torch.zeros(3, 5), "b": torch.zeros(7)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def test_an_apar_checkpoint_is_reported_with_its_control_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, added=["[Fork]", "[Child]"])

    report = inspect_checkpoint(path)

    assert report.control_tokens == ControlTokens(257, 258, "[Fork]", "[Child]")
    assert report.resolved is not None
    assert report.resolved.spellings == {
        257: [ALPHABET.index(char) for char in "[Fork]"],
        258: [ALPHABET.index(char) for char in "[Child]"],
    }
    assert report.architecture == "LlamaForCausalLM"
    assert report.model_type == "llama"
    assert report.dtype == "bfloat16"
    assert report.max_positions == 128
    assert (report.vocabulary_size, report.num_embeddings) == (259, 300)
    assert report.num_parameters == 3 * 5 + 7
    assert report.weights_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_an_ordinary_checkpoint_is_reported_without_control_tokens(tmp_path: Path) -> None:
    report = inspect_checkpoint(write_checkpoint(tmp_path, added=[]))

    assert (report.control_tokens, report.resolved) == (None, None)


def test_a_named_format_is_reported_as_such(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, added=["[fork]"])

    assert inspect_checkpoint(path).found is None
    report = inspect_checkpoint(path, SHIPPED["padoc"])

    assert report.found is not None
    assert (report.found.definition.name, report.found.source) == ("padoc", "configuration")
    assert report.resolved is not None
    assert report.resolved.spellings == {257: [ALPHABET.index(char) for char in "[fork]"]}


def test_half_a_pair_of_control_tokens_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, added=["[SplitMask]"])

    with pytest.raises(CheckpointError, match=r"'\[SplitMask\]' \(id 257\) but not '\[SplitSop\]'"):
        inspect_checkpoint(path)


def test_control_tokens_without_embeddings_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, added=["[Fork]", "[Child]"], num_embeddings=258)

    with pytest.raises(CheckpointError, match=r"'\[Child\]' has id 258, .* only 258 embeddings"):
        inspect_checkpoint(path)


def test_weights_in_another_format_have_a_size_but_no_parameter_count(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, added=[])
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"12345")

    report = inspect_checkpoint(path)

    assert (report.weights_bytes, report.num_parameters) == (5, None)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no model configuration in '{tmp_path}'"):
        inspect_checkpoint(str(tmp_path))
