"""`apar serve` and `apar rollout`: signals, the state file, and how a rollout is reported."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.cli import serve
from cluster.cli.serve import (
    RolloutOutcome,
    ServerState,
    ServeSignals,
    StopSignal,
    example_command,
    read_state,
    state_path,
    write_state,
)
from deployments.config import ClusterConfig, ConfigError
from tests.fakes.apar_command import apar

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
def test_the_outcome_of_a_rollout_is_printed(succeeded: bool, code: int) -> None:
    with server(succeeded=succeeded):
        result = apar("rollout", "--port", str(PORT))

    assert result.exit_code == code
    assert "as it ended" in result.output


def test_without_a_server_there_is_nothing_to_roll_out() -> None:
    result = apar("rollout", "--port", str(PORT))

    assert result.exit_code == 1
    assert f"port {PORT}" in result.output


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("serve", "--port", "0"),
        ("serve", "--port", "65536"),
        ("serve", "--replicas", "0"),
        ("serve", "--max-concurrency", "-1"),
        ("rollout", "--port", "-1"),
    ],
)
def test_a_wrong_number_is_refused_by_its_option(command: str, option: str, value: str) -> None:
    result = apar(command, option, value)

    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("apar-tiny",),
        ("apar-tiny", "--model", "apar-tiny"),
        ("--model", "apar-tiny"),
        ("--port", "8765", "apar-tiny"),
    ],
    ids=" ".join,
)
def test_a_model_is_given_as_an_argument_or_an_option(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ClusterConfig] = []
    monkeypatch.setattr(serve, "run", lambda settings, *_: served.append(settings))
    monkeypatch.setattr(serve, "_check_address", lambda _: None)

    assert apar("serve", *arguments).exit_code == 0
    assert [model.checkpoint for model in served[0].models] == ["apar-tiny"]


def test_a_format_of_ones_own_is_read_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ClusterConfig] = []
    monkeypatch.setattr(serve, "run", lambda settings, *_: served.append(settings))
    monkeypatch.setattr(serve, "_check_address", lambda _: None)
    file = tmp_path / "mine.yaml"
    file.write_text("{like: apar, name: mine}")

    assert apar("serve", "apar-tiny", "--parallel-format", file).exit_code == 0
    assert served[0].models[0].parallel_format is not None
    assert served[0].models[0].parallel_format.name == "mine"


def test_two_names_of_the_served_model_are_refused() -> None:
    result = apar("serve", "apar-tiny", "--model", "apar-7b")

    assert result.exit_code == 2
    assert "MODEL is apar-tiny and --model is apar-7b; give one of them" in result.output


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


def test_while_serving_the_second_stop_is_the_last(
    signals: ServeSignals,
) -> None:
    signals.serves = True
    for _ in range(2):
        with pytest.raises(StopSignal):
            signal.raise_signal(signal.SIGTERM)

    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signals.stopping


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


def test_a_stop_signal_raised_as_a_system_error_is_an_ordinary_stop(
    monkeypatch: pytest.MonkeyPatch, signals: ServeSignals
) -> None:
    monkeypatch.setattr(serve, "_cluster", signalled_in_c_code)

    serve.run(ClusterConfig(), signals, lambda service, _port: None)

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_an_error_without_a_signal_is_raised(
    monkeypatch: pytest.MonkeyPatch, signals: ServeSignals
) -> None:
    monkeypatch.setattr(serve, "_cluster", broken)

    with pytest.raises(SystemError, match="something else"):
        serve.run(ClusterConfig(), signals, lambda service, _port: None)


def test_a_running_server_is_found_by_its_port(
    tmp_path: Path,
) -> None:
    path = state_path(8000)
    state = ServerState.of_this_process(Path("x.yaml"))
    outcome = RolloutOutcome(number=2, succeeded=False, message="no")
    write_state(path, state.model_copy(update={"outcome": outcome}))

    found = read_state(path)

    assert found is not None
    assert found.pid == os.getpid()
    assert found.config == Path.cwd() / "x.yaml"
    assert found.outcome == outcome
    assert read_state(state_path(8001)) is None
    assert path.parent.stat().st_mode & 0o077 == 0
    assert sorted(path.parent.iterdir()) == [path]


def test_a_stopped_server_is_not_found(tmp_path: Path) -> None:
    state = ServerState.of_this_process(None)
    for gone in ({"pid": 2**22 + 1}, {"started": state.started - 60}):
        write_state(tmp_path / "s.json", state.model_copy(update=gone))

        assert read_state(tmp_path / "s.json") is None


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"apar-serve-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)

    with pytest.raises(ConfigError, match="must belong to this user"):
        state_path(8000)


@pytest.mark.parametrize("keys_file", [None, "keys.yaml"])
def test_the_example_command_sends_a_key_where_the_server_needs_one(
    keys_file: str | None,
) -> None:
    models = [{"checkpoint": "apar-tiny"}]
    settings = ClusterConfig.model_validate({"models": models, "keys_file": keys_file})

    command = example_command(settings, "http://127.0.0.1:8000")

    assert ("Authorization: Bearer $APAR_API_KEY" in command) == (keys_file is not None)
