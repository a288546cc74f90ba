"""Encoding of answers whose threads are joined, and the tokens of their grammar."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from functools import cached_property

from apar_core.formats.resolved_format import ResolvedFormat, resolve
from apar_core.offline.data.joined import (
    FORMAT,
    MARKERS,
    JoinedBlock,
    JoinedTokens,
    joined_answer,
    joined_tokens,
)
from apar_core.offline.data.records import ParagraphRecord, flat_text
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, pack_joined
from apar_core.offline.training.pretrained import FormatTokens

MARKER_TOKENS = FormatTokens(FORMAT.name, (MARKERS,), as_words=True)

_MARKER = re.compile("|".join(f"({re.escape(marker)})" for marker in MARKERS))

# Of a thread: the first words of its heading.
_START_TOKENS = 6


@dataclass
class JoinedEncoder(ExampleEncoder):
    """Packs examples whose answers fork as answers that join; text is encoded in pieces.

    What the engine forces (seeds, headers, the text after the threads) has the engine's tokens.
    With `start_share`, that share of the answers with threads is packed up to the first tokens of
    the first block's threads, which alone are learned. That a thread finds its outline by its
    number is in these few tokens, and such a row has a quarter of the tokens of a whole one.
    """

    start_share: float = 0.0
    seed: int = 0

    @cached_property
    def _rng(self) -> random.Random:
        return random.Random(self.seed)

    @cached_property
    def _markers(self) -> ResolvedFormat:
        return resolve(FORMAT, self.tokenizer)

    @cached_property
    def _marker_ids(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        return {marker: vocabulary[marker] for marker in MARKERS}

    @cached_property
    def _end_id(self) -> int:
        return turn_end_id(self.tokenizer)

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text that the model writes; markers become special tokens.

        Null characters are removed: one inside a marker makes it ordinary text.
        """
        token_ids: list[int] = []
        for piece in _MARKER.split(text):
            marker_id = self._marker_ids.get(piece or "")
            if marker_id is not None:
                token_ids.append(marker_id)
            elif piece:
                token_ids += self._encode_piece(piece.replace("\0", ""))
        return token_ids

    def encode_forced(self, text: str) -> list[int]:
        """Return the tokens of a text that the engine forces."""
        return list(self._markers.as_one_text([self.encode_text(text)], text))

    def _pack_answer(self, prompt_ids: list[int], answer: ParagraphRecord) -> PackedTree:
        if _MARKER.search(flat_text(answer)):
            answer = _without_markers(answer)
        tokens = joined_tokens(joined_answer(answer), self.encode_text, self.encode_forced)
        if tokens.blocks and self._rng.random() < self.start_share:
            return self._starts(prompt_ids, tokens)
        return pack_joined(prompt_ids, tokens, self._end_id)

    def _starts(self, prompt_ids: list[int], answer: JoinedTokens) -> PackedTree:
        first = answer.blocks[0]
        block = JoinedBlock(first.seeds, tuple(text[:_START_TOKENS] for text in first.texts), [])
        parts = JoinedTokens((answer.parent[0], []), (block,))
        row = pack_joined(prompt_ids, parts, self._end_id)
        num_read = len(prompt_ids) + len(answer.parent[0])
        # The last token is the end of a continuation that is not there.
        targets = [
            IGNORED_TARGET if index < num_read or target == self._end_id else target
            for index, target in enumerate(row.targets[:-1])
        ]
        return PackedTree(
            row.token_ids[:-1],
            row.positions[:-1],
            targets,
            row.segments[:-1],
            row.segment_parents[:-1],
        )


def _without_markers(answer: ParagraphRecord) -> ParagraphRecord:
    """Return the answer with a null character in each marker that its text spells."""
    child, sibling = answer.first_child, answer.next_sibling
    return replace(
        answer,
        text=_MARKER.sub(lambda found: f"{found[0][0]}\0{found[0][1:]}", answer.text),
        first_child=None if child is None else _without_markers(child),
        next_sibling=None if sibling is None else _without_markers(sibling),
    )
