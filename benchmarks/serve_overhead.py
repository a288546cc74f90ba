"""Overhead of the Ray Serve path relative to vLLM's own HTTP server, on unforked requests.

Both servers run side by side with the same model and the same engine arguments, each in one or
several ways: vLLM's server with a chunk per so many tokens, ours with a chunk per interval. Every
repeat measures one way after the other, so that changes in machine speed affect all. Ratios are
taken within a repeat, and their median over the repeats is reported. With `alone`, the processes of
the other server are stopped meanwhile: an idle cluster takes some CPU time, too.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
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
START_TIMEOUT_S = 600.0
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
"""Figures by the name of the way."""


@dataclass(frozen=True)
class Server:
    """A server to measure, and the root processes that it consists of."""

    port: int
    roots: list[psutil.Process]


@dataclass(frozen=True)
class Way:
    """A way to ask a server: its jobs, and the time between its chunks by name."""

    name: str
    server: Server
    jobs: list[Job]


def run(
    console: Console,
    *,
    checkpoint: str,
    concurrency: int,
    requests: int,
    repeats: int,
    coalesce_s: Sequence[float],
    stream_intervals: Sequence[int],
    compiled: bool,
    whole: bool,
    direct: bool,
    alone: bool,
    out: Path,
) -> dict[str, Any]:
    """Measure both servers and print the comparison; `requests` is the number per repeat.

    `coalesce_s` are the intervals of ours, each with a replica of its own, and `stream_intervals`
    those of vLLM's in tokens. Without `direct`, requests go over Ray Serve's handle.
    """
    models = [
        ModelConfig(
            name=f"every-{1000 * interval_s:g}-ms",
            checkpoint=checkpoint,
            max_concurrency=64,
            threads_per_request=1.0,
            cpu_threads=1,
            kv_cache_gib=0.5,
            coalesce_s=interval_s,
            engine={"enforce_eager": False} if compiled else {},
        )
        for interval_s in coalesce_s
    ]
    routing = RoutingSettings(direct=direct)
    settings = ClusterConfig(port=free_port(), models=tuple(models), routing=routing)
    with (
        local_ray(num_cpus=os.cpu_count() or 1),
        _serve_application(settings) as application,
        _bare_server(settings, out / "vllm.log") as bare,
    ):
        ways = []
        for tokens in (1,) if whole else stream_intervals:
            fields = {} if tokens == 1 else {"stream_interval": tokens}
            name = BARE if tokens == 1 else f"{BARE}, {tokens} tokens a chunk"
            jobs = [_job(models[0].public_name, i, fields, whole=whole) for i in range(requests)]
            ways.append(Way(name, bare, jobs))
        for model in models:
            jobs = [_job(model.public_name, i, {}, whole=whole) for i in range(requests)]
            ways.append(Way(f"{SERVE}, {1000 * model.coalesce_s:g} ms", application, jobs))
        for way in ways:  # warm up
            _measure(way, concurrency, concurrency)
        rows: list[Repeat] = []
        for index in track(range(repeats), description="repeats"):
            order = ways if index % 2 == 0 else ways[::-1]
            row: Repeat = {}
            for way in order:
                others = [each for each in (bare, application) if alone and each is not way.server]
                with _stopped(others):
                    row[way.name] = _measure(way, requests, concurrency)
            rows.append(row)
    console.print(_table(rows, [way.name for way in ways], concurrency))
    return {"whole": whole, "direct": direct, "alone": alone, "repeats": rows}


def _job(model: str, number: int, fields: dict[str, Any], *, whole: bool) -> Job:
    message = ChatMessage("user", f"What is the number {number}?")
    body = {
        "model": model,
        "messages": [message.as_dict()],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    if not whole:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Job(str(number), "other", (message,), json.dumps(body).encode())


@contextmanager
def _bare_server(settings: ClusterConfig, log: Path) -> Iterator[Server]:
    """Run vLLM's own server with the engine arguments of `apar serve`, of its first model."""
    from deployments.app.application import engine_arguments, replica_environment

    port = free_port()
    model = settings.models[0]
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
        yield Server(port, [psutil.Process(process.pid)])
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
        yield Server(settings.port, ray_processes)


class _Answered(NamedTuple):
    """Tokens, latency, time to the first chunk (s), chunks, longest gap (s) of one answer."""

    tokens: int
    end_s: float
    first_s: float
    chunks: int
    gap_s: float


def _measure(way: Way, number: int, concurrency: int) -> dict[str, Any]:
    """Send the first jobs; return throughput, latencies, and CPU seconds per 1,000 tokens."""
    server, jobs = way.server, way.jobs[:number]
    before, client_before = _cpu_seconds(server.roots), time.process_time()
    send = _send if b'"stream"' in jobs[0].body else _send_whole
    answers, duration_s = uvloop.run(send(server, jobs, concurrency))
    gaps_s = [answer.gap_s for answer in answers]
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
        "longest_gap_p50_s": statistics.median(gaps_s),
        "longest_gap_p90_s": float(np.quantile(gaps_s, 0.9)),
        "cpu_s_per_1k_tokens": {name: 1000 * value / tokens for name, value in used.items()},
    }


async def _send(server: Server, jobs: list[Job], concurrency: int) -> tuple[list[_Answered], float]:
    records: list[RequestRecord] = []
    target = Target(url=f"http://127.0.0.1:{server.port}")
    async with LoadClient(target, timeout_s=TIMEOUT_S) as client:
        drive = Drive(client, 0, Stop(), lambda answered: records.append(answered.record))
        duration_s = await drive.run(jobs, ClosedLoop(concurrency), 0)
    if failed := [record for record in records if record.error is not None]:
        raise RuntimeError(f"port {server.port}: {failed[0].error}: {failed[0].message}")
    return [
        _Answered(
            record.text_tokens,
            record.end_s,
            record.pieces[0][0],
            len(record.pieces),
            record.reader.longest_silence_s or 0.0,
        )
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
            answers.append(_Answered(tokens, end_s, end_s, 1, 0.0))

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


def _table(rows: list[Repeat], names: list[str], concurrency: int) -> Table:
    """Return medians of all ways, and the ratios of ours to vLLM's with the most similar chunks."""
    peers = {name: _peer(rows, name, names) for name in names if not name.startswith(BARE)}
    table = Table(title=f"{concurrency} clients, {NUM_TOKENS} tokens per answer, unforked")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name, peer in peers.items():
        table.add_column(f"{name}, over {peer}", justify="right")
    for title, key, scale in (
        ("tokens/s", "tokens_per_s", 1),
        ("latency p50, ms", "latency_p50_s", 1000),
        ("first token p50, ms", "first_token_p50_s", 1000),
        ("chunks per answer", "chunks_per_answer", 1),
        ("longest gap between chunks p50, ms", "longest_gap_p50_s", 1000),
        ("longest gap between chunks p90, ms", "longest_gap_p90_s", 1000),
    ):
        if not all(row[name][key] for row in rows for name in names):
            continue  # Whole answers have no gaps.
        medians = [statistics.median(row[name][key] for row in rows) for name in names]
        ratios = [
            statistics.median(row[name][key] / row[peer][key] for row in rows)
            for name, peer in peers.items()
        ]
        table.add_row(
            title, *(f"{scale * each:.0f}" for each in medians), *(f"{each:.3f}" for each in ratios)
        )
    table.add_section()
    used = {name: _median_cpu(rows, name) for name in names}
    for purpose in used[names[-1]]:
        values = [f"{1000 * used[name].get(purpose, 0.0):.0f}" for name in names]
        table.add_row(f"CPU ms per 1k tokens: {purpose}", *values)
    totals = {name: [_server_cpu(row[name]) for row in rows] for name in names}
    table.add_row(
        "CPU ms per 1k tokens: all but the client",
        *(f"{1000 * statistics.median(each):.0f}" for each in totals.values()),
        *(
            f"{statistics.median(map(truediv, totals[name], totals[peer])):.3f}"
            for name, peer in peers.items()
        ),
    )
    return table


def _peer(rows: list[Repeat], name: str, names: list[str]) -> str:
    """Return the way of vLLM's server whose answers have the most similar number of chunks."""

    def chunks(of: str) -> float:
        return math.log(statistics.median(row[of]["chunks_per_answer"] for row in rows))

    bare = [each for each in names if each.startswith(BARE)]
    return min(bare, key=lambda each: abs(chunks(each) - chunks(name)))


def _server_cpu(measured: dict[str, Any]) -> float:
    """CPU seconds per 1,000 tokens of all processes but the client."""
    used: dict[str, float] = measured["cpu_s_per_1k_tokens"]
    return sum(used.values()) - used[CLIENT]


def _median_cpu(rows: list[Repeat], name: str) -> dict[str, float]:
    """Median CPU seconds per 1,000 tokens of a server over the repeats, by purpose."""
    each = [row[name]["cpu_s_per_1k_tokens"] for row in rows]
    purposes = sorted({purpose for used in each for purpose in used})
    return {p: statistics.median(used.get(p, 0.0) for used in each) for p in purposes}
