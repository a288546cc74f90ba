"""Encoding of text in pieces, and of examples as rows of bounded length."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mistral_common
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaTokenizerFast, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from apar_core.errors import TrainingError
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text, vicuna_prompt
from apar_core.offline.training.example_encoder import (
    ExampleEncoder,
    PieceEncoder,
    build_piece_encoder,
    cut_tree,
    prompt_token_ids,
)
from apar_core.offline.training.packing import IGNORED_TARGET
from apar_core.offline.training.pretrained import VICUNA_TEMPLATE
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.training.random_trees import TOKENS, encode, packed

CORPUS = [
    "1. Tune it: a guitar sounds better when it is in tune.\n2. Play slowly, then faster.\n",
    "There are two ways.\n\nThe first one is longer.  The second one costs more.",
]
CONTROL = ["[Fork]", "[Child]"]


def apar_tiny() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    return tokenizer


def byte_level_with_prefix_space() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["</s>", *CONTROL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", extra_special_tokens=CONTROL
    )


def llama_style() -> PreTrainedTokenizerBase:
    """Trained with SentencePiece, converted like Llama's tokenizer in transformers."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=written, model_type="bpe",
        vocab_size=340, byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    vocabulary = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    merges = sorted(
        (
            (left, piece[len(left) :])
            for piece in vocabulary
            for left in (piece[:cut] for cut in range(1, len(piece)))
            if left in vocabulary and piece[len(left) :] in vocabulary
        ),
        key=lambda pair: vocabulary[pair[0] + pair[1]],
    )
    return _with_control_tokens(LlamaTokenizerFast(vocab=vocabulary, merges=merges))


def normalised_with_a_prefix() -> PreTrainedTokenizerBase:
    """Older form of Llama's tokenizer: the normalizer adds the space before the text."""
    tokenizer = llama_style()
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def mistral() -> PreTrainedTokenizerBase:
    folder = Path(mistral_common.__file__).parent / "data"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model.v1"))
    vocabulary = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    ordered = sorted(vocabulary, key=lambda piece: -processor.get_score(vocabulary[piece]))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in ordered
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return _with_control_tokens(LlamaTokenizerFast(vocab=vocabulary, merges=merges))


def _with_control_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens({"extra_special_tokens": CONTROL})
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "apar-tiny": apar_tiny,
    "byte-level with a prefix space": byte_level_with_prefix_space,
    "Llama-style": llama_style,
    "with a prefix by its normalizer": normalised_with_a_prefix,
    "Mistral": mistral,
}


@cache
def tokenizer_and_encoder(name: str) -> tuple[PreTrainedTokenizerBase, PieceEncoder]:
    tokenizer = TOKENIZERS[name]()
    control = find_control_tokens(tokenizer.get_vocab())
    assert control is not None
    return tokenizer, build_piece_encoder(tokenizer, (control.fork_id, control.child_id))


words = st.sampled_from(
    ["", " ", "\n", "\n\n", "1. ", "Tune it:", " a guitar", "  ", "é", "漢字", "🙂", "[Fork]",
     "</s>", "<s>", "[Child]", "[", "Fork]", " [Fork]\n", "▁"]
)  # fmt: skip
pieces = st.lists(st.one_of(words, st.text(max_size=8)), max_size=6)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=num_examples(60), deadline=None)
@given(parts=pieces)
def test_pieces_join_to_the_text_without_special_tokens(name: str, parts: list[str]) -> None:
    tokenizer, encode = tokenizer_and_encoder(name)
    # SentencePiece writes a space as this character, so it cannot distinguish the two.
    parts = [part.replace("▁", "_").replace("\0", "0") for part in parts]

    joined = [token_id for part in ["a", *parts] for token_id in encode(part)]

    decoded = tokenizer.decode(joined, clean_up_tokenization_spaces=False)
    assert decoded == "a" + "".join(parts)
    assert set(joined).isdisjoint(tokenizer.all_special_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_empty_piece_has_no_tokens_and_a_word_no_leading_space(name: str) -> None:
    tokenizer, encode = tokenizer_and_encoder(name)

    assert encode("") == []
    assert tokenizer.decode([*encode("a"), *encode("Tune")]) == "aTune"


def test_a_tokenizer_that_changes_text_is_refused() -> None:
    tokenizer = byte_level_with_prefix_space()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("  ", " ")

    with pytest.raises(TrainingError, match="does not preserve text encoded in pieces"):
        build_piece_encoder(tokenizer, (1, 2))


TOKENIZER = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
CONTROL_IDS = set(TOKENIZER.convert_tokens_to_ids(["[Fork]", "[Child]"]))


def example(question: str, answer: ParagraphRecord, *, raw: bool = False) -> ExampleRecord:
    return ExampleRecord("numbered", (ChatMessage("user", question),), answer, raw_prompt=raw)


def points(number: int) -> ParagraphRecord:
    return chain([(f"{i}. Point:", ParagraphRecord(f" detail {i}.\n")) for i in range(number)])


def test_an_example_is_packed_after_the_servers_prompt() -> None:
    answer = chain([("One:", ParagraphRecord(" detail."))])

    row = ExampleEncoder(TOKENIZER, 100).pack(example("Hello", answer))

    text = TOKENIZER.decode(row.token_ids)
    assert text == "<bos><|user|>Hello<|assistant|>One:[Fork][Child] detail.<eos><eos>"
    raw = example("Hello", answer, raw=True)
    assert TOKENIZER.decode(prompt_token_ids(raw, TOKENIZER)) == "<bos>Hello"


def test_text_never_becomes_a_control_token() -> None:
    answer = ParagraphRecord("Write [Fork] and [Child] or <eos>.")

    row = ExampleEncoder(TOKENIZER, 100).pack(example("What is [Fork]?", answer))

    assert CONTROL_IDS.isdisjoint(row.token_ids)
    assert list(row.token_ids).count(TOKENIZER.eos_token_id) == 1
    assert TOKENIZER.decode(row.token_ids[:-1]) == (
        "<bos><|user|>What is [Fork]?<|assistant|>Write [Fork] and [Child] or <eos>."
    )


def test_a_long_tree_is_cut_at_a_thread_without_targets_after_the_cut() -> None:
    # g | a [Fork] | [Child] b c end | d [Fork] | [Child] e end | end
    tree = packed("g", chain([("a", ParagraphRecord("bc")), ("d", ParagraphRecord("e"))]))
    a, b, c, d, g = (encode(letter)[0] for letter in "abcdg")
    no = IGNORED_TARGET

    cuts = {limit: cut_tree(tree, limit) for limit in (2, 3, 6, 7, 8, 9)}

    assert cuts[2] is None
    assert cuts[3] is not None
    assert list(cuts[3].token_ids) == [g, a, 1]
    assert list(cuts[3].targets) == [a, 1, no]
    assert cuts[6] == cuts[3]
    assert cuts[7] is not None
    assert list(cuts[7].token_ids) == [g, a, 1, 2, b, c, 3]
    assert list(cuts[7].targets) == [a, 1, no, b, c, 3, no]
    assert cuts[8] == cuts[7]
    assert cuts[9] is not None
    assert list(cuts[9].targets) == [a, 1, d, b, c, 3, no, 1, no]
    assert len(cuts[9].segment_parents) == 3
    assert TOKENS.end_id not in cuts[9].targets[6:]


def test_examples_are_counted_whole_cut_and_dropped() -> None:
    encoder = ExampleEncoder(TOKENIZER, 40)
    unforked = ParagraphRecord("word " * 60)

    rows = encoder.encode_all(
        [example("Hi", points(1)), example("Hi", points(9)), example("Hi", unforked)]
    )

    assert (encoder.counts.whole, encoder.counts.cut, encoder.counts.dropped) == (1, 1, 1)
    assert all(len(row.token_ids) <= 40 for row in rows)
    assert str(encoder.counts) == (
        "1 examples whole, 1 too long and cut at a thread, 1 too long and dropped"
    )


def test_a_prompt_that_leaves_no_room_drops_the_example() -> None:
    encoder = ExampleEncoder(TOKENIZER, 20)

    assert encoder.encode(example("why " * 40, points(2))) is None


def test_the_oldest_turns_are_dropped_until_the_example_fits() -> None:
    def chat(*turns: str) -> tuple[ChatMessage, ...]:
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        return tuple(ChatMessage(*turn) for turn in zip(roles, turns, strict=False))

    whole = ExampleRecord(
        "numbered", chat("Be kind.", "a " * 40, "b " * 40, "Hi", "Ho", "Why?"), points(1)
    )
    encoder = ExampleEncoder(TOKENIZER, 80)

    row = encoder.encode(whole)

    assert row is not None
    assert TOKENIZER.decode(row.token_ids).startswith(
        "<bos><|system|>Be kind.<|user|>Hi<|assistant|>Ho<eos><|user|>Why?<|assistant|>0. Point:"
    )
    assert (encoder.counts.whole, encoder.counts.shortened) == (1, 1)
    assert "1 examples whole (1 without their oldest turns)" in str(encoder.counts)
    short = ExampleRecord("numbered", whole.messages[-3:], points(1))
    assert encoder.fitted(short) is short
    kept = encoder.fitted(whole)
    assert kept is not None
    assert kept.messages == (whole.messages[0], *whole.messages[3:])
    # The last question is always kept.
    assert ExampleEncoder(TOKENIZER, 10).fitted(whole) is None


def vicuna_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = load_text(LLAMA_TOKENIZER).tokenizer
    tokenizer.chat_template = VICUNA_TEMPLATE.read_text()
    return tokenizer


def test_vicunas_template_gives_the_tokens_of_its_own_training() -> None:
    tokenizer = vicuna_tokenizer()
    chat = tuple(
        ChatMessage(role, text)
        for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"))
    )
    # As in FastChat: a space before each answer, including the last one.
    whole = vicuna_prompt(chat) + " Because it is.</s>"

    row = ExampleEncoder(tokenizer, 200).pack(
        ExampleRecord("unstructured", chat, ParagraphRecord("Because it is."))
    )

    assert list(row.token_ids) == tokenizer(whole)["input_ids"]
    learned = [target for target in row.targets if target != IGNORED_TARGET]
    assert tokenizer.convert_ids_to_tokens(learned) == ["▁Because", "▁it", "▁is", ".", "</s>"]


def test_only_the_answer_gets_the_leading_space_and_only_one() -> None:
    tokenizer = vicuna_tokenizer()
    encoder = ExampleEncoder(tokenizer, 200)

    def learned(answer: ParagraphRecord, *, raw: bool = False) -> str:
        row = encoder.pack(example("Hi", answer, raw=raw))
        ids = [after for after in row.targets if after != IGNORED_TARGET]
        return "".join(tokenizer.convert_ids_to_tokens(ids))

    forked = chain([("One:", ParagraphRecord("detail."))], closing="End")
    assert learned(forked) == "▁One:[Fork]Enddetail.</s></s>"
    assert learned(ParagraphRecord(" Yes")) == "▁Yes</s>"
    assert learned(ParagraphRecord("Yes"), raw=True) == "Yes</s>"
