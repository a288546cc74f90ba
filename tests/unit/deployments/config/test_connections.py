"""Limits on clients' connections."""

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config import ClusterConfig


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"connections": {"max_open": 10, "max_per_source": 11}}, "11 is above `max_open`, 10"),
        ({"connections": {"unlimited_sources": ["10.0.0.1/8"]}}, "has host bits set"),
        ({"connections": {"unlimited_sources": ["}; drop"]}}, "does not appear to be"),
        ({"connections": {"probe_port": 8000}}, "8000 is the `port` of the server"),
        ({"connections": {"max_open": 10}, "ray_address": "auto"}, "without `ray_address` only"),
    ],
)
def test_settings_without_a_meaning_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ClusterConfig.model_validate(fields)


def test_a_source_is_an_address_or_a_network() -> None:
    fields = {"connections": {"unlimited_sources": ["10.0.0.7", "2001:db8::/32"]}}

    sources = ClusterConfig.model_validate(fields).connections.unlimited_sources

    assert sources == ("10.0.0.7/32", "2001:db8::/32")
