"""Two passes over vLLM's KV cache on a CPU against its own kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from apar_core.attention import families as grouping
from apar_core.attention.cpu_backend import _PLAIN_KERNELS, read_families
from apar_core.attention.families import partition
from apar_core.attention.plan import FamilyCounts, StepPlan, StepPlanner
from apar_core.attention.settings import FamilySettings

# Their types are those of the kernels, without defaults.
ops: Any = _custom_ops
NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 12, 4, 2, 32
SCALE = HEAD_SIZE**-0.5
TABLES = [[1, 2, 3, 4], [1, 2, 5, 0], [6, 7, 0, 0], [1, 2, 8, 0], [6, 9, 10, 0]]


def plan_of(seq_lens: torch.Tensor, table: torch.Tensor, block_size: int) -> StepPlan:
    planner = StepPlanner.__new__(StepPlanner)
    planner.counts = FamilyCounts()
    planner._block_size, planner._settings = block_size, FamilySettings(min_prefix_blocks=1)
    planner._is_active = True
    common: Any = SimpleNamespace(
        causal=True,
        mm_req_doc_ranges=None,
        num_reqs=len(table),
        seq_lens=seq_lens,
        query_start_loc_cpu=torch.arange(len(table) + 1, dtype=torch.int32),
        block_table_tensor=table,
    )
    plan = planner.plan(common)
    assert plan is not None
    return plan


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_read_what_vllms_kernel_reads(
    block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "_compiled", lambda: partition)
    kernel = _get_attn_isa(dtype, block_size, HEAD_SIZE, "auto")
    if kernel not in _PLAIN_KERNELS:
        pytest.skip(f"this machine's kernel is {kernel}, which reads every row alone")
    torch.manual_seed(0)
    kv_cache = torch.full(
        (NUM_BLOCKS, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE), float("nan"), dtype=dtype
    )
    split = kv_cache.view(NUM_BLOCKS, NUM_KV_HEADS, 2 * block_size, HEAD_SIZE).chunk(2, dim=2)
    slots = torch.arange(block_size, NUM_BLOCKS * block_size)
    keys, values = torch.randn(2, len(slots), NUM_KV_HEADS, HEAD_SIZE).to(dtype)
    ops.cpu_attn_reshape_and_cache(
        keys, values, *split, slots, kernel, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    table = torch.tensor(TABLES, dtype=torch.int32)
    seq_lens = torch.tensor(
        [
            3 * block_size + 5,
            2 * block_size + 1,
            2 * block_size,
            3 * block_size,
            2 * block_size + 9,
        ],
        dtype=torch.int32,
    )
    query = torch.randn(len(TABLES), NUM_HEADS, HEAD_SIZE).to(dtype)
    starts = torch.arange(len(TABLES) + 1, dtype=torch.int32)
    expected = torch.empty_like(query)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(TABLES), num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_SIZE,
        seq_lens=seq_lens, dtype=dtype, query_start_loc=starts, causal=True,
        sliding_window_size=-1, isa=kernel, enable_kv_split=False, dynamic_causal=None,
        kv_cache_dtype="auto",
    )  # fmt: skip
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=split[0], value_cache=split[1], output=expected,
        query_start_loc=starts, seq_lens=seq_lens, scale=SCALE, causal=True, alibi_slopes=None,
        sliding_window=-1, block_table=table, softcap=0, scheduler_metadata=schedule, s_aux=None,
        dynamic_causal=None, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
    )  # fmt: skip
    plan = plan_of(seq_lens, table, block_size)

    found = read_families(query[plan.tokens], kv_cache, table, plan, SCALE)

    assert plan.families.row_prefix_blocks.tolist() == [2, 2, 1, 2, 1]
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected[plan.tokens], rtol=tolerance, atol=tolerance)
