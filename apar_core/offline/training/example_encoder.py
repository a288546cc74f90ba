"""Encoding of examples as packed rows of bounded length.

Text is encoded piece by piece, such that the pieces' tokens joined give the joined text. Tokenizers
treat the start of a text specially: SentencePiece and some byte-level ones put a space before it. A
paragraph in the middle of an answer must not get such a space.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from apar_core.errors import TrainingError
from apar_core.formats.control_tokens import (
    Markers,
    PlainSpellings,
    TreeTokens,
    neutralise,
    plain_spellings,
)
from apar_core.formats.resolved_format import find_format
from apar_core.offline.data.records import ExampleRecord, ParagraphRecord, flat_text
from apar_core.offline.data.structure import THOUGHT_CLOSING, THOUGHT_OPENING
from apar_core.offline.training.chat_format import (
    ChatFormat,
    chat_format,
    chat_token_ids,
    turn_end_id,
)
from apar_core.offline.training.packing import (
    IGNORED_TARGET,
    PackedTree,
    next_indices,
    pack_text,
    pack_tree,
)
from apar_core.offline.training.pretrained import control_tokens, tree_tokens

# Text that tokenizers tend to change: whitespace at both ends, line breaks, several scripts.
_PROBE = ("a b", " c\n\n", "1. d:", "  e ", "\n", "é漢🙂", "f")


@dataclass(frozen=True, slots=True)
class PieceEncoder:
    """Encodes a piece of text without adding a space at its start.

    Spellings of special and control tokens are encoded as ordinary text, except for the markers of
    a thought, which become the tokenizer's own tokens.
    """

    encode_plain: Callable[[str], list[int]]
    reserved_ids: frozenset[int]
    reserved_texts: tuple[str, ...]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a piece."""
        if not text:
            return []
        token_ids = self.encode_plain(text)
        if self.reserved_ids.isdisjoint(token_ids):
            return token_ids
        # Cut after the first character of a reserved spelling: the parts cannot form it.
        pattern = "|".join(
            f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self.reserved_texts
        )
        token_ids = [
            token_id for part in re.split(pattern, text) for token_id in self.encode_plain(part)
        ]
        if not self.reserved_ids.isdisjoint(token_ids):
            raise TrainingError(f"the tokenizer cannot encode {text!r} without a special token")
        return token_ids


def build_piece_encoder(
    tokenizer: PreTrainedTokenizerBase, control_ids: Iterable[int]
) -> PieceEncoder:
    """Return the piece encoder of a tokenizer; control tokens must have been added before.

    Raises TrainingError if the pieces of a test string do not decode to the string.
    """
    vocabulary = tokenizer.get_vocab()
    thought = {vocabulary.get(marker) for marker in (THOUGHT_OPENING, THOUGHT_CLOSING)}
    reserved = {*(set(tokenizer.all_special_ids) - thought), *control_ids} - {None}
    texts = tuple(
        text for text in sorted(tokenizer.convert_ids_to_tokens(sorted(reserved))) if len(text) > 1
    )
    encoder = PieceEncoder(_plain_encoding(tokenizer), frozenset(reserved), texts)
    joined = [token_id for piece in _PROBE for token_id in encoder(piece)]
    # Some decoders strip a space at the start, so a letter goes first.
    decoded = tokenizer.decode([*encoder("a"), *joined], clean_up_tokenization_spaces=False)
    if decoded != "a" + "".join(_PROBE):
        raise TrainingError(
            f"tokenizer {type(tokenizer).__name__} does not preserve text encoded in pieces: "
            f"{'a' + ''.join(_PROBE)!r} became {decoded!r}"
        )
    return encoder


def _plain_encoding(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TrainingError(
            f"{type(tokenizer).__name__} cannot encode text in pieces: training needs a "
            "fast tokenizer (tokenizer.json)"
        )
    settings = json.loads(backend.to_str())
    settings["normalizer"] = _without_prefix(settings["normalizer"])
    settings["pre_tokenizer"] = _without_prefix(settings["pre_tokenizer"])
    for token in settings["added_tokens"]:
        if token["content"] in (THOUGHT_OPENING, THOUGHT_CLOSING):
            # Special tokens are encoded as ordinary characters below.
            token["special"] = False
    plain = Tokenizer.from_str(json.dumps(settings))
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()

    def encode(text: str) -> list[int]:
        return list(plain.encode(text, add_special_tokens=False).ids)

    return encode


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer that adds nothing before a text."""
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


@dataclass
class EncodingCounts:
    """Numbers of examples by fit; `whole` includes those `shortened` by their oldest turns."""

    whole: int = 0
    shortened: int = 0
    cut: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        shortened = f" ({self.shortened} without their oldest turns)" if self.shortened else ""
        return (
            f"{self.whole} examples whole{shortened}, {self.cut} too long and cut at a thread, "
            f"{self.dropped} too long and dropped"
        )


@dataclass
class ExampleEncoder:
    """Packs examples with one tokenizer; `counts` accumulates over calls of `encode`.

    Answers are packed as APAR's trees. A subclass for another format has other `_markers`, and
    packs answers in its own way.
    """

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    counts: EncodingCounts = field(default_factory=EncodingCounts)

    @cached_property
    def _markers(self) -> Markers:
        return control_tokens(self.tokenizer)

    def _pack_answer(self, prompt_ids: list[int], answer: ParagraphRecord) -> PackedTree:
        return pack_tree(prompt_ids, answer, self._encode_piece, self._tokens)

    @cached_property
    def _tokens(self) -> TreeTokens:
        return tree_tokens(self.tokenizer)

    @cached_property
    def _spellings(self) -> PlainSpellings:
        return plain_spellings(self._markers, self.tokenizer)

    @cached_property
    def _encode_piece(self) -> PieceEncoder:
        return build_piece_encoder(self.tokenizer, self._markers.texts)

    @cached_property
    def _format(self) -> ChatFormat:
        return chat_format(self.tokenizer)

    def pack(self, example: ExampleRecord) -> PackedTree:
        """Return the example as one row of any length."""
        if example.raw_prompt:
            prompt_ids, answer = prompt_token_ids(example, self.tokenizer), example.answer
        else:
            suffix, answer = self._format.placed(example.answer)
            prompt_ids = chat_token_ids(example.messages, self.tokenizer, suffix=suffix)
        return self._pack_answer(neutralise(prompt_ids, self._spellings), answer)

    def fitted(self, example: ExampleRecord) -> ExampleRecord | None:
        """Drop as few of the oldest turns as needed to fit the context; None if impossible.

        The system message and the last question are always kept.
        """
        shortened, packed = self._shortened(example)
        return shortened if self._fits(packed) else None

    def encode(self, example: ExampleRecord) -> PackedTree | None:
        """Return the example as a row that fits the context, or None if impossible.

        First the oldest turns are dropped, then the row is cut where a thread ends or forks.
        """
        shortened, packed = self._shortened(example)
        if self._fits(packed):
            self.counts.whole += 1
            self.counts.shortened += shortened is not example
            return compact(packed)
        cut = self._cut(packed)
        if cut is None:
            self.counts.dropped += 1
            return None
        self.counts.cut += 1
        return compact(cut)

    def _cut(self, packed: PackedTree) -> PackedTree | None:
        return cut_tree(packed, self.context_length)

    def _shortened(self, example: ExampleRecord) -> tuple[ExampleRecord, PackedTree]:
        packed = self.pack(example)
        num_system = int(example.messages[0].role == "system")
        system, turns = example.messages[:num_system], example.messages[num_system:]
        starts = [index for index, message in enumerate(turns) if message.role == "user"]
        if self._fits(packed) or len(starts) == 1:
            return example, packed

        def without(num_turns: int) -> ExampleRecord:
            return replace(example, messages=(*system, *turns[starts[num_turns] :]))

        # The last question is kept even if it does not fit.
        most = len(starts) - 1
        fewest = bisect_left(
            range(most), True, lo=1, key=lambda n: self._fits(self.pack(without(n)))
        )
        return without(fewest), self.pack(without(fewest))

    def _fits(self, packed: PackedTree) -> bool:
        return len(packed.token_ids) <= self.context_length

    def encode_all(self, examples: Iterable[ExampleRecord]) -> list[PackedTree]:
        """Return the rows of all examples that fit."""
        rows = (self.encode(example) for example in examples)
        return [row for row in rows if row is not None]


@dataclass(frozen=True, slots=True)
class _NoMarkers:
    """Control tokens of a model that has none."""

    texts: Mapping[int, str] = field(default_factory=dict)


@dataclass
class PlainEncoder(ExampleEncoder):
    """Packs answers as one thread, for models without control tokens."""

    @cached_property
    def _markers(self) -> Markers:
        return _NoMarkers()

    @cached_property
    def _end_id(self) -> int:
        return turn_end_id(self.tokenizer)

    def _pack_answer(self, prompt_ids: list[int], answer: ParagraphRecord) -> PackedTree:
        return pack_text(prompt_ids, self._encode_piece(flat_text(answer)), self._end_id)

    def _cut(self, packed: PackedTree) -> PackedTree | None:
        """Return the first tokens of the row, or None if the prompt alone fills the context."""
        size = self.context_length
        targets = [*packed.targets[: size - 1], IGNORED_TARGET]
        if all(target == IGNORED_TARGET for target in targets):
            return None
        return replace(
            packed,
            token_ids=packed.token_ids[:size],
            positions=packed.positions[:size],
            targets=targets,
            segments=packed.segments[:size],
        )


def encoder_for(tokenizer: PreTrainedTokenizerBase, context_length: int) -> ExampleEncoder:
    """Return the encoder of a model's answers: trees if it has control tokens, else one thread.

    With the tokens of another format, the encoder raises TrainingError when it is used.
    """
    plain = find_format(tokenizer.get_vocab()) is None
    return (PlainEncoder if plain else ExampleEncoder)(tokenizer, context_length)


def prompt_token_ids(example: ExampleRecord, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the prompt's tokens as the server would send them to the model."""
    if example.raw_prompt:
        return list(tokenizer(example.messages[-1].content)["input_ids"])
    return chat_token_ids(example.messages, tokenizer)


def compact(packed: PackedTree) -> PackedTree:
    """Return the row with 4 bytes per number, to save memory."""
    return PackedTree(
        array("i", packed.token_ids),
        array("i", packed.positions),
        array("i", packed.targets),
        array("i", packed.segments),
        packed.segment_parents,
    )


def cut_tree(packed: PackedTree, max_tokens: int) -> PackedTree | None:
    """Return the longest prefix of the row that ends at the end of a segment.

    Targets after the cut are ignored, so no thread learns to end early. Returns None if the prefix
    has no targets.
    """
    segments = packed.segments
    ends = [i for i in range(1, len(segments)) if segments[i] != segments[i - 1]]
    end = max((i for i in ends if i <= max_tokens), default=0)
    following = next_indices(packed)
    targets = [
        packed.targets[index]
        if (after := following[index]) is not None and after < end
        else IGNORED_TARGET
        for index in range(end)
    ]
    if all(target == IGNORED_TARGET for target in targets):
        return None
    return replace(
        packed,
        token_ids=packed.token_ids[:end],
        positions=packed.positions[:end],
        targets=targets,
        segments=segments[:end],
        segment_parents=packed.segment_parents[: max(segments[:end]) + 1],
    )
