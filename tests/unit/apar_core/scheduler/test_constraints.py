"""Constraints that fail because of the request, and those that fail because of the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from apar_core.scheduler.constraints import FailedConstraints, constraint_error, failed_constraint


class Manager:
    """Rejects every token; the grammar allows these."""

    def __init__(self, *allowed: int) -> None:
        self._allowed = allowed
        self.backend = self

    def allocate_token_bitmask(self, rows: int) -> torch.Tensor:
        return torch.full((rows, 1), -1, dtype=torch.int32)

    def fill_bitmask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = sum(1 << token_id for token_id in self._allowed)

    def accept_tokens(self, request: Any, token_ids: list[int]) -> bool:
        return False


def request_with(grammar: object) -> Any:
    return SimpleNamespace(
        request_id="r", structured_output_request=SimpleNamespace(grammar=grammar)
    )


@pytest.mark.parametrize(("allowed", "dead_end"), [((), True), ((3,), False)])
def test_a_rejected_token_is_the_requests_fault_only_at_a_dead_end(
    allowed: tuple[int, ...], dead_end: bool
) -> None:
    manager = Manager(*allowed)
    failed = FailedConstraints(manager)
    output = EngineCoreOutput("r", [7], finish_reason=FinishReason.ERROR)

    assert not manager.accept_tokens(request_with(manager), [7])
    failed.explain([output])

    assert (failed_constraint(output) is not None) == dead_end


def test_a_grammar_that_cannot_be_compiled_has_the_backends_reason() -> None:
    failed = FailedConstraints(Manager())
    outputs = [EngineCoreOutput(each, [], finish_reason=FinishReason.ERROR) for each in "rs"]

    failed.not_compiled([request_with(RuntimeError("[21:21:52] /x/y.cc:83: too large\n"))])
    failed.explain(outputs)

    reason = failed_constraint(outputs[0])
    assert reason is not None
    assert "cannot be used: too large (" in str(constraint_error(reason))
    assert failed_constraint(outputs[1]) is None
