"""Children that their parent joins one by one, in vLLM's real scheduler with a scripted model."""

from dataclasses import replace
from pathlib import Path

import pytest

from apar_core.formats.parallel_format import ParallelFormat
from tests.fakes.block_scripts import (
    MESSAGES,
    ON_DEMAND,
    RESULTS,
    WHOLE_TEXTS,
    Client,
    Script,
    block_parameters,
    tokens,
)
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine, merged

PROMPT = tokens("Question")
FORKS = "go<FORK-1>one</FORK-1>ab<FORK-2>two</FORK-2>cd"
ORGANIZER = {
    "": tokens(f"{FORKS}<JOIN-2>ef<JOIN-1>gh", ends=True),
    "0": tokens("long thoughts<RETURN>r1</RETURN>", ends=True),
    "1": tokens("<RETURN>r2</RETURN>", ends=True),
}
LARGE = EngineShape(max_model_len=1000, num_blocks=600)


def organize(
    model_dir: Path,
    script: Script,
    definition: ParallelFormat = RESULTS,
    shape: EngineShape = LARGE,
    **limits: int,
) -> ScriptedEngine:
    engine = ScriptedEngine(shape, model_dir)
    max_tokens = limits.pop("max_tokens", 900)
    parameters = block_parameters(definition, **limits)
    engine.add("a", PROMPT, script, max_tokens=max_tokens, parameters=parameters)
    engine.run()
    engine.assert_nothing_is_left()
    return engine


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("definition", ON_DEMAND, ids=lambda each: each.name)
def test_an_organizer_joins_its_workers_in_any_order(
    model_dir: Path, definition: ParallelFormat, run_ahead: bool
) -> None:
    engine = organize(model_dir, ORGANIZER, definition, replace(LARGE, run_ahead=run_ahead))

    assert engine.texts["a"] == Client(definition, ORGANIZER).answer(PROMPT)
    assert engine.finish_reasons["a"] == "stop"


def test_a_worker_begins_at_its_fork_and_its_organizer_goes_on(model_dir: Path) -> None:
    script = {**ORGANIZER, "0": tokens("x" * 90 + "<RETURN>r1</RETURN>", ends=True)}
    engine = ScriptedEngine(LARGE, model_dir)
    engine.add("a", PROMPT, script, max_tokens=900, parameters=block_parameters(RESULTS))

    running: list[set[str]] = []
    while engine.step():
        running.append(set(engine.scheduler.requests))

    forked = len(tokens("go<FORK-1>one</FORK-1>"))
    assert {"a", "a~0"} <= running[forked]
    both = [each for each in running if {"a", "a~0", "a~1"} <= each]
    assert len(both) > 5
    # The organizer waits for nobody but the second worker, who has ended long before the first.
    alone = [each for each in running if each == {"a~0"}]
    assert alone
    forks = engine.scheduler.block_sharing.counters
    assert (forks.forks, forks.fallbacks) == (2, 0)
    seeds = "\n(you are worker 1: one)\n\n(you are worker 2: two)\n"
    assert forks.computed_tokens == len(tokens(seeds)) + 2


def test_workers_that_nobody_joins_are_cancelled(model_dir: Path) -> None:
    script = {**ORGANIZER, "": tokens(f"{FORKS}<JOIN-2>ef", ends=True)}
    script["0"] = tokens("x" * 300, ends=True)

    engine = ScriptedEngine(LARGE, model_dir)
    engine.add("a", PROMPT, script, max_tokens=900, parameters=block_parameters(RESULTS))
    steps = engine.run()

    text = f"{FORKS}<JOIN-2><RETURN>r2</RETURN>\n2 says: r2\nef"
    assert engine.texts["a"] == tokens(text)
    assert engine.finish_reasons["a"] == "stop"
    assert steps < 200
    statistics = engine.threads["a"].statistics(len(PROMPT))
    assert 0 < statistics.discarded_tokens < 200
    assert statistics.text_tokens == len(tokens(text))
    engine.assert_nothing_is_left()


def test_joins_of_nothing_and_forks_of_a_busy_worker_are_text(model_dir: Path) -> None:
    text = "<JOIN-1>a<FORK-1>one</FORK-1>b<FORK-1>again</FORK-1><JOIN-1>c<JOIN-1>d"
    script = {"": tokens(text, ends=True), "0": tokens("<RETURN>r</RETURN>", ends=True)}

    engine = organize(model_dir, script)

    joined = "<JOIN-1>c".replace("c", "<RETURN>r</RETURN>\n1 says: r\nc")
    assert engine.texts["a"] == tokens(text.replace("<JOIN-1>c", joined))


def test_a_number_may_be_used_again_after_its_join(model_dir: Path) -> None:
    script = {
        "": tokens("<FORK-1>one</FORK-1><JOIN-1><FORK-1>two</FORK-1><JOIN-1>", ends=True),
        "0": tokens("<RETURN>r1</RETURN>", ends=True),
        "1": tokens("<RETURN>r2</RETURN>", ends=True),
    }

    engine = organize(model_dir, script, MESSAGES)

    assert engine.texts["a"] == tokens(
        "<FORK-1>one</FORK-1><JOIN-1><RETURN>r1</RETURN>\n1 says: r1\n"
        "<FORK-1>two</FORK-1><JOIN-1><RETURN>r2</RETURN>\n1 says: r2\n"
    )


def test_a_worker_that_may_not_start_returns_nothing(model_dir: Path) -> None:
    engine = organize(model_dir, ORGANIZER, max_forks=1)

    assert engine.texts["a"] == tokens(
        f"{FORKS}<JOIN-2>\n2 says nothing\nef<JOIN-1>long thoughts<RETURN>r1</RETURN>"
        "\n1 says: r1\ngh"
    )
    assert engine.finish_reasons["a"] == "length"


def test_one_thread_at_a_time_is_enough(model_dir: Path) -> None:
    engine = ScriptedEngine(LARGE, model_dir)
    parameters = block_parameters(RESULTS, max_threads=1)
    engine.add("a", PROMPT, ORGANIZER, max_tokens=900, parameters=parameters)

    while engine.step():
        assert len(engine.scheduler.requests) <= 1

    assert engine.texts["a"] == Client(RESULTS, ORGANIZER).answer(PROMPT)
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("max_tokens", [1, 25, 40, 50, 55, 60, 80, 105, 106, 110])
def test_the_budget_counts_organizer_and_workers(model_dir: Path, max_tokens: int) -> None:
    engine = organize(model_dir, ORGANIZER, max_tokens=max_tokens)

    generated = sum(map(len, ORGANIZER.values())) - 3
    records = engine.threads["a"].tree.threads.values()
    counted = sum(each.num_generated_items for each in records)
    discarded = engine.threads["a"].tree.discarded_tokens
    assert counted + discarded == min(max_tokens, generated)
    assert engine.finish_reasons["a"] == ("stop" if max_tokens > generated else "length")


@pytest.mark.parametrize("definition", ON_DEMAND, ids=lambda each: each.name)
def test_another_engine_continues_an_organizer_from_any_step(
    model_dir: Path, definition: ParallelFormat
) -> None:
    expected = Client(definition, ORGANIZER).answer(PROMPT)
    parameters = block_parameters(definition)
    for steps in range(1, 110, 3):
        lost, other = (ScriptedEngine(LARGE, model_dir) for _ in range(2))
        lost.add("a", PROMPT, ORGANIZER, max_tokens=900, parameters=parameters)
        for _ in range(steps):
            lost.step()
        journal = merged(lost.followers["a"].take_journal())

        other.add("a", PROMPT, ORGANIZER, max_tokens=900, parameters=parameters, journal=journal)
        other.run()

        assert other.texts["a"] == expected, steps
        assert other.finish_reasons["a"] == "stop"
        other.assert_nothing_is_left()


@pytest.mark.parametrize("definition", [RESULTS, WHOLE_TEXTS], ids=lambda each: each.name)
def test_statistics_of_an_organizer_are_those_of_the_schedule(
    model_dir: Path, definition: ParallelFormat
) -> None:
    shape = replace(LARGE, max_num_batched_tokens=512)
    engine = ScriptedEngine(shape, model_dir)
    engine.add("a", PROMPT, ORGANIZER, max_tokens=900, parameters=block_parameters(definition))

    steps = engine.run()

    statistics = engine.threads["a"].statistics(len(PROMPT))
    client = Client(definition, ORGANIZER)
    text = client.answer(PROMPT)
    # One more step tells the workers who has finished.
    assert statistics.decode_steps == steps - 1
    assert statistics.attended_tokens == sum(
        len(prompt) + index
        for _, prompt, generated in client.contexts
        for index in range(len(generated))
    )
    assert (statistics.threads, statistics.forks, statistics.joins) == (3, 2, 2)
    assert statistics.text_tokens == len(text)
    generated = sum(map(len, ORGANIZER.values())) - 3
    assert statistics.forced_tokens == len(text) - generated
