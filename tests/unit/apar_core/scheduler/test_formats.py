"""Formats whose parents continue, in vLLM's scheduler with a scripted model.

The scripted engine checks that each position of a thread's KV cache was computed from exactly the
tokens that the thread has read.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apar_core.fork_parameters import ForkParameters
from tests.fakes.examples import num_examples
from tests.fakes.scripted_engine import (
    CHILD,
    END,
    FORK,
    EngineShape,
    Script,
    ScriptedEngine,
    fork_parameters,
    merged,
)

PROMPT = list(range(100, 110))
# Layouts 10 11, 12 13 and 14, with the contents 20..25, 30 31 and nothing.
SCRIPT = {
    "": [10, 11, FORK, 12, 13, FORK, 14, FORK, END],
    "0": [20, 21, 22, 23, 24, 25, END],
    "1": [30, 31, END],
    "2": [END],
}
HPD = replace(fork_parameters(), cut_tokens=1, children_fork=False, replacement_ids=(CHILD,))
PADOC = replace(
    fork_parameters(), seed_ids=(), banned_ids=(), children_fork=False, replacement_ids=(FORK,)
)
# A made-up format with a long seed that is partly text.
LONG_SEED = replace(
    fork_parameters(),
    seed_ids=(90, CHILD, 91, 92, 93, 94),
    cut_tokens=1,
    children_fork=False,
    replacement_ids=(95, 96),
)
FORMATS = {"HPD-Parsing": HPD, "PaDoc": PADOC, "long seed": LONG_SEED, "APAR": fork_parameters()}


def client_text(script: Script, in_place_of_fork: Sequence[int]) -> list[int]:
    """Return what HPD-Parsing's client makes of a main sequence and its children, in order."""
    text: list[int] = []
    child = 0
    for token_id in script[""][:-1]:
        if token_id == FORK:
            text += [*in_place_of_fork, *script[str(child)][:-1]]
            child += 1
        else:
            text.append(token_id)
    return text


def contexts(script: Script, parameters: ForkParameters) -> dict[str, list[int]]:
    """Return what each child reads before its own tokens, by its engine request id."""
    forks = [index for index, token_id in enumerate(script[""]) if token_id == FORK]
    main = [*PROMPT, *script[""]]
    behind = 0 if parameters.cut_tokens else 1
    return {
        f"a~{child}": main[: len(PROMPT) + index + behind] + list(parameters.seed_ids)
        for child, index in enumerate(forks)
    }


def run(engine: ScriptedEngine) -> dict[str, list[int]]:
    """Run an engine to its end; return the prompt of each child."""
    prompts: dict[str, list[int]] = {}
    while engine.step():
        for request_id, request in engine.scheduler.requests.items():
            if "~" in request_id:
                prompts[request_id] = list(request.prompt_token_ids or ())
    return prompts


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_children_read_what_the_format_says_and_the_text_is_the_clients(
    model_dir: Path, name: str, run_ahead: bool
) -> None:
    parameters = FORMATS[name]
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=parameters)

    assert run(engine) == contexts(SCRIPT, parameters)

    assert engine.texts["a"] == client_text(SCRIPT, parameters.replacement_ids)
    assert engine.finish_reasons["a"] == "stop"
    engine.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("name", "computed"), [("HPD-Parsing", 1), ("PaDoc", 1), ("long seed", 6), ("APAR", 2)]
)
def test_a_fork_computes_its_seed_and_at_most_the_fork_token(
    model_dir: Path, name: str, computed: int
) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=FORMATS[name])

    engine.run()

    counters = engine.scheduler.block_sharing.counters
    assert (counters.forks, counters.fallbacks) == (3, 0)
    assert counters.computed_tokens == 3 * computed


@pytest.mark.parametrize("name", ["HPD-Parsing", "PaDoc", "long seed"])
def test_statistics_count_what_the_threads_read(model_dir: Path, name: str) -> None:
    parameters = FORMATS[name]
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=parameters)
    engine.run()

    statistics = engine.threads["a"].statistics(len(PROMPT))

    prefixes = {"": PROMPT, **{k[2:]: v for k, v in contexts(SCRIPT, parameters).items()}}
    attended = sum(len(prefixes[key]) + i for key in SCRIPT for i in range(len(SCRIPT[key])))
    assert statistics.attended_tokens == attended
    assert statistics.text_tokens == 5 + 6 + 2
    assert statistics.control_tokens == 3 * (1 + len(parameters.seed_ids)) + 4
    assert (statistics.threads, statistics.decode_steps) == (4, 3 + len(SCRIPT["0"]))


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 13])
def test_replaced_fork_tokens_do_not_count_as_generated(model_dir: Path, max_tokens: int) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=HPD, max_tokens=max_tokens)

    engine.run()

    text = [token_id for token_id in engine.texts["a"] if token_id != CHILD]
    assert len(text) == max_tokens
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("name", ["HPD-Parsing", "PaDoc", "long seed"])
def test_another_engine_continues_from_any_step(model_dir: Path, name: str) -> None:
    parameters = FORMATS[name]
    for steps in range(9):
        lost = ScriptedEngine(EngineShape(), model_dir)
        lost.add("a", PROMPT, SCRIPT, parameters=parameters)
        for _ in range(steps):
            lost.step()
        journal = merged(lost.followers["a"].take_journal())
        engine = ScriptedEngine(EngineShape(), model_dir)
        engine.add("a", PROMPT, SCRIPT, parameters=parameters, journal=journal)

        engine.run()

        assert engine.texts["a"] == client_text(SCRIPT, parameters.replacement_ids), steps
        engine.assert_nothing_is_left()


@settings(
    max_examples=num_examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=st.builds(
        EngineShape,
        num_blocks=st.integers(30, 90),
        block_size=st.sampled_from([4, 16]),
        max_num_seqs=st.integers(1, 12),
        max_num_batched_tokens=st.integers(13, 48),
        run_ahead=st.booleans(),
    ),
    wanted=st.lists(
        st.tuples(
            st.sampled_from(sorted(FORMATS)),
            st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_any_schedule_gives_the_clients_text(
    model_dir: Path, shape: EngineShape, wanted: list[tuple[str, list[tuple[int, int]], int]]
) -> None:
    engine = ScriptedEngine(shape, model_dir)
    expected: dict[str, list[int]] = {}
    for number, (name, regions, max_threads) in enumerate(wanted):
        fresh = iter(range(200, 900))
        script: dict[str, list[int]] = {"": []}
        for region, (layout, content) in enumerate(regions):
            script[""] += [*(next(fresh) for _ in range(layout)), FORK]
            script[str(region)] = [*(next(fresh) for _ in range(content)), END]
        script[""].append(END)
        parameters = replace(FORMATS[name], max_threads=max_threads)
        request_id = f"r{number}"
        engine.add(request_id, PROMPT, script, parameters=parameters, arrival_time=float(number))
        expected[request_id] = client_text(script, parameters.replacement_ids)

    engine.run()

    assert engine.texts == expected
    engine.assert_nothing_is_left()
