"""State of the engine core for vLLM's own server, in vLLM's real scheduler."""

from dataclasses import asdict
from pathlib import Path

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from apar_core.scheduler.core_state import core_state
from apar_core.scheduler.state_reports import StateReports, take_state
from tests.fakes.scripted_engine import END, FORK, EngineShape, ScriptedEngine

PROMPT = list(range(100, 110))
CHILD_TOKENS = 11
SCRIPT = {
    "": [10, FORK, 11, FORK, *range(30, 40), END],
    "0": [*range(50, 60), END],
    "1": [*range(60, 70), END],
}


def reporting(model_dir: Path, *, step_s: float, **forks: int) -> ScriptedEngine:
    """Return an engine that reports its state, with steps of this length."""
    engine = ScriptedEngine(EngineShape(forks=forks), model_dir)
    engine.step_s = lambda rows: step_s
    engine.scheduler.reports = StateReports(3, lambda: engine.now_s)
    return engine


def test_a_request_counts_once_with_all_its_threads(model_dir: Path) -> None:
    engine = reporting(model_dir, step_s=1.0, max_requests=2)
    for number in range(3):
        engine.add(f"r{number}", PROMPT, SCRIPT, arrival_time=float(number))

    engine.run()

    states = [state for _, state in engine.states]
    first = states[0]
    assert (first.running_requests, first.waiting_requests) == (2, 1)
    assert max(state.running_requests for state in states) == 2
    assert max(state.running_threads for state in states) == 6
    assert {state.waiting_requests for state in states} == {0, 1}
    last = states[-1]
    assert (last.running_requests, last.waiting_requests, last.threads) == (0, 0, 0)
    assert (last.admission_counters.accepted, last.child_tokens) == (6, 6 * CHILD_TOKENS)
    assert last.free_blocks == last.kv_blocks
    assert {engine_index for engine_index, _ in engine.states} == {3}


def test_a_preempted_request_has_begun(model_dir: Path) -> None:
    engine = ScriptedEngine(EngineShape(num_blocks=12), model_dir)
    for number in range(2):
        engine.add(f"r{number}", PROMPT, {"": [*range(10, 40), END]}, arrival_time=float(number))
    while not any(request.num_preemptions for request in engine.scheduler.waiting):
        assert engine.step()

    state = core_state(engine.scheduler)

    assert (state.running_threads, state.waiting_threads) == (1, 1)
    assert (state.running_requests, state.waiting_requests) == (2, 0)


def test_a_short_answer_is_reported_at_its_start_and_at_its_end(model_dir: Path) -> None:
    engine = reporting(model_dir, step_s=0.001)
    for name in ("a", "b"):
        engine.add(name, PROMPT, SCRIPT)
        engine.run()

    assert [state.requests for _, state in engine.states] == [1, 0, 0]


def test_an_answer_of_one_step_is_reported(model_dir: Path) -> None:
    engine = reporting(model_dir, step_s=0.001)
    for name in ("a", "b"):
        engine.add(name, PROMPT, {"": [10, END]}, max_tokens=1)
        engine.run()

    assert [(state.requests, state.generated_tokens) for _, state in engine.states] == [
        (0, 1),
        (0, 2),
    ]


def test_an_aborted_request_does_not_stay_in_the_numbers(model_dir: Path) -> None:
    engine = reporting(model_dir, step_s=0.001)
    engine.add("a", PROMPT, SCRIPT)
    for _ in range(5):
        engine.step()
    engine.abort("a")
    engine.run()

    assert [state.requests for _, state in engine.states] == [1, 0]


def test_the_state_goes_to_the_first_api_process_and_survives_vllms_encoding(
    model_dir: Path,
) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("a", PROMPT, SCRIPT)
    engine.step()
    outputs = {1: EngineCoreOutputs(outputs=[EngineCoreOutput("a", [10])])}

    StateReports(1).attach(outputs, engine.scheduler)

    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0]))
    state = take_state(decoded.outputs)
    assert state is not None
    assert state[0] == 1
    assert asdict(state[1]) == asdict(core_state(engine.scheduler))
    assert decoded.outputs == []
    assert take_state(outputs[1].outputs) is None
    assert len(outputs[1].outputs) == 1
