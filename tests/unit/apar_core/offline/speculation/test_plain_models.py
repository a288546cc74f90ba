"""Prompt tokens and Medusa heads of a model that has no control tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from apar_core.errors import CheckpointError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import flat_text
from apar_core.offline.decoders.interface import DecodeLimits, decode_answer
from apar_core.offline.decoders.load import load_decoder
from apar_core.offline.evaluation.own_answers import measure_and_write
from apar_core.offline.speculation.acceptance import read_table
from apar_core.offline.speculation.frozen_training import Trained, train_beside
from apar_core.offline.speculation.sparse_tree import TreeFamily, static_tree
from apar_core.offline.speculation.train_medusa import MEDUSA_HEADS
from apar_core.offline.speculation.train_prompts import PROMPT_TOKENS
from apar_core.offline.training.chat_format import chat_token_ids, turn_end_id
from apar_core.offline.training.example_encoder import PlainEncoder, encoder_for
from apar_core.offline.training.packing import IGNORED_TARGET
from apar_core.offline.training.pretrained import load_tokenizer
from apar_core.offline.training.tree_trainer import StepReport
from tests.fakes.example_files import write_examples
from tests.unit.apar_core.offline.speculation.test_train_medusa import examples
from tests.unit.apar_core.offline.training.plain_tokenizer import plain_tokenizer
from tests.unit.apar_core.offline.training.test_fine_tune import example, place

RECIPE = {
    "batch_size": 4, "micro_batch_size": 2, "num_steps": 40, "learning_rate": 1e-2,
    "dtype": "float32", "context_length": 256, "validation_share": 0.5, "log_every_steps": 1,
    "num_measured": 6, "measured_tokens": 100,
}  # fmt: skip
WEIGHTS: dict[str, tuple[Trained[Any, Any], dict[str, Any]]] = {
    "ppd": (PROMPT_TOKENS, {"num_prompts": 2}),
    "medusa": (MEDUSA_HEADS, {"original_lm_head": True}),
}


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    """Return apar-tiny with other names for its control tokens, which makes them ordinary ones."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_path(), folder)
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("[Fork]", "<f>").replace("[Child]", "<c>"), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_trained_and_used_as_with_any_causal_model(
    tmp_path: Path, plain_model: Path, name: str
) -> None:
    write_examples(tmp_path / "examples.jsonl", examples())
    trained, change = WEIGHTS[name]
    out, reports = tmp_path / "out", list[StepReport]()

    result = train_beside(
        trained, str(plain_model), tmp_path / "examples.jsonl", out,
        trained.recipe(**RECIPE, **change), measure=measure_and_write, on_step=reports.append,
    )  # fmt: skip

    assert reports[-1].loss < reports[0].loss
    table = read_table(out)
    assert result.table == table
    assert table.num_distances == 2
    trees = TreeFamily.of(static_tree(table, 3))
    prompt, limits = list(range(5, 15)), DecodeLimits(max_tokens=40)
    found = decode_answer(
        load_decoder(
            name, plain_model, prompt_tokens=out, medusa_heads=out, trees=trees, device="cpu",
            dtype=torch.float64,
        ),
        prompt, limits=limits,
    )  # fmt: skip
    plain = load_decoder("plain", plain_model, device="cpu", dtype=torch.float64)
    assert found.text_ids == decode_answer(plain, prompt, limits=limits).text_ids
    assert len(found.threads) == 1
    with pytest.raises(CheckpointError, match="needs a model with control tokens"):
        load_decoder(f"{name}_apar", plain_model, prompt_tokens=out, medusa_heads=out)


def test_an_answer_with_forks_is_one_thread_of_its_whole_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(place(tmp_path, tied=True).model))
    forked = example(1, structured=True)

    row = encoder_for(tokenizer, 512).pack(forked)

    prompt = chat_token_ids(forked.messages, tokenizer)
    # Vicuna's template writes a space before an answer.
    text = tokenizer(" " + flat_text(forked.answer), add_special_tokens=False)["input_ids"]
    ids = [*prompt, *text, turn_end_id(tokenizer)]
    assert tokenizer.decode(list(row.token_ids)) == tokenizer.decode(ids)
    learned = [target for target in row.targets if target != IGNORED_TARGET]
    assert learned == list(row.token_ids[len(prompt) :])
    assert row.segment_parents == [None]


def test_a_long_answer_is_cut_at_the_context(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(place(tmp_path, tied=True).model))
    whole = encoder_for(tokenizer, 512).pack(example(7, structured=True))
    encoder = encoder_for(tokenizer, len(whole.token_ids) - 3)

    row = encoder.encode(example(7, structured=True))

    assert row is not None
    assert list(row.token_ids) == list(whole.token_ids[:-3])
    assert list(row.targets) == [*whole.targets[:-4], IGNORED_TARGET]
    assert (encoder.counts.cut, encoder.counts.dropped) == (1, 0)
    assert encoder_for(tokenizer, 5).encode(example(7, structured=True)) is None


def test_only_models_without_control_tokens_have_plain_answers() -> None:
    tokenizer = plain_tokenizer()
    assert isinstance(encoder_for(tokenizer, 64), PlainEncoder)

    tokenizer.add_special_tokens({"additional_special_tokens": ["[Fork]", "[Child]"]})

    assert not isinstance(encoder_for(tokenizer, 64), PlainEncoder)
