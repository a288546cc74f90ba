"""Tokens, journal and cost that a replica adds to the parts of an answer."""

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from apar_core.engine.request_follower import RequestFollower
from apar_core.fork_parameters import KeyTerms
from apar_core.journal import ThreadDelta
from apar_core.scheduler.core_state import CoreState
from deployments.replica.answering import FollowedRequest
from deployments.wire.request import RequestTerms
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from tests.fakes.core_states import a_core_state


class FakeEngine:
    """Records the followers and their terms."""

    errored = False

    async def core_state(self) -> CoreState:
        return a_core_state()

    def __init__(self) -> None:
        self.followers: dict[str, RequestFollower] = {}
        self.terms: dict[str, KeyTerms | None] = {}

    def follow(
        self, request_id: str, follower: RequestFollower, terms: KeyTerms | None = None
    ) -> None:
        self.followers[request_id] = follower
        self.terms[request_id] = terms

    def unfollow(self, request_id: str) -> None:
        del self.followers[request_id]

    def end(self, request_id: str) -> bool:
        return False


def followed(terms: RequestTerms) -> tuple[FollowedRequest, RequestFollower]:
    engine = FakeEngine()
    request = FollowedRequest(engine, terms)
    request.begin("chatcmpl-1")
    follower = engine.followers["chatcmpl-1"]
    follower.begin("r", 5, SamplingParams(), choice=None)
    return request, follower


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (RequestTerms(), None),
        (RequestTerms(key="alice"), KeyTerms("alice")),
        (
            RequestTerms(key="alice", key_max_threads=7, priority=2),
            KeyTerms("alice", key_max_threads=7, priority=2),
        ),
    ],
)
def test_the_engine_gets_the_terms_of_the_key(
    terms: RequestTerms, expected: KeyTerms | None
) -> None:
    engine = FakeEngine()

    FollowedRequest(engine, terms).begin("chatcmpl-1")

    assert engine.terms == {"chatcmpl-1": expected}


def test_each_part_has_the_journal_since_the_last_one() -> None:
    request, follower = followed(RequestTerms(keeps_journal=True))

    follower.add(EngineCoreOutput("r", [10, 11]))
    follower.certain(2)
    start = request.start(ResponseStart(200, [], b"a"))
    follower.add(EngineCoreOutput("r", [12]))
    follower.certain(1)
    follower.add(EngineCoreOutput("r~0", [20], finish_reason=FinishReason.STOP))

    assert start == ResponseStart(200, [], b"a", (ThreadDelta((), (10, 11)),), 2, True, 5, 2)
    assert request.piece(b"b") == Piece(
        b"b", (ThreadDelta((), (12,)), ThreadDelta((0,), (20,), 0)), 2, 5, 3
    )
    assert request.piece(b"c") == Piece(b"c", prompt_tokens=5, certain_tokens=3)
    assert request.end() == ResponseEnd(5, 4, 1, 0, 4)


def test_tokens_are_counted_without_a_journal() -> None:
    request, follower = followed(RequestTerms())

    follower.add(EngineCoreOutput("r", [10, 11]))

    assert request.start(ResponseStart(200, [], b"a")) == ResponseStart(
        200, [], b"a", num_tokens=2, prompt_tokens=5
    )


def test_a_continued_request_charges_new_tokens_and_reports_the_whole_cost() -> None:
    request, follower = followed(RequestTerms(resume=(ThreadDelta((), (1, 2, 3)),)))
    follower.replay(begins=True)
    follower.add(EngineCoreOutput("r", [1, 2, 3]))
    follower.replay(begins=False)
    follower.add(EngineCoreOutput("r", [4]))

    assert request.piece(b"").num_tokens == 1
    assert request.end().generated_tokens == 4


def test_a_beam_search_costs_the_tokens_of_all_beams_and_its_prompt_once() -> None:
    engine = FakeEngine()
    request = FollowedRequest(engine, RequestTerms())
    request.begin("chatcmpl-1")
    follower = engine.followers["chatcmpl-1"]
    for beam in ("1-ab-beam-0", "1-cd-beam-0", "1-cd-beam-1"):
        follower.begin_beam("1", 5)
        follower.add(EngineCoreOutput(beam, [10], finish_reason=FinishReason.LENGTH))

    assert follower.take_num_tokens() == 3
    assert request.end() == ResponseEnd(5, 3, 1, 0, 0)


def test_a_request_that_never_reached_the_engine_costs_nothing() -> None:
    engine = FakeEngine()
    request = FollowedRequest(engine, RequestTerms())

    request.close()

    assert request.end() == ResponseEnd()


def test_a_closed_request_is_no_longer_followed() -> None:
    engine = FakeEngine()
    request = FollowedRequest(engine, RequestTerms())
    request.begin("chatcmpl-1")

    request.close()

    assert engine.followers == {}
