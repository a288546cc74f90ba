"""Clients that keep a server busy and check every text that they get."""

import asyncio
import json
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.integration.serving.apar_process import TOKEN, authorization

RIGHT = "right"
CLOSED = "closed"
HUNG = "hung"
LATE = "client late"
PROMPTS = tuple(
    f"Give me {number} tips for {topic}."
    for number, topic in (
        (3, "sleeping well"),
        (5, "learning guitar"),
        (4, "saving money"),
        (6, "learning a language"),
        (5, "staying healthy"),
    )
)
DEADLINE_S = 120.0
LEAST_DELAY_S = 0.5
"""Shortest delay of the clients' event loop that is recorded."""
# Each request uses a connection of its own. A context for each would take 20 ms of the event loop.
SSL_CONTEXT = ssl.create_default_context()


def chat(prompt: str, model: str) -> dict[str, Any]:
    """A greedy request."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": 400, "temperature": 0}


@dataclass(frozen=True)
class Outcome:
    """How one request ended: `right`, the code of a clean error, or what was wrong with it.

    `kind` is `closed` where the connection was closed before the answer was complete, and
    `client late` where the client gave up a connection that the server had accepted. `ended_s` is a
    time of `time.monotonic()`.
    """

    kind: str
    manner: str
    seconds: float
    clean: bool
    detail: str = ""
    ended_s: float = field(default_factory=time.monotonic)


def repeated_attempts() -> int:
    """Return how often this machine's kernel has repeated a connection attempt (Linux).

    It does so each second while a listener does not answer, for example because its queue is full.
    """
    names, values, *_ = Path("/proc/net/netstat").read_text(encoding="utf-8").splitlines()
    return int(dict(zip(names.split(), values.split(), strict=True))["TCPSynRetrans"])


class Unclean(Exception):  # noqa: N818  # said of an answer
    """An answer that is neither the right text nor an error in OpenAI's form."""


class CleanError(Exception):
    """An error in OpenAI's form; its code."""


def _code(error: Any) -> str:
    """The code of an OpenAI error body; raises Unclean for anything else."""
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        raise Unclean(f"no OpenAI error: {error}")
    return str(error["code"])


def _httpx_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, timeout=None, headers=authorization(), verify=SSL_CONTEXT
    )


def _openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=TOKEN,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=SSL_CONTEXT),
    )


async def _httpx_whole(url: str, body: dict[str, Any]) -> str:
    async with _httpx_client(url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    content = answer.json()
    if answer.status_code != 200:
        raise CleanError(_code(content.get("error")))
    return str(content["choices"][0]["message"]["content"])


async def _httpx_stream(url: str, body: dict[str, Any]) -> str:
    text, finished, error = "", False, None
    async with (
        _httpx_client(url) as client,
        client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer,
    ):
        if answer.status_code != 200:
            raise CleanError(_code(json.loads(await answer.aread()).get("error")))
        lines = [line async for line in answer.aiter_lines() if line]
    if not lines or lines[-1] != "data: [DONE]":
        raise Unclean(f"the stream ends with {lines[-1:]}")
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            error = event["error"]
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
            finished = finished or choice["finish_reason"] is not None
    if error is not None:
        raise CleanError(_code(error))
    if not finished:
        raise Unclean("the stream has no finish reason")
    return text


async def _openai_whole(url: str, body: dict[str, Any]) -> str:
    async with _openai_client(url) as client:
        answer = await client.chat.completions.create(**body)
    return answer.choices[0].message.content or ""


async def _openai_stream(url: str, body: dict[str, Any]) -> str:
    text = ""
    async with _openai_client(url) as client:
        async for chunk in await client.chat.completions.create(**body, stream=True):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    return text


MANNERS = {
    "httpx stream": _httpx_stream,
    "httpx whole": _httpx_whole,
    "openai stream": _openai_stream,
    "openai whole": _openai_whole,
}


async def outcome_of(url: str, manner: str, prompt: str, model: str, expected: str) -> Outcome:
    """Send one request and judge what comes back."""
    started, repeated = time.monotonic(), repeated_attempts()

    def ended(kind: str, *, clean: bool = True, detail: str = "") -> Outcome:
        return Outcome(kind, manner, time.monotonic() - started, clean, detail)

    try:
        async with asyncio.timeout(DEADLINE_S):
            text = await MANNERS[manner](url, chat(prompt, model))
    except TimeoutError:
        return ended(HUNG, clean=False)
    except CleanError as error:
        return ended(str(error))
    except openai.APIConnectionError as error:
        # openai's client waits 5 s. If the kernel repeated no attempt meanwhile, the connection was
        # made, and the clients' event loop was too late to see it.
        if type(error.__cause__).__name__ == "ConnectTimeout" and repeated == repeated_attempts():
            return ended(LATE)
        return ended(CLOSED, clean=False, detail=repr(error.__cause__))
    except openai.APIError as error:  # An error answer, or an error event in a stream.
        return ended(str(error.code), clean=error.code is not None, detail=str(error))
    except httpx.TransportError as error:
        return ended(CLOSED, clean=False, detail=repr(error))
    except (httpx.HTTPError, ValueError, Unclean) as error:
        return ended("broken", clean=False, detail=repr(error))
    if text != expected:
        return ended("wrong", clean=False, detail=f"{prompt!r}: {text!r} is not {expected!r}")
    return ended(RIGHT)


@dataclass
class Load:
    """Clients of one model that go on until they are stopped."""

    url: str
    model: str
    expected: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    stopping: bool = False
    delays_s: list[float] = field(default_factory=list)
    """Delays of the clients' event loop of at least `LEAST_DELAY_S`."""

    async def client(self, seed: int) -> None:
        """One client: one request after the other, manners and prompts at random."""
        draw = random.Random(seed)
        while not self.stopping:
            manner = draw.choice(list(MANNERS))
            prompt = draw.choice(PROMPTS)
            outcome = await outcome_of(self.url, manner, prompt, self.model, self.expected[prompt])
            self.outcomes.append(outcome)
            if outcome.kind != RIGHT:
                await asyncio.sleep(0.2)  # as a client that heeds Retry-After, but impatient

    async def watch_event_loop(self) -> None:
        """Record the delays of the clients' own event loop."""
        while not self.stopping:
            due = time.monotonic() + 0.05
            await asyncio.sleep(0.05)
            if (delay_s := time.monotonic() - due) >= LEAST_DELAY_S:
                self.delays_s.append(delay_s)

    @property
    def failures(self) -> list[Outcome]:
        """Everything but right texts, and connections that the clients gave up by themselves."""
        return [outcome for outcome in self.outcomes if outcome.kind not in (RIGHT, LATE)]

    def table(self) -> str:
        """Requests by manner and by how they ended, and how long the slowest took."""
        kinds = Counter(outcome.kind for outcome in self.outcomes)
        names = [name for name, _ in kinds.most_common()]
        rows = [["", "requests", *names, "slowest s"]]
        for manner in (*MANNERS, "all"):
            some = [each for each in self.outcomes if manner in (each.manner, "all")]
            count = Counter(each.kind for each in some)
            slowest = max((each.seconds for each in some), default=0.0)
            cells = [str(count[name]) for name in names]
            rows.append([manner, str(len(some)), *cells, f"{slowest:.1f}"])
        return "\n".join(" | ".join(cell.rjust(13) for cell in row) for row in rows)


async def texts(url: str, model: str) -> dict[str, str]:
    """What the model answers to each prompt, undisturbed."""
    return {prompt: await _httpx_whole(url, chat(prompt, model)) for prompt in PROMPTS}


@asynccontextmanager
async def under_load(
    url: str, model: str = "apar-tiny", num_clients: int = 8, seed: int = 0
) -> AsyncIterator[Load]:
    """Clients at work; on leaving they finish what they have begun."""
    load = Load(url, model, await texts(url, model))
    tasks = [asyncio.create_task(load.client(seed * 1000 + n)) for n in range(num_clients)]
    tasks.append(asyncio.create_task(load.watch_event_loop()))
    try:
        yield load
    finally:
        load.stopping = True
        await asyncio.gather(*tasks)
    assert load.outcomes
