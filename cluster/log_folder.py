"""Where a cluster's log files lie, and how `apar serve` shows them as they grow."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from cluster.config import ClusterConfig
from cluster.logging_config import LoggingConfig

PATTERN = "*.jsonl"
_SUBFOLDER = "apar"
_POLL_S = 0.2


def log_folder(config: LoggingConfig) -> Path:
    """The configured folder, or one beside Ray's own logs on the node of this process."""
    if config.folder is not None:
        return config.folder.expanduser().absolute()
    # Imported late: it reads its settings from the environment then.
    from ray.serve._private.logging_utils import get_serve_logs_dir

    return Path(get_serve_logs_dir()).parent / _SUBFOLDER


@contextmanager
def shown_logs(config: ClusterConfig, output: TextIO) -> Iterator[None]:
    """Copy to `output` what is logged, where no folder is configured and the cluster is private.

    Such a cluster's files go when it ends, and nobody would see them.
    """
    if config.logging.folder is not None or config.ray_address is not None:
        yield
        return
    follower = LogFollower(log_folder(config.logging), output)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            follower.copy()
        follower.copy()

    executor = threading.Thread(target=follow, name="log-follower", daemon=True)
    executor.start()
    try:
        yield
    finally:
        ended.set()
        executor.join()
        follower.close()


class LogFollower:
    """Copies the whole lines that are added to the log files of a folder, also renamed ones."""

    def __init__(self, folder: Path, output: TextIO) -> None:
        self._folder = folder
        self._output = output
        # By inode: a file that is full is renamed, and a new one takes its name.
        self._files: dict[int, IO[bytes]] = {}
        self._cut: dict[int, bytes] = {}

    def copy(self) -> None:
        """Copy what has been added since the last time."""
        found = set()
        for path in sorted(self._folder.glob(PATTERN)):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue  # It was renamed in this moment, and is followed under its inode.
            inode = os.fstat(file.fileno()).st_ino
            found.add(inode)
            if inode in self._files:
                file.close()
            else:
                self._files[inode] = file
        for inode in list(self._files):
            self._copy_lines(inode)
            if inode not in found:
                self._files.pop(inode).close()
                self._cut.pop(inode, None)
        self._output.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _copy_lines(self, inode: int) -> None:
        added = self._cut.pop(inode, b"") + self._files[inode].read()
        whole, newline, cut = added.rpartition(b"\n")
        self._output.write((whole + newline).decode(errors="replace"))
        if cut:
            self._cut[inode] = cut
