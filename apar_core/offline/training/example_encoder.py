"""Turns examples into packed rows of a bounded length, and counts what does not fit."""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from apar_core.errors import TrainingError
from apar_core.formats.control_tokens import (
    ControlTokens,
    PlainSpellings,
    TreeTokens,
    find_control_tokens,
    neutralise,
    plain_spellings,
)
from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.data.sources import ItemRefusedError
from apar_core.offline.data.structure import THOUGHT_CLOSING, THOUGHT_OPENING
from apar_core.offline.training.chat_format import (
    ChatFormat,
    ChatRefusedError,
    chat_format,
    chat_token_ids,
)
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices, pack_tree
from apar_core.offline.training.pretrained import load_tokenizer, tree_tokens, with_control_tokens

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


@dataclass
class EncodingCounts:
    """Numbers of examples by how they fit; `shortened` counts those whole ones that lost turns."""

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
    """Packs examples with one tokenizer; `counts` adds up over all calls of `encode`."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    counts: EncodingCounts = field(default_factory=EncodingCounts)

    @cached_property
    def _tokens(self) -> TreeTokens:
        return tree_tokens(self.tokenizer)

    @cached_property
    def _control(self) -> ControlTokens:
        control = find_control_tokens(self.tokenizer.get_vocab())
        if control is None:
            raise TrainingError("the tokenizer has no control tokens")
        return control

    @cached_property
    def _spellings(self) -> PlainSpellings:
        return plain_spellings(self._control, self.tokenizer)

    @cached_property
    def _encode_piece(self) -> PieceEncoder:
        return build_piece_encoder(self.tokenizer, (self._control.fork_id, self._control.child_id))

    @cached_property
    def _format(self) -> ChatFormat:
        return chat_format(self.tokenizer)

    def pack(self, example: ExampleRecord) -> PackedTree:
        """Return the whole example as one row, whatever its length."""
        if example.raw_prompt:
            prompt_ids, answer = prompt_token_ids(example, self.tokenizer), example.answer
        else:
            behind, answer = self._format.placed(example.answer)
            prompt_ids = chat_token_ids(example.messages, self.tokenizer, behind=behind)
        prompt_ids = neutralise(prompt_ids, self._spellings)
        return pack_tree(prompt_ids, answer, self._encode_piece, self._tokens)

    def fitted(self, example: ExampleRecord) -> ExampleRecord | None:
        """Return the example without the fewest oldest turns that make it fit, or None.

        A system message and the last question always stay.
        """
        shortened, packed = self._shortened(example)
        return shortened if self._fits(packed) else None

    def encode(self, example: ExampleRecord) -> PackedTree | None:
        """Return the row of the example without its oldest turns, or None where nothing fits.

        A row that is still too long is cut to the context length at a thread's edge.
        """
        shortened, packed = self._shortened(example)
        if self._fits(packed):
            self.counts.whole += 1
            self.counts.shortened += shortened is not example
            return compact(packed)
        cut = cut_tree(packed, self.context_length)
        if cut is None:
            self.counts.dropped += 1
            return None
        self.counts.cut += 1
        return compact(cut)

    def _shortened(self, example: ExampleRecord) -> tuple[ExampleRecord, PackedTree]:
        packed = self.pack(example)
        num_system = int(example.messages[0].role == "system")
        system, turns = example.messages[:num_system], example.messages[num_system:]
        starts = [index for index, message in enumerate(turns) if message.role == "user"]
        if self._fits(packed) or len(starts) == 1:
            return example, packed

        def without(num_turns: int) -> ExampleRecord:
            return replace(example, messages=(*system, *turns[starts[num_turns] :]))

        # Without all turns but the last question, whether that fits or not.
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


def prompt_token_ids(example: ExampleRecord, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the server would send to the model for this prompt."""
    if example.raw_prompt:
        return list(tokenizer(example.messages[-1].content)["input_ids"])
    return chat_token_ids(example.messages, tokenizer)


def compact(packed: PackedTree) -> PackedTree:
    """Return the row with four bytes a number, for rows that are kept."""
    return PackedTree(
        array("i", packed.token_ids),
        array("i", packed.positions),
        array("i", packed.targets),
        array("i", packed.segments),
        packed.segment_parents,
    )


def cut_tree(packed: PackedTree, max_tokens: int) -> PackedTree | None:
    """Return the longest beginning of the row that ends where a stretch between forks does.

    What the model has to predict behind the cut is not learned, so no thread learns to end early.
    None if the beginning would hold nothing to learn.
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


@dataclass(frozen=True, slots=True)
class ContextFit:
    """Drops the oldest turns of an example until it fits `context_length` tokens of a model.

    Each process loads the tokenizer for itself.
    """

    model_name: str
    context_length: int
    chat_template: Path | None = None

    def check(self) -> None:
        """Load the tokenizer. Raises TrainingError if it cannot encode examples."""
        tree_tokens(_encoder(self).tokenizer)

    def __call__(self, example: ExampleRecord) -> ExampleRecord | None:
        """Return the fitted example, or None if its last question and answer are too long.

        Raises ItemRefusedError if the chat template refuses the chat.
        """
        try:
            return _encoder(self).fitted(example)
        except ChatRefusedError as error:
            raise ItemRefusedError("refused by the chat template", str(error)) from error


@cache
def _encoder(fit: ContextFit) -> ExampleEncoder:
    tokenizer = load_tokenizer(fit.model_name, fit.chat_template)
    with_control_tokens(tokenizer)
    return ExampleEncoder(tokenizer, fit.context_length)
