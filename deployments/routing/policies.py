"""The usual ways to choose a replica, to compare ours with; and the choice among them all."""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
import numpy as np
from numpy.typing import NDArray
from cluster.config.routing import RoutingSettings
from deployments.routing.table import Forecast, Forecaster
from deployments.routing.table import ReplicaTable
from deployments.routing.unseen import UnseenRequests
from deployments.wire.load import ReplicaLoad
from deployments.wire.answer import AnswerEnd
from deployments.wire.request import RequestHint
from collections import OrderedDict
from cluster.config.routing import RoutingPolicy, RoutingSettings


_MAX_RELEASED = 8192
# Longer than a request is on its way to its replica, and than a report on its way back.
_LOST_AFTER_S = 30.0
# What a prompt token adds to a step, beside what a thread adds, which also reads its context. By
# rooflines and on CPUs it is a fifth to a quarter; but a prefix that is computed twice also takes
# the room of another one, and in the simulation anything from a fifth to two did as well.
_PREFILL_SHARE = 0.5


class Reason(StrEnum):
    """Why a replica was chosen, or none.

    AFFINITY counts only where the prefix cache changed the choice: a replica that holds the
    prefix and costs least counts as LEAST_LOAD.
    """

    AFFINITY = "affinity"
    LEAST_LOAD = "least_load"
    ONLY_ONE = "only_one"
    FULL = "full"


@dataclass(slots=True)
class _Sent:
    """A request at a replica, with what was expected of it when it was sent."""

    slot: int
    replica_id: str
    hint: RequestHint
    forecast: Forecast
    at_s: float


class Router(ABC):
    """Keeps the table of replicas and the requests at them; a policy adds the choice.

    The order for one request: `choose`, `sent` in the same moment, then `ended` once, whatever
    came of it.
    """

    def __init__(self, seed: int = 0) -> None:
        self.table = ReplicaTable()
        self.forecaster = Forecaster()
        # Decisions by reason, since the start.
        self.decisions: Counter[Reason] = Counter()
        self._random = np.random.default_rng(seed)
        self._sent: dict[str, _Sent] = {}
        self._released: OrderedDict[str, _Sent] = OrderedDict()

    def adopt(self, other: "Router") -> None:
        """Take over what another router knows and has sent; it is used no more."""
        self.table, self.forecaster = other.table, other.forecaster
        self.decisions = other.decisions
        self._sent, self._released = other._sent, other._released

    @abstractmethod
    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        """A slot among those with room, two or more."""

    def choose(self, hint: RequestHint, now_s: float, avoid: Collection[str] = ()) -> str | None:
        """The replica for a request; None if every one is at its cap. Counts nothing as sent.

        Replicas to `avoid`, and those that have stopped to report, only where no other has room.
        """
        del now_s  # The table's estimates hold for the moment of its last change.
        open_slots = self._preferred(np.flatnonzero(self.table.room > 0), avoid)
        if len(open_slots) == 0:
            self.decisions[Reason.FULL] += 1
            return None
        if len(open_slots) == 1:
            slot, reason = int(open_slots[0]), Reason.ONLY_ONE
        else:
            slot, reason = self._pick(hint, open_slots)
        self.decisions[reason] += 1
        return self.table.replica_id(slot)

    def _preferred(self, open_slots: NDArray[np.intp], avoid: Collection[str]) -> NDArray[np.intp]:
        """The slots that are left without those to avoid and the silent ones, if any are left."""
        slots = self.table.slots
        if tried := [slots[name] for name in avoid if name in slots]:
            others = np.setdiff1d(open_slots, tried)
            open_slots = others if len(others) else open_slots
        reporting = open_slots[~self.table.silence.silent()[open_slots]]
        return reporting if len(reporting) else open_slots

    def sent(self, request_id: str, replica_id: str, hint: RequestHint, now_s: float) -> None:
        """A request goes to a replica; if it was at another one, it is there no longer."""
        self.released(request_id, now_s)
        self._released.pop(request_id, None)
        slot = self.table.slots.get(replica_id)
        if slot is None:
            return
        forecast = self.forecaster.forecast(hint)
        self._sent[request_id] = _Sent(slot, replica_id, hint, forecast, now_s)
        self.table.sent(slot, forecast, now_s)

    def released(self, request_id: str, now_s: float, *, replica_id: str | None = None) -> None:
        """A request has left its replica; what it brought may still come, with `ended`.

        With `replica_id`, only if it was there.
        """
        sent = self._sent.get(request_id)
        if sent is None or replica_id not in (None, sent.replica_id):
            return
        del self._sent[request_id]
        self.table.ended(sent.slot, sent.replica_id, sent.forecast, now_s)
        self._released[request_id] = sent
        if len(self._released) > _MAX_RELEASED:
            self._released.popitem(last=False)

    def ended(self, request_id: str, end: AnswerEnd | None, now_s: float) -> None:
        """A request is over; `end` is what it brought, None if that is not known."""
        self.released(request_id, now_s)
        sent = self._released.pop(request_id, None)
        if sent is not None and end is not None:
            self.forecaster.learn(sent.hint, end)

    def reported(self, replica_id: str, load: ReplicaLoad, now_s: float) -> None:
        """A replica's report has arrived; one of an unknown replica is left.

        A replica that is idle shows which requests never came there, whatever was said of them.
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
        """The replicas that run now, each with its cap in requests; what was at others is lost."""
        self.table.replicas_changed(caps)
        lost = [key for key, sent in self._sent.items() if sent.replica_id not in caps]
        for request_id in lost:
            self._released[request_id] = self._sent.pop(request_id)

    def replica_of(self, request_id: str) -> str | None:
        """Where a request is now."""
        sent = self._sent.get(request_id)
        return None if sent is None else sent.replica_id

    @property
    def num_sent(self) -> int:
        """Requests at replicas now."""
        return len(self._sent)


class ThreadRouter(Router):
    """Chooses by the time that a request costs at each replica: its own, and the others'.

    The request runs `steps` engine steps, each as long as the threads there make it, its own
    included; its threads make the steps of the requests there longer; its prompt, less what the
    prefix cache holds, is computed once and holds up all; and where its blocks do not fit, it
    waits for others to end.
    """

    def __init__(self, settings: RoutingSettings, seed: int = 0) -> None:
        super().__init__(seed)
        self._affinity = settings.affinity
        self._prefixes = PrefixTable(settings.affinity_entries)
        self._prefixes.resize(len(self.table.rows))
        self._unseen = UnseenRequests()

    def choose(self, hint: RequestHint, now_s: float, avoid: Collection[str] = ()) -> str | None:
        """As in every router; fewer replicas are compared where others send much unseen."""
        self._unseen.look(self.table, now_s)
        return super().choose(hint, now_s, avoid)

    def adopt(self, other: Router) -> None:
        """As in every router; which prefixes are cached is learnt anew."""
        super().adopt(other)
        self._prefixes.resize(len(self.table.rows))

    def sent(self, request_id: str, replica_id: str, hint: RequestHint, now_s: float) -> None:
        """As in every router; the replica's cache holds the prompt from now on."""
        super().sent(request_id, replica_id, hint, now_s)
        self._unseen.sent(now_s)
        slot = self.table.slots.get(replica_id)
        if slot is not None and self._affinity:
            self._prefixes.sent(hint, slot, float(self.table.sent_tokens[slot]))

    def replicas_changed(self, caps: Mapping[str, int]) -> None:
        """As in every router; a cache goes with its replica."""
        gone = [slot for name, slot in self.table.slots.items() if name not in caps]
        for slot in gone:
            self._prefixes.forget(slot)
        super().replicas_changed(caps)
        self._prefixes.resize(len(self.table.rows))

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        forecast = self.forecaster.forecast(hint)
        saved = self._saved(hint)
        open_slots = self._compared(open_slots, saved)
        cost = self._cost(forecast, hint.prompt_tokens)[open_slots]
        # Equal replicas take turns by chance, or all routers would begin with the same one.
        cost *= 1.0 + 1e-6 * self._random.random(len(cost))
        plain = int(cost.argmin())
        if saved is None:
            return int(open_slots[plain]), Reason.LEAST_LOAD
        best = int((cost - saved[open_slots]).argmin())
        reason = Reason.LEAST_LOAD if best == plain else Reason.AFFINITY
        return int(open_slots[best]), reason

    def _compared(
        self, open_slots: NDArray[np.intp], saved: NDArray[np.float64] | None
    ) -> NDArray[np.intp]:
        """The slots to compare: all, or some at random and the one that saves the most."""
        number = self._unseen.num_compared(len(open_slots))
        if number == len(open_slots):
            return open_slots
        some = self._random.choice(open_slots, number, replace=False)
        if saved is not None:
            best = open_slots[saved[open_slots].argmax()]
            # What many hold, one of the drawn ones probably holds too.
            if saved[best] > saved[some].max() and (saved[open_slots] > 0).sum() <= 2:
                some = np.append(some, best)
        return some

    def _cost(self, forecast: Forecast, prompt_tokens: int) -> NDArray[np.float64]:
        """Seconds that a request costs in each slot, for itself and the requests there."""
        table, step = self.table, self.table.step_time
        threads = table.threads + forecast.threads
        step_s = step.base_s + step.per_thread_s * threads
        others_s = step.per_thread_s * forecast.threads * table.requests
        cost = forecast.steps * (step_s + others_s)
        cost += _PREFILL_SHARE * step.per_thread_s * prompt_tokens * (1.0 + table.requests)
        wanted = forecast.kv_tokens / table.block_size
        short = table.used_blocks + wanted - table.blocks
        if short.max() > 0.0:
            # Blocks come free as fast as threads end, which is as fast as they grow.
            cost += np.maximum(short, 0.0) * table.block_size * step_s / threads
        cost *= step.slowness
        return cost

    def _saved(self, hint: RequestHint) -> NDArray[np.float64] | None:
        """Seconds that each slot's prefix cache saves, for the request and those there."""
        if not self._affinity or not hint.prefix_hashes:
            return None
        table, step = self.table, self.table.step_time
        held = self._prefixes.held_tokens(hint, table.sent_tokens, table.blocks * table.block_size)
        if held is None:
            return None
        worth = self._affinity * _PREFILL_SHARE * step.per_thread_s
        saved: NDArray[np.float64] = held * (1.0 + table.requests) * step.slowness * worth
        return saved


# Of the known beginnings of a prompt only the longest are looked at; a shorter one is on the
# same replicas, and saves less.
_LOOKED_AT = 3
_NEVER = -np.inf


class PrefixTable:
    """Hashes of prompts' beginnings, and how much each replica had been sent when it got them.

    vLLM forgets the blocks used longest ago; so a replica is taken to hold a beginning until it
    has been sent as many tokens as its cache holds.
    """

    def __init__(self, max_entries: int) -> None:
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._max_entries = max_entries
        self._marks: NDArray[np.float64] = np.empty((0, 0))

    def __len__(self) -> int:
        return len(self._rows)

    def resize(self, num_slots: int) -> None:
        """Make room for more replicas."""
        wider = np.full((self._marks.shape[0], num_slots), _NEVER)
        wider[:, : self._marks.shape[1]] = self._marks
        self._marks = wider

    def forget(self, slot: int) -> None:
        """The replica in a slot has gone, and its cache with it."""
        self._marks[:, slot] = _NEVER

    def sent(self, hint: RequestHint, slot: int, sent_tokens: float) -> None:
        """A replica gets a prompt, and has been sent so many tokens by then."""
        for prefix in hint.prefix_hashes:
            row = self._row(prefix)
            self._marks[row, slot] = sent_tokens

    def held_tokens(
        self, hint: RequestHint, sent_tokens: NDArray[np.float64], cache_tokens: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Tokens of the prompt that each replica probably holds; None if none holds any.

        `sent_tokens` and `cache_tokens` are per slot: all ever sent there, and the cache's size.
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
        for row, covered in known[-_LOOKED_AT:]:
            marks = self._marks[row]
            # Before its first report a cache has no bound, and `oldest` is as low as `_NEVER`.
            held[(marks > _NEVER) & (marks >= oldest)] = covered
        return held

    def _row(self, prefix: int) -> int:
        """The row of a beginning, now the last used one."""
        row = self._rows.get(prefix)
        if row is not None:
            self._rows.move_to_end(prefix)
            return row
        if len(self._rows) >= self._max_entries:
            _, row = self._rows.popitem(last=False)
        else:
            row = len(self._rows)
            if row >= self._marks.shape[0]:
                self._grow()
        self._marks[row] = _NEVER
        self._rows[prefix] = row
        return row

    def _grow(self) -> None:
        added = min(max(64, self._marks.shape[0]), self._max_entries)
        more = np.full((added, self._marks.shape[1]), _NEVER)
        self._marks = np.concatenate([self._marks, more])


def covered_tokens(hint: RequestHint) -> tuple[int, ...]:
    """Tokens up to the end of each piece; even pieces where the hint does not say."""
    count = len(hint.prefix_hashes)
    if len(hint.prefix_tokens) == count:
        return hint.prefix_tokens
    return tuple(hint.prompt_tokens * (index + 1) // count for index in range(count))


class RoundRobin(Router):
    """The replicas in turn, those at their cap left out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._last = -1

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        index = int(np.searchsorted(open_slots, self._last, side="right")) % len(open_slots)
        self._last = int(open_slots[index])
        return self._last, Reason.LEAST_LOAD


class RandomChoice(Router):
    """Any replica with room."""

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        return int(self._random.choice(open_slots)), Reason.LEAST_LOAD


class FewestRequests(Router):
    """The replica with the fewest requests; equal ones by chance."""

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        requests = self.table.requests[open_slots]
        fewest = open_slots[requests == requests.min()]
        return int(self._random.choice(fewest)), Reason.LEAST_LOAD


class PowerOfTwo(Router):
    """The one of two random replicas that has fewer requests: Ray Serve's own way."""

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        first, second = self._random.choice(open_slots, 2, replace=False)
        requests = self.table.requests
        return int(first if requests[first] <= requests[second] else second), Reason.LEAST_LOAD


_BASELINES: dict[RoutingPolicy, type[Router]] = {
    RoutingPolicy.ROUND_ROBIN: RoundRobin,
    RoutingPolicy.RANDOM: RandomChoice,
    RoutingPolicy.FEWEST_REQUESTS: FewestRequests,
    RoutingPolicy.POWER_OF_TWO: PowerOfTwo,
}


def build_router(settings: RoutingSettings, seed: int = 0) -> Router:
    """The router that the settings ask for; equal seeds choose equally."""
    if settings.policy is RoutingPolicy.THREADS:
        return ThreadRouter(settings, seed)
    return _BASELINES[settings.policy](seed)
