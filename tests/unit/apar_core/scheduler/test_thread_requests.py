"""A run that is resumed on another engine at any step ends like the uninterrupted one."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams

from apar_core.engine.logits_processors import bad_words
from apar_core.engine.thread_outputs import TextToken
from apar_core.fork_parameters import EXTRA_ARG
from apar_core.journal import Journal, ThreadDelta
from apar_core.scheduler.thread_requests import build_child_request
from apar_core.tree.threads import thread_texts
from apar_core.vllm_names import Request, add_bad_words, bad_words_of
from tests.fakes.examples import num_examples
from tests.fakes.scripted_engine import (
    END,
    FORK,
    EngineShape,
    Script,
    ScriptedEngine,
    fork_parameters,
    merged,
)
from tests.unit.apar_core.scheduler.test_any_schedule import scripts, shapes

PROMPT = [1000] * 9
SCRIPT = {
    "": [10, 11, FORK, 12, 13, FORK, 14, END],
    "0": [20, 21, FORK, 22, 23, 24, 25, END],
    "0.0": [40, 41, 42, END],
    "1": [30, 31, END],
}
TEXT = [10, 11, 20, 21, 40, 41, 42, 22, 23, 24, 25, 12, 13, 30, 31, 14]


def run_with_cuts(
    script: Script,
    cuts: list[int],
    shape: EngineShape,
    model_dir: Path,
    *,
    max_tokens: int = 200,
    max_threads: int = 16,
    max_forks: int = 100,
    enabled: bool = True,
) -> ScriptedEngine:
    """Return the last engine of a request; each engine before it ran the given number of steps."""
    parameters = replace(
        fork_parameters(max_threads=max_threads, max_forks=max_forks), enabled=enabled
    )
    journal: Journal | None = None
    for cut in [*cuts, None]:
        engine = ScriptedEngine(shape, model_dir)
        engine.add(
            "r", PROMPT, script, max_tokens=max_tokens, parameters=parameters, journal=journal
        )
        if cut is None:
            engine.run()
            engine.assert_nothing_is_left()
        else:
            for _ in range(cut):
                engine.step()
            journal = merged([*(journal or ()), *engine.followers["r"].take_journal()])
    return engine


def generated(engine: ScriptedEngine) -> dict[str, list[int]]:
    """Return the tokens that each thread has generated on all engines."""
    texts = thread_texts(engine.threads["r"].tree)
    fork, end = TextToken(FORK, None), TextToken(END, None)
    return {
        str(thread): [token.token_id for token in text.generated(fork, end)]
        for thread, text in texts.items()
    }


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("max_threads", [1, 2, 16])
@pytest.mark.parametrize("cut", range(24))
def test_a_run_resumed_at_any_step_ends_like_the_uninterrupted_one(
    model_dir: Path, cut: int, max_threads: int, run_ahead: bool
) -> None:
    shape = EngineShape(run_ahead=run_ahead)

    engine = run_with_cuts(SCRIPT, [cut], shape, model_dir, max_threads=max_threads)

    assert engine.texts["r"] == TEXT
    assert engine.finish_reasons["r"] == "stop"


any_schedule = settings(
    max_examples=num_examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@any_schedule
@given(
    shape=shapes,
    wanted=scripts(),
    cuts=st.lists(st.integers(0, 25), max_size=3),
    max_threads=st.integers(1, 6),
)
def test_any_tree_survives_any_number_of_engines(
    model_dir: Path,
    shape: EngineShape,
    wanted: tuple[Script, list[int]],
    cuts: list[int],
    max_threads: int,
) -> None:
    script, text = wanted

    engine = run_with_cuts(script, cuts, shape, model_dir, max_threads=max_threads)

    assert engine.texts["r"] == text
    assert engine.finish_reasons["r"] == "stop"
    follower = engine.followers["r"]
    assert follower.generated_tokens == sum(len(tokens) for tokens in script.values())
    whole = run_with_cuts(script, [], shape, model_dir, max_threads=max_threads)
    assert generated(engine) == generated(whole)


@any_schedule
@given(
    shape=shapes,
    wanted=scripts(),
    cuts=st.lists(st.integers(0, 25), min_size=1, max_size=2),
    max_tokens=st.integers(1, 60),
    max_forks=st.integers(0, 4),
)
def test_the_budget_holds_across_engines(
    model_dir: Path,
    shape: EngineShape,
    wanted: tuple[Script, list[int]],
    cuts: list[int],
    max_tokens: int,
    max_forks: int,
) -> None:
    script, text = wanted

    engine = run_with_cuts(
        script, cuts, shape, model_dir, max_tokens=max_tokens, max_forks=max_forks
    )

    produced = engine.texts["r"]
    remaining = iter(text)
    assert all(token_id in remaining for token_id in produced)
    assert len(produced) <= max_tokens
    opened = [thread for thread, tokens in generated(engine).items() if tokens]
    assert len(opened) <= 1 + max_forks
    num_forks = len(script) - 1
    if num_forks <= max_forks:
        assert len(produced) == min(max_tokens, len(text))
        assert engine.finish_reasons["r"] == ("stop" if len(text) < max_tokens else "length")


@any_schedule
@given(shape=shapes, cut=st.integers(0, 25), abort_after=st.integers(0, 12))
def test_continued_request_that_is_aborted_leaves_nothing(
    model_dir: Path, shape: EngineShape, cut: int, abort_after: int
) -> None:
    first = ScriptedEngine(shape, model_dir)
    first.add("r", PROMPT, SCRIPT)
    for _ in range(cut):
        first.step()
    second = ScriptedEngine(shape, model_dir)
    second.add("r", PROMPT, SCRIPT, journal=merged(first.followers["r"].take_journal()))
    for _ in range(abort_after):
        second.step()

    second.abort("r")

    second.run()
    second.assert_nothing_is_left()


def test_nothing_is_generated_twice(model_dir: Path) -> None:
    first = ScriptedEngine(EngineShape(), model_dir)
    first.add("r", PROMPT, SCRIPT)
    for _ in range(9):
        first.step()
    journal = merged(first.followers["r"].take_journal())
    second = ScriptedEngine(EngineShape(), model_dir)
    second.add("r", PROMPT, SCRIPT, journal=journal)

    second.run()

    before = sum(len(delta.token_ids) for delta in journal)
    assert second.followers["r"].take_num_tokens() == sum(map(len, SCRIPT.values())) - before
    assert second.followers["r"].generated_tokens == sum(map(len, SCRIPT.values()))


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize("max_tokens", [5, 6, 7, 50])
def test_a_request_that_may_not_fork_continues_after_its_tokens(
    model_dir: Path, cut: int, max_tokens: int
) -> None:
    script = {"": [10, 11, 12, 13, 14, 15, END]}

    engine = run_with_cuts(
        script, [cut], EngineShape(), model_dir, max_tokens=max_tokens, enabled=False
    )

    assert engine.texts["r"] == [10, 11, 12, 13, 14, 15][:max_tokens]
    # Without forks, the end token is part of the output, as in vLLM.
    assert engine.finish_reasons["r"] == ("stop" if max_tokens > 6 else "length")


def test_finished_journal_needs_no_engine(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    journal = tuple(
        ThreadDelta(tuple(int(o) for o in path.split(".") if o), tuple(tokens), 0)
        for path, tokens in SCRIPT.items()
    )

    engine.add("r", PROMPT, SCRIPT, journal=journal)

    assert engine.texts["r"] == TEXT
    assert engine.finish_reasons["r"] == "stop"
    assert not engine.scheduler.has_requests()


def test_a_child_transfers_no_kv_of_its_own() -> None:
    transfers = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]},
        "ec_transfer_params": {"image": 1},
    }
    shared = {EXTRA_ARG: fork_parameters().to_extra_arg(), "client": "kept", **transfers}
    parent = Request(
        request_id="r",
        prompt_token_ids=[*PROMPT, FORK],
        sampling_params=SamplingParams(max_tokens=20, extra_args=shared),
        pooling_params=None,
    )

    child = build_child_request(
        parent,
        request_id="r~0",
        ordinal=0,
        fork_index=len(PROMPT),
        parameters=fork_parameters(),
        max_tokens=10,
    )

    assert child.kv_transfer_params is None
    assert child.sampling_params is not None
    assert child.sampling_params.extra_args == {
        EXTRA_ARG: fork_parameters().to_extra_arg() | {"thread_path": (0,)},
        "client": "kept",
    }
    # The root keeps them, for the connector's own end of the request.
    assert parent.kv_transfer_params == transfers["kv_transfer_params"]
    assert shared.items() >= transfers.items()


def test_a_child_that_may_not_fork_bans_it_as_a_bad_word() -> None:
    parameters = replace(fork_parameters(), children_fork=False)
    params = SamplingParams(max_tokens=20, extra_args={EXTRA_ARG: parameters.to_extra_arg()})
    add_bad_words(params, [[9, 8], *bad_words(parameters)])
    parent = Request("r", [*PROMPT, FORK], params, None)

    child = build_child_request(
        parent,
        request_id="r~0",
        ordinal=0,
        fork_index=len(PROMPT),
        parameters=parameters,
        max_tokens=10,
    )

    assert child.sampling_params is not None
    assert [FORK] in bad_words_of(child.sampling_params)
    assert [9, 8] in bad_words_of(child.sampling_params)
    assert [FORK] not in bad_words_of(params)
