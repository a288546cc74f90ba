"""Fill a volume with weights from the Hugging Face hub, or wait for them.

`python -m deployments.app.weights` downloads the repositories in APAR_WEIGHTS into HF_HOME, and
leaves a marker for each complete one. With `--wait`, it returns when all markers are there, because
an engine fails if it starts before its weights are complete. A module of its own, so that a waiting
pod needs little memory.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

MARKERS = "apar-complete"
"""Folder of the markers, in HF_HOME."""

_POLL_S = 5.0
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)


class WeightsError(RuntimeError):
    """APAR_WEIGHTS names no repository."""


def repositories(text: str) -> list[tuple[str, str | None]]:
    """Split `NAME NAME@REVISION ...` into names and revisions.

    Raises WeightsError if there is none, or if one has another form.
    """
    words = text.split()
    if not words:
        raise WeightsError("APAR_WEIGHTS: names of repositories are expected")
    for word in words:
        if not _REPOSITORY.fullmatch(word):
            raise WeightsError(f"APAR_WEIGHTS: NAME or NAME@REVISION is expected, not {word!r}")
    return [(name, revision or None) for name, _, revision in (w.partition("@") for w in words)]


def marker(home: Path, name: str, revision: str | None) -> Path:
    """Return the file that exists once a repository is complete."""
    return home / MARKERS / f"{name}@{revision or 'main'}".replace("/", "--")


def download(home: Path, text: str) -> None:
    """Download missing parts of the repositories, and mark them complete.

    The hub's client reads HF_HOME and HF_TOKEN when it is imported.
    """
    from huggingface_hub import snapshot_download

    for name, revision in repositories(text):
        folder = snapshot_download(name, revision=revision)
        done = marker(home, name, revision)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_text(f"{folder}\n", encoding="utf-8")
        sys.stdout.write(f"{name}: {folder}\n")


def wait(home: Path, text: str) -> None:
    """Return when all repositories are complete; say once which are missing."""
    missing: list[str] = []
    while True:
        left = [
            f"{name}@{revision or 'main'}"
            for name, revision in repositories(text)
            if not marker(home, name, revision).exists()
        ]
        if not left:
            return
        if left != missing:
            missing = left
            sys.stdout.write(f"waiting for {', '.join(missing)} in {home}\n")
            sys.stdout.flush()
        time.sleep(_POLL_S)


def main() -> None:
    """Download or wait, by the command line and the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait", action="store_true", help="Wait for another pod's download.")
    act = wait if parser.parse_args().wait else download
    try:
        act(Path(os.environ["HF_HOME"]), os.environ["APAR_WEIGHTS"])
    except KeyError as error:
        sys.exit(f"not in the environment: {error}")
    except WeightsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
