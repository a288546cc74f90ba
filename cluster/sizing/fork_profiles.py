"""How answers fork when only their lengths are known: figures of recorded answers, scaled."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.sizing.errors import SizingError
from cluster.sizing.request_shape import RequestShape


@dataclass(frozen=True, slots=True)
class ForkProfile:
    """Means of recorded answers without their prompts, per token of the mean answer.

    Attended tokens are per square of it. So lengths vary around the given mean as they do in the
    record. Fields as in `RequestShape`.
    """

    name: str
    source: str
    threads: float
    steps: float
    long_steps: float
    attended_tokens: float
    held_tokens: float
    held_tokens_sd: float
    alive_threads: float
    alive_threads_sd: float
    peak_tokens: float
    sequential_attended_tokens: float

    def shape(self, prompt_tokens: float, answer_tokens: float) -> RequestShape:
        """A request with these mean lengths that forks like the recorded ones."""
        answer = answer_tokens
        threads = min(self.threads, max(answer, 1.0))
        generated = answer + 2 * threads - 1
        steps = max(self.steps * answer, 1.0)
        sequential_steps = answer + 1
        square = answer * answer
        return RequestShape(
            source=f"given lengths; forks and spread of lengths as in {self.source}",
            prompt_tokens=prompt_tokens,
            text_tokens=answer,
            generated_tokens=generated,
            threads=threads,
            steps=steps,
            long_steps=max(self.long_steps * answer, steps),
            attended_tokens=prompt_tokens * generated + self.attended_tokens * square,
            held_tokens=prompt_tokens + self.held_tokens * answer,
            held_tokens_sd=self.held_tokens_sd * answer,
            alive_threads=self.alive_threads,
            alive_threads_sd=self.alive_threads_sd,
            peak_tokens=prompt_tokens + self.peak_tokens * answer,
            sequential_steps=sequential_steps,
            sequential_attended_tokens=prompt_tokens * sequential_steps
            + self.sequential_attended_tokens * square,
            sequential_peak_tokens=prompt_tokens + answer,
        )


# Computed by `request_shape.shape_of` over shared/data/traces with prompts of no tokens.
_PROFILES = (
    ForkProfile(
        "none", "505 answers in their natural mix, written by one thread each",
        threads=1.0, steps=1.003, long_steps=2.863, attended_tokens=0.716, held_tokens=0.713,
        held_tokens_sd=0.584, alive_threads=1.0, alive_threads_sd=0.0, peak_tokens=1.0,
        sequential_attended_tokens=0.716,
    ),
    ForkProfile(
        "mixed", "505 answers in their natural mix, a third of them forkable",
        threads=2.66, steps=0.797, long_steps=2.517, attended_tokens=0.559, held_tokens=0.630,
        held_tokens_sd=0.549, alive_threads=1.273, alive_threads_sd=0.889, peak_tokens=0.872,
        sequential_attended_tokens=0.716,
    ),
    ForkProfile(
        "structured", "474 lists and paragraphs, the likes of the paper's APAR test set",
        threads=6.45, steps=0.474, long_steps=1.484, attended_tokens=0.289, held_tokens=0.368,
        held_tokens_sd=0.287, alive_threads=2.173, alive_threads_sd=1.533, peak_tokens=0.680,
        sequential_attended_tokens=0.579,
    ),
)  # fmt: skip
PROFILES = {profile.name: profile for profile in _PROFILES}


def find_profile(name: str) -> ForkProfile:
    """A profile by its name. Raises SizingError for an unknown one."""
    if name not in PROFILES:
        raise SizingError(f"unknown fork profile {name!r}: known are {', '.join(PROFILES)}")
    return PROFILES[name]
