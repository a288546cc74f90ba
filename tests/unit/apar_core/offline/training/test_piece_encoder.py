"""Pieces of text, encoded one by one, join to the tokens of the whole text."""

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
from apar_core.offline.training.example_encoder import PieceEncoder, build_piece_encoder

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
    """Trained by SentencePiece, then as transformers holds Llama's."""
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
    """The older form of Llama's: the normalizer puts the blank before the text."""
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
@settings(max_examples=60, deadline=None)
@given(parts=pieces)
def test_pieces_join_to_the_text_and_hold_no_special_token(name: str, parts: list[str]) -> None:
    tokenizer, encode = tokenizer_and_encoder(name)
    # SentencePiece writes a blank as this very character, so it cannot tell the two apart.
    parts = [part.replace("▁", "_").replace("\0", "0") for part in parts]

    joined = [token_id for part in ["a", *parts] for token_id in encode(part)]

    decoded = tokenizer.decode(joined, clean_up_tokenization_spaces=False)
    assert decoded == "a" + "".join(parts)
    assert set(joined).isdisjoint(tokenizer.all_special_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_empty_piece_has_no_token_and_a_word_no_blank_before_it(name: str) -> None:
    tokenizer, encode = tokenizer_and_encoder(name)

    assert encode("") == []
    assert tokenizer.decode([*encode("a"), *encode("Tune")]) == "aTune"


def test_a_tokenizer_that_changes_text_is_refused() -> None:
    tokenizer = byte_level_with_prefix_space()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("  ", " ")

    with pytest.raises(TrainingError, match="does not preserve text encoded in pieces"):
        build_piece_encoder(tokenizer, (1, 2))
