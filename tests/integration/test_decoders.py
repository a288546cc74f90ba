"""`vanilla_apar` and vLLM's forking engine on the same prompts, in float32, thread by thread."""

from __future__ import annotations

import pytest
import torch

from apar_core.decoders.interface import DecodeLimits, decode_answer
from apar_core.decoders.load import load_decoder, load_tokenizer
from apar_core.models.apar_tiny import checkpoint_path
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import chats, generate_threads

pytestmark = pytest.mark.engine


def test_vanilla_apar_generates_the_threads_of_the_engine() -> None:
    questions = chats(12)
    engine = EngineProcess()
    try:
        run = engine.call(generate_threads, questions, 300)
    finally:
        engine.close()
    expected = sorted(thread.generated for thread in run.threads)

    tokenizer = load_tokenizer(checkpoint_path())
    decoder = load_decoder("vanilla_apar", checkpoint_path(), tokenizer, dtype=torch.float32)
    found = []
    for chat in questions:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer = decode_answer(decoder, prompt, limits=DecodeLimits(max_tokens=300))
        end = [tokenizer.eos_token_id]
        found += [tuple([*each.token_ids, *(end * each.ended)]) for each in answer.threads]

    assert len(found) > len(questions)
    assert sorted(found) == expected
