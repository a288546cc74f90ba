"""Family attention on CPUs, in torch: slow, meant for running the whole engine without a GPU.

Rows in families are read in two passes; vLLM's CPU kernel reads all other rows from the same KV
cache.

Letters: N rows, Q queries per row, T tokens, H heads, K KV heads, D head size, S blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig

from apar_core.attention.plan import StepPlan, StepPlanner, family_counts, family_layers
from apar_core.cpu_worker import ForkCPUWorker
from apar_core.vllm_names import (
    AttentionSpec,
    CommonAttentionMetadata,
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    attention_backend,
    cpu_attention_kernel,
    merge_attn_states,
    replaced_attention,
)

_PLAIN_KERNELS = ("vec", "vec16")
"""vLLM's kernels whose cache blocks hold keys as [D, tokens] and values as [tokens, D]."""


class FamilyCPUWorker(ForkCPUWorker):
    """CPU worker whose model reads families."""

    def load_model(self, **kwargs: Any) -> None:
        """Build the model with our backend in place of vLLM's."""
        FamilyCPUBackend.replaced = attention_backend("CPU_ATTN")
        with replaced_attention({"CPU_ATTN": f"{__name__}.FamilyCPUBackend"}):
            super().load_model(**kwargs)

    def family_counts(self) -> dict[str, int]:
        """Return the sums of `FamilyCounts`; called through `collective_rpc`."""
        return family_counts(self)

    def family_layers(self) -> tuple[int, int]:
        """Return the numbers of family layers and all layers; called through `collective_rpc`."""
        return family_layers(self)


class FamilyCPUBackend(CPUAttentionBackend):
    """vLLM's CPU attention, in two passes for rows in families."""

    replaced: ClassVar[Any] = CPUAttentionBackend

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> Any:
        return FamilyCPUBackend.replaced.get_supported_kernel_block_sizes(kv_cache_spec)

    @staticmethod
    def get_impl_cls() -> type[FamilyCPUImpl]:
        return FamilyCPUImpl

    @staticmethod
    def get_builder_cls() -> type[FamilyCPUBuilder]:
        return FamilyCPUBuilder


@dataclass
class FamilyCPUMetadata(CPUAttentionMetadata):
    """Metadata of a step with families; `rest` has its other rows as a step of their own."""

    plan: StepPlan | None = None
    rest: CPUAttentionMetadata | None = None
    rest_tokens: Tensor | None = None
    """int64: token indices of the other rows' queries; None without other rows."""


class FamilyCPUBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata with the families of the step."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        kernel = cpu_attention_kernel(self)
        problem = None if kernel in _PLAIN_KERNELS else f"the layout of the CPU kernel {kernel!r}"
        self.planner = StepPlanner(vllm_config, layer_names, kv_cache_spec, problem)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Build vLLM's metadata and add the families; drafts (`fast_build`) have none."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        plan = None if fast_build else self.planner.plan(common)
        if plan is None:
            return metadata
        rows = (plan.families.row_prefix_blocks == 0).nonzero()[:, 0]
        if not len(rows):
            return FamilyCPUMetadata(**vars(metadata), plan=plan)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].long()
        lens = starts.diff()[rows]
        rest_starts = torch.cat((lens.new_zeros(1), lens.cumsum(0)))
        tokens = torch.arange(int(rest_starts[-1])) + (
            starts[rows] - rest_starts[:-1]
        ).repeat_interleave(lens)
        rest_starts = rest_starts.int()
        rest = super().build(
            common_prefix_len,
            common.replace(
                query_start_loc=rest_starts,
                query_start_loc_cpu=rest_starts,
                seq_lens=common.seq_lens[rows],
                num_reqs=len(rows),
                num_actual_tokens=len(tokens),
                max_query_len=int(lens.max()),
                block_table_tensor=common.block_table_tensor[rows],
                slot_mapping=common.slot_mapping[tokens],
            ),
            fast_build,
        )
        return FamilyCPUMetadata(**vars(metadata), plan=plan, rest=rest, rest_tokens=tokens)


class FamilyCPUImpl(CPUAttentionBackendImpl):
    """Two passes for rows in families, vLLM's kernel for all others."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; the KV cache already holds the new tokens of all rows."""
        metadata = attn_metadata
        if not isinstance(metadata, FamilyCPUMetadata) or metadata.plan is None:
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        plan = metadata.plan
        shared = read_families(query[plan.tokens], kv_cache, metadata.block_table, plan, self.scale)
        output[plan.tokens] = shared
        if metadata.rest_tokens is not None:
            tokens = metadata.rest_tokens
            rest = torch.empty_like(output[tokens])
            super().forward(
                layer, query[tokens], key[tokens], value[tokens], kv_cache, metadata.rest, rest
            )
            output[tokens] = rest
        return output


def read_families(
    query_NHD: Tensor, kv_cache: Tensor, block_table: Tensor, plan: StepPlan, scale: float
) -> Tensor:
    """Return the attention [N, H, D] of all rows in families, in the order of `families.rows`.

    `kv_cache` has vLLM's layout for CPUs: [blocks, K, block size, 2 * D].
    """
    families, rows = plan.families, plan.families.rows.long()
    block_size = kv_cache.shape[2]
    prefix, prefix_lse = [], []
    for family in range(families.num_families):
        first, end = families.starts[family : family + 2].tolist()
        blocks = block_table[plan.leaders[family], : families.prefix_blocks[family]]
        keys, values = read_blocks(kv_cache, blocks[None])
        num_keys = torch.tensor([keys.shape[1]])
        out, lse = attend(query_NHD[None, first:end], keys, values, num_keys, scale)
        prefix.append(out[0])
        prefix_lse.append(lse[0])
    begins = families.row_prefix_blocks[rows].long()
    suffix_lens = plan.seq_lens[rows].long() - begins * block_size
    places = torch.arange(-(-int(suffix_lens.max()) // block_size))
    # Past a row's end any of its blocks will do, because the tokens there are masked.
    last = (plan.seq_lens[rows].long() - 1) // block_size
    columns = (begins[:, None] + places).minimum(last[:, None])
    keys, values = read_blocks(kv_cache, block_table[rows].gather(1, columns))
    suffix, suffix_lse = attend(query_NHD[:, None], keys, values, suffix_lens, scale)
    output = torch.empty_like(query_NHD)
    merge_attn_states(
        output,
        torch.cat(prefix),
        torch.cat(prefix_lse).T.contiguous(),
        suffix[:, 0],
        suffix_lse[:, 0].T.contiguous(),
    )
    return output


def read_blocks(kv_cache: Tensor, blocks_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the keys and values [N, S * block size, K, D] of blocks from vLLM's CPU cache."""
    _, num_kv_heads, block_size, double_size = kv_cache.shape
    num_rows, num_blocks = blocks_NS.shape
    head_size = double_size // 2
    found = kv_cache[blocks_NS.flatten().long()].view(
        num_rows, num_blocks, num_kv_heads, 2, block_size * head_size
    )
    keys = found[:, :, :, 0].unflatten(-1, (head_size, block_size)).permute(0, 1, 4, 2, 3)
    values = found[:, :, :, 1].unflatten(-1, (block_size, head_size)).permute(0, 1, 3, 2, 4)
    return keys.flatten(1, 2), values.flatten(1, 2)


def attend(
    query_NQHD: Tensor, keys_NTKD: Tensor, values_NTKD: Tensor, num_keys_N: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention [N, Q, H, D] over each row's first `num_keys_N` keys, and log-sum-exp.

    The log-sum-exp is float32 [N, Q, H]. Every row has at least one key.
    """
    num_kv_heads = keys_NTKD.shape[2]
    query = query_NQHD.float().unflatten(2, (num_kv_heads, -1))
    is_key = torch.arange(keys_NTKD.shape[1]) < num_keys_N[:, None]
    scores = torch.einsum("nqkgd,ntkd->nqkgt", query, keys_NTKD.float()) * scale
    scores = scores.masked_fill(~is_key[:, None, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    # Unwritten cache memory may hold anything, and 0 * nan is nan.
    values = values_NTKD.float().masked_fill(~is_key[..., None, None], 0)
    output = torch.einsum("nqkgt,ntkd->nqkgd", (scores - lse[..., None]).exp(), values)
    return output.flatten(2, 3).to(query_NQHD.dtype), lse.flatten(2, 3)
