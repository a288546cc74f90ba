"""A killed HAProxy is replaced at once, until the one that runs it starts another."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.haproxy import write_haproxy_wrapper
from cluster.haproxy_standby import LATEST, STANDBY
from cluster.local_ray import free_port

WAIT_S = 120.0
CONFIGURATION = """
global
    stats socket {folder}/control.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout connect 1s
    timeout client 60s
    timeout server 60s
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend default_backend
backend default_backend
    http-request return status 200 content-type text/plain string {says} if {{ always_true }}
    {server}
"""
SERVER = "server gateway 127.0.0.1:1"


class Started:
    """HAProxy as Ray Serve runs it: a node's process starts an actor, which starts HAProxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.configuration = folder / "haproxy.cfg"
        self.configure()
        write_haproxy_wrapper(folder / "haproxy")
        self.nodes: list[psutil.Process] = []

    def configure(self, says: str = "here", server: str = SERVER) -> None:
        """Write the configuration of the next HAProxy; without a server, it knows no gateway."""
        self.configuration.write_text(
            CONFIGURATION.format(folder=self.folder, port=self.port, says=says, server=server)
        )

    def start(self) -> None:
        """Start a node, and wait until its HAProxy answers its control socket."""
        self._start("")

    def reload(self) -> None:
        """Start a HAProxy that replaces the running one, as Ray Serve does for new gateways."""
        before = self.pid(LATEST)
        self._start(f"-sf {before}")
        until(lambda: not is_running(before))

    def _start(self, flags: str) -> None:
        before = self.pid(LATEST)
        # The folder in the command's line lets the fixture find it.
        lives_on = f"tail -f '{self.configuration}'"
        actor = f"'{self.folder}/haproxy' -db -f '{self.configuration}' {flags}; {lives_on}"
        command = ["sh", "-c", f'sh -c "{actor}"; {lives_on}']
        process = subprocess.Popen(command, env=os.environ | {"APAR_HAPROXY_STANDBY": "1"})
        self.nodes.append(psutil.Process(process.pid))
        until(lambda: self.pid_at_the_control_socket() == self.pid(LATEST) != before)

    def pid(self, file: str) -> int:
        """Return the process id in a file beside the configuration, or 0."""
        with suppress(OSError, ValueError):
            return int((self.folder / file).read_text())
        return 0

    def pid_at_the_control_socket(self) -> int:
        """Return what Ray Serve asks HAProxy for, or -1 if nothing answers."""
        with socket.socket(socket.AF_UNIX) as control:
            try:
                control.connect(str(self.folder / "control.sock"))
                control.sendall(b"show info\n")
                said = b"".join(iter(lambda: control.recv(4096), b"")).decode()
            except OSError:
                return -1
        return next(int(line[4:]) for line in said.splitlines() if line.startswith("Pid:"))

    def says(self) -> str | None:
        """Return the answer that a new connection gets."""
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/").text
        return None

    def answers(self) -> bool:
        """Return whether a new connection is answered as by a gateway."""
        return self.says() == "here"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    before = {process.pid for process in psutil.process_iter()}
    yield made
    for node in made.nodes:
        with suppress(psutil.NoSuchProcess):
            node.kill()
            node.wait()
    mine = str(tmp_path)
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if process.pid not in before and mine in " ".join(process.cmdline()):
                process.kill()


def test_a_killed_haproxy_is_replaced_until_the_next_one(started: Started) -> None:
    started.start()
    assert started.answers()
    killed = started.pid(LATEST)
    psutil.Process(killed).kill()

    until(started.answers)

    standby = started.pid(STANDBY)
    assert is_running(standby)
    # Ray Serve must notice that its HAProxy is dead.
    assert started.pid_at_the_control_socket() == -1

    started.start()

    until(lambda: not is_running(standby))
    assert started.answers()
    assert started.pid(LATEST) not in {killed, standby}


def test_the_next_one_uses_the_gateways_of_before_until_ray_serve_names_them(
    started: Started,
) -> None:
    started.start()
    psutil.Process(started.pid(LATEST)).kill()
    until(started.answers)
    standby = started.pid(STANDBY)

    started.configure("nowhere", server="")
    started.start()

    until(lambda: not is_running(standby))
    assert started.says() == "here"

    started.configure("elsewhere")
    started.reload()

    assert started.says() == "elsewhere"


def test_without_a_standby_a_configuration_without_gateways_is_used(started: Started) -> None:
    started.start()

    started.configure("nowhere", server="")
    started.reload()

    assert started.says() == "nowhere"


def test_a_killed_standby_is_replaced_too(started: Started) -> None:
    started.start()
    psutil.Process(started.pid(LATEST)).kill()
    until(started.answers)
    first = started.pid(STANDBY)
    time.sleep(1.2)  # One that ends within a second is not started again.
    psutil.Process(first).kill()

    until(lambda: started.pid(STANDBY) != first and started.answers())


def test_it_ends_with_the_node(started: Started) -> None:
    started.start()
    psutil.Process(started.pid(LATEST)).kill()
    until(started.answers)
    standby = started.pid(STANDBY)

    started.nodes[0].kill()
    started.nodes[0].wait()

    until(lambda: not is_running(standby))
    assert not started.answers()


def test_an_haproxy_that_hands_over_has_no_standby(started: Started) -> None:
    started.start()
    old = started.pid(LATEST)
    started.start()
    psutil.Process(old).kill()

    until(lambda: not any("haproxy_standby.py" in part for part in watchers(old)))
    assert started.pid(STANDBY) == 0
    assert started.answers()


def watchers(pid: int) -> list[str]:
    """Return the command lines of the processes that wait for the end of an HAProxy."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            if str(pid) in line:
                found.append(" ".join(line))
    return found
