"""The Batch API of a gateway, asked by OpenAI's client and by clients that send anything."""

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from deployments.config.batches import BatchesConfig
from deployments.config.key_store import KeyStoreConfig
from deployments.gateway.batches.api import MAX_UPLOADS
from deployments.gateway.batches.store import SqliteBatches
from deployments.gateway.gateway import Gateway
from deployments.wire.own_routes import OWN_OPERATIONS
from deployments.wire.response import ResponseEnd, ResponseStart
from tests.fakes.batch_records import CHAT, jsonl, line_of
from tests.fakes.replicas import JSON, FakeReplicas, answering, bearer, client_of, gateway_of, key
from tests.fakes.waiting import LIMIT_S, until

END = ResponseEnd(prompt_tokens=30, generated_tokens=50, threads=4, forks=3)
Make = Callable[..., Gateway]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Make a gateway with the keys alice and bob, whose batches run."""
    made: list[Gateway] = []

    def gateway(replicas: FakeReplicas | None = None, **given: Any) -> Gateway:
        database = KeyStoreConfig(path=tmp_path / "keys.db")
        fields: dict[str, Any] = {
            "max_queued": 100,
            "keys": (key("alice"), key("bob")),
            "key_store": database,
            "batch_store": database,
            "batches": BatchesConfig(),
        }
        made.append(gateway_of(replicas or answering(end=END), **fields | given))
        made[-1].start()
        return made[-1]

    yield gateway
    for each in made:
        await each.close()


def openai_of(gateway: Gateway, name: str = "alice") -> openai.AsyncOpenAI:
    http: Any = client_of(gateway)
    return openai.AsyncOpenAI(
        base_url="http://gateway/v1",
        api_key=name,
        http_client=http,
        max_retries=0,
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(LIMIT_S):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def run(client: openai.AsyncOpenAI, data: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    given: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"} | fields
    return await client.batches.create(input_file_id=file.id, **given)


async def test_openais_client_uploads_runs_and_reads_a_batch(make: Make) -> None:
    gateway = make()
    client = openai_of(gateway)
    data = jsonl([line_of("one"), line_of("two")])

    file = await client.files.create(
        file=("in.jsonl", data),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"a": "b"},
    )
    done = await ended(client, batch.id)

    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert batch.status in ("validating", "in_progress")
    assert (done.status, done.metadata, done.errors) == ("completed", {"a": "b"}, None)
    assert done.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}
    content = (await client.files.content(done.output_file_id)).content
    output = await client.files.retrieve(done.output_file_id)
    assert output.bytes == len(content)
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == ["one", "two"]
    assert (await client.files.content(file.id)).content == data
    assert {each.id async for each in client.files.list(limit=1)} == {file.id, output.id}
    assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
    deleted = await client.files.delete(file.id)
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


async def test_a_key_uploads_few_files_at_once_and_keeps_a_limited_number(make: Make) -> None:
    http = client_of(make(batches=BatchesConfig(max_files=2)))
    boundary = "x" * 20
    headers = bearer("alice") | {"content-type": f"multipart/form-data; boundary={boundary}"}
    may_end = asyncio.Event()
    part = "--{}\r\ncontent-disposition: form-data; name={}\r\n\r\n{}\r\n"

    async def slow() -> AsyncIterator[bytes]:
        yield part.format(boundary, "purpose", "batch").encode()
        await may_end.wait()
        yield part.format(boundary, "file; filename=a", "{}").encode()
        yield f"--{boundary}--\r\n".encode()

    uploads = [
        asyncio.create_task(http.post("/v1/files", content=slow(), headers=headers))
        for _ in range(MAX_UPLOADS + 1)
    ]
    [refused], _ = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
    may_end.set()
    answers = await asyncio.gather(*uploads)
    [file_id, _] = [each.json()["id"] for each in answers if each.status_code == 200]
    fields = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = await http.post("/v1/batches", json=fields, headers=bearer("alice"))

    assert refused.result().status_code == 429
    assert refused.result().json()["error"]["code"] == "too_many_uploads"
    assert int(refused.result().headers["retry-after"]) >= 1
    codes = Counter(each.json().get("error", {}).get("code") for each in answers)
    assert codes == {None: 2, "too_many_uploads": 1, "storage_limit_exceeded": MAX_UPLOADS - 2}
    assert (batch.status_code, batch.json()["error"]["code"]) == (413, "storage_limit_exceeded")


async def test_lines_are_charged_to_the_key_as_other_requests_are(make: Make) -> None:
    replicas = answering(end=END)
    gateway = make(replicas)
    client = openai_of(gateway)
    await ended(client, (await run(client, jsonl([line_of("1"), line_of("2")]))).id)

    await gateway.callers.ledger.flush()
    assert gateway.callers.store is not None
    [(row, usage)] = await gateway.callers.store.report("2000-01-01", "2100-01-01")

    assert (row.key, row.model) == ("alice", "m")
    assert (usage.requests, usage.prompt_tokens, usage.generated_tokens) == (2, 60, 100)
    terms = [request.terms for request in replicas.requests]
    assert {each.key for each in terms} == {"alice"}
    assert {each.priority for each in terms} == {1001}
    assert all(each.request_id.startswith("batch_req_") for each in terms if each.request_id)


async def test_a_line_over_the_budget_gets_the_error_of_the_budget(make: Make) -> None:
    limited = (key("alice", requests_per_month=2),)
    client = openai_of(make(keys=limited))
    done = await ended(client, (await run(client, jsonl(map(line_of, "1234")))).id)

    # The next month may begin before the batch expires: its lines then wait, and run.
    if done.request_counts.failed:
        assert done.request_counts.completed == 2
        errors = (await client.files.content(done.error_file_id)).content.splitlines()
        responses = [json.loads(error)["response"] for error in errors]
        codes = {response["body"]["error"]["code"] for response in responses}
        assert codes == {"requests_per_month_exceeded"}


async def test_a_batch_leaves_half_of_the_rate_to_other_requests(
    make: Make, tmp_path: Path
) -> None:
    gateway = make(keys=(key("alice", requests_per_minute=20),))
    http = client_of(gateway)
    batch = await run(openai_of(gateway), jsonl(line_of(str(number)) for number in range(30)))
    # Two of twenty were needed to create the batch, and ten must be left.
    store = SqliteBatches(tmp_path / "keys.db")
    async with asyncio.timeout(LIMIT_S):
        while len(await store.answered(batch.id, 1, 30)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await store.close()

    answers = [
        await http.post(CHAT, json=line_of("x")["body"], headers=bearer("alice")) for _ in range(8)
    ]

    assert {answer.status_code for answer in answers} == {200}


async def test_a_request_goes_before_all_waiting_lines(make: Make) -> None:
    replicas = answering(end=END)
    replicas.gate.clear()
    gateway = make(replicas, max_queued=6)
    client, http = openai_of(gateway), client_of(gateway)
    await run(client, jsonl(line_of(str(number)) for number in range(20)))
    # Two lines run, the queue is full of others.
    await until(lambda: len(replicas.requests) == 2)
    await until(lambda: gateway.waiting()["Replica-m"].num_lines == 6)

    asked = [
        asyncio.create_task(http.post(CHAT, json=line_of("x")["body"], headers=bearer(name)))
        for name in ("bob", "alice", "bob")
    ]
    await until(lambda: gateway.waiting()["Replica-m"].num_lines == 3)
    replicas.gate.set()
    answers = await asyncio.gather(*asked)

    assert [answer.status_code for answer in answers] == [200] * 3
    priorities = [request.terms.priority for request in replicas.requests]
    assert priorities[:5] == [1001, 1001, 0, 0, 0]


async def test_only_the_key_that_made_it_sees_a_file_or_batch(make: Make) -> None:
    gateway = make()
    alice, bob = openai_of(gateway), openai_of(gateway, "bob")
    batch = await run(alice, jsonl([line_of("1")]))
    done = await ended(alice, batch.id)

    for ask in (
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.files.retrieve(batch.input_file_id),
        lambda: bob.files.content(done.output_file_id),
        lambda: bob.files.delete(batch.input_file_id),
        lambda: run_with(bob, batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask()
    assert (await bob.files.list()).data == []
    assert (await bob.batches.list()).data == []


async def run_with(client: openai.AsyncOpenAI, file_id: str) -> Any:
    return await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )


async def test_a_server_without_keys_has_batches_for_everyone(make: Make) -> None:
    replicas = answering(end=END)
    gateway = make(replicas, keys=(), key_store=None)
    client = openai_of(gateway, "anything")
    done = await ended(client, (await run(client, jsonl([line_of("1")]))).id)

    assert done.status == "completed"
    [request] = replicas.requests
    terms = request.terms.key_terms()
    assert terms is not None
    assert (terms.key, terms.priority) == (None, 1001)


async def test_a_cancelled_batch_stops_at_the_replicas(make: Make) -> None:
    replicas = answering(end=END)
    replicas.gate.clear()
    client = openai_of(make(replicas))
    batch = await run(client, jsonl(line_of(str(number)) for number in range(9)))
    await until(lambda: len(replicas.requests) == 2)

    with pytest.raises(openai.ConflictError, match="still reads"):
        await client.files.delete(batch.input_file_id)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    assert (await ended(client, batch.id)).status == "cancelled"
    assert replicas.num_closed == 2
    with pytest.raises(openai.ConflictError, match="cancelled"):
        await client.batches.cancel(batch.id)


async def test_errors_of_the_replicas_are_in_the_error_file(make: Make) -> None:
    refusal = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": None}})
    client = openai_of(make(FakeReplicas(ResponseStart(400, JSON, refusal.encode()))))
    done = await ended(client, (await run(client, jsonl([line_of("1")]))).id)

    assert (done.output_file_id, done.request_counts.failed) == (None, 1)
    error = json.loads((await client.files.content(done.error_file_id)).content)
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["message"] == "no"


async def test_a_failed_batch_names_line_and_field(make: Make) -> None:
    client = openai_of(make())
    lines = [line_of("1"), line_of("2", url="/v1/embeddings"), line_of("1")]
    done = await ended(client, (await run(client, jsonl(lines))).id)

    assert done.status == "failed"
    assert [(each.line, each.param, each.code) for each in done.errors.data] == [
        (2, "url", "invalid_url"),
        (3, "custom_id", "duplicate_custom_id"),
    ]


FORM = [("purpose", (None, b"batch")), ("file", ("in.jsonl", b"{}\n"))]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        (FORM[1:], 400, "purpose"),
        ([("purpose", (None, b"fine-tune")), FORM[1]], 400, "purpose"),
        (FORM[:1], 400, "file"),
        ([*FORM[:1], ("file", (None, b"{}"))], 400, "file"),
        ([*FORM, FORM[1]], 400, None),
        ([*FORM, ("colour", (None, b"red"))], 400, "colour"),
        ([*FORM, ("expires_after[seconds]", (None, b"60"))], 400, "expires_after"),
        ([*FORM, ("expires_after[seconds]", (None, "\u0663600".encode()))], 400, "expires_after"),
        ([*FORM, ("expires_after[anchor]", (None, b"now"))], 400, "expires_after"),
        ([FORM[0], ("file", ("in.jsonl", b"x" * 1001))], 413, "file"),
        ([FORM[0], ("file", ("in.jsonl", b"x" * 200_000))], 413, "file"),
        ([*FORM[:1], ("purpose", (None, b"x" * 66_000)), FORM[1]], 400, None),
    ],
)
async def test_a_wrong_upload_is_refused_and_leaves_nothing(
    make: Make, fields: Any, status: int, param: str | None
) -> None:
    http = client_of(make(batches=BatchesConfig(max_file_bytes=1000)))

    answer = await http.post("/v1/files", files=fields, headers=bearer("alice"))

    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    listed = await http.get("/v1/files", headers=bearer("alice"))
    assert listed.json()["data"] == []


async def test_limits_on_what_a_key_stores_say_what_to_do(make: Make) -> None:
    limits = BatchesConfig(max_file_bytes=1000, max_key_bytes=1500, max_open_batches=1)
    replicas = answering()
    replicas.gate.clear()
    client = openai_of(make(replicas, batches=limits))
    file = await client.files.create(file=("a", jsonl([line_of("1")])), purpose="batch")
    await client.files.create(file=("a", b"x" * 1000), purpose="batch")

    with pytest.raises(openai.APIStatusError, match="Delete files") as full:
        await client.files.create(file=("a", b"x" * 500), purpose="batch")
    await run_with(client, file.id)
    with pytest.raises(openai.BadRequestError, match="max_open_batches"):
        await run_with(client, file.id)

    assert (full.value.status_code, full.value.code) == (413, "storage_limit_exceeded")


async def test_an_upload_may_be_compressed_but_not_beyond_the_limit(make: Make) -> None:
    http = client_of(make(batches=BatchesConfig(max_file_bytes=1000)))
    for size, status in ((1000, 200), (2**24, 413)):
        form = httpx.Request(
            "POST", "http://x", files={"file": ("f", b"x" * size)}, data={"purpose": "batch"}
        )
        body = gzip.compress(form.read())
        headers = bearer("alice") | {
            "content-type": form.headers["content-type"],
            "content-encoding": "gzip",
        }
        answer = await http.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == status, answer.text


async def test_an_upload_that_stalls_is_a_408_and_leaves_nothing(make: Make) -> None:
    http = client_of(make(batches=BatchesConfig(upload_timeout_s=0.2, keep_days=2)))

    async def stalling() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await asyncio.Event().wait()

    headers = bearer("alice") | {"content-type": "multipart/form-data; boundary=b"}
    answer = await http.post("/v1/files", content=stalling(), headers=headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    sent = await http.post(
        "/v1/files",
        files={"file": ("f", b"x")},
        data={"purpose": "batch"},
        headers=bearer("alice"),
    )
    assert sent.json()["expires_at"] == sent.json()["created_at"] + 2 * 86_400
    listed = await http.get("/v1/files", headers=bearer("alice"))
    assert [each["id"] for each in listed.json()["data"]] == [sent.json()["id"]]


NEW = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/v1/batches", NEW, 404, "file_id"),
        ("POST", "/v1/batches", NEW | {"input_file_id": 1}, 400, "input_file_id"),
        ("POST", "/v1/batches", NEW | {"input_file_id": "\ud800"}, 404, "file_id"),
        ("POST", "/v1/batches", NEW | {"endpoint": "/v1/messages"}, 400, "endpoint"),
        ("POST", "/v1/batches", NEW | {"endpoint": []}, 400, "endpoint"),
        ("POST", "/v1/batches", NEW | {"completion_window": "1h"}, 400, "completion_window"),
        ("POST", "/v1/batches", NEW | {"colour": 1}, 400, "colour"),
        ("POST", "/v1/batches", [], 400, None),
        ("GET", "/v1/batches?limit=0", None, 400, "limit"),
        ("GET", "/v1/batches?limit=101", None, 400, "limit"),
        ("GET", "/v1/batches?after=%ff", None, 400, "after"),
        ("GET", "/v1/batches?order=up", None, 400, "order"),
        ("GET", "/v1/files?colour=1", None, 400, "colour"),
        ("GET", "/v1/batches/batch_1", None, 404, "batch_id"),
        ("GET", "/v1/batches/%F0%9F%A4%96", None, 404, "batch_id"),
        ("POST", "/v1/batches/batch_1/cancel", None, 404, "batch_id"),
        ("DELETE", "/v1/batches/batch_1", None, 405, None),
        ("GET", "/v1/files/file-1/content", None, 404, "file_id"),
        ("GET", "/v1/files/file-1/else", None, 404, None),
        ("GET", "/v1/files//content", None, 404, None),
        ("GET", "/v1/batches/batch_1/id", None, 404, None),
        ("DELETE", "/v1/files/file-1/id", None, 404, None),
        ("POST", "/v1/files/", {}, 404, None),
        ("PUT", "/v1/files", None, 405, None),
        ("POST", "/v1/files", {}, 400, "content-type"),
    ],
)
async def test_wrong_requests_name_the_field(
    make: Make, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    http = client_of(make())

    content = None if body is None else json.dumps(body)

    answer = await http.request(method, path, content=content, headers=bearer("alice"))

    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    unknown = await http.request(method, path, content=content, headers=bearer("mallory"))
    assert unknown.status_code in (401, 404, 405)


@pytest.mark.parametrize(
    "metadata",
    [{"a": 1}, [], "a", {"a" * 65: "b"}, {"a": "b" * 513}, {str(n): "" for n in range(17)}],
)
async def test_wrong_metadata_is_refused(make: Make, metadata: Any) -> None:
    gateway = make()
    file = await openai_of(gateway).files.create(file=("a", b"{}"), purpose="batch")
    body = NEW | {"input_file_id": file.id, "metadata": metadata}

    answer = await client_of(gateway).post("/v1/batches", json=body, headers=bearer("alice"))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


async def test_without_the_batch_api_its_routes_do_not_exist(make: Make) -> None:
    http = client_of(make(batches=BatchesConfig(enabled=False)))

    answer = await http.get("/v1/files", headers=bearer("alice"))

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.sampled_from(
                [
                    b"--b",
                    b"--",
                    b"\r\n",
                    b"\r\n\r\n",
                    b"Content-Disposition: form-data; name=",
                    b'"file"; filename="f"',
                    b'"purpose"',
                    b"batch",
                    b"\x00\xff",
                ]
            ),
            max_size=25,
        ).map(b"".join),
    ),
    kind=st.sampled_from(
        [
            "multipart/form-data; boundary=b",
            "multipart/form-data",
            'multipart/form-data; boundary=""',
            "multipart/form-data; boundary=b; charset=unicode_escape",
            "multipart/form-data; boundary=b; charset=zlib",
        ]
    ),
)
async def test_any_bytes_are_a_file_or_a_clear_error(make: Make, data: bytes, kind: str) -> None:
    http = client_of(make())
    headers = bearer("alice") | {"content-type": kind}

    answer = await http.post("/v1/files", content=data, headers=headers)

    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


async def test_answers_are_as_the_openapi_description_says(make: Make) -> None:
    gateway = make()
    http = client_of(gateway)
    sent = await http.post(
        "/v1/files",
        files={"file": ("f", jsonl([line_of("1")]))},
        data={"purpose": "batch"},
        headers=bearer("alice"),
    )
    file_id = sent.json()["id"]
    body = NEW | {"input_file_id": file_id}
    created = await http.post("/v1/batches", json=body, headers=bearer("alice"))
    batch_id = created.json()["id"]
    await ended(openai_of(gateway), batch_id)
    asked = [
        ("GET", "/v1/files"),
        ("GET", "/v1/files/{file_id}"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/{batch_id}"),
        ("DELETE", "/v1/files/{file_id}"),
    ]
    answers = [("POST", "/v1/files", sent), ("POST", "/v1/batches", created)]
    for method, path in asked:
        url = path.format(file_id=file_id, batch_id=batch_id)
        answers.append((method, path, await http.request(method, url, headers=bearer("alice"))))
    for method, path, answer in answers:
        described = OWN_OPERATIONS[path][method]["responses"]["200"]["content"]
        schema = described["application/json"]["schema"]
        Draft202012Validator(schema).validate(answer.json())
