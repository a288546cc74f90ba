"""Rows of answers that join: each generation reads its context and learns only what it writes."""

from __future__ import annotations

from functools import cache

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.joined import (
    JoinedAnswer,
    joined_answer,
    joined_tokens,
    thread_header,
)
from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.offline.training.joined_encoder import (
    JoinedEncoder,
    start_marker_embeddings,
    threadweaver_tokenizer,
)
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, visible_segments

CORPUS = Corpus(0)


@cache
def encoder() -> JoinedEncoder:
    shipped = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    return JoinedEncoder(threadweaver_tokenizer(shipped))


def contexts(answer: JoinedAnswer) -> list[tuple[str, str]]:
    """Return each generation's context behind the prompt, and what it writes."""
    generations = []
    before = ""
    for parent, threads in zip(answer.parent, (*answer.blocks, ()), strict=True):
        generations.append((before, parent))
        outlined = before + parent
        for index, text in enumerate(threads):
            seed = thread_header(str(index + 1), first=True)
            generations.append((outlined + seed, text))
        joined = [thread_header(str(i + 1), first=i == 0) + t for i, t in enumerate(threads)]
        before = outlined + "".join(joined) + "\n"
    return generations


def learned(packed: PackedTree) -> set[tuple[tuple[int, ...], int]]:
    """Return every target of a row with all tokens that it reads."""
    visible_SS = visible_segments(packed.segment_parents)
    found = set()
    for index, target in enumerate(packed.targets):
        if target == IGNORED_TARGET:
            continue
        reads = [
            at for at in range(index + 1) if visible_SS[packed.segments[index], packed.segments[at]]
        ]
        assert [packed.positions[at] for at in reads] == list(range(len(reads)))
        found.add((tuple(packed.token_ids[at] for at in reads), target))
    return found


def expected(example: ExampleRecord) -> set[tuple[tuple[int, ...], int]]:
    encode = encoder().encode
    prompt_ids = prompt_token_ids(example, encoder().tokenizer)
    targets = set()
    generations = contexts(joined_answer(example.answer))
    for number, (context, written) in enumerate(generations, start=1):
        tokens = encode(written)
        if number == len(generations):
            tokens = [*tokens, encoder().tokenizer.eos_token_id]
        path = [*prompt_ids, *encode(context)]
        for token_id in tokens:
            targets.add((tuple(path), token_id))
            path.append(token_id)
    return targets


def test_every_target_reads_exactly_the_context_of_its_generation() -> None:
    examples = list(CORPUS.examples(12))

    rows = [encoder().pack(example) for example in examples]

    assert {example.kind for example in examples} >= {"numbered", "paragraphs"}
    for example, row in zip(examples, rows, strict=True):
        assert learned(row) == expected(example)
        assert sum(t != IGNORED_TARGET for t in row.targets) == len(expected(example))


def test_joined_tokens_equal_those_of_the_joined_text() -> None:
    tokenizer = encoder().tokenizer
    for example in CORPUS.examples(40):
        answer = joined_answer(example.answer)
        tokens = joined_tokens(answer, encoder().encode)

        assert tokens.flat == tokenizer(answer.text, add_special_tokens=False).input_ids


def test_markers_are_single_special_tokens_in_place_of_the_control_tokens() -> None:
    tokenizer = encoder().tokenizer
    text = "<Parallel>\n<Outlines>\n<Outline>1: a</Outline>\n</Outlines>\n<Thread>\n1: b\n</Thread>"

    ids = tokenizer(text, add_special_tokens=False).input_ids

    assert "[Fork]" not in tokenizer.get_vocab()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\n\n1: a\n\n\n1: b\n"
    assert len(tokenizer) == 4096 + 8


def test_a_marker_starts_as_the_mean_of_its_word_and_other_tokens_stay() -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    before = model.model.embed_tokens.weight.detach().clone()
    tokenizer = encoder().tokenizer

    start_marker_embeddings(model, tokenizer)

    after = model.model.embed_tokens.weight
    assert torch.equal(after[5:4096], before[5:])
    word_ids = tokenizer("/Thread", add_special_tokens=False).input_ids
    marker_id = tokenizer.convert_tokens_to_ids("</Thread>")
    assert torch.allclose(after[marker_id], before[word_ids].mean(dim=0))
