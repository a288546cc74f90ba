"""The Batch API with OpenAI's client, beside other requests and over the death of gateways."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.local_ray import free_port
from deployments.config.keys import hash_of
from deployments.gateway.batches.store import SqliteBatches
from deployments.metrics import catalogue
from tests.fakes.quick_start import program
from tests.integration.random_checkpoint import write_encoder
from tests.integration.serving.apar_process import (
    ENGINE,
    GATEWAY,
    REQUEST_S,
    TINY,
    TOKEN,
    Server,
    held,
    serving,
)
from tests.integration.serving.metrics_reading import metrics_url, read_when
from tests.unit.deployments.gateway.test_shared_rates import redis

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "apar-tiny",
    "messages": [{"role": "user", "content": "Give me 5 tips for sleeping well."}],
    "max_tokens": 100,
    "ignore_eos": True,
    "temperature": 0,
}
KEYS = [{"name": "plain", "hash": hash_of(TOKEN)}, {"name": "other", "hash": hash_of("other")}]
WAIT_S = 300.0


def jsonl(num_lines: int, *, path: str = CHAT, **fields: Any) -> bytes:
    """A file of equal requests; chats have answers of the same length."""
    body = BODY | fields if path == CHAT else fields
    lines = (
        {"custom_id": f"line-{number}", "method": "POST", "url": path, "body": body}
        for number in range(1, num_lines + 1)
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def start(client: openai.OpenAI, data: bytes, path: str = CHAT) -> Any:
    file = client.files.create(file=("input.jsonl", data), purpose="batch")
    endpoint: Any = path
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def wait(client: openai.OpenAI, batch_id: str, *, num_done: int | None = None) -> Any:
    """Wait until a batch has ended, or has so many answers."""
    deadline = time.monotonic() + WAIT_S
    while True:
        batch: Any = client.batches.retrieve(batch_id)
        ended = batch.status in ("completed", "failed", "expired", "cancelled")
        if ended or (num_done is not None and batch.request_counts.completed >= num_done):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)


def output(client: openai.OpenAI, batch: Any) -> list[Any]:
    content = client.files.content(batch.output_file_id).content
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.ci
def test_a_batch_runs_beside_requests_that_go_first(tmp_path: Path) -> None:
    narrow = TINY | {"max_concurrency": 2, "max_queued_requests": 8}
    with serving(tmp_path, narrow, keys=KEYS) as server:
        client, other = server.openai(), server.openai("other")
        snippet = program("import json", ("docs/batches.md",)).replace('"none"', f'"{TOKEN}"')
        said = subprocess.run(
            [sys.executable, "-c", snippet.replace("http://127.0.0.1:8000", server.url)],
            capture_output=True,
            text=True,
            timeout=REQUEST_S,
            check=False,
        )
        assert said.returncode == 0, said.stderr
        assert "completed BatchRequestCounts(completed=3, failed=0, total=3)" in said.stdout
        assert said.stdout.count("\nsleeping") == 1

        num_lines = 60
        batch = start(client, jsonl(num_lines))
        wait(client, batch.id, num_done=2)
        # Two lines run and eight fill the queue.
        asked = {name: value for name, value in BODY.items() if name != "ignore_eos"}
        answer = other.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        during: Any = client.batches.retrieve(batch.id)
        assert answer.usage is not None
        assert during.status == "in_progress"
        assert during.request_counts.completed < num_lines - 10

        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(batch.id)
        done = wait(client, batch.id)
        assert done.request_counts.model_dump() == {
            "total": num_lines,
            "completed": num_lines,
            "failed": 0,
        }
        answers = output(client, done)
        assert [each["custom_id"] for each in answers] == [
            f"line-{number}" for number in range(1, num_lines + 1)
        ]
        text = answer.choices[0].message.content
        texts = {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
        assert texts == {text}, "greedy answers do not depend on the way"
        logged = server.record(answers[0]["id"])
        assert (logged["batch_id"], logged["key"]) == (batch.id, "plain")
        read_when(
            metrics_url(server),
            lambda page: page.total(catalogue.BATCH_LINES, outcome="completed") == num_lines + 3,
        )

        refused = start(client, jsonl(2, max_tokens=-1))
        failed = wait(client, refused.id)
        assert (failed.status, failed.request_counts.failed) == ("completed", 2)
        errors = client.files.content(failed.error_file_id).content.splitlines()
        assert json.loads(errors[0])["response"]["status_code"] == 400
        cancelled = start(client, jsonl(200))
        wait(client, cancelled.id, num_done=1)
        client.batches.cancel(cancelled.id)
        assert wait(client, cancelled.id).status == "cancelled"
        server.wait_until_idle()


async def stored_results(server: Server, batch_id: str, num_lines: int) -> list[bytes]:
    """Return the results that a batch has in the database."""
    port = server.url.rpartition(":")[2]
    path = server.log.parent / "state" / "apar-serve" / f"keys-{port}.db"
    store = SqliteBatches(path)
    found = await store.results(batch_id, 1, num_lines, has_errors=False)
    await store.close()
    return found


async def test_a_batch_survives_the_death_of_its_gateways(tmp_path: Path) -> None:
    num_lines = 150
    with serving(tmp_path, TINY | {"max_concurrency": 4}, gateways=2, keys=KEYS) as server:
        client = server.openai().with_options(max_retries=10)
        batch = start(client, jsonl(num_lines))
        kept: list[bytes] = []
        # First one of the two, which may run the batch or not; then all, of which one does.
        for num_victims in (1, 2):
            before = len(kept)
            assert wait(client, batch.id, num_done=before + 10).status == "in_progress"
            with held(server.processes(ENGINE)):
                for victim in server.processes(GATEWAY)[:num_victims]:
                    victim.kill()
                kept = await stored_results(server, batch.id, num_lines)
            assert len(kept) >= before + 10
        done = wait(client, batch.id)

        assert (done.status, done.request_counts.completed) == ("completed", num_lines)
        content = client.files.content(done.output_file_id).content
        lines = content.splitlines(keepends=True)
        assert [json.loads(line)["custom_id"] for line in lines] == [
            f"line-{number}" for number in range(1, num_lines + 1)
        ]
        # Among them the completion's id and time: an answered line was not generated again.
        assert set(kept) <= set(lines)
        server.wait_until_idle()


OTHERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "apar-tiny",
        "prompt": "Give me 3 tips for sleeping well.",
        "max_tokens": 60,
        "temperature": 0,
    },
    "/v1/responses": {
        "model": "apar-tiny",
        "input": "Give me 3 tips for sleeping well.",
        "max_output_tokens": 60,
        "temperature": 0,
        "store": False,
    },
    "/v1/embeddings": {"model": "embedding", "input": ["hello", "you"]},
}
"""A request of each endpoint besides chats."""


def content(path: str, answer: Any) -> Any:
    """Return what an answer says, without ids and times."""
    if path == "/v1/embeddings":
        return [each["embedding"] for each in answer["data"]]
    if path == "/v1/responses":
        return [part["text"] for item in answer["output"] for part in item["content"]]
    return [choice["text"] for choice in answer["choices"]]


def test_batches_of_the_other_endpoints_in_redis_outlive_a_gateway(tmp_path: Path) -> None:
    num_lines, port = 40, free_port()
    encoder: dict[str, Any] = {
        "checkpoint": str(write_encoder(tmp_path / "encoder")),
        "name": "embedding",
        "cpu_threads": 1,
        "kv_cache_gib": 0.1,
        "engine": {"enforce_eager": True, "dtype": "float32"},
    }
    narrow = TINY | {"max_concurrency": 4}
    limits = {"rate_storage": f"redis://127.0.0.1:{port}"}
    with (
        redis(port),
        serving(tmp_path, narrow, encoder, gateways=2, keys=KEYS, limits=limits) as server,
    ):
        client = server.openai().with_options(max_retries=10)
        batches = {
            path: start(client, jsonl(num_lines, path=path, **body), path)
            for path, body in OTHERS.items()
        }
        wait(client, batches["/v1/completions"].id, num_done=5)
        with held(server.processes(ENGINE)):
            server.processes(GATEWAY)[0].kill()

        for path, batch in batches.items():
            done = wait(client, batch.id)
            assert (done.status, done.request_counts.completed) == ("completed", num_lines), path
            answers = output(client, done)
            assert [each["custom_id"] for each in answers] == [
                f"line-{number}" for number in range(1, num_lines + 1)
            ]
            direct = content(path, server.post(path, json=OTHERS[path]).json())
            assert len(direct) > 0
            if path == "/v1/embeddings":
                direct = [pytest.approx(each, abs=1e-5) for each in direct]
            for each in answers:
                assert content(path, each["response"]["body"]) == direct, path
        # Nothing went into a file instead.
        assert not list((tmp_path / "state").rglob("keys-*.db"))
        server.wait_until_idle()
