"""Keeps requests that may call tools from forking.

A call is one sequence of tokens, which a parser reads as it comes. The engine does not see a
request's tools, so vLLM's HTTP layer sets `apar_enabled` to false. vLLM's offline `LLM.chat` does
not pass through that layer.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

ENABLED_ARG = "apar_enabled"
"""Key of `SamplingParams.extra_args`: whether a request may fork."""
_WRAPPED = "_apar_keeps_tool_calls_unforked"


def keep_tool_calls_unforked() -> None:
    """Disable forks for vLLM's HTTP requests with tools; may be called more than once."""
    # Imported here: vLLM's HTTP layer, which only processes with a forking engine need.
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    for request_class in (ChatCompletionRequest, ResponsesRequest):
        to_sampling_params = request_class.to_sampling_params
        if not hasattr(to_sampling_params, _WRAPPED):
            setattr(request_class, to_sampling_params.__name__, _saying(to_sampling_params))


def _saying(to_sampling_params: Any) -> Any:
    @wraps(to_sampling_params)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = to_sampling_params(self, *args, **kwargs)
        if self.tools and self.tool_choice != "none":
            params.extra_args = {**(params.extra_args or {}), ENABLED_ARG: False}
        return params

    setattr(wrapped, _WRAPPED, True)
    return wrapped
