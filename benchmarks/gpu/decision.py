"""What a GPU's results decide about family attention. The rule was fixed before any run on a GPU.

The baseline is vLLM as it starts by default on the GPU, with full CUDA graphs: on an H100 that is
FlashAttention 3. `docs/family-attention.md` states the rule in words.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
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
_BACKENDS = ("families", "triton_families")
_NEEDED = ("replay", "families", "families_f32", "bf16", "prefixes")


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, and the figures that lead to it."""

    verdict: str
    reasons: tuple[str, ...]


def decide(results: Mapping[str, Mapping[str, Any]]) -> Decision:
    """Decide from the data of the checks that have passed, by name."""
    missing = [name for name in _NEEDED if name not in results]
    if missing:
        return Decision("No decision", (f"not passed: {', '.join(missing)}",))
    backends = [results[name]["speed_ups"] for name in _BACKENDS if name in results]
    # Only one backend can be the default: the one with the larger gain.
    speed_ups = max(backends, key=lambda runs: max(_of(runs, "eager").values()))
    gains, costs = _of(speed_ups, "eager"), _of(speed_ups, "sequential")
    reasons = [
        f"forked runs have {_listed(gains)} of the throughput without families",
        f"runs that share nothing have {_listed(costs)}",
    ]
    points = results["prefixes"]["points"]
    passes = [each["seconds"]["two passes"] / each["seconds"]["one pass"] for each in points]
    reasons.append(
        f"two passes take {min(passes):.2f} to {max(passes):.2f} of the time of one, in "
        f"{len(points)} steps with prefixes of {points[0]['prefix']} to {points[-1]['prefix']} "
        "tokens"
    )
    if max(gains.values()) < LEAST_GAIN:
        verdict = "Remove it"
        reasons.append(f"no forked run gains {LEAST_GAIN - 1:.0%}")
    elif (
        min(gains.values()) >= DEFAULT_GAIN
        and min(costs.values(), default=0.0) >= DEFAULT_COST
        and max(passes) <= DEFAULT_PASSES
    ):
        verdict = "Make it the default"
    else:
        verdict = "Keep it optional"
    reasons += _rivals(points)
    return Decision(verdict, tuple(reasons))


def _of(runs: Mapping[str, float], method: str) -> dict[str, float]:
    return {run: ratio for run, ratio in runs.items() if run.startswith(method)}


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
