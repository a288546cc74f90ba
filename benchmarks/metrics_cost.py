"""CPU time that metrics take in a gateway and a replica while a real engine answers.

Gateway, replica and engine run in this process (vLLM's engine core beside it) as they do behind Ray
Serve. Every call that counts is timed by the clock of its thread and added up, which a difference
of two runs could not resolve: on a small machine those scatter by more than 1 %. The time of the
clock itself is included.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from apar_core.metrics.recorder import Recorder
from apar_core.scheduler.core_state import CoreState
from deployments.metrics import catalogue, node
from deployments.metrics.node import NodePage, open_process, write_changes
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from deployments.wire.start import StartReport

SCRAPE_S = 15.0
STATE_CALLS = 100
UNIT_CALLS = 20_000


class Clock:
    """Adds up the CPU time of functions, by a name for each."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    @contextmanager
    def timing(self, owner: Any, method: str, name: str) -> Iterator[None]:
        """Time a method of a class during the block."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - began_s
                self.calls[name] += 1

        setattr(owner, method, timed)
        try:
            yield
        finally:
            setattr(owner, method, inner)


class InProcess:
    """`ModelReplicas` of a replica in this process."""

    num_running = 1
    num_unreachable = 0

    def __init__(self, answering: Any) -> None:
        self._answering = answering

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        """Yield the answer piece by piece."""
        async for part in self._answering.stream(request):
            yield Piece.from_wire(part) if isinstance(part, tuple) else part

    async def answering(self, wait_s: float) -> int:
        """Return that it answers."""
        return 1

    async def starting(self) -> list[StartReport]:
        """Return that nothing starts."""
        return []

    async def whole(self, request: RelayedRequest, progress: Any = None) -> Any:
        """Return the whole answer."""
        return [part async for part in self._answering.whole(request)][-1]


def run(console: Console, *, concurrency: int, requests: int, num_tokens: int) -> dict[str, float]:
    """Answer streamed requests and return the CPU time of metrics beside that of everything."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        lock = open_process(Path(folder), "apar-tiny", {"replica": "r1"})
        figures = asyncio.run(_measure(concurrency, requests, num_tokens, Path(folder)))
        lock.close()
    for name, value in figures.items():
        console.print(
            f"{name:45} {value:.6g}" if isinstance(value, float) else f"{name:45} {value}"
        )
    return figures


async def _measure(
    concurrency: int, requests: int, num_tokens: int, folder: Path
) -> dict[str, float]:
    # Imported late: vLLM makes metrics on import.
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from apar_core.models.apar_tiny import checkpoint_path
    from deployments.gateway.exchange import Exchange
    from deployments.gateway.gateway import Gateway
    from deployments.gateway.gateway_metrics import GatewayMetrics
    from deployments.gateway.settings import GatewaySettings, ServedModel
    from deployments.replica.answering import Answering
    from deployments.replica.engine_factory import (
        build_engine,
        build_http_application,
        server_arguments,
    )
    from deployments.replica.replica_metrics import ReplicaMetrics

    engine_arguments = {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,
        "max_num_seqs": 256,
    }
    args = server_arguments(str(checkpoint_path()), "apar-tiny", engine_arguments)
    engine = build_engine(args)
    engine.pace_streams(0.05)
    await engine.warm_up()
    answering = Answering(engine, await build_http_application(engine, args), "r1")
    answering.metrics = ReplicaMetrics(model="apar-tiny", replica="r1")
    model = ServedModel(
        name="apar-tiny",
        deployment="Replica",
        requests_per_replica=concurrency,
        max_queued=requests,
    )
    gateway = Gateway(GatewaySettings(models=(model,)), [InProcess(answering)])
    gateway.take_metrics()
    clock = Clock()
    places = asyncio.Semaphore(concurrency)
    transport = httpx.ASGITransport(app=gateway)
    body = {
        "model": "apar-tiny",
        "messages": [{"role": "user", "content": "Give me 3 tips for sleeping well."}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": num_tokens,
        "apar": {"enabled": False},
    }

    async def ask(http: httpx.AsyncClient) -> None:
        async with places:
            answer = await http.post("/v1/chat/completions", json=body, timeout=600)
            answer.raise_for_status()

    async def ask_all(number: int) -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            await asyncio.gather(*(ask(http) for _ in range(number)))

    await ask_all(concurrency)
    steps_before = _num_steps(await engine.core_state())
    timed = (
        (PrometheusStatLogger, "record", "vLLM"),
        (ReplicaMetrics, "finished", "replica"),
        (GatewayMetrics, "ended", "gateway"),
        (Exchange, "_note_gap", "gaps"),
    )
    with _entered(clock, timed):
        cpu_s, began_s = _cpu_s(), time.perf_counter()
        await ask_all(requests)
        cpu_s, wall_s = _cpu_s() - cpu_s, time.perf_counter() - began_s
    state = await engine.core_state()
    steps = _num_steps(state) - steps_before
    tokens = requests * num_tokens

    everything = list(node._changed)
    # Once a second: the state of the engine and the gateway, and ten samples of the loop's lag.
    cpu_before_s = _cpu_s()
    for _ in range(STATE_CALLS):
        answering.metrics.take(await engine.core_state(), 1)
        gateway.take_metrics()
        for _ in range(10):
            gateway.metrics.recorder.observe(catalogue.EVENT_LOOP_LAG, 0.0002)
        # A second under load changes almost every series.
        for value in everything:
            value.set(value.get())
        write_changes()
    per_second_s = (_cpu_s() - cpu_before_s) / STATE_CALLS
    scrape_s, num_samples = _scrape(folder)
    engine.shutdown()

    counted_s = sum(clock.seconds.values())
    running_s = wall_s * (per_second_s + scrape_s / SCRAPE_S)
    return {
        "requests": requests,
        "tokens": tokens,
        "engine steps": steps,
        "wall (s)": wall_s,
        "CPU of gateway, replica and engine (s)": cpu_s,
        "CPU per request (ms)": cpu_s / requests * 1e3,
        **{f"{name} (ms per request)": s / requests * 1e3 for name, s in clock.seconds.items()},
        "vLLM (us per token)": clock.seconds["vLLM"] / tokens * 1e6,
        "vLLM (us per step)": clock.seconds["vLLM"] / steps * 1e6,
        "state, each second (ms)": per_second_s * 1e3,
        "scrape (ms)": scrape_s * 1e3,
        "samples on the page": num_samples,
        "share: counted": counted_s / cpu_s,
        "share: state and scrapes": running_s / cpu_s,
        "share: all metrics": (counted_s + running_s) / cpu_s,
        "share: all but vLLM's own": (counted_s - clock.seconds["vLLM"] + running_s) / cpu_s,
        **_units(),
    }


def _num_steps(state: CoreState) -> int:
    assert state.steps is not None
    return state.steps.num_steps


@contextmanager
def _entered(clock: Clock, timed: tuple[tuple[Any, str, str], ...]) -> Iterator[None]:
    if not timed:
        yield
        return
    with clock.timing(*timed[0]), _entered(clock, timed[1:]):
        yield


def _cpu_s() -> float:
    """CPU time of this process and the engine core."""
    process = psutil.Process(os.getpid())
    each = [process.cpu_times(), *(child.cpu_times() for child in process.children(recursive=True))]
    return sum(times.user + times.system for times in each)


def _scrape(folder: Path) -> tuple[float, int]:
    registry = CollectorRegistry()
    registry.register(NodePage(folder))
    text, times = b"", []
    for _ in range(20):
        began_s = time.thread_time()
        text = generate_latest(registry)
        times.append(time.thread_time() - began_s)
    return min(times), sum(not line.startswith(b"#") for line in text.splitlines())


def _units() -> dict[str, float]:
    """CPU time of one count in files."""
    recorder = Recorder(model="m", replica="r")
    calls: dict[str, Callable[[], None]] = {
        "inc (us)": lambda: recorder.inc(catalogue.PROMPT_TOKENS),
        "observe (us)": lambda: recorder.observe(catalogue.TIME_PER_OUTPUT_TOKEN, 0.02),
    }
    found = {}
    for name, call in calls.items():
        began_s = time.thread_time()
        for _ in range(UNIT_CALLS):
            call()
        found[name] = (time.thread_time() - began_s) / UNIT_CALLS * 1e6
    return found
