"""How long an engine's steps take, one by one or many at once."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step's time, linear in what it computes; all in seconds.

    `row_s` for each sequence of the batch, `attended_token_s` for each token of KV cache that a
    decoding row reads, `prefill_token_s` for each prompt token.
    """

    base_s: float
    row_s: float
    attended_token_s: float
    prefill_token_s: float

    def step_s(self, rows: int, attended: int, prefill: int = 0) -> float:
        """Time of one step."""
        return (
            self.base_s
            + self.row_s * rows
            + self.attended_token_s * attended
            + self.prefill_token_s * prefill
        )

    def steps_s(self, num_steps: int, rows: int, attended: int) -> float:
        """Time of decoding steps with the same rows, `attended` in the first of them.

        Every row reads one token more in each next step.
        """
        growth = rows * num_steps * (num_steps - 1) / 2
        return num_steps * (self.base_s + self.row_s * rows) + self.attended_token_s * (
            num_steps * attended + growth
        )

    def steps_within(self, elapsed_s: float, rows: int, attended: int) -> int:
        """Steps begun within `elapsed_s`, the one that runs then included; at least 1."""
        square = self.attended_token_s * rows / 2
        linear = self.step_s(rows, attended) - square
        if square * elapsed_s > 1e-12 * linear * linear:
            root = (math.sqrt(linear * linear + 4 * square * elapsed_s) - linear) / (2 * square)
        else:
            root = elapsed_s / linear
        num_steps = max(1, math.ceil(root))
        # Rounding of the root may be a step off.
        while num_steps > 1 and self.steps_s(num_steps - 1, rows, attended) >= elapsed_s:
            num_steps -= 1
        while self.steps_s(num_steps, rows, attended) < elapsed_s:
            num_steps += 1
        return num_steps


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """One replica: its step times, KV cache, and limits.

    `source` says where the times are from. `step_tokens` is vLLM's `max_num_batched_tokens`,
    `max_threads` its `max_num_seqs`; `max_requests` the router's cap.
    """

    name: str
    source: str
    times: StepTimes
    blocks: int
    block_size: int
    max_threads: int
    max_requests: int
    max_request_threads: int = 32
    step_tokens: int = 2048


ROOFLINE_7B = ReplicaModel(
    name="7b-roofline",
    source=(
        "not measured: 7B in bfloat16 on one 80 GB GPU of 3.35 TB/s and 989 TFLOP/s. Base: 13.5 GB "
        "of weights at 80 % of the bandwidth, and 1 ms of launches. Attended token: 0.5 MiB of KV "
        "cache likewise. Prefill: 13.5 GFLOP a token at 55 %. Row: 60 % of that, as a decoding row "
        "hides in part behind the weights. KV cache: 90 % of the memory less weights and 3 GB."
    ),
    times=StepTimes(6.0e-3, 15e-6, 0.196e-6, 25e-6),
    blocks=6600,
    block_size=16,
    max_threads=1024,
    max_requests=350,
)

APAR_TINY_MEASURED = ReplicaModel(
    name="tiny-measured",
    source=(
        "measured on 2 shared cores of a server CPU, vLLM 0.32, apar-tiny in bfloat16, eager, one "
        "executor: 836 steps of 1 to 64 rows with 32 to 460 tokens each; single steps are off by "
        "5.1 % (median) and 13.8 % (90 %). `python -m benchmarks simulation fit` measures anew."
    ),
    times=StepTimes(2.518e-3, 95.8e-6, 542.7e-9, 60.22e-6),
    blocks=2048,
    block_size=32,
    max_threads=256,
    max_requests=64,
)

MODELS = {model.name: model for model in (ROOFLINE_7B, APAR_TINY_MEASURED)}
