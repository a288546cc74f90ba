"""The driver of the experiments respects memory and limits and checks the texts."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from apar_core.engine.replay import REPLAY
from apar_core.errors import EvaluationError
from cluster.experiments.experiment_engine import Conditions
from tests.integration.engine_process import EngineProcess
from tests.integration.experiments.driving import (
    abort_and_sizes,
    answers,
    side_by_side,
    watched,
    wrong_answer,
)

pytestmark = pytest.mark.engine
NUM_ANSWERS = 12


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(logits_processors=[REPLAY], num_gpu_blocks_override=129)
    yield process
    process.close()


def test_both_ways_generate_the_same_text_and_forking_takes_fewer_steps(
    engine: EngineProcess,
) -> None:
    sequential = engine.call(watched, Conditions(), NUM_ANSWERS, False)
    forked = engine.call(watched, Conditions(), NUM_ANSWERS, True)

    text_tokens = sum(answer.text_tokens for answer in answers(NUM_ANSWERS))
    for run in (sequential.drive, forked.drive):
        assert sum(each.text_tokens for each in run.served) == text_tokens
        assert run.counts.text_tokens == text_tokens
        assert {each.answer_id for each in run.served} == {str(i) for i in range(NUM_ANSWERS)}
    assert sequential.drive.forks == 0
    assert forked.drive.forks == 4 * NUM_ANSWERS
    assert forked.drive.counts.steps < sequential.drive.counts.steps
    assert {each.statistics and each.statistics.threads for each in forked.drive.served} == {5}
    assert {each.statistics and each.statistics.threads for each in sequential.drive.served} == {1}


def test_a_run_keeps_to_its_share_of_the_kv_cache(engine: EngineProcess) -> None:
    whole = engine.call(watched, Conditions(kv_share=1.0), NUM_ANSWERS, True)
    quarter = engine.call(watched, Conditions(kv_share=0.25), NUM_ANSWERS, True)

    assert quarter.drive.kv_tokens == 32 * 32
    assert quarter.most_kv_tokens <= 32 * 32 < whole.most_kv_tokens
    # All that a run took it has given back, and the next one has the whole cache again.
    assert quarter.free_blocks_after == 32
    assert engine.call(watched, Conditions(), 1, True).free_blocks_after == 128


def test_the_engine_itself_keeps_to_the_most_requests_and_lets_them_fork(
    engine: EngineProcess,
) -> None:
    run = engine.call(watched, Conditions(max_requests=3), NUM_ANSWERS, True)

    assert run.most_requests == 3
    assert run.most_threads > 3
    assert any(sample.has_pending for sample in run.drive.samples)


def test_a_closed_loop_keeps_so_many_requests_under_way(engine: EngineProcess) -> None:
    run = engine.call(watched, Conditions(concurrency=4), NUM_ANSWERS, False)

    assert run.most_requests == run.most_threads == 4
    # Others than the measured ones keep the engine busy, and are not among those.
    assert sorted(int(each.answer_id) for each in run.drive.served) == list(range(NUM_ANSWERS))
    assert run.drive.counts.text_tokens > sum(each.text_tokens for each in run.drive.served)
    assert engine.call(abort_and_sizes)[0] == 0


def test_the_adaptive_policy_holds_forks_back_where_time_is_short(engine: EngineProcess) -> None:
    conditions = Conditions(policy="adaptive", token_time_s=1e-6)
    # The first run teaches it how long steps take.
    engine.call(watched, conditions, NUM_ANSWERS, True)
    learned = replace(conditions, keeps_learned=True)
    run = engine.call(watched, learned, NUM_ANSWERS, True)

    assert run.drive.forks_delayed > 0.9 * run.drive.forks
    text_tokens = sum(answer.text_tokens for answer in answers(NUM_ANSWERS))
    assert run.drive.counts.text_tokens == text_tokens


def test_two_engines_of_a_process_take_turns_and_each_has_its_own_time() -> None:
    # vLLM's engines of one process share what the first to end destroys: none runs after this.
    process = EngineProcess(logits_processors=[REPLAY], num_gpu_blocks_override=129)
    try:
        alone = process.call(watched, Conditions(max_requests=4), NUM_ANSWERS, False).drive
        both = process.call(side_by_side, NUM_ANSWERS)
    finally:
        process.close()

    sequential, forked = both.drives
    # What the other engine does meanwhile changes nothing but when the steps are done.
    assert sequential.counts.steps == alone.counts.steps > forked.counts.steps
    assert sequential.counts.text_tokens == forked.counts.text_tokens
    assert (sequential.forks, forked.forks) == (0, 4 * NUM_ANSWERS)
    # Clocks that ran in each other's turns would come to about twice the time.
    assert 0.7 * both.elapsed_s < sequential.wall_s + forked.wall_s <= both.elapsed_s
    for run in both.drives:
        assert max(each.latency_s for each in run.served) <= run.wall_s
    assert both.threads_left == 0


def test_an_answer_that_is_not_the_recorded_one_ends_the_run(engine: EngineProcess) -> None:
    with pytest.raises(EvaluationError, match="another answer than '0'"):
        engine.call(wrong_answer)
    engine.call(abort_and_sizes)
