"""Overhead of the Ray Serve path relative to vLLM's own HTTP server, on unforked requests.

Both servers run side by side with the same model and the same engine arguments. Every repeat
measures one after the other, so that changes in machine speed affect both. Ratios are taken within
a repeat, and their median over the repeats is reported. With `alone`, the processes of the other
server are stopped meanwhile: an idle cluster takes some CPU time, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from apar_core.offline.data.records import ChatMessage
from cluster.loadtest.arrivals import ClosedLoop
from cluster.loadtest.client import LoadClient
from cluster.loadtest.jobs import Job, Target
from cluster.loadtest.load_run import Drive, Stop
from cluster.loadtest.run_file import RequestRecord
from cluster.local_ray import free_port, local_ray
from deployments.config import ClusterConfig
from deployments.config.model import ModelConfig
from deployments.config.routing import RoutingSettings

NUM_TOKENS = 100
# After a stop, the processes do what was due meanwhile.
_AWAKE_S = 3.0
TIMEOUT_S = 600.0
START_TIMEOUT_S = 180.0
BARE, SERVE = "vLLM's own server", "apar serve"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
# Beginnings of process titles.
PURPOSES = {
    "VLLM::EngineCore": "engine core",
    "ray::ServeReplica:apar:Replica": "API server",
    "ray::ServeReplica:apar:Gateway": "gateway",
    "haproxy": "HAProxy",
}
CLIENT = "client"

Repeat = dict[str, dict[str, Any]]
"""Figures by the name of the server."""


@dataclass(frozen=True)
class Server:
    """A server to measure, and the root processes that it consists of."""

    name: str
    port: int
    roots: list[psutil.Process]


def run(
    console: Console,
    *,
    checkpoint: str,
    concurrency: int,
    requests: int,
    repeats: int,
    coalesce_s: float,
    compiled: bool,
    whole: bool,
    direct: bool,
    alone: bool,
    out: Path,
) -> dict[str, Any]:
    """Measure both servers and print the comparison; `requests` is the number per repeat.

    Without `direct`, requests go over Ray Serve's handle.
    """
    model = ModelConfig(
        checkpoint=checkpoint,
        max_concurrency=64,
        threads_per_request=1.0,
        cpu_threads=1,
        kv_cache_gib=0.5,
        coalesce_s=coalesce_s,
        engine={"enforce_eager": False} if compiled else {},
    )
    routing = RoutingSettings(direct=direct)
    settings = ClusterConfig(port=free_port(), models=(model,), routing=routing)
    jobs = [_job(model.public_name, number, whole=whole) for number in range(requests)]
    with (
        local_ray(num_cpus=os.cpu_count() or 1),
        _serve_application(settings) as application,
        _bare_server(settings, out / "vllm.log") as bare,
    ):
        servers = [bare, application]
        for server in servers:  # warm up
            _measure(server, jobs[:concurrency], concurrency)
        rows: list[Repeat] = []
        for index in track(range(repeats), description="repeats"):
            order = servers if index % 2 == 0 else servers[::-1]
            row: Repeat = {}
            for server in order:
                others = [other for other in servers if alone and other is not server]
                with _stopped(others):
                    row[server.name] = _measure(server, jobs, concurrency)
            rows.append(row)
    console.print(_table(rows, concurrency))
    return {"whole": whole, "direct": direct, "alone": alone, "repeats": rows}


def _job(model: str, number: int, *, whole: bool) -> Job:
    message = ChatMessage("user", f"What is the number {number}?")
    body = {
        "model": model,
        "messages": [message.as_dict()],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    if not whole:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Job(str(number), "other", (message,), json.dumps(body).encode())


@contextmanager
def _bare_server(settings: ClusterConfig, log: Path) -> Iterator[Server]:
    """Run vLLM's own server with the engine arguments of `apar serve`."""
    from deployments.app.application import engine_arguments, replica_environment

    port = free_port()
    [model] = settings.models
    command = [sys.executable, "-m", ENTRY, "--model", model.preset.path]
    command += ["--served-model-name", model.public_name, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--disable-uvicorn-access-log"]
    arguments = engine_arguments(model, on_gpu=False)
    arguments.pop("additional_config", None)  # Only our scheduler reads it.
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [] if value is False else [flag, str(value)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | replica_environment(model, on_gpu=False),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_healthy(port, process, log)
        yield Server(BARE, port, [psutil.Process(process.pid)])
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def _stopped(servers: list[Server]) -> Iterator[None]:
    """Stop all processes of servers, and let them go on at the end."""
    stopped: list[psutil.Process] = []
    try:
        for root in (root for server in servers for root in server.roots):
            for process in [*root.children(recursive=True), root]:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
                    stopped.append(process)
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        if stopped:
            time.sleep(_AWAKE_S)


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not start; see {log}")


@contextmanager
def _serve_application(settings: ClusterConfig) -> Iterator[Server]:
    """Run the application on the private Ray cluster, which must be running."""
    from deployments.app.service import running

    # Ray's daemons run during all measurements, but count only for the application.
    ray_processes = psutil.Process().children()
    with running(settings):
        yield Server(SERVE, settings.port, ray_processes)


class _Answered(NamedTuple):
    """Tokens, latency, time to the first chunk (s), and chunks of one answer."""

    tokens: int
    end_s: float
    first_s: float
    chunks: int


def _measure(server: Server, jobs: list[Job], concurrency: int) -> dict[str, Any]:
    """Send all jobs; return throughput, latencies, and CPU seconds per 1,000 tokens."""
    before, client_before = _cpu_seconds(server.roots), time.process_time()
    send = _send if b'"stream"' in jobs[0].body else _send_whole
    answers, duration_s = uvloop.run(send(server, jobs, concurrency))
    used = {
        purpose: seconds - before.get(purpose, 0.0)
        for purpose, seconds in _cpu_seconds(server.roots).items()
    }
    used[CLIENT] = time.process_time() - client_before
    tokens = sum(answer.tokens for answer in answers)
    return {
        "tokens_per_s": tokens / duration_s,
        "latency_p50_s": statistics.median(answer.end_s for answer in answers),
        "first_token_p50_s": statistics.median(answer.first_s for answer in answers),
        "chunks_per_answer": statistics.mean(answer.chunks for answer in answers),
        "cpu_s_per_1k_tokens": {name: 1000 * value / tokens for name, value in used.items()},
    }


async def _send(server: Server, jobs: list[Job], concurrency: int) -> tuple[list[_Answered], float]:
    records: list[RequestRecord] = []
    target = Target(url=f"http://127.0.0.1:{server.port}")
    async with LoadClient(target, timeout_s=TIMEOUT_S) as client:
        drive = Drive(client, 0, Stop(), lambda answered: records.append(answered.record))
        duration_s = await drive.run(jobs, ClosedLoop(concurrency), 0)
    if failed := [record for record in records if record.error is not None]:
        raise RuntimeError(f"{server.name}: {failed[0].error}: {failed[0].message}")
    return [
        _Answered(record.text_tokens, record.end_s, record.pieces[0][0], len(record.pieces))
        for record in records
    ], duration_s


async def _send_whole(
    server: Server, jobs: list[Job], concurrency: int
) -> tuple[list[_Answered], float]:
    answers: list[_Answered] = []
    waiting = iter(jobs)
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"

    async def ask(client: httpx.AsyncClient) -> None:
        for job in waiting:
            began_s = time.monotonic()
            answer = await client.post(url, content=job.body)
            end_s = time.monotonic() - began_s
            tokens = answer.raise_for_status().json()["usage"]["completion_tokens"]
            answers.append(_Answered(tokens, end_s, end_s, 1))

    headers = {"Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, limits=limits) as client:
        began_s = time.monotonic()
        await asyncio.gather(*(ask(client) for _ in range(concurrency)))
        return answers, time.monotonic() - began_s


def _cpu_seconds(roots: list[psutil.Process]) -> dict[str, float]:
    """CPU seconds used so far by the roots and their descendants, by purpose."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for root in roots:
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[_purpose(process)] += times.user + times.system
    return seconds


def _purpose(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    for start, purpose in PURPOSES.items():
        if title.startswith(start) or f"/{start} " in title:
            return purpose
    return "API server" if ENTRY in title else "Ray and Serve"


def _table(rows: list[Repeat], concurrency: int) -> Table:
    table = Table(title=f"{concurrency} clients, {NUM_TOKENS} tokens per answer, unforked")
    for column in ("", BARE, SERVE, "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for title, key, scale in (
        ("tokens/s", "tokens_per_s", 1),
        ("latency p50, ms", "latency_p50_s", 1000),
        ("first token p50, ms", "first_token_p50_s", 1000),
        ("chunks per answer", "chunks_per_answer", 1),
    ):
        medians = [statistics.median(row[name][key] for row in rows) for name in (BARE, SERVE)]
        ratio = statistics.median(row[SERVE][key] / row[BARE][key] for row in rows)
        table.add_row(title, *(f"{scale * each:.0f}" for each in medians), f"{ratio:.3f}")
    table.add_section()
    used = {name: _median_cpu(rows, name) for name in (BARE, SERVE)}
    for purpose in used[SERVE]:
        values = [f"{1000 * used[name].get(purpose, 0.0):.0f}" for name in used]
        table.add_row(f"CPU ms per 1k tokens: {purpose}", *values)
    totals = {name: [_server_cpu(row[name]) for row in rows] for name in used}
    ratios = [ours / bare for bare, ours in zip(totals[BARE], totals[SERVE], strict=True)]
    table.add_row(
        "CPU ms per 1k tokens: all but the client",
        *(f"{1000 * statistics.median(each):.0f}" for each in totals.values()),
        f"{statistics.median(ratios):.3f}",
    )
    return table


def _server_cpu(measured: dict[str, Any]) -> float:
    """CPU seconds per 1,000 tokens of all processes but the client."""
    used: dict[str, float] = measured["cpu_s_per_1k_tokens"]
    return sum(used.values()) - used[CLIENT]


def _median_cpu(rows: list[Repeat], name: str) -> dict[str, float]:
    """Median CPU seconds per 1,000 tokens of a server over the repeats, by purpose."""
    each = [row[name]["cpu_s_per_1k_tokens"] for row in rows]
    purposes = sorted({purpose for used in each for purpose in used})
    return {p: statistics.median(used.get(p, 0.0) for used in each) for p in purposes}
