"""Sampling parameters of the requests that an engine answers before its first client's.

The first use of a sampling parameter may compile kernels or load a library inside a step of the
engine. Every running stream waits for that step, on a CPU for half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PROMPT = "Hello"

_MAX_TOKENS = 2
"""One token from the prompt's step, one from a decoding step."""

_TOGETHER: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 1,
    "top_p": 0.9,
    "top_k": 10,
    "min_p": 0.01,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {0: 1.0},
    "bad_words": [PROMPT],
    "logprobs": 2,
}
_STRUCTURED: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
    "regex": {"regex": "[a-z]+"},
    "choice": {"choice": ["yes", "no"]},
    "grammar": {"grammar": 'root ::= "yes" | "no"'},
}


def warm_up_params() -> Iterator[tuple[str, SamplingParams]]:
    """Names and parameters of requests that use each parameter alone, then most of them at once."""
    yield "greedy", _params(temperature=0.0)
    for name, value in _TOGETHER.items():
        yield name, _params(**{name: value})
    yield "greedy_logprobs", _params(temperature=0.0, logprobs=1)
    yield "prompt_logprobs", _params(prompt_logprobs=1)
    yield "min_tokens", _params(min_tokens=1)
    yield "allowed_token_ids", _params(allowed_token_ids=[0, 1, 2])
    for name, constraint in _STRUCTURED.items():
        yield name, _params(structured_outputs=StructuredOutputsParams(**constraint))
    yield "together", _params(**_TOGETHER)


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=_MAX_TOKENS, **values)
