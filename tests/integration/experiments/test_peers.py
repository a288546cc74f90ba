"""Every method of parallel answering generates the recorded text in a real engine."""

from collections.abc import Iterator

import pytest

from apar_core.engine.replay import REPLAY
from cluster.experiments.peers.methods import METHODS
from tests.integration.engine_process import EngineProcess
from tests.integration.experiments.driving import answers
from tests.integration.experiments.peer_driving import Answered, answered

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_ANSWERS = 8
FORKS = 4 * NUM_ANSWERS


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Answered]]:
    process = EngineProcess(logits_processors=[REPLAY], num_gpu_blocks_override=513)
    try:
        yield {name: process.call(answered, name, NUM_ANSWERS, 4) for name in METHODS}
    finally:
        process.close()


@pytest.mark.parametrize("method", METHODS)
def test_each_method_answers_every_question_with_the_recorded_text(
    runs: dict[str, Answered], method: str
) -> None:
    # The driver refuses a text that is not the recorded one.
    served = runs[method].drive.served

    assert {each.answer_id for each in served} == {str(i) for i in range(NUM_ANSWERS)}
    expected = sum(each.text_tokens for each in answers(NUM_ANSWERS))
    assert sum(each.text_tokens for each in served) == expected


def test_each_method_asks_as_many_sequences_of_the_engine_as_it_should(
    runs: dict[str, Answered],
) -> None:
    sequences = {name: run.watch.sequences for name, run in runs.items()}

    assert sequences == {
        "sequential": NUM_ANSWERS,
        "client-forking": NUM_ANSWERS + FORKS,
        "skeleton": NUM_ANSWERS + FORKS,
        # The rest of the parent is a request of its own.
        "parent-stops": 2 * NUM_ANSWERS + FORKS,
        "parent-stops-free": 2 * NUM_ANSWERS + FORKS,
        "eager": NUM_ANSWERS + FORKS,
        "adaptive": NUM_ANSWERS + FORKS,
    }


def test_what_is_computed_again_is_least_where_the_engine_forks(
    runs: dict[str, Answered],
) -> None:
    sequential = runs["sequential"].prompt_tokens
    again = {name: run.prompt_tokens - sequential for name, run in runs.items()}

    # The fork token and the child token, and nothing of the parent's text.
    assert again["eager"] == 2 * FORKS
    assert again["eager"] < again["client-forking"]
    assert again["eager"] < again["parent-stops-free"] < again["parent-stops"]
    assert again["client-forking"] < again["skeleton"]


def test_all_but_sequential_decoding_take_fewer_steps(runs: dict[str, Answered]) -> None:
    steps = {name: run.drive.counts.steps for name, run in runs.items()}

    # A child of the client's starts in the step after its fork, as one of the engine's does.
    assert steps["eager"] == steps["client-forking"]
    # A parent that goes on after its children makes the critical path longer.
    assert steps["eager"] < steps["parent-stops"]
    assert all(steps[name] < steps["sequential"] for name in METHODS if name != "sequential")


def test_no_run_leaves_anything_behind(runs: dict[str, Answered]) -> None:
    for run in runs.values():
        assert 0 < run.watch.peak_kv_tokens <= run.drive.kv_tokens
        # Each run begins with an empty cache, which the one before would otherwise fill.
        assert run.drive.counts.preemptions == 0
