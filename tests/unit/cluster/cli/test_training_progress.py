"""How training commands show their steps."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer
from rich.console import Console

from apar_core.errors import TrainingError
from apar_core.offline.training.tree_trainer import StepReport
from cluster.cli.training_progress import StepLines, clear_training_errors, step_progress


def report(step: int, validation: float | None = None) -> StepReport:
    return StepReport(
        step,
        100,
        1.5,
        num_targets=600,
        num_trees=4,
        seconds=2.0,
        padding_share=0.125,
        validation_loss=validation,
    )


def console() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False)


def text_of(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_the_first_the_last_and_validated_steps_always_get_a_line() -> None:
    target = console()
    lines = StepLines(target, interval_s=1000)

    for step in (1, 2, 3, 99, 100):
        lines.show(report(step, validation=0.25 if step == 3 else None))

    shown = text_of(target).splitlines()
    assert [line.split()[1] for line in shown] == ["1/100", "3/100", "100/100"]
    assert shown[0].startswith("step 1/100  loss 1.500  300 tokens/s  2.0 trees/s  padding 12.5%")
    assert "validation 0.250" in shown[1]


def test_other_steps_get_one_when_some_time_has_passed() -> None:
    target = console()
    lines = StepLines(target, interval_s=0)

    for step in (1, 2, 3):
        lines.show(report(step))

    assert len(text_of(target).splitlines()) == 3


def test_a_terminal_gets_a_bar() -> None:
    target = Console(file=io.StringIO(), width=120, force_terminal=True)

    with step_progress(target, "training", 100) as show:
        show(report(7))

    assert "7/100" in text_of(target)
    assert "loss 1.500" in text_of(target)


def test_an_error_of_ours_is_one_line_and_exit_code_1() -> None:
    target = console()

    with pytest.raises(typer.Exit) as caught, clear_training_errors(target):
        raise TrainingError("no model to train in 'x'")

    assert caught.value.exit_code == 1
    assert text_of(target) == "error: no model to train in 'x'\n"


def test_whoever_interrupts_a_run_is_told_how_it_goes_on(tmp_path: Path) -> None:
    def shown(out: Path | None) -> str:
        target = console()
        with pytest.raises(KeyboardInterrupt), clear_training_errors(target, resumable=out):
            raise KeyboardInterrupt
        return text_of(target)

    assert shown(None) == ""
    assert shown(tmp_path) == f"interrupted: no checkpoint yet in {tmp_path}\n"
    (tmp_path / "checkpoints" / "checkpoint-4").mkdir(parents=True)
    assert shown(tmp_path).startswith("interrupted: --resume goes on from the last checkpoint in ")
