"""Which requests can go on at another replica."""

import json
from typing import Any

import pytest

from deployments.relay.continuation import can_continue
from deployments.wire.request import RelayedRequest

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"prompt": "a"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"echo": True}, False),
        ({"return_token_ids": True}, False),
        ({"use_beam_search": True}, False),
        ({"tools": [{}]}, False),
        ({"tools": [{}], "tool_choice": "none"}, True),
    ],
)
def test_what_can_be_continued(fields: dict[str, Any], expected: bool) -> None:
    body = json.dumps(fields).encode()

    assert can_continue(RelayedRequest("POST", CHAT, b"", [], body)) is expected
    assert not can_continue(RelayedRequest("POST", "/tokenize", b"", [], body))
