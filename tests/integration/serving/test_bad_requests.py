"""Invalid requests get the right status and an OpenAI error body."""

import gzip
import json
from typing import Any
from unittest.mock import ANY

import httpx
import openai
import pytest

from tests.integration.serving.apar_process import Server

pytestmark = pytest.mark.cluster
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
QUESTIONS: dict[str, dict[str, Any]] = {
    CHAT: HI,
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: HI | {"model": "apar-tiny", "max_tokens": 5},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, HI | {"temperature": "warm"}, "temperature"),
        (CHAT, HI | {"max_tokens": 0}, "max_tokens"),
        (CHAT, HI | {"max_tokens": "many"}, "max_tokens"),
        (CHAT, HI | {"stream": "maybe"}, "stream"),
        (CHAT, HI | {"model": 5}, "model"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, HI | {"apar": {"threads": 3}}, "apar.threads"),
        (CHAT, HI | {"apar": {"max_threads": 0}}, "apar.max_threads"),
        (CHAT, HI | {"apar": {"enabled": 1}}, "apar.enabled"),
        (CHAT, HI | {"apar": [1]}, "apar"),
        (CHAT, HI | {"vllm_xargs": {"apar_enabled": 1}}, "vllm_xargs.apar_enabled"),
        (CHAT, HI | {"vllm_xargs": {"apar": "x"}}, "vllm_xargs.apar"),
        (CHAT, HI | {"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        (TEXT, {"prompt": "hi", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "hi", "stop": 5}, "stop"),
        (TEXT, {"prompt": ["x"] * 1024, "n": 32, "max_tokens": 1}, "prompt"),
        (CHAT, HI | {"n": 1000, "max_tokens": 1}, "n"),
        (CHAT, HI | {"store": True}, "store"),
        (CHAT, HI | {"guided_json": {}}, "guided_json"),
        (CHAT, HI | {"functions": [{"name": "f"}]}, "functions"),
        (TEXT, {"prompt": "hi", "best_of": 5}, "best_of"),
        (CHAT, HI | {"tools": [TOOL]}, "tools"),
        (RESPONSES, {"input": "hi", "tools": [TOOL["function"] | {"type": "function"}]}, "tools"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        (CHAT, HI | {"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_a_wrong_field_is_named(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, json=body)

    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


BAD_SCHEMA = {"type": "json_schema", "name": "s", "schema": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        *((path, {"logit_bias": {"999999": 1}}, "logit_bias") for path in (CHAT, TEXT, RESPONSES)),
        *((path, {"stop_token_ids": [-1]}, "stop_token_ids") for path in (CHAT, TEXT, RESPONSES)),
        (CHAT, {"structured_outputs": {"regex": "(["}}, "structured_outputs"),
        (RESPONSES, {"text": {"format": BAD_SCHEMA}}, "structured_outputs"),
        (MESSAGES, {"output_config": {"format": BAD_SCHEMA}}, "structured_outputs"),
    ],
)
def test_an_error_before_the_first_token_of_a_stream_keeps_its_status(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    whole, streamed = (
        server.post(path, json=QUESTIONS[path] | fields | {"stream": stream})
        for stream in (False, True)
    )

    assert (whole.status_code, streamed.status_code) == (400, 400)
    assert streamed.json() == whole.json()
    if path != MESSAGES:
        assert error_of(streamed)["param"] == param


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"regex": r"\p{L}"}, "Unicode character class"),
        ({"json": {"type": "array", "items": [{"type": "string"}]}}, "items must be"),
        ({"json": {"$ref": "#"}}, "allows no text"),
        ({"grammar": "root ::= root"}, "allows no text"),
        ({"grammar": 'root ::= "a" b\nb ::= b'}, "allows no text"),
        ([], "must be an object"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused_with_the_reason(
    server: Server, constraint: object, reason: str
) -> None:
    answer = server.post(CHAT, json=HI | {"structured_outputs": constraint, "n": 2})

    assert answer.status_code == 400
    error = error_of(answer)
    assert reason in error["message"]
    assert error["param"] == "structured_outputs"


def test_a_constraint_at_a_dead_end_ends_a_stream_with_the_reason(server: Server) -> None:
    # The text is long enough for its first chunk to be sent before the dead end: else it is a 400.
    constraint = {"grammar": f'root ::= "{"again " * 60}" b\nb ::= b'}

    answer = server.post(CHAT, json=HI | {"structured_outputs": constraint, "stream": True})

    *_, error, done = answer.text.strip().split("\n\n")
    assert answer.status_code == 200
    assert json.loads(error.removeprefix("data: "))["error"] == {
        "message": ANY,
        "type": "invalid_request_error",
        "param": "structured_outputs",
        "code": None,
    }
    assert done == "data: [DONE]"


@pytest.mark.parametrize("body", [b"{bad", b"[1]", b"", b"\xff", b"[" * 10_000])
def test_a_body_that_is_no_json_object_is_refused(server: Server, body: bytes) -> None:
    answer = server.post(CHAT, content=body)

    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2", 404),
        ("POST", "/", 405),
        ("POST", "/inference/v1/generate", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
    ],
)
def test_other_routes_are_refused(server: Server, method: str, path: str, status: int) -> None:
    answer = server.request(method, path)

    assert answer.status_code == status
    error_of(answer)


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/")])
def test_requests_for_another_host_are_refused(server: Server, method: str, path: str) -> None:
    headers = {"host": "evil.example"}

    answer = server.request(method, path, headers=headers, json=HI if method == "POST" else None)

    assert answer.status_code == 421
    assert answer.headers["x-request-id"]
    assert error_of(answer)["code"] == "host_not_allowed"


def test_compressed_bodies_are_read_and_unknown_codings_refused(server: Server) -> None:
    body = gzip.compress(json.dumps(HI | {"max_tokens": 1}).encode())

    json_type = {"content-type": "application/json"}
    answers = [
        server.post(CHAT, content=body, headers=json_type | {"content-encoding": coding})
        for coding in ("gzip", "br")
    ]

    assert [answer.status_code for answer in answers] == [200, 415]
    assert error_of(answers[1])["param"] == "content-encoding"


def test_a_model_is_found_by_its_name(server: Server) -> None:
    client = server.openai()

    assert client.models.retrieve("apar-tiny") in client.models.list().data
    with pytest.raises(openai.NotFoundError, match="`nope` does not exist"):
        client.models.retrieve("nope")


def test_head_is_answered_without_a_body(server: Server) -> None:
    answer = server.request("HEAD", "/v1/models")

    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 2


def control_ids(server: Server) -> list[int]:
    answer = server.post("/tokenize", json={"prompt": "[Fork]"})
    ids: list[int] = answer.json()["tokens"]
    return ids[-1:]


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_control_tokens_named_by_id_are_refused(server: Server, field: str) -> None:
    ids = control_ids(server)
    value: Any = {str(ids[0]): 100.0} if field == "logit_bias" else ids

    answer = server.post(TEXT, json={"prompt": "hi", field: value})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == field
    assert "[Fork]" in error_of(answer)["message"]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_control_tokens_are_refused_as_pydantic_reads_them(server: Server, field: str) -> None:
    ids = [f"{each}.0" for each in control_ids(server)]

    answer = server.post(TEXT, json={"prompt": "hi", field: ids})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


def test_a_prompt_larger_than_grpcs_default_limit_is_too_long_for_the_model(
    server: Server,
) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 2**20}]}

    answer = server.post(CHAT, json=body)

    assert answer.status_code == 400
    error = error_of(answer)
    assert "maximum context length" in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "word " * 2**20}),
        ("/tokenize", {"prompt": "a " * 4000, "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "word " * 2**20}]}),
        ("/detokenize", {"tokens": [5] * 4000}),
    ],
)
def test_what_exceeds_the_context_is_not_tokenized(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, json=body)

    assert answer.status_code == 400
    assert "maximum context length" in error_of(answer)["message"]


def test_a_text_to_be_truncated_may_exceed_the_context(server: Server) -> None:
    long, short = (
        server.post(
            TEXT,
            json={"prompt": "word " * num_words, "truncate_prompt_tokens": 8, "max_tokens": 4}
            | {"temperature": 0},
        ).json()
        for num_words in (2**20, 100)
    )

    assert long["usage"] == short["usage"]
    assert long["choices"][0]["text"] == short["choices"][0]["text"]


def test_a_client_cannot_set_ray_serves_timeout(server: Server) -> None:
    headers = {"x-request-timeout-seconds": "0.001"}

    answer = server.post(CHAT, json=HI, headers=headers)

    assert answer.status_code == 200
    assert answer.json()["choices"]


def test_one_token_is_an_answer(server: Server) -> None:
    answer = server.post(CHAT, json=HI | {"max_tokens": 1}).json()

    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_nothing_is_left_of_refused_requests(server: Server) -> None:
    server.wait_until_idle()
