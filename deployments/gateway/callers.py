"""Who calls, and what is kept of each caller between requests."""

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from limits.aio.storage import Storage

from apar_core.errors import AparError
from cluster.config.keys import ANONYMOUS, KeyConfig, check_keys, hash_of
from cluster.config.keys_file import load_keys
from cluster.config.limits import LimitsConfig, open_storage
from deployments.gateway.rate_limits import Admission, CounterStore, KeyRates
from deployments.wire.answer import Headers
from deployments.wire.errors import UnknownKeyError

logger = logging.getLogger(__name__)

_SCHEME = b"bearer "
# How long a changed file, a revoked key say, may go unnoticed.
_FILE_AGE_S = 1.0

_Version = tuple[int, int, int]


class KeyRing:
    """The keys that may call. Asks for none where none are configured.

    Once built, it never fails: keys that cannot be used are logged, and those in force stay.
    """

    def __init__(
        self,
        keys: Sequence[KeyConfig] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError if the file cannot be read: without it nobody could call."""
        self._keys = tuple(keys)
        self._file = file
        self._clock = clock
        self._reading = asyncio.Lock()
        self._looked_at_s = clock()
        self._version = None if file is None else _version_of(file)
        self._from_file = () if file is None else load_keys(file)
        self._by_hash = _by_hash(self._keys, self._from_file)
        self._problem: str | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether older keys are in force, because those configured now cannot be used."""
        return self._problem is not None

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._keys) or self._file is not None

    async def reconfigure(self, keys: Sequence[KeyConfig], file: Path | None) -> None:
        """Take other keys or another file; parses it in a thread, because it may be large.

        Where the file cannot be read, the keys that were last read from a file stay in force.
        """
        async with self._reading:
            self._keys, self._file = tuple(keys), file
            await asyncio.to_thread(self._read)
            self._looked_at_s = self._clock()

    async def find(self, headers: Headers) -> KeyConfig | None:
        """The key of a request, None where none is asked for; raises UnknownKeyError."""
        if not self.asks_for_keys:
            return None
        token = _token(headers)
        if token is None:
            raise UnknownKeyError(
                "You didn't provide an API key. Send it as `Authorization: Bearer <key>`."
            )
        await self._look_at_file()
        digest = hash_of(token)
        key = self._by_hash.get(digest)
        # The look-up's time depends on digests, of which a caller can choose no part; the
        # comparison's depends on nothing.
        if key is None or not hmac.compare_digest(key.hash, digest):
            raise UnknownKeyError("The API key is not known here.")
        return key

    async def _look_at_file(self) -> None:
        if self._file is None or self._clock() - self._looked_at_s < _FILE_AGE_S:
            return
        async with self._reading:
            if self._clock() - self._looked_at_s >= _FILE_AGE_S:
                await asyncio.to_thread(self._reread, self._file)
                self._looked_at_s = self._clock()

    def _reread(self, file: Path) -> None:
        """Read the file again if it has changed."""
        try:
            is_same = _version_of(file) == self._version
        except OSError:
            is_same = False  # Reading it fails too, and says why.
        if not is_same:
            self._read()

    def _read(self) -> None:
        """Put the configured keys and those of the file in force, as far as they can be used."""
        from_file = self._from_file
        problem: Exception | None = None
        reported = self._problem
        try:
            # Noted first, so that a broken file is reported once and read again when it changes.
            self._version = None if self._file is None else _version_of(self._file)
            from_file = () if self._file is None else load_keys(self._file)
        except (AparError, OSError, ValueError) as error:
            problem = error
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                # It can become readable without a change that its version shows.
                self._version = None
        try:
            self._by_hash = _by_hash(self._keys, from_file)
            self._from_file = from_file
        except ValueError as error:
            problem = problem or error
        self._problem = None if problem is None else str(problem)
        if self._problem is not None:
            if self._problem == reported:
                return
            logger.error(
                "keys file not used: the keys that were read before stay in force",
                extra={"file": str(self._file), "reason": self._problem},
            )
        elif self._file is not None:
            logger.info(
                "keys file read",
                extra={"file": str(self._file), "num_keys": len(self._from_file)},
            )


def _by_hash(*sources: Sequence[KeyConfig]) -> dict[str, KeyConfig]:
    keys = [key for source in sources for key in source]
    check_keys(keys)
    return {key.hash: key for key in keys}


def _version_of(file: Path) -> _Version | None:
    """What changes when a file, or the symbolic link of a mounted secret, is replaced."""
    try:
        status = os.stat(file)  # noqa: PTH116 - follows links, as opening the file does
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _token(headers: Headers) -> str | None:
    for name, value in headers:
        if name == b"authorization" and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip().decode("latin-1") or None
    return None


_SALT_CHARS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """A key, or everyone where none are asked for: its limits, and its part of the prefix cache."""

    name: str
    key: KeyConfig | None = None
    rates: KeyRates | None = None
    cache_salt: str | None = None

    def may_use(self, model: str) -> bool:
        """Whether the caller's key is for this model."""
        return self.key is None or self.key.models is None or model in self.key.models

    def give_back(self, admission: Admission) -> None:
        """Refund what a request was counted as."""
        if self.rates is not None:
            self.rates.give_back(admission)

    async def rate_headers(self) -> Headers:
        """The `x-ratelimit-*` headers of an answer; none for a caller without rates."""
        return [] if self.rates is None else await self.rates.headers()


EVERYONE = Caller(ANONYMOUS)


class Callers:
    """The callers of one gateway. Keys of one name are one caller."""

    def __init__(
        self,
        keys: tuple[KeyConfig, ...],
        keys_file: Path | None,
        limits: LimitsConfig,
        open_storage: Callable[[str], Storage] = open_storage,
    ) -> None:
        """Raises ConfigError if the keys' file cannot be read, SecretError if a secret cannot."""
        self._ring = KeyRing(keys, keys_file)
        self._open_storage = open_storage
        self._storage_uri = limits.read_storage_uri()
        self._store = CounterStore(open_storage(self._storage_uri))
        self._given_secret = limits.read_cache_secret()
        self._secret = self._given_secret or secrets.token_bytes(_SALT_CHARS)
        self._callers: dict[str, Caller] = {}

    @property
    def keys_are_outdated(self) -> bool:
        """Whether older keys are in force, because those configured now cannot be used."""
        return self._ring.is_outdated

    async def reconfigure(
        self, keys: tuple[KeyConfig, ...], keys_file: Path | None, limits: LimitsConfig
    ) -> None:
        """Take new keys and limits. Keys that cannot be used are logged, and the old ones stay.

        Raises SecretError where a secret of the limits cannot be read; the old ones stay then, too.
        """
        await self._ring.reconfigure(keys, keys_file)
        storage_uri = await asyncio.to_thread(limits.read_storage_uri)
        secret = await asyncio.to_thread(limits.read_cache_secret)
        if storage_uri != self._storage_uri:
            self._store = CounterStore(self._open_storage(storage_uri))
        if (storage_uri, secret) != (self._storage_uri, self._given_secret):
            self._callers = {}
            self._secret = secret or self._secret
        self._storage_uri, self._given_secret = storage_uri, secret

    async def identify(self, headers: Headers) -> Caller:
        """Whose request it is; raises UnknownKeyError."""
        key = await self._ring.find(headers)
        if key is None:
            return EVERYONE
        caller = self._callers.get(key.name)
        if caller is None or caller.key is None or _limits_of(caller.key) != _limits_of(key):
            # What was counted in the old limits' windows is in the storage, and counts on.
            caller = Caller(key.name, key, self._rates(key), self._salt(key.name))
            self._callers[key.name] = caller
        return caller

    def _rates(self, key: KeyConfig) -> KeyRates | None:
        if key.requests_per_minute is None and key.tokens_per_minute is None:
            return None
        return KeyRates(self._store, key)

    def _salt(self, name: str) -> str:
        """What keeps the key's prefixes apart: nobody can guess it, and it holds no secret."""
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:_SALT_CHARS]


def _limits_of(key: KeyConfig) -> KeyConfig:
    """The record without its hash: a key that is being replaced has two."""
    return key.model_copy(update={"hash": ""})
