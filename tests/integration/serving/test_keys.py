"""Keys, limits, cache isolation and logs of a running application, through OpenAI's client."""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.config.keys import KeyConfig, hash_of
from deployments.gateway.rate_limits import WINDOW_S
from tests.integration.serving.apar_process import TINY, Server, serving, wait_for
from tests.integration.serving.serve_and_look import SHOWN

pytestmark = pytest.mark.cluster
LOG_S = 10.0
SECRETS = {
    "APAR_TEST_CACHE_SECRET": "sentinel-of-the-cache",
    "APAR_TEST_COLLECTOR": "sentinel-of-the-collector",
}
LIST_PROMPT = "Give me 5 tips for sleeping well."
# Longer than some blocks of the cache, so that its first blocks can be found again.
LONG_PROMPT = "Tell me about the weather of the mountains in the winter. " * 12


def key(name: str, **fields: Any) -> KeyConfig:
    """A key whose token is its name."""
    return KeyConfig.model_validate({"name": name, "hash": hash_of(name)} | fields)


KEYS = (
    key("plain"),
    key("other"),
    key("few", requests_per_minute=2, tokens_per_minute=100_000),
    key("frugal", tokens_per_minute=150),
    key("narrow", max_threads=1),
    key("short", max_prompt_chars=20),
    key("elsewhere", models=()),
)


@dataclass(frozen=True)
class Served:
    """A server, and the folder of its logs."""

    server: Server
    logs: Path

    @property
    def url(self) -> str:
        return self.server.url

    def client(self, token: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0)

    def line(self, request_id: str) -> dict[str, Any]:
        """The line of a request, which is written just after its client has the whole answer."""
        deadline = time.monotonic() + LOG_S
        while True:
            files = list(self.logs.glob("*.jsonl"))
            lines: list[dict[str, Any]] = [
                json.loads(line) for file in files for line in file.read_text().splitlines()
            ]
            found = [line for line in lines if line.get("request_id") == request_id]
            if found:
                assert len(found) == 1
                return found[0]
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    logs = tmp_path_factory.mktemp("logs")
    model = TINY | {
        "max_concurrency": 8,
        "kv_cache_gib": 0.1,
        "engine": {"enforce_eager": True, "enable_prompt_tokens_details": True},
    }
    # A process of its own: this one may hold the application of other tests.
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        for name, secret in SECRETS.items():
            patched.setenv(name, secret)
        server = stack.enter_context(served_with(tmp_path_factory.mktemp("keys"), logs, model))
        yield Served(server, logs)


def served_with(folder: Path, logs: Path, model: dict[str, Any]) -> AbstractContextManager[Server]:
    """A server with these keys and secrets."""
    return serving(
        folder,
        model,
        keys=[record.model_dump(mode="json", exclude_none=True) for record in KEYS],
        limits={"max_prompt_chars": 5000, "cache_secret": {"env": "APAR_TEST_CACHE_SECRET"}},
        logging={"folder": str(logs)},
        tracing={
            "endpoint": "http://127.0.0.1:9",
            "sample_ratio": 0.0,
            "headers": {"authorization": {"env": "APAR_TEST_COLLECTOR"}},
        },
    )


def ask(client: openai.OpenAI, prompt: str = LIST_PROMPT, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="apar-tiny",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        **({"max_tokens": 40} | fields),
    )


def wait_for_a_new_minute() -> None:
    """Where this minute is nearly over: at its edge a little more than the limit can pass."""
    left_s = WINDOW_S - time.time() % WINDOW_S
    if left_s < 20:
        time.sleep(left_s)


def test_without_the_right_key_nobody_is_let_in(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        ask(served.client("wrong"))
    bare = httpx.get(f"{served.url}/v1/models")

    assert refused.value.code == "invalid_api_key"
    assert bare.status_code == 401
    assert bare.headers["www-authenticate"].startswith("Bearer")
    assert bare.headers["x-request-id"]
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_no_secret_is_shown_by_ray_serve_or_logged(served: Served) -> None:
    shown = "\n".join(served.server.answers(SHOWN))
    logged = "\n".join(file.read_text() for file in served.logs.iterdir())

    assert "APAR_TEST_CACHE_SECRET" in shown
    for secret in map(str.encode, SECRETS.values()):
        # Text stands in a pickle as it is; in Base64 it begins at one of three offsets.
        encoded = [base64.b64encode(b"x" * offset + secret)[4:-4] for offset in range(3)]
        for form in map(bytes.decode, [secret, *encoded]):
            assert form not in shown
            assert form not in logged + served.server.log.read_text()


def test_a_key_gets_an_answer_and_its_request_a_line_in_the_log(served: Served) -> None:
    headers = {"x-request-id": "my-request.1"}
    answer = served.client("plain").chat.completions.with_raw_response.create(
        model="apar-tiny",
        messages=[{"role": "user", "content": LIST_PROMPT}],
        max_tokens=200,
        temperature=0,
        extra_headers=headers,
    )
    usage = answer.parse().usage

    odd = httpx.get(f"{served.url}/v1/models", headers={"x-request-id": "two words"})
    assert answer.headers["x-request-id"] == "my-request.1"
    assert " " not in odd.headers["x-request-id"]
    assert "x-ratelimit-limit-requests" not in answer.headers
    line = served.line("my-request.1")
    assert usage is not None
    assert line["event"] == "request"
    assert (line["key"], line["model"], line["status"]) == ("plain", "apar-tiny", 200)
    assert line["prompt_tokens"] == usage.prompt_tokens
    assert line["generated_tokens"] >= usage.completion_tokens
    assert line["threads"] > 1
    assert len(line["replica"]) > 4
    assert 0 <= line["queue_s"] <= line["first_byte_s"] <= line["total_s"]
    assert LIST_PROMPT not in json.dumps(line)


def test_a_stream_is_charged_and_logged_too(served: Served) -> None:
    stream = served.client("plain").chat.completions.create(
        model="apar-tiny",
        messages=[{"role": "user", "content": LIST_PROMPT}],
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": "streamed"},
    )
    chunks = list(stream)

    line = served.line("streamed")
    assert line["stream"] is True
    assert chunks[-1].usage is not None
    assert line["prompt_tokens"] == chunks[-1].usage.prompt_tokens
    # Tokens of all threads, also those that the last step generated past the end.
    assert line["generated_tokens"] >= chunks[-1].usage.completion_tokens > 1


def test_a_key_that_has_used_up_its_requests_is_told_when_to_come_again(served: Served) -> None:
    wait_for_a_new_minute()
    client = served.client("few")
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
    ask(served.client("plain"))


def test_generated_tokens_use_a_key_up(served: Served) -> None:
    wait_for_a_new_minute()
    client = served.client("frugal")
    answer = ask(client, max_tokens=400)
    assert answer.usage.total_tokens > 150

    with pytest.raises(openai.RateLimitError, match="tokens per minute"):
        ask(client)


def test_a_key_with_one_thread_forks_but_runs_thread_after_thread(served: Served) -> None:
    def answer_and_rows(token: str) -> tuple[Any, float]:
        """An answer, and the mean number of threads in a step of the engine."""
        before = steps(served.server)
        answer = ask(served.client(token), max_tokens=300)
        after = steps(served.server)
        return answer, (after["num_rows"] - before["num_rows"]) / (
            after["num_steps"] - before["num_steps"]
        )

    narrow, narrow_rows = answer_and_rows("narrow")
    plain, plain_rows = answer_and_rows("plain")

    assert narrow.choices[0].message.content == plain.choices[0].message.content
    assert narrow.apar["threads"] == plain.apar["threads"] > 1
    assert narrow_rows <= 1 < plain_rows


def steps(server: Server) -> dict[str, float]:
    """The steps that the only replica's engine has done, once it is idle."""
    server.wait_until_idle(1)
    [load] = server.loads()
    return dict(load["steps"])


def test_prompts_and_models_beyond_the_key_are_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"`messages` holds 33 .* is 20") as too_long:
        ask(served.client("short"))
    with pytest.raises(openai.BadRequestError, match=r"limits.max_prompt_chars` is 5000"):
        ask(served.client("plain"), "x" * 5001)
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(served.client("elsewhere"))
    with pytest.raises(openai.BadRequestError, match="priority"):
        ask(served.client("plain"), extra_body={"priority": -5})

    assert too_long.value.code == "context_length_exceeded"
    assert unknown.value.code == "model_not_found"
    assert list(served.client("elsewhere").models.list()) == []
    assert [model.id for model in served.client("plain").models.list()] == ["apar-tiny"]


def cached(served: Served, token: str, **fields: Any) -> int:
    """Tokens of the prompt that were found in the cache."""
    usage = ask(served.client(token), LONG_PROMPT, max_tokens=1, **fields).usage
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def test_no_key_finds_another_keys_prompts_in_the_cache(served: Served) -> None:
    assert cached(served, "plain") == 0
    own = cached(served, "plain")
    other = cached(served, "other")
    salted = cached(served, "plain", extra_body={"cache_salt": "mine"})

    assert own > 32
    assert other == 0
    assert salted == 0
    assert cached(served, "plain", extra_body={"cache_salt": "mine"}) == own
    assert cached(served, "other", extra_body={"cache_salt": "mine"}) == 0


@pytest.mark.slow
def test_keys_are_rolled_out_and_requests_shown_where_no_folder_is_set(tmp_path: Path) -> None:
    def record(name: str, **fields: Any) -> dict[str, Any]:
        return key(name, **fields).model_dump(mode="json", exclude_unset=True)

    with serving(tmp_path, TINY, keys=[record("old")]) as server:
        running = Served(server, tmp_path)
        stream = ask(running.client("old"), max_tokens=800, stream=True)
        next(iter(stream))

        server.write(TINY, keys=[record("new", requests_per_minute=1)])
        said = server.roll_out()
        wait_for_a_new_minute()
        ask(running.client("new"), extra_headers={"x-request-id": "rolled-out"})
        with pytest.raises(openai.AuthenticationError):
            ask(running.client("old"))
        with pytest.raises(openai.RateLimitError):
            ask(running.client("new"))
        rest = list(stream)
        shown = wait_for(server.log, '"request_id": "rolled-out"', server.process)

    assert "keys is changed" in said
    assert rest[-1].choices[0].finish_reason == "stop"
    line = next(line for line in shown.splitlines() if '"rolled-out"' in line)
    assert json.loads(line)["key"] == "new"
