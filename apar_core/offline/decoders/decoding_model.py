"""The parts that a decoder works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.decoders.token_chooser import TypicalAcceptance
from apar_core.offline.speculation.medusa_heads import MedusaHeads


@dataclass(frozen=True, slots=True)
class DecodingModel:
    """A transformers model and what is asked of it; `heads` are None without speculation.

    `tokens` is None for an ordinary model; `forks` tells whether fork tokens may be sampled.
    """

    model: Any
    tokens: TreeTokens | None
    forks: bool
    heads: MedusaHeads | None
    top_k: tuple[int, ...]
    acceptance: TypicalAcceptance
