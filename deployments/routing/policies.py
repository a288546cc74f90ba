"""Routing policies: pick the replica for a request.

To add a policy:

1. Name it in `RoutingPolicy` (`deployments/config/routing.py`): `routing.policy` accepts it.
2. Write a subclass of `Router` here and implement `pick`; `FewestRequests` is a short example and
   `ThreadRouter`, the default policy, a full one.
3. Add it to `POLICIES` at the end of this file.

The tests in `tests/unit/deployments/routing/test_policies.py` then run for it, too.

Policies use no Ray, no vLLM and no clock; time comes in as an argument, so the cluster simulation
drives the same code. They are not thread-safe: `shared_router.py` takes a lock around them.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from deployments.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.table import Forecast, Forecaster, ReplicaTable
from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RequestHint
from deployments.wire.response import ResponseEnd

_MAX_RELEASED = 8192
# Longer than it takes a request to reach its replica, and a report to come back.
_LOST_AFTER_S = 30.0
# Cost of a prompt token in a step, relative to a decoding thread, which also reads its context.
# Rooflines and CPU measurements give a fifth to a quarter. A prefix computed twice also takes
# cache space twice, and in the simulation all values from a fifth to two worked equally well.
_PREFILL_SHARE = 0.5
# Only the longest known prefixes of a prompt are looked up: shorter ones are on the same replicas.
_MAX_LOOKUPS = 3
_NEVER = -np.inf


class Reason(StrEnum):
    """Reason for a decision, as counted in the metric `apar_router_decisions_total`.

    AFFINITY means that the prefix cache changed the choice. If the replica that holds the prefix
    is also the cheapest without it, the reason is LEAST_LOAD.
    """

    AFFINITY = "affinity"
    LEAST_LOAD = "least_load"
    ONLY_ONE = "only_one"
    FULL = "full"


@dataclass(slots=True)
class _Sent:
    """A request at a replica, with its forecast at the time it was sent."""

    slot: int
    replica_id: str
    hint: RequestHint
    forecast: Forecast
    at_s: float


class Router(ABC):
    """Base of all policies: tracks replicas and the requests at them; a subclass picks.

    For each request: `choose`, then `sent` at once, then `ended` exactly once, whatever happened
    to it. A policy reads `self.table` (load per slot), `self.forecaster` (expected cost of a
    request) and `self.random`. One that keeps state of its own may extend `sent`,
    `replicas_changed` and `adopt`.
    """

    def __init__(self, settings: RoutingSettings, seed: int = 0) -> None:
        self.settings = settings
        self.table = ReplicaTable()
        self.forecaster = Forecaster()
        self.random = np.random.default_rng(seed)
        self.decisions: Counter[Reason] = Counter()
        self._sent: dict[str, _Sent] = {}
        self._released: OrderedDict[str, _Sent] = OrderedDict()

    @abstractmethod
    def pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        """Pick one of the slots that have room; there are always two or more."""

    def choose(self, hint: RequestHint, avoid: Collection[str] = ()) -> str | None:
        """Choose the replica for a request; None if every replica is at its cap.

        Replicas in `avoid`, and those that have stopped reporting, are chosen only if no other
        has room.
        """
        if len(self.table.slots) == 1:
            ((only, slot),) = self.table.slots.items()
            if self.table.room[slot] > 0:
                self.decisions[Reason.ONLY_ONE] += 1
                return only
        open_slots = self._preferred(np.flatnonzero(self.table.room > 0), avoid)
        if len(open_slots) == 0:
            self.decisions[Reason.FULL] += 1
            return None
        if len(open_slots) == 1:
            slot, reason = int(open_slots[0]), Reason.ONLY_ONE
        else:
            slot, reason = self.pick(hint, open_slots)
        self.decisions[reason] += 1
        return self.table.replica_id(slot)

    def _preferred(self, open_slots: NDArray[np.intp], avoid: Collection[str]) -> NDArray[np.intp]:
        slots = self.table.slots
        if tried := [slots[name] for name in avoid if name in slots]:
            others = np.setdiff1d(open_slots, tried)
            open_slots = others if len(others) else open_slots
        reporting = open_slots[~self.table.silence.silent()[open_slots]]
        return reporting if len(reporting) else open_slots

    def sent(self, request_id: str, replica_id: str, hint: RequestHint, now_s: float) -> None:
        """Count a request at a replica; if it was counted at another one, it moves."""
        self.released(request_id, now_s)
        self._released.pop(request_id, None)
        slot = self.table.slots.get(replica_id)
        if slot is None:
            return
        forecast = self.forecaster.forecast(hint)
        self._sent[request_id] = _Sent(slot, replica_id, hint, forecast, now_s)
        self.table.sent(slot, forecast, now_s)

    def released(self, request_id: str, now_s: float, *, replica_id: str | None = None) -> None:
        """Stop counting a request at its replica; its cost may still follow with `ended`.

        With `replica_id`, only if the request is counted there.
        """
        sent = self._sent.get(request_id)
        if sent is None or replica_id not in (None, sent.replica_id):
            return
        del self._sent[request_id]
        self.table.ended(sent.slot, sent.replica_id, sent.forecast, now_s)
        self._released[request_id] = sent
        if len(self._released) > _MAX_RELEASED:
            self._released.popitem(last=False)

    def ended(self, request_id: str, end: ResponseEnd | None, now_s: float) -> None:
        """Forget a finished request and learn its cost, if that is known."""
        self.released(request_id, now_s)
        sent = self._released.pop(request_id, None)
        if sent is not None and end is not None:
            self.forecaster.learn(sent.hint, end)

    def reported(self, replica_id: str, load: ReplicaLoad, now_s: float) -> None:
        """Take a replica's report; reports of unknown replicas are ignored.

        A replica that reports no request proves that older requests counted there are lost.
        """
        self.table.reported(replica_id, load, now_s)
        slot = self.table.slots.get(replica_id)
        if load.requests > 0 or slot is None or self.table.requests[slot] == 0:
            return
        lost = [
            key
            for key, sent in self._sent.items()
            if sent.replica_id == replica_id and now_s - sent.at_s > _LOST_AFTER_S
        ]
        for request_id in lost:
            self.released(request_id, now_s)

    def replicas_changed(self, caps: Mapping[str, int]) -> None:
        """Take the running replicas, each with its cap in requests."""
        self.table.replicas_changed(caps)
        lost = [key for key, sent in self._sent.items() if sent.replica_id not in caps]
        for request_id in lost:
            self._released[request_id] = self._sent.pop(request_id)

    def adopt(self, other: "Router") -> None:
        """Take over the state of another router, which must not be used afterwards."""
        self.table, self.forecaster = other.table, other.forecaster
        self.decisions = other.decisions
        self._sent, self._released = other._sent, other._released

    def replica_of(self, request_id: str) -> str | None:
        """Return the replica where a request is counted now."""
        sent = self._sent.get(request_id)
        return None if sent is None else sent.replica_id

    @property
    def num_sent(self) -> int:
        """Number of requests at replicas now."""
        return len(self._sent)


class RoundRobin(Router):
    """Take the replicas in turn, skipping full ones."""

    _last = -1

    def pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        """Pick the next slot after the last one."""
        index = int(np.searchsorted(open_slots, self._last, side="right")) % len(open_slots)
        self._last = int(open_slots[index])
        return self._last, Reason.LEAST_LOAD


class RandomChoice(Router):
    """Take any replica with room."""

    def pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        """Pick a random slot."""
        return int(self.random.choice(open_slots)), Reason.LEAST_LOAD


class FewestRequests(Router):
    """Take the replica with the fewest requests."""

    def pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        """Pick the slot with the fewest requests, ties at random."""
        requests = self.table.requests[open_slots]
        fewest = open_slots[requests == requests.min()]
        return int(self.random.choice(fewest)), Reason.LEAST_LOAD


class PowerOfTwo(Router):
    """Take the less loaded of two random replicas, as Ray Serve does by default."""

    def pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        """Pick the one of two random slots that has fewer requests."""
        first, second = self.random.choice(open_slots, 2, replace=False)
        requests = self.table.requests
        return int(first if requests[first] <= requests[second] else second), Reason.LEAST_LOAD


class ThreadRouter(Router):
    """Take the replica where the request costs the least time, for itself and the others there.

    The request runs `steps` engine steps, whose length grows with the threads at the replica, its
    own included. With family attention, further threads of a request count less. Its threads
    lengthen the steps of the other requests there. Its prompt, less the cached prefix, is computed
    once and delays everyone. If its blocks do not fit, it waits.
    """

    def __init__(self, settings: RoutingSettings, seed: int = 0) -> None:
        super().__init__(settings, seed)
        self._prefixes = PrefixTable(settings.affinity_entries)
        self._prefixes.resize(len(self.table.rows))

    def pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        """Pick the cheapest slot, ties at random."""
        forecast = self.forecaster.forecast(hint)
        open_slots = self._in_time(hint, forecast, open_slots)
        cost = self._cost(forecast, hint.prompt_tokens)[open_slots]
        cost *= 1.0 + 1e-6 * self.random.random(len(cost))
        plain = int(cost.argmin())
        saved = self._saved(hint)
        if saved is None:
            return int(open_slots[plain]), Reason.LEAST_LOAD
        best = int((cost - saved[open_slots]).argmin())
        reason = Reason.LEAST_LOAD if best == plain else Reason.AFFINITY
        return int(open_slots[best]), reason

    def _in_time(
        self, hint: RequestHint, forecast: Forecast, open_slots: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Return the slots where the request is predicted to meet its deadlines.

        If there are none, only the slot where its answer ends first.
        """
        if math.isinf(hint.first_token_s) and math.isinf(hint.answer_s):
            return open_slots
        first_s, answer_s = (
            times[open_slots] for times in self._durations(forecast, hint.prompt_tokens)
        )
        if (saved := self._saved(hint)) is not None:
            cached_s = saved[open_slots] / (1.0 + self.table.requests[open_slots])
            first_s, answer_s = first_s - cached_s, answer_s - cached_s
        late_s = np.maximum(first_s - hint.first_token_s, answer_s - hint.answer_s)
        in_time = open_slots[late_s <= 0.0]
        return in_time if len(in_time) else open_slots[[int(late_s.argmin())]]

    def _durations(
        self, forecast: Forecast, prompt_tokens: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds until the first token and the end of the answer, in each slot."""
        table, step = self.table, self.table.step_time
        own = table.weighted(min(1.0, forecast.threads), forecast.threads)
        step_s = step.base_s + step.per_thread_s * (
            table.weighted(table.requests, table.threads) + own
        )
        prefill_s = _PREFILL_SHARE * step.per_thread_s * prompt_tokens
        short = table.used_blocks + forecast.kv_tokens / table.block_size - table.blocks
        wait_s = np.maximum(short, 0.0) * table.block_size * step_s
        wait_s /= table.threads + forecast.threads
        first_s = (wait_s + prefill_s + step_s) * step.slowness
        return first_s, first_s + forecast.steps * step_s * step.slowness

    def sent(self, request_id: str, replica_id: str, hint: RequestHint, now_s: float) -> None:
        """Also note that the replica's cache holds the prompt from now on."""
        super().sent(request_id, replica_id, hint, now_s)
        slot = self.table.slots.get(replica_id)
        if slot is not None and self.settings.affinity:
            self._prefixes.sent(hint, slot, float(self.table.sent_tokens[slot]))

    def replicas_changed(self, caps: Mapping[str, int]) -> None:
        """Also forget the caches of replicas that are gone."""
        for slot in [slot for name, slot in self.table.slots.items() if name not in caps]:
            self._prefixes.forget(slot)
        super().replicas_changed(caps)
        self._prefixes.resize(len(self.table.rows))

    def adopt(self, other: Router) -> None:
        """Take over another router's state, without the cached prefixes."""
        super().adopt(other)
        self._prefixes.resize(len(self.table.rows))

    def _cost(self, forecast: Forecast, prompt_tokens: int) -> NDArray[np.float64]:
        """Return the seconds that a request costs in each slot, for itself and those there."""
        table, step = self.table, self.table.step_time
        threads = table.threads + forecast.threads
        own = table.weighted(min(1.0, forecast.threads), forecast.threads)
        step_s = step.base_s + step.per_thread_s * (
            table.weighted(table.requests, table.threads) + own
        )
        others_s = step.per_thread_s * own * table.requests
        cost = forecast.steps * (step_s + others_s)
        cost += _PREFILL_SHARE * step.per_thread_s * prompt_tokens * (1.0 + table.requests)
        wanted = forecast.kv_tokens / table.block_size
        short = table.used_blocks + wanted - table.blocks
        if short.max() > 0.0:
            # Blocks are freed as fast as threads end, which is as fast as they grow.
            cost += np.maximum(short, 0.0) * table.block_size * step_s / threads
        cost *= step.slowness
        return cost

    def _saved(self, hint: RequestHint) -> NDArray[np.float64] | None:
        """Return the seconds that each slot's prefix cache saves the request and those there."""
        if not self.settings.affinity or not hint.prefix_hashes:
            return None
        table, step = self.table, self.table.step_time
        held = self._prefixes.held_tokens(hint, table.sent_tokens, table.blocks * table.block_size)
        if held is None:
            return None
        worth = self.settings.affinity * _PREFILL_SHARE * step.per_thread_s
        saved: NDArray[np.float64] = held * (1.0 + table.requests) * step.slowness * worth
        return saved


class PrefixTable:
    """Prompt prefixes (hashes) that each replica probably holds in its prefix cache.

    vLLM evicts the least recently used blocks. So a replica is assumed to hold a prefix until it
    has been sent as many further tokens as its cache holds.
    """

    def __init__(self, max_entries: int) -> None:
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._max_entries = max_entries
        # [prefix, slot]: total tokens sent to the replica when it last got the prefix.
        self._marks: NDArray[np.float64] = np.empty((0, 0))

    def __len__(self) -> int:
        return len(self._rows)

    def resize(self, num_slots: int) -> None:
        """Add slots."""
        wider = np.full((self._marks.shape[0], num_slots), _NEVER)
        wider[:, : self._marks.shape[1]] = self._marks
        self._marks = wider

    def forget(self, slot: int) -> None:
        """Drop the cache of a replica that is gone."""
        self._marks[:, slot] = _NEVER

    def sent(self, hint: RequestHint, slot: int, sent_tokens: float) -> None:
        """Note the prefixes of a prompt; `sent_tokens` is the total sent to the replica so far."""
        for prefix in hint.prefix_hashes:
            row = self._row(prefix)
            self._marks[row, slot] = sent_tokens

    def held_tokens(
        self, hint: RequestHint, sent_tokens: NDArray[np.float64], cache_tokens: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Return the prompt tokens that each replica probably holds; None for an unknown prefix.

        Per slot, `sent_tokens` is the total ever sent there and `cache_tokens` the cache's size.
        """
        known = [
            (row, covered)
            for prefix, covered in zip(hint.prefix_hashes, covered_tokens(hint), strict=True)
            if (row := self._rows.get(prefix)) is not None
        ]
        if not known:
            return None
        oldest = sent_tokens - cache_tokens
        held = np.zeros(len(sent_tokens))
        for row, covered in known[-_MAX_LOOKUPS:]:
            marks = self._marks[row]
            # Before the first report the cache size is infinite, and `oldest` equals `_NEVER`.
            held[(marks > _NEVER) & (marks >= oldest)] = covered
        return held

    def _row(self, prefix: int) -> int:
        """Return the row of a prefix and mark it as most recently used."""
        row = self._rows.get(prefix)
        if row is not None:
            self._rows.move_to_end(prefix)
            return row
        if len(self._rows) >= self._max_entries:
            _, row = self._rows.popitem(last=False)
        else:
            row = len(self._rows)
            if row >= self._marks.shape[0]:
                added = min(max(64, self._marks.shape[0]), self._max_entries)
                more = np.full((added, self._marks.shape[1]), _NEVER)
                self._marks = np.concatenate([self._marks, more])
        self._marks[row] = _NEVER
        self._rows[prefix] = row
        return row


def covered_tokens(hint: RequestHint) -> tuple[int, ...]:
    """Return the tokens up to the end of each prefix; evenly spaced if the hint has none."""
    count = len(hint.prefix_hashes)
    if len(hint.prefix_tokens) == count:
        return hint.prefix_tokens
    return tuple(hint.prompt_tokens * (index + 1) // count for index in range(count))


POLICIES: dict[RoutingPolicy, type[Router]] = {
    RoutingPolicy.THREADS: ThreadRouter,
    RoutingPolicy.POWER_OF_TWO: PowerOfTwo,
    RoutingPolicy.FEWEST_REQUESTS: FewestRequests,
    RoutingPolicy.ROUND_ROBIN: RoundRobin,
    RoutingPolicy.RANDOM: RandomChoice,
}
"""The policies by their name in the configuration (`routing.policy`)."""


def build_router(settings: RoutingSettings, seed: int = 0) -> Router:
    """Build the router of the configured policy; equal seeds give equal decisions."""
    return POLICIES[settings.policy](settings, seed)
