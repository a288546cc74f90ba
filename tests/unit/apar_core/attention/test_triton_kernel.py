"""The kernel gives the attention of a float64 reference, and compiles for GPUs that are not here.

It runs in Triton's interpreter, which computes on the CPU what a GPU would.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import floats, integers, sampled_from

from apar_core.attention import triton_kernel
from apar_core.attention.families import Families
from apar_core.attention.triton_kernel import (
    Tiles,
    default_tiles,
    family_decode,
    scratch_bytes,
    split_of,
)
from benchmarks.gpu.family_kernel import Case, families_of, make_problem, pairwise, reads_of
from benchmarks.gpu.family_steps import SHAPES, read_steps

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = "tests.unit.apar_core.attention.kernel_in_interpreter"
PARTS = 8
# Registers of a thread, and shared memory of a program in bytes, of the smallest GPU that has them.
REGISTERS, SHARED = 255, {80: 166_912, 89: 101_376, 90: 232_448}


def interpreted(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", PROGRAM, *map(str, arguments)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, Any] = json.loads(output)
    return found


@pytest.mark.ci
def test_the_kernel_equals_the_reference_and_the_comparison_notices_errors() -> None:
    found = interpreted("few")

    assert found["wrong"] == []
    assert (found["planted"], found["unnoticed"]) == (7, [])
    assert found["merge_without_scale"] > 0.01
    assert found["warmed_up"]
    # What a borrowed GPU machine has: torch, numpy and triton.
    assert found["foreign"] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_kernel_equals_the_reference_for_all_pairs_of_dimensions(part: int) -> None:
    found = interpreted(part, PARTS)

    assert found["cases"] == 6
    assert (found["wrong"], found["unnoticed"]) == ([], [])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (12, 4), (32, 4), (71, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_after_the_warm_up_no_step_with_families_compiles(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_size, head_size = 16, 64
    launched: set[Any] = set()
    for name in ("_prefix_kernel", "_suffix_kernel", "_merge_kernel"):
        monkeypatch.setattr(triton_kernel, name, Recorded(getattr(triton_kernel, name), launched))
    kv_cache = torch.zeros(2, num_kv_heads, block_size, 2 * head_size, dtype=dtype)
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)

    triton_kernel.warm_up(keys, values, num_heads)
    compiled = set(launched)
    for rows, members, width, length in [(2, 2, 3, 20), (300, 40, 129, 2000), (17, 5, 64, 9000)]:
        heads_of_all = num_heads + 2 * num_kv_heads
        query = torch.zeros(rows, heads_of_all, head_size, dtype=dtype)[:, :num_heads]
        ints = torch.zeros(rows, dtype=torch.int32)
        families = Families(ints, torch.zeros(2, dtype=torch.int32), ints[:1], ints)
        family_decode(
            query, keys, values, torch.zeros(rows, width, dtype=torch.int32), ints, families, 0.1,
            max_seq_len=length, max_family_rows=members, max_prefix_blocks=width - 1,
            output=torch.zeros(rows, num_heads, head_size, dtype=dtype),
        )  # fmt: skip

    assert {name for name, *_ in compiled} == {"_prefix_kernel", "_suffix_kernel", "_merge_kernel"}
    assert launched == compiled


class Recorded:
    """A kernel that is not launched, but whose variants are: what Triton compiles it for."""

    def __init__(self, kernel: Any, launched: set[Any]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            key: list[Any] = [self.kernel.__name__, *sorted(constants.items())]
            for parameter, value in zip(self.kernel.params, args, strict=False):
                if isinstance(value, torch.Tensor):
                    key.append((parameter.name, value.dtype, value.data_ptr() % 16 == 0))
                elif isinstance(value, int) and not parameter.do_not_specialize:
                    key.append((parameter.name, value == 1, value % 16 == 0))
            self.launched.add(tuple(key))

        return launch


@given(
    rows=integers(1, 2048),
    kv_heads=sampled_from((1, 2, 8, 32)),
    ratio=sampled_from((1, 4, 8)),
    head_size=sampled_from((64, 128, 256)),
    seq_len=integers(1, 1 << 18),
    prefix=floats(0, 1),
    members=floats(0, 1),
    families=floats(0, 1),
    processors=sampled_from((4, 108, 132)),
    dtype=sampled_from((torch.bfloat16, torch.float32)),
)
def test_no_step_within_the_limits_needs_more_scratch_than_is_reserved(
    rows: int,
    kv_heads: int,
    ratio: int,
    head_size: int,
    seq_len: int,
    prefix: float,
    members: float,
    families: float,
    processors: int,
    dtype: torch.dtype,
) -> None:
    tiles = default_tiles(dtype, head_size)
    num_members = max(2, int(members * rows))
    prefix_tokens = int(prefix * (seq_len - 1)) // 16 * 16

    split = split_of(
        rows, kv_heads * ratio, kv_heads, head_size, dtype, max_seq_len=seq_len,
        num_families=int(families * rows / 2), max_family_rows=num_members,
        max_prefix_tokens=prefix_tokens, tiles=tiles, processors=processors,
    )  # fmt: skip

    num_bytes = split.scratch_parts * rows * kv_heads * ratio * (head_size + 2) * 4
    for more_rows, more_tokens in ((0, 0), (1000, 0), (0, 50_000)):
        assert num_bytes <= scratch_bytes(
            rows + more_rows, kv_heads * ratio, head_size, dtype, max_seq_len=seq_len + more_tokens
        )
    # Every token is in a chunk, and chunks are whole tiles.
    assert split.suffix_parts * split.chunk >= seq_len
    assert split.chunk % tiles.tokens == 0
    if split.tiles_per_family:
        assert split.prefix_parts * split.prefix_chunk >= prefix_tokens
        assert split.prefix_chunk % tiles.tokens == 0


def test_chunks_are_longer_only_where_partial_results_would_not_fit() -> None:
    def chunks(rows: int) -> tuple[int, int]:
        split = split_of(
            rows, 32, 32, 128, torch.bfloat16, max_seq_len=32_768, num_families=rows // 4,
            max_family_rows=4, max_prefix_tokens=16_384, tiles=Tiles(), processors=108,
        )  # fmt: skip
        return split.prefix_chunk, split.chunk

    # 16 chunks of a suffix, 8 of a prefix: 5 MiB each at 300 rows.
    assert chunks(300) == (2048, 2048)
    # 19 MiB each at 1,200 rows: 6 of them fit into the half of 256 MiB.
    assert chunks(1200) == (2752, 5504)


def test_a_call_allocates_the_scratch_that_it_is_split_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch: dict[int, int] = {}

    class Launched:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **_: Any) -> None:
                for parameter, value in zip(self.kernel.params, args, strict=False):
                    if parameter.name in ("partial_values", "partial_stats"):
                        scratch[id(value)] = value.nbytes

            return launch

    for name in ("_prefix_kernel", "_suffix_kernel", "_merge_kernel"):
        monkeypatch.setattr(triton_kernel, name, Launched(getattr(triton_kernel, name)))
    # Without memory, as nothing is computed.
    rows, heads, head_size, length = 1000, 32, 128, 32_768
    kv_cache = torch.zeros(2, heads, 16, 2 * head_size, dtype=torch.bfloat16, device="meta")
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    query = torch.zeros(rows, heads, head_size, dtype=torch.bfloat16, device="meta")
    ints = torch.zeros(rows, dtype=torch.int32, device="meta")
    table = torch.zeros(rows, length // 16, dtype=torch.int32, device="meta")

    family_decode(
        query, keys, values, table, ints, Families(ints, ints[:251], ints[:250], ints), 0.1,
        max_seq_len=length, max_family_rows=4, max_prefix_blocks=length // 16 - 1,
    )  # fmt: skip

    reserved = scratch_bytes(rows, heads, head_size, torch.bfloat16, max_seq_len=length)
    assert reserved == triton_kernel.SCRATCH_BYTES
    assert 0.8 * reserved < sum(scratch.values()) <= reserved


def test_pairwise_meets_every_pair() -> None:
    choices: dict[str, Any] = {"a": (1, 2, 3), "b": "xyz", "c": (True, False)}

    found = list(pairwise(**choices))

    assert len(found) < 18
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        pairs = {(each[one], each[other]) for each in found}
        assert len(pairs) == len(choices[one]) * len(choices[other])


def test_recorded_steps_save_what_their_families_share() -> None:
    for step in read_steps():
        families = families_of(torch.from_numpy(step.table), torch.from_numpy(step.lengths))
        reads = reads_of(step, families)
        assert reads.distinct <= reads.with_families <= reads.by_row
        assert step.model in SHAPES
        assert 0 <= reads.ideal_saving < 0.7, step.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(3, 7, 64)}, r"query \[R, H, D\] = \(3, 7, 64\) does not fit"),
        ({"query": torch.zeros(99, 8, 64)}, "block_table and seq_lens have 3 and 3 rows"),
        ({"query": torch.zeros(3, 8, 64).half()}, "query is torch.float16, the KV cache torch.flo"),
        ({"value_cache": torch.zeros(1, 16, 8, 64)}, "must have the same shape and strides"),
        ({"max_family_rows": 0}, "max_family_rows must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    problem = make_problem(Case(rows=2), "cpu", 0)
    arguments: dict[str, Any] = {
        "query": problem.query, "key_cache": problem.keys, "value_cache": problem.values,
        "block_table": problem.table, "seq_lens": problem.lengths, "families": problem.families,
        "scale": 1.0, **problem.bounds, **changes,
    }  # fmt: skip

    with pytest.raises(ValueError, match=message):
        family_decode(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("capability", sorted(SHARED))
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_fit_into_a_gpu(
    capability: int, head_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    for name, block_m in (("prefix", 16), ("prefix", 64), ("suffix", 16), ("merge", 4)):
        if (name, block_m, dtype.itemsize) == ("prefix", 64, 4):
            continue
        used = compiled(name, block_m, dtype, head_size, capability)
        assert used["registers"] <= REGISTERS
        # A few bytes, outside of the loop, are no loss.
        assert used["spilled_bytes"] <= 64, (name, block_m)
        assert used["shared_bytes"] <= SHARED[capability]
        assert used["has_tensor_cores"] == (name != "merge" and dtype.itemsize == 2)


def compiled(
    name: str, block_m: int, dtype: torch.dtype, head_size: int, capability: int
) -> dict[str, Any]:
    """Compile a kernel for a GPU that is not here, and return what it uses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    tiles: Tiles = triton_kernel.default_tiles(dtype, head_size)
    kernel = getattr(triton_kernel, f"_{name}_kernel")
    given = {
        "block_size": 16, "head_size": head_size, "padded_size": head_size, "ratio": 4,
        "block_n": tiles.tokens, "block_m": block_m, "has_prefix": True, "upcast": False,
    }  # fmt: skip
    constants = {key: value for key, value in given.items() if key in kernel.arg_names}
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    kinds = {
        **dict.fromkeys(("query", "key_cache", "value_cache", "output"), f"*{short}"),
        **dict.fromkeys(("partial_values", "partial_stats"), "*fp32"),
        **dict.fromkeys(("block_table", "family_rows", "family_starts", "prefix_blocks"), "*i32"),
        **dict.fromkeys(("seq_lens", "row_prefix_blocks"), "*i32"),
        "scale": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (argument, kind) in enumerate(signature.items())
        if kind.startswith("*") or argument.endswith("_stride")
    }
    found = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages},
    )
    code = found.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(code)
        file.flush()
        report = subprocess.run(
            [get_ptxas(capability).path, "-v", f"-arch={sm_arch_from_capability(capability)}",
             file.name, "-o", os.devnull],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
    [registers] = re.findall(r"Used (\d+) registers", report)
    [spilled] = re.findall(r"(\d+) bytes spill stores", report)
    return {
        "registers": int(registers), "spilled_bytes": int(spilled),
        "shared_bytes": found.metadata.shared,
        "has_tensor_cores": "mma.sync" in code or "wgmma" in code,
    }  # fmt: skip
