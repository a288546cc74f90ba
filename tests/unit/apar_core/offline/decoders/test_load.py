"""Errors for invalid requests and checkpoints, which name field and value."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from apar_core.errors import CheckpointError, RequestError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
from apar_core.offline.decoders.load import build_decoder, load_decoder, load_tokenizer
from apar_core.offline.decoders.pass_times import PassTimes, ProposerName
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.candidate_tree import full_trees
from apar_core.offline.speculation.medusa_heads import (
    MedusaHeads,
    MedusaHeadSettings,
    save_medusa_heads,
)
from apar_core.offline.speculation.prompt_tokens import PromptTokens, save_prompt_tokens
from tests.unit.apar_core.offline.decoders.small_decoders import (
    CHILD,
    CONTROL,
    END,
    FORK,
    PROMPT,
    VOCABULARY,
    decoder,
    small_model,
)


@pytest.mark.parametrize("name", ["plain", "vanilla_apar", "medusa_apar", "ppd", "ppd_apar"])
@pytest.mark.parametrize(
    ("prompt", "message", "param"),
    [
        ([], "prompt is empty: at least 1 token is needed", "prompt"),
        ([5, FORK], r"token 1 of the prompt is the control token '\[Fork\]'", None),
        ([CHILD, 5], r"token 0 of the prompt is the control token '\[Child\]'", None),
        ([5, 24], "token 1 of prompt has id 24; the model has ids 0 to 23", "prompt"),
        ([-1], "token 0 of prompt has id -1; the model has ids 0 to 23", "prompt"),
        ([5] * 256, "prompt has 256 tokens, .* context of 256", "prompt"),
    ],
)
def test_an_invalid_prompt_is_refused(
    name: Any, prompt: list[int], message: str, param: str | None
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        decode_answer(decoder(name), prompt)

    assert param is None or caught.value.param == param


def test_the_longest_prompt_that_leaves_room_gets_one_token() -> None:
    answer = decode_answer(decoder("vanilla_apar"), [5] * 255, TokenChoice.replay({"": [9, 10]}))

    assert answer.threads[0].token_ids == (9,)
    assert not answer.threads[0].ended


@pytest.mark.parametrize(
    ("replay", "param", "message"),
    [
        ({}, "tokens_of_thread", "lacks the root thread ''"),
        ({"": []}, "tokens_of_thread['']", "is empty"),
        ({"": [9, 24]}, "tokens_of_thread['']", "token 1 .* has id 24; the model has ids 0 to 23"),
        ({"": [-2]}, "tokens_of_thread['']", "token 0 .* has id -2"),
        ({"": [9, END, 9]}, "tokens_of_thread['']", "continues after its end token"),
        ({"": [9, CHILD]}, "tokens_of_thread['']", f"contains control token {CHILD}"),
        ({"": [9], "0": [9]}, "tokens_of_thread['0']", "no fork token opens"),
        (
            {"": [FORK], "0": [9], "1": [9]},
            "tokens_of_thread['1']",
            "no fork token opens",
        ),
        ({"": [FORK], "0.0": [9]}, "tokens_of_thread['0.0']", "no fork token opens"),
        ({"": [FORK], "root.0": [9]}, "tokens_of_thread['root.0']", "no fork token opens"),
        ({"": [FORK], "x": [9]}, "tokens_of_thread['x']", "no fork token opens"),
        ({"": [FORK], "00": [9]}, "tokens_of_thread['00']", "no fork token opens"),
        ({"": [FORK], ".0": [9]}, "tokens_of_thread['.0']", "no fork token opens"),
    ],
)
def test_an_invalid_replay_is_refused(
    replay: dict[str, list[int]], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        decode_answer(decoder("vanilla_apar"), PROMPT, TokenChoice.replay(replay))

    assert caught.value.param == param


def test_plain_refuses_to_replay_a_fork() -> None:
    with pytest.raises(RequestError, match=f"contains control token {FORK}"):
        decode_answer(decoder("plain"), PROMPT, TokenChoice.replay({"": [9, FORK], "0": [9]}))


def test_a_child_without_replayed_tokens_is_empty() -> None:
    replay = TokenChoice.replay({"": [9, FORK, 10, END]})

    root, child = decode_answer(decoder("vanilla_apar"), PROMPT, replay).threads

    assert (root.token_ids, root.ended) == ((9, FORK, 10), True)
    assert (child.token_ids, child.ended) == ((), False)


@pytest.mark.parametrize("field", ["max_tokens", "max_threads", "max_forks"])
def test_limits_below_one_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field}\n.*greater than 0.*input_value=0"):
        DecodeLimits.model_validate({field: 0})


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"plain, vanilla_apar, medusa, .*, recycling_apar, got 'fast'"
    ):
        load_decoder("fast", checkpoint_path())


@pytest.mark.parametrize("broken", ["nothing", "no weights", "broken weights", "no folder"])
def test_an_invalid_checkpoint_folder_is_refused_by_name(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "model"
    if broken != "no folder":
        folder.mkdir()
    if "weights" in broken:
        shutil.copytree(checkpoint_path(), folder, dirs_exist_ok=True)
        weights = folder / "model.safetensors"
        weights.unlink()
        if broken == "broken weights":
            weights.write_bytes(b"\xff" * 64)

    with pytest.raises(CheckpointError, match=f"cannot load model '{folder}'"):
        load_decoder("plain", folder)
    if "weights" not in broken:
        with pytest.raises(CheckpointError, match=f"cannot load model '{folder}'"):
            load_tokenizer(folder)


def test_a_loaded_model_needs_its_tokenizer() -> None:
    with pytest.raises(CheckpointError, match="tokenizer must be given with a loaded model"):
        load_decoder("plain", small_model())


def test_medusa_apar_without_heads_is_refused() -> None:
    with pytest.raises(CheckpointError, match="medusa_apar needs medusa_heads"):
        load_decoder("medusa_apar", checkpoint_path(), device="cpu")


def test_a_missing_heads_folder_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "heads"

    with pytest.raises(CheckpointError, match=f"no configuration of Medusa heads in {folder}"):
        load_decoder("medusa_apar", checkpoint_path(), medusa_heads=folder, device="cpu")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 8}, "Medusa heads have hidden_size 8, the model has 256"),
        ({"vocab_size": 100}, "Medusa heads have vocab_size 100, the model has 4096"),
    ],
)
def test_heads_of_another_model_are_refused(
    tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    settings = MedusaHeadSettings(**{"hidden_size": 256, "vocab_size": 4096, **sizes})
    save_medusa_heads(MedusaHeads(settings), tmp_path)

    with pytest.raises(CheckpointError, match=message):
        load_decoder("medusa_apar", checkpoint_path(), medusa_heads=tmp_path, device="cpu")


@pytest.mark.parametrize("top_k", [(), (2, 2, 2), (0,), (2, -1), (5000,)])
def test_an_invalid_number_of_candidates_is_refused(top_k: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"top_k must give 1 to 2 heads .* got \(") as caught:
        load_decoder(
            "medusa_apar",
            checkpoint_path(),
            medusa_heads=SHIPPED_HEADS["apar-tiny"],
            top_k=top_k,
            device="cpu",
        )

    assert str(top_k) in str(caught.value)


def test_ppd_without_prompt_tokens_is_refused() -> None:
    with pytest.raises(CheckpointError, match="ppd_apar needs prompt_tokens, the folder of"):
        load_decoder("ppd_apar", checkpoint_path(), device="cpu")


def saved_prompt_tokens(folder: Path, model: Any) -> Path:
    save_prompt_tokens(PromptTokens.like_text(model), folder)
    return folder


def test_a_missing_folder_of_prompt_tokens_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no configuration of prompt tokens in {tmp_path}"):
        load_decoder("ppd", checkpoint_path(), prompt_tokens=tmp_path, device="cpu")


def test_prompt_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    small = saved_prompt_tokens(tmp_path / "small", small_model())
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    tuned = saved_prompt_tokens(tmp_path / "tuned", model)
    table = AcceptanceTable(probabilities=((0.5,),) * 3, observations=(9,) * 3)
    for folder, message in (
        (small, "prompt tokens have hidden_size 16, the model has 256"),
        (tuned, "prompt tokens were trained for another model"),
    ):
        table.write(folder)

        with pytest.raises(CheckpointError, match=message):
            load_decoder("ppd", checkpoint_path(), prompt_tokens=folder, device="cpu")


def test_prompt_tokens_without_an_acceptance_table_are_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    folder = saved_prompt_tokens(tmp_path, model)

    with pytest.raises(CheckpointError, match=f"no acceptance table in {folder}"):
        load_decoder("ppd", checkpoint_path(), prompt_tokens=folder, device="cpu")


def test_variants_that_are_only_measured_are_refused() -> None:
    changes: list[tuple[str, Any]] = [("mask", "decoder"), ("mask", "encoder"), ("exits", 2)]
    for field, value in changes:
        change: dict[str, Any] = {field: value}
        prompts = PromptTokens.like_text(small_model(), **change)
        message = f"prompt tokens have {field} {value!r}, decoding needs"
        with pytest.raises(CheckpointError, match=message):
            build_decoder(
                "ppd", small_model(), CONTROL, frozenset({END}), prompts=prompts,
                trees=lambda _rows: full_trees(()),
            )  # fmt: skip


def test_pass_times_of_other_weights_are_refused() -> None:
    times: dict[ProposerName, PassTimes] = {"prompt_tokens": PassTimes({1: {1: 0.01}})}

    with pytest.raises(CheckpointError, match=r"no medusa_heads, only prompt_tokens: .*--medusa"):
        load_decoder(
            "medusa_apar", checkpoint_path(), medusa_heads=SHIPPED_HEADS["apar-tiny"],
            pass_times=times, device="cpu",
        )  # fmt: skip


def test_medusa_heads_use_the_tree_of_their_acceptance_table(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED_HEADS["apar-tiny"], tmp_path, dirs_exist_ok=True)
    # Only the second candidate of the first head is ever right.
    table = AcceptanceTable(probabilities=((0.0, 0.9), (0.0, 0.0)), observations=(9, 9))
    table.write(tmp_path)

    built = load_decoder("medusa_apar", checkpoint_path(), medusa_heads=tmp_path, device="cpu")

    tree = built.decoding.trees.of_rows(1).trees[-2]
    assert (tree.depths, tree.ranks) == ((0, 1), (0, 1))


def states(*top_k: int) -> Any:
    trees = full_trees(top_k)
    return lambda _num_rows: trees


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        (
            states(20, 20),
            "tree of 1266 tokens for 1 rows is larger than the model's context of 256",
        ),
        (states(1, 1, 1), "trees need predictions at 3 distances, and ppd has 2"),
        (states(25), "a candidate tree has rank 24; ppd has 24 candidates at a distance"),
    ],
)
def test_trees_that_cannot_be_computed_are_refused(trees: Any, message: str) -> None:
    prompts = PromptTokens.like_text(small_model(), num_prompts=2)

    with pytest.raises(CheckpointError, match=message):
        build_decoder("ppd", small_model(), CONTROL, frozenset({END}), prompts=prompts, trees=trees)


def test_a_model_without_control_tokens_supports_only_plain_and_ppd(tmp_path: Path) -> None:
    ordinary = ordinary_checkpoint(tmp_path)

    with pytest.raises(CheckpointError, match="vanilla_apar needs a model with control tokens"):
        load_decoder("vanilla_apar", ordinary, device="cpu")
    prompts = saved_prompt_tokens(
        tmp_path / "prompts", AutoModelForCausalLM.from_pretrained(ordinary)
    )
    AcceptanceTable(probabilities=((0.5,),) * 3, observations=(9,) * 3).write(prompts)
    answers = [
        decode_answer(
            load_decoder(name, ordinary, prompt_tokens=prompts, device="cpu"),
            [5, 6],
            limits=DecodeLimits(max_tokens=7),
        )
        for name in ("plain", "ppd")
    ]
    assert answers[0].threads == answers[1].threads
    assert answers[0].fork_id is None
    assert len(answers[0].threads) == 1
    assert len(answers[0].text_ids) <= 7


def test_a_model_without_full_attention_is_refused() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=32,
    )

    with pytest.raises(
        CheckpointError, match="sliding_attention in every layer with sliding_window 32"
    ):
        build_decoder("plain", MistralForCausalLM(config), CONTROL, frozenset({END}))


def ordinary_checkpoint(folder: Path) -> Path:
    """Write a small random model with apar-tiny's tokenizer and renamed control tokens."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (checkpoint_path() / file).read_text()
        text = text.replace("[Fork]", "[Left]").replace("[Child]", "[Right]")
        assert json.loads(text)
        (folder / file).write_text(text)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("num_heads", [1, 3])
def test_a_cpu_verifies_one_candidate_per_head_by_default(num_heads: int) -> None:
    model = small_model()
    settings = MedusaHeadSettings(
        hidden_size=model.config.hidden_size, vocab_size=VOCABULARY, medusa_num_heads=num_heads
    )

    built = build_decoder(
        "medusa_apar", model, CONTROL, frozenset({END}), heads=MedusaHeads(settings)
    )

    stack = built.decoding.trees.of_rows(1)
    assert [tree.num_candidates for tree in stack.trees[-2:]] == [num_heads] * 2
    assert stack.num_ranks == 1
