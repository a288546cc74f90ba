"""The engine of a server: vLLM's AsyncLLM with forks, statistics, resumption and warm-up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

from vllm import SamplingParams, TokensPrompt
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams

from apar_core.engine import plugin
from apar_core.engine.input_processor import ForkInputProcessor
from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.engine.request_follower import RequestFollower
from apar_core.engine.resume_request import completed, hand_to_scheduler
from apar_core.engine.thread_outputs import RequestRecord
from apar_core.fork_parameters import KeyTerms
from apar_core.formats.control_tokens import ControlTokens
from apar_core.formats.resolved_format import ResolvedFormat
from apar_core.journal import Journal
from apar_core.scheduler.core_state import CORE_STATE_CALL, CoreState, combined
from apar_core.scheduler.fork_settings import generates
from apar_core.vllm_names import (
    AsyncLLM,
    EngineCoreRequest,
    EngineGenerateError,
    without_statistics,
)

logger = logging.getLogger(__name__)

# Before any engine is built, because AsyncLLM looks its processors up by name.
plugin.register()
plugin.install_processors()

SCHEDULER_CLS = "apar_core.scheduler.fork_scheduler.ForkScheduler"
"""Value of vLLM's `scheduler_cls` for an engine that forks."""

_WARM_UP_PROMPT = "Hello"
# One token from the prompt's step, one from a decoding step.
_WARM_UP_TOKENS = 2
# Sampling parameters that are warmed up alone and then together.
_WARM_UP_PARAMS: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 1,
    "top_p": 0.9,
    "top_k": 10,
    "min_p": 0.01,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {0: 1.0},
    "bad_words": [_WARM_UP_PROMPT],
    "logprobs": 2,
}
_WARM_UP_CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
    "regex": {"regex": "[a-z]+"},
    "choice": {"choice": ["yes", "no"]},
    "grammar": {"grammar": 'root ::= "yes" | "no"'},
}


class AparAsyncLLM(AsyncLLM):
    """An AsyncLLM whose requests fork; build it with `scheduler_cls=SCHEDULER_CLS`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._input.explain_refusals()

    @property
    def format(self) -> ResolvedFormat | None:
        """The checkpoint's format of parallel text; None if it is an ordinary model."""
        return self._input.format

    @property
    def control_tokens(self) -> ControlTokens | None:
        """Fork and child token; None if the checkpoint has no such pair."""
        return self._input.control_tokens

    def take_statistics(self, request_id: str) -> RequestRecord | None:
        """Remove and return the record of a finished request, by its external id."""
        return self._output.records.take(request_id)

    def follow(
        self, request_id: str, follower: RequestFollower, terms: KeyTerms | None = None
    ) -> None:
        """Report a client's request to a follower, by its external id, until `unfollow`.

        The request runs on these terms; without any, it has no key and no priority.
        """
        self._output.follow(request_id, follower)
        self._input.key_terms[request_id] = terms

    def unfollow(self, request_id: str) -> None:
        """Stop reporting a request, and forget its terms."""
        self._output.unfollow(request_id)
        self._input.key_terms.pop(request_id, None)

    def end(self, request_id: str) -> bool:
        """End a client's request now, with what it has generated and finish reason "length".

        Its KV blocks are freed as after an abort. Returns whether the engine has the request.
        """
        ended = self._output.end(request_id)
        if ended:
            aborting = asyncio.get_running_loop().create_task(
                self.engine_core.abort_requests_async(ended)
            )
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
        return bool(ended)

    @cached_property
    def _aborting(self) -> set[asyncio.Task[None]]:
        """Aborts on their way to the engine core."""
        return set()

    def pace_streams(self, pause_s: float) -> None:
        """Merge the outputs of each new stream within `pause_s` seconds, or longer under load."""
        self._output.stream_pause_s = pause_s

    async def warm_up(self) -> None:
        """Answer a request for each sampling parameter before the first client's request.

        The first use of a parameter may compile kernels or load a library inside an engine step,
        which stalls all running streams: on a CPU for half a minute. vLLM's statistics do not count
        these requests; the engine core's own counters do.
        """
        if not generates(self.vllm_config):
            return
        begin_s = time.monotonic()
        with without_statistics(self):
            num_engines = self.vllm_config.parallel_config.data_parallel_size
            ranks: Sequence[int | None] = range(num_engines) if num_engines > 1 else [None]
            for rank in ranks:
                taken = [
                    (name, params)
                    for name, params in _warm_up_params()
                    if await self._warm_up_with(name, params, rank)
                ]
                # Also steps with several rows of different kinds.
                await asyncio.gather(
                    *(self._warm_up_with(name, params, rank) for name, params in taken)
                )
        logger.info("engine warmed up", extra={"seconds": round(time.monotonic() - begin_s, 1)})

    async def _warm_up_with(self, name: str, params: SamplingParams, rank: int | None) -> bool:
        """Answer a request; return whether the engine takes its parameters."""
        tokenizer: Any = self._input.tokenizer
        token_ids = [0] if tokenizer is None else tokenizer.encode(_WARM_UP_PROMPT)
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        request_id = f"warm-up-{name}"
        try:
            async for _ in self.generate(prompt, params, request_id, data_parallel_rank=rank):
                pass
        except (VLLMClientError, EngineGenerateError) as error:
            # Clients are refused in the same way, for example min_p with speculative decoding.
            logger.info("not warmed up", extra={"parameter": name, "reason": repr(error)})
            return False
        finally:
            self.take_statistics(request_id)
        return True

    async def _add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """Add a request as vLLM does, but forget it if it cannot be sent to the engine core."""
        try:
            journal = self._output.journal_of(request)
            if journal is None:
                await super()._add_request(request, *args, **kwargs)
            else:
                await self._resume_request(request, journal, *args, **kwargs)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    async def _resume_request(
        self, request: EngineCoreRequest, journal: Journal, *args: Any, **kwargs: Any
    ) -> None:
        """Add a request that another engine has started."""
        journal = completed(
            request, journal, self.model_config.max_model_len, self._input.tokenizer
        )
        self._output.add_request(request, *args, **kwargs)
        if self._output.replay(request, journal):
            hand_to_scheduler(request, journal)
            await self.engine_core.add_request_async(request)

    @property
    def _input(self) -> ForkInputProcessor:
        return cast(ForkInputProcessor, self.input_processor)

    @property
    def _output(self) -> ForkOutputProcessor:
        return cast(ForkOutputProcessor, self.output_processor)

    async def core_state(self) -> CoreState:
        """Return the state of the engine core, of all its data-parallel ranks together."""
        return combined(await self.core_states())

    async def core_states(self) -> list[CoreState]:
        """Return the state of each data-parallel rank's engine core."""
        core: Any = self.engine_core
        if self.vllm_config.parallel_config.data_parallel_size == 1:
            states = [await core.call_utility_async(CORE_STATE_CALL)]
        else:
            # `call_utility_async` returns the first rank's answer only.
            states = await core.call_utility_all_async(CORE_STATE_CALL)
        return [CoreState.from_plain(state) for state in states]


def _warm_up_params() -> Iterator[tuple[str, SamplingParams]]:
    """Yield names and parameters of requests with each parameter alone, then most of them."""
    yield "greedy", _params(temperature=0.0)
    for name, value in _WARM_UP_PARAMS.items():
        yield name, _params(**{name: value})
    yield "greedy_logprobs", _params(temperature=0.0, logprobs=1)
    yield "prompt_logprobs", _params(prompt_logprobs=1)
    yield "min_tokens", _params(min_tokens=1)
    yield "allowed_token_ids", _params(allowed_token_ids=[0, 1, 2])
    for name, constraint in _WARM_UP_CONSTRAINTS.items():
        yield name, _params(structured_outputs=StructuredOutputsParams(**constraint))
    yield "together", _params(**_WARM_UP_PARAMS)


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=_WARM_UP_TOKENS, **values)
