"""Tokens with which a tool call begins, by the name of vLLM's parser (`tool_call_parser`).

Answers to requests with tools fork until such a token (`tool_call_starts`). Parsers that are
missing here recognise a call by its text alone, as `llama3_json` and `pythonic` do.
"""

CALL_STARTS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),  # noqa: RUF001
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),  # noqa: RUF001
    "glm45": ("<tool_call>",),
    "glm47": ("<tool_call>",),
    "granite4": ("<tool_call>",),
    "hermes": ("<tool_call>",),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "lfm2": ("<|tool_call_start|>",),
    "longcat": ("<longcat_tool_call>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<tool_call>",),
    "qwen3_json": ("<tool_call>",),
    "qwen3_xml": ("<tool_call>",),
    "seed_oss": ("<seed:tool_call>",),
}
