"""Soak test: memory and blocks after mixed load are the same as before.

`python -m tests.soak --minutes 30`; writes memory.csv and memory.png to `--out`.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.integration.serving.apar_process import TINY, Server, serving, session_members
from tests.integration.serving.load_clients import PROMPTS, Load, chat, under_load
from tests.soak.samples import MIB, Growth, Sample, growths, plot, write_csv

PERIOD_S = 5.0
NUM_REPLICAS = 2
NUM_GATEWAYS = 2
MAX_GROWTH = 0.10
MAX_GROWTH_MIB = 40.0
WRONG: tuple[dict[str, Any], ...] = (
    {"model": "other"},
    {"messages": "none"},
    {"temperature": -1},
    {"apar": {"max_threads": 0}},
    {"max_tokens": 10**9},
)


async def leaving_client(url: str, load: Load, counts: Counter[str]) -> None:
    """Begin streams and disconnect before their end."""
    draw = random.Random(1)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while not load.stopping:
            body = chat(draw.choice(PROMPTS), "apar-tiny") | {"stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                pieces = answer.aiter_raw()
                for _ in range(draw.randrange(6)):
                    await anext(pieces, None)
            counts["left"] += 1
            await asyncio.sleep(draw.uniform(0, 0.5))


async def wrong_client(url: str, load: Load, counts: Counter[str]) -> None:
    """Send invalid requests."""
    draw = random.Random(2)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while not load.stopping:
            body = chat(PROMPTS[0], "apar-tiny") | draw.choice(WRONG)
            answer = await client.post("/v1/chat/completions", json=body)
            counts[f"refused with {answer.status_code}"] += 1
            await asyncio.sleep(0.2)


async def other_apis_client(url: str, load: Load, counts: Counter[str]) -> None:
    """Ask through the other APIs and for thread-tagged streams; their answers are read whole."""
    draw = random.Random(3)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while not load.stopping:
            prompt, stream = draw.choice(PROMPTS), draw.random() < 0.5
            messages = [{"role": "user", "content": prompt}]
            common: dict[str, Any] = {"model": "apar-tiny", "temperature": 0, "stream": stream}
            path, body = draw.choice(
                (
                    ("/v1/completions", {"prompt": prompt, "max_tokens": 200}),
                    ("/v1/responses", {"input": prompt, "max_output_tokens": 400, "store": False}),
                    ("/v1/messages", {"messages": messages, "max_tokens": 400}),
                    (
                        "/v1/chat/completions",
                        {"messages": messages, "apar": {"stream": "threads"} if stream else {}},
                    ),
                )
            )
            answer = await client.post(path, json=body | common)
            counts[f"{path} {answer.status_code}"] += 1
            if answer.status_code != 200:
                counts["failed"] += 1
            await asyncio.sleep(draw.uniform(0, 0.5))


def sampled(server: Server, started: float) -> list[Sample]:
    """Return the current memory of all processes of the server."""
    now = time.monotonic() - started
    found = []
    for pid in session_members(server.process.pid):
        try:
            process = psutil.Process(pid)
            name = " ".join(process.cmdline()[:3]).replace("\0", "")
            mib = process.memory_info().rss / MIB
        except psutil.NoSuchProcess:
            continue
        short = "/".join(name.split()[0].split("/")[-1:]) if name else process.name()
        if short.startswith("ray::"):
            short = short.partition(".")[0]  # behind it stands what the actor does just now
        if short == "python":
            short = next((part for part in process.cmdline()[1:] if part[0] != "-"), short)
            short = short.rpartition("/")[2]
        found.append(Sample(now, f"{short} {pid}", mib))
    return found


async def soak(server: Server, minutes: float) -> tuple[list[Sample], Load, Counter[str]]:
    """Load the server for some minutes and sample its memory."""
    counts: Counter[str] = Counter()
    samples: list[Sample] = []
    started = time.monotonic()
    async with under_load(server.url, num_clients=6) as load:
        others = [
            asyncio.create_task(leaving_client(server.url, load, counts)),
            asyncio.create_task(wrong_client(server.url, load, counts)),
            asyncio.create_task(other_apis_client(server.url, load, counts)),
        ]
        while time.monotonic() - started < 60 * minutes:
            samples += await asyncio.to_thread(sampled, server, started)
            await asyncio.sleep(PERIOD_S)
        load.stopping = True
        await asyncio.gather(*others)
    return samples, load, counts


def report(found: list[Growth], load: Load, counts: Counter[str]) -> bool:
    """Print the results; return whether all are good."""
    print(load.table())
    print(dict(counts))
    for outcome in load.failures:
        print(f"{outcome.manner} {outcome.kind}: {outcome.detail}")
    good = not load.failures and not counts["failed"]
    for growth in sorted(found, key=lambda each: each.before_mib, reverse=True):
        within = growth.is_within(MAX_GROWTH, MAX_GROWTH_MIB)
        good = good and within
        print(
            f"{growth.process:45} {growth.before_mib:8.1f} -> {growth.after_mib:8.1f} MiB"
            f"{'' if within else '  GROWN'}"
        )
    return good


def main() -> int:
    """Return 1 if a request failed or memory has grown; fail if blocks are lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Until then caches fill and the allocator grows.
    warm_up_s = 60 * arguments.minutes / 4
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), TINY | {"replicas": NUM_REPLICAS}, gateways=NUM_GATEWAYS) as server,
    ):
        samples, load, counts = asyncio.run(soak(server, arguments.minutes))
        server.wait_until_idle(NUM_REPLICAS)
        print("every block of every replica is free")
    write_csv(samples, arguments.out / "memory.csv")
    plot(samples, warm_up_s, arguments.out / "memory.png")
    return 0 if report(growths(samples, warm_up_s), load, counts) else 1


if __name__ == "__main__":
    sys.exit(main())
