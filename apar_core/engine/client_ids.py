"""Finds what belongs to a client's request by the ids under which vLLM runs its parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

# vLLM names the beams of a search `ID-UUID-beam-I`, with another UUID for each step.
_BEAM = re.compile(r"(?P<search>.+)-[0-9a-f]+-beam-[0-9]+")


def beam_search_of(external_id: str) -> str | None:
    """Id of the search that a request is a beam of; None if it is no beam."""
    beam = _BEAM.fullmatch(external_id)
    return None if beam is None else beam["search"]


def find_client(table: Mapping[str, Value], external_id: str) -> Value | None:
    """The entry of the client's request that a request of the engine is, or is a part of.

    vLLM numbers the prompts of one request: `ID-0`, `ID-1`.
    """
    if not table:
        return None
    if external_id in table:
        return table[external_id]
    external_id = beam_search_of(external_id) or external_id
    if external_id in table:
        return table[external_id]
    return table.get(external_id.rpartition("-")[0])
