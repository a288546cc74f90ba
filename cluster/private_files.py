"""Folders and files that other accounts of the machine can neither read nor replace."""

import os
import stat
import tempfile
from pathlib import Path


def own_folder(path: Path) -> Path:
    """Create a folder that only this user can access, or take the one that exists.

    Raises PermissionError if another user owns it or can write to it, or if it is a link: its name
    may be predictable, and anybody can create one in `/tmp`.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _refused(path) from error
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _refused(path)
        os.fchmod(folder, 0o700)
    finally:
        os.close(folder)
    return path


def _refused(path: Path) -> PermissionError:
    return PermissionError(
        f"{path} must belong to this user, be no link, and be writable for nobody else"
    )


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    """Write a file atomically, through a new file beside it that nobody can have prepared."""
    # `mkstemp` uses O_EXCL and O_NOFOLLOW, mode 0600 and a random name.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
