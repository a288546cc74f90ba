"""Properties of threads that wait for their children, under any schedule.

The reference is a client that resubmits requests, as the formats' own projects do it.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.block_scripts import (
    FORMATS,
    Client,
    Script,
    block_parameters,
    block_scripts,
    tokens,
)
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine, merged

PROMPT = tokens("A question?")
NAMES = st.sampled_from(sorted(FORMATS))

shapes = st.builds(
    EngineShape,
    num_blocks=st.integers(130, 300),
    block_size=st.sampled_from([4, 16]),
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.integers(13, 64),
    max_model_len=st.just(2000),
    run_ahead=st.booleans(),
    output_interval_s=st.sampled_from([0.0, 0.003, 0.05]),
)
few, many = (
    settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))
    for number in (4, 150)
)


@st.composite
def wanted(draw: st.DrawFn) -> tuple[str, Script, int]:
    """Draw a format's name, a script of it and a limit on threads."""
    name = draw(NAMES)
    return name, draw(block_scripts(FORMATS[name])), draw(st.integers(1, 6))


def engine_with(
    requests: list[tuple[str, Script, int]], shape: EngineShape, model_dir: Path, **limits: int
) -> ScriptedEngine:
    engine = ScriptedEngine(shape, model_dir)
    max_tokens = limits.pop("max_tokens", 1900)
    for number, (name, script, max_threads) in enumerate(requests):
        engine.add(
            f"r{number}",
            PROMPT,
            script,
            max_tokens=max_tokens,
            parameters=block_parameters(FORMATS[name], max_threads=max_threads, **limits),
            arrival_time=float(number),
        )
    return engine


def needed_tokens(name: str, script: Script) -> int:
    return max(len(p) + len(g) for _, p, g in client_of(name, script).contexts)


def client_of(name: str, script: Script) -> Client:
    client = Client(FORMATS[name], script)
    client.answer(PROMPT)
    return client


@few
@given(shape=shapes, requests=st.lists(wanted(), min_size=1, max_size=2))
def test_text_and_contexts_are_those_of_a_resubmitting_client(
    model_dir: Path, shape: EngineShape, requests: list[tuple[str, Script, int]]
) -> None:
    check_text_and_contexts(model_dir, shape, requests)


@pytest.mark.slow
@many
@given(shape=shapes, requests=st.lists(wanted(), min_size=1, max_size=3))
def test_many_texts_and_contexts_are_those_of_a_resubmitting_client(
    model_dir: Path, shape: EngineShape, requests: list[tuple[str, Script, int]]
) -> None:
    check_text_and_contexts(model_dir, shape, requests)


def check_text_and_contexts(
    model_dir: Path, shape: EngineShape, requests: list[tuple[str, Script, int]]
) -> None:
    fits = shape.num_blocks * shape.block_size - 8 * shape.block_size
    requests = [each for each in requests if needed_tokens(*each[:2]) < min(fits, 2000)]
    engine = engine_with(requests, shape, model_dir)

    engine.run(max_steps=20000)

    for number, (name, script, _) in enumerate(requests):
        client = Client(FORMATS[name], script)
        assert engine.texts[f"r{number}"] == client.answer(PROMPT)
        assert engine.finish_reasons[f"r{number}"] == "stop"
        contexts: dict[tuple[str, int], list[int]] = {}
        generated: dict[str, int] = {}
        for key, prompt, new in client.contexts:
            thread = f"r{number}" + "".join(f"~{part}" for part in key.split(".") if part)
            contexts[thread, generated.get(key, 0)] = prompt
            generated[key] = generated.get(key, 0) + len(new)
        used = {k: p for k, p in engine.prompts.items() if k[0].partition("~")[0] == f"r{number}"}
        assert all(contexts[each] == prompt for each, prompt in used.items())
        threads = {thread for thread, _ in contexts}
        # Workers that nobody joins may be cancelled before they begin.
        unjoined = {f"r{number}~{key}" for key in client.unjoined}
        assert threads - unjoined <= {thread for thread, _ in used} <= threads
    engine.assert_nothing_is_left()


@pytest.mark.slow
@many
@given(
    shape=shapes,
    requests=st.lists(wanted(), min_size=1, max_size=3),
    aborts=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 2)), max_size=3),
    max_tokens=st.integers(1, 150),
    max_forks=st.integers(1, 12),
)
def test_aborts_and_limits_leave_nothing_behind(
    model_dir: Path,
    shape: EngineShape,
    requests: list[tuple[str, Script, int]],
    aborts: list[tuple[int, int]],
    max_tokens: int,
    max_forks: int,
) -> None:
    requests = [each for each in requests if needed_tokens(*each[:2]) < 480]
    engine = engine_with(requests, shape, model_dir, max_tokens=max_tokens, max_forks=max_forks)
    for step in range(81):
        for at_step, number in aborts:
            if at_step == step and number < len(requests):
                engine.abort(f"r{number}")
        engine.step()

    engine.run(max_steps=20000)

    engine.assert_nothing_is_left()
    aborted = {f"r{number}" for _, number in aborts}
    for name in engine.threads.keys() - aborted:
        assert engine.threads[name].tree.finished
        record = engine.threads[name].tree.threads.values()
        assert sum(each.num_generated_items for each in record) <= max_tokens


@pytest.mark.slow
@many
@given(shape=shapes, request_=wanted(), steps=st.integers(1, 120), run_ahead=st.booleans())
def test_an_answer_continued_by_another_engine_is_the_same(
    model_dir: Path,
    shape: EngineShape,
    request_: tuple[str, Script, int],
    steps: int,
    run_ahead: bool,
) -> None:
    name, script, _ = request_
    if needed_tokens(name, script) > 480:
        return
    lost = engine_with([request_], shape, model_dir)
    for _ in range(steps):
        lost.step()
    journal = merged(lost.followers["r0"].take_journal())
    other = ScriptedEngine(EngineShape(max_model_len=2000, run_ahead=run_ahead), model_dir)

    other.add(
        "r0",
        PROMPT,
        script,
        max_tokens=1900,
        parameters=block_parameters(FORMATS[name], max_threads=request_[2]),
        journal=journal,
    )
    other.run(max_steps=20000)

    assert other.texts["r0"] == Client(FORMATS[name], script).answer(PROMPT)
    other.assert_nothing_is_left()
