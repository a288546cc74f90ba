"""Answers of threads that join, as clients get them."""

from typing import Any, Protocol

from tests.fakes.tagged_streams import TaggedReader


class Expected(Protocol):
    """What a client that resubmits gets from plain decoding."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the text."""

    @property
    def threads(self) -> int:
        """Number of threads."""

    @property
    def joins(self) -> int:
        """Number of joins."""


def check_answer(
    whole: Any, chunks: list[Any], tagged: tuple[TaggedReader, str], answer: Expected, text: str
) -> None:
    """Check a whole chat completion, a stream of the same answer, and a tagged stream."""
    reader, ordered = tagged
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(answer.token_ids)
    statistics = whole.model_extra["apar"]
    assert statistics["threads"] == answer.threads
    assert statistics.get("joins", 0) == answer.joins
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == text == ordered == reader.text()
