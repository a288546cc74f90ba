"""YAML by the core schema of YAML 1.2, as editors and JSON schemas read it.

PyYAML follows YAML 1.1, where `off` and `yes` are booleans, `80:00` is 4800 and `010` is 8. Here
they are text, text, text and 10. Source: YAML 1.2.2, section 10.3.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_LARGEST = 2**63 - 1


class _Loader(yaml.SafeLoader):
    """YAML's safe loader for the core schema; duplicate keys and huge integers are errors."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Return an integer of 64 bits."""
        text = node.value
        base = {"0x": 16, "0o": 8}.get(text[:2])
        # Python refuses to convert texts of more than 4,300 digits.
        number = int(text[2:], base) if base else int(text) if len(text) < 50 else _LARGEST + 1
        if abs(number) > _LARGEST:
            raise yaml.MarkedYAMLError(
                problem=f"{text:.40} is too large: integers have at most 64 bits",
                problem_mark=node.start_mark,
            )
        return number


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document. Raises yaml.YAMLError with the line."""
    return yaml.load(text, _Loader)
