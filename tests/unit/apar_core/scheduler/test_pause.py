"""vLLM's pause modes with forks: no request is lost, cut or left waiting."""

from pathlib import Path

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from tests.fakes.scripted_engine import END, FORK, EngineShape, ScriptedEngine, fork_parameters

PROMPT = list(range(100, 110))
SCRIPT = {
    "": [10, 11, FORK, 12, 13, FORK, 14, END],
    "0": [20, 21, FORK, 22, 23, 24, 25, END],
    "0.0": [*range(40, 60), END],
    "1": [30, 31, END],
}
TEXT = [10, 11, 20, 21, *range(40, 60), 22, 23, 24, 25, 12, 13, 30, 31, 14]
STEPS = range(1, 12)
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [False, True])
MAX_THREADS = pytest.mark.parametrize("max_threads", [1, 2, 16])


def started(model_dir: Path, steps: int, max_threads: int, *, run_ahead: bool) -> ScriptedEngine:
    engine = ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir)
    engine.add("a", PROMPT, SCRIPT, parameters=fork_parameters(max_threads=max_threads))
    for _ in range(steps):
        engine.step()
    return engine


@RUN_AHEAD
@MAX_THREADS
def test_waiting_for_running_requests_includes_all_their_threads(
    model_dir: Path, max_threads: int, run_ahead: bool
) -> None:
    for steps in STEPS:
        engine = started(model_dir, steps, max_threads, run_ahead=run_ahead)

        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        engine.add("new", PROMPT, SCRIPT)
        engine.run()

        assert engine.texts == {"a": TEXT, "new": []}
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.run()
        assert engine.texts["new"] == TEXT
        engine.assert_nothing_is_left()


def test_a_preempted_thread_is_waited_for(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(num_blocks=16), model_dir)
    script = {
        "": [10, FORK, *range(11, 40), END],
        "0": [*range(50, 80), END],
    }
    engine.add("a", PROMPT, script)
    for _ in range(4):
        engine.step()

    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    num_preemptions = 0
    while engine.step():
        threads = engine.scheduler.requests.values()
        num_preemptions = max([num_preemptions, *(thread.num_preemptions for thread in threads)])

    assert num_preemptions > 0
    assert engine.texts["a"] == [10, *range(50, 80), *range(11, 40)]
    engine.assert_nothing_is_left()


@RUN_AHEAD
@MAX_THREADS
def test_frozen_threads_continue_after_their_kv_was_dropped(
    model_dir: Path, max_threads: int, run_ahead: bool
) -> None:
    for steps in STEPS:
        engine = started(model_dir, steps, max_threads, run_ahead=run_ahead)

        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        engine.run()
        assert len(engine.texts["a"]) < len(TEXT)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == engine.shape.num_blocks - 1

        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.run()
        assert engine.texts["a"] == TEXT
        engine.assert_nothing_is_left()


@RUN_AHEAD
@MAX_THREADS
def test_an_abort_of_everything_ends_every_request(
    model_dir: Path, max_threads: int, run_ahead: bool
) -> None:
    for steps in STEPS:
        engine = started(model_dir, steps, max_threads, run_ahead=run_ahead)

        aborted = engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for request in aborted:
            # As vLLM's engine core reports them.
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            engine._feed(output)
        engine.run()

        assert engine.finish_reasons["a"] == "abort"
        engine.assert_nothing_is_left()
