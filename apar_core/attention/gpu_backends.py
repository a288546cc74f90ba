"""Family attention on GPUs: vLLM's FlashAttention in two passes, or our Triton kernel.

Steps without families, and unsupported layers, use vLLM's own code. Attention runs between
piecewise CUDA graphs, because the shapes of its tables depend on the families of the step.

With FlashAttention, a step takes two calls of the kernel that vLLM uses:

1. prefix: the rows of a family are the queries of one sequence, whose keys are the shared blocks.
   No mask is needed, since every key precedes every query.
2. suffix: each row of the step is a sequence as usual, without its shared blocks.

Letters: R rows, M rows in families, F families, H heads, D head size, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config

from apar_core.attention.families import Families
from apar_core.attention.plan import StepPlan, StepPlanner, family_counts, family_layers
from apar_core.attention.selection import layer_problem, log_fallback
from apar_core.vllm_names import (
    Attention,
    AttentionCGSupport,
    AttentionSpec,
    CommonAttentionMetadata,
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
    Worker,
    flash_attention,
    merge_attn_states,
    replaced_attention,
    watch_block_tables,
    with_aligned_strides,
)

_TABLE_ENTRY_BYTES = 4 + 8 + 4 // 2
"""Memory per entry of a row's block table.

4 bytes in the suffix table, 8 for the index it is gathered from, and 4 per two rows in the prefix
table.
"""


class FamilyGPUWorker(Worker):
    """GPU worker whose model reads families."""

    def init_device(self) -> None:
        """Build the model runner, with its block tables available on the host."""
        watch_block_tables()
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Build the model with our backends in place of vLLM's; log if vLLM chooses another one."""
        ours = {"FLASH_ATTN": "FamilyFlashBackend", "TRITON_ATTN": "FamilyTritonBackend"}
        with replaced_attention({name: f"{__name__}.{path}" for name, path in ours.items()}):
            super().load_model(**kwargs)
        for layer in _attention_layers(self.vllm_config):
            if not _is_ours(layer):
                name = layer.get_attn_backend().get_name()
                log_fallback(f"the attention backend {name}; try --attention-backend FLASH_ATTN")
                return

    def determine_available_memory(self) -> int:
        """Size the KV cache while holding the memory that a step with families needs.

        vLLM's profiling run computes no attention.
        """
        num_bytes = step_bytes(self.vllm_config)
        taken = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        available: int = super().determine_available_memory()
        del taken
        return available

    def compile_or_warm_up_model(self) -> Any:
        """Compile the family kernels before vLLM's own, so that no step has to wait for it."""
        warm_up(self.vllm_config)
        return super().compile_or_warm_up_model()

    def family_counts(self) -> dict[str, int]:
        """Return the sums of `FamilyCounts`; call it with `collective_rpc`."""
        return family_counts(self)

    def family_layers(self) -> tuple[int, int]:
        """Return the layers that read families and all layers; call it with `collective_rpc`."""
        return family_layers(self)


def _attention_layers(vllm_config: VllmConfig) -> list[Any]:
    layer_type: Any = Attention
    return list(get_layers_from_vllm_config(vllm_config, layer_type).values())


def _is_ours(layer: Any) -> bool:
    return issubclass(layer.get_attn_backend(), (FamilyFlashBackend, FamilyTritonBackend))


def step_bytes(vllm_config: VllmConfig) -> int:
    """Return the most memory (bytes) that a step with families needs beyond a step of vLLM's own.

    Layers run one after another and share the tables of the step. The accumulators of
    FlashAttention's second pass do not count: they are those of vLLM's only pass.
    """
    ours = [layer for layer in _attention_layers(vllm_config) if _is_ours(layer)]
    needed = [layer.impl.step_bytes(vllm_config) for layer in ours if not layer_problem(layer.impl)]
    if not needed:
        return 0
    width = -(-vllm_config.model_config.max_model_len // vllm_config.cache_config.block_size) + 1
    tables = _most_rows(vllm_config) * width * _TABLE_ENTRY_BYTES
    return int(max(needed) + tables)


def num_processors() -> int:
    """Return the number of streaming multiprocessors of this worker's GPU."""
    return int(torch.cuda.get_device_properties().multi_processor_count)


def _most_rows(vllm_config: VllmConfig) -> int:
    scheduler = vllm_config.scheduler_config
    return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


def warm_up(vllm_config: VllmConfig) -> None:
    """Compile the kernels by reading a family in each kind of layer; the KV caches must exist.

    A kernel that does not run on this GPU stops the engine here instead of in a step.
    """
    known = set()
    for layer in _attention_layers(vllm_config):
        impl, kv_cache = layer.impl, layer.kv_cache
        # Layers that share another layer's cache may have none.
        if not _is_ours(layer) or layer_problem(impl) is not None or not kv_cache.numel():
            continue
        kind = (impl.num_heads, kv_cache.shape[1:], kv_cache.stride(), kv_cache.dtype)
        if kind not in known:
            known.add(kind)
            impl.warm_up(kv_cache)


@dataclass(frozen=True)
class DevicePlan:
    """A step's families on the GPU."""

    families: Families
    tokens: Tensor
    """int64 [M] token indices of the queries."""
    prefix_lens: Tensor
    """int32 [F] tokens of each shared prefix."""
    prefix_table: Tensor
    """int32 [F, longest prefix + 1] blocks of each shared prefix."""
    suffix_lens: Tensor
    """int32 [R] tokens of each row after its shared prefix."""
    suffix_table: Tensor
    """int32 [R, longest suffix + 1] blocks of each row after its shared prefix."""
    max_family_rows: int
    max_prefix_blocks: int
    max_suffix_blocks: int


def on_device(plan: StepPlan, block_table: Tensor, seq_lens: Tensor, block_size: int) -> DevicePlan:
    """Copy a plan to the device of `block_table` in one transfer, without waiting for it."""
    families = plan.families
    parts = (
        families.rows,
        families.starts,
        families.prefix_blocks,
        families.row_prefix_blocks,
        plan.tokens.int(),
        plan.leaders.int(),
    )
    # Triton recompiles a kernel for addresses that are not multiples of 16 bytes.
    padded = [torch.nn.functional.pad(part, (0, -len(part) % 4)) for part in parts]
    packed = torch.cat(padded)
    if block_table.is_cuda:
        packed = packed.pin_memory()
    packed = packed.to(block_table.device, non_blocking=True)
    rows, starts, prefix_blocks, row_prefix_blocks, tokens, leaders = (
        copy[: len(part)]
        for copy, part in zip(packed.split([len(each) for each in padded]), parts, strict=True)
    )
    num_rows = len(row_prefix_blocks)
    # Past a row's end any block will do, because `suffix_lens` ends before it. FlashAttention 2
    # reads, but does not use, a block after the last one, so both tables have one extra column.
    places = torch.arange(plan.max_suffix_blocks + 1, device=block_table.device)
    columns = (row_prefix_blocks[:, None] + places).clamp_(max=block_table.shape[1] - 1)
    return DevicePlan(
        families=Families(rows, starts, prefix_blocks, row_prefix_blocks),
        tokens=tokens.long(),
        prefix_lens=prefix_blocks * block_size,
        prefix_table=block_table[leaders.long(), : plan.max_prefix_blocks + 1],
        suffix_lens=seq_lens[:num_rows] - row_prefix_blocks * block_size,
        suffix_table=block_table[:num_rows].gather(1, columns),
        max_family_rows=plan.max_family_rows,
        max_prefix_blocks=plan.max_prefix_blocks,
        max_suffix_blocks=plan.max_suffix_blocks,
    )


class FamilyBuilder:
    """Methods that both builders add to vLLM's."""

    planner: StepPlanner

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Keep attention out of full CUDA graphs, unless no layer can read families.

        Without full graphs, vLLM uses piecewise ones.
        """
        ours = [layer for layer in _attention_layers(vllm_config) if _is_ours(layer)]
        if ours and all(layer_problem(layer.impl) for layer in ours):
            # mypy does not know that vLLM's builder comes next in the method resolution order.
            vllms: Any = super()
            support: AttentionCGSupport = vllms.get_cudagraph_support(vllm_config, kv_cache_spec)
            return support
        return AttentionCGSupport.NEVER

    def device_plan(self, common: CommonAttentionMetadata, block_size: int) -> DevicePlan | None:
        """Return the families of a step; None if all its rows are read one by one."""
        plan = self.planner.plan(common)
        if plan is None:
            return None
        return on_device(plan, common.block_table_tensor, common.seq_lens, block_size)


class FamilyFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention, in two passes for steps with families."""

    @staticmethod
    def get_impl_cls() -> type[FamilyFlashImpl]:
        return FamilyFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FamilyFlashBuilder]:
        return FamilyFlashBuilder


@dataclass
class FamilyFlashMetadata(FlashAttentionMetadata):
    """Metadata of a step with families."""

    plan: DevicePlan | None = None


class FamilyFlashBuilder(FamilyBuilder, FlashAttentionMetadataBuilder):
    """vLLM's metadata with the families of the step."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer_type: Any = Attention
        layers = get_layers_from_vllm_config(vllm_config, layer_type, layer_names).values()
        problem = None
        if any(layer.impl.vllm_flash_attn_version is None for layer in layers):
            problem = "FlashAttention without a version, as on ROCm"
        elif self.fa4_hd256:
            problem = "FlashAttention 4 with heads of size 256"
        self.planner = StepPlanner(vllm_config, layer_names, kv_cache_spec, problem)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """Build vLLM's metadata and add the families; drafts (`fast_build`) have none."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        plan = None if fast_build else self.device_plan(common_attn_metadata, self.block_size)
        return metadata if plan is None else FamilyFlashMetadata(**vars(metadata), plan=plan)

    def update_block_table(
        self, metadata: FlashAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> FlashAttentionMetadata:
        """Update vLLM's metadata without families: those of another KV cache group differ."""
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        return replace(updated, plan=None) if isinstance(updated, FamilyFlashMetadata) else updated


class FamilyFlashImpl(FlashAttentionImpl):
    """Two passes for steps with families, one for all others."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; the KV cache already holds the new tokens of all rows."""
        metadata = attn_metadata
        if not isinstance(metadata, FamilyFlashMetadata) or metadata.plan is None:
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        num_tokens = metadata.num_actual_tokens
        self._attend_twice(
            query[:num_tokens],
            kv_cache,
            metadata.plan,
            metadata.query_start_loc,
            metadata.max_query_len,
            output[:num_tokens],
        )
        return output

    def step_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the memory (bytes) of a layer's tensors between and after the two passes."""
        rows, tokens = _most_rows(vllm_config), vllm_config.scheduler_config.max_num_batched_tokens
        # mypy does not know that vLLM has resolved the dtype.
        dtype: Any = vllm_config.model_config.dtype
        # Queries and prefixes of rows in families, their suffixes, and the merged rows.
        values = 4 * rows * self.num_heads * self.head_size * dtype.itemsize
        # The log-sum-exp of all suffixes, of those in families, and of prefixes.
        sums = 4 * self.num_heads * (tokens + 2 * rows)
        # FlashAttention 3 splits the prefixes if they are too few to fill the GPU.
        splits = 0
        if self.vllm_flash_attn_version != 2:
            splits = min(-(-num_processors() // self.num_kv_heads), 128)
        partial = splits * 4 * rows * self.num_heads * (self.head_size + 1)
        return int(values + sums + partial)

    def warm_up(self, kv_cache: Tensor) -> None:
        """Compile the kernels by reading a family of two rows, whose blocks are all block 0."""
        if self.vllm_flash_attn_version is None or self.fa4_hd256:
            return
        block_size = kv_cache.shape[2]

        def ints(*numbers: int) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=kv_cache.device)

        plan = DevicePlan(
            families=Families.smallest(kv_cache.device),
            tokens=ints(0, 1).long(),
            prefix_lens=ints(block_size),
            prefix_table=ints(0, 0)[None],
            suffix_lens=ints(1, 1),
            suffix_table=ints(0, 0, 0, 0).view(2, 2),
            max_family_rows=2,
            max_prefix_blocks=1,
            max_suffix_blocks=1,
        )
        query = kv_cache.new_zeros((2, self.num_heads, self.head_size))
        self._attend_twice(query, kv_cache, plan, ints(0, 1, 2), 1, torch.empty_like(query))

    def _attend_twice(
        self,
        query: Tensor,
        kv_cache: Tensor,
        plan: DevicePlan,
        query_starts: Tensor,
        max_query_len: int,
        output: Tensor,
    ) -> None:
        """Write the attention of a step's queries [tokens, H, D] to `output`."""
        block_size = kv_cache.shape[2]
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        shared: dict[str, Any] = {
            "k": with_aligned_strides(key_cache),
            "v": with_aligned_strides(value_cache),
            "softmax_scale": self.scale,
            "return_softmax_lse": True,
            "fa_version": self.vllm_flash_attn_version,
        }
        attend = flash_attention()
        prefix, prefix_lse = attend(
            q=query.index_select(0, plan.tokens),
            cu_seqlens_q=plan.families.starts,
            max_seqlen_q=plan.max_family_rows,
            seqused_k=plan.prefix_lens,
            max_seqlen_k=plan.max_prefix_blocks * block_size,
            block_table=plan.prefix_table,
            causal=False,
            **shared,
        )
        _, suffix_lse = attend(
            q=query,
            out=output,
            cu_seqlens_q=query_starts,
            max_seqlen_q=max_query_len,
            seqused_k=plan.suffix_lens,
            max_seqlen_k=plan.max_suffix_blocks * block_size,
            block_table=plan.suffix_table,
            causal=True,
            **shared,
        )
        merged = torch.empty_like(prefix)
        merge_attn_states(
            merged,
            prefix,
            prefix_lse,
            output.index_select(0, plan.tokens),
            suffix_lse.index_select(1, plan.tokens),
        )
        output.index_copy_(0, plan.tokens, merged)


class FamilyTritonBackend(TritonAttentionBackend):
    """vLLM's Triton attention, and our kernel for decoding steps with families."""

    @staticmethod
    def get_impl_cls() -> type[FamilyTritonImpl]:
        return FamilyTritonImpl

    @staticmethod
    def get_builder_cls() -> type[FamilyTritonBuilder]:
        return FamilyTritonBuilder


@dataclass
class FamilyTritonMetadata(TritonAttentionMetadata):
    """Metadata of a decoding step with families."""

    plan: DevicePlan | None = None


class FamilyTritonBuilder(FamilyBuilder, TritonAttentionMetadataBuilder):
    """vLLM's metadata with the families of the step."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.planner = StepPlanner(vllm_config, layer_names, kv_cache_spec, None)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """Build metadata with families; steps with prefill have none: one query per row only."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        if fast_build or common.max_query_len != 1 or common.num_actual_tokens != common.num_reqs:
            return metadata
        plan = self.device_plan(common, self.kv_cache_spec.block_size)
        return metadata if plan is None else FamilyTritonMetadata(**vars(metadata), plan=plan)


class FamilyTritonImpl(TritonAttentionImpl):
    """Our kernel for decoding steps with families, vLLM's for all others."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; the KV cache already holds the new tokens of all rows."""
        metadata = attn_metadata
        plan = metadata.plan if isinstance(metadata, FamilyTritonMetadata) else None
        if plan is None or output_scale is not None:
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        # Triton cannot be imported on every machine that imports this module.
        from apar_core.attention.triton_kernel import family_decode

        num_rows = metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        family_decode(
            query[:num_rows],
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.seq_lens,
            plan.families,
            self.scale,
            max_seq_len=metadata.max_seq_len,
            max_family_rows=plan.max_family_rows,
            max_prefix_blocks=plan.max_prefix_blocks,
            output=output[:num_rows],
        )
        return output

    def step_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the memory (bytes) of a layer's partial results."""
        from apar_core.attention import triton_kernel

        model: Any = vllm_config.model_config
        return triton_kernel.scratch_bytes(
            _most_rows(vllm_config),
            self.num_heads,
            self.head_size,
            model.dtype,
            max_seq_len=model.max_model_len,
        )

    def warm_up(self, kv_cache: Tensor) -> None:
        """Compile our kernels for this layer."""
        from apar_core.attention import triton_kernel

        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        triton_kernel.warm_up(key_cache, value_cache, self.num_heads)
