"""Run vLLM's own OpenAI server with the embedded model, as a process."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from apar_core.models.apar_tiny import checkpoint_path
from cluster.local_ray import free_port

START_S = 900.0


@contextmanager
def vllm_server(
    log: Path,
    *arguments: str,
    checkpoint: Path | None = None,
    python: str | None = None,
    **environment: str,
) -> Iterator[str]:
    """Yield the server's address; `log` gets its output.

    `python` is the interpreter of another environment, which may lack this package.
    """
    port = free_port()
    model = str(checkpoint or checkpoint_path())
    if python is None:
        # What `vllm serve` runs; the CPU wheel on PyPI has no such command.
        command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
        command += ["--model", model]
    else:
        command = [str(Path(python).with_name("vllm")), "serve", model]
    command += ["--served-model-name", "tiny"]
    command += ["--enable-prefix-caching", "--enforce-eager", "--dtype", "float32"]
    command += ["--max-model-len", "768", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *arguments]
    inherited = dict(os.environ)
    if python is not None:
        inherited.pop("PYTHONPATH", None)
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            # Outside of the repository, which `-m` would make importable.
            cwd=log.parent,
            env=inherited | cpu | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                    break
            said = log.read_text(errors="replace")
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
