"""Lists that are written in parallel, in vLLM's real scheduler with a scripted model."""

from pathlib import Path

import pytest

from apar_core.formats.parallel_format import ListItems, ParallelFormat
from apar_core.formats.shipped_formats import LISTS
from tests.fakes.block_scripts import TOKENIZER, Script, block_parameters, tokens
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine

PROMPT = tokens("Question")
SHAPE = EngineShape(max_model_len=1000, num_blocks=600)
FIRST = "Sure:\n\n1. Alpha: the first detail here.\n"
SCRIPT = {
    # The root, its probes after the items, and what it writes after the list.
    "": tokens(f"{FIRST}2. Beta:") + tokens("\n3. \n4. \nThat is all.", ends=True),
    "0": tokens(" second detail.\n3. "),
    "1": tokens(" Gamma:"),
    "1.0": tokens(" third detail.", ends=True),
    "1.1": tokens(" Delta:"),
    "1.1.0": tokens(" fourth detail.\n\nThat i"),
    "1.1.1": tokens(" Epsilon:"),
    "1.1.1.0": tokens(" never kept, as the list has ended before it, whatever it says.\n6. "),
    "1.1.1.1": tokens(" Zeta:"),
    "1.1.1.1.0": tokens(" not kept either, and long enough to be alive then.\n7. "),
    "1.1.1.1.1": tokens(" Eta:"),
    "1.1.1.1.1.0": tokens(" too far."),
    "1.1.1.1.1.1": tokens(" Theta:"),
    "1.1.1.1.1.1.0": tokens(" too far."),
    "1.1.1.1.1.1.1": tokens(" Iota", ends=True),
}
TEXT = (
    f"{FIRST}2. Beta: second detail.\n3. Gamma: third detail.\n4. Delta: fourth detail."
    "\nThat is all."
)


def lists_with(ahead: int) -> ParallelFormat:
    return LISTS.model_copy(update={"items": ListItems(ahead=ahead)})


def run(
    model_dir: Path, script: Script, shape: EngineShape = SHAPE, ahead: int = 4, **limits: int
) -> ScriptedEngine:
    engine = ScriptedEngine(shape, model_dir)
    max_tokens = limits.pop("max_tokens", 600)
    parameters = block_parameters(lists_with(ahead), **limits)
    engine.add("a", PROMPT, script, max_tokens=max_tokens, parameters=parameters)
    engine.run()
    engine.assert_nothing_is_left()
    return engine


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_details_are_written_in_parallel(model_dir: Path, ahead: int, run_ahead: bool) -> None:
    shape = EngineShape(max_model_len=1000, num_blocks=600, run_ahead=run_ahead)

    engine = run(model_dir, SCRIPT, shape, ahead=ahead)

    assert engine.threads["a"].tree.finished

    assert TOKENIZER.decode(engine.texts["a"]) == TEXT
    assert engine.finish_reasons["a"] == "stop"
    context = [*PROMPT, *tokens(FIRST)]
    assert engine.prompts["a~1~0", 0] == [*context, *tokens("3. Gamma:")]
    assert engine.prompts["a~1", 0] == [*context, *tokens("2. Beta:\n3.")]
    assert engine.prompts["a~1~1", 0] == [*context, *tokens("2. Beta:\n3. Gamma:\n4.")]
