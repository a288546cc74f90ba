"""Planning of each step's families, for the builders of attention metadata."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config

from apar_core.attention.families import Families, group_rows
from apar_core.attention.selection import family_settings, layer_problem, log_fallback
from apar_core.vllm_names import Attention, host_block_table, metadata_builders

if TYPE_CHECKING:
    from apar_core.vllm_names import AttentionSpec, CommonAttentionMetadata, Worker


@dataclass
class FamilyCounts:
    """Counters of a worker since its start, per layer; blocks are those of decoding rows.

    `shared_rows` counts rows read in families, and `saved_blocks` the block reads that they saved.
    """

    steps: int = 0
    shared_steps: int = 0
    shared_rows: int = 0
    saved_blocks: int = 0


def family_counts(worker: Worker) -> dict[str, int]:
    """Return the sums of a worker's `FamilyCounts`, by the names of the fields."""
    names = [field.name for field in fields(FamilyCounts)]
    counts = [planner.counts for planner in _planners(worker)]
    return {name: sum(getattr(each, name) for each in counts) for name in names}


def family_layers(worker: Worker) -> tuple[int, int]:
    """Return how many of a worker's attention layers read families now, and how many it has."""
    layer_type: Any = Attention
    layers = get_layers_from_vllm_config(worker.vllm_config, layer_type)
    return sum(planner.num_layers for planner in _planners(worker)), len(layers)


def _planners(worker: Worker) -> Iterator[StepPlanner]:
    for builder in metadata_builders(worker):
        planner = getattr(builder, "planner", None)
        if isinstance(planner, StepPlanner):
            yield planner


@dataclass(frozen=True)
class StepPlan:
    """The families of a step, on the host, and the sizes needed for launching kernels."""

    families: Families
    seq_lens: torch.Tensor
    """int32 [R] tokens of each row."""
    tokens: torch.Tensor
    """int64 [M] index, in the step's tokens, of the query of each row in a family."""
    leaders: torch.Tensor
    """int64 [F] first row of each family."""
    max_family_rows: int
    max_prefix_blocks: int
    max_suffix_blocks: int


class StepPlanner:
    """Groups the rows of each step, for the layers of one metadata builder and KV cache spec.

    `problem` is a further reason why these layers cannot be read in two passes, None without one.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        layer_names: Sequence[str],
        kv_cache_spec: AttentionSpec,
        problem: str | None,
    ) -> None:
        self.counts = FamilyCounts()
        self._block_size = kv_cache_spec.block_size
        self._settings = family_settings(vllm_config, kv_cache_spec.page_size_bytes)
        # mypy mistakes vLLM's class, a torch module, for an abstract one.
        layer_type: Any = Attention
        layers = get_layers_from_vllm_config(vllm_config, layer_type, list(layer_names))
        problems = [problem, *(layer_problem(layer.impl) for layer in layers.values())]
        found = next((each for each in problems if each is not None), None)
        self._num_layers = len(layer_names)
        self._is_active = found is None
        if found is not None:
            log_fallback(found)
            return
        # Compile the grouping before the first request.
        empty = torch.zeros(1, 1, dtype=torch.int32)
        group_rows(empty, empty[0], empty[0], block_size=self._block_size, settings=self._settings)

    @property
    def num_layers(self) -> int:
        """Number of layers that are read in families: all of the builder's, or none."""
        return self._num_layers if self._is_active else 0

    def plan(self, common: CommonAttentionMetadata) -> StepPlan | None:
        """Return the families of a step; None if all its rows are read one by one."""
        if not self._is_active:
            return None
        self.counts.steps += 1
        if common.causal is not True or common.mm_req_doc_ranges is not None:
            return None
        num_rows = common.num_reqs
        seq_lens = common.seq_lens
        if seq_lens.device.type != "cpu":
            if common.seq_lens_cpu_upper_bound is None:
                return None
            seq_lens = common.seq_lens_cpu_upper_bound
        seq_lens = seq_lens[:num_rows]
        longest = int(seq_lens.max()) // self._block_size + 1
        table = host_block_table(common, self._block_size, longest)
        if table is None:
            self._is_active = False
            log_fallback("block tables that are not known on the host")
            return None
        query_starts = common.query_start_loc_cpu[: num_rows + 1]
        families = group_rows(
            torch.from_numpy(table),
            seq_lens,
            query_starts.diff(),
            block_size=self._block_size,
            settings=self._settings,
        )
        if not families.num_families:
            return None
        self.counts.shared_steps += 1
        self.counts.shared_rows += families.num_rows
        self.counts.saved_blocks += families.num_saved_blocks
        sizes = families.starts.diff()
        suffix_lens = seq_lens - families.row_prefix_blocks * self._block_size
        return StepPlan(
            families=families,
            seq_lens=seq_lens,
            tokens=query_starts[families.rows.long()].long(),
            leaders=families.rows[families.starts[:-1].long()].long(),
            max_family_rows=int(sizes.max()),
            max_prefix_blocks=int(families.prefix_blocks.max()),
            max_suffix_blocks=-(-int(suffix_lens.max()) // self._block_size),
        )
