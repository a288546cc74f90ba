"""An ASGI application called in process."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from deployments.replica.answering import call_application
from deployments.wire.request import RelayedRequest
from deployments.wire.response import ResponseStart
from tests.fakes.whole_response import whole_response

pytestmark = pytest.mark.usefixtures("simulated_time")
REQUEST = RelayedRequest("POST", "/v1/completions", b"a=b", [(b"x", b"y")], b"body")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 201, "headers": scope["headers"]})
    await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": scope["query_string"], "more_body": False})


async def test_a_whole_answer_is_joined() -> None:
    assert await whole_response(echo, REQUEST) == ResponseStart(201, [(b"x", b"y")], b"bodya=b")


async def test_a_stream_yields_output_as_soon_as_it_is_there() -> None:
    steps = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await steps.wait()
        await send({"type": "http.response.body", "body": b"2", "more_body": True})
        await send({"type": "http.response.body", "body": b"3", "more_body": False})

    parts = call_application(slow, REQUEST)
    assert await anext(parts) == ResponseStart(200, [], b"1")
    steps.set()

    assert [part async for part in parts] == [b"23"]


async def test_closing_the_iterator_lets_the_application_clean_up() -> None:
    cleaned_up = False

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal cleaned_up
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.sleep(0.01)
        cleaned_up = True

    parts = call_application(forever, REQUEST)
    await anext(parts)
    await parts.aclose()

    assert cleaned_up


async def test_cancelling_is_a_disconnect() -> None:
    seen: list[str] = []

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        seen.append((await receive())["type"])

    task = asyncio.create_task(whole_response(forever, REQUEST))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises((asyncio.CancelledError, RuntimeError)):
        await task

    assert seen == ["http.disconnect"]


async def test_an_error_in_the_application_is_raised() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await whole_response(broken, REQUEST)


async def test_the_scope_lets_starlette_listen_for_the_disconnect() -> None:
    version = REQUEST.scope()["asgi"]["spec_version"]

    assert tuple(int(part) for part in version.split(".")) < (2, 4)
