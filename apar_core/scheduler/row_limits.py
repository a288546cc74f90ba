"""Rows of a step: how many a vLLM engine is set up for, and a warning if forks need more.

A running thread is a row. `max_num_seqs` limits the rows of a step. vLLM captures CUDA graphs for
steps of up to `min(2 * max_num_seqs, 512)` tokens (1024 on data center Blackwell); the kernels of a
larger step are launched one by one. Source: `_set_cudagraph_sizes` in vLLM 0.32's `config/vllm.py`.

Nothing here imports vLLM, which takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

DEFAULT_LARGEST_GRAPH = 512
"""Tokens of the largest CUDA graph that vLLM captures by default."""
# Above 256 tokens, vLLM captures multiples of this.
_GRAPH_STEP = 16
# Arguments that decide about graphs. With speculation, a row has several tokens, for which vLLM
# chooses further sizes.
_DECIDE_GRAPHS = (
    "enforce_eager",
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "speculative_config",
)


def graph_tokens_for(rows: int) -> int:
    """Return the smallest size of a CUDA graph that holds a step of so many decoding rows."""
    return -(-rows // _GRAPH_STEP) * _GRAPH_STEP


def largest_graph(engine: Mapping[str, Any]) -> int | None:
    """Return `max_cudagraph_capture_size` for an engine; None if it needs none.

    `engine` are engine arguments, `max_num_seqs` included. What they say about graphs stays.
    """
    rows: int = engine["max_num_seqs"]
    if rows <= DEFAULT_LARGEST_GRAPH or any(engine.get(name) for name in _DECIDE_GRAPHS):
        return None
    return graph_tokens_for(rows)


class RowWarnings:
    """Warns, once for each limit, when steps with forks reach what an engine is set up for.

    max_rows: vLLM's `max_num_seqs`.
    graph_rows: decoding rows of the largest captured CUDA graph; 0 if there are no graphs.
    """

    def __init__(self, max_rows: int, graph_rows: int) -> None:
        self._max_rows: float = max_rows
        self._graph_rows: float = graph_rows or float("inf")

    def starts_fork(self, num_running: int) -> None:
        """Note that a fork starts beside so many running sequences."""
        if num_running < self._max_rows:
            return
        logger.warning(
            "forked threads wait because all %d rows of the engine run (max_num_seqs). Raise it "
            "(`threads_per_request` in a cluster's configuration), or let fewer requests run at "
            "once.",
            self._max_rows,
        )
        self._max_rows = float("inf")

    def schedules(self, rows: int) -> None:
        """Note the rows of a step."""
        if rows <= self._graph_rows:
            return
        logger.warning(
            "a step has %d rows, more than the largest CUDA graph (%d), so its kernels are "
            "launched one by one. Raise max_cudagraph_capture_size.",
            rows,
            self._graph_rows,
        )
        self._graph_rows = float("inf")
