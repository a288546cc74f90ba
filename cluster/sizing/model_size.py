"""How large a model is: parameters, weights, KV cache per token; from figures, file or preset."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cluster.config.model import PRESETS
from cluster.sizing.errors import SizingError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
_HEADER_LENGTH_BYTES = 8
# Vicuna v1.3, which is Llama 1, and two control tokens. Source: its config.json.
_LLAMA = {"vocab_size": 32_002, "max_position_embeddings": 2048, "dtype": "float16"}
_HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "THUDM/apar-7b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "THUDM/apar-13b": {
        **_LLAMA, "hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model takes memory and time; `source` says where the figures are from.

    `max_positions` is None where nothing says it.
    """

    name: str
    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    source: str
    max_positions: int | None = None

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return self.parameters * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of one token in all layers, in the dtype of the weights (fp8: 16 bits)."""
        element = max(DTYPE_BYTES[self.dtype], 2)
        return 2 * self.layers * self.kv_heads * self.head_dim * element


def find_model(name_or_path: str, dtype: str | None = None) -> ModelSize:
    """The size of a preset, of a checkpoint's folder, of a config.json, or of a cached hub model.

    Raises SizingError where no configuration is found, or one that lacks a figure.
    """
    path = PRESETS[name_or_path].path if name_or_path in PRESETS else name_or_path
    if path in _HUB_CONFIGS:
        return model_of_config(name_or_path, _HUB_CONFIGS[path], dtype, "Vicuna v1.3's config.json")
    file = _config_file(Path(path).expanduser(), path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SizingError(f"{file} is no configuration of a model: {error}") from error
    if not isinstance(config, dict):
        raise SizingError(f"{file} is no configuration of a model: it holds no mapping")
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
    raise SizingError(
        f"no model {name!r} on this machine: give a preset ({', '.join(PRESETS)}), a checkpoint's "
        "folder, a config.json, or --parameters, --layers, --kv-heads and --head-dim"
    )


def model_of_config(
    name: str,
    config: dict[str, Any],
    dtype: str | None,
    source: str,
    parameters: int | None = None,
) -> ModelSize:
    """The size by a Hugging Face configuration.

    Without `parameters` they are counted as those of a decoder with gated MLPs. Raises SizingError
    where a figure is missing or of no use.
    """
    text = config.get("text_config", config)
    try:
        heads = int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or text["hidden_size"] // heads)
        layers = int(text["num_hidden_layers"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        counted = parameters or _decoder_parameters(text, heads, kv_heads, head_dim)
    except (KeyError, TypeError, ValueError) as error:
        raise SizingError(f"{source} does not say the model's size: {error} is missing") from error
    wanted = dtype or str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    how = "" if parameters else ", parameters counted from its dimensions"
    return ModelSize(
        name, counted, layers, kv_heads, head_dim, checked_dtype(wanted), source + how,
        text.get("max_position_embeddings"),
    )  # fmt: skip


def checked_dtype(name: str) -> str:
    """A dtype whose width is known. Raises SizingError for another."""
    if name not in DTYPE_BYTES:
        raise SizingError(f"unknown dtype {name!r}: known are {', '.join(DTYPE_BYTES)}")
    return name


def _decoder_parameters(text: dict[str, Any], heads: int, kv_heads: int, head_dim: int) -> int:
    hidden, inner = int(text["hidden_size"]), int(text["intermediate_size"])
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = int(text.get("num_local_experts") or text.get("num_experts") or 1)
    layer = attention + 3 * hidden * inner * experts + 2 * hidden
    embeddings = int(text["vocab_size"]) * hidden
    matrices = 1 if text.get("tie_word_embeddings") else 2
    return int(text["num_hidden_layers"]) * layer + matrices * embeddings + hidden


def _num_parameters(files: list[Path]) -> int | None:
    """Elements of all tensors by the headers of safetensors files (JSON behind its length)."""
    number = 0
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            header = json.loads(stream.read(length))
        tensors = (entry for name, entry in header.items() if name != "__metadata__")
        number += sum(prod(tensor["shape"]) for tensor in tensors)
    return number or None
