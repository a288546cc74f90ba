"""A model with random weights whose engine, on a CPU, is bound as a large one is on a GPU.

One row of its step waits for weights from memory, since they are well beyond the last cache; many
rows wait for computation; and reading the KV cache takes its share of the step: a token's keys and
values are the same part of the weights as in the model of the name (1/25,000 for Llama 7B, 1/31,000
for 13B), for which a small model needs fewer heads, of Llama's 128 dimensions. Its layers are few
and wide: on a CPU, rows through narrow matrices cost time from the first few on. Weights are of 32
bits: in 16 bits, the matrix kernel of the CPU at hand takes longer with each row from the first
ones on, where those of a GPU do not. `apar experiment step-curve` shows it. Tokens are forced in
replay, so that weights decide nothing but time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path

if TYPE_CHECKING:
    from apar_core.formats.control_tokens import TreeTokens
    from apar_core.offline.data.records import ChatMessage
    from apar_core.offline.evaluation.replay_text import ModelText

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_VOCABULARY_SIZE = 4096
_NUM_SPECIAL_IDS = 8
_POSITIONS = 4096
_BYTES_OF_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class CpuModel:
    """Dimensions of a Llama, `kv_heads` of whose heads have keys and values."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, embeddings looked up left out."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        feed_forward = 3 * self.hidden * self.intermediate
        layers = self.layers * (attention + feed_forward)
        return _BYTES_OF_FLOAT32 * (layers + _VOCABULARY_SIZE * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that a token takes."""
        return _BYTES_OF_FLOAT32 * 2 * self.layers * self.kv_heads * self.head_dim


CPU_MODELS = {
    model.name: model
    for model in (
        CpuModel(
            "cpu-7b", hidden=1536, intermediate=3584, layers=2, heads=12, kv_heads=4, head_dim=128
        ),
        CpuModel(
            "cpu-13b", hidden=1536, intermediate=5056, layers=3, heads=12, kv_heads=4, head_dim=128
        ),
    )
}


def write_cpu_model(model: CpuModel, folder: Path) -> Path:
    """Write configuration and tokenizer, no weights: for vLLM's `load_format="dummy"`."""
    source = checkpoint_path()
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.update(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=_POSITIONS,
        vocab_size=_VOCABULARY_SIZE,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in _TOKENIZER_FILES:
        copyfile(source / name, folder / name)
    return folder


class FoldedText:
    """Token counts of a Llama tokenizer in a vocabulary that a small model can afford.

    An id of the large vocabulary becomes one of the small vocabulary's ordinary ones: which one
    does not matter, how many there are does. A real model's vocabulary is a few percent of its
    weights, and so is this one's.
    """

    def __init__(self, large: ModelText, small: ModelText) -> None:
        if small.vocabulary_size > _VOCABULARY_SIZE:
            raise EvaluationError(
                f"the tokenizer has {small.vocabulary_size} entries, the model {_VOCABULARY_SIZE}"
            )
        self._large = large
        self.tokens: TreeTokens = small.tokens
        self.vocabulary_size = _VOCABULARY_SIZE

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of an answer."""
        return _folded(self._large.encode(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of a chat up to where its answer begins."""
        return _folded(self._large.encode_chat(messages))


def _folded(token_ids: Sequence[int]) -> list[int]:
    num_ordinary = _VOCABULARY_SIZE - _NUM_SPECIAL_IDS
    return [_NUM_SPECIAL_IDS + token_id % num_ordinary for token_id in token_ids]
