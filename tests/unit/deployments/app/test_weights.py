"""Weights are downloaded from a hub, marked when complete, and waited for."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployments.app.weights import WeightsError, marker, repositories

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def hash_of(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """The pages of the hub that a download reads: a repository, its files, and each file."""

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/org/model/revision/"):
            self._answer(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode())
        elif self.path.startswith(f"/api/models/org/model/tree/{COMMIT}"):
            files = [
                {"type": "file", "path": name, "size": len(body), "oid": hash_of(body)}
                for name, body in FILES.items()
            ]
            self._answer(json.dumps(files).encode())
        elif (name := self.path.rpartition("/")[2]) in FILES and "org/model/resolve" in self.path:
            self._answer(FILES[name])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hash_of(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def start(home: Path, *arguments: str, weights: str, hub: str) -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "APAR_"))
    }
    return subprocess.Popen(
        [sys.executable, "-m", "deployments.app.weights", *arguments],
        env=environment
        | {"HF_HOME": str(home), "APAR_WEIGHTS": weights, "HF_ENDPOINT": hub, "NO_PROXY": "*"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.ci
def test_a_pod_waits_until_another_has_downloaded_the_weights(tmp_path: Path, hub: str) -> None:
    waiting = start(tmp_path, "--wait", weights="org/model", hub="http://127.0.0.1:9")
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == f"waiting for org/model@main in {tmp_path}\n"
    assert waiting.poll() is None

    said, _ = start(tmp_path, weights="org/model", hub=hub).communicate(timeout=3000)

    assert said.endswith(f"/snapshots/{COMMIT}\n"), said
    folder = Path(marker(tmp_path, "org/model", None).read_text().strip())
    # Where vLLM looks for the model.
    assert folder == tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    assert waiting.wait(timeout=300) == 0


def test_a_failed_download_leaves_no_marker(tmp_path: Path, hub: str) -> None:
    failed = start(tmp_path, weights="org/other", hub=hub)
    said, _ = failed.communicate(timeout=3000)

    assert failed.returncode != 0
    assert "org/other" in said
    assert not marker(tmp_path, "org/other", None).exists()


def test_repositories_and_their_revisions_are_separate(tmp_path: Path) -> None:
    found = repositories(f"org/model  gpt2@{COMMIT}\n")

    assert found == [("org/model", None), ("gpt2", COMMIT)]
    assert marker(tmp_path, "org/model", None) != marker(tmp_path, "org/model", COMMIT)


@pytest.mark.parametrize("text", ["", "  ", "org/model/file", "org/../model x@", "a b;c"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(WeightsError, match="APAR_WEIGHTS"):
        repositories(text)
