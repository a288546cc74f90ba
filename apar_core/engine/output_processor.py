"""vLLM's output processor, which sees one growing text where the engine runs many threads."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState
from vllm.v1.outputs import LogprobsLists

from apar_core.engine.client_ids import beam_search_of, find_client
from apar_core.engine.journal import RequestFollower
from apar_core.engine.paced_outputs import interval_under_load, pace
from apar_core.engine.request_record import RequestRecords
from apar_core.engine.resumption import outputs_so_far
from apar_core.engine.separators import separators
from apar_core.engine.thread_outputs import RequestThreads, TextToken, UnforkedThread
from apar_core.fork_parameters import ForkParameters
from apar_core.journal import Journal
from apar_core.scheduler.resumption import forget_journal
from apar_core.tree.restore import Separator


class ForkOutputProcessor(OutputProcessor):
    """Turns the outputs of threads into outputs of their requests; passes all others through.

    Detokenising, stop strings, log-probabilities, usage and vLLM's statistics happen behind it, on
    the restored text.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.records = RequestRecords()
        # By engine request id: a request's root and, once opened, each of its threads.
        self._threads: dict[str, RequestThreads] = {}
        # Requests that may not fork: their one thread is only watched, for its statistics.
        self._unforked: dict[str, UnforkedThread] = {}
        # By the request id that the client's side knows, as long as it wants to be told.
        self._followers: dict[str, RequestFollower] = {}
        # By engine request id: the followed requests of checkpoints without control tokens.
        self._plain: dict[str, RequestFollower] = {}
        self.stream_pause_s = 0.0

    def follow(self, request_id: str, follower: RequestFollower) -> None:
        """Tell a follower of a client's request, by its external id, until `unfollow`."""
        self._followers[request_id] = follower

    def unfollow(self, request_id: str) -> None:
        """Tell the follower of a request no more."""
        self._followers.pop(request_id, None)

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """Register a request; one that may fork gets a paragraph tree.

        A streaming-input session adds the same request again for each part of its input, and once
        more to end it, which may remove its state at once.
        """
        forget_journal(request.sampling_params)
        is_new = request.request_id not in self.request_states
        super().add_request(request, *args, **kwargs)
        if not is_new:
            return
        if self.stream_pause_s > 0:
            pace(self.request_states[request.request_id], self._stream_pause_now_s)
        params = request.sampling_params
        if params is None:
            return
        state = self.request_states[request.request_id]
        follower = find_client(self._followers, state.external_req_id)
        if follower is not None:
            _begin(follower, state, params)
        parameters = ForkParameters.from_extra_args(params.extra_args)
        if parameters is None:
            if follower is not None:
                self._plain[request.request_id] = follower
            return
        if not parameters.enabled:
            self._unforked[request.request_id] = UnforkedThread(parameters, follower)
            return
        self._threads[request.request_id] = RequestThreads(
            request.request_id,
            parameters,
            self._separator if parameters.separated else None,
            follower,
            num_logprobs=params.num_logprobs,
        )

    def journal_of(self, request: EngineCoreRequest) -> Journal | None:
        """The journal that a request shall go on from; None for a new one."""
        if request.sampling_params is None or request.external_req_id is None:
            return None
        follower = find_client(self._followers, request.external_req_id)
        return None if follower is None else follower.resume

    def replay(self, request: EngineCoreRequest, journal: Journal) -> bool:
        """Put out what is known of an added request; returns whether the engine has more to do."""
        state = self.request_states[request.request_id]
        follower = find_client(self._followers, state.external_req_id)
        if follower is not None:
            follower.replay(begins=True)
        # A trace belongs to an engine that has worked on the request.
        traces, self.tracing_enabled = self.tracing_enabled, False
        self.process_outputs(outputs_so_far(request, journal))
        self.tracing_enabled = traces
        if follower is not None:
            follower.replay(begins=False)
        # The engine has yet to read the prompt: vLLM's statistics begin with its first output.
        state.is_prefilling = True
        return request.request_id in self.request_states

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        """As in vLLM, after the outputs of threads have been joined to those of their requests."""
        for output in engine_core_outputs if self._plain else ():
            if (follower := self._plain.get(output.request_id)) is not None:
                follower.add(output)
        if self._unforked:
            self._watch_unforked(engine_core_outputs)
        if not self._threads:
            return super().process_outputs(engine_core_outputs, *args, **kwargs)
        joined, unfinished = self._join(engine_core_outputs)
        processed = super().process_outputs(joined, *args, **kwargs)
        processed.reqs_to_abort.extend(unfinished)
        return processed

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """As in vLLM. The engine ends all threads of a request with its root."""
        states = dict(self.request_states)
        aborted = super().abort_requests(request_ids, internal)
        for request_id in aborted:
            if request_id in states:
                self._forget(states[request_id])
        return aborted

    def _join(
        self, engine_core_outputs: list[EngineCoreOutput]
    ) -> tuple[list[EngineCoreOutput], list[str]]:
        """Outputs by request, and requests that a stop token ended before all their threads."""
        joined: list[EngineCoreOutput] = []
        fed: dict[str, RequestThreads] = {}
        for output in engine_core_outputs:
            threads = self._threads.get(output.request_id)
            if threads is None:
                joined.append(output)
                continue
            for child_id in threads.feed(output):
                self._threads[child_id] = threads
            fed[threads.request_id] = threads
        unfinished: list[str] = []
        for threads in fed.values():
            outputs = threads.take()
            joined.extend(outputs)
            if outputs and outputs[-1].finished and not threads.tree.finished:
                unfinished.append(threads.request_id)
        return joined, unfinished

    def _watch_unforked(self, engine_core_outputs: list[EngineCoreOutput]) -> None:
        """Count what requests that may not fork generate; their outputs go on as they are."""
        for output in engine_core_outputs:
            thread = self._unforked.get(output.request_id)
            if thread is None:
                continue
            if output.new_logprobs is not None:
                output.new_logprobs = _without_control_tokens(
                    output.new_logprobs, thread.parameters
                )
            thread.watch(output)

    def _finish_request(self, req_state: RequestState) -> None:
        super()._finish_request(req_state)
        self._forget(req_state)

    def _forget(self, req_state: RequestState) -> None:
        """Drop a request's threads; what the engine still sends of them is ignored."""
        request_id = req_state.request_id
        self._plain.pop(request_id, None)
        threads: RequestThreads | UnforkedThread | None = self._unforked.pop(request_id, None)
        if (forked := self._threads.get(request_id)) is not None:
            threads = forked
            for thread_request_id in forked.thread_request_ids:
                self._threads.pop(thread_request_id, None)
            forked.cut()
        if threads is None:
            return
        statistics = self.records.add(req_state.external_req_id, threads, req_state.prompt_len)
        if threads.follower is not None:
            threads.follower.end(statistics)

    def _stream_pause_now_s(self) -> float:
        return interval_under_load(self.stream_pause_s, len(self.request_states))

    @cached_property
    def _separator(self) -> Separator[TextToken]:
        return separators(self.tokenizer)


def _begin(follower: RequestFollower, state: RequestState, params: SamplingParams) -> None:
    """Tell a follower of a request that the engine is about to get."""
    search = beam_search_of(state.external_req_id)
    if search is not None:
        follower.begin_beam(search, state.prompt_len)
        return
    choice = None if state.parent_req is None else state.request_index
    follower.begin(state.request_id, state.prompt_len, params, choice=choice)


def _without_control_tokens(logprobs: LogprobsLists, parameters: ForkParameters) -> LogprobsLists:
    """Report banned control tokens as impossible.

    vLLM takes log-probabilities before any ban; beam search would follow them.
    """
    token_ids = logprobs.logprob_token_ids
    banned = (token_ids == parameters.fork_id) | (token_ids == parameters.child_id)
    return logprobs._replace(logprobs=np.where(banned, -np.inf, logprobs.logprobs))
