"""Finds out whose request it is: API keys from the configuration and from a mounted secret."""

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from apar_core.errors import AparError, RequestError
from cluster.config.keys import KeyConfig, check_keys, hash_of, load_keys
from deployments.wire.answer import Headers

logger = logging.getLogger(__name__)

_SCHEME = b"bearer "
# How long a changed file, a revoked key say, may go unnoticed.
_FILE_AGE_S = 1.0

_Version = tuple[int, int, int]


class UnknownKeyError(RequestError):
    """The request carries no key, or one that is not known here: HTTP 401."""


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
