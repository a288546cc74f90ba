"""An engine for many runs of an experiment: its KV memory, limits and policy are set between them.

So that every way of decoding is measured in one process. Several of them can take turns: each has
a clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from apar_core.errors import EngineError
from apar_core.scheduler.fork_admission import AdmissionCounters
from apar_core.scheduler.fork_policy import AdaptivePolicy, EagerPolicy
from apar_core.scheduler.step_time import StepClock
from cluster.experiments.turn_clock import TurnClock

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine

Policy = Literal["eager", "adaptive"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a run is given.

    `kv_share` is the part of the KV cache that it may use; `max_requests` the most requests that
    run at once, kept by the engine; `concurrency` the requests that a closed loop keeps under way,
    None for all at once; it goes on with others around the measured ones if it `keeps_busy`. The
    adaptive policy keeps to `token_time_s` a token, and knows the times of steps from the run just
    before if it `keeps_learned`, from nothing else.
    """

    kv_share: float = 1.0
    max_requests: int | None = None
    concurrency: int | None = None
    keeps_busy: bool = True
    policy: Policy = "eager"
    token_time_s: float = 1.0
    keeps_learned: bool = False


@dataclass(slots=True)
class StepCounts:
    """What the engine has done since the counts were last set to zero.

    `text_tokens` are generated ones without control and end tokens; `computed_tokens` all that went
    through the model; `rows` sequences, summed over the steps.
    """

    steps: int = 0
    rows: int = 0
    text_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0


class ExperimentEngine:
    """An `OfflineEngine` whose steps are counted, and part of whose KV cache can be taken away.

    `hidden_ids` are the ids of tokens that are no text: control and end tokens. Its times are those
    of `clock`, also what the adaptive policy learns.
    """

    def __init__(self, engine: OfflineEngine, hidden_ids: Sequence[int]) -> None:
        self.engine = engine
        self.llm_engine: Any = engine.llm.llm_engine
        self.scheduler: Any = engine.scheduler
        self.counts = StepCounts()
        self.clock = TurnClock()
        self.scheduler.step_clock = StepClock(self.clock)
        self._hidden = frozenset(hidden_ids)
        self._ballast: list[Any] = []
        self._adaptive = AdaptivePolicy(1.0)
        self._watermark = self.scheduler.scheduler_config.watermark
        self._count_steps()

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
        """Tokens that held blocks have room for."""
        free = self._pool.get_num_free_blocks()
        return (self.num_blocks - len(self._ballast) - int(free)) * self.block_size

    @property
    def has_pending(self) -> bool:
        """Whether a request waits of which nothing has been computed yet."""
        return bool(self.waiting_requests())

    def waiting_requests(self) -> set[str]:
        """Ids, as they were submitted, of requests of which nothing has been computed yet."""
        groups = self.scheduler.threads
        states = self.llm_engine.output_processor.request_states
        return {
            states[name].external_req_id
            for name, request in ((each.request_id, each) for each in self.scheduler.waiting)
            if request.num_preemptions == 0
            # A child is no request of a client's, and waits for a step only.
            and (groups.group(name) is None or groups.group_of_root(name) is not None)
        }

    def prepare(self, conditions: Conditions) -> None:
        """Give the coming run an empty KV cache of its size, its limits, and counts from zero.

        Raises EngineError if something runs or holds blocks.
        """
        if self.scheduler.requests:
            raise EngineError(f"{len(self.scheduler.requests)} threads run: no run may begin")
        self._set_kv_share(conditions.kv_share)
        self.scheduler.gate.max_requests = conditions.max_requests
        learned = self._adaptive.learned if conditions.keeps_learned else None
        self._adaptive = AdaptivePolicy(conditions.token_time_s, learned)
        is_adaptive = conditions.policy == "adaptive"
        self.scheduler.admission.policy = self._adaptive if is_adaptive else EagerPolicy()
        self.scheduler.admission.counters = AdmissionCounters()
        # Only a policy that learns pays for counting attended tokens.
        self.scheduler._learns = is_adaptive
        self.counts = StepCounts()

    def abort_all(self) -> None:
        """End whatever runs."""
        self.llm_engine.abort_request(list(self.llm_engine.output_processor.request_states), True)

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.shutdown()

    def _set_kv_share(self, share: float) -> None:
        self._pool.free_blocks(self._ballast)
        self._ballast = []
        # Also empties the cache of prefixes, which a run must not find from the one before.
        if not self.scheduler.reset_prefix_cache():
            raise EngineError("the prefix cache was not reset: blocks of an earlier run are held")
        num_left = round(share * self.num_blocks)
        self._ballast = self._pool.get_new_blocks(self.num_blocks - num_left)
        # The reserve that vLLM keeps is a share of the cache, here of what is left of it.
        manager = self.scheduler.kv_cache_manager
        manager.watermark_blocks = int(self._watermark * num_left)

    @property
    def _pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _count_steps(self) -> None:
        scheduler = self.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output
        preempt = scheduler._preempt_request

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            if step.total_num_scheduled_tokens > 0:
                self.counts.steps += 1
                self.counts.rows += len(step.num_scheduled_tokens)
                self.counts.computed_tokens += step.total_num_scheduled_tokens
            return step

        def counted_update(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            hidden = self._hidden
            self.counts.text_tokens += sum(
                token_id not in hidden
                for client_outputs in outputs.values()
                for output in client_outputs.outputs
                for token_id in output.new_token_ids
            )
            return outputs

        def counted_preempt(*args: Any, **kwargs: Any) -> Any:
            self.counts.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.schedule = counted_schedule
        scheduler.update_from_output = counted_update
        scheduler._preempt_request = counted_preempt
