"""The check of answers that join, on made texts and on the shipped checkpoint."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.models.apar_tiny_threadweaver import checkpoint_path
from apar_core.offline.data.joined import joined_answer
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.evaluation.fork_check import HeldOutSettings
from apar_core.offline.evaluation.join_check import (
    ResubmittingClient,
    block_sizes,
    check_joins,
)

BLOCK = joined_answer(next(e.answer for e in Corpus(0).examples(20) if e.kind == "numbered")).text


@pytest.mark.parametrize(
    "broken",
    [
        BLOCK.replace("<Outline>2:", "<Outline>1:"),
        BLOCK.replace("<Thread>\n2:", "<Thread>\n3:"),
        BLOCK.replace("</Thread>\n", "</Thread>", 1),
        BLOCK.removesuffix("</Parallel>"),
        BLOCK + "<Thread>",
    ],
)
def test_a_broken_block_is_not_well_formed(broken: str) -> None:
    assert broken != BLOCK
    assert block_sizes(broken) is None


def test_every_answer_of_the_corpus_is_well_formed() -> None:
    for example in Corpus(1).examples(300):
        answer = joined_answer(example.answer)
        assert block_sizes(answer.text) == [len(threads) for threads in answer.blocks]


@pytest.mark.slow
def test_the_shipped_checkpoint_writes_well_formed_answers_to_held_out_prompts() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()

    verdicts, answers = check_joins(
        HeldOutSettings(num_prompts=40), ResubmittingClient(model, tokenizer)
    )

    assert sum(verdict.well_formed for verdict in verdicts) >= 34
    assert sum(verdict.found == verdict.expected for verdict in verdicts) >= 31
    for verdict, answer in zip(verdicts, answers, strict=True):
        if verdict.well_formed and verdict.found is not None:
            # One request for the parent, and one per thread and continuation.
            assert len(answer.prompts) == 1 + sum(verdict.found) + len(verdict.found)
