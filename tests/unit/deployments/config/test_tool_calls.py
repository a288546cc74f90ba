"""The table of tokens against vLLM's parsers of tool calls."""

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from deployments.config.tool_calls import CALL_STARTS

ARGUMENTS = '{"city": "Rome"}'
JSON_CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
XML_CALL = "\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
DEEPSEEK = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
CALLS = {
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"  # noqa: RUF001
    f"```json\n{ARGUMENTS}\n```{DEEPSEEK}",
    "deepseek_v31": f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}{DEEPSEEK}",  # noqa: RUF001
    "glm45": "weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "granite4": f"{JSON_CALL}</tool_call>",
    "hermes": f"\n{JSON_CALL}\n</tool_call>",
    "kimi_k2": "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": '[weather(city="Rome")]<|tool_call_end|>',
    "longcat": f"{JSON_CALL}</longcat_tool_call>",
    "minimax_m2": '\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "mistral": f"[{JSON_CALL}]",
    "qwen3_coder": f"{XML_CALL}</tool_call>",
    "seed_oss": f"{XML_CALL}</seed:tool_call>",
}
CALLS |= {
    "glm47": CALLS["glm45"],
    "qwen3_json": CALLS["hermes"],
    "qwen3_xml": CALLS["qwen3_coder"],
}


def tokenizer_of(call: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters in which the marks of the call are single tokens."""
    characters = {chr(code): code for code in range(0x2600)}
    inner = Tokenizer(models.WordLevel(characters, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="\x03")
    tokenizer.add_tokens(re.findall(r"<[^<>\s]*>|\[TOOL_CALLS\]", call), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("parser", CALL_STARTS)
def test_the_parser_finds_a_call_that_begins_with_the_token(parser: str) -> None:
    [start] = CALL_STARTS[parser]
    call = start + CALLS[parser]
    tool: Any = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "q"}], tools=[tool]
    )
    made = ToolParserManager.get_tool_parser(parser)(tokenizer_of(call), request.tools)

    with_call = made.extract_tool_calls(f"First this. {call}", request)
    without = ToolParserManager.get_tool_parser(parser)(
        tokenizer_of(call), request.tools
    ).extract_tool_calls("First this.", request)

    assert with_call.content is not None
    assert with_call.content.strip() == "First this."
    [found] = with_call.tool_calls
    assert found.function.name == "weather"
    assert json.loads(found.function.arguments) == {"city": "Rome"}
    assert not without.tool_calls
