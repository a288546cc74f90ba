"""Logits processor: makes the engine generate a given text, or a given tree of threads.

For benchmarks and tests: timing, KV blocks, forks and scheduling are real, only the choice of the
tokens is not. A request's `extra_args["apar_replay"]` is a text with a line for each thread: its
path ("" for the root thread, "0.2" for the third child of its first child), "=", and the token ids
that the thread shall generate, fork and end tokens included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from apar_core.engine.row_processor import RowProcessor
from apar_core.fork_parameters import ForkParameters
from apar_core.journal import Journal
from apar_core.tree.thread_names import replay_key_of_path

__all__ = [
    "REPLAY_ARG",
    "Replay",
    "ReplayText",
    "replay_args",
    "replay_text",
    "replayed_tokens",
    "without_generated",
]

REPLAY_ARG = "apar_replay"


class ReplayText(str):
    """A replay that this process asks for: a client of a server can send no value of this type."""

    __slots__ = ()


# Above every logit by so much that no other token is ever sampled, and finite still when divided
# by the smallest temperature. Filling all rows with minus infinity would cost as much as sampling.
_CERTAIN = 1e30


def replay_args(tokens_of_thread: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Entries of `extra_args` that make an engine of this process generate these tokens."""
    return {REPLAY_ARG: ReplayText(replay_text(tokens_of_thread))}


def replay_text(tokens_of_thread: Mapping[str, Sequence[int]]) -> str:
    """The replay as the engine core reads it."""
    lines = (f"{path}={','.join(map(str, ids))}" for path, ids in tokens_of_thread.items())
    # Text, because each fork copies the parameters; of lines, because each thread reads its own.
    return "\n".join(["", *lines, ""])


def replayed_tokens(extra_args: Mapping[str, Any]) -> dict[str, list[int]]:
    """The tokens of each thread, by its path, that `replay_args` wrote."""
    lines = str(extra_args[REPLAY_ARG]).split("\n")[1:-1]
    return {line.partition("=")[0]: _ids(line.partition("=")[2]) for line in lines}


def without_generated(extra_args: dict[str, Any], journal: Journal) -> dict[str, Any]:
    """`extra_args` for another engine that goes on behind a journal.

    There a thread's outputs are counted anew, so its tokens must begin where it stopped.
    """
    if REPLAY_ARG not in extra_args:
        return extra_args
    scripts = replayed_tokens(extra_args)
    for delta in journal:
        key = replay_key_of_path(delta.path)
        if key in scripts:
            scripts[key] = scripts[key][len(delta.token_ids) :]
    return {**extra_args, REPLAY_ARG: replay_text(scripts)}


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch; `output_ids` is vLLM's own list and grows."""

    token_ids: Sequence[int]
    output_ids: Sequence[int]


class Replay(RowProcessor[Row]):
    """Makes one token certain in each replayed sequence."""

    def new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Row | None:
        """Concerns the sequences whose request names a replay."""
        replay = (params.extra_args or {}).get(REPLAY_ARG)
        if replay is None:
            return None
        parameters = ForkParameters.from_extra_args(params.extra_args)
        key = replay_key_of_path(parameters.thread_path if parameters else ())
        return Row(_thread_ids(replay, key), output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raise one logit of each replayed row of [num_rows, vocabulary], in place."""
        rows: list[int] = []
        chosen: list[int] = []
        for index, row in self.rows.items():
            position = len(row.output_ids)
            if position < len(row.token_ids):
                rows.append(index)
                chosen.append(row.token_ids[position])
        if rows:
            places = torch.tensor([rows, chosen], device=self.device)
            logits[places[0], places[1]] = _CERTAIN
        return logits


def _thread_ids(replay: str, key: str) -> list[int]:
    head = f"\n{key}="
    start = replay.find(head)
    if start < 0:
        return []
    start += len(head)
    return _ids(replay[start : replay.index("\n", start)])


def _ids(text: str) -> list[int]:
    ids: list[int] = json.loads(f"[{text}]")
    return ids
