"""Fetching from a real local server: what is checked, what is kept, what is told."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.evaluation.prompt_sets import (
    BENCHMARK_FILES,
    fetch_benchmark_files,
    find_benchmark_file,
)
from tests.unit.apar_core.offline.evaluation.test_prompt_sets import FASTCHAT, needs_fastchat


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and writes nothing to the terminal."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder's files."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A copy of FastChat's files in the places that they have there."""
    for file in BENCHMARK_FILES:
        target = tmp_path / "home" / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(find_benchmark_file(file.path, FASTCHAT).read_bytes())
    return tmp_path / "home"


@needs_fastchat
def test_all_files_arrive_and_are_not_fetched_again(home: Path, tmp_path: Path) -> None:
    arrived = 0

    def show(_file: object, num_bytes: int) -> None:
        nonlocal arrived
        arrived += num_bytes

    with served(home) as url:
        paths = fetch_benchmark_files(tmp_path / "cache", base_urls=[url], show=show)

    assert arrived == sum(file.num_bytes for file in BENCHMARK_FILES)
    assert [path.read_bytes() for path in paths] == [
        (home / file.path).read_bytes() for file in BENCHMARK_FILES
    ]
    # The server is gone by now.
    assert fetch_benchmark_files(tmp_path / "cache", base_urls=[url]) == paths


@needs_fastchat
def test_a_damaged_file_is_fetched_again(home: Path, tmp_path: Path) -> None:
    with served(home) as url:
        paths = fetch_benchmark_files(tmp_path / "cache", base_urls=[url])
        content = paths[0].read_bytes()
        paths[0].write_bytes(content[:100])
        fetch_benchmark_files(tmp_path / "cache", base_urls=[url])

    assert paths[0].read_bytes() == content


@needs_fastchat
def test_a_file_that_is_another_one_is_refused_and_not_kept(home: Path, tmp_path: Path) -> None:
    (home / BENCHMARK_FILES[1].path).write_text("surprise")

    with served(home) as url, pytest.raises(EvaluationError, match="8 bytes with SHA-256"):
        fetch_benchmark_files(tmp_path / "cache", base_urls=[url])

    assert not (tmp_path / "cache" / BENCHMARK_FILES[1].path).exists()


@needs_fastchat
def test_the_second_home_is_asked_where_the_first_knows_no_such_file(
    home: Path, tmp_path: Path
) -> None:
    with served(home) as url:
        paths = fetch_benchmark_files(tmp_path / "cache", base_urls=[f"{url}/gone", url])
        with pytest.raises(EvaluationError, match="HTTP 404 from all of"):
            fetch_benchmark_files(tmp_path / "other", base_urls=[f"{url}/gone"])

    assert all(path.is_file() for path in paths)


def test_without_a_network_the_way_out_is_told(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        pass

    with pytest.raises(EvaluationError, match=r"cannot be reached .* --benchmark-files"):
        fetch_benchmark_files(tmp_path / "cache", base_urls=[url])
