"""Properties of forked decoding under any schedule.

Memory is short or not, prompts are chunked or not, steps are scheduled ahead or not, and requests
are aborted at any time.
"""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.examples import num_examples
from tests.fakes.scripted_engine import (
    END,
    FIRST_TEXT_ID,
    FORK,
    EngineShape,
    Script,
    ScriptedEngine,
    fork_parameters,
)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Script, list[int]]:
    """Draw the threads of a tree of depth up to three, and its restored text."""
    script: dict[str, list[int]] = {}
    next_id = iter(range(FIRST_TEXT_ID, 4000))

    def thread(path: str, depth: int) -> list[int]:
        tokens: list[int] = []
        text: list[int] = []
        num_forks = draw(st.integers(0, 3 - depth)) if depth < 3 else 0
        for ordinal in range(num_forks + 1):
            own = [next(next_id) for _ in range(draw(st.integers(0, 9)))]
            tokens += own
            text += own
            if ordinal < num_forks:
                tokens.append(FORK)
                text += thread(f"{path}.{ordinal}" if path else str(ordinal), depth + 1)
        script[path] = [*tokens, END]
        return text

    return script, thread("", 0)


block_sizes = st.sampled_from([4, 16, 32])
shapes = st.builds(
    EngineShape,
    # The longest path of a script with its prompt fits into 28 blocks of four tokens.
    num_blocks=st.integers(30, 90),
    block_size=block_sizes,
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.integers(13, 48),
    run_ahead=st.booleans(),
    # A step takes 1 ms.
    output_interval_s=st.sampled_from([0.0, 0.003, 0.05]),
)
requests = st.lists(
    st.tuples(scripts(), st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=5
)
# (script, text), prompt length, thread limit.
Wanted = tuple[tuple[Script, list[int]], int, int]


def engine_with(
    wanted: list[Wanted],
    shape: EngineShape,
    model_dir: Path,
    *,
    max_tokens: int = 200,
    max_forks: int = 100,
) -> ScriptedEngine:
    """Return an engine with requests r0, r1, ... in order of arrival."""
    engine = ScriptedEngine(shape, model_dir)
    for number, ((script, _), prompt_length, max_threads) in enumerate(wanted):
        engine.add(
            f"r{number}",
            [1000 + number] * prompt_length,
            script,
            max_tokens=max_tokens,
            parameters=fork_parameters(max_threads=max_threads, max_forks=max_forks),
            arrival_time=float(number),
        )
    return engine


any_schedule = settings(
    max_examples=num_examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@any_schedule
@given(shape=shapes, wanted=requests)
def test_every_text_is_complete_and_every_block_is_freed(
    model_dir: Path, shape: EngineShape, wanted: list[Wanted]
) -> None:
    engine = engine_with(wanted, shape, model_dir)

    engine.run()

    for number, ((_, text), _, _) in enumerate(wanted):
        assert engine.texts[f"r{number}"] == text
        assert engine.finish_reasons[f"r{number}"] == "stop"
    engine.assert_nothing_is_left()


@any_schedule
@given(
    num_blocks=st.integers(30, 60),
    max_num_seqs=st.integers(2, 12),
    wanted=requests,
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=4),
)
def test_no_block_is_freed_while_a_step_in_flight_writes_it(
    model_dir: Path,
    num_blocks: int,
    max_num_seqs: int,
    wanted: list[Wanted],
    aborts: list[tuple[int, int]],
) -> None:
    shape = EngineShape(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, run_ahead=True, defers_frees=True
    )
    engine = engine_with(wanted, shape, model_dir)
    for step in range(41):
        for at_step, number in aborts:
            if at_step == step:
                engine.abort(f"r{number}")
        engine.step()

    engine.run()

    engine.assert_nothing_is_left()


@any_schedule
@given(
    shape=shapes,
    wanted=requests,
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=4),
    max_tokens=st.integers(1, 60),
)
def test_aborts_and_budgets_leave_nothing_behind(
    model_dir: Path,
    shape: EngineShape,
    wanted: list[Wanted],
    aborts: list[tuple[int, int]],
    max_tokens: int,
) -> None:
    engine = engine_with(wanted, shape, model_dir, max_tokens=max_tokens, max_forks=5)
    for step in range(41):
        for at_step, number in aborts:
            if at_step == step:
                engine.abort(f"r{number}")
        engine.step()

    engine.run()

    for number, ((_, text), _, _) in enumerate(wanted):
        produced = engine.texts[f"r{number}"]
        remaining = iter(text)
        assert all(token_id in remaining for token_id in produced)
        assert len(produced) <= max_tokens
    engine.assert_nothing_is_left()
