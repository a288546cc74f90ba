"""Where a running `apar serve` can be found, and how its last rollout ended."""

import os
import tempfile
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.config import ConfigError


class RolloutOutcome(BaseModel):
    """How the `number`-th rollout of a server ended, in words."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    succeeded: bool
    message: str


class ServerState(BaseModel):
    """One running server; `started` tells its process from a later one with the same number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started: float
    config: Path | None
    outcome: RolloutOutcome | None = None

    @classmethod
    def of_this_process(cls, config: Path | None) -> Self:
        """The state of a server that has just started."""
        process = psutil.Process()
        path = None if config is None else config.resolve()
        return cls(pid=process.pid, started=process.create_time(), config=path)

    @property
    def is_running(self) -> bool:
        """Whether the server still lives."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        except psutil.NoSuchProcess:
            return False


def state_path(port: int) -> Path:
    """The file for the server on a port, in a folder of this user's only.

    Raises ConfigError where somebody else has made the folder.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"apar-serve-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} must belong to this user, and to nobody else")
    return folder / f"{port}.json"


def write_state(path: Path, state: ServerState) -> None:
    """Put the state there in one piece."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(state.model_dump_json(), encoding="utf-8")
    part.replace(path)


def read_state(path: Path) -> ServerState | None:
    """The state of a server that runs; None where none does."""
    try:
        state = ServerState.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return state if state.is_running else None
