"""The text in a piece of JSON that becomes part of a prompt: tools, tool calls, documents."""

from collections.abc import Iterator
from typing import Any

MESSAGE_FIELDS = ("tool_calls", "reasoning", "reasoning_content")
"""What a message may hold besides its content."""
PART_FIELDS = ("text", "refusal", "thinking")
"""The texts of a part of a message's content."""


def texts_in(value: Any) -> Iterator[str]:
    """Every name and value, in an order that depends on the piece alone; without punctuation."""
    # No recursion: a client's JSON may be nested deeper than Python's stack.
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            left.extend(item.values())
            left.extend(item)
        elif isinstance(item, list):
            left.extend(reversed(item))
        elif item is not None:
            yield str(item)
