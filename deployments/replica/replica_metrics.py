"""What a replica tells: its engine at the moment and since its start, and its finished requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import serve
from ray.experimental import internal_kv

from apar_core.engine.journal import RequestFollower
from apar_core.tree.statistics import TreeStatistics
from cluster.metrics import catalogue
from deployments.metrics.recorder import FlushTimer, Instruments, RayInstruments, Recorder
from deployments.metrics.vllm_stats import VllmStats

_OF_A_REQUEST = (
    catalogue.ATTENDED_TOKENS,
    catalogue.SEQUENTIAL_ATTENDED_TOKENS,
    catalogue.CACHED_TOKENS,
    catalogue.SEQUENTIAL_CACHED_TOKENS,
    catalogue.CRITICAL_PATH_STEPS,
    catalogue.SEQUENTIAL_STEPS,
    catalogue.PROMPT_TOKENS,
)


class ReplicaMetrics:
    """The metrics of one replica."""

    def __init__(self, instruments: Instruments, *, model: str, replica: str) -> None:
        self._recorder = Recorder(instruments, model=model, replica=replica)
        for metric in _OF_A_REQUEST:
            self._recorder.inc(metric, 0)
        for metric in (
            catalogue.REQUEST_THREADS,
            catalogue.REQUEST_DEPTH,
            catalogue.TIME_PER_OUTPUT_TOKEN,
        ):
            self._recorder.declare(metric)

    def started(self, *, replaces_lost: bool) -> None:
        """Count the replica itself, if it stands in for a lost one."""
        self._recorder.inc(catalogue.REPLICA_RESTARTS, int(replaces_lost))

    def finished(self, follower: RequestFollower) -> None:
        """Count a client's request that has reached the engine and is over, whatever ended it."""
        if follower.num_roots == 0:
            return
        self._recorder.inc(catalogue.PROMPT_TOKENS, follower.prompt_tokens)
        trees = follower.statistics or _of_one_thread(follower)
        if trees is None:
            return
        self._count(trees)
        decode_s = follower.last_output_s - follower.first_output_s
        if trees.decode_steps > 1 and decode_s > 0:
            self._recorder.observe(
                catalogue.TIME_PER_OUTPUT_TOKEN, decode_s / (trees.decode_steps - 1)
            )

    def _count(self, trees: TreeStatistics) -> None:
        record = self._recorder
        record.inc(catalogue.ATTENDED_TOKENS, trees.attended_tokens)
        record.inc(catalogue.SEQUENTIAL_ATTENDED_TOKENS, trees.sequential_attended_tokens)
        record.inc(catalogue.CACHED_TOKENS, trees.max_cached_tokens)
        record.inc(catalogue.SEQUENTIAL_CACHED_TOKENS, trees.sequential_max_cached_tokens)
        record.inc(catalogue.CRITICAL_PATH_STEPS, trees.decode_steps)
        record.inc(catalogue.SEQUENTIAL_STEPS, trees.sequential_steps)
        record.observe(catalogue.REQUEST_THREADS, trees.threads)
        record.observe(catalogue.REQUEST_DEPTH, trees.max_depth)

    def log_lines_dropped(self, num_lines: int) -> None:
        """Note how many lines of the log have been left out since the start."""
        self._recorder.set_total(catalogue.LOG_LINES_DROPPED, num_lines)

    def flush(self, state: Mapping[str, Any] | None, num_requests: int) -> None:
        """Hand all over, with the requests inside and the engine core's state, if it is known."""
        self._recorder.set(catalogue.REPLICA_REQUESTS, num_requests)
        if state is not None:
            self._take_values(state)
            if "steps" in state:
                self._take_totals(state)
        self._recorder.flush()

    def _take_values(self, state: Mapping[str, Any]) -> None:
        """Take what the engine holds at the moment."""
        record = self._recorder
        blocks, free = state["kv_blocks"], state["free_blocks"]
        record.set(catalogue.KV_BLOCKS, blocks)
        record.set(catalogue.KV_FREE_BLOCKS, free)
        record.set(catalogue.KV_CACHE_USAGE, 1 - free / blocks if blocks else 0.0)
        record.set(catalogue.THREADS, state["running_threads"], state="running")
        record.set(catalogue.THREADS, state["waiting_threads"], state="waiting")
        record.set(catalogue.THREADS, state.get("deferred_threads", 0), state="deferred")

    def _take_totals(self, state: Mapping[str, Any]) -> None:
        """Take the counts that the scheduler has kept since the engine's start."""
        record = self._recorder
        steps, forks, sharing = state["steps"], state["admission_counters"], state["fork_counters"]
        record.set_total(catalogue.ENGINE_STEPS, steps["num_steps"])
        record.set_total(catalogue.ENGINE_BUSY_SECONDS, steps["busy_s"])
        record.set_total(catalogue.GENERATED_TOKENS, state["generated_tokens"])
        record.set_total(catalogue.FORKS, forks["accepted"], outcome="accepted")
        record.set_total(catalogue.FORKS, sum(forks["delayed"].values()), outcome="delayed")
        record.set_total(catalogue.FORKS, forks["refused"], outcome="refused")
        for reason, number in forks["delayed"].items():
            record.set_total(catalogue.FORK_DELAYS, number, reason=reason)
        record.set_total(catalogue.KV_SHARED_BLOCKS, sharing["shared_blocks"])
        record.set_total(catalogue.KV_COPIED_BLOCKS, sharing["copied_blocks"])
        record.set_total(catalogue.KV_RELEASED_EARLY_BLOCKS, sharing["released_early_blocks"])


def _of_one_thread(follower: RequestFollower) -> TreeStatistics | None:
    """What forking has saved an ordinary checkpoint: nothing; None where lengths are not known."""
    num_tokens = follower.generated_tokens
    if follower.num_roots > 1 or follower.searches_beams or num_tokens == 0:
        return None
    attended = num_tokens * follower.prompt_tokens + num_tokens * (num_tokens - 1) // 2
    cached = follower.prompt_tokens + num_tokens - 1
    return TreeStatistics(
        threads=1,
        forks=0,
        max_depth=0,
        decode_steps=num_tokens,
        sequential_steps=num_tokens,
        attended_tokens=attended,
        sequential_attended_tokens=attended,
        max_cached_tokens=cached,
        sequential_max_cached_tokens=cached,
        text_tokens=num_tokens,
        control_tokens=0,
    )


# The engine answers between two steps, of which one on a CPU may take seconds. Ray forgets a
# gauge within a few, so the last answer is told again meanwhile; an old one would hide a failure.
_PATIENCE_S = 0.5
_TOLD_AGAIN_S = 10.0


class LastState:
    """What the engine core last said of its state."""

    def __init__(
        self,
        core_state: Callable[[], Awaitable[dict[str, Any]]],
        *,
        patience_s: float = _PATIENCE_S,
        told_again_s: float = _TOLD_AGAIN_S,
    ) -> None:
        self._core_state = core_state
        self._patience_s = patience_s
        self._told_again_s = told_again_s
        self._asked: asyncio.Future[dict[str, Any]] | None = None
        self._state: dict[str, Any] | None = None
        self._came_s = time.monotonic()

    async def get(self) -> dict[str, Any] | None:
        """The state of now, or the last one; None where that is too old. Raises as asking does."""
        asked = self._asked or asyncio.ensure_future(self._core_state())
        self._asked = asked
        await asyncio.wait([asked], timeout=self._patience_s)
        now_s = time.monotonic()
        if asked.done():
            self._asked, self._state = None, None
            self._state, self._came_s = asked.result(), now_s
        elif now_s - self._came_s > self._told_again_s:
            self._state = None
        return self._state

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._asked is not None:
            self._asked.cancel()


class ReplicaReporter:
    """Hands over what the replica counts, its engine core's state, and vLLM's numbers."""

    def __init__(self, *, model: str, replica: str) -> None:
        instruments = RayInstruments()
        self.metrics = ReplicaMetrics(instruments, model=model, replica=replica)
        self._vllm = VllmStats(instruments, replica)
        self._note = note_of_this_replica()
        self._timer: FlushTimer | None = None
        self._state: LastState | None = None

    @property
    def stat_loggers(self) -> list[Any]:
        """What the engine is to be built with."""
        return [self._vllm.stat_logger]

    def begin(
        self,
        core_state: Callable[[], Awaitable[dict[str, Any]]],
        num_inside: Callable[[], int],
        log_lines_dropped: Callable[[], int],
    ) -> None:
        """Tell of the engine, of the requests inside and of the log from now on."""

        self.metrics.started(replaces_lost=self._note.leave())
        last = self._state = LastState(core_state)

        async def flush() -> None:
            try:
                self.metrics.log_lines_dropped(log_lines_dropped())
                self.metrics.flush(await last.get(), num_inside())
            finally:
                self._vllm.flush()

        self._timer = FlushTimer(flush)

    async def close(self) -> None:
        """Hand everything over a last time; the engine must still answer."""
        if self._timer is not None and self._state is not None:
            await self._timer.close()
            self._state.close()
            self._note.take_back()


_NAMESPACE = b"apar"
_PREFIX = "replica/"


class Notes(Protocol):
    """A store of notes that all processes of the cluster share."""

    def put(self, key: str, text: str) -> None:
        """Leave a note."""

    def keys(self, prefix: str) -> list[str]:
        """The keys of the notes there."""

    def get(self, key: str) -> str | None:
        """A note; None if it is gone."""

    def take(self, key: str) -> bool:
        """Remove a note; whether it was there, and nobody else has taken it."""

    def is_alive(self, text: str) -> bool:
        """Whether the actor that a note names is alive."""


@dataclass(frozen=True, slots=True)
class ReplicaNote:
    """The note of one replica of a deployment; `actor` is Ray's name of it."""

    notes: Notes
    deployment: str
    replica: str
    actor: str

    @property
    def _prefix(self) -> str:
        return f"{_PREFIX}{self.deployment}/"

    def leave(self) -> bool:
        """Leave the note; returns whether the replica stands in for a lost one."""
        replaces = any(self._take_if_lost(key) for key in self.notes.keys(self._prefix))
        self.notes.put(self._prefix + self.replica, self.actor)
        return replaces

    def take_back(self) -> None:
        """Remove the note: the replica ends in peace."""
        self.notes.take(self._prefix + self.replica)

    def _take_if_lost(self, key: str) -> bool:
        actor = self.notes.get(key)
        return actor is not None and not self.notes.is_alive(actor) and self.notes.take(key)


class RayNotes:
    """Notes in the key-value store of Ray's head."""

    def __init__(self, actor_namespace: str) -> None:
        self._actor_namespace = actor_namespace

    def put(self, key: str, text: str) -> None:
        """Leave a note."""
        internal_kv._internal_kv_put(key, text, namespace=_NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        """The keys of the notes there."""
        found = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
        return [key.decode() for key in found]

    def get(self, key: str) -> str | None:
        """A note; None if it is gone."""
        text = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        return None if text is None else text.decode()

    def take(self, key: str) -> bool:
        """Remove a note; whether it was there, and nobody else has taken it."""
        return bool(internal_kv._internal_kv_del(key, namespace=_NAMESPACE))

    def is_alive(self, text: str) -> bool:
        """Whether an actor of that name is alive."""
        with suppress(ValueError):
            ray.get_actor(text, namespace=self._actor_namespace)
            return True
        return False


def note_of_this_replica() -> ReplicaNote:
    """The note of the Ray Serve replica that this process is."""
    context, actor = serve.get_replica_context(), ray.get_runtime_context()
    return ReplicaNote(
        RayNotes(actor.namespace),
        f"{context.app_name}/{context.deployment}",
        context.replica_id.unique_id,
        actor.get_actor_name() or "",
    )
