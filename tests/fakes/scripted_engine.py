"""Engine with a scripted model: vLLM's real scheduler and KV cache manager, no weights.

Each thread generates given tokens. The KV cache records, for every slot, the prefix whose key was
written there, and each step checks everything that its sequences attend to. So a wrong or outdated
block fails at once, under any schedule.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from apar_core.engine.block_threads import BlockThreads
from apar_core.engine.list_threads import ListThreads
from apar_core.engine.request_follower import RequestFollower
from apar_core.engine.resume_request import completed, hand_to_scheduler, outputs_so_far
from apar_core.engine.thread_outputs import RequestThreads
from apar_core.fork_parameters import EXTRA_ARG, HOLD_ARG, ForkParameters
from apar_core.formats.lists import ListRules
from apar_core.formats.rules import block_rules
from apar_core.journal import Journal, JournalBook, ThreadDelta
from apar_core.scheduler.core_state import CoreState
from apar_core.scheduler.fork_scheduler import ForkAsyncScheduler, ForkMixin, ForkScheduler
from apar_core.scheduler.fork_settings import CONFIG_KEY
from apar_core.scheduler.held_outputs import HeldOutputs
from apar_core.scheduler.state_reports import take_state
from apar_core.scheduler.step_time import StepClock
from apar_core.tree.thread_names import ThreadPath, thread_request_id
from tests.fakes.block_scripts import TOKENIZER, CharacterTokenizer

FORK, CHILD, END = 1, 2, 3
FIRST_TEXT_ID = 10
VOCABULARY_SIZE = 4096

Script = Mapping[str, list[int]]
"""Tokens of each thread, by its replay key."""
Model = Callable[[ThreadPath, list[int]], list[int]]
"""Returns the tokens of a thread from its path and the prompt of its engine request."""


@dataclass(frozen=True)
class EngineShape:
    """Sizes of a scripted engine, in tokens and blocks."""

    num_blocks: int = 200
    block_size: int = 4
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 64
    max_model_len: int = 256
    run_ahead: bool = False
    # As with speculation whose drafts are all right; not with `run_ahead`.
    tokens_per_step: int = 1
    watermark: float = 0.0
    # As with a KV connector that loads into free blocks while steps are in flight.
    defers_frees: bool = False
    # Simulated time; 0 sends the outputs of each step.
    output_interval_s: float = 0.0
    forks: Mapping[str, Any] = field(default_factory=dict)


def fork_parameters(
    *,
    max_threads: int = 16,
    max_forks: int = 100,
    key: str | None = None,
    key_max_threads: int | None = None,
) -> ForkParameters:
    parameters = ForkParameters(FORK, (CHILD,), (CHILD,), True, max_threads, max_forks, (END,))
    return replace(parameters, key=key, key_max_threads=key_max_threads)


def merged(deltas: Iterable[ThreadDelta]) -> Journal:
    """Merge deltas into one per thread, parents before their children."""
    book = JournalBook()
    book.add(deltas)
    return book.journal()


@dataclass
class _Step:
    """Scheduled step without its output yet."""

    scheduler_output: SchedulerOutput
    sampled: dict[str, list[int]] = field(default_factory=dict)
    written_blocks: set[int] = field(default_factory=set)


class ScriptedEngine:
    """Runs requests to their end and keeps their trees."""

    def __init__(
        self,
        shape: EngineShape,
        model_dir: Path,
        tokenizer: CharacterTokenizer = TOKENIZER,
    ) -> None:
        self.shape = shape
        self.tokenizer = tokenizer
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(shape.block_size, sha256)
        self.scheduler: ForkMixin = _build_scheduler(shape, model_dir)
        # Simulated time: the duration of a step depends on its number of rows.
        self.now_s = 0.0
        self.step_s: Callable[[int], float] = lambda rows: 0.001
        self.scheduler.step_clock = StepClock(lambda: self.now_s)
        self.scheduler.held = HeldOutputs(shape.output_interval_s, lambda: self.now_s)
        self.scheduler.joins._load_tokenizer = lambda: tokenizer
        # What the engine core reports of itself, if `scheduler.reports` is set.
        self.states: list[tuple[int, CoreState]] = []
        self.threads: dict[str, RequestThreads] = {}
        self.followers: dict[str, RequestFollower] = {}
        self.finish_reasons: dict[str, str] = {}
        self.texts: dict[str, list[int]] = {}
        self._scripts: dict[str, Script | Model] = {}
        # By engine request: a thread that waited for its children has another one afterwards.
        self._generated: dict[tuple[str, int], list[int]] = {}
        # What each engine request began with.
        self.prompts: dict[tuple[str, int], list[int]] = {}
        # Tokens of a thread's script that another engine has generated.
        self._resumed_at: dict[str, int] = {}
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self._in_flight: deque[_Step] = deque()
        self._loses_block: str | None = None
        self._messages: list[EngineCoreOutputs] = []
        self._forgotten: set[str] = set()
        self._to_abort: set[str] = set()
        if shape.defers_frees:
            self.scheduler.defer_block_free = True
            self._check_frees()

    def add(
        self,
        request_id: str,
        prompt: list[int],
        script: Script | Model,
        *,
        max_tokens: int = 200,
        parameters: ForkParameters | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        journal: Journal | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        """Add a request; with a journal, resume it."""
        parameters = parameters or fork_parameters()
        sampling = SamplingParams(
            max_tokens=max_tokens,
            extra_args={EXTRA_ARG: parameters.to_extra_arg(), HOLD_ARG: True},
            stop_token_ids=list(stop_token_ids),
        )
        sampling._eos_token_id = END
        request = Request(
            request_id,
            prompt,
            sampling,
            None,
            arrival_time=arrival_time,
            block_hasher=self._hasher,
            priority=priority,
        )
        self._scripts[request_id] = script
        follower = RequestFollower(keeps_journal=True, resume=journal)
        follower.begin(request_id, len(prompt), sampling, choice=None)
        self.followers[request_id] = follower
        if parameters.blocks is None:
            threads = RequestThreads(request_id, parameters, None, follower)
        else:
            rules = block_rules(parameters.blocks, self.tokenizer)
            threads = (
                ListThreads(request_id, parameters, rules, prompt, follower, max_tokens=max_tokens)
                if isinstance(rules, ListRules)
                else BlockThreads(request_id, parameters, rules, prompt, follower)
            )
        self.threads[request_id] = threads
        self.texts[request_id] = []
        if journal is None or self._replay(request, journal):
            self.scheduler.add_request(request)

    def _replay(self, request: Request, journal: Journal) -> bool:
        """Like `ForkOutputProcessor.replay`: return whether the engine must continue."""
        journal = completed(request, journal, self.shape.max_model_len, self.tokenizer)
        follower = self.followers[request.request_id]
        follower.replay(begins=True)
        for output in outputs_so_far(request, journal, self.tokenizer):
            self._feed(output)
        follower.replay(begins=False)
        for delta in journal:
            thread_id = thread_request_id(request.request_id, delta.path)
            self._resumed_at[thread_id] = len(delta.token_ids)
        hand_to_scheduler(request, journal)
        return request.request_id not in self.finish_reasons

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def lose_last_block(self, thread_id: str) -> None:
        """Let the next step report that a thread's last computed block could not be loaded.

        The thread fails, as it does under vLLM's `kv_load_failure_policy` "fail".
        """
        self.scheduler.recompute_kv_load_failures = False
        self._loses_block = thread_id

    def step(self) -> bool:
        """Run one step of the engine loop; return False if nothing is left to do."""
        lag = 1 if self.shape.run_ahead else 0
        if self.scheduler.has_requests():
            self._in_flight.append(self._execute(self.scheduler.schedule()))
        elif not self._in_flight:
            return False
        while len(self._in_flight) > lag or (self._in_flight and not self.scheduler.has_requests()):
            self._update(self._in_flight.popleft())
        return True

    def take_messages(self) -> list[EngineCoreOutputs]:
        """Return the messages to clients since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def run(self, *, max_steps: int = 5000) -> int:
        """Run until everything has finished; return the number of steps."""
        steps = 0
        while self.step():
            steps += 1
            assert steps < max_steps, f"no end after {steps} steps"
        return steps

    def assert_nothing_is_left(self) -> None:
        """Check that no request, thread, place, waiting fork or block reference remains."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.num_blocks - 1
        assert not scheduler.requests
        assert not scheduler.deferred_frees
        assert not scheduler.threads.groups
        assert not scheduler.threads._group_of_thread
        joins = scheduler.joins
        assert (joins._pausing, joins._ready, joins._in_flight, joins._left) == ([], [], {}, [])
        lists = scheduler.lists
        assert (lists._pausing, lists._ready, lists._in_flight) == ([], [], {})
        assert (lists._ended, lists._cancelling) == ([], None)
        gate = scheduler.gate
        assert (gate._inside, gate._outside, gate._held) == (set(), set(), [])
        queue = scheduler.admission.queue
        assert queue.first() is None
        assert (queue.key_threads, queue._key_of_thread) == ({}, {})
        assert (queue._groups, queue._queued, queue._keys) == ({}, set(), [])
        assert queue._order_of_key == {}
        assert not scheduler.admission._new
        sharing = scheduler.block_sharing
        assert (sharing._prefixes, sharing._unscheduled, sharing._continuing) == ({}, set(), set())
        assert "allocate_slots" not in vars(scheduler.kv_cache_manager)
        held = scheduler.held
        held.pass_on({})  # As in the next step.
        assert (held._requests, held._by_thread, held._holding) == ({}, {}, {})

    def _check_frees(self) -> None:
        """Fail when a block is freed that a step in flight still writes."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free_blocks = pool.free_blocks

        def checked(blocks: Iterable[KVCacheBlock], *args: Any, **kwargs: Any) -> None:
            freed = list(blocks)
            free_blocks(freed, *args, **kwargs)
            written = set().union(*(step.written_blocks for step in self._in_flight))
            too_early = {block.block_id for block in freed if block.ref_cnt == 0} & written
            assert not too_early, f"free while a step in flight writes them: {too_early}"

        vars(pool)["free_blocks"] = checked

    def _execute(self, scheduled: SchedulerOutput) -> _Step:
        for copy in scheduled.kv_cache_block_copies or ():
            self._copy_block(*copy[:2])
        step = _Step(scheduled)
        step.written_blocks.update(copy[1] for copy in scheduled.kv_cache_block_copies or ())
        for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            step.written_blocks |= self._write_and_read(request, end - num_scheduled, end)
            if not request.is_prefill_chunk:
                number = 1 if self.shape.run_ahead else self.shape.tokens_per_step
                step.sampled[request_id] = [self._sample(request) for _ in range(number)]
        return step

    def _sequence(self, request: Request) -> list[int]:
        """Return prompt and generated tokens of the model, which can be ahead of the scheduler."""
        prompt = request.prompt_token_ids or []
        self.prompts[_engine_request(request)] = prompt
        return [*prompt, *self._generated.get(_engine_request(request), [])]

    def _write_and_read(self, request: Request, start: int, end: int) -> set[int]:
        """Compute these positions; return the blocks that were written."""
        tokens = self._sequence(request)
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        size = self.shape.block_size
        for position in range(start, end):
            slot = (blocks[position // size], position % size)
            self._slots[slot] = tuple(tokens[: position + 1])
        for position in range(end):
            written = self._slots.get((blocks[position // size], position % size))
            assert written == tuple(tokens[: position + 1]), (
                f"{request.request_id}: position {position} of {end} holds {written}"
            )
        return {blocks[position // size] for position in range(start, end)}

    def _copy_block(self, source: int, target: int) -> None:
        for offset in range(self.shape.block_size):
            if (source, offset) in self._slots:
                self._slots[target, offset] = self._slots[source, offset]

    def _sample(self, request: Request) -> int:
        root_id = request.request_id.split("~")[0]
        assert request.sampling_params is not None
        parameters = ForkParameters.from_extra_args(request.sampling_params.extra_args)
        assert parameters is not None
        path, scripts = parameters.thread_path, self._scripts[root_id]
        generated = self._generated.setdefault(_engine_request(request), [])
        begin = self._resumed_at.get(request.request_id, 0) + parameters.num_generated
        if callable(scripts):
            script = scripts(path, list(request.prompt_token_ids or ()))
            begin = begin if path else 0
        else:
            script = scripts[".".join(map(str, path))]
        index = begin + len(generated)
        # A thread scheduled ahead of its own end token may get any token.
        token_id = script[index] if index < len(script) else END
        generated.append(token_id)
        return token_id

    def _update(self, step: _Step) -> None:
        request_ids = list(step.scheduler_output.num_scheduled_tokens)
        self.now_s += self.step_s(len(request_ids))
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[step.sampled.get(request_id, []) for request_id in request_ids],
            kv_connector_output=self._lost_block(step.scheduler_output),
        )
        for client_outputs in self.scheduler.update_from_output(
            step.scheduler_output, output
        ).values():
            self._messages.append(client_outputs)
            if (state := take_state(client_outputs.outputs)) is not None:
                self.states.append(state)
            for thread_output in client_outputs.outputs:
                self._feed(thread_output)
        while self._to_abort:
            self.abort(self._to_abort.pop())

    def _lost_block(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
        thread_id, self._loses_block = self._loses_block, None
        if thread_id is None:
            return None
        num_computed = self.scheduler.requests[thread_id].num_computed_tokens
        last = num_computed - scheduled.num_scheduled_tokens[thread_id] - 1
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(thread_id)
        return KVConnectorOutput(invalid_block_ids={blocks[last // self.shape.block_size]})

    def _feed(self, thread_output: EngineCoreOutput) -> None:
        root = self.threads[thread_output.request_id.split("~")[0]]
        if root.request_id in self._forgotten:
            return
        root.feed(thread_output)
        for request_output in root.take():
            self.texts[root.request_id].extend(request_output.new_token_ids)
            if request_output.finish_reason is not None:
                reason = str(request_output.finish_reason)
                assert root.request_id not in self.finish_reasons
                self.finish_reasons[root.request_id] = reason
                # As in the output processor, which forgets the request with all its threads.
                if reason in ("error", "abort") or _cancels_threads(root):
                    self._forgotten.add(root.request_id)
                if not root.tree.finished:
                    self._to_abort.add(root.request_id)


def _cancels_threads(root: RequestThreads) -> bool:
    """Return whether threads may write after the end of the answer, before they are cancelled."""
    if isinstance(root, BlockThreads):
        return root.rules.joins_later
    return isinstance(root, ListThreads)


def _engine_request(request: Request) -> tuple[str, int]:
    assert request.sampling_params is not None
    parameters = ForkParameters.from_extra_args(request.sampling_params.extra_args)
    return request.request_id, 0 if parameters is None else parameters.num_generated


def write_model_config(directory: Path) -> Path:
    """Write a checkpoint folder with a configuration and no weights."""
    LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return directory


def _build_scheduler(shape: EngineShape, model_dir: Path) -> ForkMixin:
    model_config = ModelConfig(
        model=str(model_dir),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=shape.max_model_len,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        watermark=shape.watermark,
    )
    cache_config = CacheConfig(block_size=shape.block_size, enable_prefix_caching=True)
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        additional_config={CONFIG_KEY: {"metrics": False} | dict(shape.forks)},
    )
    vllm_config.cache_config.block_size = shape.block_size
    vllm_config.cache_config.num_gpu_blocks = shape.num_blocks
    spec = FullAttentionSpec(
        block_size=shape.block_size, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    scheduler_cls = ForkAsyncScheduler if shape.run_ahead else ForkScheduler
    return scheduler_cls(
        vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=shape.block_size,
        include_finished_set=True,  # As beside other engines of one client.
        log_stats=True,
    )
