"""Example files for tests of training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from apar_core.offline.data.example_file import example_line
from apar_core.offline.data.records import ExampleRecord


def write_examples(path: Path, examples: Iterable[ExampleRecord]) -> None:
    """Write an example file."""
    path.write_bytes(b"".join(map(example_line, examples)))
