"""Slots shared by several gateways, as leases whose sum never exceeds the limit.

A slot takes one sequence: at a model's replicas, or under a key's `max_threads`. Each gateway has
its own queue, but no slot may be used twice. So a gateway starts a request only on slots that it
has leased from the `SlotLedger`. Gateways ask the ledger several times a second, and at once if a
request waits.

A lease grows only by slots that no other gateway holds. When a lease shrinks, its slots are free
for others once the gateway has confirmed the lower number. So a lost, late or repeated message
leaves slots unused, but never exceeds the limit. Leases follow the demand by max-min fairness.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

EXPIRY_S = 3.0
"""A gateway that the ledger has not heard from for this long is dead; its leases are freed."""
TRUST_S = 1.0
"""A gateway without a reply for this long falls back to an equal share of each limit.

Less than `EXPIRY_S`, so that it gives its leases up before the ledger does.
"""


@dataclass(frozen=True, slots=True)
class Need:
    """A gateway's sequences that need slots of one name; all gateways share `limit` of them."""

    limit: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Demand:
    """A gateway's message to the ledger: its need, and the lease that it currently obeys."""

    limit: int
    running: int
    waiting: int
    in_force: int


@dataclass(slots=True)
class _Lease:
    demand: Demand
    granted: int = 0
    # When `granted` last rose from 0; the gateway that has waited longest gets a scarce slot.
    begun_s: float = float("-inf")

    @property
    def held(self) -> int:
        """Slots that the gateway may be using, whichever messages have been lost."""
        return max(self.granted, self.demand.in_force, self.demand.running)


def fair_shares(limit: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Divide slots by max-min fairness; the first names get the remainder, one slot each.

    No share exceeds what is wanted. The sum is the limit, or all that is wanted if that is less.
    """
    shares = dict.fromkeys(wanted, 0)
    left = limit
    hungry = [name for name, number in wanted.items() if number > 0]
    while left > 0 and hungry:
        each = left // len(hungry)
        if each == 0:
            for name in hungry[:left]:
                shares[name] += 1
            break
        for name in hungry:
            added = min(each, wanted[name] - shares[name])
            shares[name] += added
            left -= added
        hungry = [name for name in hungry if shares[name] < wanted[name]]
    return shares


class SlotLedger:
    """Leases of all slots; one ledger for all gateways of an application."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._heard_s: dict[str, float] = {}
        self._leases: dict[str, dict[str, _Lease]] = {}

    @property
    def num_gateways(self) -> int:
        """Number of gateways heard from within `EXPIRY_S`."""
        return len(self._heard_s)

    def exchange(
        self, gateway: str, demands: Mapping[str, Demand], *, num_expected: int = 1
    ) -> dict[str, int]:
        """Renew a gateway's leases: return one for each name in `demands`, and end all others.

        `num_expected` gateways are configured. Those that a new ledger has not heard from yet may
        still hold leases of its predecessor.
        """
        now_s = self._clock()
        self._heard_s[gateway] = now_s
        self._forget([name for name, at_s in self._heard_s.items() if now_s - at_s > EXPIRY_S])
        for slot in [slot for slot, found in self._leases.items() if gateway in found]:
            if slot not in demands:
                self._end(slot, gateway)
        unheard = 0
        if now_s - self._began_s <= EXPIRY_S:
            unheard = max(0, num_expected - len(self._heard_s))
        num_gateways = max(num_expected, len(self._heard_s))
        return {
            slot: self._grant(gateway, slot, demand, num_gateways, unheard, now_s)
            for slot, demand in demands.items()
        }

    def _grant(
        self,
        gateway: str,
        slot: str,
        demand: Demand,
        num_gateways: int,
        unheard: int,
        now_s: float,
    ) -> int:
        leases = self._leases.setdefault(slot, {})
        own = leases.setdefault(gateway, _Lease(demand))
        own.demand = demand
        in_turn = sorted(leases.items(), key=lambda item: item[1].begun_s)
        wanted = {name: each.demand.running + each.demand.waiting for name, each in in_turn}
        shares = fair_shares(demand.limit, wanted)
        # Idle slots are spread, so that a request need not wait for a message. One part stays
        # here, for the gateway whose demand grows first.
        idle = demand.limit - sum(shares.values())
        target = shares[gateway] + idle // (num_gateways + 1)
        others = sum(lease.held for name, lease in leases.items() if name != gateway)
        others += unheard * (demand.limit // num_gateways)
        before, own.granted = own.granted, max(0, min(target, demand.limit - others))
        if own.granted and not before:
            own.begun_s = now_s
        return own.granted

    def _forget(self, gateways: Iterable[str]) -> None:
        for gateway in gateways:
            del self._heard_s[gateway]
            for slot in [slot for slot, found in self._leases.items() if gateway in found]:
                self._end(slot, gateway)

    def _end(self, slot: str, gateway: str) -> None:
        del self._leases[slot][gateway]
        if not self._leases[slot]:
            del self._leases[slot]


class Ledger(Protocol):
    """A gateway's access to the shared ledger."""

    async def exchange(self, demands: Mapping[str, Demand], num_expected: int) -> dict[str, int]:
        """See `SlotLedger.exchange`. Raises LedgerSilentError."""
        ...

    @property
    def num_gateways(self) -> int:
        """Number of running gateways, this one included, in the last reply; 0 before the first."""
        ...


# Time between two renewals: normally, while requests wait, and the minimum.
_PERIOD_S = 0.2
_WAITING_PERIOD_S = 0.05
_LEAST_PERIOD_S = 0.01


class LedgerSilentError(Exception):
    """The ledger has not answered."""


class SharedSlots:
    """The leases of one gateway.

    After `TRUST_S` without a reply from the ledger, every limit is divided by the number of
    gateways. A gateway always has at least one slot.
    """

    def __init__(self, ledger: Ledger, num_configured: int, clock: Clock = time.monotonic) -> None:
        self._ledger = ledger
        self.num_configured = num_configured
        self._clock = clock
        self._in_force: dict[str, int] = {}
        self._heard_s = clock()
        self._was_alone = False
        self._hurry = asyncio.Event()

    @property
    def num_gateways(self) -> int:
        """Number of gateways, at least the configured one."""
        return max(1, self.num_configured, self._ledger.num_gateways)

    @property
    def is_alone(self) -> bool:
        """Whether the ledger has been silent for longer than `TRUST_S`."""
        return self._clock() - self._heard_s > TRUST_S

    def of(self, slot: str, limit: int) -> int:
        """Return the number of slots that this gateway may use."""
        if self.is_alone:
            return max(1, limit // self.num_gateways)
        # The limit may have fallen since the lease.
        return min(limit, self._in_force.get(slot, 0))

    def hurry(self) -> None:
        """Renew the leases soon: a request is about to wait."""
        self._hurry.set()

    async def until_due(self, needs: Mapping[str, Need]) -> None:
        """Wait until the leases should be renewed; `needs` are the current ones."""
        await asyncio.sleep(_LEAST_PERIOD_S)
        waits = any(need.waiting for need in needs.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAITING_PERIOD_S if waits else _PERIOD_S):
                await self._hurry.wait()
        self._hurry.clear()

    async def exchange(self, needs: Mapping[str, Need]) -> None:
        """Renew all leases, and give up those without a need.

        Only one call may run at a time. A failure changes nothing for `TRUST_S`.
        """
        # Leases are given up before the message says so.
        self._in_force = {name: self._in_force.get(name, 0) for name in needs}
        demands = {
            name: Demand(need.limit, need.running, need.waiting, self.of(name, need.limit))
            for name, need in needs.items()
        }
        asked_s = self._clock()
        try:
            self._in_force = await self._ledger.exchange(demands, self.num_configured)
            # Not the time of the reply: the ledger counts `EXPIRY_S` from the request.
            self._heard_s = asked_s
        except LedgerSilentError as error:
            self._note(str(error))
        else:
            self._note()

    def _note(self, reason: str = "") -> None:
        """Log a change of `is_alone`."""
        is_alone = self.is_alone
        if is_alone and not self._was_alone:
            logger.warning(
                "the state that gateways share does not answer; this gateway uses its part of the "
                "slots, and requests pass unlimited by rates",
                extra={"reason": reason, "num_gateways": self.num_gateways},
            )
        elif self._was_alone and not is_alone:
            logger.info("the state that gateways share answers again")
        self._was_alone = is_alone
