"""API keys, their limits, their parts of the prefix cache and the request log."""

import base64
import json
from typing import Any

import httpx
import openai
import pytest

from tests.integration.serving.apar_process import ENGINE, Server, held
from tests.integration.serving.serve_and_look import SHOWN
from tests.integration.serving.shared_server import (
    KEYS,
    MAX_PROMPT_CHARS,
    MODEL,
    SECRETS,
    SharedServer,
    key,
    wait_for_a_new_minute,
)

pytestmark = pytest.mark.cluster
LIST_PROMPT = "Give me 5 tips for sleeping well."
# Fills several blocks of the cache, so that its first blocks can be found again.
LONG_PROMPT = "Tell me about the weather of the mountains in the winter. " * 12


def ask(client: openai.OpenAI, prompt: str = LIST_PROMPT, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="apar-tiny",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        **({"max_tokens": 40} | fields),
    )


def test_a_missing_or_wrong_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        ask(server.openai("wrong"))
    bare = httpx.get(f"{server.url}/v1/models")

    assert refused.value.code == "invalid_api_key"
    assert bare.status_code == 401
    assert bare.headers["www-authenticate"].startswith("Bearer")
    assert bare.headers["x-request-id"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_no_secret_is_shown_by_ray_serve_or_logged(server: Server) -> None:
    assert server.log_folder is not None
    shown = "\n".join(server.answers(SHOWN))
    logged = "\n".join(file.read_text() for file in server.log_folder.iterdir())

    assert "APAR_TEST_CACHE_SECRET" in shown
    for secret in map(str.encode, SECRETS.values()):
        # Text stands in a pickle as it is; in Base64 it begins at one of three offsets.
        encoded = [base64.b64encode(b"x" * offset + secret)[4:-4] for offset in range(3)]
        for form in map(bytes.decode, [secret, *encoded]):
            assert form not in shown
            assert form not in logged + server.log.read_text()


def test_a_key_gets_an_answer_and_its_request_a_line_in_the_log(server: Server) -> None:
    headers = {"x-request-id": "my-request.1"}
    answer = server.openai("plain").chat.completions.with_raw_response.create(
        model="apar-tiny",
        messages=[{"role": "user", "content": LIST_PROMPT}],
        max_tokens=200,
        temperature=0,
        extra_headers=headers,
    )
    usage = answer.parse().usage

    odd = server.request("GET", "/v1/models", headers={"x-request-id": "two words"})
    assert answer.headers["x-request-id"] == "my-request.1"
    assert " " not in odd.headers["x-request-id"]
    assert "x-ratelimit-limit-requests" not in answer.headers
    line = server.record("my-request.1")
    assert usage is not None
    assert line["event"] == "request"
    assert (line["key"], line["model"], line["status"]) == ("plain", "apar-tiny", 200)
    assert line["prompt_tokens"] == usage.prompt_tokens
    assert line["generated_tokens"] >= usage.completion_tokens
    assert line["threads"] > 1
    assert len(line["replica"]) > 4
    assert 0 <= line["queue_s"] <= line["first_byte_s"] <= line["total_s"]
    assert LIST_PROMPT not in json.dumps(line)


def test_a_stream_is_charged_and_logged_too(server: Server) -> None:
    stream = server.openai("plain").chat.completions.create(
        model="apar-tiny",
        messages=[{"role": "user", "content": LIST_PROMPT}],
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": "streamed"},
    )
    chunks = list(stream)

    line = server.record("streamed")
    assert line["stream"] is True
    assert chunks[-1].usage is not None
    assert line["prompt_tokens"] == chunks[-1].usage.prompt_tokens
    # Tokens of all threads, also those that the last step generated past the end.
    assert line["generated_tokens"] >= chunks[-1].usage.completion_tokens > 1


def test_a_client_that_leaves_a_stream_pays_for_its_prompt(server: Server) -> None:
    client, fields = server.openai("plain"), {"stream": True, "max_tokens": 400}
    whole = ask(client, LONG_PROMPT, max_tokens=1)

    with ask(client, LONG_PROMPT, **fields, extra_headers={"x-request-id": "left"}) as stream:
        next(iter(stream))

    assert server.record("left")["prompt_tokens"] == whole.usage.prompt_tokens


@pytest.mark.ci
def test_a_key_over_its_request_rate_is_told_when_to_retry(server: Server) -> None:
    wait_for_a_new_minute()
    client = server.openai("few")
    first = client.chat.completions.with_raw_response.create(
        model="apar-tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5
    )
    ask(client)

    with pytest.raises(openai.RateLimitError) as refused:
        ask(client)

    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 100_000
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 120
    ask(server.openai("plain"))


def test_generated_tokens_count_towards_a_keys_token_rate(server: Server) -> None:
    wait_for_a_new_minute()
    client = server.openai("frugal")
    answer = ask(client, max_tokens=400)
    assert answer.usage.total_tokens > 150

    with pytest.raises(openai.RateLimitError, match="tokens per minute"):
        ask(client)


def test_a_key_with_one_thread_forks_but_runs_thread_after_thread(server: Server) -> None:
    def answer_and_rows(token: str) -> tuple[Any, float]:
        """Return an answer and the mean number of threads in an engine step."""
        before = server.wait_until_idle()["steps"]
        answer = ask(server.openai(token), max_tokens=300)
        after = server.wait_until_idle()["steps"]
        return answer, (after["num_rows"] - before["num_rows"]) / (
            after["num_steps"] - before["num_steps"]
        )

    narrow, narrow_rows = answer_and_rows("narrow")
    plain, plain_rows = answer_and_rows("plain")

    assert narrow.choices[0].message.content == plain.choices[0].message.content
    assert narrow.apar["threads"] == plain.apar["threads"] > 1
    assert narrow_rows <= 1 < plain_rows


def test_prompts_and_models_beyond_the_key_are_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"`messages` holds 33 .* is 20") as too_long:
        ask(server.openai("short"))
    with pytest.raises(openai.BadRequestError, match=r"limits.max_prompt_chars` is 8000000"):
        ask(server.openai("plain"), "x" * (MAX_PROMPT_CHARS + 1))
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(server.openai("elsewhere"))
    with pytest.raises(openai.BadRequestError, match="`priority` is -5; this key allows 0"):
        ask(server.openai("plain"), extra_body={"priority": -5})

    assert too_long.value.code == "context_length_exceeded"
    assert unknown.value.code == "model_not_found"
    assert list(server.openai("elsewhere").models.list()) == []
    assert [model.id for model in server.openai("plain").models.list()] == ["apar-tiny"]


def cached(server: Server, token: str, **fields: Any) -> int:
    """Return the number of prompt tokens found in the cache."""
    # Begins as no other test's prompt does.
    prompt = f"Cached: {LONG_PROMPT}"
    usage = ask(server.openai(token), prompt, max_tokens=1, **fields).usage
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def test_no_key_finds_another_keys_prompts_in_the_cache(server: Server) -> None:
    assert cached(server, "plain") == 0
    own = cached(server, "plain")
    other = cached(server, "other")
    salted = cached(server, "plain", extra_body={"cache_salt": "mine"})

    assert own > 32
    assert other == 0
    assert salted == 0
    assert cached(server, "plain", extra_body={"cache_salt": "mine"}) == own
    assert cached(server, "other", extra_body={"cache_salt": "mine"}) == 0


def test_a_rollout_replaces_keys_and_lets_streams_of_old_ones_end(
    shared: SharedServer, server: Server
) -> None:
    engines = server.processes(ENGINE)
    stream = ask(server.openai("other"), max_tokens=800, stream=True)
    next(iter(stream))

    with held(engines):
        said = shared.roll_out(MODEL, keys=(*KEYS[:1], key("new", requests_per_minute=1)))
    wait_for_a_new_minute()
    ask(server.openai("new"), extra_headers={"x-request-id": "rolled-out"})
    with pytest.raises(openai.AuthenticationError):
        ask(server.openai("other"))
    with pytest.raises(openai.RateLimitError):
        ask(server.openai("new"))
    rest = list(stream)

    assert "keys is changed" in said
    assert rest[-1].choices[0].finish_reason == "stop"
    assert server.record("rolled-out")["key"] == "new"
