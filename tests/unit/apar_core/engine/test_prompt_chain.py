"""A chain of prompt tokens without an engine: drafts, rows of logits, embeddings, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner

from apar_core.engine.plugin import complete
from apar_core.engine.prompt_chain import (
    PROPOSER,
    PromptChain,
    PromptEmbedding,
    _only_guesses,
    add_prompt_rows,
    load_prompt_rows,
)
from apar_core.errors import CheckpointError, EngineError
from apar_core.formats.prompt_file import PromptTokenSettings, read_prompt_file, write_prompt_file
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_PROMPTS

FIRST_ID = 4096  # the vocabulary size of apar-tiny
P1, P2, P3 = FIRST_ID, FIRST_ID + 1, FIRST_ID + 2


def config(
    folder: Path | None = None, *, num_drafts: int = 3, shipped: bool = True, **arguments: Any
) -> VllmConfig:
    folder = SHIPPED_PROMPTS["apar-tiny"] if shipped else folder
    return EngineArgs(
        model=str(checkpoint_path()),
        speculative_config={
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": num_drafts,
        },
        additional_config={} if folder is None else {"apar": {"prompt_tokens": str(folder)}},
        **arguments,
    ).create_engine_config()


@pytest.fixture
def chain() -> Iterator[PromptChain]:
    """A chain with three prompt tokens and drafts of three tokens."""
    names = vars(gpu_model_runner)
    original = names["RejectionSampler"]
    proposer = PromptChain(config())
    proposer._prompt_ids = [P1, P2, P3]
    yield proposer
    # No model runner has built the sampler of this chain.
    names["RejectionSampler"] = original


def step(
    chain: PromptChain, drafts: list[list[int]], predictions: list[int], sampled: list[list[int]]
) -> list[list[int]]:
    rows = chain.rows_of([len(each) for each in drafts], drafts)
    assert rows is not None
    chain.observe(rows, torch.tensor(predictions))
    return chain.propose(sampled, None, None)


def test_a_thread_without_guesses_drafts_prompt_tokens_only(chain: PromptChain) -> None:
    # A thread that has read its prompt, and one that is still reading it.
    drafts = step(chain, [[], []], [], [[17], []])

    assert drafts == [[P1, P2, P3], []]


def test_predictions_become_guesses_behind_a_chain_that_was_right(chain: PromptChain) -> None:
    drafts = step(
        chain,
        [[P1, P2, P3], [31, 32, P1], [41, 42, P1], []],
        [21, 22, 23, 33, 43],
        [[20], [31, 32, 9], [41, 8], [7]],
    )

    # One prompt token at least stays in each draft; the third thread's chain broke at 42.
    assert drafts == [[21, 22, P1], [33, P1, P2], [P1, P2, P3], [P1, P2, P3]]


def test_predictions_serve_one_step_only(chain: PromptChain) -> None:
    step(chain, [[P1, P2, P3]], [21, 22, 23], [[20]])

    assert chain.propose([[5]], None, None) == [[P1, P2, P3]]


def test_a_draft_that_the_scheduler_cut_has_fewer_guesses(chain: PromptChain) -> None:
    drafts = step(chain, [[P1], [31, 32]], [21], [[20], [31, 32, 9]])

    assert drafts == [[21, P1, P2], [P1, P2, P3]]


def test_unnamed_drafts_of_a_dummy_run_are_left_to_vllm(chain: PromptChain) -> None:
    assert chain.rows_of([1, 1], [[], []]) is None
    assert chain.rows_of([1], None) is None


def test_the_sampler_sees_the_rows_of_guesses_only(chain: PromptChain) -> None:
    # Rows of logits: 0-3 of thread 0, 4 of thread 1, 5-8 of thread 2, 9-12 of thread 3.
    drafts = [[31, 32, P1], [], [P1, P2, P3], [41, P1, P2]]
    counts = [3, 0, 3, 3]
    metadata = SpecDecodeMetadata(
        draft_token_ids=torch.tensor([each for draft in drafts for each in draft]),
        num_draft_tokens=counts,
        cu_num_draft_tokens=torch.tensor([3, 3, 6, 9]),
        cu_num_sampled_tokens=torch.tensor([4, 5, 9, 13]),
        target_logits_indices=torch.tensor([0, 1, 2, 5, 6, 7, 9, 10, 11]),
        bonus_logits_indices=torch.tensor([3, 4, 8, 12]),
        logits_indices=torch.arange(13),
    )
    rows = chain.rows_of(counts, drafts)
    assert rows is not None

    guesses, predicting = _only_guesses(metadata, rows, torch.device("cpu"))

    assert guesses.draft_token_ids.tolist() == [31, 32, 41]
    assert guesses.num_draft_tokens == [2, 0, 0, 1]
    assert guesses.cu_num_draft_tokens.tolist() == [2, 2, 2, 3]
    assert guesses.target_logits_indices.tolist() == [0, 1, 9]
    assert guesses.bonus_logits_indices.tolist() == [2, 4, 5, 10]
    assert guesses.cu_num_sampled_tokens.tolist() == [4, 5, 9, 13]
    assert guesses.max_spec_len == 2
    assert predicting.tolist() == [3, 6, 7, 8, 11, 12]


def test_prompt_tokens_are_embedded_behind_the_vocabulary() -> None:
    embedding = nn.Embedding(5, 2)
    rows_MD = torch.tensor([[7.0, 8.0], [9.0, 10.0]])

    found = PromptEmbedding(embedding, rows_MD, first_id=5)(torch.tensor([4, 5, 0, 6]))

    ordinary = embedding.weight
    assert torch.equal(found, torch.stack([ordinary[4], rows_MD[0], ordinary[0], rows_MD[1]]))


def test_a_model_without_a_single_input_embedding_is_refused() -> None:
    with pytest.raises(EngineError, match="Linear has 0 input embeddings"):
        add_prompt_rows(nn.Linear(2, 2), torch.zeros(1, 2), first_id=2)


def test_the_shipped_prompt_tokens_fit_the_shipped_model() -> None:
    rows_MD = load_prompt_rows(config())

    assert torch.equal(rows_MD, read_prompt_file(SHIPPED_PROMPTS["apar-tiny"])[1][:, 0])


def test_of_an_ensemble_the_first_members_are_used(tmp_path: Path) -> None:
    settings, _ = read_prompt_file(SHIPPED_PROMPTS["apar-tiny"])
    settings = settings.model_copy(update={"ensemble": 2})
    embeddings_MED = torch.randn(settings.shape)
    write_prompt_file(settings, {"embeddings": embeddings_MED}, tmp_path)

    rows_MD = load_prompt_rows(config(tmp_path, shipped=False))

    assert torch.equal(rows_MD, embeddings_MED[:, 0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fingerprint": "another"}, "trained for another model: they have fingerprint another"),
        ({"hidden_size": 8}, "hidden_size 8, the model has 256"),
        ({"exits": 2}, "have exits 2, decoding needs 1"),
    ],
)
def test_prompt_tokens_of_another_model_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    settings, _ = read_prompt_file(SHIPPED_PROMPTS["apar-tiny"])
    settings = PromptTokenSettings(**{**settings.model_dump(), **changed})
    write_prompt_file(settings, {"embeddings": torch.zeros(settings.shape)}, tmp_path)

    with pytest.raises(CheckpointError, match=message):
        load_prompt_rows(config(tmp_path, shipped=False))


def test_an_engine_without_a_folder_or_with_a_wrong_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"additional_config.apar.prompt_tokens must name"):
        complete(config(shipped=False))
    with pytest.raises(CheckpointError, match=f"no configuration of prompt tokens in {tmp_path}"):
        complete(config(tmp_path, shipped=False))


@pytest.mark.parametrize("num_drafts", [1, 7])
def test_a_chain_of_the_wrong_length_is_refused(num_drafts: int) -> None:
    with pytest.raises(EngineError, match=f"is {num_drafts}; with the 3 prompt tokens .* 2 to 6"):
        load_prompt_rows(config(num_drafts=num_drafts))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"enable_lora": True}, "LoRA"), ({"enable_prompt_embeds": True}, "prompt embeddings")],
)
def test_what_a_chain_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=f"does not run with {message}"):
        load_prompt_rows(config(**arguments))
