"""Threads that wait for their children, in vLLM's real scheduler with a scripted model."""

from pathlib import Path

import pytest

from apar_core.formats.shipped_formats import PARALLEL_R1, THREADWEAVER
from tests.fakes.block_scripts import END, NESTED, Client, block_parameters, tokens
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine

PROMPT = tokens("Question")
OUTLINES = "<Parallel><Outlines><Outline> 1: x</Outline><Outline> 2: y</Outline></Outlines>"
SCRIPT = {
    "": tokens("ab" + OUTLINES + "cd</Parallel>ef", ends=True),
    "0": tokens(" first</Thread>"),
    "1": tokens(" second one</Thread>"),
}
TEXT = (
    "ab" + OUTLINES + "\n<Thread>\n1: first</Thread><Thread>\n2: second one</Thread>\n"
    "cd</Parallel>ef"
)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_parent_continues_behind_the_joined_text(model_dir: Path, run_ahead: bool) -> None:
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER))

    engine.run()

    assert engine.texts["a"] == tokens(TEXT)
    assert engine.finish_reasons["a"] == "stop"
    engine.assert_nothing_is_left()
