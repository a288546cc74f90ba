"""YAML by the core schema of YAML 1.2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from apar_core.yaml_files import load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("Yes", "Yes"),
        ("80:00", "80:00"),
        ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"),
        ("true", True),
        ("FALSE", False),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-5", -5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("", None),
        ("~", None),
        ("null", None),
        ("'1'", "1"),
        ("{a: &x {b: 1}, c: {<<: *x, d: }}", {"a": {"b": 1}, "c": {"b": 1, "d": None}}),
    ],
)
def test_plain_values_have_the_types_of_yaml_1_2(text: str, value: Any) -> None:
    read = load_yaml(text)

    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["9223372036854775808", "-" + "9" * 5000, "0x" + "f" * 17])
def test_integers_beyond_64_bits_are_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="too large"):
        load_yaml(text)
