"""Stages of a conversion: commands that exist, and resumption."""

import json
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from apar_core.models.apar_tiny import checkpoint_path
from cluster.cli.main import app
from cluster.conversion.stages import (
    DATA,
    MODEL,
    ConversionSettings,
    Stage,
    StageFailedError,
    StageRecord,
    planned_stages,
    run_stages,
)
from tests.fakes.apar_command import APAR

QUESTION = {"role": "user", "content": "How do I tune a guitar?"}
ANSWER = {
    "role": "assistant",
    "content": "1. Strings: turn the pegs.\n2. Frets: press them.\n3. Ears: listen to it.",
}


def settings(chats: Path) -> ConversionSettings:
    model = str(checkpoint_path())
    return ConversionSettings(model=model, chats=(chats,), hold_out=1, context_length=512)


def write_chats(file: Path) -> Path:
    chats = [
        {"messages": [{**QUESTION, "content": f"{QUESTION['content']} ({number})"}, ANSWER]}
        for number in range(4)
    ]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return file


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"questions": 10, "prompts": Path("prompts.txt")},
        {"chats": (Path("a.jsonl"), Path("b.jsonl"))},
        {"parallel_format": "threadweaver", "chat_template": Path("template.jinja")},
        {"unordered_lists": True},
    ],
)
def test_every_stage_is_a_command_with_these_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.txt", "a.jsonl", "b.jsonl", "template.jinja"):
        (tmp_path / name).touch()
    # What an earlier stage writes.
    (tmp_path / "out/chats").mkdir(parents=True)
    (tmp_path / "out/chats/chats.jsonl").touch()
    stages = planned_stages(
        ConversionSettings.model_validate({"model": "apar-tiny", **changed}), Path("out")
    )

    for stage in stages:
        command = typer.main.get_command(app)
        arguments = list(stage.arguments)
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        # Parses and checks the options, without running anything.
        command.make_context(stage.name, arguments)
        # Examples and evaluation follow the same rules.
        applies = "unordered_lists" in changed and stage.name in ("prepare", "evaluate")
        assert ("--unordered-lists" in stage.arguments) == applies

    names = [stage.name for stage in stages]
    assert names == (["generate"] if "chats" not in changed else []) + [
        "prepare", "train", "evaluate",
    ]  # fmt: skip


def test_training_on_several_gpus_has_a_process_for_each() -> None:
    plain, several = (
        planned_stages(ConversionSettings(model="apar-tiny"), Path("out"), num_gpus=number)
        for number in (1, 8)
    )

    assert [stage.launcher for stage in plain] == [(), (), (), ()]
    assert [bool(stage.launcher) for stage in several] == [False, False, True, False]
    assert "--num_processes 8" in several[2].shown
    assert several[2].command(APAR)[:3][1:] == ["-m", "accelerate.commands.launch"]


@pytest.mark.ci
def test_a_conversion_continues_with_the_stage_that_failed(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": []}\n')
    [prepare, *_] = planned_stages(settings(chats), tmp_path)
    announced: list[tuple[int, str, bool]] = []

    def announce(number: int, stage: Stage, record: StageRecord) -> None:
        announced.append((number, stage.name, record.is_done))

    with pytest.raises(StageFailedError, match="stage prepare ended with exit code 1"):
        run_stages([prepare], tmp_path, announce, APAR)
    write_chats(chats)
    first = run_stages([prepare], tmp_path, announce, APAR)["prepare"]
    again = run_stages([prepare], tmp_path, announce, APAR)["prepare"]

    assert announced == [(1, "prepare", False), (1, "prepare", False), (1, "prepare", True)]
    assert first.is_done
    assert again == first
    assert (tmp_path / DATA / "held_out.jsonl").is_file()


def test_an_interrupted_training_is_resumed(tmp_path: Path) -> None:
    # Options of the stage only; an unknown recipe ends it before anything is loaded.
    stage = planned_stages(settings(write_chats(tmp_path / "chats.jsonl")), tmp_path)[1]
    (tmp_path / MODEL / "checkpoints" / "checkpoint-25").mkdir(parents=True)
    (tmp_path / MODEL / "checkpoints" / "checkpoint-25" / "trainer_state.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("num_steps: 1")
    (tmp_path / DATA).mkdir()

    with pytest.raises(StageFailedError):
        run_stages([stage], tmp_path, lambda *_: None, APAR)

    assert not (tmp_path / MODEL / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/model"], "nowhere/model"),
        (["apar-tiny", "--chats", "CHATS", "--questions", "3"], "--chats has answers already"),
        (["apar-tiny", "--recipe", "nonsense"], "recipe 'nonsense' is neither a file nor one of"),
        (["apar-tiny", "--recipe", "medusa"], "num_heads"),
    ],
)
def test_what_cannot_be_converted_is_refused_at_once(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    chats = str(write_chats(tmp_path / "chats.jsonl"))
    given = [chats if each == "CHATS" else each for each in arguments]

    result = CliRunner().invoke(app, ["convert", *given, "--out", str(tmp_path / "out")])

    assert result.exit_code == 1
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_conversion_is_refused(tmp_path: Path) -> None:
    chats = str(write_chats(tmp_path / "chats.jsonl"))
    out = tmp_path / "out"
    out.mkdir()
    command = ["convert", "apar-tiny", "--chats", chats, "--out", str(out)]
    (out / "run.json").write_text(json.dumps({"model": "other"}))

    result = CliRunner().invoke(app, command)

    assert result.exit_code == 1
    assert "holds another run (model was 'other', is 'apar-tiny'" in result.output.replace(
        "\n", " "
    )
