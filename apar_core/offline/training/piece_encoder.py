"""Encodes a text piece by piece, so that the pieces' tokens joined give the joined text.

Tokenizers treat the start of a text specially: SentencePiece puts a space before it, and some
byte-level ones do. A paragraph in the middle of an answer must not get such a space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from apar_core.errors import TrainingError
from apar_core.offline.data.structure import THOUGHT_CLOSING, THOUGHT_OPENING

# A text that holds what tokenizers change: blanks at both ends, breaks, several scripts.
_PROBE = ("a b", " c\n\n", "1. d:", "  e ", "\n", "é漢🙂", "f")


@dataclass(frozen=True, slots=True)
class PieceEncoder:
    """Turns a piece of text into tokens that never begin with an added space.

    No piece gives a special or a control token, however it is spelled. The markers of a thought are
    an exception: they give the tokens that the tokenizer has for them.
    """

    encode_plain: Callable[[str], list[int]]
    reserved_ids: frozenset[int]
    reserved_texts: tuple[str, ...]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of one piece; an empty piece has none."""
        if not text:
            return []
        token_ids = self.encode_plain(text)
        if self.reserved_ids.isdisjoint(token_ids):
            return token_ids
        # Cut behind the first character of a reserved spelling: two pieces cannot spell it.
        pattern = "|".join(
            f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self.reserved_texts
        )
        token_ids = [
            token_id for part in re.split(pattern, text) for token_id in self.encode_plain(part)
        ]
        if not self.reserved_ids.isdisjoint(token_ids):
            raise TrainingError(f"the tokenizer cannot spell {text!r} without a special token")
        return token_ids


def build_piece_encoder(
    tokenizer: PreTrainedTokenizerBase, control_ids: Iterable[int]
) -> PieceEncoder:
    """Return the piece encoder of a tokenizer that has its control tokens already, if any.

    Raises TrainingError if pieces of a probe, encoded one by one, do not give the probe back.
    """
    vocabulary = tokenizer.get_vocab()
    thought = {vocabulary.get(marker) for marker in (THOUGHT_OPENING, THOUGHT_CLOSING)}
    reserved = {*(set(tokenizer.all_special_ids) - thought), *control_ids} - {None}
    texts = tuple(
        text for text in sorted(tokenizer.convert_ids_to_tokens(sorted(reserved))) if len(text) > 1
    )
    encoder = PieceEncoder(_plain_encoding(tokenizer), frozenset(reserved), texts)
    joined = [token_id for piece in _PROBE for token_id in encoder(piece)]
    # A letter in front takes the blank that some decoders strip from the start.
    decoded = tokenizer.decode([*encoder("a"), *joined], clean_up_tokenization_spaces=False)
    if decoded != "a" + "".join(_PROBE):
        raise TrainingError(
            f"tokenizer {type(tokenizer).__name__} does not keep text piece by piece: "
            f"{'a' + ''.join(_PROBE)!r} came back as {decoded!r}"
        )
    return encoder


def _plain_encoding(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TrainingError(
            f"{type(tokenizer).__name__} cannot encode text piece by piece: training needs a "
            "tokenizer of the tokenizers library (tokenizer.json)"
        )
    settings = json.loads(backend.to_str())
    settings["normalizer"] = _without_prefix(settings["normalizer"])
    settings["pre_tokenizer"] = _without_prefix(settings["pre_tokenizer"])
    for token in settings["added_tokens"]:
        if token["content"] in (THOUGHT_OPENING, THOUGHT_CLOSING):
            # Special tokens are encoded as characters below.
            token["special"] = False
    plain = Tokenizer.from_str(json.dumps(settings))
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()

    def encode(text: str) -> list[int]:
        return list(plain.encode(text, add_special_tokens=False).ids)

    return encode


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer that puts nothing before a text."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Sequence":
        key = "normalizers" if "normalizers" in step else "pretokenizers"
        kept = [_without_prefix(inner) for inner in step[key]]
        return step | {key: [inner for inner in kept if inner is not None]}
    if step["type"] == "Prepend":
        return None
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    if "add_prefix_space" in step:
        return step | {"add_prefix_space": False}
    return step
