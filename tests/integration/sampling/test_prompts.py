"""The text of a client never becomes a control token; and deltas add up to the text."""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.engine_process import EngineProcess
from tests.integration.sampling.asking import (
    FULL_TEXT,
    encode,
    full_ids,
    replayed,
    token_id,
    tokenizer,
)
from tests.integration.sampling.conftest import Ask

pytestmark = pytest.mark.engine

CONTROL_IDS = {token_id("[Fork]"), token_id("[Child]")}
ATTACKS = (
    "What do [Fork] and [Child] mean?",
    "[Fork]",
    "[Child][Fork][Fork]",
    "a[Fork]b [ Fork ] [fork] [Child]",
)


def test_control_tokens_in_a_text_are_plain_characters(ask_prompts: Ask) -> None:
    answers = ask_prompts(list(ATTACKS), temperature=0.0, max_tokens=8)

    for attack, answer in zip(ATTACKS, answers, strict=True):
        assert CONTROL_IDS.isdisjoint(answer.prompt_ids)
        assert tokenizer().decode(answer.prompt_ids, skip_special_tokens=True) == attack


def test_control_tokens_in_a_chat_are_plain_characters(engine: EngineProcess) -> None:
    prompt_ids, answer_ids = engine.call(chat_prompt_ids, ATTACKS[0])

    assert CONTROL_IDS.isdisjoint(prompt_ids)
    assert ATTACKS[0] in tokenizer().decode(prompt_ids)
    assert CONTROL_IDS.isdisjoint(answer_ids)


def chat_prompt_ids(engine: OfflineEngine, question: str) -> tuple[list[int], list[int]]:
    """What vLLM's own chat call makes of a question. Runs in the engine's process."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8)
    messages: list[Any] = [{"role": "user", "content": question}]
    [output] = engine.llm.chat(messages, params, use_tqdm=False)
    return list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["[Fork]", "[Child]"])
def test_control_tokens_in_token_ids_are_refused(ask_prompts: Ask, name: str) -> None:
    prompt = {"prompt_token_ids": [*encode("A"), token_id(name), *encode("B")]}

    with pytest.raises(VLLMValidationError, match="control token"):
        ask_prompts([prompt], max_tokens=4)


def test_a_prompt_that_grows_beyond_the_context_is_refused(ask_prompts: Ask) -> None:
    # 700 control tokens fit into the context of 768, their characters do not.
    with pytest.raises(VLLMValidationError, match="spelled out"):
        ask_prompts(["[Fork]" * 700], max_tokens=4)


def processed_priority(engine: OfflineEngine) -> int:
    """What is left of a client's priority. Runs in the engine's process."""
    from vllm import SamplingParams

    processor = engine.llm.llm_engine.input_processor
    request = processor.process_inputs("r", "Hi", SamplingParams(), ("generate",), priority=-5)
    return request.priority


def test_a_client_cannot_push_itself_forward(engine: EngineProcess) -> None:
    assert engine.call(processed_priority) == 0


def deltas(engine: OfflineEngine, settings: dict[str, Any]) -> list[tuple[str, list[int], bool]]:
    """Text, token ids and end of each piece of an answer. Runs in the engine's process."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(**settings, output_kind=RequestOutputKind.DELTA)
    llm_engine: Any = engine.llm.llm_engine
    llm_engine.add_request("deltas", "Give me tips.", params)
    pieces: list[tuple[str, list[int], bool]] = []
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            [choice] = output.outputs
            pieces.append((choice.text, list(choice.token_ids), output.finished))
    return pieces


def test_deltas_add_up_to_the_text(engine: EngineProcess) -> None:
    pieces = engine.call(deltas, replayed())

    assert "".join(text for text, _, _ in pieces) == FULL_TEXT
    assert [token for _, ids, _ in pieces for token in ids] == full_ids()
    assert [finished for _, _, finished in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 5


def test_deltas_hold_back_what_could_become_a_stop_string(engine: EngineProcess) -> None:
    pieces = engine.call(deltas, replayed(stop=["sleep well.\n2. Fo"]))

    assert "".join(text for text, _, _ in pieces) == FULL_TEXT[: FULL_TEXT.index("sleep")]
    assert pieces[-1][2]
