"""State that the gateways of one application share: leases of slots, rates, and a secret.

It lives in one small Ray actor, `SharedState`. With a single gateway there is none. If the actor
does not answer, rates are not enforced, and each gateway uses an equal share of the slots. Ray
restarts the actor, with empty counters.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from limits.errors import StorageError
from ray.exceptions import RayError

from deployments.config.limits import IN_MEMORY, open_storage
from deployments.gateway.gateway import Gateway
from deployments.gateway.shared_slots import (
    Demand,
    LedgerSilentError,
    SharedSlots,
    SlotLedger,
)
from deployments.serve_flags import NAMESPACE

logger = logging.getLogger(__name__)

ACTOR = "SharedState"
_ANSWER_S = 0.5
# The first reply waits for the actor's process.
_FIRST_ANSWER_S = 20.0
_SETTLE_S = 1.0


class SharedState:
    """The actor: one ledger, the windows of all keys' rates, and the gateways' cache secret."""

    def __init__(self) -> None:
        self._ledger = SlotLedger()
        self._windows: Any = open_storage(IN_MEMORY)
        self._secret: bytes | None = None

    async def exchange(
        self, gateway: str, secret: bytes, demands: Mapping[str, Demand], num_expected: int
    ) -> tuple[dict[str, int], int, bytes]:
        """Return the gateway's leases, the number of gateways, and the secret of the first one."""
        self._secret = self._secret or secret
        leases = self._ledger.exchange(gateway, demands, num_expected=num_expected)
        return leases, self._ledger.num_gateways, self._secret

    async def take(self, place: str, limit: int, window_s: int, num: int) -> bool:
        """Call `acquire_sliding_window_entry` of the library `limits`."""
        taken: bool = await self._windows.acquire_sliding_window_entry(place, limit, window_s, num)
        return taken

    async def read(self, place: str, window_s: int) -> tuple[int, float, int, float]:
        """Call `get_sliding_window` of the library `limits`."""
        state: tuple[int, float, int, float] = await self._windows.get_sliding_window(
            place, window_s
        )
        return state


class ActorCalls:
    """Calls to the actor, which the first gateway starts. They raise RayError and TimeoutError."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._starting: asyncio.Task[Any] | None = None

    async def __call__(self, method: str, *arguments: object, timeout_s: float = _ANSWER_S) -> Any:
        """Call a method of `SharedState`; start the actor if necessary, within the same timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                actor = await self._started()
                return await getattr(actor, method).remote(*arguments)
        except RayError:
            self._actor = None
            raise

    async def _started(self) -> Any:
        """Return the actor; its start waits for Ray's global store, which may also be lost."""
        if self._actor is None:
            # A call that times out leaves the start to the next: each start blocks an executor.
            starting = self._starting = self._starting or asyncio.create_task(
                asyncio.to_thread(_started_actor)
            )
            try:
                self._actor = await asyncio.shield(starting)
            finally:
                if starting.done() and self._starting is starting:
                    self._starting = None
        return self._actor


def _started_actor() -> Any:
    kind: Any = ray.remote(SharedState)
    return kind.options(
        name=ACTOR,
        namespace=NAMESPACE,
        get_if_exists=True,
        # Otherwise it would end with the gateway that started it.
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
    ).remote()


class ActorWindows:
    """Rate counters in the actor; a WindowStorage. Raises StorageError if it does not answer."""

    def __init__(self, calls: ActorCalls) -> None:
        self._calls = calls

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Count units if the limit has room for them; return whether it had."""
        taken: bool = await self._asked("take", key, limit, expiry, amount)
        return taken

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Return (units, seconds left) of the previous window, then of the current one."""
        state: tuple[int, float, int, float] = await self._asked("read", key, expiry)
        return state

    async def _asked(self, method: str, *arguments: object) -> Any:
        try:
            return await self._calls(method, *arguments)
        except RayError as error:
            raise StorageError(error) from error


def end_shared_state() -> None:
    """End the actor, if there is one."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(ACTOR, namespace=NAMESPACE))


class GroupMember:
    """One of several gateways: renews its leases, and charges its keys' tokens where all see them.

    It is the `Ledger` of its own `SharedSlots`.
    """

    def __init__(self, gateway: Gateway, gateway_id: str, num_configured: int) -> None:
        self._gateway = gateway
        self._calls = ActorCalls()
        self._id = gateway_id
        self.num_gateways = 0
        self.slots = SharedSlots(self, num_configured)
        self._answer_s = _FIRST_ANSWER_S
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Share the state from now on; on return, the first leases are in force."""
        self._gateway.callers.share(ActorWindows(self._calls))
        self._gateway.share(self.slots)
        await self._renew()
        self._answer_s = _ANSWER_S
        self._tasks = [
            asyncio.create_task(self._renew_for_ever()),
            asyncio.create_task(self._settle_for_ever()),
        ]

    async def leave(self) -> None:
        """Stop sharing: this is the only gateway from now on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._gateway.callers.share(None)
        self._gateway.share(None)

    async def exchange(self, demands: Mapping[str, Demand], num_expected: int) -> dict[str, int]:
        """See `SlotLedger.exchange`. Raises LedgerSilentError."""
        secret = self._gateway.callers.cache_secret
        leases: dict[str, int]
        try:
            leases, self.num_gateways, secret = await self._calls(
                "exchange",
                self._id,
                secret,
                dict(demands),
                num_expected,
                timeout_s=self._answer_s,
            )
        except (RayError, TimeoutError) as error:
            raise LedgerSilentError(repr(error)) from error
        self._gateway.callers.share_cache_secret(secret)
        return leases

    async def _renew(self) -> None:
        await self.slots.exchange(self._gateway.needs())
        self._gateway.take_slots()

    async def _renew_for_ever(self) -> None:
        while True:
            await self.slots.until_due(self._gateway.needs())
            try:
                await self._renew()
            except Exception:  # A gateway without leases would serve nobody.
                logger.exception("leases of slots not renewed")

    async def _settle_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SETTLE_S)
            await self._gateway.callers.settle()
