"""Encoding of answers whose threads are joined, and the tokens of their grammar."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cached_property

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from apar_core.errors import TrainingError
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.offline.data.joined import (
    MARKERS,
    JoinedBlock,
    JoinedTokens,
    joined_answer,
    joined_tokens,
)
from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.offline.training.example_encoder import (
    PieceEncoder,
    build_piece_encoder,
    prompt_token_ids,
)
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, pack_joined

_MARKER = re.compile("|".join(f"({re.escape(marker)})" for marker in MARKERS))

# Of a thread: the first words of its heading.
_START_TOKENS = 6


def threadweaver_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer with ThreadWeaver's markers as special tokens.

    The first two take the ids of the control tokens, which would announce another format. Raises
    TrainingError if the tokenizer has none.
    """
    control = find_control_tokens(tokenizer.get_vocab())
    if control is None:
        raise TrainingError("the tokenizer has no control tokens that markers could replace")
    replaced = [control.fork_id, control.child_id]
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = settings["model"]["vocab"]
    new_ids = range(len(tokenizer), len(tokenizer) + len(MARKERS) - len(replaced))
    markers = dict(zip(MARKERS, [*replaced, *new_ids], strict=True))
    kept = [token for token in settings["added_tokens"] if token["id"] not in replaced]
    template = settings["added_tokens"][0]
    for name in tokenizer.convert_ids_to_tokens(replaced):
        vocabulary.pop(name, None)
    vocabulary.update(markers)
    added = [*kept, *(template | {"id": i, "content": name} for name, i in markers.items())]
    settings["added_tokens"] = sorted(added, key=lambda token: int(token["id"]))
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens=[
            token["content"] for token in settings["added_tokens"] if token["content"] not in named
        ],
        clean_up_tokenization_spaces=False,
        model_max_length=tokenizer.model_max_length,
        chat_template=tokenizer.chat_template,
    )


def start_marker_embeddings(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give each marker the mean embedding of its text without angle brackets.


    ThreadWeaver starts its markers in the same way. The vocabulary grows as needed; output
    embeddings must be tied to it.
    """
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    embeddings = model.model.embed_tokens.weight
    with torch.no_grad():
        for marker in MARKERS:
            word_ids = tokenizer(marker.strip("<>"), add_special_tokens=False)["input_ids"]
            marker_id = tokenizer.convert_tokens_to_ids(marker)
            embeddings[marker_id] = embeddings[word_ids].mean(dim=0)


@dataclass
class JoinedEncoder:
    """Packs examples whose answers fork as answers that join; text is encoded in pieces.

    With `start_share`, that share of the answers with threads is packed up to the first tokens of
    the first block's threads, which alone are learned. That a thread finds its outline by its
    number is in these few tokens, and such a row has a quarter of the tokens of a whole one.
    """

    tokenizer: PreTrainedTokenizerFast
    start_share: float = 0.0
    seed: int = 0

    @cached_property
    def _rng(self) -> random.Random:
        return random.Random(self.seed)

    @cached_property
    def _marker_ids(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        return {marker: vocabulary[marker] for marker in MARKERS}

    @cached_property
    def _encode_piece(self) -> PieceEncoder:
        return build_piece_encoder(self.tokenizer, self._marker_ids.values())

    @cached_property
    def _end_id(self) -> int:
        return turn_end_id(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; markers become their special tokens."""
        token_ids: list[int] = []
        for piece in _MARKER.split(text):
            marker_id = self._marker_ids.get(piece or "")
            if marker_id is not None:
                token_ids.append(marker_id)
            elif piece:
                token_ids += self._encode_piece(piece)
        return token_ids

    def pack(self, example: ExampleRecord) -> PackedTree:
        """Return the example as one row of any length."""
        prompt_ids = prompt_token_ids(example, self.tokenizer)
        answer = joined_tokens(joined_answer(example.answer), self.encode)
        if answer.blocks and self._rng.random() < self.start_share:
            return self._starts(prompt_ids, answer)
        return pack_joined(prompt_ids, answer, self._end_id)

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
