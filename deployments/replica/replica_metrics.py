"""Metrics of a replica: its engine's state, its finished requests, and whether it is a restart."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.experimental import internal_kv
from ray.serve._private.constants import SERVE_NAMESPACE

from apar_core.engine.request_follower import RequestFollower
from apar_core.metrics.engine import (
    REQUEST_COUNTERS,
    REQUEST_HISTOGRAMS,
    record_request,
    record_state,
)
from apar_core.metrics.recorder import Recorder
from apar_core.tree.statistics import TreeStatistics
from deployments.metrics import catalogue
from deployments.metrics.flush_timer import FlushTimer

if TYPE_CHECKING:
    from apar_core.scheduler.core_state import CoreState

_HISTOGRAMS = (catalogue.TIME_PER_OUTPUT_TOKEN, catalogue.TIME_PER_CRITICAL_PATH_TOKEN)
# The engine core answers between two steps, and a step on a CPU may take seconds. The last state
# stands meanwhile; an older one would hide a failure.
_STATE_TIMEOUT_S = 0.5
_MAX_STATE_AGE_S = 10.0

_NAMESPACE = b"apar"


class ReplicaMetrics:
    """Counts of one replica."""

    def __init__(self, *, model: str, replica: str) -> None:
        self.recorder = Recorder(model=model, replica=replica)
        counters = (*REQUEST_COUNTERS, catalogue.REPLICA_RESTARTS, catalogue.LOG_LINES_DROPPED)
        for metric in (*counters, *REQUEST_HISTOGRAMS, *_HISTOGRAMS):
            self.recorder.declare(metric)

    def started(self, *, replaces_lost: bool) -> None:
        """Count the replica's start, as a restart if it replaces a lost one."""
        self.recorder.inc(catalogue.REPLICA_RESTARTS, int(replaces_lost))

    def finished(self, follower: RequestFollower) -> None:
        """Count a request that reached the engine and is over, for whatever reason."""
        if follower.num_roots == 0:
            return
        record = self.recorder
        record.inc(catalogue.PROMPT_TOKENS, follower.prompt_tokens)
        trees = follower.statistics or _unforked_statistics(follower)
        if trees is None:
            return
        record_request(record, trees)
        decode_s = follower.last_output_s - follower.first_output_s
        for metric, num_tokens in (
            (catalogue.TIME_PER_OUTPUT_TOKEN, trees.text_tokens),
            (catalogue.TIME_PER_CRITICAL_PATH_TOKEN, trees.decode_steps),
        ):
            if num_tokens > 1 and decode_s > 0:
                record.observe(metric, decode_s / (num_tokens - 1))

    def take(self, state: "CoreState | None", num_requests: int) -> None:
        """Record the requests inside and the engine core's state, None if unknown."""
        self.recorder.set(catalogue.REPLICA_REQUESTS, num_requests)
        record_state(self.recorder, state)


def _unforked_statistics(follower: RequestFollower) -> TreeStatistics | None:
    """Statistics of a request on a checkpoint that does not fork; None if lengths are unknown."""
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


class LastState:
    """The engine core's state, repeated for a while if the core is busy."""

    def __init__(
        self,
        core_state: "Callable[[], Awaitable[CoreState]]",
        *,
        timeout_s: float = _STATE_TIMEOUT_S,
        max_age_s: float = _MAX_STATE_AGE_S,
    ) -> None:
        self._core_state = core_state
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._asked: asyncio.Future[CoreState] | None = None
        self._state: CoreState | None = None
        self._received_s = time.monotonic()

    async def get(self) -> "CoreState | None":
        """Return the current state, or the last one, or None if that is too old.

        Raises what `core_state` raises.
        """
        asked = self._asked or asyncio.ensure_future(self._core_state())
        self._asked = asked
        await asyncio.wait([asked], timeout=self._timeout_s)
        now_s = time.monotonic()
        if asked.done():
            self._asked, self._state = None, None
            self._state, self._received_s = asked.result(), now_s
        elif now_s - self._received_s > self._max_age_s:
            self._state = None
        return self._state

    def close(self) -> None:
        """Cancel a call that has not been answered."""
        if self._asked is not None:
            self._asked.cancel()


class ReplicaReporter:
    """Records the state of the replica's engine core once a second."""

    def __init__(self, metrics: ReplicaMetrics) -> None:
        self.metrics = metrics
        self._note = note_of_this_replica()
        self._timer: FlushTimer | None = None
        self._state: LastState | None = None

    def start(
        self,
        core_state: "Callable[[], Awaitable[CoreState]]",
        num_inside: Callable[[], int],
        log_lines_dropped: Callable[[], int],
    ) -> None:
        """Start the timer, once the engine is up."""
        self.metrics.started(replaces_lost=self._note.leave())
        last = self._state = LastState(core_state)

        async def flush() -> None:
            self.metrics.recorder.set_total(catalogue.LOG_LINES_DROPPED, log_lines_dropped())
            self.metrics.take(await last.get(), num_inside())

        self._timer = FlushTimer(flush)

    async def close(self) -> None:
        """Record the state a last time; the engine must still answer."""
        if self._timer is not None and self._state is not None:
            await self._timer.close()
            self._state.close()
            self._note.remove()


class NoteStore:
    """Notes in the key-value store of Ray's head, shared by all processes of the cluster."""

    def __init__(self, actor_namespace: str) -> None:
        self._actor_namespace = actor_namespace

    def put(self, key: str, text: str) -> None:
        """Write a note."""
        internal_kv._internal_kv_put(key, text, namespace=_NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        """List the keys with a prefix."""
        found = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
        return [key.decode() for key in found]

    def get(self, key: str) -> str | None:
        """Return a note; None if it is gone."""
        text = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        return None if text is None else text.decode()

    def take(self, key: str) -> bool:
        """Delete a note; False if it was gone, for instance because another process took it."""
        return bool(internal_kv._internal_kv_del(key, namespace=_NAMESPACE))

    def is_alive(self, actor: str) -> bool:
        """Whether an actor of that name is alive."""
        with suppress(ValueError):
            ray.get_actor(actor, namespace=self._actor_namespace)
            return True
        return False


@dataclass(frozen=True, slots=True)
class ReplicaNote:
    """Tells whether a starting replica replaces a lost one.

    Each replica leaves a note with its actor's name and removes it when it shuts down in order. A
    replica that starts and takes the note of a dead actor counts as its replacement.
    """

    notes: NoteStore
    deployment: str
    replica: str
    actor: str

    @property
    def _prefix(self) -> str:
        return f"replica/{self.deployment}/"

    def leave(self) -> bool:
        """Leave the note; returns whether the replica replaces a lost one."""
        replaces = any(self._take_if_lost(key) for key in self.notes.keys(self._prefix))
        self.notes.put(self._prefix + self.replica, self.actor)
        return replaces

    def remove(self) -> None:
        """Remove the note at an orderly shutdown."""
        self.notes.take(self._prefix + self.replica)

    def _take_if_lost(self, key: str) -> bool:
        actor = self.notes.get(key)
        return actor is not None and not self.notes.is_alive(actor) and self.notes.take(key)


def note_of_this_replica() -> ReplicaNote:
    """Return the note of the Ray Serve replica that runs in this process."""
    context, actor = serve.get_replica_context(), ray.get_runtime_context()
    return ReplicaNote(
        # Not the namespace of the runtime context, which is that of the job.
        NoteStore(SERVE_NAMESPACE),
        f"{context.app_name}/{context.deployment}",
        context.replica_id.unique_id,
        actor.get_actor_name() or "",
    )
