"""What other accounts of the machine can do to a running server."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.other_account import accessible, needs_root, run_as_nobody
from tests.integration.serving.apar_process import TINY, ray_folders, serving, session_members
from tests.integration.serving.load_clients import chat
from tests.unit.cluster.test_local_ray import new_certificate

pytestmark = [pytest.mark.cluster, pytest.mark.ci]
# Devices and what the kernel shows.
PUBLIC = ("/dev/null", "/dev/pts", "/dev/tty", "/proc", "/sys")


RAY = ("gcs_server", "raylet")


def files_in_use(members: set[int]) -> set[Path]:
    """Return the files that processes write, their sockets with a path, and mapped memory."""
    found = set()
    for pid in members:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {file.path for file in process.open_files() if file.mode != "r"}
            found |= {str(link.laddr) for link in process.net_connections("unix")}
            # Code from a temporary folder is executed.
            found |= {
                part.path
                for part in process.memory_maps(grouped=False)
                if ("w" in part.perms and "s" in part.perms) or part.path.startswith("/tmp/")
            }
    return {Path(name) for name in found if name.startswith("/") and not name.startswith(PUBLIC)}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other accounts can enter and read, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_another_account_can_neither_read_nor_replace_a_file_of_the_server(
    open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, logs = open_folder / "home", open_folder / "logs"
    home.mkdir()
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    # Meant for another cluster; this one asks for its token in any case.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    certificate, key = new_certificate(tmp_path, "server")
    settings = {
        "logging": {"folder": str(logs), "content": True},
        "tls": {"certificate": str(certificate), "key": str(key)},
    }
    with serving(tmp_path, TINY, **settings) as server:
        url = server.url.replace("http:", "https:")
        body = chat("Give me 3 tips.", "apar-tiny") | {"max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, verify=False, timeout=60)
        members = session_members(server.process.pid)
        (folder,) = ray_folders(members)
        in_use = files_in_use(members)
        ray = [each for each in map(psutil.Process, members) if each.name() in RAY]
        ours = {folder / name for name in ("haproxy", "tls.pem", "ray")}
        assert answer.status_code == 200
        assert all(path.exists() for path in ours)
        assert len(in_use) > 10
        assert [each.environ().get("RAY_AUTH_MODE") for each in ray] == ["token"] * len(RAY)
        assert accessible(ours | in_use | set(logs.iterdir())) == set()
        assert not (home / ".ray").exists()
        # What the attack needed.
        for attack in (f"cp /bin/true {folder}/haproxy", f"ls {folder}", f"ls {logs}"):
            assert "Permission denied" in run_as_nobody("sh", "-c", attack).stderr
