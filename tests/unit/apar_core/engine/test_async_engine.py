import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestOutputCollector

from apar_core.engine.async_engine import AparAsyncLLM
from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.fork_parameters import EXTRA_ARG
from tests.fakes.scripted_engine import fork_parameters


class RefusingCore:
    """Engine core that refuses every request."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.aborted: list[str] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        raise self.error

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


@pytest.mark.parametrize("error", [OverflowError("too large"), asyncio.CancelledError()])
async def test_a_request_that_cannot_be_sent_to_the_engine_core_is_forgotten(
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
    # The engine was never started, so there is nothing to shut down.
    engine.engine_core = None


class AnsweringEngine(AparAsyncLLM):
    """Engine that answers every request at once and refuses one."""

    def __init__(self, *, refuses: str) -> None:
        self.refuses = refuses
        self.asked: list[SamplingParams] = []
        self.counted: list[object] = []
        self.num_inside = self.most_inside = 0
        vars(self).update(
            _logger_ref=["statistics"],
            engine_core=None,
            output_processor=ForkOutputProcessor(None, log_stats=False),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_size=1),
                model_config=SimpleNamespace(runner_type="generate"),
            ),
            input_processor=SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [7])),
        )

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        params = args[1]
        if getattr(params, self.refuses):
            raise VLLMValidationError(f"{self.refuses} is not offered")
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        await asyncio.sleep(0)
        self.num_inside -= 1
        self.asked.append(params)
        self.counted += filter(None, self._logger_ref)
        yield "an answer"


async def test_an_engine_is_warmed_up_with_each_parameter_alone_and_with_all_at_once() -> None:
    engine = AnsweringEngine(refuses="min_p")

    await engine.warm_up()

    alone = engine.asked[: len(engine.asked) // 2]
    usual = SamplingParams(max_tokens=alone[0].max_tokens)
    fields = ["logprobs", "prompt_logprobs", "seed", "top_p", "top_k", "presence_penalty"]
    fields += ["frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens"]
    fields += ["allowed_token_ids", "structured_outputs", "temperature"]
    for field in fields:
        assert any(getattr(params, field) != getattr(usual, field) for params in alone), field
    assert engine.most_inside == len(alone)


async def test_the_warm_up_is_not_counted_in_statistics() -> None:
    engine = AnsweringEngine(refuses="min_p")

    await engine.warm_up()

    assert engine.counted == []
    assert vars(engine)["_logger_ref"] == ["statistics"]
