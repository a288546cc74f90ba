"""Runs in virtual time: every method gives the recorded answers, and a run repeats to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apar_core.engine.replay import replay_args
from apar_core.errors import EvaluationError
from apar_core.scheduler.fork_settings import ForkSettings
from cluster.lab.experiments.driver import RunPlan, drive, question_order
from cluster.lab.experiments.engine import RunConditions
from cluster.lab.experiments.methods import (
    METHODS,
    PEER_METHODS,
    Workload,
    load_workload,
    longest_sequence,
)
from cluster.lab.experiments.parts import StartStage
from cluster.lab.experiments.program import ReplayedRequest
from cluster.lab.experiments.runs import Run, RunStore, Worker, do_runs
from cluster.lab.experiments.settings import (
    FIGURE_5A,
    ExperimentSettings,
    RunKey,
    closed_loop_answers,
    keys_of,
)
from cluster.lab.virtual.text import virtual_text

pytestmark = pytest.mark.engine

NUM_ANSWERS, NUM_TIPS = 12, 4
FORKS = NUM_ANSWERS * NUM_TIPS
TIPS = "\n".join(
    f"{i}. Tip {i}: do this and that, and then do it again." for i in range(1, NUM_TIPS + 1)
)
LISTS = ("lists", "lists-adaptive")
KEY = RunKey(model="llama-7b", device="a100-80gb", concurrency=NUM_ANSWERS)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ExperimentSettings:
    trace = tmp_path_factory.mktemp("trace") / "answers.jsonl"
    lines = [
        {
            "id": number,
            "category": "writing" if number % 2 else "math",
            "prompt": f"Give me {number} tips.",
            "response": f"Here are {number} tips:\n\n{TIPS}",
        }
        for number in range(NUM_ANSWERS)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return ExperimentSettings(
        trace=trace, answers=NUM_ANSWERS, max_tokens=512, kv_tokens=16 * 512, sample_s=0.1
    )


@pytest.fixture(scope="module")
def worker(settings: ExperimentSettings) -> Iterator[Worker]:
    worker = Worker(settings)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def runs(worker: Worker) -> dict[str, Run]:
    return {
        name: worker.run(KEY.of_method(name), 0.05 if "adaptive" in name else None)
        for name in (*LISTS, *PEER_METHODS)
    }


@pytest.fixture(scope="module")
def workload(worker: Worker, runs: dict[str, Run]) -> Workload:
    return worker._workloads[KEY.trace, None]


def ignore_stages(stage: str, total: int) -> Any:
    return lambda: None


STAGES: StartStage = ignore_stages


@pytest.mark.parametrize("method", METHODS)
def test_each_method_gives_every_recorded_answer(
    runs: dict[str, Run], workload: Workload, method: str
) -> None:
    # The driver refuses a text that is not the recorded one.
    run = runs[method]

    assert run.answers == NUM_ANSWERS
    assert run.text_tokens == sum(each.answer.text_tokens for each in workload.questions)
    assert 0 < run.peak_kv_tokens <= run.capacity_tokens
    assert run.preemptions == 0


def test_each_method_submits_as_many_sequences_as_it_should(runs: dict[str, Run]) -> None:
    assert {name: runs[name].sequences for name in PEER_METHODS} == {
        "sequential": NUM_ANSWERS,
        "eager": NUM_ANSWERS + FORKS,
        "adaptive": NUM_ANSWERS + FORKS,
        "sequential-reserve": NUM_ANSWERS,
        "eager-unreserved": NUM_ANSWERS + FORKS,
        "client-forking": NUM_ANSWERS + FORKS,
        "skeleton": NUM_ANSWERS + FORKS,
        # The rest of the parent is a request of its own.
        "parent-stops": 2 * NUM_ANSWERS + FORKS,
        "parent-stops-free": 2 * NUM_ANSWERS + FORKS,
    }


def test_a_fork_in_the_engine_recomputes_its_control_tokens_and_others_more(
    runs: dict[str, Run],
) -> None:
    sequential = runs["sequential"].prompt_tokens
    again = {name: run.prompt_tokens - sequential for name, run in runs.items()}

    # Fork token, child token, and with asynchronous scheduling the token past a thread's end.
    assert 2 * FORKS <= again["eager"] <= 3 * FORKS
    assert again["eager"] < again["client-forking"] < again["skeleton"]
    assert again["eager"] < again["parent-stops-free"] < again["parent-stops"]


def test_methods_of_parallel_answering_take_fewer_steps(runs: dict[str, Run]) -> None:
    steps = {name: run.steps for name, run in runs.items()}

    assert all(steps[name] < steps["sequential"] for name in METHODS if "sequential" not in name)
    # A parent that continues after its children makes the critical path longer.
    assert steps["eager"] < steps["parent-stops"]


def test_forked_rows_attend_to_fewer_tokens_and_read_blocks_of_their_siblings(
    runs: dict[str, Run],
) -> None:
    eager, sequential = runs["eager"], runs["sequential"]

    assert (eager.attended_per_row or 1e9) < (sequential.attended_per_row or 0)
    assert (eager.distinct_percent or 100) < (sequential.distinct_percent or 0)
    assert runs["eager"].categories["math"].threads == (NUM_TIPS + 1) * NUM_ANSWERS // 2
    assert runs["sequential"].categories["math"].threads == NUM_ANSWERS // 2


@pytest.mark.parametrize("method", ["sequential", "eager", "client-forking"])
def test_a_run_repeats_to_the_last_bit_whatever_ran_before(
    worker: Worker, runs: dict[str, Run], method: str
) -> None:
    other = KEY.model_copy(update={"kv_share": 0.5, "concurrency": 3, "is_closed_loop": True})
    worker.run(other)

    again = worker.run(KEY.of_method(method))

    assert again == runs[method]
    assert again.throughput.mean / runs[method].throughput.mean == 1.0


def test_clients_that_keep_the_limit_do_what_the_engine_does_with_its_own(
    worker: Worker, workload: Workload
) -> None:
    engine = worker._engine
    assert engine is not None
    plan = RunPlan(
        RunConditions(max_requests=3),
        lambda index: ReplayedRequest(workload.questions[index].answer, forks=True),
        NUM_ANSWERS,
    )

    by_engine = drive(engine, plan, sample_s=0.1)
    by_clients = drive(engine, replace(plan, conditions=RunConditions(), clients=3), sample_s=0.1)

    assert by_clients.counts == by_engine.counts
    assert by_clients.duration_s == by_engine.duration_s
    assert by_clients.served == by_engine.served
    assert by_clients.samples == by_engine.samples


@pytest.mark.ci
def test_lists_pay_with_one_request_and_are_declined_where_they_do_not(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = KEY.model_copy(update={"concurrency": 1, "is_closed_loop": True})

    def run(method: str) -> Run:
        return worker.run(one.of_method(method), 0.05)

    lists, adaptive = run("lists"), run("lists-adaptive")
    monkeypatch.setattr("apar_core.scheduler.lists.USEFUL_SHARE", 0.0)
    declined = run("lists-adaptive")

    assert lists.latency_s.mean < 0.9 * run("sequential").latency_s.mean
    assert adaptive.forks == lists.forks
    # The policy admits everything until it has seen some steps.
    assert declined.forks < 0.3 * lists.forks


def test_a_smaller_cache_is_kept_to_and_takes_longer(worker: Worker, runs: dict[str, Run]) -> None:
    small = worker.run(KEY.model_copy(update={"kv_share": 0.08}))

    assert small.peak_kv_tokens <= small.capacity_tokens == 41 * 16
    assert small.duration_s > runs["sequential"].duration_s
    assert small.preemptions > 0


def test_our_methods_have_the_reserve_of_a_server(settings: ExperimentSettings) -> None:
    assert settings.growth_reserve_tokens == ForkSettings().growth_reserve_tokens
    assert {name for name, method in METHODS.items() if method.reserves} == {
        "eager", "adaptive", "sequential-reserve", *LISTS,
    }  # fmt: skip


def test_a_closed_loop_keeps_its_concurrency_and_measures_each_answer_once(
    worker: Worker, workload: Workload
) -> None:
    loop = KEY.model_copy(update={"concurrency": 4, "is_closed_loop": True})

    run = worker.run(loop)

    assert run.largest_rows == 4
    assert run.answers == NUM_ANSWERS
    assert run.text_tokens == sum(each.answer.text_tokens for each in workload.questions)
    # With memory to spare, only concurrency decides the latency.
    assert run.latency_s.mean < worker.run(KEY).latency_s.mean


def test_a_cache_too_small_for_an_answer_is_refused(worker: Worker) -> None:
    with pytest.raises(EvaluationError, match=r"0.01 of the KV cache holds 80 tokens"):
        worker.run(KEY.model_copy(update={"kv_share": 0.01}))


def test_an_answer_that_is_not_the_recorded_one_ends_the_run(
    worker: Worker, workload: Workload
) -> None:
    answer = workload.questions[0].answer

    class Wrong(ReplayedRequest):
        def start(self) -> list[Any]:
            [submission] = super().start()
            other = [answer.flat[1], *answer.flat[1:]]
            submission.sampling["extra_args"] |= replay_args({"": other})
            return [submission]

    engine = worker._engine
    assert engine is not None
    with pytest.raises(EvaluationError, match="another answer than '0'"):
        drive(
            engine, RunPlan(RunConditions(), lambda _: Wrong(answer, forks=False), 1), sample_s=1.0
        )
    engine.finish()


def test_runs_that_a_folder_has_are_not_done_again(
    settings: ExperimentSettings, runs: dict[str, Run], tmp_path: Path
) -> None:
    fewer = settings.model_copy(
        update={"max_requests": NUM_ANSWERS, "kv_shares": (1.0,), "methods": tuple(METHODS)[:2]}
    )
    keys = keys_of((FIGURE_5A,), fewer)
    store = RunStore(tmp_path, fewer)
    for key in reversed(keys):
        store.add(runs[key.method])
    store.sort()

    again = RunStore(tmp_path, fewer)
    do_runs(keys, fewer, again, STAGES)

    assert [key.method for key in keys] == ["sequential", "eager"]
    assert again.lines == {key: runs[key.method] for key in keys}
    other = fewer.model_copy(update={"sample_s": 1.0})
    with pytest.raises(EvaluationError, match=r"sample_s was '0\.1', is '1\.0'"):
        RunStore(tmp_path, other)


def test_all_at_once_every_question_comes_once() -> None:
    assert list(question_order(3, None)) == [(0, True), (1, True), (2, True)]


def test_a_closed_loop_is_warm_before_the_measured_questions_and_busy_after_them() -> None:
    order = question_order(3, 2)

    assert [next(order) for _ in range(8)] == [
        (2, False), (1, False), (0, True), (1, True), (2, True), (0, False), (1, False), (2, False),
    ]  # fmt: skip


def test_a_closed_loop_of_few_clients_measures_fewer_answers() -> None:
    assert [closed_loop_answers(number, 1000) for number in (1, 20, 350)] == [48, 80, 1000]


def test_a_request_has_no_more_threads_than_the_conditions_allow(
    worker: Worker, workload: Workload
) -> None:
    engine = worker._engine
    assert engine is not None
    plan = RunPlan(
        RunConditions(max_threads=1),
        lambda index: ReplayedRequest(workload.questions[index].answer, forks=True),
        NUM_ANSWERS,
    )

    found = drive(engine, plan, sample_s=0.1)

    assert found.forks == FORKS
    assert found.counts.largest_rows == NUM_ANSWERS


def workload_of(settings: ExperimentSettings, **given: Any) -> Workload:
    text = virtual_text()
    limits = {"number": NUM_ANSWERS, "max_tokens": 512, "max_sequence_tokens": 1024, "seed": 0}
    return load_workload(settings.trace, text, text.tokens, 9, **{**limits, **given})


@pytest.mark.ci
def test_a_short_trace_is_repeated_and_a_long_one_sampled(settings: ExperimentSettings) -> None:
    def ids(**given: Any) -> list[str]:
        return [each.answer.answer_id for each in workload_of(settings, **given).questions]

    whole = ids()
    assert ids(number=2 * NUM_ANSWERS + 1) == [*whole, *whole, whole[0]]
    assert len(set(ids(number=5))) == 5
    assert ids(number=5) == ids(number=5) != ids(number=5, seed=1)


def test_questions_that_are_too_long_for_a_method_are_left_out(
    settings: ExperimentSettings,
) -> None:
    longest = max(map(longest_sequence, workload_of(settings).questions))

    questions = workload_of(settings, max_sequence_tokens=longest - 1).questions

    assert 0 < len({each.answer.answer_id for each in questions}) < NUM_ANSWERS
    with pytest.raises(EvaluationError, match="none of 12 answers fits into 90 tokens"):
        workload_of(settings, max_sequence_tokens=90)
