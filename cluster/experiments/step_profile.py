"""Where a step's time goes, by part, with many requests: forked beside sequential.

All requests come at once; the steps that are timed begin when none of them waits any more and each
has generated for a while. Tokens are streamed and spelled as for clients, so that the parts of
serving show too. Threads are measured at the place where they are most: early in the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apar_core.reporting import Column, ReportTable
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine, Policy
from cluster.experiments.program import OneRequest
from cluster.experiments.step_timers import PARTS, PartTimers, timed_steps

if TYPE_CHECKING:
    from apar_core.workload.replay_answers import ReplayAnswer

MODES: Mapping[str, Policy | None] = {"sequential": None, "eager": "eager", "adaptive": "adaptive"}
"""Ways of decoding with their fork policy; sequential decoding has none."""


@dataclass(frozen=True, slots=True)
class ProfileLoad:
    """Requests at once, steps before those that are timed, and steps that are timed."""

    num_requests: int = 350
    warm_steps: int = 60
    steps: int = 40


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Mean seconds a step by part, rows (sequences that got a token) and text tokens a step."""

    seconds: Mapping[str, float]
    rows: float
    text_tokens: float

    @property
    def step_s(self) -> float:
        """A whole step."""
        return sum(self.seconds.values())


def profile_steps(
    engine: ExperimentEngine,
    answers: Sequence[ReplayAnswer],
    load: ProfileLoad,
    conditions: Conditions,
    *,
    forks: bool,
) -> StepProfile:
    """Time the parts of an engine's steps; the answers come again if they are too few."""
    engine.prepare(conditions)
    for number in range(load.num_requests):
        _submit(engine, answers[number % len(answers)], f"profile-{number}", forks=forks)
    num_warm = 0
    while num_warm < load.warm_steps or engine.has_pending:
        engine.llm_engine.step()
        num_warm += 1
    timers = PartTimers()
    before = (engine.counts.rows, engine.counts.text_tokens)
    with timed_steps(engine.engine, timers):
        for _ in range(load.steps):
            engine.llm_engine.step()
    profile = StepProfile(
        seconds={part: timers.seconds[part] / load.steps for part in PARTS},
        rows=(engine.counts.rows - before[0]) / load.steps,
        text_tokens=(engine.counts.text_tokens - before[1]) / load.steps,
    )
    engine.abort_all()
    # The scheduler takes aborted requests out with its next step.
    engine.llm_engine.step()
    return profile


def profile_table(profiles: Mapping[str, StepProfile], load: ProfileLoad) -> ReportTable:
    """Return every part's time a step and a row, the modes side by side."""
    columns = [Column("part")]
    for mode in profiles:
        columns += [Column(f"{mode}: ms", ".2f"), Column("us a row", ".1f"), Column("%", ".0f")]
    rows = [
        _row(part, profiles, {mode: each.seconds[part] for mode, each in profiles.items()})
        for part in PARTS
    ]
    rows.append(_row("whole step", profiles, {mode: p.step_s for mode, p in profiles.items()}))
    means = ", ".join(
        f"{mode} {each.rows:.0f} rows and {each.text_tokens:.0f} text tokens "
        f"({1e6 * each.step_s / each.text_tokens:.0f} us a text token)"
        for mode, each in profiles.items()
    )
    return ReportTable(
        name="profile",
        title=f"A step by part, {load.num_requests} requests",
        columns=tuple(columns),
        rows=tuple(rows),
        note=f"Means over {load.steps} steps after {load.warm_steps}. A step has: {means}.",
    )


def _row(
    name: str, profiles: Mapping[str, StepProfile], seconds: Mapping[str, float]
) -> tuple[str | float | None, ...]:
    cells: list[str | float | None] = [name]
    for mode, profile in profiles.items():
        part_s = seconds[mode]
        cells += [1e3 * part_s, 1e6 * part_s / profile.rows, 100 * part_s / profile.step_s]
    return tuple(cells)


def _submit(engine: ExperimentEngine, answer: ReplayAnswer, name: str, *, forks: bool) -> None:
    # These import vLLM, which takes seconds.
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for submission in OneRequest(answer, forks=forks).start():
        sampling: dict[str, Any] = {
            **submission.sampling,
            "detokenize": True,
            "output_kind": RequestOutputKind.DELTA,
        }
        engine.llm_engine.add_request(
            name, {"prompt_token_ids": submission.prompt_ids}, SamplingParams(**sampling)
        )
