import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text
from cluster.experiments.cpu_model import CPU_MODELS, FoldedText, write_cpu_model

TEXT = "1. Practise daily: even ten minutes a day help more than an hour a week."
LAST_CACHE_BYTES = 32 << 20


def test_the_folder_is_a_model_of_these_dimensions_with_a_tokenizer(tmp_path: Path) -> None:
    model = CPU_MODELS["cpu-7b"]

    folder = write_cpu_model(model, tmp_path / "model")

    config = AutoConfig.from_pretrained(folder)
    assert (config.hidden_size, config.num_hidden_layers) == (model.hidden, model.layers)
    assert config.num_attention_heads == model.heads
    assert config.num_key_value_heads == model.kv_heads
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 4096
    assert load_text(str(folder)).tokens == load_text(str(checkpoint_path())).tokens


def test_weights_are_well_beyond_the_last_cache() -> None:
    small, large = CPU_MODELS["cpu-7b"], CPU_MODELS["cpu-13b"]

    assert small.weight_bytes > 3 * LAST_CACHE_BYTES
    # As 13 billion weights are to 7.
    assert 1.6 < large.weight_bytes / small.weight_bytes < 2.1


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "intermediate"),
    [("cpu-7b", 32, 4096, 11008), ("cpu-13b", 40, 5120, 13824)],
)
def test_a_token_of_the_kv_cache_is_the_part_of_the_weights_that_it_is_in_llama(
    name: str, layers: int, hidden: int, intermediate: int
) -> None:
    weights = layers * (4 * hidden**2 + 3 * hidden * intermediate) + 32_000 * hidden
    in_llama = 2 * layers * hidden / weights

    model = CPU_MODELS[name]

    assert model.kv_bytes_per_token / model.weight_bytes == pytest.approx(in_llama, rel=0.06)


def test_folded_text_has_the_counts_of_the_large_tokenizer_and_ids_of_the_small_model() -> None:
    large, small = load_text(LLAMA_TOKENIZER), load_text(str(checkpoint_path()))
    folded = FoldedText(large, small)

    assert len(folded.encode(TEXT)) == len(large.encode(TEXT))
    chat = [ChatMessage("user", TEXT)]
    assert len(folded.encode_chat(chat)) == len(large.encode_chat(chat))
    control = {small.tokens.fork_id, small.tokens.child_id, small.tokens.end_id}
    assert control.isdisjoint(folded.encode(TEXT))
    assert all(8 <= token_id < 4096 for token_id in folded.encode(TEXT))
