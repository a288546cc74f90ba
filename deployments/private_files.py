"""Folders that other accounts of the machine can neither read nor change."""

import os
import stat
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
