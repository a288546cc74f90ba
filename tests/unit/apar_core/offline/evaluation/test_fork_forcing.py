"""The embedded model's first choices within answers of its own corpus."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ExampleRecord, ParagraphRecord, count_forks, flat_text
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.evaluation.fork_forcing import ForcedCounts, ForkForcing, sums_by
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.pretrained import tree_tokens


@pytest.fixture(scope="module")
def forcing() -> ForkForcing:
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    encoder = ExampleEncoder(tokenizer, 2048)
    return ForkForcing(model, encoder, tree_tokens(tokenizer), tokenizer.pad_token_id)


@pytest.fixture(scope="module")
def examples() -> list[ExampleRecord]:
    return list(Corpus(0, held_out=True, stream="").examples(16))


def test_the_embedded_model_forks_where_its_corpus_does(
    forcing: ForkForcing, examples: list[ExampleRecord]
) -> None:
    found = [forcing.counts(str(n), each) for n, each in enumerate(examples)]

    counts = [each for each in found if each is not None]
    assert [each.rule_places for each in counts] == [count_forks(e.answer) for e in examples]
    total = sums_by(counts, lambda _: "all")["all"]
    assert total.forks >= 0.95 * total.rule_places > 0
    assert total.stray_forks <= 0.01 * total.other_places
    assert total.misplaced == 0


def test_forks_that_an_answer_lacks_are_stray(
    forcing: ForkForcing, examples: list[ExampleRecord]
) -> None:
    example = next(each for each in examples if count_forks(each.answer) > 2)
    flat = ExampleRecord(example.kind, example.messages, ParagraphRecord(flat_text(example.answer)))

    counts = forcing.counts("flat", flat)

    assert counts is not None
    assert counts.rule_places == counts.forks == 0
    # The model wants to fork at the first head, where the recorded answer goes on.
    assert counts.stray_forks >= 1


def test_counts_are_added_up_by_kind() -> None:
    counts = [
        ForcedCounts(example="1", kind="b", rule_places=2, forks=1, other_places=5),
        ForcedCounts(example="2", kind="a", other_places=7, stray_forks=1, misplaced=1),
        ForcedCounts(example="3", kind="b", rule_places=3, forks=3, other_places=5),
    ]

    sums = sums_by(counts, lambda each: each.kind)

    assert list(sums) == ["a", "b"]
    assert (sums["b"].answers, sums["b"].rule_places, sums["b"].forks) == (2, 5, 4)
    assert (sums["a"].stray_forks, sums["a"].misplaced) == (1, 1)
