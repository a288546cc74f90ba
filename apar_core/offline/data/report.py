"""What data preparation has read, made and refused."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, ConfigDict, Field

MAX_REFUSAL_EXAMPLES = 10
"""Refusals of one reason that are kept with their places."""


class Refusal(BaseModel):
    """An item, or one answer of it, that could not be used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str
    reason: str
    message: str


class SampleCount(BaseModel):
    """Examples found and written of one of the two files."""

    model_config = ConfigDict(extra="forbid")

    found: int = 0
    wanted: int | None = None
    written: int = 0


class PreparationReport(BaseModel):
    """The counts of one run; it depends on inputs and options, not on the number of processes."""

    model_config = ConfigDict(extra="forbid")

    inputs: list[str]
    seed: int
    unordered_lists: bool
    training_ratio: str = Field(
        "1:1", description="How training draws from structured and unstructured examples."
    )
    model: str | None = Field(None, description="Model whose context every example fits.")
    context_length: int | None = Field(None, description="Tokens of that context.")
    num_items: int = 0
    num_too_long: int = Field(0, description="Answers left out: longer than the context.")
    num_near_held_out: int = Field(
        0, description="Examples left out: of a held-out conversation, or with the same query."
    )
    num_answers: int = 0
    num_forks: int = 0
    kinds: Counter[str] = Field(default_factory=Counter)
    unstructured_reasons: Counter[str] = Field(default_factory=Counter)
    refusals: Counter[str] = Field(default_factory=Counter)
    refusal_examples: list[Refusal] = Field(default_factory=list)
    structured: SampleCount = Field(default_factory=SampleCount)
    unstructured: SampleCount = Field(default_factory=SampleCount)
    held_out: SampleCount = Field(default_factory=SampleCount)

    def add_refusal(self, refusal: Refusal) -> None:
        """Count a refusal; the first ones are kept with their places."""
        self.refusals[refusal.reason] += 1
        if self.refusals[refusal.reason] <= MAX_REFUSAL_EXAMPLES:
            self.refusal_examples.append(refusal)

    def add_answer(self, kind: str, reason: str | None, num_forks: int) -> None:
        """Count an answer that became an example."""
        self.num_answers += 1
        self.num_forks += num_forks
        self.kinds[kind] += 1
        if reason is not None:
            self.unstructured_reasons[reason] += 1
