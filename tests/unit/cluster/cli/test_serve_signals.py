"""`apar serve` and the signals that end it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.cli import serve
from cluster.cli.serve_signals import ServeSignals, StopSignal
from cluster.config import ClusterConfig


@pytest.fixture
def own_handlers() -> Iterator[None]:
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {name: signal.getsignal(name) for name in names}
    yield
    for name, handler in handlers.items():
        signal.signal(name, handler)


@contextmanager
def signalled_in_c_code(_: ClusterConfig) -> Iterator[None]:
    """A cluster during whose start a signal arrives, where Python code cannot raise."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except StopSignal as error:
        raise SystemError("returned a result with an exception set") from error
    yield


@contextmanager
def broken(_: ClusterConfig) -> Iterator[None]:
    raise SystemError("something else")
    yield


@pytest.mark.usefixtures("own_handlers")
def test_signal_that_comes_back_as_a_system_error_is_an_ordinary_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_cluster", signalled_in_c_code)

    serve.run(ClusterConfig(), ServeSignals(), lambda service: None)

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


@pytest.mark.usefixtures("own_handlers")
def test_error_without_a_signal_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_cluster", broken)

    with pytest.raises(SystemError, match="something else"):
        serve.run(ClusterConfig(), ServeSignals(), lambda service: None)
