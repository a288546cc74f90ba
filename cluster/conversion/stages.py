"""The stages of a conversion, each a command that can be run by itself."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from apar_core.errors import AparError
from apar_core.whole_files import replace_file

CHATS, DATA, MODEL, EVALUATION = "chats", "data", "model", "evaluation"
"""Folders of the stages inside that of the conversion."""
RECIPE_FILE = "recipe.yaml"
_RECORD_FILE = "stages.json"
_ENDING_S = 20.0
"""Time in which an interrupted command may write what it has."""


class ConversionSettings(BaseModel):
    """Inputs of a conversion; an interrupted one continues with the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    parallel_format: Literal["apar", "threadweaver"] = "apar"
    chats: tuple[Path, ...] = ()
    prompts: Path | None = None
    questions: PositiveInt | None = None
    hold_out: PositiveInt = 200
    max_tokens: PositiveInt = 512
    unordered_lists: bool = False
    context_length: PositiveInt = 2048
    chat_template: Path | None = None
    evaluated: PositiveInt = 100
    seed: int = 0

    def facts(self) -> dict[str, str]:
        """Return what must not change when the conversion is continued."""
        # Conversions that began before this option had none.
        left_out = {"evaluated"} if self.unordered_lists else {"evaluated", "unordered_lists"}
        return {name: str(value) for name, value in self.model_dump(exclude=left_out).items()}


class Stage(BaseModel):
    """A command of a conversion, without `apar`; `launcher` starts it on several GPUs."""

    model_config = ConfigDict(frozen=True)

    name: str
    title: str
    arguments: tuple[str, ...]
    launcher: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The command as a user types it."""
        return shlex.join([*self.launcher, "apar", *self.arguments])

    def command(self, apar: Sequence[str]) -> list[str]:
        """Return the command in this environment, where `apar` starts the command line."""
        if self.launcher:
            # Takes a program to run, not a module.
            program = str(Path(sys.executable).with_name("apar"))
            launcher = [sys.executable, "-m", "accelerate.commands.launch", *self.launcher[2:]]
            return [*launcher, program, *self.arguments]
        return [*apar, *self.arguments]


class StageRecord(BaseModel):
    """Seconds that a stage has taken, all its runs together, and whether it has ended."""

    seconds: NonNegativeFloat = 0.0
    is_done: bool = False


class StageFailedError(AparError):
    """A command of a conversion ended with an error, which it has printed."""


def planned_stages(
    settings: ConversionSettings, out: Path, *, num_gpus: int = 0
) -> tuple[Stage, ...]:
    """Return the stages of a conversion in `out`, in order."""
    model, seed = settings.model, ("--seed", str(settings.seed))
    template: tuple[str, ...] = ()
    if settings.chat_template is not None:
        template = ("--chat-template", str(settings.chat_template))
    chats = settings.chats or (out / CHATS / "chats.jsonl",)
    rules: tuple[str, ...] = ("--points-without-colon",)
    if settings.unordered_lists:
        rules += ("--unordered-lists",)
    stages = []
    if not settings.chats:
        asked: list[str] = []
        if settings.questions is not None:
            asked += ["--questions", str(settings.questions)]
        if settings.prompts is not None:
            asked += ["--prompts", str(settings.prompts)]
        arguments = (
            # Without second turns, the model would seldom fork in any but the first.
            *("data", "generate", "--model", model, *asked, "--follow-ups", "0.3"),
            *("--max-tokens", str(settings.max_tokens), *template, *seed),
            *("--out", str(out / CHATS)),
        )
        stages.append(Stage(name="generate", title="questions and answers", arguments=arguments))
    # All examples are kept: the recipe draws among them.
    prepared = (
        *("data", "prepare", *map(str, chats), "--model", model),
        # The evaluation also asks what should not fork.
        *("--hold-out", str(settings.hold_out), "--hold-out-mixed"),
        *("--context-length", str(settings.context_length)),
        *("--structured", "0", "--unstructured", "0", "--overwrite", *template, *seed),
        *("--format", settings.parallel_format, *rules),
        *("--out", str(out / DATA)),
    )
    trained = (
        *("train", "--model", model, "--data", str(out / DATA)),
        *("--recipe", str(out / RECIPE_FILE), "--format", settings.parallel_format, *template),
        *("--out", str(out / MODEL)),
    )
    evaluated = (
        *("evaluate", "forks", "--model", str(out / MODEL), "--base", model),
        *("--prompts", str(out / DATA / "held_out.jsonl"), "--answers", str(settings.evaluated)),
        # As the answers were written: greedy ones of the base model are those that it likes best.
        *("--temperature", "0.7", "--max-tokens", str(settings.max_tokens), *seed),
        *(*rules, "--out", str(out / EVALUATION)),
    )
    launcher = (
        ("accelerate", "launch", "--multi_gpu", "--num_processes", str(num_gpus), "--no_python")
        if num_gpus > 1
        else ()
    )
    stages += [
        Stage(name="prepare", title="training trees", arguments=prepared),
        Stage(name="train", title="adapter", arguments=trained, launcher=launcher),
        Stage(name="evaluate", title="evaluation", arguments=evaluated),
    ]
    return tuple(stages)


class StageRecords:
    """The records of a conversion's stages, in a file of its folder."""

    def __init__(self, out: Path) -> None:
        self._file = out / _RECORD_FILE
        self._records: dict[str, StageRecord] = {}
        if self._file.is_file():
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self._records = {name: StageRecord(**record) for name, record in content.items()}

    def __getitem__(self, name: str) -> StageRecord:
        return self._records.get(name, StageRecord())

    def add(self, name: str, seconds: float, *, is_done: bool) -> None:
        """Count a run of a stage."""
        total = self[name].seconds + seconds
        self._records[name] = StageRecord(seconds=total, is_done=is_done)
        content = {name: record.model_dump() for name, record in self._records.items()}
        replace_file(self._file, json.dumps(content, indent=1) + "\n")

    def by_stage(self) -> dict[str, float]:
        """Return how long each stage has taken (seconds)."""
        return {name: record.seconds for name, record in self._records.items()}

    @property
    def seconds(self) -> float:
        """Return the seconds that all stages have taken."""
        return sum(self.by_stage().values())


def run_stages(
    stages: Sequence[Stage],
    out: Path,
    announce: Callable[[int, Stage, StageRecord], None],
    apar: Sequence[str],
) -> StageRecords:
    """Run the stages that have not ended yet; return the records of all.

    `apar` starts the command line. Raises StageFailedError.
    """
    records = StageRecords(out)
    for number, stage in enumerate(stages, start=1):
        announce(number, stage, records[stage.name])
        if records[stage.name].is_done:
            continue
        started_s = time.monotonic()
        exit_code = 1
        try:
            exit_code = _run([*stage.command(apar), *_resumption(stage, out)])
        finally:
            records.add(stage.name, time.monotonic() - started_s, is_done=exit_code == 0)
        if exit_code != 0:
            raise StageFailedError(
                f"stage {stage.name} ended with exit code {exit_code}; the same `apar convert` "
                f"continues there, and so does the stage by itself: {stage.shown}"
            )
    return records


def _run(command: Sequence[str]) -> int:
    """Run a command and return its exit code. An interruption waits for it to end."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except BaseException:
            # A terminal has interrupted it as well.
            for end in (process.terminate, process.kill):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
                    break
                end()
            raise


def _resumption(stage: Stage, out: Path) -> Sequence[str]:
    """Return what continues an interrupted training; other stages find out by themselves."""
    checkpoints = (out / MODEL).glob("checkpoints/checkpoint-*/trainer_state.json")
    return ("--resume",) if stage.name == "train" and any(checkpoints) else ()
