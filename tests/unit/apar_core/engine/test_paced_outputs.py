import asyncio
import math
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from apar_core.engine.paced_outputs import PacedQueue

pytestmark = pytest.mark.usefixtures("simulated_time")
INTERVAL_S = 0.2


class Puts:
    """Queue that records its outputs and their times."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.times_s: list[float] = []

    def put(self, output: Any) -> None:
        self.items.append(output)
        self.times_s.append(asyncio.get_running_loop().time())

    @property
    def texts(self) -> list[str]:
        return [item.outputs[0].text for item in self.items]


def output(text: str, *, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(
        index=0, text=text, token_ids=[ord(c) for c in text], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput("r", None, None, None, [completion], finished)


async def test_the_first_output_passes_at_once() -> None:
    puts = Puts()

    PacedQueue(puts, lambda: INTERVAL_S).put(output("a"))

    assert puts.texts == ["a"]


async def test_later_outputs_are_merged_until_the_interval_ends() -> None:
    puts = Puts()
    queue = PacedQueue(puts, lambda: INTERVAL_S)
    for text in "abcd":
        queue.put(output(text))
    assert puts.texts == ["a"]

    await asyncio.sleep(2 * INTERVAL_S)

    assert puts.texts == ["a", "bcd"]
    assert list(puts.items[1].outputs[0].token_ids) == [ord(c) for c in "bcd"]
    assert puts.times_s[1] % INTERVAL_S < INTERVAL_S / 1000


async def test_the_merged_outputs_of_all_streams_pass_together() -> None:
    puts = Puts()
    for _ in range(3):
        queue = PacedQueue(puts, lambda: INTERVAL_S)
        queue.put(output("a"))
        queue.put(output("b"))
        await asyncio.sleep(INTERVAL_S / 10)
    await asyncio.sleep(2 * INTERVAL_S)

    merged_s = [at for at, text in zip(puts.times_s, puts.texts, strict=True) if text == "b"]
    assert len(merged_s) == 3
    assert len({math.floor(at / INTERVAL_S) for at in merged_s}) <= 2
    assert all(at % INTERVAL_S < INTERVAL_S / 1000 for at in merged_s)


async def test_the_last_output_passes_at_once_with_held_outputs() -> None:
    puts = Puts()
    queue = PacedQueue(puts, lambda: INTERVAL_S)
    queue.put(output("a"))
    queue.put(output("b"))
    queue.put(output("c", finished=True))

    assert puts.texts == ["a", "bc"]
    assert puts.items[1].finished
    await asyncio.sleep(2 * INTERVAL_S)
    assert len(puts.items) == 2


async def test_the_end_of_a_choice_passes_at_once() -> None:
    puts = Puts()
    first, second = (PacedQueue(puts, lambda: INTERVAL_S) for _ in range(2))
    first.put(output("a"))
    second.put(output("b"))
    # The choices of a request share a queue; the request ends with the last one.
    end = output("c")
    end.outputs[0].finish_reason = "stop"
    first.put(end)
    second.put(output("d", finished=True))

    assert puts.texts == ["a", "b", "c", "d"]


async def test_a_slow_stream_is_not_delayed() -> None:
    puts = Puts()
    queue = PacedQueue(puts, lambda: 0.001)
    for text in "abc":
        queue.put(output(text))
        await asyncio.sleep(0.005)

    assert puts.texts == ["a", "b", "c"]


async def test_an_error_passes_after_the_text_before_it() -> None:
    puts = Puts()
    queue = PacedQueue(puts, lambda: INTERVAL_S)
    error = ValueError("broken")
    for item in (output("a"), output("b"), error):
        queue.put(item)

    assert puts.items[2] is error
    assert [item.outputs[0].text for item in puts.items[:2]] == ["a", "b"]
