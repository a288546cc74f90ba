"""Recorded answers as tokens for an engine to replay, forked and as a single thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from apar_core.errors import EvaluationError
from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.records import ChatMessage, token_tree
from apar_core.offline.data.structure import extract_tree
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import restore
from apar_core.tree.threads import thread_prefix, thread_scripts, thread_texts
from cluster.loadtest.trace import TraceLine


class AnswerText(Protocol):
    """A model's tokenizer and chat template; implemented by `ModelText` in `replay_text.py`."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a piece of an answer."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a chat, up to the start of its answer."""


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """A prompt with its answer as tokens.

    threads: token ids of each thread, fork and end tokens included, by its replay key.
    flat: token ids of the restored text and one end token; the same text without forks.
    """

    answer_id: str
    category: str
    prompt: str
    messages: tuple[ChatMessage, ...]
    prompt_ids: tuple[int, ...]
    threads: Mapping[str, list[int]]
    flat: list[int]
    tree: ParagraphTree[int]

    @property
    def text_tokens(self) -> int:
        """Tokens of the restored text."""
        return len(self.flat) - 1

    @property
    def num_threads(self) -> int:
        """Threads of the forked answer, root thread included."""
        return len(self.threads)

    @property
    def max_tokens(self) -> int:
        """Smallest limit on tokens with which the answer is complete, forked or not."""
        return len(self.flat)

    def scripts(self, *, forked: bool) -> Mapping[str, list[int]]:
        """Return the tokens to replay, by replay key."""
        return self.threads if forked else {"": self.flat}

    def apar_field(self, *, forked: bool) -> dict[str, Any]:
        """Return the field `apar` of a request to a server with `replay: true`."""
        return {"enabled": forked, "replay": dict(self.scripts(forked=forked))}


def replay_answers(
    lines: Sequence[TraceLine],
    text: AnswerText,
    tokens: TreeTokens,
    *,
    max_tokens: int | None = None,
    wanted: int | None = None,
) -> tuple[list[ReplayAnswer], int]:
    """Return the first `wanted` answers that fit, and how many were skipped before them.

    Answers become trees by the rules of the paper's appendix B. An answer fits if none of its
    sequences, prompt included, is longer than `max_tokens`, forked or flat. Raises EvaluationError
    if no answer fits.
    """
    answers: list[ReplayAnswer] = []
    left_out = 0
    for line in lines:
        if len(answers) == wanted:
            break
        answer = replay_answer(line, text, tokens)
        if max_tokens is None or longest_sequence(answer, tokens) <= max_tokens:
            answers.append(answer)
        else:
            left_out += 1
    if not answers:
        raise EvaluationError(
            f"none of {len(lines)} answers fits into {max_tokens} tokens with its prompt"
        )
    return answers, left_out


def replay_answer(line: TraceLine, text: AnswerText, tokens: TreeTokens) -> ReplayAnswer:
    """Return one recorded answer as tokens."""
    tree = token_tree(extract_tree(line.response).tree, text.encode)
    return ReplayAnswer(
        answer_id=line.id,
        category=line.category,
        prompt=line.prompt,
        messages=line.messages,
        prompt_ids=tuple(text.encode_chat(line.messages)),
        threads=thread_scripts(tree, tokens.fork_id, tokens.end_id),
        flat=[*restore(tree), tokens.end_id],
        tree=tree,
    )


def longest_sequence(answer: ReplayAnswer, tokens: TreeTokens) -> int:
    """Return the length of an answer's longest sequence, forked or flat, in tokens."""
    texts = thread_texts(answer.tree)
    return max(
        len(answer.prompt_ids) + len(answer.flat),
        *(
            len(thread_prefix(texts, name, answer.prompt_ids, tokens.fork_id, tokens.child_id))
            + len(thread.generated(tokens.fork_id, tokens.end_id))
            for name, thread in texts.items()
        ),
    )
