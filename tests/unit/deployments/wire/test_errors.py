"""Each error's HTTP answer, and the reason under which the metrics count it."""

import json
import time
from typing import Any

import pytest

from apar_core.errors import CapacityError, RequestError
from deployments.metrics import catalogue
from deployments.wire import errors
from deployments.wire.errors import (
    REJECTION_REASONS,
    BodyTimeoutError,
    BodyTooLargeError,
    DrainingError,
    EnginesDiedError,
    ErrorResponse,
    NoReplicaError,
    NotReadyError,
    PromptTooLongError,
    QueueTimeoutError,
    RateLimitError,
    ReplicaBrokenError,
    ReplicaLostError,
    UnknownKeyError,
    UnknownModelError,
    UnknownRouteError,
    WrongMethodError,
    normalised,
    normalised_events,
    response_for,
)
from deployments.wire.routes import ResponseForm


def error_in(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("wrong", param="n"), 400, "invalid_request_error", None),
        (CapacityError("full"), 503, "server_error", "overloaded"),
        (UnknownKeyError("who"), 401, "invalid_request_error", "invalid_api_key"),
        (UnknownRouteError("GET /"), 404, "invalid_request_error", "unknown_url"),
        (WrongMethodError("PUT", "/", ["GET"]), 405, "invalid_request_error", "method_not_allowed"),
        (UnknownModelError("m", ["n"]), 404, "invalid_request_error", "model_not_found"),
        (BodyTimeoutError("slow"), 408, "invalid_request_error", "request_timeout"),
        (BodyTooLargeError("big"), 413, "invalid_request_error", "request_too_large"),
        (
            PromptTooLongError("long", param="prompt"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (
            RateLimitError("often", kind="tokens", retry_after_s=1),
            429,
            "tokens",
            "rate_limit_exceeded",
        ),
        (QueueTimeoutError("late"), 503, "server_error", "overloaded"),
        (NotReadyError(), 503, "server_error", "not_ready"),
        (DrainingError(), 503, "server_error", "draining"),
    ],
)
def test_each_error_has_its_status_type_and_code(
    error: RequestError | CapacityError, status: int, kind: str, code: str | None
) -> None:
    answer = response_for(error)

    assert answer.status == status
    assert error_in(answer.body) == {
        "message": str(error),
        "type": kind,
        "param": error.param,
        "code": code,
    }


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (ReplicaLostError("secret"), 503, "engine_lost", b"5"),
        (ReplicaBrokenError("secret"), 503, "engine_lost", b"5"),
        (NoReplicaError("secret"), 503, "replica_unavailable", b"5"),
        (EnginesDiedError("secret"), 500, "engine_lost_twice", None),
    ],
)
def test_failures_keep_their_details_to_the_log(
    error: ReplicaLostError, status: int, code: str, retry_after: bytes | None
) -> None:
    answer = response_for(error)

    assert (answer.status, error_in(answer.body)["code"]) == (status, code)
    assert dict(answer.headers).get(b"retry-after") == retry_after
    assert b"secret" not in answer.body


def test_clients_are_told_not_to_retry_what_kills_engines() -> None:
    assert dict(response_for(EnginesDiedError("dead")).headers)[b"x-should-retry"] == b"false"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnknownKeyError, "authentication"),
        (RateLimitError, "key_limit"),
        (BodyTimeoutError, "body_timeout"),
        (BodyTooLargeError, "too_large"),
        (PromptTooLongError, "too_large"),
        (UnknownModelError, "unknown_model"),
        (UnknownRouteError, "unknown_route"),
        (WrongMethodError, "unknown_route"),
        (QueueTimeoutError, "queue_timeout"),
        (NotReadyError, "overloaded"),
        (DrainingError, "draining"),
        (NoReplicaError, "no_replica"),
        (CapacityError, "overloaded"),
        (RequestError, "invalid"),
    ],
)
def test_each_refusal_has_its_reason(error: type[Exception], reason: str) -> None:
    assert getattr(error, "reason", None) == reason


def test_the_catalogue_and_the_errors_name_every_reason() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]

    assert {kind.reason for kind in kinds if hasattr(kind, "reason")} == set(REJECTION_REASONS)
    for reason in REJECTION_REASONS:
        assert reason in catalogue.REQUESTS_REJECTED.labels["reason"]


def test_retry_after_is_in_whole_seconds() -> None:
    headers = dict(response_for(CapacityError("full", retry_after_s=1.2)).headers)

    assert headers[b"retry-after"] == b"2"


def test_an_error_ends_a_stream_with_done() -> None:
    events = response_for(ReplicaLostError("dead")).events().split(b"\n\n")

    assert error_in(events[0].removeprefix(b"data: "))["code"] == "engine_lost"
    assert events[1:] == [b"data: [DONE]", b""]


def test_content_length_counts_bytes() -> None:
    answer = ErrorResponse(404, "ä")

    assert dict(answer.headers)[b"content-length"] == str(len(answer.body)).encode()


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (
            {"error": {"message": "m", "type": "Bad Request", "param": "body.n", "code": 400}},
            "`n`: m",
            "n",
        ),
        ({"error": {"message": "m", "type": "X", "param": None, "code": 400}}, "m", None),
        ({"detail": "Not Found"}, "Not Found", None),
        ({"other": 1}, '{"other": 1}', None),
    ],
)
def test_vllms_error_bodies_become_openais(
    body: dict[str, Any], message: str, param: str | None
) -> None:
    error = error_in(normalised(400, json.dumps(body).encode()))

    assert error == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": None,
    }


@pytest.mark.parametrize("body", [b"", b"plain text", b"\xff", b"[]"])
def test_any_error_body_becomes_openais(body: bytes) -> None:
    error = error_in(normalised(500, body))

    assert error["type"] == "server_error"
    assert error["message"]


TEXT = b'data: {"choices":[{"delta":{"content":"data: {\\"error\\""}}]}\n\n'


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, "invalid_request_error"), (500, "server_error"), (None, "server_error")],
)
def test_an_error_within_a_stream_of_chunks_has_our_form(code: int | None, kind: str) -> None:
    error = {"message": "wrong", "type": "BadRequestError", "param": "body.n", "code": code}
    event = b"data: %s\n\n" % json.dumps({"error": error}).encode()

    events = normalised_events(TEXT + event + b"data: [DONE]\n\n", ResponseForm.CHUNKS)

    first, second, last = events.strip().split(b"\n\n")
    assert first == TEXT.strip()
    assert json.loads(second.removeprefix(b"data: "))["error"] == {
        "message": "`n`: wrong",
        "type": kind,
        "param": "n",
        "code": None,
    }
    assert last == b"data: [DONE]"


def test_an_error_within_a_stream_of_messages_has_anthropics_form() -> None:
    before = b'event: ping\ndata: {"type":"ping"}\n\n'
    error = {"type": "error", "error": {"type": "internal_error", "message": "failed"}}
    event = b"event: error\ndata: %s\n\n" % json.dumps(error).encode()

    events = normalised_events(before + event, ResponseForm.MESSAGES)

    assert events.startswith(before + b"event: error\n")
    assert json.loads(events.rpartition(b"data: ")[2]) == {
        "type": "error",
        "error": {"type": "api_error", "message": "failed"},
    }


@pytest.mark.parametrize("form", ResponseForm)
def test_events_without_an_error_are_left_alone(form: ResponseForm) -> None:
    assert normalised_events(TEXT, form) == TEXT


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        (
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': "
            "'Should be a string', 'input': '5'}\n  {'type': 'list_type', 'loc': 'body.stop', "
            "'msg': 'Should be a list', 'input': '5'}",
            "stop",
            "`stop`: Should be a string, or: Should be a list (got 5)",
        ),
        (
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.model', 'msg': "
            "'Field required', 'input': '<dict of 5 items>'}",
            "model",
            "`model`: Field required",
        ),
        (
            "1 validation error:\n  {'type': 'value_error', 'loc': 'max_tokens', 'msg': 'Value "
            "error, must be positive', 'input': '0', 'ctx': {'error': ValueError('must be "
            "positive')}, 'url': 'https://errors.pydantic.dev/2.14/v/value_error'}",
            "max_tokens",
            "`max_tokens`: must be positive (got 0)",
        ),
        ("1 validation error:\n  {'type': cut", None, "1 validation error:\n  {'type': cut"),
        ("Too many (parameter=logprobs, value=[1, (2)])", "logprobs", "`logprobs`: Too many"),
        (
            "needs --tool-call-parser to be set",
            None,
            "needs `engine.tool_call_parser` to be set",
        ),
        ("a -- b, x--y", None, "a -- b, x--y"),
        ("Input should be 1", "n", "`n`: Input should be 1"),
        ("n should be 1", "n", "n should be 1"),
    ],
)
def test_messages_of_vllm_name_the_field_and_our_settings(
    message: str, param: str | None, expected: str
) -> None:
    body = json.dumps({"error": {"message": message, "param": param}}).encode()

    assert error_in(normalised(400, body)) == {
        "message": expected,
        "type": "invalid_request_error",
        "param": param,
        "code": None,
    }


def test_a_message_that_quotes_hostile_text_takes_linear_time() -> None:
    message = "`apar" + " (parameter=x, value=" * 20_000 + "` is internal"
    body = json.dumps({"error": {"message": message}}).encode()
    began_s = time.process_time()

    assert error_in(normalised(400, body))["message"] == message
    # Quadratic time would be more than a minute.
    assert time.process_time() - began_s < 10


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    body = json.dumps({"error": {"message": "too long", "param": "input_text"}}).encode()

    error = error_in(normalised(400, body))

    assert (error["code"], error["param"]) == ("context_length_exceeded", None)
