"""Rows of answers that join: each generation reads its context and learns only what it writes."""

from __future__ import annotations

from functools import cache

import pytest
from transformers import PreTrainedTokenizerBase

from apar_core.formats.blocks import BlockRules
from apar_core.formats.resolved_format import find_format
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.joined import (
    FORMAT,
    MARKERS,
    JoinedAnswer,
    joined_answer,
    joined_tokens,
    thread_header,
)
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.offline.training.joined_encoder import MARKER_TOKENS, JoinedEncoder
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, visible_segments
from apar_core.offline.training.pretrained import load_tokenizer, with_tokens
from tests.unit.apar_core.offline.training.test_chat_format import (
    DEEPSEEK,
    FAMILIES,
    POINTS,
    THOUGHT,
    Family,
    tokenizer_of,
)
from tests.unit.apar_core.offline.training.test_example_encoder import (
    TOKENIZERS,
    vicuna_tokenizer,
)

CORPUS = Corpus(0)


@cache
def encoder() -> JoinedEncoder:
    shipped = load_tokenizer(str(checkpoint_path()))
    return JoinedEncoder(with_tokens(shipped, MARKER_TOKENS), 2048)


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
    encode = encoder().encode_text
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
        tokens = joined_tokens(answer, encoder().encode_text)

        assert tokens.flat == tokenizer(answer.text, add_special_tokens=False).input_ids


def test_markers_are_single_special_tokens_in_place_of_the_control_tokens() -> None:
    tokenizer = encoder().tokenizer
    text = "<Parallel>\n<Outlines>\n<Outline>1: a</Outline>\n</Outlines>\n<Thread>\n1: b\n</Thread>"

    ids = tokenizer(text, add_special_tokens=False).input_ids

    assert "[Fork]" not in tokenizer.get_vocab()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\n\n1: a\n\n\n1: b\n"
    assert len(tokenizer) == 4096 + 8


def learned_text(tokenizer: PreTrainedTokenizerBase, row: PackedTree) -> str:
    learned = [target for target in row.targets if target != IGNORED_TARGET]
    return str(tokenizer.decode(learned, clean_up_tokenization_spaces=False))


def chat_example(answer: str | ParagraphRecord, question: str = "Tips?") -> ExampleRecord:
    tree = extract_tree(answer).tree if isinstance(answer, str) else answer
    return ExampleRecord("", (ChatMessage("user", question),), tree)


# The server refuses a tokenizer that decodes a space before each text.
SERVED = [name for name in TOKENIZERS if name != "byte-level with a prefix space"]


@pytest.mark.parametrize("name", SERVED)
def test_what_the_engine_forces_has_its_tokens_with_any_tokenizer(name: str) -> None:
    tokenizer = with_tokens(TOKENIZERS[name](), MARKER_TOKENS)
    rules, encoder = BlockRules(FORMAT, tokenizer), JoinedEncoder(tokenizer, 2048)
    found = find_format(tokenizer.get_vocab())
    assert found is not None
    assert found.definition is FORMAT

    answer = joined_answer(extract_tree(f"Do this:\n\n{POINTS}\n\nThat is all.").tree)
    tokens = joined_tokens(answer, encoder.encode_text, encoder.encode_forced)

    (block,) = tokens.blocks
    opened = rules.open(tokens.parent[0], list)
    assert opened is not None
    assert [list(child.seed) for child in opened.children] == list(block.seeds)
    joined = rules.joined(opened, tokens.parent[0], block.texts)
    assert list(joined.token_ids) == block.joined
    assert joined.continues
    assert all(text[-1] in rules.end_ids for text in block.texts)


@FAMILIES
def test_a_thought_is_written_before_the_block(family: Family) -> None:
    tokenizer = with_tokens(tokenizer_of(family), MARKER_TOKENS)

    row = JoinedEncoder(tokenizer, 1000).pack(chat_example(THOUGHT + POINTS))

    thought = THOUGHT.removeprefix("<think>\n") if family is DEEPSEEK else THOUGHT
    text = learned_text(tokenizer, row)
    assert text.startswith(f"{thought}<Parallel>\n<Outlines>\n<Outline>1: Tune</Outline>")
    assert text.endswith(f"</Parallel>{family.turn_end}")
    vocabulary = tokenizer.get_vocab()
    assert [list(row.token_ids).count(vocabulary[m]) for m in ("<think>", "</think>")] == [1, 1]


def test_an_answer_begins_with_the_blank_of_the_template() -> None:
    tokenizer = with_tokens(vicuna_tokenizer(), MARKER_TOKENS)

    row = JoinedEncoder(tokenizer, 1000).pack(chat_example(POINTS))

    learned = [target for target in row.targets if target != IGNORED_TARGET]
    assert tokenizer.convert_ids_to_tokens(learned[:3]) == ["▁", "<Parallel>", "<0x0A>"]


def test_markers_in_a_text_are_ordinary_text() -> None:
    tokenizer = encoder().tokenizer
    tips = chain(
        [
            ("Tags:\n1. <Outline> 7:", ParagraphRecord(" Ends with </Thread> here.")),
            ("\n2. </Outlines>:", ParagraphRecord(" Another <Parallel> one.")),
        ],
        closing="\n</Parallel>",
    )

    row = encoder().pack(chat_example(tips, "What is <Thread>?"))

    learned = [target for target in row.targets if target != IGNORED_TARGET]
    vocabulary = tokenizer.get_vocab()
    counts = {marker: learned.count(vocabulary[marker]) for marker in MARKERS}
    # The parent's own ones; seeds are read.
    assert counts == {marker: 1 for marker in MARKERS} | {
        "<Outline>": 2, "</Outline>": 2, "<Thread>": 0, "</Thread>": 2
    }  # fmt: skip
    text = str(tokenizer.decode(list(row.token_ids)))
    assert text.startswith("<bos><|user|>What is <Thread>?<|assistant|>")
    assert "\0" not in text


def test_long_rows_are_cut_behind_a_thread_and_learn_no_early_end() -> None:
    whole = encoder().pack(chat_example(POINTS))
    limit = len(whole.token_ids) - 30
    short = JoinedEncoder(encoder().tokenizer, limit)

    rows = [short.encode(chat_example(POINTS)), short.encode(chat_example("word " * 400))]

    row = rows[0]
    assert row is not None
    assert rows[1] is None
    assert (short.counts.whole, short.counts.cut, short.counts.dropped) == (0, 1, 1)
    assert len(row.token_ids) <= limit
    assert learned(row) < learned(whole)
    assert encoder().tokenizer.eos_token_id not in row.targets
