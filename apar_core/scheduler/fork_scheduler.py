"""vLLM's scheduler with forks: the part of APAR that runs in the engine-core process.

Source: APAR (arXiv 2401.06761), algorithm 1. A thread is one vLLM request; the threads of a
client's request form a group that shares its token budget, its limits and its end.

Life of a fork, and where each decision is made:

1. `_update_request_with_output` sees the sampled tokens of a thread.
2. `_fork` decides whether a fork token opens a thread: the request's `max_forks`, its token budget
   and the context length (`thread_table.py`). It builds the child (`thread_requests.py`), and the
   child references its parent's KV blocks (`block_sharing.py`).
3. `_start_waiting_forks` starts children at the end of the step. `fork_admission.py` decides which:
   limits of request, key and replica, then the policy (`fork_policy.py`).
4. `_free_request` handles the end of a thread, and starts a child of a request without live threads
   regardless of limits.

`held_outputs.py` decides which outputs of a step are sent at once.

In formats whose parent waits for its children, `joins.py` opens and joins blocks of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig

from apar_core.attention.selection import family_settings, reads_families
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.blocks import JoinPoint, OpenBlock
from apar_core.journal import Journal
from apar_core.scheduler.block_sharing import BlockSharing
from apar_core.scheduler.constraints import FailedConstraints
from apar_core.scheduler.core_state import install_core_state
from apar_core.scheduler.family_reads import FamilyReads
from apar_core.scheduler.fork_admission import ForkAdmission
from apar_core.scheduler.fork_policy import build_policy
from apar_core.scheduler.fork_settings import check_engine, fork_settings
from apar_core.scheduler.held_outputs import HeldOutputs
from apar_core.scheduler.joins import Joins
from apar_core.scheduler.lists import Lists
from apar_core.scheduler.pacing import Pacing, StepPlan, first_thread
from apar_core.scheduler.request_gate import GatedQueue
from apar_core.scheduler.row_limits import RowWarnings
from apar_core.scheduler.state_reports import StateReports
from apar_core.scheduler.step_time import StepClock
from apar_core.scheduler.thread_requests import (
    build_child_request,
    end_forks,
    resumed_alone,
    resumed_threads,
    take_journal,
)
from apar_core.scheduler.thread_table import JoiningGroup, ListGroup, ThreadGroup, ThreadTable
from apar_core.step_costs.costs import StepBatch
from apar_core.step_costs.files import read_costs
from apar_core.vllm_log import log_as_vllm
from apar_core.vllm_names import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    KVCacheBlocks,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    SpecDecodingStats,
    cached_tokenizer_from_config,
    cdiv,
    is_transferring,
)

STATISTICS_S = 1.0
"""Longest time without the scheduler's statistics, in an engine that holds outputs back."""


class ForkMixin(Scheduler):
    """Opens a thread at every fork token that a forking request samples.

    Every fork token gives one child id, and every child id one output with a finish reason, even if
    no thread was opened. So the API process can follow the tree without messages.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_engine(vllm_config)
        log_as_vllm()
        # Order by arrival: children before newer requests, the youngest request preempted first.
        vllm_config.scheduler_config.policy = "priority"
        super().__init__(vllm_config, *args, **kwargs)
        install_core_state()
        self.threads: ThreadTable[Request] = ThreadTable()
        self.failed_constraints = FailedConstraints(self.structured_output_manager)
        self.block_sharing = BlockSharing(
            self.kv_cache_manager,
            lambda: len(self.running),
            row_tokens=1 + self.num_spec_tokens + self.num_lookahead_tokens,
        )
        settings = fork_settings(vllm_config)
        self.waiting = self.gate = GatedQueue(settings.max_requests)
        known = None if settings.step_costs is None else read_costs(settings.step_costs)
        policy = build_policy(
            settings.policy, settings.token_time_ms / 1000, known, settings.first_token_ms / 1000
        )
        self.admission: ForkAdmission[Request] = ForkAdmission(
            settings.max_replica_threads, policy, lambda child: child.num_prompt_tokens
        )
        family = None
        if settings.attention == "family" and reads_families(vllm_config):
            spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
            family = family_settings(vllm_config, spec.page_size_bytes)
        self.family_reads = FamilyReads(self.threads, self.block_size, family)
        self.pacing = Pacing(
            self.threads,
            self.family_reads.saved_tokens,
            lambda: self.step_clock.now_s,
            self.block_size,
        )
        self.step_plan = StepPlan()
        self._was_empty = False
        self.growth_reserve_tokens = settings.growth_reserve_tokens
        self._least_watermark_blocks = self.kv_cache_manager.watermark_blocks
        self.step_clock = StepClock()
        graph_tokens = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.row_warnings = RowWarnings(
            self.max_num_running_reqs, graph_tokens // (1 + self.num_spec_tokens)
        )
        self.num_generated_tokens = 0
        self.num_child_tokens = 0
        # Bound once, as it is called for every row of every step.
        self._take_as_vllm = super()._update_request_with_output
        self._exhausted: list[ThreadGroup[Request]] = []
        # (client index, request id, reason) of threads that end without an output from vLLM.
        self._unopened: list[tuple[int, str, FinishReason]] = []
        self.held = HeldOutputs(settings.output_interval_s)
        # The arguments of `make_stats` in this step, and what is not sent of earlier steps.
        self._in_step = False
        self._statistics_parts: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._statistics_due_s = 0.0
        self._unsent_drafts: SpecDecodingStats | None = None
        self.reports: StateReports | None = None
        if self.log_stats and settings.metrics:
            self.reports = StateReports(vllm_config.parallel_config.data_parallel_index)
        self.joins = Joins(self, lambda: cached_tokenizer_from_config(vllm_config.model_config))
        self.lists = Lists(self)

    def add_request(self, request: Request) -> None:
        """Add a client's request; a request that may fork becomes the root thread of a group."""
        journal = take_journal(request.sampling_params)
        if journal is not None:
            self._resume(request, journal)
            return
        is_new = request.request_id not in self.requests
        if is_new:
            self.gate.arrives(request.request_id)
            self.held.begin(request)
        super().add_request(request)
        parameters = _fork_parameters(request)
        if not is_new or parameters is None:
            return
        self.admission.queue.thread_began(request.request_id, parameters.key)
        if parameters.enabled:
            group = self._open_group(request, parameters)
            if isinstance(group, JoiningGroup):
                self._joins(group).begin(group, request)

    def _open_group(self, request: Request, parameters: ForkParameters) -> ThreadGroup[Request]:
        rules = self.joins.rules(parameters)
        return self.threads.open_group(
            request.request_id,
            parameters,
            request.max_tokens * (1 if rules is None else rules.work_factor),
            arrival=(request.priority, request.arrival_time),
            rules=rules,
        )

    def _resume(self, request: Request, journal: Journal) -> None:
        """Resume a request from its journal: one thread at once, the others like new forks."""
        self.gate.enters(request.request_id)
        self.held.begin(request)
        parameters = _fork_parameters(request)
        if parameters is None or not parameters.enabled:
            super().add_request(resumed_alone(request, journal))
            if parameters is not None:
                self.admission.queue.thread_began(request.request_id, parameters.key)
            return
        group = self._open_group(request, parameters)
        if isinstance(group, JoiningGroup):
            threads = self._joins(group).resume(group, request, journal)
        else:
            threads = resumed_threads(request, journal, group)
        for thread in threads[:1]:
            self._start(group, thread)
        if not any(thread.request_id == group.root_id for thread in threads[:1]):
            self.threads.root_is_not_live(group)
        for thread in threads[1:]:
            self.admission.wait(group, thread)
        self.joins.settle()
        self.lists.settle()
        self._start_waiting_forks()

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish requests with all their threads; None finishes everything.

        vLLM passes the root's id to abort a request, and the id of a thread that failed, for
        example to load its KV.
        """
        if request_ids is None:
            for group in self.threads.groups:
                self._close(group)
            return super().finish_requests(None, finished_status)
        wanted = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        for request_id in tuple(wanted):
            # A root may have ended before its children.
            ended = self.threads.group_of_root(request_id) or self.threads.group(request_id)
            if ended is not None:
                wanted |= ended.live
                self._close(ended)
        return super().finish_requests(wanted, finished_status)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step with a reserve for running threads; start the step's timer."""
        # vLLM lets requests start until no block is free. The threads that then grow preempt the
        # youngest ones, which are computed again.
        reserve_blocks = cdiv(len(self.running) * self.growth_reserve_tokens, self.block_size)
        watermark_blocks = max(self._least_watermark_blocks, reserve_blocks)
        self.kv_cache_manager.watermark_blocks = watermark_blocks
        self.block_sharing.begin_step(self.running)
        self.step_plan = self._plan_step(throttle_prefills)
        step = self._schedule_as(self.step_plan, throttle_prefills)
        self._was_empty = step.total_num_scheduled_tokens == 0
        self.block_sharing.end_step()
        self.gate.scheduled()
        if step.total_num_scheduled_tokens > 0:
            self.row_warnings.schedules(len(step.num_scheduled_tokens))
            self.step_clock.begin(step, self._scheduled_batch(step))
        return step

    def _plan_step(self, throttle_prefills: bool) -> StepPlan:
        """Return what the next step leaves out: nothing, where the policy or vLLM forbids it."""
        self.pacing.limit_s = None
        config, running = self.scheduler_config, self.running
        row_tokens = 1 + self.num_spec_tokens + self.num_lookahead_tokens
        least_free = 2 * len(running) * row_tokens * len(self.kv_cache_config.kv_cache_groups)
        if (
            not self.admission.policy.counts_attended
            # Ranks that take turns with prompts, and stages that take turns with rows.
            or throttle_prefills
            or self.parallel_config.pipeline_parallel_size > 1
            # vLLM preempts running threads only, so all take part where memory is short.
            or self.kv_cache_manager.block_pool.get_num_free_blocks() < least_free
            # Only prompts that may be computed in chunks leave children their place.
            or not config.enable_chunked_prefill
            or config.disable_chunked_mm_input
            or self._has_too_many_adapters()
            # Nothing that is left out may keep a step empty for long.
            or self._was_empty
        ):
            return StepPlan()
        return self.pacing.plan(
            self.admission.policy, running, self.gate.admitted(), self.max_num_running_reqs
        )

    def _has_too_many_adapters(self) -> bool:
        """Return whether requests have more adapters than fit: vLLM counts those of a step only."""
        if self.lora_config is None:
            return False
        adapters = {
            request.lora_request.lora_int_id
            for request in self.requests.values()
            if request.lora_request is not None
        }
        return len(adapters) > self.lora_config.max_loras

    def _schedule_as(self, plan: StepPlan, throttle_prefills: bool) -> SchedulerOutput:
        """Schedule a step without what the plan leaves out."""
        if plan == StepPlan():
            return super().schedule(throttle_prefills)
        before, left_out = self.running, plan.resting | plan.prompts
        # Chunks of prompts come last, or they would take the tokens of rows behind them.
        self.running = sorted(
            (each for each in before if each.request_id not in left_out),
            key=lambda each: each.is_prefill_chunk,
        )
        try:
            with self._limited(plan):
                return super().schedule(throttle_prefills)
        finally:
            # In the earlier order, without preempted threads, and new ones last.
            active = {each.request_id for each in self.running}
            earlier = {each.request_id for each in before}
            self.running = [
                *(each for each in before if each.request_id in active | left_out),
                *(each for each in self.running if each.request_id not in earlier),
            ]

    @contextmanager
    def _limited(self, plan: StepPlan) -> Iterator[None]:
        """Limit rows and tokens of a step: threads that are left out keep their places."""
        config, num_left_out = self.scheduler_config, len(plan.resting | plan.prompts)
        most_tokens, floors_chunks = (
            self.max_num_scheduled_tokens,
            self.adaptive_long_prefill_threshold,
        )
        longest_chunk = config.long_prefill_token_threshold
        self.max_num_running_reqs -= num_left_out
        self.max_num_active_reqs -= num_left_out
        if plan.max_tokens is not None and plan.chunk is not None:
            drafts = self.num_spec_tokens * len(self.running)
            self.max_num_scheduled_tokens = min(most_tokens, plan.max_tokens + drafts)
            config.long_prefill_token_threshold = max(plan.chunk, 1 + self.num_spec_tokens)
            self.adaptive_long_prefill_threshold = False
        try:
            yield
        finally:
            self.max_num_running_reqs += num_left_out
            self.max_num_active_reqs += num_left_out
            self.max_num_scheduled_tokens = most_tokens
            config.long_prefill_token_threshold = longest_chunk
            self.adaptive_long_prefill_threshold = floors_chunks

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a step's output, add one for each thread that a limit ended; start forks."""
        self.joins.step_ends(scheduler_output)
        self.lists.step_ends(scheduler_output)
        self.failed_constraints.not_compiled(
            self.requests[request_id]
            for request_id in self.grammar_compile_error_reqs & self.requests.keys()
        )
        self._in_step = self.held.enabled
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for each in outputs.values():
            self.failed_constraints.explain(each.outputs)
        self._in_step = False
        for group in self._exhausted:
            ended = self._close(group)
            ended += super().finish_requests(set(group.live), RequestStatus.FINISHED_LENGTH_CAPPED)
            self._unopened.extend(
                (thread.client_index, thread.request_id, FinishReason.LENGTH) for thread in ended
            )
        self._exhausted.clear()
        self.joins.settle()
        self.lists.settle()
        for client_index, request_id, reason in self._unopened:
            client_outputs = outputs.setdefault(client_index, EngineCoreOutputs())
            client_outputs.outputs.append(EngineCoreOutput(request_id, [], finish_reason=reason))
        self._unopened.clear()
        if timed := self.step_clock.end(scheduler_output, still_busy=bool(self.running)):
            self.admission.policy.observe(*timed)
        self._start_waiting_forks()
        self._hold_begun_threads()
        if self.held.enabled:
            self.held.pass_on(outputs)
            self._attach_statistics(outputs)
        if self.reports is not None:
            self.reports.attach(outputs, self)
        return outputs

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *parts: Any, **named_parts: Any
    ) -> SchedulerStats | None:
        """Return statistics; within a step, they wait until it is known what the step sends."""
        if not self._in_step:
            return super().make_stats(spec_decoding_stats, *parts, **named_parts)
        self._statistics_parts = parts, named_parts
        return None

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        """Return vLLM's statistics; counts go on until they are sent."""
        so_far = spec_decoding_stats or self._unsent_drafts
        counted = super().make_spec_decoding_stats(so_far, *args, **kwargs)
        if self._in_step:
            self._unsent_drafts = counted or so_far
        return counted

    def _attach_statistics(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the scheduler's statistics to what a step sends, or send them alone once a second."""
        parts, named_parts = self._statistics_parts
        now_s = self.held.clock()
        has_news = outputs or not self.requests or any(parts) or any(named_parts.values())
        if not has_news and now_s < self._statistics_due_s:
            return
        self._statistics_due_s = now_s + STATISTICS_S
        drafts, self._unsent_drafts = self._unsent_drafts, None
        statistics = super().make_stats(drafts, *parts, **named_parts)
        if statistics is not None:
            first = next(iter(outputs), 0)
            outputs.setdefault(first, EngineCoreOutputs()).scheduler_stats = statistics

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Set the pause state. PAUSED_NEW lets the threads of running requests finish."""
        super().set_pause_state(pause_state)
        self._hold_begun_threads()
        if pause_state == PauseState.PAUSED_ALL:
            self.held.release_all()

    def has_requests(self) -> bool:
        """Return whether there is work, also while a step must send what is held before a pause."""
        return super().has_requests() or self.held.waits_for_step

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset the prefix cache; waiting children give up their blocks and will be computed."""
        self.block_sharing.release_all()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _get_local_prefix_cache_hit(
        self, request: Request, *limit: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        # vLLM 0.33 may limit the hit, but only in engines that do not fork (routed experts).
        prefix = self.block_sharing.prefix(request.request_id)
        if prefix is not None:
            return prefix.blocks, prefix.num_tokens, 0, False
        return super()._get_local_prefix_cache_hit(request, *limit)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        group = self.threads.group(request.request_id)
        if group is None:
            kept, stopped = self._take_as_vllm(request, new_token_ids, is_stale)
            self.num_generated_tokens += len(kept)
            return kept, stopped
        if len(new_token_ids) == 1 and group.takes_as_text(new_token_ids[0]):
            # The common case, for nearly every row in nearly every step.
            tokens, stopped = self._take_as_vllm(request, new_token_ids, is_stale)
            self.num_generated_tokens += 1
            group.used_tokens += 1
            if stopped:
                has_stopped = request.status == RequestStatus.FINISHED_STOPPED
                group.used_tokens -= group.parameters.ended_itself(tokens, stopped=has_stopped)
            elif group.used_tokens < group.token_budget:
                return tokens, False
        else:
            tokens, stopped = self._take_tokens(group, request, new_token_ids, is_stale)
        if group.exhausted and not group.closed:
            self._exhausted.append(group)
            group.closed = True
        if group.closed and not stopped:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            stopped = True
        return tokens, stopped

    def _take_tokens(
        self,
        group: ThreadGroup[Request],
        request: Request,
        new_token_ids: list[int],
        is_stale: bool,
    ) -> tuple[list[int], bool]:
        """Take any number of tokens, including fork tokens, as far as the budget allows."""
        tokens = group.within_budget(new_token_ids)
        if isinstance(group, ListGroup):
            return self.lists.take(group, request, tokens, is_stale)
        forked: list[tuple[int, OpenBlock]] = []
        mark: OpenBlock | JoinPoint | bool = False
        if isinstance(group, JoiningGroup):
            tokens, forked, mark = self.joins.until_marker(group, request, tokens)
        num_tokens = len(tokens)
        # Control tokens are not text: each raises the thread's own limit by one.
        request.max_tokens += sum(map(group.parameters.is_control, tokens))
        stopped = False
        if tokens:
            tokens, stopped = self._take_as_vllm(request, tokens, is_stale)
            self.num_generated_tokens += len(tokens)
        has_stopped = stopped and request.status == RequestStatus.FINISHED_STOPPED
        group.count_text(tokens, stopped=has_stopped)
        if isinstance(group, JoiningGroup):
            for end, block in forked:
                # The token with which a thread ends opens no block.
                if end < len(tokens) or (end == len(tokens) and not stopped):
                    self._take_marker(group, request, block)
            if mark and not stopped and len(tokens) == num_tokens:
                stopped = self._take_marker(group, request, mark)
            return tokens, stopped
        first = request.num_tokens - len(tokens)
        for index, token_id in enumerate(tokens, start=first):
            if token_id == group.parameters.fork_id:
                self._fork(group, request, fork_index=index)
            elif token_id in group.parameters.call_ids:
                end_forks(request)
        return tokens, stopped

    def _take_marker(
        self, group: JoiningGroup[Request], thread: Request, mark: OpenBlock | JoinPoint | bool
    ) -> bool:
        """Open a block, join a child, or end one; return whether the thread has stopped."""
        self.held.release(group.root_id)
        if isinstance(mark, OpenBlock | JoinPoint):
            if group.exhausted or group.closed:
                return False
            if isinstance(mark, OpenBlock):
                self.joins.open(group, thread, mark)
            else:
                self.joins.join(group, thread, mark)
            return False
        thread.status = RequestStatus.FINISHED_STOPPED
        return True

    def _joins(self, group: JoiningGroup[Request]) -> Joins:
        return self.lists if isinstance(group, ListGroup) else self.joins

    def _fork(self, group: ThreadGroup[Request], parent: Request, *, fork_index: int) -> None:
        """Open a thread at a fork token, or refuse to; `fork_index` is the token's position."""
        self.held.release(group.root_id)
        child_request_id, ordinal = group.next_child(parent.request_id)
        # The child needs room for its seed and at least one token of its own.
        has_room = group.parameters.num_read(fork_index) < self.max_model_len
        if not has_room or not group.may_fork():
            self.refuse(group, parent.client_index, child_request_id)
            return
        child = build_child_request(
            parent,
            request_id=child_request_id,
            ordinal=ordinal,
            fork_index=fork_index,
            parameters=group.parameters,
            max_tokens=group.remaining_tokens,
        )
        group.num_forks += 1
        num_inherited = group.parameters.num_inherited(fork_index)
        self.block_sharing.share(parent, child, num_inherited)
        # Forks start at the end of the step, in order of their requests' age, not of the rows.
        self.admission.wait(group, child)

    def refuse(self, group: ThreadGroup[Request], client_index: int, child_request_id: str) -> None:
        """Report a child that does not open as ended by length."""
        self.held.join(child_request_id, group.root_id)
        self.admission.counters.refused += 1
        self._unopened.append((client_index, child_request_id, FinishReason.LENGTH))

    def pause_thread(self, thread: Request) -> None:
        """End the engine request of a thread that waits for its children."""
        super().finish_requests(thread.request_id, RequestStatus.FINISHED_STOPPED)

    def has_left(self, request_id: str) -> bool:
        """Return whether the id of a paused engine request may be used again."""
        if self.connector is None:
            return True
        # A connector learns in the next step that a request has finished. Its transfers go by id:
        # it delays the end of the request, or keeps a record of its own.
        return (
            request_id not in self.requests
            and request_id not in self.finished_req_ids
            and not is_transferring(self.connector, request_id)
        )

    def start_continuation(self, group: ThreadGroup[Request], thread: Request) -> None:
        """Start the engine request in which a thread continues after its children's texts."""
        self._start(group, thread)
        # Its request was queued long before.
        thread.events.clear()

    def take_token(self, thread: Request, token_id: int, is_stale: bool) -> tuple[list[int], bool]:
        """Let vLLM take one token of a thread; return it, and whether the thread has ended."""
        self.num_generated_tokens += 1
        return self._take_as_vllm(thread, [token_id], is_stale)

    def cancel(self, group: ThreadGroup[Request], thread_ids: set[str], client_index: int) -> None:
        """End the engine requests of threads that are no part of the answer."""
        super().finish_requests(thread_ids, RequestStatus.FINISHED_ABORTED)
        if group.is_over and self.threads.group_of_root(group.root_id) is not None:
            self.threads.drop_if_ended(group)
            self._leave_if_ended(group.root_id, client_index)

    def end_waiting(
        self, group: ThreadGroup[Request], thread: Request, reason: FinishReason
    ) -> None:
        """End a thread that does not continue after its children's texts."""
        self.held.join(thread.request_id, group.root_id)
        self._unopened.append((thread.client_index, thread.request_id, reason))
        self.block_sharing.forget(thread.request_id)
        self.threads.end_thread(thread.request_id)
        self._offer_children(group)
        self._leave_if_ended(group.root_id, thread.client_index)

    def _start(self, group: ThreadGroup[Request], child: Request) -> None:
        self.threads.add_thread(group, child.request_id)
        self.held.join(child.request_id, group.root_id)
        self.admission.queue.thread_began(child.request_id, group.parameters.key)
        self.row_warnings.starts_fork(len(self.running))
        super().add_request(child)

    def _start_waiting_forks(self) -> None:
        """Start the children that limits and policy admit now; the others wait for a later step."""
        if self.admission.queue.first() is not None:
            self._start_first_threads()
            batch = self.coming_batch()
            num_saved = self._saved_by_child
            while taken := self.admission.next(
                self._num_threads,
                batch,
                num_saved,
                limit_s=self.pacing.limit_s,
            ):
                group, child = taken
                saved = num_saved(group, child)
                self._start(group, child)
                batch = batch.grown(
                    rows=1, attended_tokens=child.num_prompt_tokens, saved_tokens=saved
                )
        self.admission.settle()

    @property
    def _num_threads(self) -> int:
        return len(self.requests) - self.gate.num_held

    def _start_first_threads(self) -> None:
        """Start the children that their readers wait for, without asking the policy.

        Their parents rest if there is no time for both.
        """
        if not self.admission.policy.counts_attended:
            return
        groups = [group for group in self.threads.groups if group.has_startable]
        for group in sorted(groups, key=lambda group: group.order):
            if not self.admission.has_room(self._num_threads):
                return
            if self.admission.queue.key_is_full(group):
                continue
            first = first_thread(group)
            for child in group.deferred:
                if child.request_id == first:
                    group.deferred.remove(child)
                    self._start(group, child)
                    break

    def coming_batch(self) -> StepBatch:
        """Return the next step's batch as far as it is known, without prompts."""
        rows = min(len(self.running) + self.gate.num_ready, self.max_num_running_reqs)
        attended = saved = 0
        if self.admission.policy.counts_attended:
            attended = sum(request.num_tokens for request in self.running)
            saved = self.family_reads.saved_tokens(self.running)
        return StepBatch(rows, attended, saved_tokens=saved)

    def _saved_by_child(self, group: ThreadGroup[Request], child: Request) -> int:
        """Return the tokens that a child attends to and its running siblings read for it."""
        if not self.admission.policy.counts_attended:
            return 0
        return self.family_reads.saved_by(group, child, self.running)

    def _hold_begun_threads(self) -> None:
        """While no new request may run, queue children and preempted threads apart from them.

        vLLM's pause ends when nothing runs or is in `kv_holding_waiting`, the queue of requests
        that have begun. Only our threads are moved there: others vLLM leaves waiting.
        """
        if self.pause_state != PauseState.PAUSED_NEW:
            return
        begun = [request for request in self.waiting if self._has_begun(request)]
        self.waiting.remove_requests(begun)
        for request in begun:
            self.kv_holding_waiting.add_request(request)

    @property
    def num_unbegun_requests(self) -> int:
        """Requests of which nothing has been computed."""
        queues = (self.waiting, self.kv_holding_waiting)
        return sum(
            request.num_preemptions == 0
            and request.num_output_tokens == 0
            and not self._has_begun(request)
            for queue in queues
            for request in queue
        )

    def _has_begun(self, request: Request) -> bool:
        group = self.threads.group(request.request_id)
        if group is None:
            return False
        is_child = request.request_id != group.root_id
        return is_child or request.num_preemptions > 0 or group.has_joined(request.request_id)

    def _scheduled_batch(self, step: SchedulerOutput) -> StepBatch:
        rows = len(step.num_scheduled_tokens)
        attended = saved = 0
        if self.admission.policy.counts_attended:
            requests = [self.requests[name] for name in step.num_scheduled_tokens]
            attended = sum(request.num_computed_tokens for request in requests)
            saved = self.family_reads.saved_tokens(requests)
        prefill = step.total_num_scheduled_tokens - rows
        return StepBatch(rows, attended, prefill, saved_tokens=saved)

    def _close(self, group: ThreadGroup[Request]) -> list[Request]:
        """Start no further thread of a group; return its children and parents that were waiting."""
        group.closed = True
        deferred = list(group.deferred)
        group.deferred.clear()
        for child in deferred:
            self.block_sharing.forget(child.request_id)
        self.admission.closed(group)
        ended = deferred
        if isinstance(group, JoiningGroup):
            ended += self._joins(group).close(group)
        for thread in ended:
            self.held.join(thread.request_id, group.root_id)
        self.threads.drop_if_ended(group)
        if ended:
            self._leave_if_ended(group.root_id, ended[0].client_index)
        return ended

    def _leave_if_ended(self, root_id: str, client_index: int) -> None:
        """Report a request as finished and free its place, if it has no live or waiting thread.

        With several engines, vLLM's client routes aborts by request id and forgets the engine of an
        id that is reported as finished. So a root's id is reported after the last thread.
        """
        has_ended = self.threads.group_of_root(root_id) is None
        if self.finished_req_ids_dict is not None:
            reported = self.finished_req_ids_dict[client_index]
            if has_ended:
                reported.add(root_id)
            else:
                reported.discard(root_id)
        if has_ended:
            self.gate.left(root_id)
            self.held.end(root_id)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        group = self.threads.group(request.request_id)
        pauses = False
        if isinstance(group, JoiningGroup):
            joins = self._joins(group)
            pauses = joins.pauses(group, request)
            if not pauses:
                joins.ended(group, request)
        if group is not None:
            if group.continues_without(request.request_id):
                self.block_sharing.count_released_early(request.request_id)
            if request.request_id != group.root_id:
                self.num_child_tokens += request.num_output_tokens
        freed = super()._free_request(request, delay_free_blocks)
        self.admission.queue.thread_ended(request.request_id)
        if pauses:
            self.threads.pause_thread(request.request_id)
        else:
            self.block_sharing.forget(request.request_id)
            group = self.threads.end_thread(request.request_id)
        if group is not None:
            self._offer_children(group)
        root_id = request.request_id if group is None else group.root_id
        self._leave_if_ended(root_id, request.client_index)
        return freed

    def _offer_children(self, group: ThreadGroup[Request]) -> None:
        """Let waiting children start after a thread has ended."""
        if group.has_startable:
            if not group.may_go_on:
                # Without a live thread the request would never continue: skip limits and policy.
                self._start(group, group.deferred.popleft())
            self.admission.queue.offer(group)


class ForkScheduler(ForkMixin, Scheduler):
    """Value of `scheduler_cls` where vLLM schedules step by step (CPU)."""


class ForkAsyncScheduler(ForkMixin, AsyncScheduler):
    """Value of `scheduler_cls` where vLLM schedules ahead (GPU)."""


def _fork_parameters(request: Request) -> ForkParameters | None:
    if request.sampling_params is None:
        return None
    return ForkParameters.from_extra_args(request.sampling_params.extra_args)
