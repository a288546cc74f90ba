"""Charges for requests that were refused, cut or lost, and refusals at a key's own cap."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config.key_store import KeyStoreConfig
from deployments.gateway.callers import Caller
from deployments.gateway.fair_queue import Ticket
from deployments.gateway.models import Model
from deployments.relay.relay import Progress
from deployments.wire.errors import NoReplicaError, ReplicaLostError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Headers, Piece, ResponseEnd, ResponseStart
from tests.fakes.replicas import (
    CHAT,
    EVENTS,
    JSON,
    FakeReplicas,
    answering,
    bearer,
    client,
    client_of,
    gateway_of,
    key,
    settled,
)

# Otherwise a minute may end between two requests, and the remaining units change.
pytestmark = pytest.mark.usefixtures("advance")


async def remaining(http: httpx.AsyncClient) -> tuple[str, str]:
    """Requests and tokens that key `a` has left; asking counts as a request."""
    headers = (await http.post(CHAT, json={"model": "none"}, headers=bearer("a"))).headers
    return headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]


@pytest.mark.parametrize("max_queued", [0, 1])
async def test_a_request_that_never_leaves_the_queue_is_refunded(max_queued: int) -> None:
    replicas = answering()
    replicas.gate.clear()
    limited = key("a", requests_per_minute=9, tokens_per_minute=900)
    http = client(replicas, keys=(limited, key("b")), max_queued=max_queued)
    tasks = await settled(http, ("b", {}), ("b", {}), ("a", {"prompt": "x" * 400}))

    if max_queued:
        assert await remaining(http) == ("7", "796")
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
    else:
        assert (await tasks[2]).status_code == 503

    assert await remaining(http) == ("7" if max_queued else "8", "900")
    replicas.gate.set()
    await asyncio.gather(*tasks[:2])


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request's cost was known at its end."""
    known: list[bool] = []
    leave = Ticket.leave

    def noted(ticket: Ticket, *, cost_is_known: bool = True) -> None:
        known.append(cost_is_known)
        leave(ticket, cost_is_known=cost_is_known)

    monkeypatch.setattr(Ticket, "leave", noted)
    return known


async def test_a_client_that_leaves_before_a_replica_is_called_pays_nothing(
    left: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: Caller) -> Headers:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    replicas = answering()
    limited = key("a", requests_per_minute=9, tokens_per_minute=900)
    gateway = gateway_of(replicas, keys=(limited,))
    http = client_of(gateway)
    with monkeypatch.context() as patched:
        patched.setattr(Caller, "rate_headers", never)
        [task] = await settled(http, ("a", {"prompt": "x" * 400}))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert (left, replicas.requests) == ([], [])
    assert await remaining(http) == ("8", "900")
    assert gateway.waiting()["Replica-m"].running == 0


async def test_the_cost_of_a_whole_answer_whose_client_left_is_unknown(left: list[bool]) -> None:
    replicas = answering()
    replicas.gate.clear()
    http = client(replicas)
    [task] = await settled(http, ("a", {}))

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert left == [False]


@pytest.mark.parametrize(
    ("parts", "streaming", "known", "tokens"),
    [
        ([ReplicaLostError("dead")], False, False, "900"),
        ([ReplicaLostError("dead")], True, False, "900"),
        # A stream has reported all of its tokens.
        (
            [ResponseStart(200, EVENTS, b"x", num_tokens=5), ReplicaLostError("dead")],
            True,
            True,
            "791",
        ),
        ([ResponseStart(400, JSON, b"{}")], True, True, "900"),
        ([ResponseStart(200, EVENTS, b"x"), Piece(b"y", num_tokens=5)], True, True, "880"),
    ],
)
async def test_the_cost_of_a_lost_answer_is_unknown_unless_it_was_streamed(
    left: list[bool], parts: list[Any], streaming: bool, known: bool, tokens: str
) -> None:
    limited = key("a", requests_per_minute=9, tokens_per_minute=900)
    replicas = FakeReplicas(*parts, end=ResponseEnd(15, 5))
    http = client(replicas, keys=(limited,))

    await http.post(CHAT, json={"stream": streaming, "prompt": "x" * 400}, headers=bearer("a"))

    assert left == [known]
    assert await remaining(http) == ("7", tokens)


class Endless(FakeReplicas):
    """Answers that generate something, and then nothing more; `stops` is set where they stop."""

    def __init__(self, *parts: ResponseStart | Piece) -> None:
        super().__init__(*parts)
        self.stops = asyncio.Event()

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        async for part in super().stream(request):
            if isinstance(part, ResponseEnd):
                self.stops.set()
                await asyncio.get_running_loop().create_future()
            yield part

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        assert progress is not None
        async for part in self.stream(request):
            assert isinstance(part, Piece)
            progress(part.num_tokens, part.prompt_tokens)
        raise AssertionError("an endless answer has ended")


BEGUN = ResponseStart(200, EVENTS, b"x", num_tokens=2, prompt_tokens=15)
LEFT = [
    pytest.param(Endless(), True, 104, 0, id="before the prompt is counted"),
    pytest.param(Endless(), False, 104, 0, id="before the prompt of a whole answer is counted"),
    pytest.param(Endless(BEGUN), True, 15, 2, id="after the start of a stream"),
    pytest.param(Endless(BEGUN, Piece(b"y", (), 3, 17)), True, 17, 5, id="in a stream"),
    pytest.param(
        Endless(Piece(b"", (), 0, 15), Piece(b"", (), 5, 15)), False, 15, 5, id="in a whole answer"
    ),
]


@pytest.mark.parametrize(("replicas", "streaming", "prompt", "generated"), LEFT)
async def test_a_client_that_leaves_pays_for_its_prompt_and_what_was_generated(
    tmp_path: Path, replicas: Endless, streaming: bool, prompt: int, generated: int
) -> None:
    spent = prompt + generated
    limited = key("a", requests_per_minute=9, tokens_per_minute=900, tokens_per_day=2 * spent)
    store = KeyStoreConfig(path=tmp_path / "keys.db")
    gateway = gateway_of(replicas, keys=(limited,), key_store=store)
    http = client_of(gateway)
    for number in range(2):
        body = {"prompt": "x" * 400, "stream": streaming}
        task = asyncio.create_task(http.post(CHAT, json=body, headers=bearer("a")))
        await replicas.stops.wait()
        replicas.stops.clear()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not number:
            assert await remaining(http) == ("7", str(900 - spent))

    refused = await http.post(CHAT, json={}, headers=bearer("a"))

    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "tokens_per_day_exceeded")
    assert f"has used {2 * spent} of {2 * spent}" in error["message"]
    await gateway.close()


async def test_a_prompt_that_is_lost_with_its_replica_uses_up_no_budget(tmp_path: Path) -> None:
    store = KeyStoreConfig(path=tmp_path / "keys.db")
    replicas = FakeReplicas(ReplicaLostError("dead"))
    http = client(replicas, keys=(key("a", tokens_per_day=1),), key_store=store)

    for _ in range(2):
        lost = await http.post(CHAT, json={"prompt": "x" * 400}, headers=bearer("a"))
        assert lost.status_code == 503


async def test_a_request_that_no_replica_took_is_refunded(tmp_path: Path) -> None:
    limited = key(
        "a", requests_per_minute=9, tokens_per_minute=900, requests_per_day=1, tokens_per_day=500
    )
    gateway = gateway_of(
        FakeReplicas(NoReplicaError("none")),
        keys=(limited,),
        key_store=KeyStoreConfig(path=tmp_path / "keys.db"),
    )
    http = client_of(gateway)

    for _ in range(2):
        answer = await http.post(CHAT, json={"prompt": "x" * 400}, headers=bearer("a"))
        assert answer.json()["error"]["code"] == NoReplicaError.code

    assert await remaining(http) == ("8", "900")
    await gateway.close()


class Dying(FakeReplicas):
    """Generates five tokens and dies, once per death given."""

    def __init__(self, *deaths: ReplicaLostError) -> None:
        super().__init__(end=ResponseEnd(1, 7))
        self.deaths = list(deaths)

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        assert progress is not None
        self.requests.append(request)
        progress(5, 1)
        if self.deaths:
            raise self.deaths.pop(0)
        return ResponseStart(200, JSON, b"{}"), self.end


def hasty(replicas: FakeReplicas, **settings: Any) -> httpx.AsyncClient:
    """A client of a gateway that retries without a pause."""
    gateway = gateway_of(replicas, **settings)
    gateway.retries.first_pause_s = 0.0
    return client_of(gateway)


async def test_tokens_that_are_generated_again_are_charged_once() -> None:
    limited = key("a", requests_per_minute=9, tokens_per_minute=900)
    http = hasty(Dying(ReplicaLostError("gone"), ReplicaLostError("gone")), keys=(limited,))

    answer = await http.post(CHAT, json={"prompt": "x" * 400}, headers=bearer("a"))

    assert answer.status_code == 200
    assert await remaining(http) == ("7", str(900 - 1 - 7))


async def test_a_request_is_not_sent_to_a_third_engine_after_two_have_died() -> None:
    deaths = [
        ReplicaLostError("the engine has died", engine_died=True, replica=replica)
        for replica in ("r1", "r1", "r2", "r3")
    ]
    replicas = Dying(*deaths)

    answer = await hasty(replicas).post(CHAT, json={"model": "m"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "engine_lost_twice")
    assert "Two engines died" in error["message"]
    # OpenAI's clients would otherwise retry.
    assert answer.headers["x-should-retry"] == "false"
    # Twice to the first replica, which accepted requests for a moment after its engine's death.
    assert len(replicas.requests) == 3
    assert len(replicas.deaths) == 1


async def test_a_stream_that_never_began_is_not_sent_to_a_third_engine_either() -> None:
    replicas = FakeReplicas(ReplicaLostError("the engine has died", engine_died=True))

    answer = await hasty(replicas).post(CHAT, json={"model": "m", "stream": True})

    assert (answer.status_code, len(replicas.requests)) == (500, 2)
    assert answer.json()["error"]["code"] == "engine_lost_twice"


async def test_replicas_that_hand_over_a_request_do_not_count_as_dead() -> None:
    replicas = Dying(*[ReplicaLostError("drained") for _ in range(3)])

    answer = await hasty(replicas).post(CHAT, json={"model": "m"})

    assert (answer.status_code, len(replicas.requests)) == (200, 4)


async def test_a_key_at_its_cap_gets_a_429_that_names_it() -> None:
    replicas = answering()
    replicas.gate.clear()
    gateway = gateway_of(replicas, keys=(key("a", max_threads=1),), max_queued=1)
    http = client_of(gateway)
    tasks = await settled(http, ("a", {}), ("a", {}))

    refused = await http.post(CHAT, json={}, headers=bearer("a"))
    waiting = gateway.waiting()["Replica-m"]
    replicas.gate.set()
    await asyncio.gather(*tasks)

    assert (waiting.waiting, waiting.num_startable) == ({"a": 1}, 0)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("threads", "rate_limit_exceeded")
    assert "`max_threads` of 1" in error["message"]


async def test_all_prompts_of_a_request_are_counted_at_admission() -> None:
    replicas = answering()
    replicas.gate.clear()
    limited = key("a", requests_per_minute=9, tokens_per_minute=1000)
    http = client(replicas, keys=(limited,))
    [task] = await settled(http, ("a", {"prompt": ["x" * 4, "y" * 3196]}))

    assert await remaining(http) == ("7", "200")
    replicas.gate.set()
    await task


async def test_a_failure_of_the_gateway_before_the_answer_has_openais_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> Ticket:
        raise KeyError("a bug")

    monkeypatch.setattr(Model, "enter", fail)

    answer = await client(answering()).post(CHAT, json={})

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "a bug" not in answer.text
    assert "a bug" in caplog.text


COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            COMPLETIONS,
            {"prompt": ["x"] * 1024, "n": 32},
            "prompt",
            "asks for 32768 sequences (prompts times answers: `prompt` 1024 and `n` 32); the limit "
            "`max_concurrency` of this model is 2.",
        ),
        (CHAT, {"n": "3"}, "n", "asks for 3 sequences (prompts times answers: `n` 3)"),
        (COMPLETIONS, {"prompt": [[1], [2], [3]]}, "prompt", "asks for 3 sequences"),
        (CHAT, {"n": 2}, "n", "the limit `max_threads` of this key is 1."),
    ],
)
async def test_a_request_of_more_sequences_than_may_run_is_refused(
    path: str, body: dict[str, Any], param: str, message: str
) -> None:
    replicas = answering()
    max_threads = 1 if body == {"n": 2} else None
    http = client(replicas, keys=(key("a", max_threads=max_threads),))

    refused = await http.post(path, json=body, headers=bearer("a"))

    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (
        400,
        "invalid_request_error",
        param,
    )
    assert message in error["message"]
    assert replicas.requests == []


async def test_a_request_of_several_sequences_leaves_no_room_for_others() -> None:
    replicas = answering()
    replicas.gate.clear()
    gateway = gateway_of(replicas, keys=(key("a"), key("b", max_threads=2)), max_queued=9)
    http = client_of(gateway)
    tasks = await settled(http, ("a", {"n": 2}), ("b", {}), ("b", {"n": 2}))

    (state,) = gateway.waiting().values()
    assert (state.running, state.num_sequences, state.waiting) == (1, 2, {"b": 2})
    need = gateway.needs()
    assert (need["Replica-m"].running, need["Replica-m/b"].waiting) == (2, 3)
    replicas.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3


async def test_a_long_list_of_inputs_for_embeddings_takes_all_slots() -> None:
    replicas = answering()
    replicas.gate.clear()
    gateway = gateway_of(replicas, keys=(key("a"),))
    http = client_of(gateway)
    task = asyncio.create_task(
        http.post("/v1/embeddings", json={"input": ["x"] * 99}, headers=bearer("a"))
    )
    await asyncio.sleep(0.01)

    (state,) = gateway.waiting().values()
    assert (state.running, state.num_sequences) == (1, 2)
    replicas.gate.set()
    assert (await task).status_code == 200


async def test_the_key_whose_prompts_are_longer_gets_fewer_turns() -> None:
    """Each answer has 2 tokens; 198 prompt tokens cost 99, so that a request costs 101 or 2."""

    class Long(FakeReplicas):
        async def whole(
            self, request: RelayedRequest, progress: Progress | None = None
        ) -> tuple[ResponseStart, ResponseEnd]:
            start, _ = await super().whole(request, progress)
            return start, ResponseEnd(198 if request.terms.key == "long" else 0, 2)

    replicas = Long(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    gateway = gateway_of(replicas, keys=(key("long"), key("short")), max_queued=99)
    http = client_of(gateway)
    bodies = {"long": {"prompt": "x" * 792}, "short": {}}
    tasks = await settled(http, *[(name, bodies[name]) for name in ("long", "short") * 12])
    replicas.gate.set()
    await asyncio.gather(*tasks)

    order = [request.terms.key for request in replicas.requests]
    # Before the second request of the long key, the short one has had nearly all of its own.
    assert order[:14].count("short") >= 11
