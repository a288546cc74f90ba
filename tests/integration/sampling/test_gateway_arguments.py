"""What only the gateway may say of a request: whose it is, and how urgent."""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from apar_core.engine.offline import OfflineEngine
from tests.integration.engine_process import EngineProcess

pytestmark = pytest.mark.engine


def processed(
    engine: OfflineEngine, extra_args: dict[str, Any], priority: int
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Priority, extra arguments and the caller's own ones afterwards. Runs in the engine."""
    from vllm import SamplingParams

    params = SamplingParams(extra_args=extra_args)
    request = engine.llm.llm_engine.input_processor.process_inputs(
        "r", "Hi", params, ("generate",), priority=priority
    )
    assert request.sampling_params is not None
    return request.priority, dict(request.sampling_params.extra_args or {}), extra_args


def test_the_gateways_priority_counts_and_the_clients_does_not(engine: EngineProcess) -> None:
    assert engine.call(processed, {}, -5)[0] == 0
    assert engine.call(processed, {"apar_priority": 3}, -5)[0] == 3


def test_key_and_cap_reach_the_scheduler_and_nothing_else_does(engine: EngineProcess) -> None:
    given = {"apar_key": "alice", "apar_key_max_threads": 7, "apar_priority": 1}

    _, extra_args, afterwards = engine.call(processed, given, 0)

    assert extra_args.keys() == {"apar"}
    assert (extra_args["apar"]["key"], extra_args["apar"]["key_max_threads"]) == ("alice", 7)
    assert afterwards == given  # The caller may use its parameters again.


def test_without_a_key_nothing_is_counted(engine: EngineProcess) -> None:
    _, extra_args, _ = engine.call(processed, {}, 0)

    assert (extra_args["apar"]["key"], extra_args["apar"]["key_max_threads"]) == (None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("key_max_threads", 0), ("key_max_threads", "many"), ("priority", "urgent")],
)
def test_a_wrong_value_is_refused_by_its_name(
    engine: EngineProcess, name: str, value: object
) -> None:
    with pytest.raises(VLLMValidationError, match=rf"apar\.{name}"):
        engine.call(processed, {f"apar_{name}": value}, 0)
