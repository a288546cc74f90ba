"""The fingerprint of a model from its files is that of the loaded model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.formats.prompt_file import files_fingerprint
from apar_core.offline.speculation.prompt_tokens import model_fingerprint


def save_model(folder: Path, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="5KB")
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_files_have_the_fingerprint_of_their_model(tmp_path: Path, tied: bool) -> None:
    model = save_model(tmp_path, tied=tied)
    files = sorted(tmp_path.glob("*.safetensors"))

    assert len(files) > 1
    assert files_fingerprint(files, tied=tied) == model_fingerprint(model)
    assert files_fingerprint(files[1:], tied=tied) != model_fingerprint(model)


def test_copies_and_buffers_of_older_checkpoints_do_not_count(tmp_path: Path) -> None:
    model = save_model(tmp_path, tied=True)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    weights = load_file(file)
    save_file(
        {
            **weights,
            "lm_head.weight": embedding.detach().clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        },
        file,
    )

    found = files_fingerprint(tmp_path.glob("*.safetensors"), tied=True)

    assert found == model_fingerprint(model)
