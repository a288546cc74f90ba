"""Another account of this machine."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
_SCRIPT = 'for path; do if [ -r "$path" ] || [ -w "$path" ]; then echo "$path"; fi; done'


def run_as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as another account."""
    return subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True, text=True
    )


def accessible(paths: Iterable[Path]) -> set[Path]:
    """Return those of the paths that another account can read or write."""
    found = run_as_nobody("sh", "-c", _SCRIPT, "sh", *map(str, paths))
    assert found.returncode == 0, found.stderr
    return {Path(line) for line in found.stdout.splitlines()}
