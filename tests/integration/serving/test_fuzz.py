"""Requests generated from the OpenAPI description get valid answers or OpenAI errors.

`APAR_FUZZ_EXAMPLES` sets how many requests each route gets.
"""

import os
import random
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.serving.apar_process import Server, authorization

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
EXAMPLES = int(os.environ.get("APAR_FUZZ_EXAMPLES", "25"))
SEED = int(os.environ.get("APAR_FUZZ_SEED", "0"))
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    response_schema_conformance,
    content_type_conformance,
)
ANSWER_S = 60.0
MAX_TOKENS = 16
PROMPT = "Give me 3 tips for sleeping well."
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/completions": {"prompt": PROMPT},
}


def made_servable(case: Case[Any], model: str) -> None:
    """Let most requests pass the gateway and half of them reach the engine, with short answers.

    Few generated requests are valid, so every other one keeps only some of its fields beside a
    valid prompt.
    """
    body: Any = case.body
    if not isinstance(body, dict):
        return
    draw = random.Random(str(body))
    if case.path in GENERATING and draw.random() < 0.5:
        kept = draw.sample(sorted(body), min(len(body), draw.randrange(4)))
        body = {name: body[name] for name in kept} | GENERATING[case.path]
        case.body = body
    if draw.random() < 0.9:
        body["model"] = model
    if case.path in GENERATING:
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) and body[name] > MAX_TOKENS:
                body[name] = MAX_TOKENS
        if not any(body.get(name) for name in ("max_tokens", "max_completion_tokens")):
            body["max_tokens"] = MAX_TOKENS


def test_made_up_requests_get_answers_or_openais_errors(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=authorization())
    statuses: Counter[tuple[str, int]] = Counter()

    for found in api.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]  # an error raises

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy())
        def answers(case: Case[Any]) -> None:
            made_servable(case, "apar-tiny")
            response = case.call(timeout=ANSWER_S, headers=authorization())
            statuses[case.path, response.status_code] += 1
            case.validate_response(response, checks=list(CHECKS))

        answers()

    with capsys.disabled():
        print(f"\n{len(statuses)} kinds of answers: {dict(statuses)}")  # noqa: T201
    assert {path for path, status in statuses if status == 200} >= set(GENERATING)
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.wait_until_idle()
