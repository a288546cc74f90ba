"""What an experiment runs on and with; the same in every part of one folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator

from cluster.experiments.cpu_model import CPU_MODELS

Mode = Literal["sequential", "eager", "adaptive"]
MODES: tuple[Mode, ...] = ("sequential", "eager", "adaptive")


class ExperimentSettings(BaseModel):
    """Model, workload, limits and the points of the figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("cpu-7b", description="A CPU model by name, or a checkpoint.")
    trace: Path = Field(description="Answers that fork: figure 5 and the tables.")
    mixed_trace: Path | None = Field(None, description="Answers in their natural mix.")
    answers: PositiveInt = Field(48, description="Answers of each trace, drawn at random.")
    max_tokens: PositiveInt = Field(
        600, description="Answers that are longer than this, prompt included, are left out."
    )
    seed: int = Field(0, description="Of the drawing.")
    kv_tokens: PositiveInt | None = Field(
        6144, description="Tokens of the whole KV cache; absent, vLLM sizes it by memory."
    )
    block_size: PositiveInt = Field(32, description="Tokens of a KV block.")
    max_requests: PositiveInt = Field(
        4,
        description="Requests that run at once at most (350 and 180 in the paper); with a CPU "
        "model well below its knee, where a step has room for more rows.",
    )
    kv_shares: tuple[PositiveFloat, ...] = Field(
        (0.1, 0.2, 0.3, 0.5, 0.7, 0.9), description="Shares of the KV cache in figure 5a."
    )
    mixed_kv_shares: tuple[PositiveFloat, ...] = Field(
        (0.1, 0.5, 0.9), description="Shares at which the mixed trace is run."
    )
    concurrencies: tuple[PositiveInt, ...] = Field(
        (1, 2, 4), description="Requests under way in figure 5b."
    )
    modes: tuple[Mode, ...] = Field(MODES, description="Ways of decoding.")
    rounds: PositiveInt = Field(
        1, description="Runs of each way of decoding at each point; medians are compared."
    )
    side_by_side: bool | None = Field(
        None,
        description="An engine for each way of decoding, which take turns of a few steps, so that "
        "a machine whose speed changes is the same to all. It takes the memory of all of them: "
        "absent, only with a CPU model.",
    )
    sample_s: PositiveFloat = Field(
        1.0, description="Seconds between samples (3 in the paper, whose runs are longer)."
    )
    token_time_multiple: PositiveFloat = Field(
        2.0,
        description="What the adaptive policy keeps to a token, as a multiple of the mean step of "
        "sequential decoding in the same place; side by side, of its first answers just before.",
    )
    engine: Mapping[str, Any] = Field({}, description="Further arguments of vLLM's engine.")

    @field_validator("kv_shares", "mixed_kv_shares")
    @classmethod
    def _check_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        for share in shares:
            if share > 1:
                raise ValueError(f"a share of the KV cache is at most 1, not {share}")
        return shares

    @property
    def is_cpu_model(self) -> bool:
        """Whether the model is one of the experiment's own, with random weights."""
        return self.model in CPU_MODELS

    @property
    def takes_turns(self) -> bool:
        """Whether each way of decoding has an engine, and they take turns."""
        return self.is_cpu_model if self.side_by_side is None else self.side_by_side

    @property
    def order(self) -> str:
        """How ways of decoding meet, for a report."""
        if self.takes_turns:
            return "side by side, each in an engine of its own that has its turns"
        return "one after the other in one engine"

    def num_engines(self, ways: int) -> int:
        """How many engines there are where so many ways of decoding are compared."""
        return ways if self.takes_turns else 1

    def as_text(self) -> dict[str, str]:
        """The settings as they are compared with those of an earlier run, traces by content.

        Without the number of rounds: a folder may get more of them.
        """
        given = self.model_dump(mode="json", exclude={"rounds"})
        given["side_by_side"] = self.takes_turns
        values = {name: str(value) for name, value in given.items()}
        values["trace_sha256"] = trace_digest(self.trace)
        if self.model in CPU_MODELS:
            values["model_dimensions"] = repr(CPU_MODELS[self.model])
        if self.mixed_trace is not None:
            values["mixed_trace_sha256"] = trace_digest(self.mixed_trace)
        return values


def trace_digest(path: Path) -> str:
    """SHA-256 of a trace's content, in hex; "absent" for one that is not there."""
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
