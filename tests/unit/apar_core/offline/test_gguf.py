"""What a checkpoint made of a GGUF file contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.errors import CheckpointError
from apar_core.offline.gguf import convert_gguf
from tests.fakes.progress import NoProgress
from tests.fakes.small_gguf import (
    F32,
    FACTS,
    HEADS,
    Q4_1,
    Q8_0,
    TOKENS,
    WIDTH,
    gguf_file,
    small_gguf,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "checkpoint"
    convert_gguf(small_gguf(), folder, NoProgress(), {"temperature": 0.5})
    return folder


def converted(folder: Path, kind: int, shape: tuple[int, ...], blocks: bytes, name: str) -> Any:
    """Return the only tensor of a file after its conversion."""
    convert_gguf(gguf_file(FACTS, {name: (kind, shape, blocks)}), folder, NoProgress(), {})
    [tensor] = load_file(folder / "model.safetensors").values()
    return tensor.float().numpy()


def test_blocks_of_4_bits_are_scaled_and_moved(tmp_path: Path) -> None:
    scales = np.array([0.5, -2.0], "<f2").tobytes()
    # The low halves are the first 16 values (0 to 15), the high halves the others (15 to 0).
    halves = bytes((15 - number) << 4 | number for number in range(16))

    found = converted(tmp_path / "made", Q4_1, (1, 32), scales + halves, "token_embd")

    assert found.tolist() == [[number / 2 - 2 for number in [*range(16), *range(15, -1, -1)]]]


def test_blocks_of_8_bits_are_scaled(tmp_path: Path) -> None:
    numbers = np.arange(-16, 16, dtype=np.int8)
    blocks = np.array([0.25], "<f2").tobytes() + numbers.tobytes()

    found = converted(tmp_path / "made", Q8_0, (1, 32), blocks, "token_embd")

    assert found.tolist() == [[number / 4 for number in range(-16, 16)]]


def test_queries_rotate_halves_of_a_head_instead_of_neighbours(tmp_path: Path) -> None:
    rows = np.repeat(np.arange(WIDTH, dtype="<f4")[:, None], WIDTH, axis=1)

    found = converted(tmp_path / "made", F32, rows.shape, rows.tobytes(), "blk.0.attn_q")

    first_head = WIDTH // HEADS
    assert found[:first_head, 0].tolist() == [
        *range(0, first_head, 2),
        *range(1, first_head, 2),
    ]


def test_the_checkpoint_runs_in_transformers(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)

    logits = model(torch.tensor([[1, 5, 9]])).logits

    assert logits.shape == (1, 3, len(TOKENS))
    assert model.config.max_position_embeddings == 128
    assert model.config.rms_norm_eps == 1e-5
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (2, 1)
    assert model.generation_config.temperature == 0.5
    model.generation_config.validate(strict=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_digits_are_tokens_of_their_own(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    tokens = tokenizer.convert_ids_to_tokens(tokenizer("a:\n\n12. b").input_ids)

    assert tokens == ["a", ":", "ĊĊ", "1", "2", ".", "Ġ", "b"]


def test_chats_end_with_the_token_of_the_end(checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)

    ids = tokenizer.apply_chat_template([{"role": "user", "content": "é1"}], return_dict=False)

    assert tokenizer.decode(ids) == "<|im_start|>user\né1<|im_end|>\n"
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids[-2] == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\né1\n"
    assert tokenizer.model_max_length == 128


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "qwen3"}, "of architecture 'qwen3' with tokenizer 'smollm'"),
        ({"tokenizer.ggml.pre": "gpt-2"}, "expected: 'llama' with 'smollm'"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        convert_gguf(small_gguf(FACTS | changes), tmp_path / "made", NoProgress(), {})

    assert not (tmp_path / "made").exists()


def test_other_types_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"token_embd\.weight: tensors of GGUF's type 12"):
        converted(tmp_path / "made", 12, (1, 32), bytes(100), "token_embd")
    with pytest.raises(CheckpointError, match="not a GGUF file of version 3"):
        convert_gguf(b"PK" + bytes(30), tmp_path / "other", NoProgress(), {})
