"""Recorded answers as the tokens that an engine is made to generate, forked and as one thread."""

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
from apar_core.workload.trace import TraceLine


class AnswerText(Protocol):
    """Text as token ids of a model; `evaluation.replay_text.ModelText` is one."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of an answer."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of a chat up to where its answer begins."""


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """A question, and what every thread generates in answer to it.

    `threads` maps a thread's path ("" for the root thread, "0.2" for the third child of its first
    child) to its ids, fork and end tokens included; `flat` are the ids of the restored text and one
    end token: the same text tokens, without forks.
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
        """Tokens of the text, which a reader sees."""
        return len(self.flat) - 1

    @property
    def num_threads(self) -> int:
        """Threads of the forked answer, its root thread among them."""
        return len(self.threads)

    @property
    def max_tokens(self) -> int:
        """A limit on the answer's tokens under which it is whole, forked or not."""
        return len(self.flat)

    def scripts(self, *, forked: bool) -> Mapping[str, list[int]]:
        """What to generate, by the thread's path."""
        return self.threads if forked else {"": self.flat}

    def apar_field(self, *, forked: bool) -> dict[str, Any]:
        """The field `apar` of an HTTP request that a server with `replay: true` replays."""
        return {"enabled": forked, "replay": dict(self.scripts(forked=forked))}


def replay_answers(
    lines: Sequence[TraceLine],
    text: AnswerText,
    tokens: TreeTokens,
    *,
    max_tokens: int | None = None,
    wanted: int | None = None,
) -> tuple[list[ReplayAnswer], int]:
    """Return the answers as trees by the rules of appendix B, each paragraph encoded by itself.

    The first `wanted`, of those of which no sequence, prompt included, is longer than `max_tokens`,
    forked or flat; and how many were left out on the way to them. Raises EvaluationError if nothing
    remains.
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
    """Return how many tokens the longest sequence of an answer has, forked or flat."""
    texts = thread_texts(answer.tree)
    return max(
        len(answer.prompt_ids) + len(answer.flat),
        *(
            len(thread_prefix(texts, name, answer.prompt_ids, tokens.fork_id, tokens.child_id))
            + len(thread.generated(tokens.fork_id, tokens.end_id))
            for name, thread in texts.items()
        ),
    )
