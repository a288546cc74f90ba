"""Skeleton-of-Thought: a skeleton first, then one request for each of its points.

Source: Skeleton-of-Thought (arXiv 2307.15337), the prompts of section 2.2 (the skeleton's without
its two worked examples, which would lengthen it). A skeleton is what the root thread writes, a
point's detail all that stands below it: the text is the trace's, so that lengths are those of the
other methods. A point's request starts with its point as a partial answer. Questions whose answer
has no points are asked as they are, as its router (SoT-R) decides, here without cost and never
wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apar_core.offline.data.records import ChatMessage, ParagraphRecord, thread_paragraphs
from apar_core.tree.thread_names import ROOT_THREAD
from cluster.experiments.peers.scripted_requests import (
    ScriptedRequests,
    flat_text,
    split_paragraphs,
)
from cluster.experiments.program import Submission

if TYPE_CHECKING:
    from apar_core.workload.replay_answers import AnswerText, ReplayAnswer

SKELETON_PROMPT = (
    "You're an organizer responsible for only giving the skeleton (not the full content) for "
    "answering the question. Provide the skeleton in a list of points (numbered 1., 2., 3., etc.) "
    "to answer the question. Instead of writing a full sentence, each skeleton point should be "
    "very short with only 3~5 words. Generally, the skeleton should have 3~10 points. Now, please "
    "provide the skeleton for the following question.\n{question}\nSkeleton:"
)
POINT_PROMPT = (
    "You're responsible for continuing the writing of one and only one point in the overall answer "
    "to the following question.\n\n{question}\n\nThe skeleton of the answer is\n\n{skeleton}\n\n"
    "Continue and only continue the writing of point {index}. Write it **very shortly** in 1~2 "
    "sentence and do not continue with other points!"
)
SKELETON = "skeleton"


@dataclass(frozen=True, slots=True)
class SkeletonPrompts:
    """The prompts of both stages, as token ids; `points` has one for each detail."""

    skeleton: list[int]
    points: list[list[int]]


def skeleton_prompts(
    answer: ReplayAnswer, record: ParagraphRecord, text: AnswerText
) -> SkeletonPrompts:
    """The prompts of a question; `record` is its answer as text, with the paragraphs of its tree.

    Made before the clock starts: tokenising is left out of every method's time.
    """
    paragraphs = list(thread_paragraphs(record))
    points = [paragraph.text for paragraph in paragraphs if paragraph.first_child is not None]
    if not points:
        return SkeletonPrompts(list(answer.prompt_ids), [])

    def asked(content: str) -> list[int]:
        return text.encode_chat([*answer.messages[:-1], ChatMessage("user", content)])

    skeleton = "".join(paragraph.text for paragraph in paragraphs)
    prompts: list[list[int]] = []
    for index, point in enumerate(points, start=1):
        content = POINT_PROMPT.format(question=answer.prompt, skeleton=skeleton, index=index)
        # What stands before a point, such as an introduction, is no part of it.
        partial_answer = point.strip().splitlines()[-1]
        prompts.append(asked(content) + text.encode(partial_answer))
    return SkeletonPrompts(asked(SKELETON_PROMPT.format(question=answer.prompt)), prompts)


class SkeletonOfThought:
    """One answer in two stages."""

    def __init__(self, answer: ReplayAnswer, marker: int, prompts: SkeletonPrompts) -> None:
        self.answer = answer
        self._prompts = prompts
        self._requests = ScriptedRequests(answer, marker)
        self._root = self._requests.texts[ROOT_THREAD]

    def start(self) -> list[Submission]:
        """Ask for the skeleton."""
        text = [token for paragraph in self._root.paragraphs for token in paragraph]
        script = [*text, self._requests.end_id]
        return [self._requests.submit(SKELETON, self._prompts.skeleton, script)]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Nothing before a request has ended."""
        self._requests.given[name].extend(token_ids)
        return []

    def on_end(self, name: str) -> list[Submission]:
        """Once the skeleton stands, ask for all its points."""
        if name != SKELETON:
            return []
        return [
            self._requests.submit(
                child, prompt, [*flat_text(self._requests.texts, child), self._requests.end_id]
            )
            for child, prompt in zip(self._root.children, self._prompts.points, strict=True)
        ]

    def text_ids(self) -> list[int]:
        """Skeleton and details in reading order."""
        given = self._requests.given
        first, *others = split_paragraphs(given[SKELETON], self._root.paragraphs, gap=0)
        text = list(first)
        for child, paragraph in zip(self._root.children, others, strict=True):
            text += given[child][:-1]
            text += paragraph
        return [*text, *given[SKELETON][-1:]]
