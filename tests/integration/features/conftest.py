"""Checkpoints of the tests of vLLM's features."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from tests.integration.features.tiny_adapter import Adapter, train_adapter
from tests.integration.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return train_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with random weights, which vLLM serves as an embedding model."""
    folder = tmp_path_factory.mktemp("encoder")
    write_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder)
    return folder
