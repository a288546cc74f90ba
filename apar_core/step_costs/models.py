"""Dimensions of a model: parameters, weights, KV cache per token; by name, file or figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from apar_core.errors import StepCostsError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.smollm2 import FETCHED
from apar_core.suggestions import did_you_mean

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
_HEADER_LENGTH_BYTES = 8

# Sources: the config.json of huggyllama/llama-7b and llama-13b, lmsys/vicuna-7b-v1.3 (with two
# control tokens: APAR's checkpoints), Meta-Llama-3-8B and -70B, and Qwen/Qwen3-32B.
_LLAMA = {"vocab_size": 32_000, "max_position_embeddings": 2048, "dtype": "float16"}
_LLAMA_7B = {
    **_LLAMA, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
_LLAMA_13B = {
    **_LLAMA, "hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 40,
    "num_attention_heads": 40,
}  # fmt: skip
_LLAMA_3 = {
    "vocab_size": 128_256, "max_position_embeddings": 8192, "dtype": "bfloat16",
    "num_key_value_heads": 8,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-7b": _LLAMA_7B,
    "llama-13b": _LLAMA_13B,
    "llama-3-8b": {
        **_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3-70b": {
        **_LLAMA_3, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-32b": {
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "dtype": "bfloat16",
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    },
    "apar-7b": {**_LLAMA_7B, "vocab_size": 32_002},
    "apar-13b": {**_LLAMA_13B, "vocab_size": 32_002},
}  # fmt: skip
MODELS = tuple(_CONFIGS)
_ALIASES = {
    "THUDM/apar-7b": "apar-7b",
    "THUDM/apar-13b": "apar-13b",
    "lmsys/vicuna-7b-v1.3": "llama-7b",
    "lmsys/vicuna-13b-v1.3": "llama-13b",
}
# Fields whose models compute or cache something that the dimensions here do not describe.
_REFUSED = {
    "kv_lora_rank": "multi-head latent attention",
    "n_routed_experts": "DeepSeek's mixture of experts",
    "n_shared_experts": "shared experts",
    "num_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "ssm_cfg": "state-space layers",
    "linear_num_value_heads": "linear attention",
}


@dataclass(frozen=True)
class ModelSize:
    """The dimensions of a model that decide about memory and time.

    parameters: all of them. embedding_parameters: those of an input embedding of its own, of
        which a step reads one row per token.
    expert_parameters: those of all experts of all layers, 0 for a dense model. Each token uses
        `used_experts` of the `num_experts` of a layer.
    dtype: of the weights. source: where the figures are from.
    config: the Hugging Face configuration; made up from the figures where only these are given.
    """

    name: str
    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    source: str
    max_positions: int | None = None
    embedding_parameters: int = 0
    expert_parameters: int = 0
    num_experts: int = 1
    used_experts: int = 1
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.config:
            hidden = self.kv_heads * self.head_dim
            made_up = {
                "hidden_size": hidden, "intermediate_size": 4 * hidden,
                "num_hidden_layers": self.layers, "num_attention_heads": self.kv_heads,
                "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            }  # fmt: skip
            object.__setattr__(self, "config", made_up)

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, 0 if unknown."""
        return int(self.config.get("vocab_size", 0))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * DTYPE_BYTES[self.dtype]

    @property
    def matrix_parameters(self) -> int:
        """Parameters that a step multiplies with: all but those of the input embedding."""
        return self.parameters - self.embedding_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of one token in all layers, in the dtype of the weights (fp8: 16 bits)."""
        element = max(DTYPE_BYTES[self.dtype], 2)
        return 2 * self.layers * self.kv_heads * self.head_dim * element

    def kv_shards(self, tensor_parallel: int) -> int:
        """Return over how many GPUs a token's KV cache is split: no more than KV heads."""
        return min(tensor_parallel, self.kv_heads)

    def block_layer_bytes(self, block_size: int, tensor_parallel: int) -> int:
        """Return the bytes of a KV block of so many tokens in one layer and on one GPU."""
        shards = self.layers * self.kv_shards(tensor_parallel)
        return round(block_size * self.kv_bytes_per_token / shards)


def find_model(name_or_path: str, dtype: str | None = None) -> ModelSize:
    """Return the dimensions of a known model, a checkpoint's folder, a config.json or a hub model.

    A hub model must be in the local cache. `dtype` replaces that of the weights. Raises
    StepCostsError for an unknown name and for a configuration that lacks a figure.
    """
    name = _ALIASES.get(name_or_path, name_or_path)
    if name in _CONFIGS:
        return model_of_config(name_or_path, _CONFIGS[name], dtype, "its config.json")
    folders = {"apar-tiny": checkpoint_path()} | {
        name: each.folder for name, each in FETCHED.items()
    }
    file = _config_file(folders.get(name, Path(name).expanduser()), name)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StepCostsError(f"{file} is no configuration of a model: {error}") from error
    if not isinstance(config, dict):
        raise StepCostsError(f"{file} is no configuration of a model: it holds no mapping")
    counted = _num_parameters(sorted(file.parent.glob("*.safetensors")))
    return model_of_config(name_or_path, config, dtype, str(file), counted)


def _config_file(path: Path, name: str) -> Path:
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached)
    raise StepCostsError(
        f"no model {name!r} on this machine: give a known one (apar-tiny, {', '.join(MODELS)}), "
        f"one that `apar fetch` has fetched ({', '.join(FETCHED)}), a checkpoint's folder, or a "
        f"config.json{did_you_mean(name, ('apar-tiny', *MODELS, *FETCHED))}"
    )


def model_of_config(
    name: str,
    config: Mapping[str, Any],
    dtype: str | None,
    source: str,
    parameters: int | None = None,
) -> ModelSize:
    """Return the dimensions in a Hugging Face configuration.

    Without `parameters` they are counted as those of a decoder with gated MLPs. Raises
    StepCostsError for a missing or invalid figure and for an architecture that is not described by
    these dimensions.
    """
    text = config.get("text_config", config)
    for key, what in _REFUSED.items():
        if text.get(key):
            raise StepCostsError(f"{source}: models with {what} ({key}) are not supported")
    try:
        heads = int(text["num_attention_heads"])
        hidden = int(text["hidden_size"])
        head_dim = int(text.get("head_dim") or hidden // heads)
        layers = int(text["num_hidden_layers"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        num_experts = int(text.get("num_local_experts") or text.get("num_experts") or 1)
        used_experts = int(text.get("num_experts_per_tok") or 1)
        inner = int(text.get("moe_intermediate_size") or text["intermediate_size"])
        vocabulary = int(text["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise StepCostsError(
            f"{source} does not say the model's size: {error} is missing or no number"
        ) from error
    embedding = vocabulary * hidden
    experts = layers * 3 * hidden * inner * num_experts
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    is_tied = bool(text.get("tie_word_embeddings"))
    layer_parameters = layers * (attention + 2 * hidden) + experts
    counted = layer_parameters + (1 if is_tied else 2) * embedding + hidden
    how = "" if parameters else ", parameters counted from its dimensions"
    return ModelSize(
        name=name,
        parameters=parameters or counted,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=_weight_dtype(text, config, dtype, source),
        source=source + how,
        max_positions=text.get("max_position_embeddings"),
        embedding_parameters=0 if is_tied else embedding,
        expert_parameters=experts if num_experts > 1 else 0,
        num_experts=num_experts,
        used_experts=min(used_experts, num_experts),
        config=dict(text),
    )


def _weight_dtype(
    text: Mapping[str, Any], config: Mapping[str, Any], given: str | None, source: str
) -> str:
    """Return the dtype of the weights: the given one, the quantization's, the configuration's."""
    if given is not None:
        return checked_dtype(given)
    quantization = text.get("quantization_config") or config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method")
        if method != "fp8":
            raise StepCostsError(
                f"{source}: weights quantized by {method!r}; give the dtype that takes as many "
                f"bytes ({', '.join(DTYPE_BYTES)})"
            )
        return "fp8"
    return checked_dtype(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"))


def checked_dtype(name: str) -> str:
    """Return a dtype whose width is known. Raises StepCostsError for another."""
    if name not in DTYPE_BYTES:
        raise StepCostsError(
            f"unknown dtype {name!r}: known are {', '.join(DTYPE_BYTES)}"
            f"{did_you_mean(name, DTYPE_BYTES)}"
        )
    return name


def _num_parameters(files: list[Path]) -> int | None:
    """Return the elements of all tensors by the headers of safetensors files, None without any."""
    number = 0
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            header = json.loads(stream.read(length))
        tensors = (entry for name, entry in header.items() if name != "__metadata__")
        number += sum(prod(tensor["shape"]) for tensor in tensors)
    return number or None
