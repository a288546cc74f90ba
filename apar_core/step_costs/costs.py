"""The duration of an engine step as a function of its batch.

One model for everything that predicts time: the virtual engine, the cluster simulation, `apar plan`
and the adaptive fork policy. The duration of a step on the device is

    launch_s + matrix_s(tokens) + row_s * rows + attended_token_s * attended tokens
        + copied_block_s * copied blocks

where `matrix_s` is piecewise linear in the tokens of the step: matrix products take as long for one
token as for dozens, until arithmetic takes longer than reading the weights. `row_s` is sampling.
The attended tokens are those of all rows. Threads of one answer share KV blocks, so a step reads
some tokens again: these may take another time, `repeated_token_s`, where a cache holds them.

With family attention, groups of rows read the tokens that they share once. These reads are saved,
and each pass over groups, each group and each of its rows costs `group_pass_s`, `group_s` and
`grouped_row_s`.

The engine core's own Python time per step is `host_base_s + host_row_s * rows`. With async
scheduling it overlaps the device's time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Kind = Literal["measured", "predicted"]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Work of one engine step.

    rows: sequences that are scheduled, each with at least one token.
    attended_tokens: tokens of KV cache that all rows read, summed over the rows.
    repeated_tokens: those of them in KV blocks that another row of the step has already read. They
        count only where the costs have `repeated_token_s`.
    prefill_tokens: tokens computed beyond one per row.
    copied_blocks: KV blocks copied for forked threads.
    saved_tokens: attended tokens that are not read, since a row of the same group reads them; they
        are no repeated tokens. group_passes: passes over groups beside that over all rows. groups,
        grouped_rows: groups and their rows, of all passes.
    """

    rows: int
    attended_tokens: int
    prefill_tokens: int = 0
    copied_blocks: int = 0
    repeated_tokens: int = 0
    saved_tokens: int = 0
    group_passes: int = 0
    groups: int = 0
    grouped_rows: int = 0

    @property
    def read_tokens(self) -> int:
        """Tokens of KV cache that are read: attended ones, less those that groups save."""
        return self.attended_tokens - self.saved_tokens

    @property
    def tokens(self) -> int:
        """Tokens that go through the model's matrices."""
        return self.rows + self.prefill_tokens

    def grown(self, *, rows: int, attended_tokens: int, saved_tokens: int = 0) -> StepBatch:
        """Return the batch with more decoding rows, some of whose tokens a group reads already."""
        return replace(
            self,
            rows=self.rows + rows,
            attended_tokens=self.attended_tokens + attended_tokens,
            saved_tokens=self.saved_tokens + saved_tokens,
        )


def split_curve(
    points: Sequence[tuple[int, float]],
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Divide the seconds of steps by their tokens into `launch_s` and `matrix_s` of `StepCosts`.

    `matrix_s` goes on in proportion to the tokens beyond the last point, here with the slope of the
    last piece. So what is not proportional there is launch time.
    """
    launch_s = 0.0
    if len(points) > 1:
        (low, low_s), (high, high_s) = points[-2:]
        slope_s = (high_s - low_s) / (high - low)
        launch_s = min(max(high_s - slope_s * high, 0.0), points[0][1])
    return launch_s, tuple((tokens, seconds - launch_s) for tokens, seconds in points)


@dataclass(frozen=True)
class StepCosts:
    """Seconds per part of an engine step, for one model on one device.

    matrix_s: (tokens, seconds) with increasing tokens; interpolated linearly between them, constant
        below the first, and proportional to the tokens beyond the last.
    repeated_token_s: an attended token that another row of the step has already read; None: as
        `attended_token_s`, since caches of GPUs are small beside the KV cache of a step.
    row_s: sampling of one row.
    largest_graph: tokens of the largest captured CUDA graph; a larger step launches its kernels one
        by one, which takes `eager_launch_s` instead of `launch_s`. None: no such limit.
    group_pass_s: of family attention, one more pass over the KV cache in all layers, with the merge
        of the results. group_s: a group in it. grouped_row_s: merging the results of a row.
    kind, source: whether the numbers were measured, and where they come from, for reports.
    """

    name: str
    kind: Kind
    source: str
    matrix_s: tuple[tuple[int, float], ...]
    attended_token_s: float
    launch_s: float = 0.0
    copied_block_s: float = 0.0
    row_s: float = 0.0
    host_base_s: float = 0.0
    host_row_s: float = 0.0
    largest_graph: int | None = None
    eager_launch_s: float = 0.0
    repeated_token_s: float | None = None
    group_pass_s: float = 0.0
    group_s: float = 0.0
    grouped_row_s: float = 0.0

    def __post_init__(self) -> None:
        tokens = [number for number, _ in self.matrix_s]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ValueError(f"matrix_s: numbers of tokens from 1 on must increase, not {tokens}")

    @cached_property
    def _tokens(self) -> list[int]:
        return [number for number, _ in self.matrix_s]

    def matrix_time_s(self, tokens: int) -> float:
        """Return the seconds of all matrix products of a step with so many tokens."""
        table = self.matrix_s
        index = bisect_left(self._tokens, tokens)
        if index == 0:
            return table[0][1]
        if index == len(table):
            last, seconds = table[-1]
            return seconds * tokens / last
        (low, low_s), (high, high_s) = table[index - 1], table[index]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)

    def device_s(self, batch: StepBatch) -> float:
        """Return the seconds that the device is busy with a step."""
        is_captured = self.largest_graph is None or batch.tokens <= self.largest_graph
        seconds = (
            (self.launch_s if is_captured else self.eager_launch_s)
            + self.matrix_time_s(batch.tokens)
            + self.row_s * batch.rows
            + self.attended_token_s * batch.read_tokens
            + self.copied_block_s * batch.copied_blocks
        )
        if batch.group_passes:
            seconds += (
                self.group_pass_s * batch.group_passes
                + self.group_s * batch.groups
                + self.grouped_row_s * batch.grouped_rows
            )
        if self.repeated_token_s is not None:
            seconds += (self.repeated_token_s - self.attended_token_s) * batch.repeated_tokens
        return seconds

    def host_s(self, rows: int) -> float:
        """Return the seconds of Python that the engine core spends on a step."""
        return self.host_base_s + self.host_row_s * rows

    def step_s(self, batch: StepBatch, *, overlapped: bool = False) -> float:
        """Return the seconds from one step to the next in a busy engine.

        `overlapped`: with async scheduling the engine core's time runs beside the device's.
        """
        device_s, host_s = self.device_s(batch), self.host_s(batch.rows)
        return max(device_s, host_s) if overlapped else device_s + host_s

    def slower(self, factor: float) -> StepCosts:
        """Return the costs of a device that takes `factor` times as long."""
        return replace(
            self,
            name=f"{self.name}, {factor:g}x slower",
            matrix_s=tuple((tokens, factor * seconds) for tokens, seconds in self.matrix_s),
            attended_token_s=factor * self.attended_token_s,
            repeated_token_s=(
                None if self.repeated_token_s is None else factor * self.repeated_token_s
            ),
            row_s=factor * self.row_s,
            launch_s=factor * self.launch_s,
            eager_launch_s=factor * self.eager_launch_s,
            copied_block_s=factor * self.copied_block_s,
            group_pass_s=factor * self.group_pass_s,
            group_s=factor * self.group_s,
            grouped_row_s=factor * self.grouped_row_s,
        )
