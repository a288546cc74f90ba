"""A replay that a client asks for, as the input processor hands it on or refuses it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from apar_core.engine.input_processor import ForkInputProcessor
from apar_core.engine.replay import replayed_tokens
from apar_core.engine.replay_request import PARAM, REPLAY_REQUEST_ARG, ReplayRules
from tests.fakes.scripted_engine import END

ROOT = {"": [10, 11, END]}


def set_replay(**prompt: Any) -> dict[str, Any]:
    """What the engine is told of a request with this prompt, in a context of ten tokens."""
    # Without an engine's configuration: what replays need is their rules.
    processor = ForkInputProcessor.__new__(ForkInputProcessor)
    processor._replay_rules = ReplayRules(100, frozenset({END}))
    processor.model_config = SimpleNamespace(max_model_len=10)  # type: ignore[assignment]
    params = SamplingParams(max_tokens=50, extra_args={REPLAY_REQUEST_ARG: json.dumps(ROOT)})
    request = EngineCoreRequest(
        request_id="r",
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **prompt,
    )
    processor._set_replay(request, params)
    return dict(params.extra_args or {})


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": [5] * 7},
        {"prompt_token_ids": None, "prompt_embeds": torch.zeros(7, 4)},
    ],
)
def test_a_replay_that_fits_behind_its_prompt_reaches_the_engine(prompt: dict[str, Any]) -> None:
    extra_args = set_replay(**prompt)

    assert replayed_tokens(extra_args) == ROOT
    assert REPLAY_REQUEST_ARG not in extra_args


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": [5] * 8},
        {"prompt_token_ids": None, "prompt_embeds": torch.zeros(8, 4)},
    ],
)
def test_a_replay_that_its_prompt_leaves_no_room_for_is_a_clients_error(
    prompt: dict[str, Any],
) -> None:
    with pytest.raises(VLLMValidationError, match=r"takes 11 tokens.*context holds 10") as raised:
        set_replay(**prompt)

    assert raised.value.parameter == PARAM
