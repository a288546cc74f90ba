"""Which format a checkpoint has, and the format's texts as tokens of that checkpoint.

API process and engine core resolve the same format with the same tokenizer, so both know the same
token ids without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from apar_core.errors import CheckpointError
from apar_core.formats.control_tokens import (
    ControlTokens,
    PlainSpellings,
    Tokenizer,
    neutralise,
    plain_spellings,
)
from apar_core.formats.parallel_format import Branch, ParallelFormat, template_fields
from apar_core.formats.shipped_formats import REFUSED, REFUSED_TOKENS, SHIPPED
from apar_core.suggestions import did_you_mean

SETTING = "parallel_format"
"""The setting that names or defines a format: of a model, and in `additional_config.apar`."""
"""Tiers whose checkpoints fork; others are served as ordinary models."""
_LIKE = "like"


def _read_setting(value: Any) -> Any:
    """Return a format's definition from its name, or from its fields and those of `like`."""
    if isinstance(value, str):
        return shipped_format(value)
    if isinstance(value, Mapping) and _LIKE in value:
        base = value[_LIKE]
        if not isinstance(base, str):
            raise ValueError(f"{_LIKE}: the name of a format is expected, got {base!r}")
        given = {name: fields for name, fields in value.items() if name != _LIKE}
        shipped = shipped_format(base).model_dump()
        for name, fields in given.items():
            if isinstance(fields, Mapping) and isinstance(shipped.get(name), dict):
                given[name] = {**shipped[name], **fields}
        return {**shipped, "name": f"{base} (changed)", **given}
    return value


FormatSetting = Annotated[ParallelFormat, BeforeValidator(_read_setting)]
"""A name of a shipped format, or a definition; `like: NAME` starts from a shipped one."""


def shipped_format(name: str) -> ParallelFormat:
    """Return a shipped format. Raises ValueError for an unknown name and for a refused format."""
    if name in REFUSED:
        raise ValueError(f"{name!r} cannot be served: {REFUSED[name]}")
    if name not in SHIPPED:
        raise ValueError(
            f"unknown format {name!r}; known: {', '.join(SHIPPED)}{did_you_mean(name, SHIPPED)}"
        )
    return SHIPPED[name]


@dataclass(frozen=True, slots=True)
class FoundFormat:
    """A checkpoint's format, and whether its configuration or its tokens say so."""

    definition: ParallelFormat
    source: Literal["configuration", "tokens"]


def find_format(
    vocabulary: Mapping[str, int], setting: ParallelFormat | None = None
) -> FoundFormat | None:
    """Return the format of a checkpoint by its vocabulary, added tokens included.

    `setting` is the format in the configuration, which goes before detection. None: an ordinary
    model. Raises CheckpointError if several formats fit, or if a token of APAR's pair is missing.
    """
    if setting is not None:
        return FoundFormat(setting, "configuration")
    fitting = [
        shipped
        for shipped in SHIPPED.values()
        if shipped.tokens and all(text in vocabulary for text in shipped.tokens)
    ]
    if len(fitting) > 1:
        names = " and ".join(repr(shipped.name) for shipped in fitting)
        raise CheckpointError(
            f"the vocabulary has the tokens of {len(fitting)} formats, {names}: name one of them "
            f"in `{SETTING}`"
        )
    if fitting:
        return FoundFormat(fitting[0], "tokens")
    for shipped in SHIPPED.values():
        present = [text for text in shipped.tokens if text in vocabulary]
        # Their brackets are not used for anything else; tags like <Parallel> are common.
        if present and shipped.name.startswith("apar"):
            (missing,) = (text for text in shipped.tokens if text not in vocabulary)
            raise CheckpointError(
                f"the vocabulary has {present[0]!r} (id {vocabulary[present[0]]}) "
                f"but not {missing!r}: forking needs both"
            )
    return None


def refused_format(vocabulary: Mapping[str, int]) -> str | None:
    """Return the name of the refused format whose tokens a vocabulary has, or None."""
    for name, tokens in REFUSED_TOKENS.items():
        if all(text in vocabulary for text in tokens):
            return name
    return None


@dataclass(frozen=True, slots=True)
class ResolvedFormat:
    """A format with the token ids of one checkpoint.

    trigger_id: None if the trigger is a text of several tokens, which only a waiting parent may
        have.
    seed_ids: tokens forced at a child's start; None if they depend on the child: `seed_of`.
    end_ids: tokens that end a child, besides the model's own.
    replacement_ids: tokens that stand in the text where a thread was forked.
    texts: spelling of every marker that is a token of the vocabulary, by its id.
    spellings: ids of the characters of these markers, which a prompt has in their place.
    """

    definition: ParallelFormat
    trigger_id: int | None
    seed_ids: tuple[int, ...] | None
    end_ids: tuple[int, ...]
    replacement_ids: tuple[int, ...]
    texts: Mapping[int, str]
    spellings: PlainSpellings
    _tokenizer: Tokenizer = field(repr=False, compare=False)

    @property
    def control_tokens(self) -> ControlTokens | None:
        """Fork and child token of a format that has just these two, as APAR and HPD-Parsing do."""
        seed_ids = self.seed_ids or ()
        if self.definition.waits or self.trigger_id is None or len(seed_ids) != 1:
            return None
        return ControlTokens(
            self.trigger_id, seed_ids[0], self.definition.trigger, self.definition.child_seed
        )

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens of the seed that only the engine writes, where the parent continues."""
        if self.definition.waits:
            return ()
        return tuple(
            dict.fromkeys(
                seed_id
                for seed_id in self.seed_ids or ()
                if seed_id in self.texts and seed_id != self.trigger_id
            )
        )

    @property
    def uncounted_ids(self) -> tuple[int, ...]:
        """Tokens that are not text: trigger and banned ones, where the parent continues."""
        if self.definition.waits or self.trigger_id is None:
            return ()
        return (self.trigger_id, *self.banned_ids)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text of the format, markers as their tokens, after other text."""
        return encode_behind(text, self._tokenizer)

    def encode_written(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that a model has written, after other text.

        Markers are spelled out. Never raises: a tokenizer may not spell every text, for example
        one that composes accents.
        """
        return tuple(neutralise(_closest_ids(text, self._tokenizer), self.spellings))

    def as_one_text(self, pieces: Sequence[Sequence[int]], text: str) -> tuple[int, ...]:
        """Return the ids of a text tokenized as a whole, as the projects' clients do.

        If it then has other markers than its pieces, return these.
        """
        joined = [token_id for piece in pieces for token_id in piece]
        whole = _closest_ids(text, self._tokenizer)
        return tuple(whole if self._markers(whole) == self._markers(joined) else joined)

    def seed_of(self, branch: Branch) -> tuple[int, ...]:
        """Return the tokens forced at the start of a waiting parent's child.

        A child that inherits nothing reads the model's own first tokens before them.
        """
        seed = self.definition.child_seed
        if self.definition.cut == "nothing":
            text = branch.fill(seed)
            token_ids = self._tokenizer.encode(text, add_special_tokens=True)
            return tuple(neutralise(token_ids, self.spellings))
        return self.fill(seed, branch)

    def fill(self, template: str, branch: Branch, *, result: str = "") -> tuple[int, ...]:
        """Return the ids of a template with a child's values.

        Markers of the template are tokens. Markers in a value are spelled out: a model may repeat
        in an outline what its user has written.
        """
        pieces: list[tuple[int, ...]] = []
        for literal, name, _, _ in Formatter().parse(template):
            pieces.append(tuple(_closest_ids(literal, self._tokenizer)))
            if name is not None:
                pieces.append(self.encode_written(branch.fill(f"{{{name}}}", result=result)))
        return self.as_one_text(pieces, branch.fill(template, result=result))

    def outline_text(self, token_ids: Sequence[int]) -> str:
        """Return what a thread has generated, in which only marker tokens spell markers.

        A model may repeat a user's `<Outline>` character by character, which is no outline: after
        its first character there is a null character.
        """
        text: list[str] = []
        start = 0
        for index, token_id in enumerate([*token_ids, None]):
            if token_id is not None and token_id not in self.texts:
                continue
            plain = self.decode(token_ids[start:index]) if index > start else ""
            for marker in self.texts.values():
                plain = plain.replace(marker, f"{marker[0]}\0{marker[1:]}")
            text.append(plain)
            if token_id is not None:
                text.append(self.texts[token_id])
            start = index + 1
        return "".join(text)

    def _markers(self, token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in self.texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, markers included."""
        return str(self._tokenizer.decode(list(token_ids)))


@dataclass(frozen=True, slots=True)
class _Markers:
    texts: Mapping[int, str]


def resolve(definition: ParallelFormat, tokenizer: Tokenizer) -> ResolvedFormat:
    """Return a format with a tokenizer's ids.

    Raises CheckpointError if a text that must be one token is not one, or if the tokenizer cannot
    spell a marker by its characters.
    """
    vocabulary = tokenizer.get_vocab()
    required = [*definition.tokens, *definition.child_end]
    if definition.parent == "continues":
        required.append(definition.trigger)
    for text in required:
        if text not in vocabulary:
            raise CheckpointError(
                f"format {definition.name!r} needs {text!r} as one token, which the vocabulary of "
                f"{len(vocabulary)} does not have"
            )
    texts = {vocabulary[text]: text for text in definition.markers if text in vocabulary}
    is_fixed = not template_fields(definition.child_seed)
    marked = _Markers(texts)
    return ResolvedFormat(
        definition=definition,
        trigger_id=vocabulary.get(definition.trigger),
        seed_ids=encode_behind(definition.child_seed.format(), tokenizer) if is_fixed else None,
        end_ids=tuple(vocabulary[text] for text in definition.child_end),
        replacement_ids=encode_behind(definition.replacement, tokenizer),
        texts=texts,
        spellings=plain_spellings(marked, tokenizer),
        _tokenizer=tokenizer,
    )


# Sentencepiece tokenizers add a space before the first word, so a text is spelled after a letter.
_CONTEXT = "a"


def encode_behind(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a text that follows other text. Raises CheckpointError if none spell it."""
    token_ids = _closest_ids(text, tokenizer)
    if text and not _spell(token_ids, text, tokenizer):
        raise CheckpointError(f"the tokenizer cannot spell {text!r} after other text")
    return tuple(token_ids)


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a function that gives the text of one token after other text."""
    context = tokenizer.encode(_CONTEXT, add_special_tokens=False)
    # After a letter, so that a leading space of the token is not stripped.
    num_before = len(str(tokenizer.decode(context)))

    @lru_cache(maxsize=65536)
    def text_of(token_id: int) -> str:
        return str(tokenizer.decode([*context, token_id]))[num_before:]

    return text_of


def _closest_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that spell a text after other text, or come closest to it."""
    if not text:
        return []
    context = tokenizer.encode(_CONTEXT, add_special_tokens=False)
    behind = tokenizer.encode(_CONTEXT + text, add_special_tokens=False)
    is_separate = behind[: len(context)] == context
    if is_separate and _spell(behind[len(context) :], text, tokenizer):
        return behind[len(context) :]
    alone = tokenizer.encode(text, add_special_tokens=False)
    return behind[len(context) :] if is_separate and not _spell(alone, text, tokenizer) else alone


def _spell(token_ids: list[int], text: str, tokenizer: Tokenizer) -> bool:
    context = tokenizer.encode(_CONTEXT, add_special_tokens=False)
    return str(tokenizer.decode([*context, *token_ids])) == _CONTEXT + text
