import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestOutputCollector

from apar_core.engine.async_engine import AparAsyncLLM
from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.fork_parameters import EXTRA_ARG
from tests.fakes.scripted_engine import fork_parameters


class RefusingCore:
    """An engine core that no request reaches."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.aborted: list[str] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        raise self.error

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


@pytest.mark.parametrize("error", [OverflowError("too large"), asyncio.CancelledError()])
async def test_request_that_does_not_reach_the_engine_core_is_forgotten(
    error: BaseException,
) -> None:
    engine: Any = AparAsyncLLM.__new__(AparAsyncLLM)
    engine.output_processor = ForkOutputProcessor(None, log_stats=False)
    engine.engine_core = RefusingCore(error)
    engine.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
    engine.admission_stats = engine.logger_manager = None
    engine.log_requests = False
    params = SamplingParams(extra_args={EXTRA_ARG: fork_parameters().to_extra_arg()})
    request = EngineCoreRequest(
        "r", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="client's"
    )
    queue = RequestOutputCollector(params.output_kind, "r")

    with pytest.raises(type(error)):
        await engine._add_request(request, None, None, 0, queue)

    assert not engine.output_processor.has_unfinished_requests()
    assert engine.output_processor._threads == {}
    assert engine.engine_core.aborted == ["r"]
    # Nothing to shut down: the engine was never started.
    engine.engine_core = None
