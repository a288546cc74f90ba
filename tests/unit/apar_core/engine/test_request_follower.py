"""Requests of the engine belong to a client's request by the ids that vLLM derives."""

import pytest

from apar_core.engine.request_follower import beam_search_of, find_client

TABLE = {"chatcmpl-a-r12345678": 1, "chatcmpl-x-ab-beam-r12345678": 2, "cmpl-b-7": 3}


@pytest.mark.parametrize(
    ("external_id", "entry"),
    [
        ("chatcmpl-a-r12345678", 1),
        ("chatcmpl-a-r12345678-0", 1),
        ("chatcmpl-a-r12345678-0af3-beam-4", 1),
        ("chatcmpl-x-ab-beam-r12345678", 2),
        ("chatcmpl-x-ab-beam-r12345678-1", 2),
        ("cmpl-b-7", 3),
        ("cmpl-b-7-2", 3),
        ("cmpl-b", None),
        ("chatcmpl-x", None),
    ],
)
def test_a_request_of_the_engine_is_found_by_its_clients_id(
    external_id: str, entry: int | None
) -> None:
    assert find_client(TABLE, external_id) == entry


def test_an_id_that_looks_like_a_beam_is_matched_exactly_first() -> None:
    assert find_client({"chatcmpl-x-ab-beam-12345678": 1}, "chatcmpl-x-ab-beam-12345678") == 1
    assert beam_search_of("chatcmpl-x-ab-beam-r12345678") is None
