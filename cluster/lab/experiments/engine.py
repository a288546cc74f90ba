"""An engine for many runs of an experiment: virtual, or real on this machine.

KV memory, limits and fork policy are set between runs, so that all methods run in one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from apar_core.errors import EngineError, EvaluationError
from apar_core.formats.lists import ListRules
from apar_core.formats.shipped_formats import LISTS
from apar_core.scheduler.fork_admission import AdmissionCounters
from apar_core.scheduler.fork_policy import build_policy
from apar_core.scheduler.step_time import StepClock
from apar_core.step_costs.models import find_model
from apar_core.vllm_names import call_at_preemption
from cluster.lab.experiments.methods import Policy, Workload, load_workload, marker_id
from cluster.lab.experiments.random_model import random_model
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from deployments.config.model import model_path

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.step_costs.costs import StepCosts
    from cluster.lab.experiments.program import Submission
    from cluster.lab.experiments.settings import ExperimentSettings
    from cluster.loadtest.replay_answers import AnswerText

_MAX_ROWS = 1024
# Other methods' prompts are longer than the answer's own.
_LENGTH_MARGIN = 2


@dataclass(frozen=True, slots=True)
class RunConditions:
    """The conditions of a run.

    num_blocks: KV blocks that it may use; None: all.
    max_requests: limit on concurrent requests, enforced by the engine.
    token_time_s: time per token that the adaptive policy aims for.
    growth_reserve_tokens: as in `ForkSettings`; 0 admits requests as vLLM does.
    max_threads: threads of a request alive at once; None: those of the engine.
    """

    num_blocks: int | None = None
    max_requests: int | None = None
    policy: Policy = "eager"
    token_time_s: float = 1.0
    growth_reserve_tokens: int = 0
    max_threads: int | None = None


@dataclass(slots=True)
class StepCounts:
    """Counts of the engine since the start of a run.

    rows: scheduled sequences, summed over the steps.
    text_tokens: generated tokens without control, end and discarded tokens.
    computed_tokens: tokens that went through the model.
    sequences: requests and forked threads.
    peak_kv_tokens: largest token capacity of held blocks.
    """

    steps: int = 0
    rows: int = 0
    text_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    sequences: int = 0
    largest_rows: int = 0
    largest_tokens: int = 0
    peak_kv_tokens: int = 0


class ExperimentEngine:
    """An `OfflineEngine` whose steps are counted, and whose KV cache can be made smaller.

    hidden_ids: control and end tokens, which are not text.
    device: the device of an engine in virtual time, None for a real engine.
    """

    def __init__(self, engine: OfflineEngine, hidden_ids: Sequence[int]) -> None:
        self.engine = engine
        self.device = engine.device if isinstance(engine, VirtualEngine) else None
        self.llm_engine: Any = engine.llm.llm_engine
        self.scheduler: Any = engine.scheduler
        self.counts = StepCounts()
        self._hidden = frozenset(hidden_ids)
        self._ballast: list[Any] = []
        self._before = (0, 0)
        self._max_threads: int | None = None
        self._count_steps()

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, virtual or real; also the clock of the fork policy."""
        return time.perf_counter if self.device is None else self.device.clock

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return int(self.scheduler.block_size)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the whole cache."""
        # One block is vLLM's null block, which never holds anything.
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def kv_tokens_in_use(self) -> int:
        """Token capacity of held blocks."""
        free = self._pool.get_num_free_blocks()
        return (self.num_blocks - len(self._ballast) - int(free)) * self.block_size

    @property
    def num_forks(self) -> int:
        """Forks since the start of the run."""
        return int(self.scheduler.block_sharing.counters.forks) - self._before[0]

    @property
    def prompt_tokens(self) -> int:
        """Computed tokens that were not generated in the previous step.

        Prompts, first tokens of children, and tokens that the engine recomputes after preemptions.
        """
        generated = int(self.scheduler.num_generated_tokens) - self._before[1]
        # A sequence's last token is not computed.
        return self.counts.computed_tokens - (generated - self.num_sequences)

    @property
    def num_sequences(self) -> int:
        """Requests and forked threads since the start of the run."""
        return self.counts.sequences + self.num_forks

    def waiting_requests(self) -> set[str]:
        """Return the ids, as submitted, of requests of which nothing has been computed yet."""
        groups = self.scheduler.threads
        states = self.llm_engine.output_processor.request_states
        return {
            states[name].external_req_id
            for name, request in ((each.request_id, each) for each in self.scheduler.waiting)
            if request.num_preemptions == 0
            # A child is not a client's request, and only waits for a step.
            and (groups.group(name) is None or groups.group_of_root(name) is not None)
        }

    def prepare(self, conditions: RunConditions, costs: StepCosts | None = None) -> None:
        """Set up a run: an empty KV cache, limits, policy, and clock and counts at zero.

        `costs` replace those of a virtual device. Raises EngineError if a request runs or holds
        blocks.
        """
        if self.scheduler.requests:
            raise EngineError(f"cannot start: {len(self.scheduler.requests)} threads are running")
        self._limit_blocks(conditions.num_blocks)
        self._max_threads = conditions.max_threads
        scheduler = self.scheduler
        scheduler.gate.max_requests = conditions.max_requests
        scheduler.admission.policy = build_policy(conditions.policy, conditions.token_time_s)
        scheduler.admission.counters = AdmissionCounters()
        scheduler.growth_reserve_tokens = conditions.growth_reserve_tokens
        if self.device is not None:
            from cluster.lab.virtual.executor import StepTotals, VirtualClock

            # Time starts at zero: floating-point sums then do not depend on earlier runs.
            self.device.clock, self.device.free_at_s = VirtualClock(), 0.0
            self.device.totals = StepTotals()
            self.device.costs = costs or self.device.costs
        scheduler.step_clock = StepClock(self.clock)
        self.counts = StepCounts()
        self._before = (
            int(scheduler.block_sharing.counters.forks), int(scheduler.num_generated_tokens)
        )  # fmt: skip

    def submit(self, request_id: str, submission: Submission) -> None:
        """Add a request."""
        from vllm import SamplingParams

        from apar_core.engine.input_processor import MAX_THREADS_ARG

        self.counts.sequences += 1
        params = SamplingParams(**submission.sampling)
        if self._max_threads is not None:
            params.extra_args = {**(params.extra_args or {}), MAX_THREADS_ARG: self._max_threads}
        prompt = {"prompt_token_ids": submission.prompt_ids}
        self.llm_engine.add_request(request_id, prompt, params)

    def finish(self) -> None:
        """Abort running requests, and finish the steps in flight."""
        self.llm_engine.abort_request(list(self.llm_engine.output_processor.request_states), True)
        core = self.llm_engine.engine_core.engine_core
        while core.batch_queue or self.scheduler.has_requests():
            self.llm_engine.step()

    def shutdown(self) -> None:
        """Shut the engine down."""
        self.engine.shutdown()

    def _limit_blocks(self, num_blocks: int | None) -> None:
        self._pool.free_blocks(self._ballast)
        self._ballast = []
        # Also empties the prefix cache, so that a run finds nothing of an earlier one.
        if not self.scheduler.reset_prefix_cache():
            raise EngineError("the prefix cache was not reset: blocks of an earlier run are held")
        num_left = self.num_blocks if num_blocks is None else num_blocks
        if num_left > self.num_blocks:
            raise EngineError(f"{num_left} KV blocks wanted, the engine has {self.num_blocks}")
        self._ballast = self._pool.get_new_blocks(self.num_blocks - num_left)

    @property
    def _pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _count_steps(self) -> None:
        scheduler = self.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            num_tokens, num_rows = step.total_num_scheduled_tokens, len(step.num_scheduled_tokens)
            if num_tokens > 0:
                counts = self.counts
                counts.steps += 1
                counts.rows += num_rows
                counts.computed_tokens += num_tokens
                counts.largest_rows = max(counts.largest_rows, num_rows)
                counts.largest_tokens = max(counts.largest_tokens, num_tokens)
                counts.peak_kv_tokens = max(counts.peak_kv_tokens, self.kv_tokens_in_use)
            return step

        def counted_update(*args: Any, **kwargs: Any) -> Any:
            joins = scheduler.block_sharing.join_counters
            discarded = joins.discarded_tokens
            outputs = update(*args, **kwargs)
            hidden = self._hidden
            self.counts.text_tokens -= joins.discarded_tokens - discarded
            self.counts.text_tokens += sum(
                token_id not in hidden
                for client_outputs in outputs.values()
                for output in client_outputs.outputs
                for token_id in output.new_token_ids
            )
            return outputs

        def count_preemption() -> None:
            self.counts.preemptions += 1

        scheduler.schedule = counted_schedule
        scheduler.update_from_output = counted_update
        call_at_preemption(scheduler, count_preemption)


def open_engine(
    settings: ExperimentSettings,
    model: str,
    parallel_format: str | None = None,
    forks: Mapping[str, Any] | None = None,
) -> ExperimentEngine:
    """Return an engine for a model, with a KV cache large enough for each of its runs.

    `parallel_format` replaces that of the checkpoint's tokens, in virtual time. `forks` are fields
    of `ForkSettings`, such as `max_forks`. Raises EvaluationError if a model without a format has
    no control tokens.
    """
    engine: OfflineEngine
    if settings.is_virtual:
        engine = _virtual_engine(settings, model, parallel_format, forks or {})
    elif parallel_format is None:
        engine = _real_engine(settings, model, forks or {})
    else:
        raise EvaluationError(f"format {parallel_format}: only in virtual time")
    try:
        if parallel_format is not None:
            return ExperimentEngine(engine, (engine.tokenizer.eos_token_id,))
        return ExperimentEngine(engine, hidden_ids(engine, model))
    except EvaluationError:
        engine.shutdown()
        raise


def hidden_ids(engine: OfflineEngine, model: str) -> tuple[int, int, int]:
    """Return the fork, child and end token. Raises EvaluationError without control tokens."""
    control = engine.control_tokens
    if control is None:
        raise EvaluationError(f"{model} has no control tokens: it cannot fork")
    return control.fork_id, control.child_id, engine.tokenizer.eos_token_id


def load_questions(
    settings: ExperimentSettings,
    trace: str,
    engine: ExperimentEngine,
    parallel_format: str | None = None,
    *,
    reserved_tokens: int = 0,
) -> Workload:
    """Return the questions of a trace, by its name, as tokens of an engine with this format.

    Each sequence leaves `reserved_tokens` of the context free.
    """
    # These import transformers, which takes seconds.
    from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text
    from cluster.lab.virtual.text import virtual_text

    offline = engine.engine
    tokenizer = offline.tokenizer
    list_rules: ListRules | None = None
    text: AnswerText
    if parallel_format is not None:
        # The format reads text, so the engine has all of Llama's vocabulary.
        list_rules = ListRules(LISTS, tokenizer)
        text = load_text(LLAMA_TOKENIZER)
    elif settings.is_virtual:
        text = virtual_text()
    else:
        text = load_text(tokenizer.name_or_path)
    tokens = text.tokens
    return load_workload(
        settings.traces[trace],
        text,
        tokens,
        marker_id(tokenizer, (tokens.fork_id, tokens.child_id, tokens.end_id)),
        number=settings.answers,
        max_tokens=settings.max_tokens,
        max_sequence_tokens=int(engine.scheduler.max_model_len) - reserved_tokens,
        seed=settings.seed,
        list_rules=list_rules,
    )


def _virtual_engine(
    settings: ExperimentSettings, model: str, parallel_format: str | None, forks: Mapping[str, Any]
) -> VirtualEngine:
    devices = [settings.virtual_device(model, device) for device in settings.devices]
    spec = VirtualSpec(
        find_model(model).config,
        devices[0][0],
        settings.block_size * max(num_blocks for _, num_blocks in devices),
        block_size=settings.block_size,
        max_model_len=_LENGTH_MARGIN * settings.max_tokens,
        is_async=settings.is_async,
        forks=forks,
    )
    if parallel_format is None:
        engine = VirtualEngine(spec)
    else:
        forks = {**forks, "parallel_format": parallel_format}
        engine = VirtualEngine(replace(spec, forks=forks, checkpoint=random_model(model)))
    engine.device.counts_blocks = True
    return engine


def _real_engine(
    settings: ExperimentSettings, model: str, forks: Mapping[str, Any]
) -> OfflineEngine:
    # Imports transformers, which takes seconds.
    from transformers import AutoConfig

    from apar_core.scheduler.fork_settings import CONFIG_KEY

    positions: int = AutoConfig.from_pretrained(model_path(model)).max_position_embeddings
    arguments: dict[str, Any] = {
        "block_size": settings.block_size,
        "max_model_len": min(_LENGTH_MARGIN * settings.max_tokens, positions),
        "max_num_seqs": _MAX_ROWS,
        "max_num_batched_tokens": 2 * _MAX_ROWS,
        "additional_config": {CONFIG_KEY: dict(forks)},
        **settings.engine_args,
    }
    return replaying_engine(model, arguments, settings.kv_tokens)


def replaying_engine(
    model: str, arguments: Mapping[str, Any], kv_tokens: int | None = None
) -> OfflineEngine:
    """Return an engine that replays answers; `arguments` are those of vLLM.

    model: preset, folder or Hugging Face name. kv_tokens: tokens of the KV cache, which requires a
    `block_size` in `arguments`; None: vLLM decides.
    """
    # Several engines on one machine would otherwise bind to the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Imports vLLM, which takes seconds.
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.engine.replay import REPLAY

    path = model_path(model)
    memory: dict[str, Any] = {}
    if kv_tokens is not None:
        block_size = int(arguments["block_size"])
        # One block is vLLM's null block.
        num_blocks = kv_tokens // block_size + 1
        # Without a size, vLLM would ask for nearly all of the memory. Twice the size for the
        # model's own type, since the cache may be in float32.
        kv_bytes = 2 * num_blocks * block_size * find_model(path).kv_bytes_per_token
        memory = {"num_gpu_blocks_override": num_blocks, "kv_cache_memory_bytes": kv_bytes}
    return OfflineEngine(path, logits_processors=[REPLAY], **{**memory, **arguments})
