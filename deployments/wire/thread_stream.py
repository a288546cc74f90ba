"""The `apar` object in the chunks of a thread-tagged stream, as a schema.

A request with `"apar": {"stream": "threads"}` gets it in every chunk of its stream. The models
describe and check it; the objects themselves are plain dictionaries. `docs/streams.md` explains
how a client rebuilds the text.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

ThreadState = Literal["waiting", "writing", "ended"]
FinishReason = Literal["stop", "length", "repetition", "cut", "abort", "error", "discarded"]
ThreadName = Annotated[str, Field(pattern=r"^root(\.(0|[1-9][0-9]*))*$")]


class Edit(BaseModel):
    """One paragraph of a thread reads differently in the ordered text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    paragraph: NonNegativeInt = Field(
        description="Number of the paragraph in the thread: 0 before its first fork."
    )
    position: NonNegativeInt = Field(
        description="Characters of the paragraph before the replaced ones."
    )
    length: NonNegativeInt = Field(description="Number of characters replaced; 0 only inserts.")
    text: str = Field(description="What the ordered text has in their place.")


class ThreadUpdate(BaseModel):
    """Text of one thread since its last update.

    `parent` and `position` are in the first update of a thread and in no other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    choice: NonNegativeInt = Field(description="`index` of the choice that the thread belongs to.")
    id: ThreadName = Field(
        description="Path of the thread: `root`, its second child `root.1`, and so on."
    )
    parent: ThreadName | None = Field(
        None, description="The thread that forked it; null for `root`."
    )
    position: NonNegativeInt | None = Field(
        None,
        description="Characters (Unicode code points) of the parent's own text before the fork; "
        "null for `root`.",
    )
    text: str = Field(description="New text, to append to the thread's own text.")
    tokens: NonNegativeInt = Field(
        description="Tokens generated since the last update, fork and end tokens included."
    )
    state: ThreadState = Field(
        description="`waiting`: has not started, or waits for its children. `writing`. `ended`."
    )
    finish_reason: FinishReason | None = Field(
        None,
        description="Why an ended thread ended. `cut`: the answer ended before the thread did.",
    )
    edits: list[Edit] | None = Field(
        None,
        description="Corrections for the ordered text. The last edit of a paragraph counts.",
    )


class ThreadStream(BaseModel):
    """The object `apar` of a chunk in a thread-tagged stream.

    The chunk with `usage` has the statistics of the request in the same object.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    time_ms: NonNegativeInt = Field(
        description="Milliseconds since a replica got the request; never decreases."
    )
    updates: list[ThreadUpdate] = Field(
        description="At most one update of each thread, parents before their children."
    )


def schema() -> dict[str, Any]:
    """Return the JSON schema of the object `apar` in a chunk."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ThreadStream.model_json_schema(),
    }
