"""Decision about family attention from a GPU's results. Fixed before any run on a GPU.

The baseline is vLLM as it starts by default on the GPU, with full CUDA graphs: on an H100 that is
FlashAttention 3. `docs/family-attention.md` states the rule in words.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_GAIN, DEFAULT_COST, DEFAULT_PASSES = 1.05, 0.99, 1.03
"""To become the default: least speed-up of forked runs, of runs that share nothing, and the most
time of two passes over that of one."""
LEAST_GAIN = 1.03
"""Where no forked run gains as much, family attention is removed."""
RIVAL_GAIN = 1.10
"""How much faster another method must be to replace one of ours."""
_LONG_PREFIX = 256
_BACKENDS = {"families": "two passes", "triton_families": "our kernel"}
"""Checks whose runs read families, and the method of `prefixes` that their engines use."""
_BASELINE = {"attention_backend": "FLASH_ATTN"}
_ONE_PASS = "one pass"
_NEEDED = ("engine", "replay", "families", "families_f32", "bf16", "prefixes")


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, and the figures that lead to it."""

    verdict: str
    reasons: tuple[str, ...]


DEFAULT, OPTIONAL, REMOVE = "Make it the default", "Keep it optional", "Remove it"


def decide(results: Mapping[str, Mapping[str, Any]]) -> Decision:
    """Decide from the data of the checks that have passed, by name."""
    missing = [name for name in _NEEDED if name not in results]
    if missing:
        return Decision("No decision", (f"not passed: {', '.join(missing)}",))
    arguments = results["engine"]["arguments"]
    if arguments != _BASELINE:
        return Decision("No decision", (f"the baseline is not vLLM's default: {arguments}",))
    points = results["prefixes"]["points"]
    verdicts: dict[str, str] = {}
    reasons: list[str] = []
    for check, method in _BACKENDS.items():
        if check in results:
            verdicts[method], found = _of_backend(results[check], method, points)
            reasons += found
    # One backend that is good enough is enough.
    verdict = min(verdicts.values(), key=(DEFAULT, OPTIONAL, REMOVE).index)
    return Decision(verdict, (*reasons, *_rivals(points)))


def _of_backend(
    found: Mapping[str, Any], method: str, points: Sequence[Mapping[str, Any]]
) -> tuple[str, list[str]]:
    """Return the verdict about one implementation, by its own figures alone."""
    gains, costs = (
        {run: ratio for run, ratio in found["speed_ups"].items() if run.startswith(name)}
        for name in ("eager", "sequential")
    )
    times = [each["seconds"][method] / each["seconds"][_ONE_PASS] for each in points]
    # A gain that lies within the spread of two equal runs is none.
    spread = found["spread"]
    if max(gains.values()) < LEAST_GAIN - spread:
        verdict = REMOVE
    elif (
        min(gains.values()) >= DEFAULT_GAIN + spread
        and min(costs.values(), default=0.0) >= DEFAULT_COST
        and max(times) <= DEFAULT_PASSES
    ):
        verdict = DEFAULT
    else:
        verdict = OPTIONAL
    return verdict, [
        f"{method}: {verdict.lower()}",
        f"{method}: forked runs have {_listed(gains)} of the throughput without families; two "
        f"equal runs differ by {spread:.1%}",
        f"{method}: runs that share nothing have {_listed(costs) or 'not been measured'}",
        f"{method}: {min(times):.2f} to {max(times):.2f} of the time of one pass, in "
        f"{len(points)} steps with prefixes of {points[0]['prefix']} to {points[-1]['prefix']} "
        "tokens",
    ]


def _listed(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{ratio:.3f} ({run})" for run, ratio in ratios.items())


def _rivals(points: list[Mapping[str, Any]]) -> list[str]:
    """Return what the methods' times say about our two implementations."""
    found = []
    kernel = [each["seconds"]["two passes"] / each["seconds"]["our kernel"] for each in points]
    if max(kernel) >= RIVAL_GAIN:
        found.append(f"keep the Triton kernel: up to {max(kernel):.2f} times as fast as two passes")
    else:
        found.append(
            f"remove the Triton kernel: at most {max(kernel):.2f} times as fast as two passes"
        )
    cascade = [
        min(each["seconds"]["two passes"], each["seconds"]["our kernel"])
        / each["seconds"]["FlashInfer"]
        for each in points
        if each["prefix"] >= _LONG_PREFIX and "FlashInfer" in each["seconds"]
    ]
    if not cascade:
        found.append("FlashInfer's cascade was not measured")
    elif statistics.median(cascade) >= RIVAL_GAIN:
        found.append(
            "keep the grouping, and replace our passes by FlashInfer's cascade, which is "
            f"{statistics.median(cascade):.2f} times as fast as our best (median of prefixes from "
            f"{_LONG_PREFIX} tokens)"
        )
    else:
        found.append(
            f"FlashInfer's cascade is {statistics.median(cascade):.2f} times as fast as our best"
        )
    return found
