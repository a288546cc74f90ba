"""vLLM's output processor: shows vLLM one growing text where the engine runs many threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from vllm import SamplingParams

from apar_core.engine.answer_tree import TREE_ARG, TreeRecorder, add_to_metrics
from apar_core.engine.block_threads import BlockThreads
from apar_core.engine.list_threads import ListThreads
from apar_core.engine.paced_outputs import pace
from apar_core.engine.request_follower import RequestFollower, beam_search_of, find_client
from apar_core.engine.resume_request import outputs_so_far
from apar_core.engine.server_metrics import ServerMetrics, announced
from apar_core.engine.thread_outputs import (
    RequestRecords,
    RequestThreads,
    TextToken,
    UnforkedThread,
    watch_unforked,
)
from apar_core.engine.thread_tags import Decoder, ThreadTags
from apar_core.fork_parameters import ForkParameters, may_be_held
from apar_core.formats.lists import ListRules
from apar_core.formats.resolved_format import token_texts
from apar_core.formats.rules import block_rules
from apar_core.journal import Journal
from apar_core.scheduler.constraints import constraint_error, failed_constraint
from apar_core.scheduler.held_outputs import interval_under_load
from apar_core.scheduler.state_reports import take_state
from apar_core.scheduler.thread_requests import forget_journal
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import Edge, Separator
from apar_core.vllm_names import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    IncrementalDetokenizer,
    IterationStats,
    LogprobsLists,
    OutputProcessor,
    OutputProcessorOutput,
    RequestState,
    complete_outputs,
    decoded_text,
    watch_text,
)


class ForkOutputProcessor(OutputProcessor):
    """Joins the outputs of threads into outputs of their requests; passes all others through.

    vLLM's detokenizer, stop strings, log-probabilities, usage and statistics then work on the
    restored text.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.records = RequestRecords()
        # By engine request id of each thread of a request that may fork.
        self._threads: dict[str, RequestThreads] = {}
        # By engine request id of a request that may not fork.
        self._unforked: dict[str, UnforkedThread] = {}
        # By the client's request id, between `follow` and `unfollow`.
        self._followers: dict[str, RequestFollower] = {}
        # By engine request id, if the checkpoint has no control tokens.
        self._plain: dict[str, RequestFollower] = {}
        # By engine request id, if the client asked for a thread-tagged stream.
        self._tagged: dict[str, ThreadTags] = {}
        # By engine request id, if the request asks for the tree of its answer.
        self._recorders: dict[str, TreeRecorder] = {}
        # By engine request id, if the engine core may send the tokens of several steps together:
        # number of steps after the last message. 0 for a single thread: one step per token.
        self._num_steps: dict[str, int] = {}
        self.stream_pause_s = 0.0
        exporting = announced()
        self._metrics: ServerMetrics | None = None
        if exporting is not None and self.log_stats:
            self._metrics = ServerMetrics(exporting)

    def follow(self, request_id: str, follower: RequestFollower) -> None:
        """Report a client's request to a follower, by its external id, until `unfollow`."""
        self._followers[request_id] = follower

    def unfollow(self, request_id: str) -> None:
        """Stop reporting a request."""
        self._followers.pop(request_id, None)

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """Register a request; a request that may fork gets a paragraph tree.

        A streaming-input session adds the same request once for each part of its input. It adds
        the request once more to end the session, which may remove its state at once.
        """
        forget_journal(request.sampling_params)
        is_new = request.request_id not in self.request_states
        super().add_request(request, *args, **kwargs)
        if not is_new:
            return
        params = request.sampling_params
        if params is not None and may_be_held(params.extra_args):
            self._num_steps[request.request_id] = 0
        elif self.stream_pause_s > 0:
            pace(self.request_states[request.request_id], self._stream_pause_now_s)
        state = self.request_states[request.request_id]
        follower = find_client(self._followers, state.external_req_id)
        if params is None:
            if follower is not None:
                follower.begin_pooling(state.prompt_len)
            return
        if follower is not None:
            _begin(follower, state, params)
        parameters = ForkParameters.from_extra_args(params.extra_args)
        if parameters is None or not parameters.enabled:
            self._tag(follower, state, params, ParagraphTree())
            self._record(state, params, None)
        if parameters is None:
            if follower is not None:
                self._plain[request.request_id] = follower
            return
        if not parameters.enabled:
            self._unforked[request.request_id] = UnforkedThread(parameters, follower)
            return
        threads = self._threads[request.request_id] = self._new_threads(
            request, parameters, follower, params.num_logprobs
        )
        if (tags := self._tag(follower, state, params, threads.tree)) is not None:
            threads.tag(tags)
        self._record(state, params, threads)

    def _new_threads(
        self,
        request: EngineCoreRequest,
        parameters: ForkParameters,
        follower: RequestFollower | None,
        num_logprobs: int | None,
    ) -> RequestThreads:
        request_id = request.request_id
        if parameters.blocks is not None:
            rules = block_rules(parameters.blocks, self.tokenizer)
            prompt = request.prompt_token_ids or []
            if isinstance(rules, ListRules):
                params = request.sampling_params
                return ListThreads(
                    request_id,
                    parameters,
                    rules,
                    prompt,
                    follower,
                    num_logprobs=num_logprobs,
                    max_tokens=None if params is None else params.max_tokens,
                )
            return BlockThreads(
                request_id, parameters, rules, prompt, follower, num_logprobs=num_logprobs
            )
        separator = self._separator if parameters.separated else None
        return RequestThreads(
            request_id, parameters, separator, follower, num_logprobs=num_logprobs
        )

    def journal_of(self, request: EngineCoreRequest) -> Journal | None:
        """Return the journal that a request continues; None for a new request."""
        if request.sampling_params is None or request.external_req_id is None:
            return None
        follower = find_client(self._followers, request.external_req_id)
        return None if follower is None else follower.resume

    def replay(self, request: EngineCoreRequest, journal: Journal) -> bool:
        """Process the outputs of a journal; return whether the engine must continue the request."""
        state = self.request_states[request.request_id]
        follower = find_client(self._followers, state.external_req_id)
        if follower is not None:
            follower.replay(begins=True)
        # The lost engine did this work, so it gives no trace here.
        traces, self.tracing_enabled = self.tracing_enabled, False
        self.process_outputs(outputs_so_far(request, journal, self.tokenizer))
        self.tracing_enabled = traces
        if follower is not None:
            follower.replay(begins=False)
        # The engine has not read the prompt yet: vLLM's statistics start with its first output.
        state.is_prefilling = True
        return request.request_id in self.request_states

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        """Join the outputs of threads into those of their requests, and process these."""
        reported = take_state(engine_core_outputs)
        if reported is not None and self._metrics is not None:
            self._metrics.take_state(*reported)
        for output in engine_core_outputs:
            if output.finish_reason == FinishReason.ERROR:
                self._explain(output)
        for output in engine_core_outputs if self._recorders else ():
            if (recorder := self._recorder(output.request_id)) is not None:
                recorder.add(output)
        for output in engine_core_outputs if self._plain else ():
            if (follower := self._plain.get(output.request_id)) is not None:
                follower.add(output)
                num_text = len(output.new_token_ids)
                if output.finish_reason == FinishReason.STOP and output.stop_reason is None:
                    # The last token is the model's end token: it is not named as the reason.
                    num_text = max(0, num_text - 1)
                follower.certain(num_text)
        if self._unforked:
            self._watch_unforked(engine_core_outputs)
        for output in engine_core_outputs if self._tagged else ():
            if output.request_id in self._tagged and output.request_id not in self._threads:
                watch_unforked(self._tagged[output.request_id], output)
        if not self._threads:
            return super().process_outputs(engine_core_outputs, *args, **kwargs)
        joined, unfinished = self._join(engine_core_outputs)
        processed = super().process_outputs(joined, *args, **kwargs)
        processed.reqs_to_abort.extend(unfinished)
        if self._tagged:
            self._show_updates(engine_core_outputs)
        return processed

    def _explain(self, output: EngineCoreOutput) -> None:
        """Raise the reason where the request's outputs are read, if its constraint failed."""
        state = self.request_states.get(output.request_id)
        reason = failed_constraint(output)
        if state is None or state.queue is None or reason is None:
            return
        # Imported here: the offline engine has no queues.
        from apar_core.vllm_names import InputStreamError

        # The error for which vLLM also aborts the other choices of the request.
        state.queue.put(InputStreamError(constraint_error(reason)))

    def end(self, request_id: str) -> list[str]:
        """End a client's request with finish reason "length" and all that its threads have written.

        Returns the engine's ids of its requests, which the engine core must still abort. An
        embedding ends as after an abort.
        """
        follower = self._followers.get(request_id)
        ended = [
            state
            for state in self.request_states.values()
            if follower is not None
            and find_client(self._followers, state.external_req_id) is follower
        ]
        for state in ended:
            if state.detokenizer is None:  # An embedding has no part that could be kept.
                self.abort_requests([state.request_id], internal=True)
                continue
            threads = self._threads.get(state.request_id)
            thread_ids = [state.request_id] if threads is None else threads.unfinished
            self.process_outputs(
                [
                    EngineCoreOutput(each, [], finish_reason=FinishReason.LENGTH)
                    for each in thread_ids
                ]
            )
            self.lora_states.request_finished(state.request_id, state.lora_name)
        return [state.request_id for state in ended]

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Abort requests; the scheduler ends all threads of a request with its root."""
        states = dict(self.request_states)
        aborted = super().abort_requests(request_ids, internal)
        for request_id in aborted:
            if request_id in states:
                self._forget(states[request_id])
        return aborted

    def _join(
        self, engine_core_outputs: list[EngineCoreOutput]
    ) -> tuple[list[EngineCoreOutput], list[str]]:
        """Return outputs by request, and requests that a stop token ended before their threads."""
        joined: list[EngineCoreOutput] = []
        fed: dict[str, RequestThreads] = {}
        for output in engine_core_outputs:
            threads = self._threads.get(output.request_id)
            if threads is None:
                joined.append(output)
                continue
            for child_id in threads.feed(output):
                self._threads[child_id] = threads
            if threads.request_id in self._num_steps:
                num_steps = len(output.new_token_ids)
                if threads.request_id in fed:
                    num_steps = max(num_steps, self._num_steps[threads.request_id])
                self._num_steps[threads.request_id] = num_steps
            fed[threads.request_id] = threads
        unfinished: list[str] = []
        for threads in fed.values():
            outputs = threads.take()
            joined.extend(outputs)
            if threads.follower is not None:
                threads.follower.certain(sum(len(each.new_token_ids) for each in outputs))
            if outputs and outputs[-1].finished and not threads.tree.finished:
                unfinished.append(threads.request_id)
        return joined, unfinished

    def _tag(
        self,
        follower: RequestFollower | None,
        state: RequestState,
        params: SamplingParams,
        tree: ParagraphTree[TextToken],
    ) -> ThreadTags | None:
        """Begin to tag what the threads of a new request write, if its client asked for it."""
        stream = None if follower is None else follower.tags
        if stream is None or self.tokenizer is None or not params.detokenize:
            return None
        parent = state.parent_req
        tags = ThreadTags(
            stream.choice(
                state.external_req_id, state.request_index, 1 if parent is None else parent.n
            ),
            tree,
            state.prompt_token_ids or (),
            partial(_new_decoder, self.tokenizer, params),
        )
        stream.add(tags)
        stream.interval_s = self._stream_pause_now_s
        self._tagged[state.request_id] = tags
        watch_text(state, tags.note)
        return tags

    def _record(
        self, state: RequestState, params: SamplingParams, threads: RequestThreads | None
    ) -> None:
        """Record what the threads of a new request generate, if its caller asked for it."""
        if not (params.extra_args or {}).get(TREE_ARG):
            return
        decoder = None if self.tokenizer is None else partial(_new_decoder, self.tokenizer, params)
        recorder = TreeRecorder(state.request_id, state.prompt_token_ids or (), threads, decoder)
        self._recorders[state.request_id] = recorder
        complete_outputs(
            state,
            lambda completion: setattr(completion, TREE_ARG, recorder.answer(completion)),
            add_to_metrics,
        )

    def _recorder(self, request_id: str) -> TreeRecorder | None:
        """Return the recorder of a thread, by its engine request id."""
        while request_id not in self._recorders:
            request_id, separator, _ = request_id.rpartition("~")
            if not separator:
                return None
        return self._recorders[request_id]

    def _show_updates(self, engine_core_outputs: list[EngineCoreOutput]) -> None:
        """Announce updates of tagged streams that may get no chunk of ordered text now."""
        for output in engine_core_outputs:
            threads = self._threads.get(output.request_id)
            if threads is not None and threads.follower is not None and threads.follower.tags:
                threads.follower.tags.announce()

    def _watch_unforked(self, engine_core_outputs: list[EngineCoreOutput]) -> None:
        """Count the outputs of requests that may not fork."""
        for output in engine_core_outputs:
            thread = self._unforked.get(output.request_id)
            if thread is None:
                continue
            if output.new_logprobs is not None:
                output.new_logprobs = _without_control_tokens(
                    output.new_logprobs, thread.parameters
                )
            thread.watch(output)

    def _update_stats_from_output(
        self,
        req_state: RequestState,
        engine_core_output: EngineCoreOutput,
        engine_core_timestamp: float | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        """Count as vLLM, but divide the time between tokens that came together among their steps.

        vLLM counts it once, as if one step had generated them.
        """
        super()._update_stats_from_output(
            req_state, engine_core_output, engine_core_timestamp, iteration_stats
        )
        num_steps = self._num_steps.get(req_state.request_id)
        if iteration_stats is None or num_steps is None or req_state.is_prefilling:
            return
        num_steps = num_steps or len(engine_core_output.new_token_ids)
        if num_steps > 1:
            pauses_s = iteration_stats.inter_token_latencies_iter
            pauses_s[-1:] = [pauses_s[-1] / num_steps] * num_steps

    def _finish_request(self, req_state: RequestState) -> None:
        super()._finish_request(req_state)
        self._forget(req_state)

    def _forget(self, req_state: RequestState) -> None:
        """Remove a request's threads; later outputs of them are ignored."""
        request_id = req_state.request_id
        self._plain.pop(request_id, None)
        self._num_steps.pop(request_id, None)
        self._recorders.pop(request_id, None)
        threads: RequestThreads | UnforkedThread | None = self._unforked.pop(request_id, None)
        if (forked := self._threads.get(request_id)) is not None:
            threads = forked
            for thread_request_id in forked.thread_request_ids:
                self._threads.pop(thread_request_id, None)
            forked.cut()
        if (tags := self._tagged.pop(request_id, None)) is not None:
            tags.end(decoded_text(req_state))
        if threads is None:
            return
        statistics = self.records.add(req_state.external_req_id, threads, req_state.prompt_len)
        # Each step of a beam search has requests of its own.
        if self._metrics is not None and beam_search_of(req_state.external_req_id) is None:
            self._metrics.finished(statistics, req_state.prompt_len)
        if threads.follower is not None:
            threads.follower.end(statistics)

    def _stream_pause_now_s(self) -> float:
        return interval_under_load(self.stream_pause_s, len(self.request_states))

    @cached_property
    def _separator(self) -> Separator[TextToken]:
        return _separator(self.tokenizer)


def _begin(follower: RequestFollower, state: RequestState, params: SamplingParams) -> None:
    """Report a new request of the engine to its follower."""
    search = beam_search_of(state.external_req_id)
    if search is not None:
        follower.begin_beam(search, state.prompt_len)
        return
    choice = None if state.parent_req is None else state.request_index
    follower.begin(state.request_id, state.prompt_len, params, choice=choice)


def _without_control_tokens(logprobs: LogprobsLists, parameters: ForkParameters) -> LogprobsLists:
    """Set the log-probabilities of control tokens to minus infinity.

    vLLM computes them before the bans, and beam search would follow them.
    """
    token_ids = logprobs.logprob_token_ids
    # Faster than `np.isin`; this runs for every output.
    banned = token_ids == parameters.fork_id
    for banned_id in parameters.banned_ids:
        banned |= token_ids == banned_id
    return logprobs._replace(logprobs=np.where(banned, -np.inf, logprobs.logprobs))


def _new_decoder(tokenizer: Any, params: SamplingParams, context: list[int]) -> Decoder:
    """Return a detokenizer for text that follows the tokens of `context`."""
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=context,
        mm_features=None,
        sampling_params=SamplingParams(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        ),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


_LINE_BREAK = {Edge.FIRST_CHILD: "\n", Edge.NEXT_SIBLING: "\n\n"}


def _separator(tokenizer: Any) -> Separator[TextToken]:
    """Return a separator for the released checkpoints, whose training text lacks line breaks.

    It inserts a line break before a detail and an empty line before the next paragraph, unless
    there is white space already.
    """
    text_of = token_texts(tokenizer)
    breaks = {edge: _token_ids(tokenizer, text) for edge, text in _LINE_BREAK.items()}

    def separator(previous: TextToken, following: TextToken, edge: Edge) -> Sequence[TextToken]:
        before, after = text_of(previous.token_id), text_of(following.token_id)
        separated = before[-1:].isspace() or after[:1].isspace()
        return () if separated else [TextToken(token_id, None) for token_id in breaks[edge]]

    return separator


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    prefix: list[int] = tokenizer.encode("a", add_special_tokens=False)
    token_ids: list[int] = tokenizer.encode("a" + text, add_special_tokens=False)
    return token_ids[len(prefix) :]
