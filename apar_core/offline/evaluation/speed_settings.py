"""Settings of a speed evaluation, and option combinations that are refused."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from apar_core.errors import EvaluationError

DECODERS = ("plain", "vanilla_apar", "medusa_apar")


class SpeedSettings(BaseModel):
    """What is measured, and on what.

    `model` is a folder or hub name and `model_name` what readers know it by. `baseline_model` is
    the baseline's checkpoint; None shares that of `model`. With `replay` the tokens of recorded
    answers are forced, through a checkpoint, through `random_weights`, or with `count_only` through
    the schedule alone; `tokenizer` is for the last two.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    model_name: str
    decoders: tuple[str, ...] = ("vanilla_apar",)
    baseline: str | None = "plain"
    baseline_model: str | None = None
    baseline_model_name: str | None = None
    prompts: str = "vicuna-bench"
    replay: tuple[Path, ...] = ()
    count_only: bool = False
    random_weights: str | None = None
    tokenizer: str | None = None
    medusa_heads: Path | None = None
    questions: Path | None = None
    limit: PositiveInt | None = None
    max_tokens: PositiveInt = 1024
    device: str = "auto"
    dtype: str = "auto"

    @property
    def runs_checkpoint(self) -> bool:
        """Whether the checkpoint of `model` is loaded."""
        return not self.count_only and self.random_weights is None

    @property
    def baseline_name(self) -> str | None:
        """The name that the baseline's answers are kept with."""
        if self.baseline is None or self.baseline_model is None:
            return self.baseline
        return f"{self.baseline} of {self.baseline_model_name or self.baseline_model}"

    @property
    def repeats_text(self) -> bool:
        """Whether the baseline is forced to the text of the first decoder."""
        return self.baseline == "plain" and self.baseline_model is None

    @property
    def subject(self) -> str:
        """What is measured, in words for a reader."""
        if self.count_only:
            return "the paper's schedule, counted without a model"
        if self.random_weights is not None:
            return f"random weights of {self.random_weights}"
        return self.model_name

    def as_facts(self) -> dict[str, str]:
        """Return what has to be the same when a run goes on."""
        facts = self.model_dump(
            mode="json", exclude={"limit", "questions", "model", "baseline_model"}
        )
        return {name: str(value) for name, value in facts.items()}


def check_settings(settings: SpeedSettings) -> None:
    """Raise EvaluationError, naming the options, for combinations that are refused."""
    named = [("--decoders", name) for name in settings.decoders]
    for option, name in [*named, ("--against", settings.baseline)]:
        if name is not None and name not in DECODERS:
            raise EvaluationError(f"{option} {name!r} is none of {', '.join(DECODERS)}")
    if len({*settings.decoders, settings.baseline_name}) <= len(settings.decoders):
        raise EvaluationError("--decoders and --against name the same decoder twice")
    if settings.baseline_model is not None:
        if settings.baseline not in ("plain", "vanilla_apar"):
            raise EvaluationError(
                "--against-model needs --against plain or vanilla_apar, not "
                f"{settings.baseline or 'none'}"
            )
        if not settings.runs_checkpoint:
            raise EvaluationError("--against-model is compared with a checkpoint: give --model")
    for option, wanted in (
        ("--count-only", settings.count_only),
        ("--random-weights", settings.random_weights is not None),
    ):
        if wanted and not settings.replay:
            raise EvaluationError(f"{option} needs answers to --replay")
    if settings.count_only and settings.random_weights is not None:
        raise EvaluationError("--count-only runs no model: leave --random-weights out")
    if settings.tokenizer is not None and settings.runs_checkpoint:
        raise EvaluationError("--tokenizer is the checkpoint's own: leave it out")
    heads_needed = "medusa_apar" in (*settings.decoders, settings.baseline)
    if heads_needed and not settings.count_only and settings.medusa_heads is None:
        raise EvaluationError("medusa_apar needs --medusa-heads FOLDER")
    for path in settings.replay:
        if not path.is_file():
            raise EvaluationError(f"--replay {path}: no such file")
