"""Runs the kernel in Triton's interpreter, and prints what it found as JSON.

A process of its own: the interpreter has to be chosen before Triton is imported. Arguments: the
number of a part of the cases and of all parts, or "few".
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from apar_core.attention import triton_kernel
from benchmarks.gpu.family_kernel import (
    TOLERANCE,
    Case,
    cases,
    error_of,
    has_room_for_errors,
    make_problem,
    planted,
    reference,
    relative_error,
    unnoticed,
)


def merge_without_scale(seed: int) -> float:
    """Return the error of a kernel that adds partial results without scaling them."""
    right = triton_kernel._merge

    def wrong(largest: Any, total: Any, values: Any, *rest: Any) -> Any:
        _, other_total, other_values = right(largest, 0.0 * total, 0.0 * values, *rest)
        return largest, total + other_total, values + other_values

    problem = make_problem(Case(heads=2, ratio=2), "cpu", seed)
    triton_kernel._merge = wrong
    try:
        return relative_error(problem.solve(), reference(problem))
    finally:
        triton_kernel._merge = right


def warmed_up() -> bool:
    """Warm up, and return whether the KV cache is as it was."""
    kv_cache = torch.randn(1, 1, 16, 128)
    before = kv_cache.clone()
    keys, values = kv_cache.transpose(1, 2).split(64, dim=-1)
    triton_kernel.warm_up(keys, values, 8)
    return bool((kv_cache == before).all())


def few() -> dict[str, Any]:
    """Check small cases: each data type, several chunks, no family, no tokens, one KV head."""
    small = [
        Case(heads=2, ratio=2, chunk=32),
        Case(dtype=torch.float16, heads=3, ratio=3, head_size=80, sharpness=6.0),
        Case(dtype=torch.bfloat16, heads=1, chunk=64),
        # More heads per KV head than a program takes queries.
        Case(heads=20, ratio=20, rows=2),
    ]
    return {
        "wrong": [
            str(case) for case in small if not error_of(case, "cpu") <= TOLERANCE[case.dtype]
        ],
        "unnoticed": unnoticed(Case(heads=2, ratio=2), "cpu"),
        "planted": len(planted(make_problem(Case(heads=2, ratio=2), "cpu", 0))),
        "merge_without_scale": merge_without_scale(0),
        "warmed_up": warmed_up(),
        "foreign": [name for name in ("vllm", "transformers", "pydantic") if name in sys.modules],
    }


def part(number: int, parts: int) -> dict[str, Any]:
    """Check a part of the cases that cover all pairs of values."""
    wrong, missed = [], []
    errors: dict[str, float] = {}
    checked = list(enumerate(cases()))[number::parts]
    for seed, case in checked:
        # With more KV heads, the planted errors alone take minutes.
        if has_room_for_errors(case) and case.heads <= 8 * case.ratio:
            missed += [f"{name} in {case}" for name in unnoticed(case, "cpu", seed)]
        error = error_of(case, "cpu", seed)
        errors[str(case.dtype)] = max(error, errors.get(str(case.dtype), 0.0))
        if not error <= TOLERANCE[case.dtype]:
            wrong.append(f"{error:.1e} in {case}")
    return {"wrong": wrong, "unnoticed": missed, "cases": len(checked), "errors": errors}


if __name__ == "__main__":
    # Of planted errors, which read memory that nothing wrote.
    warnings.simplefilter("ignore", RuntimeWarning)
    found = few() if sys.argv[1] == "few" else part(int(sys.argv[1]), int(sys.argv[2]))
    json.dump(found, sys.stdout)
