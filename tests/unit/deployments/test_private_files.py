"""Folders and files that other accounts cannot prepare, read or replace."""

import os
from pathlib import Path

import pytest

from deployments.private_files import own_folder
from tests.fakes.other_account import NOBODY, needs_root


def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = own_folder(tmp_path / "new")
    finally:
        os.umask(before)

    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_own_folder_that_others_can_read_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    assert own_folder(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)

    with pytest.raises(PermissionError, match="writable for nobody else"):
        own_folder(tmp_path)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")

    with pytest.raises(PermissionError, match="link"):
        own_folder(tmp_path / "link")


@needs_root
def test_a_folder_of_another_account_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)

    with pytest.raises(PermissionError, match="must belong to this user"):
        own_folder(tmp_path / "theirs")
