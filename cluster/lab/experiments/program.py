"""Client programs that answer one prompt with one or more requests.

The driver submits the requests that a program returns, and passes it the generated tokens.
Sequential decoding and forking in the engine are programs of one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from apar_core.engine.replay import ReplayText
from cluster.lab.virtual.list_answers import LIST_ANSWER_ARG, ListAnswer


@dataclass(frozen=True, slots=True)
class Submission:
    """One engine request: its name within the program, its prompt, `SamplingParams` arguments.

    delay_s: time until the request reaches the engine, in virtual time only.
    """

    name: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    delay_s: float = 0.0


class RecordedAnswer(Protocol):
    """Answer fields that the driver reads.

    flat: tokens of the whole text and one end token. text_tokens: tokens that count as its text.
    """

    @property
    def answer_id(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def flat(self) -> list[int]: ...
    @property
    def text_tokens(self) -> int: ...


class ReplayableAnswer(RecordedAnswer, Protocol):
    """An answer that one request can replay, with its forks or as one thread.

    max_tokens: token limit that leaves it complete. scripts: tokens to replay, by replay key.
    """

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def max_tokens(self) -> int: ...
    def scripts(self, *, forked: bool) -> Mapping[str, Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """A `RecordedAnswer` whose text is another one, but counts as many tokens."""

    answer_id: str
    category: str
    flat: list[int]
    text_tokens: int


class Program(Protocol):
    """One question from arrival to answer; it ends when none of its requests is running.

    `on_tokens` and `on_end` are called in the order of the engine's outputs, the tokens of a
    request before its end. Without streaming, all tokens come at once.
    """

    @property
    def answer(self) -> RecordedAnswer:
        """The answer that the program asks for."""

    def start(self) -> list[Submission]:
        """Return the requests that the client submits when the question arrives."""

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Return the requests that follow from new tokens of one request, often none."""

    def on_end(self, name: str) -> list[Submission]:
        """Return the requests that follow from the end of one request."""

    def text_ids(self) -> list[int]:
        """Return the generated tokens in reading order, the end token last: `answer.flat`."""


class OneRequest:
    """Program of a single request."""

    def __init__(self, answer: RecordedAnswer, request: Submission) -> None:
        self.answer = answer
        self._request = request
        self._token_ids: list[int] = []

    def start(self) -> list[Submission]:
        """Return the question as one request."""
        return [self._request]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Keep the tokens."""
        self._token_ids.extend(token_ids)
        return []

    def on_end(self, name: str) -> list[Submission]:
        """Return nothing: the answer is complete."""
        return []

    def text_ids(self) -> list[int]:
        """Return the tokens; a restored answer comes without the end tokens of its threads."""
        end_id = self.answer.flat[-1]
        return [token_id for token_id in self._token_ids if token_id != end_id] + [end_id]


class ReplayedRequest(OneRequest):
    """An answer as one request, forked by the engine or not."""

    def __init__(self, answer: ReplayableAnswer, *, forks: bool) -> None:
        sampling = replay_sampling(answer.scripts(forked=forks), max_tokens=answer.max_tokens)
        sampling["extra_args"]["apar_enabled"] = forks
        super().__init__(answer, Submission("answer", list(answer.prompt_ids), sampling))


class ParallelLists(OneRequest):
    """An answer as one request whose lists the engine writes in parallel, in virtual time.

    The line breaks between items of a list may differ from the recorded ones.
    """

    def __init__(self, answer: ReplayableAnswer, listed: ListAnswer) -> None:
        sampling = replay_sampling({}, max_tokens=len(listed.flat))
        text = ReplayText(listed.to_text())
        sampling["extra_args"] = {LIST_ANSWER_ARG: text, "apar_enabled": True}
        super().__init__(
            ExpectedAnswer(answer.answer_id, answer.category, listed.flat, answer.text_tokens),
            Submission("answer", list(answer.prompt_ids), sampling),
        )


def replay_sampling(
    threads: Mapping[str, Sequence[int]], *, max_tokens: int, streams: bool = False
) -> dict[str, Any]:
    """Return `SamplingParams` arguments that make the engine generate threads, by replay key.

    `streams`: deliver tokens as they are generated, instead of all at the end.
    """
    # These import vLLM and torch, which take seconds.
    from vllm.sampling_params import RequestOutputKind

    from apar_core.engine.replay import replay_args

    return {
        "temperature": 0.0,
        "max_tokens": max_tokens,
        # Ids are compared, not text: detokenizing is not part of an experiment.
        "detokenize": False,
        "extra_args": replay_args(threads),
        "output_kind": RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
    }
