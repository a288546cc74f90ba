"""Files that are written whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apar_core.whole_files import replace_file


def test_a_file_is_replaced_not_written_through(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "file"
    target.write_text("theirs")
    path.symlink_to(target)

    replace_file(path, b"ours", mode=0o600)

    assert (path.is_symlink(), path.read_text(), target.read_text()) == (False, "ours", "theirs")
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [path, target]


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()

    with pytest.raises(OSError, match="file"):
        replace_file(tmp_path / "file", b"ours")

    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_without_a_mode_the_umask_decides(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = replace_file(tmp_path / "file", "größer")
    finally:
        os.umask(before)

    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() == "größer".encode()
