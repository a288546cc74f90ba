"""The first request of each kind does not stall the streams that run beside it."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.serving.apar_process import TINY, Server, authorization, serving

# Runs before the other tests of the shared server, so that the requests are the first.
pytestmark = pytest.mark.cluster

LONGEST_STALL_S = 1.0
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "log-probabilities": {"logprobs": 1},
    "more log-probabilities of several choices": {"logprobs": 5, "n": 3},
    "log-probabilities of the prompt": {"prompt_logprobs": 3},
    "presence penalty": {"presence_penalty": 0.5},
    "frequency penalty": {"frequency_penalty": 0.5},
    "repetition penalty": {"repetition_penalty": 1.2},
    "seed": {"seed": 1},
    "top-p": {"top_p": 0.5},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.1},
    "logit bias": {"logit_bias": {"50": 2.0}},
    "bad words": {"bad_words": ["the"]},
    "least length": {"min_tokens": 3},
    "allowed tokens": {"allowed_token_ids": [50, 51, 52]},
    "schema": {"structured_outputs": {"json": {"type": "object"}}},
    "regular expression": {"structured_outputs": {"regex": "[a-z]+"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "beam search": {"use_beam_search": True, "n": 2, "temperature": 0.0},
    "many at once": {"seed": 2, "top_p": 0.9, "top_k": 9, "logprobs": 2, "bad_words": ["a"]},
}


def longest_stall_s(url: str, settings: dict[str, Any]) -> float:
    """Return the longest gap between pieces of a stream while another request is answered."""
    body = {"model": "apar-tiny", "prompt": "Give me 3 tips for sleeping well.", "max_tokens": 6}
    stream = {**body, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        ThreadPoolExecutor(1) as executor,
        httpx.Client(base_url=url, timeout=120, headers=authorization()) as client,
        client.stream("POST", "/v1/completions", json=stream) as running,
    ):
        pieces = running.iter_raw()
        next(pieces)
        answer = executor.submit(client.post, "/v1/completions", json={**body, **settings})
        longest_s, last_s = 0.0, time.monotonic()
        for _ in pieces:
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            if answer.done():
                break
        assert answer.result().status_code == 200, answer.result().text
    return longest_s


def stalling(url: str, kinds: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the kinds whose request stalls a running stream, with the seconds."""
    stalls = {name: longest_stall_s(url, settings) for name, settings in kinds.items()}
    return {name: stall_s for name, stall_s in stalls.items() if stall_s > LONGEST_STALL_S}


@pytest.mark.slow
def test_no_first_request_of_any_kind_stalls_a_running_stream(
    server: Server, tmp_path: Path
) -> None:
    found = stalling(server.url, KINDS)

    if found:  # A busy machine stalls streams too, but rarely beside the same requests again.
        with serving(tmp_path, TINY) as fresh:
            again = stalling(fresh.url, {name: KINDS[name] for name in found})
        assert again == {}, found
