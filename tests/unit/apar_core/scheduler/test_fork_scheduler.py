"""Forks in vLLM's real scheduler and KV cache manager, driven by a scripted model."""

from dataclasses import replace
from pathlib import Path

import pytest

from apar_core.fork_parameters import ForkParameters
from apar_core.tree.thread_names import child_request_id
from tests.fakes.scripted_engine import (
    END,
    FIRST_TEXT_ID,
    FORK,
    EngineShape,
    ScriptedEngine,
    fork_parameters,
)

PROMPT = list(range(100, 110))
# The root generates 10 11, forks, 12 13, forks, 14; its children generate 20..25 and 30 31.
SCRIPT = {
    "": [10, 11, FORK, 12, 13, FORK, 14, END],
    "0": [20, 21, 22, 23, 24, 25, END],
    "1": [30, 31, END],
}
TEXT = [10, 11, 20, 21, 22, 23, 24, 25, 12, 13, 30, 31, 14]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_forked_answer_is_restored_and_leaves_nothing_behind(
    model_dir: Path, run_ahead: bool
) -> None:
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, SCRIPT)

    engine.run()

    assert engine.texts["a"] == TEXT
    assert engine.finish_reasons["a"] == "stop"
    engine.assert_nothing_is_left()


def test_fork_computes_two_tokens_and_copies_at_most_one_block(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT)

    engine.run()

    counters = engine.scheduler.block_sharing.counters
    assert counters.forks == 2
    # [Fork] and [Child] of each child.
    assert counters.computed_tokens == 4
    # The first child shares the prompt and 10 11, the second 10 11 [Fork] 12 13.
    assert counters.shared_tokens == 12 + 15
    # 12 tokens fill three blocks of four; 15 tokens leave the fourth partly filled.
    assert counters.shared_blocks == 3 + 3
    assert counters.copied_blocks == 1
    assert counters.fallbacks == 0
    assert engine.scheduler.num_generated_tokens == sum(map(len, SCRIPT.values()))


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_thread_that_begins_a_tool_call_is_sent_to_the_workers_as_one_that_forks_no_more(
    model_dir: Path, run_ahead: bool
) -> None:
    call_id = 40
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    script = {
        "": [10, FORK, 11, call_id, *range(50, 70), END],
        "0": [20, 21, FORK, 22, END],
        "0.0": [30, 31, END],
    }
    engine.add("a", PROMPT, script, parameters=replace(fork_parameters(), call_ids=(call_id,)))
    # As long as it generates after the token.
    may_fork = []
    while call_id not in engine.scheduler.requests["a"].output_token_ids:
        may_fork.append(sent_parameters(engine, "a").may_fork)
        engine.step()

    assert may_fork
    assert all(may_fork)
    assert not sent_parameters(engine, "a").may_fork
    assert sent_parameters(engine, child_request_id("a", 0)).may_fork
    engine.run()
    assert engine.texts["a"] == [10, 20, 21, 30, 31, 22, 11, call_id, *range(50, 70)]
    engine.assert_nothing_is_left()


def sent_parameters(engine: ScriptedEngine, request_id: str) -> ForkParameters:
    params = engine.scheduler.requests[request_id].sampling_params
    assert params is not None
    parameters = ForkParameters.from_extra_args(params.extra_args)
    assert parameters is not None
    return parameters


@pytest.mark.parametrize(("run_ahead", "num_blocks"), [(False, 2 + 2), (True, 1 + 2)])
def test_blocks_of_threads_that_end_before_their_request_are_counted(
    model_dir: Path, run_ahead: bool, num_blocks: int
) -> None:
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, SCRIPT)

    engine.run()

    # The root ends first: its 17 computed tokens fill five blocks, of which the children hold
    # three, or four where the second child's fork found its 16 tokens computed. That child ends
    # next, with 19 tokens in five blocks, of which the first child holds three. The first child
    # ends the request: nothing is early then.
    assert engine.scheduler.block_sharing.counters.released_early_blocks == num_blocks


def test_nothing_is_released_early_without_forks(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, {"": [10, 11, 12, END]})

    engine.run()

    assert engine.scheduler.block_sharing.counters.released_early_blocks == 0
    assert engine.scheduler.num_generated_tokens == 4


def test_child_runs_in_the_step_after_its_fork(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT)

    # Step 3 samples the first fork token, step 4 the child's first token; it ends in step 10.
    assert engine.run() == 10 + 1  # and one step that tells the workers who has finished


@pytest.mark.parametrize("max_tokens", range(1, len(TEXT) + 2))
@pytest.mark.parametrize("run_ahead", [False, True])
def test_budget_counts_the_text_of_all_threads_and_loses_none(
    model_dir: Path, max_tokens: int, run_ahead: bool
) -> None:
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, SCRIPT, max_tokens=max_tokens)

    engine.run()

    text = engine.texts["a"]
    assert len(text) == min(max_tokens, len(TEXT))
    # The generated text is a subsequence of the whole text.
    remaining = iter(TEXT)
    assert all(token_id in remaining for token_id in text)
    assert engine.finish_reasons["a"] == ("stop" if max_tokens > len(TEXT) else "length")
    engine.assert_nothing_is_left()


def test_the_budget_counts_waiting_forks(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, max_tokens=5, parameters=fork_parameters(max_threads=1))

    engine.run()

    assert engine.texts["a"] == [10, 11, 12, 13, 14]
    assert engine.finish_reasons["a"] == "length"
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("max_threads", [1, 2, 3])
def test_thread_limit_delays_children_and_keeps_their_text(
    model_dir: Path, max_threads: int
) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=fork_parameters(max_threads=max_threads))
    most_live = 0
    while engine.step():
        most_live = max(most_live, len(engine.scheduler.requests))

    assert engine.texts["a"] == TEXT
    assert most_live == max_threads
    # Waiting causes no recomputation.
    assert engine.scheduler.block_sharing.counters.computed_tokens == 4
    engine.assert_nothing_is_left()


def test_fork_limit_ends_the_answer_by_length_and_keeps_its_text(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=fork_parameters(max_forks=1))

    engine.run()

    assert engine.texts["a"] == [10, 11, 20, 21, 22, 23, 24, 25, 12, 13, 14]
    assert engine.finish_reasons["a"] == "length"
    engine.assert_nothing_is_left()


def test_fork_at_the_end_of_the_context_opens_no_thread(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(max_model_len=14), model_dir)
    engine.add("a", PROMPT, SCRIPT)

    engine.run()

    # 10 + 3 tokens and the child token fill the context of 14: the child has no room for a token.
    assert engine.texts["a"] == [10, 11, 12]
    assert engine.finish_reasons["a"] == "length"
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("abort_after", range(1, 12))
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("max_threads", [1, 16])
def test_abort_in_any_step_frees_all_threads(
    model_dir: Path, abort_after: int, run_ahead: bool, max_threads: int
) -> None:
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=fork_parameters(max_threads=max_threads))
    for _ in range(abort_after):
        engine.step()

    engine.abort("a")

    engine.run()
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize(
    ("failing", "max_threads"), [("a", 2), ("a~0", 2), ("a", 16), ("a~0", 16), ("a~1", 16)]
)
def test_a_thread_that_fails_ends_its_request_with_an_error_at_once(
    model_dir: Path, run_ahead: bool, failing: str, max_threads: int
) -> None:
    script = {"": [10, FORK, 11, FORK, *range(12, 40), END]}
    script |= {"0": [*range(50, 80), END], "1": [*range(80, 110), END]}
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, script, parameters=fork_parameters(max_threads=max_threads))
    engine.add("b", PROMPT[::-1], script)
    for _ in range(15):
        engine.step()

    engine.lose_last_block(failing)
    engine.step()

    assert {request_id[0] for request_id in engine.scheduler.requests} == {"b"}
    assert engine.finish_reasons == {"a": "error"}
    engine.run()
    assert engine.finish_reasons == {"a": "error", "b": "stop"}
    engine.assert_nothing_is_left()


def test_children_run_before_newer_requests(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(max_num_seqs=2), model_dir)
    for arrival, request_id in enumerate(["old", "new"]):
        engine.add(request_id, PROMPT, SCRIPT, arrival_time=float(arrival))
    # A third request waits for one of the two places.
    engine.add("newest", PROMPT, SCRIPT, arrival_time=2.0)
    while len(engine.finish_reasons) < 1:
        engine.step()
        waiting = {r.split("~")[0] for r in engine.scheduler.requests} - {"old", "new"}
        assert waiting <= {"newest"}
        assert "newest" not in {r.request_id for r in engine.scheduler.running}

    engine.run()
    assert all(text == TEXT for text in engine.texts.values())
    engine.assert_nothing_is_left()


def test_the_youngest_request_is_preempted_and_its_text_is_complete(model_dir: Path) -> None:
    long_text = list(range(FIRST_TEXT_ID, FIRST_TEXT_ID + 60))
    script = {"": [*long_text[:5], FORK, *long_text[5:30], END], "0": [*long_text[30:], END]}
    text = [*long_text[:5], *long_text[30:], *long_text[5:30]]
    engine = ScriptedEngine(EngineShape(num_blocks=30), model_dir)
    for arrival in range(4):
        engine.add(f"r{arrival}", [200 + arrival] * 9, script, arrival_time=float(arrival))
    preempted: dict[str, int] = {}
    while engine.step():
        for request in engine.scheduler.requests.values():
            preempted[request.request_id] = request.num_preemptions

    assert all(answer == text for answer in engine.texts.values())
    assert sum(preempted.values()) > 0
    assert preempted["r0"] == preempted["r0~0"] == 0
    engine.assert_nothing_is_left()


def test_the_watermark_applies_to_requests_and_not_to_forks(model_dir: Path) -> None:
    def steps(watermark: float) -> int:
        engine = ScriptedEngine(EngineShape(num_blocks=30, watermark=watermark), model_dir)
        engine.add("a", PROMPT, SCRIPT)
        engine.step()
        engine.add("b", PROMPT[::-1], SCRIPT, arrival_time=1.0)
        engine.step()
        # 80% of 30 blocks are not free beside a request with three.
        assert [each.request_id for each in engine.scheduler.waiting] == ["b"] * (watermark > 0)
        num_steps = 2
        while "a" not in engine.finish_reasons:
            assert engine.step()
            assert num_steps < 100
            num_steps += 1
        engine.run()
        assert engine.texts == {"a": TEXT, "b": TEXT}
        engine.assert_nothing_is_left()
        return num_steps

    assert steps(watermark=0.8) == steps(watermark=0.0)
