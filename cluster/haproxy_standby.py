"""Take HAProxy's place if it is killed, until Ray Serve has started another one.

Ray Serve notices the death of HAProxy after three failed health checks, and then restarts the actor
that runs it: about six seconds in which nobody could connect. The wrapper of `cluster.haproxy`
therefore starts this script beside each HAProxy:

    haproxy_standby.py PID PARENT CONFIGURATION HAPROXY [FLAG...]

It sleeps until the process PID ends. If no newer HAProxy runs by then, it starts one with the same
configuration, but without the control socket: through that, Ray Serve would take it for its own.
The wrapper lets the next HAProxy of Ray Serve replace it without losing a connection.

Imports the standard library only, because there is one such process for each HAProxy.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

LATEST = "haproxy.pid"
"""File beside the configuration: process id of the HAProxy that Ray Serve has started last."""

STANDBY = "standby.pid"
"""Process id of the HAProxy that stands in."""

MOST_S = 300.0
"""Longest time to stand in (s). Ray Serve also kills HAProxy when no application is left."""

LEAST_S = 1.0
"""An HAProxy that ends earlier (s) is not started again."""


def parent_of(pid: int) -> int:
    """Return the parent of a process, or 0 if the process has ended."""
    with suppress(OSError):
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        return int(after_name.split()[1])
    return 0


def runs(pid_file: Path, haproxy: str) -> bool:
    """Return whether the process in a file is a running HAProxy."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text(encoding="utf-8"))
        # The executable of a zombie cannot be read.
        return Path(f"/proc/{pid}/exe").resolve(strict=True) == Path(haproxy).resolve()
    return False


def ended(pidfds: list[int], timeout_s: float | None = None) -> list[int]:
    """Wait until a process ends; return the descriptors of those that have."""
    return select.select(pidfds, [], [], timeout_s)[0]


def stand_in(configuration: Path, command: list[str], owner: int) -> None:
    """Run HAProxy until another one replaces it or the owner ends."""
    own = configuration.with_name("standby.cfg")
    text = configuration.read_text(encoding="utf-8")
    own.write_text(re.sub(r"(?m)^\s*stats socket .*\n", "", text), encoding="utf-8")
    until = time.monotonic() + MOST_S
    while (started := time.monotonic()) < until:
        process = subprocess.Popen([*command, "-f", str(own)])
        configuration.with_name(STANDBY).write_text(str(process.pid), encoding="utf-8")
        pidfd = os.pidfd_open(process.pid)
        which = ended([pidfd, owner], until - started)
        os.close(pidfd)
        if pidfd not in which:
            process.send_signal(signal.SIGKILL if owner in which else signal.SIGUSR1)
        process.wait()
        # Replaced, the owner has ended, or it cannot start.
        if process.returncode >= 0 or which != [pidfd] or time.monotonic() - started < LEAST_S:
            return


def main(pid: str, parent: str, configuration: str, *command: str) -> None:
    """Wait for the end of a process, and stand in for it."""
    path = Path(configuration)
    # Ray kills the process group of a worker that has ended.
    with suppress(OSError):
        os.setpgid(0, 0)
    try:
        owner = os.pidfd_open(parent_of(int(parent)))  # The raylet, whose actor runs HAProxy.
    except (OSError, ValueError):
        return
    with suppress(ProcessLookupError):  # It may have ended already.
        watched = os.pidfd_open(int(pid))
        if owner in ended([watched, owner]):
            return
        os.close(watched)
    if not runs(path.with_name(LATEST), command[0]):
        stand_in(path, list(command), owner)


if __name__ == "__main__":
    main(*sys.argv[1:])
