"""`apar rollout`: a running server reads its configuration file again."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from apar_core.errors import AparError
from cluster.server_state import read_state, state_path

POLL_S = 0.2
console = Console()


def rollout(
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8000,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Longest time to wait for the end of the rollout.")
    ] = 1800.0,
) -> None:
    """Bring the changed file of a running [bold]apar serve --config FILE[/bold] into effect.

    No request is lost. A file that cannot be used changes nothing. The same as sending the server
    a SIGHUP, but it waits and says how it ended; exit code 1 if the old settings are still served.
    """
    try:
        path = state_path(port)
        state = read_state(path)
    except AparError as error:
        _fail(str(error))
    if state is None:
        _fail(f"no `apar serve` of this user listens on port {port} of this machine")
    before = 0 if state.outcome is None else state.outcome.number
    os.kill(state.pid, signal.SIGHUP)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        state = read_state(path)
        if state is None:
            _fail("the server has stopped")
        if state.outcome is not None and state.outcome.number > before:
            if not state.outcome.succeeded:
                _fail(state.outcome.message)
            console.print(state.outcome.message, soft_wrap=True, markup=False, highlight=False)
            return
        time.sleep(POLL_S)
    _fail(f"the rollout goes on after {wait_s:.0f} s; the server prints how it ends")


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]Error:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(1)
