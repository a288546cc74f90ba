"""Triton decode attention over a paged KV cache; a family's shared prefix is read once.

Rows of a family share their first full blocks: the prompt, and the path down to a fork. The
attention of a row is computed separately over the shared prefix and over the rest, its suffix, and
then merged (Hydragen, arXiv 2402.05099; the merge is that of Flash-Decoding):

1. `_prefix_kernel` takes the queries of a whole family as one matrix, so each KV head of the prefix
   is read once for all rows. It stores partial results: maximum, sum and weighted values.
2. `_suffix_kernel` reads the suffix of each row, and merges it with the row's prefix.
3. `_merge_kernel` merges rows whose suffix was split among several programs.

Long prefixes and suffixes are split into chunks, so that a few rows fill a GPU as well. Shapes
below: R rows, H query heads, K KV heads, D head size, B blocks per row, F families, P chunks.

Needs only torch and triton. Nothing here waits for the device: grids follow from limits that the
caller knows on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from apar_core.attention.families import Families

# Maximum queries times heads per program of the prefix kernel, by bytes per element (16 and 32
# bits). More would exceed the registers (counted for compute capability 8.0, 8.9 and 9.0).
_LARGEST_ROW_TILE = {2: 64, 4: 16}
# Minimum number of rows of a matrix product on tensor cores.
_SMALLEST_DOT = 16
_LOG2_E = 1.4426950408889634
# They change from step to step: recompiling for special values would stall the engine.
_PER_STEP = ("chunk", "prefix_chunk", "prefix_parts", "tiles_per_family", "num_items")
# `table_stride` depends on the longest possible row; specializing on its value gains nothing.
_NOT_SPECIAL = (*_PER_STEP, "table_stride")
# For Triton's interpreter, without a GPU: the number affects only how work is split.
_INTERPRETED_PROCESSORS = 4

SCRATCH_BYTES = 256 * 2**20
"""Maximum memory for partial results; with many rows, longer chunks keep it within this limit."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Division of the kernels' work; measured per GPU by `benchmarks/gpu/family_kernel.py`.

    tokens: tokens of KV cache that a program reads at a time; a power of 2, at least 16.
    warps, stages: Triton's launch options; a stage is a tile of keys and values in shared memory.
    waves: programs per multiprocessor below which prefixes and suffixes are split.
    smallest_chunk, largest_chunk: limits on the tokens of a chunk.
    """

    tokens: int = 64
    warps: int = 4
    stages: int = 3
    waves: int = 4
    smallest_chunk: int = 128
    largest_chunk: int = 2048


@dataclass(frozen=True, slots=True)
class Split:
    """Split of a call's prefixes and suffixes: tokens per chunk, and chunks of the longest one.

    In a call without families, all fields for prefixes are 0.
    """

    row_tile: int
    tiles_per_family: int
    prefix_chunk: int
    prefix_parts: int
    chunk: int
    suffix_parts: int

    @property
    def scratch_parts(self) -> int:
        """Partial results of each row and head."""
        # A row that needs no merge writes no partial result, but has space for it.
        return self.prefix_parts + (self.suffix_parts if self.suffix_parts > 1 else 0)


@triton.jit
def _attend(
    queries: tl.tensor,
    table: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    upcast: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend from queries [block_m, padded_size] to tokens `begin` to `end` of a block table.

    Returns the maximum of the scores [block_m], in base-2 logarithms; the sum of 2 ** (score -
    maximum) [block_m]; and the values weighted by the same powers [block_m, padded_size], not
    divided by that sum. Without tokens the maximum is minus infinity and the others are 0.
    """
    dims = tl.arange(0, padded_size)
    largest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.full([block_m], 0.0, tl.float32)
    values = tl.full([block_m, padded_size], 0.0, tl.float32)
    for first in range(begin, end, block_n):
        positions = first + tl.arange(0, block_n)
        inside = positions < end
        blocks = tl.load(table + positions // block_size, mask=inside, other=0).to(tl.int64)
        offsets = blocks * block_stride + (positions % block_size) * token_stride
        mask = inside[:, None] & (dims < head_size)[None, :]
        key_tile = tl.load(key_cache + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        value_tile = tl.load(value_cache + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        if upcast:
            key_tile = key_tile.to(tl.float32)
            value_tile = value_tile.to(tl.float32)
        scores = scale * tl.dot(queries, tl.trans(key_tile), input_precision="ieee")
        scores = tl.where(inside[None, :], scores, float("-inf"))
        # Each tile has at least one token, so the maximum is finite.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        total = total * fade + tl.sum(weights, 1)
        values = tl.dot(
            weights.to(value_tile.dtype), value_tile, values * fade[:, None],
            input_precision="ieee",
        )  # fmt: skip
        largest = new_largest
    return largest, total, values


@triton.jit
def _merge(
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    partial_values: tl.tensor,
    partial_stats: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    valid: tl.tensor,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge the partial results of chunks `first` to `end` into the given ones.

    items: [block_m], row * H + head. num_items: R * H.
    """
    dims = tl.arange(0, padded_size)
    mask = valid[:, None] & (dims < head_size)[None, :]
    for chunk in range(first, end):
        places = items + chunk * num_items
        other_largest = tl.load(partial_stats + 2 * places, mask=valid, other=float("-inf"))
        other_total = tl.load(partial_stats + 2 * places + 1, mask=valid, other=0.0)
        other_values = tl.load(
            partial_values + places[:, None] * head_size + dims[None, :], mask=mask, other=0.0
        )
        new_largest = tl.maximum(largest, other_largest)
        # Padding rows have no finite maximum; avoid subtracting infinities.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        fade = tl.exp2(largest - base)
        other_fade = tl.exp2(other_largest - base)
        total = total * fade + other_total * other_fade
        values = values * fade[:, None] + other_values * other_fade[:, None]
        largest = new_largest
    return largest, total, values


@triton.jit
def _store_partial(
    partial_values: tl.tensor,
    partial_stats: tl.tensor,
    places: tl.tensor,
    valid: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    dims = tl.arange(0, padded_size)
    mask = valid[:, None] & (dims < head_size)[None, :]
    tl.store(partial_stats + 2 * places, largest, mask=valid)
    tl.store(partial_stats + 2 * places + 1, total, mask=valid)
    tl.store(partial_values + places[:, None] * head_size + dims[None, :], values, mask=mask)


@triton.jit
def _store_output(
    output: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    valid: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    dims = tl.arange(0, padded_size)
    mask = valid[:, None] & (dims < head_size)[None, :]
    # A row without tokens, such as padding, gets zeros.
    found = values / tl.where(total == 0.0, 1.0, total)[:, None]
    places = row * row_stride + heads[:, None] * head_stride + dims[None, :]
    tl.store(output + places, found.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_NOT_SPECIAL)
def _prefix_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    family_rows: tl.tensor,
    family_starts: tl.tensor,
    prefix_blocks: tl.tensor,
    partial_values: tl.tensor,
    partial_stats: tl.tensor,
    scale: tl.tensor,
    chunk: tl.tensor,
    tiles_per_family: tl.tensor,
    num_items: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    ratio: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    upcast: tl.constexpr,
) -> None:
    """Attend from a tile of a family's rows to a chunk of its prefix, for one KV head.

    Grid: KV heads, families times tiles, chunks.
    """
    kv_head = tl.program_id(0)
    family = tl.program_id(1) // tiles_per_family
    # Tiles of a family are adjacent: the second finds in the cache what the first has read.
    first_row = (tl.program_id(1) % tiles_per_family) * (block_m // ratio)
    part = tl.program_id(2)
    start = tl.load(family_starts + family)
    num_rows = tl.load(family_starts + family + 1) - start
    length = tl.load(prefix_blocks + family) * block_size
    begin = part * chunk
    if first_row < num_rows and begin < length:
        lines = tl.arange(0, block_m)
        index = first_row + lines // ratio
        valid = (lines < (block_m // ratio) * ratio) & (index < num_rows)
        rows = tl.load(family_rows + start + index, mask=valid, other=0).to(tl.int64)
        heads = kv_head * ratio + lines % ratio
        dims = tl.arange(0, padded_size)
        places = rows * query_row_stride + heads * query_head_stride
        queries = tl.load(
            query + places[:, None] + dims[None, :],
            mask=valid[:, None] & (dims < head_size)[None, :], other=0.0,
        )  # fmt: skip
        if upcast:
            queries = queries.to(tl.float32)
        # Every row's table lists the prefix; use the first row's.
        table_row = tl.load(family_rows + start).to(tl.int64)
        largest, total, values = _attend(
            queries, block_table + table_row * table_stride, key_cache + kv_head * kv_head_stride,
            value_cache + kv_head * kv_head_stride, begin, tl.minimum(begin + chunk, length), scale,
            block_stride, token_stride, block_m, block_n, block_size, head_size, padded_size,
            upcast,
        )  # fmt: skip
        items = rows * (tl.num_programs(0) * ratio) + heads
        _store_partial(
            partial_values, partial_stats, items + part.to(tl.int64) * num_items, valid,
            largest, total, values, head_size, padded_size,
        )  # fmt: skip


@triton.jit(do_not_specialize=_NOT_SPECIAL)
def _suffix_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    row_prefix_blocks: tl.tensor,
    output: tl.tensor,
    partial_values: tl.tensor,
    partial_stats: tl.tensor,
    scale: tl.tensor,
    prefix_chunk: tl.tensor,
    prefix_parts: tl.tensor,
    chunk: tl.tensor,
    num_items: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_row_stride: tl.tensor,
    output_head_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    has_prefix: tl.constexpr,
    ratio: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    upcast: tl.constexpr,
) -> None:
    """Attend from a row to a chunk of its suffix, for one KV head, and merge it with the prefix.

    `_merge_kernel` merges suffixes of several chunks. Grid: KV heads, rows, chunks.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(seq_lens + row)
    prefix = 0
    if has_prefix:
        prefix = tl.load(row_prefix_blocks + row) * block_size
    begin = prefix + part * chunk
    # Part 0 also writes the output of a row that has no suffix.
    if begin < length or part == 0:
        lines = tl.arange(0, block_m)
        valid = lines < ratio
        heads = kv_head * ratio + lines
        dims = tl.arange(0, padded_size)
        places = row * query_row_stride + heads * query_head_stride
        queries = tl.load(
            query + places[:, None] + dims[None, :],
            mask=valid[:, None] & (dims < head_size)[None, :], other=0.0,
        )  # fmt: skip
        if upcast:
            queries = queries.to(tl.float32)
        largest, total, values = _attend(
            queries, block_table + row * table_stride, key_cache + kv_head * kv_head_stride,
            value_cache + kv_head * kv_head_stride, begin, tl.minimum(begin + chunk, length), scale,
            block_stride, token_stride, block_m, block_n, block_size, head_size, padded_size,
            upcast,
        )  # fmt: skip
        items = row * (tl.num_programs(0) * ratio) + heads
        if length - prefix > chunk:
            places = items + (prefix_parts + part).to(tl.int64) * num_items
            _store_partial(
                partial_values, partial_stats, places, valid, largest, total, values, head_size,
                padded_size,
            )  # fmt: skip
        else:
            if has_prefix:
                largest, total, values = _merge(
                    largest, total, values, partial_values, partial_stats, 0,
                    tl.cdiv(prefix, prefix_chunk), items, num_items, valid, head_size, padded_size,
                )  # fmt: skip
            _store_output(
                output, row, heads, valid, total, values, output_row_stride, output_head_stride,
                head_size, padded_size,
            )  # fmt: skip


@triton.jit(do_not_specialize=_PER_STEP)
def _merge_kernel(
    seq_lens: tl.tensor,
    row_prefix_blocks: tl.tensor,
    output: tl.tensor,
    partial_values: tl.tensor,
    partial_stats: tl.tensor,
    prefix_chunk: tl.tensor,
    prefix_parts: tl.tensor,
    chunk: tl.tensor,
    num_items: tl.tensor,
    output_row_stride: tl.tensor,
    output_head_stride: tl.tensor,
    has_prefix: tl.constexpr,
    ratio: tl.constexpr,
    block_m: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """Merge the chunks of a row whose suffix was split. Grid: KV heads, rows."""
    row = tl.program_id(1).to(tl.int64)
    prefix = 0
    if has_prefix:
        prefix = tl.load(row_prefix_blocks + row) * block_size
    suffix = tl.load(seq_lens + row) - prefix
    if suffix > chunk:
        lines = tl.arange(0, block_m)
        valid = lines < ratio
        heads = tl.program_id(0) * ratio + lines
        items = row * (tl.num_programs(0) * ratio) + heads
        largest = tl.full([block_m], float("-inf"), tl.float32)
        total = tl.full([block_m], 0.0, tl.float32)
        values = tl.full([block_m, padded_size], 0.0, tl.float32)
        if has_prefix:
            largest, total, values = _merge(
                largest, total, values, partial_values, partial_stats, 0,
                tl.cdiv(prefix, prefix_chunk), items, num_items, valid, head_size, padded_size,
            )  # fmt: skip
        largest, total, values = _merge(
            largest, total, values, partial_values, partial_stats, prefix_parts,
            prefix_parts + tl.cdiv(suffix, chunk), items, num_items, valid, head_size, padded_size,
        )  # fmt: skip
        _store_output(
            output, row, heads, valid, total, values, output_row_stride, output_head_stride,
            head_size, padded_size,
        )  # fmt: skip


def family_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    families: Families | None,
    scale: float,
    *,
    max_seq_len: int,
    max_family_rows: int = 0,
    max_prefix_blocks: int = 0,
    output: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the attention [R, H, D] of one query per row over the row's tokens in the KV cache.

    query: [R, H, D]. key_cache, value_cache: [blocks, block size, K, D] with equal strides, as in
    vLLM's Triton backend. block_table: int32 [R, B]. seq_lens: int32 [R], the tokens of a row, its
    newest included; 0 gives zeros. families: rows that share leading blocks, None for none.
    max_seq_len, max_family_rows, max_prefix_blocks: upper bounds, known on the host, on `seq_lens`,
    on the rows of a family and on `families.prefix_blocks`.

    Rows without a family, and rows of a family with 0 blocks, are read whole. A row may be in at
    most one family, and its prefix may not be longer than its tokens. Raises ValueError for invalid
    shapes, strides or bounds.
    """
    num_rows, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    _check(query, key_cache, value_cache, block_table, seq_lens, output)
    output = torch.empty_like(query) if output is None else output
    if num_rows == 0:
        return output
    ratio = num_heads // num_kv_heads
    tiles = tiles or default_tiles(query.dtype, head_size)
    padded_size = _power_of_2(head_size, _SMALLEST_DOT)
    num_families = 0 if families is None else families.prefix_blocks.shape[0]
    if num_families and (max_family_rows < 1 or max_prefix_blocks < 0):
        raise ValueError(
            "max_family_rows must be at least 1 and max_prefix_blocks at least 0 with "
            f"families, not {max_family_rows} and {max_prefix_blocks}"
        )
    split = split_of(
        num_rows, num_heads, num_kv_heads, head_size, query.dtype, max_seq_len=max_seq_len,
        num_families=num_families, max_family_rows=max_family_rows,
        max_prefix_tokens=max_prefix_blocks * block_size, tiles=tiles,
        processors=_processors(query.device),
    )  # fmt: skip
    row_tile, tiles_per_family = split.row_tile, split.tiles_per_family
    prefix_chunk, prefix_parts = split.prefix_chunk, split.prefix_parts
    chunk, suffix_parts, parts = split.chunk, split.suffix_parts, split.scratch_parts
    values = query.new_empty((parts, num_rows, num_heads, head_size), dtype=torch.float32)
    stats = query.new_empty((parts, num_rows, num_heads, 2), dtype=torch.float32)
    strides = key_cache.stride()
    shared: dict[str, Any] = {
        "block_size": block_size, "head_size": head_size, "padded_size": padded_size,
    }  # fmt: skip
    dot: dict[str, Any] = {
        **shared, "ratio": ratio, "block_n": tiles.tokens, "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        # Triton's interpreter has no matrix product of bfloat16.
        "upcast": query.dtype == torch.bfloat16 and not query.is_cuda,
    }  # fmt: skip
    scale_log2 = scale * _LOG2_E
    items = num_rows * num_heads
    if families is not None and prefix_parts:
        _prefix_kernel[num_kv_heads, num_families * tiles_per_family, prefix_parts](
            query, key_cache, value_cache, block_table, families.rows, families.starts,
            families.prefix_blocks, values, stats, scale_log2, prefix_chunk, tiles_per_family,
            items, query.stride(0), query.stride(1), strides[0], strides[1], strides[2],
            block_table.stride(0), block_m=row_tile, **dot,
        )  # fmt: skip
    has_prefix = families is not None and prefix_parts > 0
    row_prefix_blocks = families.row_prefix_blocks if families and has_prefix else seq_lens
    _suffix_kernel[num_kv_heads, num_rows, suffix_parts](
        query, key_cache, value_cache, block_table, seq_lens, row_prefix_blocks, output, values,
        stats, scale_log2, max(prefix_chunk, 1), prefix_parts, chunk, items, query.stride(0),
        query.stride(1), output.stride(0), output.stride(1), strides[0], strides[1], strides[2],
        block_table.stride(0), has_prefix=has_prefix, block_m=_power_of_2(ratio, _SMALLEST_DOT),
        **dot,
    )  # fmt: skip
    if suffix_parts > 1:
        _merge_kernel[num_kv_heads, num_rows](
            seq_lens, row_prefix_blocks, output, values, stats, max(prefix_chunk, 1), prefix_parts,
            chunk, items, output.stride(0), output.stride(1), has_prefix=has_prefix, ratio=ratio,
            block_m=_power_of_2(ratio, 1), **shared,
        )  # fmt: skip
    return output


def warm_up(key_cache: Tensor, value_cache: Tensor, num_heads: int) -> None:
    """Compile the kernels that steps with families need, by reading block 0 of a KV cache.

    Only the tile size of the prefix pass needs several variants: nothing else depends on the
    numbers of rows, tokens and families. Arguments are those of `family_decode`.
    """
    block_size, num_kv_heads, head_size = key_cache.shape[1:]
    query = key_cache.new_zeros((2, num_heads, head_size))
    table = query.new_zeros((2, 2), dtype=torch.int32)
    lengths = table[:, 0] + block_size + 1
    families = Families.smallest(key_cache.device)
    ratio, tiles = num_heads // num_kv_heads, default_tiles(query.dtype, head_size)
    largest = _row_tile(1 << 20, ratio, query.dtype)
    num_rows = 1
    while num_rows == 1 or _row_tile(num_rows, ratio, query.dtype) < largest:
        num_rows *= 2
        family_decode(
            query, key_cache, value_cache, table, lengths, families, 1.0,
            # Several chunks, so that the merge kernel is compiled too.
            max_seq_len=2 * tiles.largest_chunk, max_family_rows=num_rows, max_prefix_blocks=1,
            tiles=tiles,
        )  # fmt: skip


def default_tiles(dtype: torch.dtype, head_size: int) -> Tiles:
    """Return tiles with which the kernels fit into the registers and shared memory of all GPUs.

    From compute capability 8.0 on, a program has at least 99 KiB of shared memory.
    """
    if dtype.itemsize == 4:
        return Tiles(tokens=16)
    return Tiles(tokens=64 if head_size <= 128 else 32)


def split_of(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    *,
    max_seq_len: int,
    num_families: int,
    max_family_rows: int,
    max_prefix_tokens: int,
    tiles: Tiles,
    processors: int,
) -> Split:
    """Return a split of `family_decode` into enough programs, within `SCRATCH_BYTES`."""
    wanted = tiles.waves * processors
    # Half of the scratch for the prefixes, half for the suffixes.
    most_parts = max(SCRATCH_BYTES // (2 * _partial_bytes(num_rows, num_heads, head_size)), 1)
    row_tile = tiles_per_family = prefix_chunk = prefix_parts = 0
    if num_families:
        ratio = num_heads // num_kv_heads
        row_tile = _row_tile(max_family_rows, ratio, dtype)
        tiles_per_family = _ceil_div(max_family_rows, row_tile // ratio)
        programs = num_families * tiles_per_family * num_kv_heads
        prefix_chunk = _chunk(max_prefix_tokens, programs, wanted, most_parts, tiles)
        prefix_parts = _ceil_div(max_prefix_tokens, prefix_chunk)
    chunk = _chunk(max_seq_len, num_rows * num_kv_heads, wanted, most_parts, tiles)
    suffix_parts = _ceil_div(max(max_seq_len, 1), chunk)
    return Split(row_tile, tiles_per_family, prefix_chunk, prefix_parts, chunk, suffix_parts)


def scratch_bytes(
    max_rows: int, num_heads: int, head_size: int, dtype: torch.dtype, *, max_seq_len: int
) -> int:
    """Return the most bytes that a call with `max_rows` rows of `max_seq_len` tokens allocates."""
    row_bytes = _partial_bytes(max_rows, num_heads, head_size)
    most_parts = _ceil_div(max_seq_len, default_tiles(dtype, head_size).smallest_chunk)
    return max(min(SCRATCH_BYTES, 2 * most_parts * row_bytes), row_bytes)


def _partial_bytes(num_rows: int, num_heads: int, head_size: int) -> int:
    """Return the bytes of one partial result of each row: float32 values, maximum and sum."""
    return 4 * num_rows * num_heads * (head_size + 2)


def _chunk(longest: int, programs: int, wanted: int, most_parts: int, tiles: Tiles) -> int:
    """Return the tokens per chunk that yield `wanted` programs, within the limits of `tiles`.

    There are at most `most_parts` chunks.
    """
    parts = _ceil_div(wanted, programs)
    chunk = max(_ceil_div(longest, parts), tiles.smallest_chunk)
    chunk = max(min(chunk, tiles.largest_chunk), _ceil_div(longest, most_parts))
    return tiles.tokens * _ceil_div(chunk, tiles.tokens)


def _row_tile(max_family_rows: int, ratio: int, dtype: torch.dtype) -> int:
    """Return the queries times heads per program of the prefix kernel: at least one row."""
    largest = max(_LARGEST_ROW_TILE[dtype.itemsize], _power_of_2(ratio, _SMALLEST_DOT))
    return _power_of_2(max_family_rows * ratio, _SMALLEST_DOT, largest)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _power_of_2(number: int, smallest: int, largest: int = 1 << 30) -> int:
    """Return the next power of 2 from `number` on, clamped to limits that are powers of 2."""
    return min(max(1 << (number - 1).bit_length(), smallest), largest)


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    output: Tensor | None,
) -> None:
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[2]
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"key_cache and value_cache must have the same shape and strides, not "
            f"{tuple(key_cache.shape)} {key_cache.stride()} and {tuple(value_cache.shape)} "
            f"{value_cache.stride()}"
        )
    if num_heads % num_kv_heads or key_cache.shape[3] != head_size:
        raise ValueError(
            f"query [R, H, D] = {tuple(query.shape)} does not fit key_cache [blocks, block size, "
            f"K, D] = {tuple(key_cache.shape)}"
        )
    if query.dtype != key_cache.dtype or query.dtype != value_cache.dtype:
        raise ValueError(f"query is {query.dtype}, the KV cache {key_cache.dtype}")
    if len(block_table) < num_rows or len(seq_lens) < num_rows:
        raise ValueError(
            f"block_table and seq_lens have {len(block_table)} and {len(seq_lens)} rows, query has "
            f"{num_rows}"
        )
    for name, tensor in (("query", query), ("key_cache", key_cache), ("output", output)):
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must have stride 1, {tensor.stride()}")
