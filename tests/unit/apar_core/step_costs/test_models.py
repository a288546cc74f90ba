"""Sizes of models, by dimensions worked out by hand and by what vLLM's own report counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import StepCostsError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.step_costs.models import ModelSize, find_model, model_of_config

TINY = Path(checkpoint_path())


def test_vicuna_7b_and_13b_are_what_is_known_of_them() -> None:
    seven, thirteen = find_model("apar-7b"), find_model("apar-13b")

    assert seven.parameters == 6_738_432_000
    assert seven.kv_bytes_per_token == 2 * 32 * 4096 * 2 == 512 * 1024
    assert thirteen.parameters == 13_015_884_800
    assert thirteen.kv_bytes_per_token == 2 * 40 * 5120 * 2
    assert seven.weight_bytes == 2 * seven.parameters
    assert seven.max_positions == 2048


def test_a_checkpoint_is_counted_by_its_tensors() -> None:
    for given in ("apar-tiny", str(TINY), str(TINY / "config.json")):
        size = find_model(given)
        assert size.kv_bytes_per_token == 2 * 4 * 8 * 32 * 2
        assert (size.layers, size.dtype, size.max_positions) == (4, "bfloat16", 2048)
        assert 4.2e6 < size.parameters < 4.4e6


def test_counting_dimensions_agrees_with_counting_tensors() -> None:
    config = json.loads((TINY / "config.json").read_text())

    counted = model_of_config("tiny", config, None, "file")

    assert counted.parameters == find_model(str(TINY)).parameters


LLAMA_3_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_grouped_heads_and_experts_are_counted() -> None:
    size = model_of_config("llama", LLAMA_3_8B, None, "file")
    experts = LLAMA_3_8B | {"vocab_size": 32000, "num_local_experts": 8}

    assert size.parameters == 8_030_261_248
    assert size.kv_bytes_per_token == 128 * 1024
    # Mixtral 8x7B, but for its gates of 32 x 8 x 4096.
    mixtral = model_of_config("mixtral", experts, None, "file").parameters
    assert mixtral == 46_702_792_704 - 32 * 8 * 4096


def test_a_dtype_may_be_given_and_fp8_weights_keep_a_16_bit_cache() -> None:
    wide = model_of_config("m", LLAMA_3_8B, "float32", "file")
    narrow = model_of_config("m", LLAMA_3_8B, "fp8", "file")

    assert wide.weight_bytes == 4 * wide.parameters
    assert wide.kv_bytes_per_token == 256 * 1024
    assert narrow.weight_bytes == narrow.parameters
    assert narrow.kv_bytes_per_token == 128 * 1024


def test_a_text_model_within_another_configuration_is_found() -> None:
    size = model_of_config("vl", {"text_config": LLAMA_3_8B, "vision": 1}, None, "file")

    assert size.layers == 32


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{}", "does not say the model's size"),
        ("[1]", "it holds no mapping"),
        ("{", "is no configuration of a model"),
        (json.dumps(LLAMA_3_8B | {"torch_dtype": "int3"}), "unknown dtype 'int3'"),
        (json.dumps(LLAMA_3_8B | {"vocab_size": None}), "missing or no number"),
        (json.dumps(LLAMA_3_8B | {"kv_lora_rank": 512}), "latent attention"),
        (json.dumps(LLAMA_3_8B | {"n_routed_experts": 64}), "mixture of experts"),
        (
            json.dumps(LLAMA_3_8B | {"quantization_config": {"quant_method": "awq"}}),
            "weights quantized by 'awq'",
        ),
    ],
)
def test_an_unusable_configuration_is_named(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)

    with pytest.raises(StepCostsError, match=named):
        find_model(str(file))


def test_an_unknown_model_is_named_with_what_may_be_given() -> None:
    for name in ("nobody/nothing", "no such name at all", "/no/such/folder"):
        with pytest.raises(StepCostsError, match=r"a known one .*llama-7b"):
            find_model(name)


def test_known_models_and_their_aliases() -> None:
    llama_3 = model_of_config("l", LLAMA_3_8B, None, "file")

    assert find_model("llama-3-8b").parameters == llama_3.parameters
    assert find_model("llama-3-70b").parameters == 70_553_706_496
    assert find_model("lmsys/vicuna-7b-v1.3").parameters == find_model("llama-7b").parameters
    assert find_model("THUDM/apar-7b").parameters == find_model("apar-7b").parameters
    assert find_model("llama-13b").config["num_hidden_layers"] == 40


def test_a_step_reads_no_input_embedding_of_its_own() -> None:
    seven = find_model("llama-7b")
    tied = model_of_config("t", LLAMA_3_8B | {"tie_word_embeddings": True}, None, "file")

    assert seven.parameters - seven.matrix_parameters == 32_000 * 4096
    assert tied.matrix_parameters == tied.parameters


def test_fp8_quantization_is_read_from_the_configuration() -> None:
    config = LLAMA_3_8B | {"quantization_config": {"quant_method": "fp8"}}

    assert model_of_config("m", config, None, "file").dtype == "fp8"
    assert model_of_config("m", config, "bfloat16", "file").dtype == "bfloat16"


def test_a_model_of_figures_has_a_configuration_with_its_kv_heads() -> None:
    size = ModelSize("own", 10**9, 20, 4, 128, "bfloat16", "given")

    assert size.config["num_hidden_layers"] == 20
    assert size.config["num_key_value_heads"] == 4
    assert size.config["head_dim"] == 128
