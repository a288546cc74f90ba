"""Aborts with several engines: vLLM's client knows a request's engine while a thread is live."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from tests.fakes.scripted_engine import (
    END,
    FORK,
    EngineShape,
    ScriptedEngine,
    fork_parameters,
)

PROMPT = list(range(100, 110))
ROOT_ENDS_FIRST = {"": [10, FORK, 11, FORK, 12, END], "0": [*range(20, 60), END], "1": [13, END]}
ENGINE = b"\x00\x00"


class OneOfManyEngines(DPLBAsyncMPClient):
    """vLLM's client of several engines, without sockets, with one scripted engine."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.reqs_in_flight = {}
        self.engine_inflight = Counter()
        self.streaming_reqs: set[str] = set()  # vLLM 0.33
        # Attributes that vLLM's methods read before they send anything.
        self.resources: Any = SimpleNamespace(engine_dead=False)

    def add(self, request_id: str, script: dict[str, list[int]], **settings: Any) -> None:
        self.reqs_in_flight[request_id] = ENGINE
        self.engine_inflight[ENGINE] += 1
        self.engine.add(request_id, PROMPT, script, **settings)

    async def step(self) -> bool:
        goes_on = self.engine.step()
        for message in self.engine.take_messages():
            await self.process_engine_outputs(self, message)
        return goes_on

    async def _send_input(
        self, request_type: EngineCoreRequestType, request: Any, engine: Any = None
    ) -> None:
        assert (request_type, engine) == (EngineCoreRequestType.ABORT, ENGINE)
        for request_id in request:
            self.engine.abort(request_id)


@pytest.mark.parametrize("run_ahead", [False, True])
async def test_an_abort_after_the_root_has_finished_ends_its_children(
    model_dir: Path, run_ahead: bool
) -> None:
    client = OneOfManyEngines(ScriptedEngine(EngineShape(run_ahead=run_ahead), model_dir))
    client.add("a", ROOT_ENDS_FIRST)
    while "a" in client.engine.scheduler.requests or "a~0" not in client.engine.scheduler.requests:
        await client.step()
    for _ in range(3):
        await client.step()

    await client.abort_requests_async(["a"])

    assert not client.engine.scheduler.requests
    while await client.step():
        pass
    client.engine.assert_nothing_is_left()
    assert client.reqs_in_flight == {}
    assert client.engine_inflight == {ENGINE: 0}


@pytest.mark.parametrize("max_threads", [1, 2, 16])
@pytest.mark.parametrize("max_tokens", [1, 5, 20, 200])
async def test_the_client_forgets_every_request_that_has_ended(
    model_dir: Path, max_threads: int, max_tokens: int
) -> None:
    client = OneOfManyEngines(ScriptedEngine(EngineShape(), model_dir))
    parameters = fork_parameters(max_threads=max_threads)
    client.add("a", ROOT_ENDS_FIRST, max_tokens=max_tokens, parameters=parameters)
    client.add("b", {"": [10, 11, END]})

    while await client.step():
        pass

    client.engine.assert_nothing_is_left()
    assert client.reqs_in_flight == {}
    assert client.engine_inflight == {ENGINE: 0}
