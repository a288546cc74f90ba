"""Converts a GGUF file of a Llama model into a checkpoint for transformers and vLLM.

transformers reads GGUF files too, but not how SmolLM2's tokenizer splits digits, and takes minutes.
What this module writes depends on the file only, so its hashes can be recorded.

Sources: the GGUF specification (docs/gguf.md in ggml), the block layouts of ggml-common.h, and
llama.cpp's conversion in the other direction (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apar_core.errors import CheckpointError
from apar_core.file_modes import share_weights
from apar_core.reporting import ShowProgress

_VERSION = 3
_ALIGNMENT_BYTES = 32
# Types of metadata values, by their numbers.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Types of tensors: the values of a block, and its layout.
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_LAYOUTS = {
    _F32: (1, np.dtype("<f4")),
    _Q4_1: (32, np.dtype([("scale", "<f2", 1), ("least", "<f2", 1), ("nibbles", "u1", 16)])),
    _Q8_0: (32, np.dtype([("scale", "<f2", 1), ("numbers", "i1", 32)])),
}
_CONTROL_TOKEN = 3
# Names in the file and in the checkpoint. Those of layers follow `blk.N.` and `model.layers.N.`.
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ADDED_TOKEN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
"""Properties of a special token in `tokenizer.json`."""
_BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
# By `tokenizer.ggml.pre`; as llama.cpp splits texts (llama-vocab.cpp).
_PRE_TOKENIZERS = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        _BYTE_LEVEL | {"add_prefix_space": False},
    ]
}


def convert_gguf(
    content: bytes, folder: Path, progress: ShowProgress, sampling: Mapping[str, float]
) -> None:
    """Write the checkpoint of a GGUF file's content to a new folder, in bfloat16.

    `sampling` becomes the default of requests.

    Raises CheckpointError if the file is no Llama model with tied embeddings and a tokenizer that
    is known here.
    """
    gguf = _Gguf(content)
    facts = gguf.metadata
    architecture, split = facts.get("general.architecture"), facts.get("tokenizer.ggml.pre")
    if architecture != "llama" or split not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"GGUF files of architecture {architecture!r} with tokenizer {split!r} are not "
            f"converted; expected: 'llama' with {', '.join(map(repr, _PRE_TOKENIZERS))}"
        )
    folder.mkdir()
    config = _config(facts)
    write_json(folder / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # Without `do_sample`, transformers refuses to save a model with these settings.
    write_json(folder / "generation_config.json", {**special, "do_sample": True, **sampling})
    write_json(folder / "tokenizer.json", _tokenizer(facts))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(facts))
    template = folder / "chat_template.jinja"
    template.write_text(facts["tokenizer.chat_template"], encoding="utf-8")
    _write_weights(gguf, folder / "model.safetensors", progress)
    share_weights(folder / "config.json")


class _Tensor(NamedTuple):
    """A tensor: its shape as in PyTorch, the number of its type, and where its data starts."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset_bytes: int


class _Gguf:
    """Metadata and tensors of a GGUF file."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        if self._read("4s") != b"GGUF" or self._read("I") != _VERSION:
            raise CheckpointError(f"not a GGUF file of version {_VERSION}")
        num_tensors, num_values = self._read("Q"), self._read("Q")
        self.metadata = {self._string(): self._value(self._read("I")) for _ in range(num_values)}
        self.tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT_BYTES)
        self._data_at = -(-self._at // alignment) * alignment

    def _read(self, form: str) -> Any:
        [value] = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        return str(self._read(f"{self._read('Q')}s"), encoding="utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._read("I"), self._read("Q")
            return [self._value(item) for _ in range(length)]
        return self._read(_SCALARS[kind])

    def _tensor(self) -> _Tensor:
        name = self._string()
        # GGUF names the innermost dimension first.
        shape = tuple(self._read("Q") for _ in range(self._read("I")))[::-1]
        return _Tensor(name, shape, self._read("I"), self._read("Q"))

    def values(self, tensor: _Tensor) -> NDArray[np.float32]:
        """Return the values of a tensor. Raises CheckpointError if its type is unknown."""
        if tensor.kind not in _LAYOUTS:
            raise CheckpointError(
                f"{tensor.name}: tensors of GGUF's type {tensor.kind} are unknown"
            )
        block_size, layout = _LAYOUTS[tensor.kind]
        num_blocks = int(np.prod(tensor.shape)) // block_size
        start = self._data_at + tensor.offset_bytes
        blocks = np.frombuffer(self._content, layout, num_blocks, start)
        values: NDArray[np.float32]
        if tensor.kind == _F32:
            values = blocks
        elif tensor.kind == _Q8_0:
            values = blocks["scale"].astype(np.float32) * blocks["numbers"]
        else:
            # The low halves of the bytes come first.
            numbers = np.hstack([blocks["nibbles"] & 15, blocks["nibbles"] >> 4])
            values = blocks["scale"].astype(np.float32) * numbers
            values += blocks["least"].astype(np.float32)
        return values.reshape(tensor.shape)


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    heads, width = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        # A float32 in the file, which is not exactly the decimal number that was meant.
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {
            "rope_theta": facts["llama.rope.freq_base"],
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
    }


def _tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **ADDED_TOKEN}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": _PRE_TOKENIZERS[facts["tokenizer.ggml.pre"]],
        },
        "post_processor": None,
        "decoder": _BYTE_LEVEL | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": facts["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    tokens = facts["tokenizer.ggml.tokens"]
    return {
        f"{name}_token": tokens[facts[f"tokenizer.ggml.{long}_token_id"]]
        for name, long in names.items()
    } | {
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_weights(gguf: _Gguf, file: Path, progress: ShowProgress) -> None:
    # Importing torch takes seconds.
    import torch
    from safetensors.torch import save_file

    step = progress.start("converting", len(gguf.tensors))
    heads = {
        "attn_q": gguf.metadata["llama.attention.head_count"],
        "attn_k": gguf.metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in gguf.tensors:
        values = gguf.values(tensor)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, name = name.split(".")
            if name in heads:
                values = _half_rotated(values, heads[name])
            name = f"model.layers.{layer}.{_LAYER_TENSORS[name]}"
        else:
            name = _TENSORS[name]
        weights[f"{name}.weight"] = torch.tensor(values).bfloat16()
        step()
    save_file(weights, file, metadata={"format": "pt"})


def _half_rotated(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Order the rows of each head for rotary embeddings over halves; GGUF's rotate neighbours."""
    pairs = values.reshape(num_heads, -1, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file of a checkpoint, always in the same form: its hash is recorded."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")
