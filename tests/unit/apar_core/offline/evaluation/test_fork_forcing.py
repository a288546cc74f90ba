"""The embedded model's first choices within answers of its own corpus."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import (
    ChatMessage,
    ExampleRecord,
    ParagraphRecord,
    chain,
    count_forks,
    flat_text,
)
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.evaluation.fork_forcing import ForcedCounts, ForkForcing, sums_by
from apar_core.offline.training.chat_format import chat_token_ids
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
    found = [(str(n), each.kind, forcing.read(each)) for n, each in enumerate(examples)]

    counts = [read.counts(name, kind) for name, kind, read in found if read is not None]
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

    read = forcing.read(flat)

    assert read is not None
    counts = read.counts("flat", flat.kind)
    assert counts.rule_places == counts.forks == 0
    # The model wants to fork at the first head, where the recorded answer goes on.
    assert counts.stray_forks >= 1


def log_loss(forcing: ForkForcing, before: list[int], text: list[int]) -> float:
    """Return what the model alone, without a tree, says of a text after other tokens."""
    with torch.inference_mode():
        logits_TV = forcing.model(torch.tensor([[*before, *text]])).logits[0]
    steps_NV = logits_TV[len(before) - 1 : -1].log_softmax(-1)
    return -float(steps_NV[range(len(text)), text].sum())


def test_the_log_loss_is_that_of_each_thread_after_what_it_reads(forcing: ForkForcing) -> None:
    tokenizer, tokens = forcing.encoder.tokenizer, forcing.tokens
    details = (" Go to bed early.\n", " Cook with vegetables.")
    answer = chain(
        [("1. Sleep:", ParagraphRecord(details[0])), ("2. Eat:", ParagraphRecord(details[1]))]
    )
    messages = (ChatMessage("user", "Give me 2 tips."),)

    def loss(answer: ParagraphRecord) -> tuple[float, int]:
        read = forcing.read(ExampleRecord("list", messages, answer))
        assert read is not None
        assert read.is_whole
        return read.loss()

    forked, flat = loss(answer), loss(ParagraphRecord(flat_text(answer)))

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt = chat_token_ids(messages, tokenizer)
    heads, (first, second) = [ids("1. Sleep:"), ids("2. Eat:")], map(ids, details)
    fork, child = [tokens.fork_id], [tokens.child_id]
    root = [*prompt, *heads[0], *fork]
    parts = [
        (prompt, heads[0]),
        ([*root, *child], first),
        (root, heads[1]),
        ([*root, *heads[1], *fork, *child], second),
    ]
    assert forked[0] == pytest.approx(sum(log_loss(forcing, *part) for part in parts), rel=1e-4)
    assert forked[1] == sum(len(text) for _, text in parts)
    assert flat[0] == pytest.approx(log_loss(forcing, prompt, ids(flat_text(answer))), rel=1e-4)


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
