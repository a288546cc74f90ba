"""The formats that docs/formats.md defines, in vLLM's scheduler with made-up answers."""

from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from apar_core.formats.parallel_format import ParallelFormat
from apar_core.formats.resolved_format import FormatSetting
from tests.fakes.block_scripts import block_parameters, tokens
from tests.fakes.quick_start import blocks
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine, write_model_config

PROMPT = tokens("Question?")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


def example(name: str) -> ParallelFormat:
    """The definition of this name on the page."""
    settings = [
        model["parallel_format"]
        for block in blocks("yaml", ("docs/formats.md",))
        for model in yaml.safe_load(block)["models"]
    ]
    [found] = [each for each in settings if isinstance(each, dict) and each.get("name") == name]
    adapter: TypeAdapter[ParallelFormat] = TypeAdapter(FormatSetting)
    return adapter.validate_python(found)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_sprints_planner_continues_after_its_executors(model_dir: Path, run_ahead: bool) -> None:
    plan = "Hm.<plans><plan_1>add</plan_1><plan_2>multiply</plan_2></plans>"
    script = {
        "": tokens(f"{plan}So it is 12.", ends=True),
        "0": tokens("3 + 4 = 7", ends=True),
        "1": tokens("3 * 4 = 12", ends=True),
    }
    engine = ScriptedEngine(EngineShape(max_model_len=1000, run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, script, parameters=block_parameters(example("sprint")))

    engine.run()

    joined = "\n<execution_1>\n3 + 4 = 7\n<execution_2>\n3 * 4 = 12\n"
    assert engine.texts["a"] == tokens(f"{plan}{joined}So it is 12.")
    assert engine.prompts["a~0", 0] == PROMPT + tokens(f"{plan}\n<execution_1>\n")
    assert engine.prompts["a~1", 0] == PROMPT + tokens(f"{plan}\n<execution_2>\n")
    assert PROMPT + tokens(plan + joined) in engine.prompts.values()
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_asyncthinks_organizer_reads_what_its_workers_return(
    model_dir: Path, run_ahead: bool
) -> None:
    first = "<FORK-1>Is 91 prime?</FORK-1>I try 97.<FORK-2>Is 97 < 100?</FORK-2>Wait.<JOIN-2>"
    second = "Good.<JOIN-1>"
    script = {
        "": tokens(f"{first}{second}No.", ends=True),
        "0": tokens("7 * 13 = 91.<RETURN>91 = 7 * 13</RETURN>", ends=True),
        "1": tokens("Yes.<RETURN>yes</RETURN>", ends=True),
    }
    shape = EngineShape(max_model_len=1000, run_ahead=run_ahead)
    engine = ScriptedEngine(shape, model_dir)
    engine.add("a", PROMPT, script, parameters=block_parameters(example("async-think")))

    engine.run()

    assert engine.prompts["a~0", 0] == tokens("Is 91 prime?\n")
    assert engine.prompts["a~1", 0] == tokens("Is 97 < 100?\n")
    context = PROMPT + tokens(f"{first}\nyes\n")
    assert context in engine.prompts.values()
    assert context + tokens(f"{second}\n91 = 7 * 13\n") in engine.prompts.values()
    texts = [first, "Yes.<RETURN>yes</RETURN>", "\nyes\n", second]
    texts += ["7 * 13 = 91.<RETURN>91 = 7 * 13</RETURN>", "\n91 = 7 * 13\n", "No."]
    assert engine.texts["a"] == tokens("".join(texts))
    assert engine.finish_reasons["a"] == "stop"
    engine.assert_nothing_is_left()
