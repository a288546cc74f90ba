"""What signals do to `apar serve`: the end in peace, the end at once, new settings."""

import signal
from pathlib import Path
from types import FrameType

_TERMINAL = Path("/dev/tty")


class StopSignal(BaseException):
    """A signal asked for the end; not an Exception, so that nothing swallows it."""


class ServeSignals:
    """SIGINT and SIGTERM raise StopSignal, SIGHUP asks for the file to be read again.

    While requests may be running the first stop leaves the second one its meaning: not to wait
    for them. The last is not interrupted by others, or processes would be left behind.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.serves = False
        self._wants_rollout = False
        self._had_terminal = _has_terminal()

    def install(self) -> None:
        """Put our handlers in place; Ray puts its own in theirs."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._hang_up)

    def take_rollout(self) -> bool:
        """Whether a rollout has been asked for since the last call."""
        # Plain fields: a handler runs between any two steps of the main thread, locks included.
        wanted, self._wants_rollout = self._wants_rollout, False
        return wanted

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.serves:
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, signal.SIG_IGN)
        self.serves = False
        self.stopping = True
        raise StopSignal

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        if self._had_terminal and not _has_terminal():
            self._stop(number, frame)
        self._wants_rollout = True


def _has_terminal() -> bool:
    try:
        _TERMINAL.open("rb").close()
    except OSError:
        return False
    return True
