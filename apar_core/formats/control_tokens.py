"""Fork and child token of a checkpoint, and their removal from prompts.

A tokenizer turns the text "[Fork]" into the control token, also in user text. No prompt may contain
a control token, because restored answers are plain text. So their ids are replaced by the ids of
their characters before the engine sees the prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from apar_core.errors import CheckpointError, RequestError

SPELLINGS = (
    ("[Fork]", "[Child]"),
    # The released checkpoints THUDM/apar-7b and THUDM/apar-13b.
    ("[SplitMask]", "[SplitSop]"),
)
"""Spellings of fork and child token in checkpoints."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The two control tokens of one checkpoint."""

    fork_id: int
    child_id: int
    fork_text: str
    child_text: str

    @property
    def texts(self) -> dict[int, str]:
        """Spelling of each control token, by its id."""
        return {self.fork_id: self.fork_text, self.child_id: self.child_text}


@dataclass(frozen=True, slots=True)
class TreeTokens:
    """Token ids that write a paragraph tree as threads: control tokens and the end of a thread."""

    fork_id: int
    child_id: int
    end_id: int


def find_control_tokens(vocabulary: Mapping[str, int]) -> ControlTokens | None:
    """Return the control tokens of a vocabulary, added tokens included; None if it has none.

    Raises CheckpointError if one token of a pair is missing, or if there are two pairs.
    """
    complete = [pair for pair in SPELLINGS if all(text in vocabulary for text in pair)]
    if len(complete) > 1:
        raise CheckpointError(
            f"the vocabulary has {len(complete)} pairs of control tokens: {complete}"
        )
    if complete:
        fork_text, child_text = complete[0]
        return ControlTokens(vocabulary[fork_text], vocabulary[child_text], fork_text, child_text)
    for pair in SPELLINGS:
        present = [text for text in pair if text in vocabulary]
        missing = [text for text in pair if text not in vocabulary]
        if present:
            raise CheckpointError(
                f"the vocabulary has {present[0]!r} (id {vocabulary[present[0]]}) "
                f"but not {missing[0]!r}: forking needs both"
            )
    return None


class Tokenizer(Protocol):
    """Methods of a transformers tokenizer used here."""

    def encode(
        self, text: str, /, *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> list[int]: ...

    def decode(self, token_ids: list[int], /) -> str | list[str]: ...

    def get_vocab(self) -> dict[str, int]: ...


class Markers(Protocol):
    """Control tokens of a checkpoint: `ControlTokens`, or a resolved format."""

    @property
    def texts(self) -> Mapping[int, str]:
        """Spelling of each control token, by its id."""


PlainSpellings = Mapping[int, Sequence[int]]
"""For each control token, the ids of its characters."""


def plain_spellings(control_tokens: Markers, tokenizer: Tokenizer) -> PlainSpellings:
    """Return, for each control token, the ids of its characters.

    Raises CheckpointError if the tokenizer cannot spell one.
    """
    return {
        control_id: _plain_spelling(text, control_tokens, tokenizer)
        for control_id, text in control_tokens.texts.items()
    }


def neutralise(prompt_token_ids: Sequence[int], spellings: PlainSpellings) -> list[int]:
    """Return the prompt with every control token replaced by its characters."""
    if spellings.keys().isdisjoint(prompt_token_ids):
        return list(prompt_token_ids)
    plain: list[int] = []
    for token_id in prompt_token_ids:
        plain.extend(spellings.get(token_id, (token_id,)))
    return plain


def refuse_control_tokens(prompt_token_ids: Sequence[int], control_tokens: Markers) -> None:
    """Raise RequestError if a prompt of token ids contains a control token."""
    texts = control_tokens.texts
    for position, token_id in enumerate(prompt_token_ids):
        if token_id in texts:
            raise RequestError(
                f"token {position} of the prompt is the control token {texts[token_id]!r} "
                f"(id {token_id}), which only the model may generate",
                param="prompt",
            )


def _plain_spelling(text: str, control_tokens: Markers, tokenizer: Tokenizer) -> list[int]:
    for candidate in (_natural_spelling(text, tokenizer), _spelling_by_character(text, tokenizer)):
        if candidate and _spells(candidate, text, control_tokens, tokenizer):
            return candidate
    raise CheckpointError(f"the tokenizer cannot spell {text!r} without a control token")


# Sentencepiece tokenizers add a space before the first word, so a text is spelled after a letter.
_CONTEXT = "a"


def _encode_plain(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def _natural_spelling(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the tokenizer gives without special tokens; empty if it cannot tell."""
    context_ids = _encode_plain(_CONTEXT, tokenizer)
    token_ids = _encode_plain(_CONTEXT + text, tokenizer)
    if token_ids[: len(context_ids)] != context_ids:
        return []
    return token_ids[len(context_ids) :]


def _spelling_by_character(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return one token per character, or a byte token if the vocabulary lacks the character.

    This is for control tokens that were added as ordinary tokens, which no option of the tokenizer
    splits. A printable ASCII character is itself in byte-level and sentencepiece vocabularies.
    """
    vocabulary = tokenizer.get_vocab()
    token_ids: list[int] = []
    for character in text:
        names = (character, *_WHITE_SPACE.get(character, ()), f"<0x{ord(character):02X}>")
        known = (vocabulary[name] for name in names if name in vocabulary)
        token_ids += [next(known, -1)]
    return [] if -1 in token_ids else token_ids


# Byte-level vocabularies, then sentencepiece.
_WHITE_SPACE = {" ": ("Ġ", "▁"), "\n": ("Ċ",)}


def _spells(token_ids: list[int], text: str, control_tokens: Markers, tokenizer: Tokenizer) -> bool:
    if not control_tokens.texts.keys().isdisjoint(token_ids):
        return False
    return tokenizer.decode(_encode_plain(_CONTEXT, tokenizer) + token_ids) == _CONTEXT + text
