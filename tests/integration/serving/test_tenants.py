"""Usage, budgets and run-time keys of a real server, and secrets that it must not show."""

import asyncio
import base64
import json
import os
import re
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.tools import needs
from tests.fakes.waiting import wait_until
from tests.integration.serving.apar_process import (
    ENGINE,
    GATEWAY,
    STOP_S,
    TINY,
    Server,
    held,
    serving,
)
from tests.integration.serving.serve_and_look import SHOWN
from tests.integration.serving.shared_server import key
from tests.unit.cluster.test_local_ray import new_certificate

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LIST_PROMPT = "Give me 5 tips for sleeping well."
# Time for a busy machine to generate the first token.
DEADLINE_S = 8.0
ADMIN = "root-apar-sentinel-of-the-admin"
KEYS = (
    key("root-key") | {"hash": key(ADMIN)["hash"], "admin": True},
    key("plain"),
    key("few", requests_per_day=2),
)


def apar_keys(server: Server, *arguments: str, token: str = ADMIN) -> str:
    """Run `apar keys` against the server as its admin; return what it prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", "keys", *arguments, "--url", server.url],
        env=os.environ | {"APAR_ADMIN_KEY": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ran.stdout + ran.stderr


def ask(server: Server, token: str, **fields: Any) -> Any:
    return server.openai(token).chat.completions.create(
        model="apar-tiny",
        messages=[{"role": "user", "content": LIST_PROMPT}],
        temperature=0,
        **({"max_tokens": 40} | fields),
    )


def usage(server: Server, name: str) -> dict[str, Any]:
    """Return the counters of a key, summed over days and models."""
    answer = server.request("GET", "/admin/usage", token=ADMIN, params={"key": name})
    rows = answer.json()["data"]
    counters = ("requests", "errors", "refused", "prompt_tokens", "generated_tokens", "threads")
    return {counter: sum(row[counter] for row in rows) for counter in counters}


def written(path: Path, name: str) -> int:
    """Return the number of a key's requests in the store's file."""
    with closing(sqlite3.connect(path)) as store:
        query = "SELECT total(requests) FROM usage WHERE key = ?"
        return int(store.execute(query, (name,)).fetchone()[0])


def test_keys_and_usage_of_a_server_outlive_it(tmp_path: Path) -> None:
    fields = {
        "keys": list(KEYS),
        "key_store": {"path": str(tmp_path / "keys.db"), "flush_s": 0.5},
        "metrics": {"port": 0},
        "logging": {"folder": str(tmp_path / "logs")},
    }
    (tmp_path / "first").mkdir()
    with serving(tmp_path / "first", TINY, **fields) as server:
        created = apar_keys(server, "create", "alice", "--tokens-per-day", "100000")
        token = re.search(r"apar-[\w-]{43}", created)
        assert token is not None, created
        alice = token[0]
        whole = ask(server, alice)
        stream = ask(server, alice, stream=True, stream_options={"include_usage": True})
        streamed = [chunk.usage for chunk in stream if chunk.usage][-1]
        with pytest.raises(openai.NotFoundError):
            server.openai(alice).completions.create(model="nothing", prompt="x")
        for _ in range(2):
            ask(server, "few", max_tokens=2)
        with pytest.raises(openai.RateLimitError, match="which renews at") as over:
            ask(server, "few")
        assert over.value.code == "requests_per_day_exceeded"
        counted = usage(server, "alice")
        assert counted["requests"] == 2
        assert counted["refused"] == 1
        assert counted["prompt_tokens"] == whole.usage.prompt_tokens + streamed.prompt_tokens
        least = whole.usage.completion_tokens + streamed.completion_tokens
        assert counted["generated_tokens"] >= least
        table = apar_keys(server, "usage", "--key", "alice")
        assert re.search(r"alice\s+apar-tiny\s+2\s+0\s+0", table), table
        report = json.loads(apar_keys(server, "usage", "--json"))
        assert {row["key"] for row in report["data"]} == {"alice", "few"}
        assert "alice" in apar_keys(server, "list")
        # Just before a clean stop: nothing may be lost.
        ask(server, alice)

    (tmp_path / "second").mkdir()
    with serving(tmp_path / "second", TINY, **fields) as server:
        assert usage(server, "alice")["requests"] == 3
        ask(server, alice)
        wait_until(lambda: written(tmp_path / "keys.db", "alice") == 4)
        # A killed gateway loses nothing that was written, and its successor knows the keys.
        (gateway,) = server.processes(GATEWAY)
        gateway.kill()
        gateway.wait(STOP_S)
        server.wait_for_replicas(1)
        assert usage(server, "alice")["requests"] == 4
        assert "Revoked alice" in apar_keys(server, "revoke", "alice")
        with pytest.raises(openai.AuthenticationError):
            ask(server, alice)
        with pytest.raises(openai.RateLimitError):
            ask(server, "few")
        assert "no admin's" in apar_keys(server, "list", token="plain")
        _check_secrets(server, tmp_path, alice, ADMIN)


async def test_answers_end_at_their_deadlines_and_leave_no_block(tmp_path: Path) -> None:
    fields = {"keys": [key("plain", best_priority=-2)], "metrics": {"port": 0}}
    fields["key_store"] = {"path": str(tmp_path / "keys.db")}
    with serving(tmp_path, TINY | {"max_concurrency": 8}, **fields) as server:
        ask(server, "plain", max_tokens=1, extra_body={"priority": -2})
        due = {"enabled": False, "deadline_ms": round(DEADLINE_S * 1000)}
        endless: dict[str, Any] = {
            "max_tokens": 1900,
            "extra_body": {"ignore_eos": True, "apar": due},
        }
        engines = server.processes(ENGINE)

        # The engine is held from the first tokens until after the deadline.
        with ThreadPoolExecutor(1) as executor:
            asked = executor.submit(ask, server, "plain", **endless)
            wait_until(lambda: server.loads()[0]["threads"])
            with held(engines):
                await asyncio.sleep(DEADLINE_S)
            whole = asked.result()
        stream = ask(server, "plain", stream=True, **endless)
        chunks = [next(iter(stream))]
        with held(engines):
            await asyncio.sleep(DEADLINE_S)
        chunks += stream
        with held(engines):
            late = server.post(
                "/v1/chat/completions",
                json={"model": "apar-tiny", "messages": [{"role": "user", "content": LIST_PROMPT}]},
                headers={"x-apar-first-token-deadline-ms": "1"},
            )
        async with server.async_client() as client:
            # Forked answers, more than run at once, of which each ends somewhere else.
            answers = await asyncio.gather(
                *(
                    client.post(
                        "/v1/chat/completions",
                        json={
                            "model": "apar-tiny",
                            "messages": [{"role": "user", "content": LIST_PROMPT}],
                            "max_tokens": 400,
                            "stream": number % 2 == 0,
                            "apar": {"deadline_ms": 50 + 150 * number},
                        },
                    )
                    for number in range(24)
                )
            )

        assert whole.choices[0].finish_reason == "length"
        assert 0 < whole.usage.completion_tokens < 1900
        assert chunks[-1].choices[0].finish_reason == "length"
        assert (late.status_code, late.json()["error"]["code"]) == (
            503,
            "first_token_deadline_exceeded",
        )
        codes = {answer.status_code for answer in answers}
        assert codes <= {200, 503}
        for answer in answers:
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "deadline_exceeded"
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
        server.wait_until_idle()
        with pytest.raises(openai.BadRequestError, match="priority"):
            ask(server, "plain", extra_body={"priority": -3})


@needs("openssl")
def test_a_server_speaks_https_and_lets_pages_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, private = new_certificate(tmp_path, "server")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    fields = {
        "keys": [key("plain")],
        "key_store": {"path": str(tmp_path / "keys.db")},
        "metrics": {"port": 0},
        "tls": {"certificate": str(certificate), "key": str(private)},
        "cors": {"origins": ["https://chat.example.org"]},
    }
    with serving(tmp_path, TINY, **fields) as plain:
        server = replace(plain, url=plain.url.replace("http:", "https:"))
        assert "Ready" in server.log.read_text()
        assert f"{server.url}/v1" in server.log.read_text()
        assert ask(server, "plain").choices[0].message.content
        chunks = list(ask(server, "plain", stream=True))
        assert chunks[-1].choices[0].finish_reason
        preflight = httpx.options(
            f"{server.url}/v1/chat/completions",
            headers={
                "origin": "https://chat.example.org",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            },
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example.org"
        new_certificate(tmp_path, "server")
        assert "Rolled out" in server.roll_out()
        # Trusted now is the renewed certificate only.
        assert ask(server, "plain").choices[0].message.content
        with pytest.raises(httpx.HTTPError):
            httpx.get(plain.url).raise_for_status()


def _check_secrets(server: Server, folder: Path, *secrets: str) -> None:
    """Send the secrets through everything, and look for them in every output."""
    said = []
    for secret in secrets:
        for method, path, headers in (
            ("GET", "/v1/models", {}),
            ("GET", f"/{secret if secret.startswith('apar-') else ''}x", {}),
            ("POST", "/v1/chat/completions", {"x-request-id": "a b"}),
            ("POST", "/v1/embeddings", {"x-request-id": secret[:48] if secret[0] == "a" else ""}),
            ("POST", "/admin/keys", {}),
            ("DELETE", f"/admin/keys/{secret}", {}),
            ("GET", "/admin/keys", {}),
            ("GET", "/admin/usage", {}),
            ("GET", "/openapi.json", {}),
            ("GET", "/health", {"x-api-key": secret}),
            ("GET", "/nothing", {"authorization": f"Basic {secret}"}),
            ("GET", "/metrics", {"cookie": secret}),
        ):
            answer = server.request(
                method, path, token=secret, headers=headers, content=b'{"model": 1,'
            )
            # A request's own path may come back to its sender; nothing else may.
            if secret not in path and "x-request-id" not in headers:
                said.append(answer.text + str(answer.headers))
        answer = server.request("GET", "/v1/models", token=secret + "x")
        said.append(answer.text + str(answer.headers))
    said += [apar_keys(server, "list"), apar_keys(server, "usage"), *server.answers(SHOWN)]
    metrics = re.search(r"http://[\d.]+:\d+/metrics", server.log.read_text())
    assert metrics is not None
    said.append(httpx.get(metrics[0], timeout=30).text)
    said.append(server.log.read_text(errors="replace"))
    said += [file.read_text(errors="replace") for file in (folder / "logs").iterdir()]
    said += [file.read_bytes().decode("latin-1") for file in folder.glob("keys.db*")]
    for secret in secrets:
        forms = [base64.b64encode(b"x" * offset + secret.encode())[4:-4] for offset in range(3)]
        for form in [secret, *map(bytes.decode, forms)]:
            for text in said:
                assert form not in text, text[max(0, text.find(form) - 200) :][:400]
