"""Logits processor: makes the engine generate a given text, or a given tree of threads.

For benchmarks and tests: timing, KV blocks, forks and scheduling are real, only the choice of the
tokens is not. A request names its tokens in `extra_args["apar_replay"]`, a mapping from a thread's
path ("" for the root thread, "0.2" for the third child of its first child) to the token ids that
the thread shall generate, fork and end tokens included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from apar_core.engine.row_processor import RowProcessor
from apar_core.fork_parameters import ForkParameters

REPLAY_ARG = "apar_replay"
REPLAY = "apar_core.engine.replay:Replay"
"""Value for vLLM's `logits_processors`."""


def path_key(thread_path: Sequence[int]) -> str:
    """Key of a thread in a replay."""
    return ".".join(str(ordinal) for ordinal in thread_path)


def replay_args(tokens_of_thread: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Entries of `extra_args` that make the engine generate these tokens."""
    return {REPLAY_ARG: {path: list(tokens) for path, tokens in tokens_of_thread.items()}}


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch; `output_ids` is vLLM's own list and grows."""

    token_ids: Sequence[int]
    output_ids: Sequence[int]


class Replay(RowProcessor[Row]):
    """Leaves each replayed sequence one token to choose."""

    def new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Row | None:
        """Concerns the sequences whose request names a replay."""
        replay = (params.extra_args or {}).get(REPLAY_ARG)
        if replay is None:
            return None
        parameters = ForkParameters.from_extra_args(params.extra_args)
        key = path_key(parameters.thread_path if parameters else ())
        return Row(replay.get(key, ()), output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set all logits [num_rows, vocabulary] of replayed rows but one to minus infinity."""
        rows: list[int] = []
        chosen: list[int] = []
        for index, row in self.rows.items():
            if len(row.output_ids) < len(row.token_ids):
                rows.append(index)
                chosen.append(row.token_ids[len(row.output_ids)])
        if rows:
            row_indices = torch.tensor(rows, device=self.device)
            logits[row_indices] = -torch.inf
            logits[row_indices, torch.tensor(chosen, device=self.device)] = 0.0
        return logits
