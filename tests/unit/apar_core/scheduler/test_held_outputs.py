"""When an engine core sends what a step has generated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import SchedulerStats

from apar_core.fork_parameters import HOLD_ARG
from apar_core.scheduler.held_outputs import interval_under_load
from tests.fakes.block_scripts import FORMATS, block_parameters, tokens
from tests.fakes.scripted_engine import END, FORK, EngineShape, ScriptedEngine

PROMPT = list(range(100, 110))
# Multiples of it are exact.
STEP_S = 1 / 64
PACED = EngineShape(output_interval_s=5 * STEP_S)
# Far from the other texts, so that prefixes are not shared.
LONG = [*range(1000, 1040), END]


class Sent(NamedTuple):
    """One message of the engine core."""

    at_step: int
    outputs: list[EngineCoreOutput]
    statistics: SchedulerStats | None

    @property
    def token_ids(self) -> dict[str, list[int]]:
        return {output.request_id: output.new_token_ids for output in self.outputs}


class Core:
    """A scripted engine whose steps take 1/64 s of simulated time."""

    def __init__(self, shape: EngineShape, model_dir: Path) -> None:
        self.engine = ScriptedEngine(shape, model_dir)
        self.engine.step_s = lambda rows: STEP_S
        self.num_steps = 0

    def step(self, number: int = 1) -> list[Sent]:
        """Run some steps; return the messages that they sent."""
        sent = []
        for _ in range(number):
            self.engine.step()
            self.num_steps += 1
            sent += [
                Sent(self.num_steps, message.outputs, message.scheduler_stats)
                for message in self.engine.take_messages()
                if message.outputs or message.scheduler_stats
            ]
        return sent


@pytest.fixture
def core(model_dir: Path) -> Core:
    return Core(PACED, model_dir)


def test_the_first_token_is_sent_at_once_and_later_ones_together(core: Core) -> None:
    core.engine.add("a", PROMPT, {"": LONG})

    sent = core.step(12)

    # The clock is at a multiple of the interval after steps 5 and 10.
    assert [(each.at_step, each.token_ids["a"]) for each in sent] == [
        (1, [1000]),
        (5, [1001, 1002, 1003, 1004]),
        (10, [1005, 1006, 1007, 1008, 1009]),
    ]


def test_streams_are_sent_in_the_same_messages(core: Core) -> None:
    core.engine.add("a", PROMPT, {"": LONG})
    core.step(2)
    core.engine.add("b", PROMPT, {"": LONG})

    sent = core.step(8)

    assert [(each.at_step, sorted(each.token_ids)) for each in sent] == [
        (3, ["b"]),
        (5, ["a", "b"]),
        (10, ["a", "b"]),
    ]


def test_an_answer_that_ends_takes_along_what_is_held_of_it_only(core: Core) -> None:
    core.engine.add("a", PROMPT, {"": LONG})
    core.engine.add("b", PROMPT, {"": [20, 21, 22, END]})

    sent = core.step(4)

    assert [each.token_ids for each in sent] == [
        {"a": [1000], "b": [20]},
        {"b": [21, 22, END]},
    ]
    assert core.engine.finish_reasons == {"b": "stop"}


def test_a_fork_takes_along_all_that_is_held_of_its_request(core: Core) -> None:
    core.engine.add("a", PROMPT, {"": [10, 11, FORK, 12, 13, END], "0": [20, 21, 22, 23, END]})
    core.engine.add("b", PROMPT, {"": LONG})

    sent = core.step(4)

    assert [each.token_ids for each in sent] == [
        {"a": [10], "b": [1000]},
        {"a": [11, FORK]},
        # The child's first token.
        {"a": [12], "a~0": [20]},
    ]


def range_of(num_tokens: int) -> list[int]:
    return [*range(1000, 1000 + num_tokens), END]


def test_what_is_held_is_sent_when_due_although_its_request_is_not_running(
    model_dir: Path,
) -> None:
    # Both requests do not fit, so the younger one is preempted.
    shape = EngineShape(num_blocks=14, output_interval_s=20 * STEP_S, max_model_len=50)
    core = Core(shape, model_dir)
    for name in ("a", "b"):
        core.engine.add(name, PROMPT, {"": LONG[:-2]}, arrival_time=float(name == "b"))

    sent = core.step(30)

    assert core.engine.scheduler.requests["b"].num_preemptions == 1
    assert sum(len(each.token_ids.get("b", ())) for each in sent) > 1
    core.engine.run()
    assert core.engine.texts["b"] == core.engine.texts["a"]
    core.engine.assert_nothing_is_left()


def test_an_aborted_request_sends_nothing_more(core: Core) -> None:
    core.engine.add("a", PROMPT, {"": LONG})
    core.engine.add("b", PROMPT, {"": LONG})
    core.step(3)

    core.engine.abort("a")

    sent = [each for each in core.step(10) if each.outputs]
    assert [sorted(each.token_ids) for each in sent] == [["b"], ["b"]]
    core.engine.run()
    core.engine.assert_nothing_is_left()


def test_without_an_interval_each_step_sends_its_tokens(model_dir: Path) -> None:
    core = Core(EngineShape(), model_dir)
    core.engine.add("a", PROMPT, {"": LONG})

    assert [each.token_ids["a"] for each in core.step(3)] == [[1000], [1001], [1002]]


def test_each_message_has_statistics(core: Core) -> None:
    core.engine.add("a", PROMPT, {"": LONG})

    sent = core.step(10)

    assert [each.statistics and each.statistics.num_running_reqs for each in sent] == [1, 1, 1]


def test_statistics_come_alone_once_a_second(model_dir: Path) -> None:
    core = Core(EngineShape(output_interval_s=5.0), model_dir)
    core.engine.add("a", PROMPT, {"": range_of(150)})

    sent = core.step(150)

    assert [(each.at_step, len(each.outputs)) for each in sent] == [(1, 1), (65, 0), (129, 0)]


def test_a_pause_sends_what_is_held(core: Core) -> None:
    core.engine.add("a", PROMPT, {"": LONG})
    core.step(3)

    core.engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    assert [each.token_ids for each in core.step(2)] == [{"a": [1001, 1002]}]
    core.engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.engine.run()
    assert core.engine.texts["a"] == LONG[:-1]
    core.engine.assert_nothing_is_left()


def test_an_id_that_returns_before_the_next_step_gets_nothing_of_the_old_request(
    core: Core,
) -> None:
    core.engine.add("a", PROMPT, {"": LONG})
    core.engine.add("b", PROMPT, {"": LONG})
    core.step(3)

    core.engine.abort("a")
    core.engine.scheduler.held.begin(new_request("a"))
    core.step(1)

    assert "a" in core.engine.scheduler.held._requests
    assert core.engine.scheduler.held._requests["a"].outputs == []


def new_request(request_id: str) -> Any:
    params = SamplingParams(extra_args={HOLD_ARG: True})
    return SimpleNamespace(request_id=request_id, sampling_params=params, client_index=0)


@pytest.mark.parametrize("output_interval_s", [0.0, 5 * STEP_S])
def test_a_block_whose_children_are_refused_opens_before_its_thread_ends(
    model_dir: Path, output_interval_s: float
) -> None:
    block = "<Parallel><Outlines><Outline>1: a</Outline><Outline>2: b</Outline></Outlines>"
    children = {key: tokens(f"c{key}</Thread>") for key in "0123"}
    script = {"": tokens(f"x{block}y{block}z", ends=True), **children}
    shape = EngineShape(num_blocks=300, max_model_len=2000, output_interval_s=output_interval_s)
    core = Core(shape, model_dir)
    parameters = block_parameters(FORMATS["threadweaver"], max_forks=2)
    core.engine.add("a", tokens("?"), script, max_tokens=1900, parameters=parameters)

    outputs = [each for sent in core.step(300) for each in sent.outputs]

    assert core.engine.finish_reasons == {"a": "length"}
    last = [(each.request_id, each.finish_reason is None) for each in outputs[-4:]]
    assert last == [("a", True), ("a~2", False), ("a~3", False), ("a", False)]


@pytest.mark.parametrize(
    ("num_requests", "interval_s"), [(1, 0.05), (15, 0.05), (16, 0.1), (500, 0.1)]
)
def test_many_streams_have_longer_intervals(num_requests: int, interval_s: float) -> None:
    assert interval_under_load(0.05, num_requests) == pytest.approx(interval_s)
