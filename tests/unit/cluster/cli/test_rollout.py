"""`apar rollout` talks to a running server by its state file and a SIGHUP."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.serve_signals import ServeSignals, StopSignal
from cluster.server_state import RolloutOutcome, ServerState, state_path, write_state

PORT = 8123


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@contextmanager
def server(*, succeeded: bool) -> Iterator[None]:
    """This process, as a server that answers every SIGHUP at once."""
    state = ServerState.of_this_process(Path("x.yaml"))
    earlier = RolloutOutcome(number=1, succeeded=True, message="earlier")
    write_state(state_path(PORT), state.model_copy(update={"outcome": earlier}))

    def answer(*_: object) -> None:
        outcome = RolloutOutcome(number=2, succeeded=succeeded, message="as it ended")
        write_state(state_path(PORT), state.model_copy(update={"outcome": outcome}))

    before = signal.signal(signal.SIGHUP, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("succeeded", "code"), [(True, 0), (False, 1)])
def test_the_servers_answer_and_how_it_ended_are_told(succeeded: bool, code: int) -> None:
    with server(succeeded=succeeded):
        result = CliRunner().invoke(app, ["rollout", "--port", str(PORT)])

    assert result.exit_code == code
    assert "as it ended" in result.output


def test_without_a_server_there_is_nothing_to_roll_out() -> None:
    result = CliRunner().invoke(app, ["rollout", "--port", str(PORT)])

    assert result.exit_code == 1
    assert f"port {PORT}" in result.output


@pytest.fixture
def signals() -> Iterator[ServeSignals]:
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.getsignal(name) for name in names}
    signals = ServeSignals()
    signals.install()
    yield signals
    for name, handler in before.items():
        signal.signal(name, handler)


def test_each_hang_up_is_one_rollout(signals: ServeSignals) -> None:
    assert not signals.take_rollout()
    signal.raise_signal(signal.SIGHUP)

    assert signals.take_rollout()
    assert not signals.take_rollout()


def test_while_serving_the_first_stop_leaves_room_for_a_second_and_that_is_the_last(
    signals: ServeSignals,
) -> None:
    signals.serves = True
    for _ in range(2):
        with pytest.raises(StopSignal):
            signal.raise_signal(signal.SIGTERM)

    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signals.stopping
