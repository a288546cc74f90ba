import os
from pathlib import Path

import pytest

from cluster.config import ConfigError
from cluster.server_state import (
    RolloutOutcome,
    ServerState,
    read_state,
    state_path,
    write_state,
)


def test_a_running_server_is_found_by_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
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


def test_a_server_that_has_gone_is_not_found(tmp_path: Path) -> None:
    state = ServerState.of_this_process(None)
    for gone in ({"pid": 2**22 + 1}, {"started": state.started - 60}):
        write_state(tmp_path / "s.json", state.model_copy(update=gone))

        assert read_state(tmp_path / "s.json") is None


def test_a_folder_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"apar-serve-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)

    with pytest.raises(ConfigError, match="must belong to this user"):
        state_path(8000)
