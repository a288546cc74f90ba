"""Threads that wait for their children, in vLLM's real scheduler with a scripted model."""

from pathlib import Path

import pytest
from vllm.v1.core.sched.interface import PauseState

from apar_core.formats.shipped_formats import APR, PARALLEL_R1, THREADWEAVER
from apar_core.scheduler.core_state import core_state
from tests.fakes.block_scripts import NESTED, Client, Script, block_parameters, tokens
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine, merged

PROMPT = tokens("Question")
OUTLINES = "<Parallel><Outlines><Outline> 1: x</Outline><Outline> 2: y</Outline></Outlines>"
SCRIPT = {
    "": tokens("ab" + OUTLINES + "cd</Parallel>ef", ends=True),
    "0": tokens(" first</Thread>"),
    "1": tokens(" second one</Thread>"),
}
JOINED = "\n<Thread>\n1: first</Thread><Thread>\n2: second one</Thread>\n"
TEXT = "ab" + OUTLINES + JOINED + "cd</Parallel>ef"


def run(
    model_dir: Path, script: Script, shape: EngineShape | None = None, **limits: int
) -> ScriptedEngine:
    engine = ScriptedEngine(shape or EngineShape(), model_dir)
    max_tokens = limits.pop("max_tokens", 200)
    parameters = block_parameters(THREADWEAVER, **limits)
    engine.add("a", PROMPT, script, max_tokens=max_tokens, parameters=parameters)
    engine.run()
    engine.assert_nothing_is_left()
    return engine


@pytest.mark.parametrize("run_ahead", [False, True])
def test_parent_continues_behind_the_joined_text(model_dir: Path, run_ahead: bool) -> None:
    engine = run(model_dir, SCRIPT, EngineShape(run_ahead=run_ahead))

    assert engine.texts["a"] == tokens(TEXT)
    assert engine.finish_reasons["a"] == "stop"


def test_blocks_with_the_same_tokens_are_reused_at_a_join(model_dir: Path) -> None:
    engine = run(model_dir, SCRIPT)

    counters = engine.scheduler.block_sharing.join_counters
    # Prompt, parent and first child up to its last token, which no step has computed yet.
    context = len(PROMPT) + len(tokens("ab" + OUTLINES))
    same = context + len(tokens("\n<Thread>\n1: first</Thread>")) - 1
    assert counters.joins == 1
    assert counters.shared_tokens == same
    assert counters.computed_tokens == context + len(tokens(JOINED)) - same
    # Each child reads its seed, and the trigger that its parent had just sampled.
    forks = engine.scheduler.block_sharing.counters
    assert (forks.forks, forks.fallbacks) == (2, 0)
    assert forks.computed_tokens == 2 * (len(tokens("\n<Thread>\n1:")) + 1)


def test_statistics_are_those_of_the_schedule(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(max_num_batched_tokens=512), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER))

    steps = engine.run()

    statistics = engine.threads["a"].statistics(len(PROMPT))
    client = Client(THREADWEAVER, SCRIPT)
    client.answer(PROMPT)
    # One more step tells the workers who has finished.
    assert statistics.decode_steps == steps - 1
    assert statistics.attended_tokens == sum(
        len(prompt) + index
        for _, prompt, generated in client.contexts
        for index in range(len(generated))
    )
    assert (statistics.threads, statistics.joins) == (3, 1)
    assert statistics.text_tokens == len(tokens(TEXT))
    assert statistics.sequential_steps == len(tokens(TEXT)) + 1
    assert statistics.forced_tokens == len(tokens("\n<Thread>\n1:<Thread>\n2:\n"))
    assert statistics.recomputed_tokens == len(SCRIPT["1"])
    # Right before the end, everything is on the root's path, but its last two tokens.
    assert statistics.max_cached_tokens == len(PROMPT) + len(tokens(TEXT))


@pytest.mark.parametrize("steps", [30, 40, 45, 50, 55])
def test_a_trigger_in_a_child_is_text_also_where_another_engine_continues(
    model_dir: Path, steps: int
) -> None:
    script = {**SCRIPT, "0": tokens(f" a {OUTLINES} b</Thread>")}
    lost, other = (ScriptedEngine(EngineShape(), model_dir) for _ in range(2))
    parameters = block_parameters(THREADWEAVER)
    lost.add("a", PROMPT, script, max_tokens=400, parameters=parameters)
    for _ in range(steps):
        lost.step()
    journal = merged(lost.followers["a"].take_journal())
    assert len(journal) == 3

    other.add("a", PROMPT, script, max_tokens=400, parameters=parameters, journal=journal)
    other.run()

    assert other.texts["a"] == Client(THREADWEAVER, script).answer(PROMPT)
    other.assert_nothing_is_left()


def test_a_trigger_without_outlines_is_text(model_dir: Path) -> None:
    text = "a<Parallel><Outlines>nothing</Outlines>b</Thread>c"

    engine = run(model_dir, {"": tokens(text, ends=True)})

    assert engine.texts["a"] == tokens(text)
    assert engine.finish_reasons["a"] == "stop"


def test_outlines_of_the_prompt_open_nothing(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    script = {"": tokens("</Outlines>b", ends=True)}
    engine.add("a", tokens(OUTLINES[:-11]), script, parameters=block_parameters(THREADWEAVER))

    engine.run()

    assert engine.texts["a"] == tokens("</Outlines>b")


def test_paths_of_a_fixed_number_get_a_summary(model_dir: Path) -> None:
    script = {
        "": tokens("a<Parallel>b</Summary>c", ends=True),
        "0": tokens("x</Path>"),
        "1": tokens("yz", ends=True),
    }
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, script, parameters=block_parameters(PARALLEL_R1))

    engine.run()

    text = "a<Parallel><Path>x</Path><Path>yz</Path></Parallel>\n<Summary>b</Summary>c"
    assert engine.texts["a"] == tokens(text)
    engine.assert_nothing_is_left()


WRITTEN = "Moving to Node #0\nCurrent State: 8:[5, 3], Operations: []\nThinking\n"
CALL = (
    "<Calling Sub Searches>\n<Start Sub Search 0 at level 1> Moving to Node #0\n"
    "<Start Sub Search 1 at level 1> Moving to Node #0\n<End Calling Sub Searches>"
)
MESSAGE = "Moving to Node #0\nCurrent State: 8:[5, 3], Operations: []"
SEARCHES = {
    "": tokens(WRITTEN + CALL + "done", ends=True),
    "0": tokens("\nGoal Reached\n5+3\nGoal Reached", ends=True),
    "1": tokens("\nnothing", ends=True),
}
RESULTS = (
    "<Sub Searches>\n<Goal Reached in Sub Search 0 at level 1 at Node #0>\n5+3\nGoal Reached\n"
    "<No Solution in Sub Search 1 at level 1 at Node #0>\n<End Sub Searches>\n"
)
SHAPE = EngineShape(max_model_len=1000, num_blocks=600)


@pytest.mark.parametrize("steps", [None, 50, 190, 215, 235, 245, 250])
def test_results_replace_the_call_of_a_search(model_dir: Path, steps: int | None) -> None:
    engine = ScriptedEngine(SHAPE, model_dir)
    parameters = block_parameters(APR)
    engine.add("a", PROMPT, SEARCHES, max_tokens=900, parameters=parameters)
    if steps is not None:
        # Another engine continues.
        for _ in range(steps):
            assert engine.step()
        journal = merged(engine.followers["a"].take_journal())
        engine = ScriptedEngine(SHAPE, model_dir)
        engine.add("a", PROMPT, SEARCHES, max_tokens=900, parameters=parameters, journal=journal)

    engine.run()

    children = "\nGoal Reached\n5+3\nGoal Reached" + "\nnothing"
    assert engine.texts["a"] == tokens(WRITTEN + CALL + children + RESULTS + "done")
    assert engine.finish_reasons["a"] == "stop"
    context = [*PROMPT, *tokens(WRITTEN + RESULTS)]
    assert any(prompt[: len(context)] == context for prompt in engine.prompts.values())
    if steps is None:
        assert engine.prompts["a~0", 0] == engine.prompts["a~1", 0] == tokens(MESSAGE)
    engine.assert_nothing_is_left()


def test_an_unclosed_thread_ends_the_answer_where_the_format_says_so(model_dir: Path) -> None:
    engine = run(model_dir, {**SCRIPT, "1": tokens(" second", ends=True)})

    joined = "\n<Thread>\n1: first</Thread><Thread>\n2: second</Thread>"
    assert engine.texts["a"] == tokens("ab" + OUTLINES + joined)
    assert engine.finish_reasons["a"] == "stop"


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_block_without_room_for_its_children_is_joined_empty(
    model_dir: Path, run_ahead: bool
) -> None:
    shape = EngineShape(run_ahead=run_ahead)
    parameters = block_parameters(NESTED, max_forks=1)
    script = {"": SCRIPT[""][:-1] + tokens("2" + OUTLINES + "gh", ends=True), "0": SCRIPT["0"]}
    engine = ScriptedEngine(shape, model_dir)
    engine.add("a", PROMPT, script, parameters=parameters)

    engine.run()

    # One child may open: the others have no text, and the second block is joined at once.
    first = "\n<Thread>\n1: first</Thread><Thread>\n2:</Thread>\n"
    second = "\n<Thread>\n1:</Thread><Thread>\n2:</Thread>\n"
    text = "ab" + OUTLINES + first + "cd</Parallel>ef2" + OUTLINES + second + "gh"
    assert engine.texts["a"] == tokens(text)
    assert engine.finish_reasons["a"] == "length"
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("max_tokens", [1, 20, 40, 70, 73, 74, 80, 95, 97, 98, 103, 110, 111])
def test_the_budget_counts_what_threads_generate(model_dir: Path, max_tokens: int) -> None:
    engine = run(model_dir, SCRIPT, max_tokens=max_tokens)

    generated = sum(map(len, SCRIPT.values())) - 1
    records = engine.threads["a"].tree.threads.values()
    assert sum(each.num_generated_items for each in records) == min(max_tokens, generated)
    assert engine.finish_reasons["a"] == ("stop" if max_tokens > generated else "length")


def test_a_full_context_ends_the_answer_at_the_join(model_dir: Path) -> None:
    context = len(PROMPT) + len(tokens("ab" + OUTLINES + JOINED))

    engine = run(model_dir, SCRIPT, EngineShape(max_model_len=context))

    assert engine.texts["a"] == tokens("ab" + OUTLINES + JOINED[:-1])
    assert engine.finish_reasons["a"] == "length"


def test_a_continuation_takes_the_place_of_its_last_child(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER, max_threads=1))

    while engine.step():
        assert len(engine.scheduler.requests) <= 1

    assert engine.texts["a"] == tokens(TEXT)
    engine.assert_nothing_is_left()


def test_a_waiting_parent_keeps_its_request_alive_and_counts_as_no_thread(
    model_dir: Path,
) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER))
    while not engine.scheduler.threads.groups[0].num_waiting:
        engine.step()

    state = core_state(engine.scheduler)

    assert (state.requests, state.threads, state.waiting_parents) == (1, 2, 1)
    engine.abort("a")
    engine.run()
    engine.assert_nothing_is_left()


def test_held_blocks_are_given_up_where_memory_is_short(model_dir: Path) -> None:
    children = {str(n): tokens("x" * 60 + "</Thread>") for n in range(4)}
    outlines = "".join(f"<Outline>{n}:</Outline>" for n in range(1, 5))
    block = f"<Parallel><Outlines>{outlines}</Outlines>"
    script = {"": tokens(block + "end", ends=True), **children}
    # The joined text needs 83 blocks.
    shape = EngineShape(num_blocks=86, max_model_len=340)
    engine = ScriptedEngine(shape, model_dir)
    for name in ("a", "b", "c"):
        parameters = block_parameters(THREADWEAVER)
        engine.add(name, PROMPT, script, max_tokens=330, parameters=parameters)

    engine.run()

    expected = Client(THREADWEAVER, script).answer(PROMPT)
    assert [engine.texts[name] for name in ("a", "b", "c")] == [expected] * 3
    engine.assert_nothing_is_left()


def test_a_pause_for_new_requests_lets_a_block_end(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER))
    for _ in range(5):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add("b", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER), arrival_time=1.0)

    while engine.scheduler.get_num_unfinished_requests():
        engine.step()

    assert engine.texts["a"] == tokens(TEXT)
    assert not engine.texts["b"]


def test_a_failed_child_ends_its_request(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER))
    while not (threads := engine.scheduler.threads.groups) or "a~1" not in threads[0].live:
        engine.step()
    engine.step()

    engine.lose_last_block("a~1")
    engine.run()

    assert engine.finish_reasons["a"] == "error"
    engine.assert_nothing_is_left()


def test_a_reset_of_the_prefix_cache_costs_only_computation(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=block_parameters(THREADWEAVER))
    for _ in range(45):
        engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    engine.run()

    assert engine.texts["a"] == tokens(TEXT)
    engine.assert_nothing_is_left()
