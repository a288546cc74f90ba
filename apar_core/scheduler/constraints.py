"""Constraints that a request's grammar cannot keep, told apart from faults of the server.

vLLM ends both with the same finish reason. A grammar fails when the backend cannot compile it, or
at a dead end: a place where it allows no token, as in `root ::= root`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from vllm.exceptions import VLLMValidationError

from apar_core.vllm_names import EngineCoreOutput, FinishReason, Request

_PREFIX = "apar constraint: "
_DEAD_END = "it allows no text at all, or none after what has been generated"

# The time and the place in its sources with which xgrammar begins a message.
_XGRAMMAR_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


class FailedConstraints:
    """Notes why constraints fail in this engine core, and writes it into the last output."""

    def __init__(self, manager: Any) -> None:
        """`manager` is vLLM's StructuredOutputManager, whose `accept_tokens` is watched."""
        self._manager = manager
        self._accept: Callable[[Request, list[int]], bool] = manager.accept_tokens
        manager.accept_tokens = self._accepted
        self._reasons: dict[str, str] = {}

    def _accepted(self, request: Request, token_ids: list[int]) -> bool:
        accepted = self._accept(request, token_ids)
        if not accepted and self._is_dead_end(request):
            self._reasons[request.request_id] = _DEAD_END
        return accepted

    def _is_dead_end(self, request: Request) -> bool:
        """Return whether the grammar allows no token; else the server ignored its mask."""
        structured: Any = request.structured_output_request
        mask = self._manager.backend.allocate_token_bitmask(1)
        structured.grammar.fill_bitmask(mask, 0)
        return not mask.any()

    def not_compiled(self, requests: Iterable[Request]) -> None:
        """Note why the grammars of these requests could not be compiled."""
        for request in requests:
            structured: Any = request.structured_output_request
            self._reasons[request.request_id] = str(structured.grammar)

    def explain(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Write the reasons into the outputs that end their requests."""
        if not self._reasons:
            return
        for output in outputs:
            reason = self._reasons.get(output.request_id)
            if reason is not None and output.finish_reason == FinishReason.ERROR:
                output.stop_reason = _PREFIX + reason
        self._reasons.clear()


def failed_constraint(output: EngineCoreOutput) -> str | None:
    """Return why an output's request failed at its constraint; None if it did not."""
    reason = output.stop_reason
    if output.finish_reason != FinishReason.ERROR or not isinstance(reason, str):
        return None
    return reason.removeprefix(_PREFIX) if reason.startswith(_PREFIX) else None


def constraint_error(reason: str) -> VLLMValidationError:
    """Return the error of a request whose constraint cannot be used."""
    return VLLMValidationError(
        "The constraint on the answer (`structured_outputs`, `response_format`, `text.format` or "
        f"`tools`) cannot be used: {_XGRAMMAR_PLACE.sub('', reason).strip()}",
        parameter="structured_outputs",
    )
