"""Rules of the formats whose threads wait for their children."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

from apar_core.formats.blocks import BlockRules
from apar_core.formats.lists import ListRules
from apar_core.formats.parallel_format import ParallelFormat

JoinRules: TypeAlias = BlockRules | ListRules


@lru_cache(maxsize=8)
def block_rules(definition: str, tokenizer: Any) -> JoinRules:
    """Return the rules of a format given as JSON (`ForkParameters.blocks`) for a tokenizer.

    Raises CheckpointError if the tokenizer lacks a token of the format.
    """
    parsed = ParallelFormat.model_validate_json(definition)
    return BlockRules(parsed, tokenizer) if parsed.items is None else ListRules(parsed, tokenizer)
