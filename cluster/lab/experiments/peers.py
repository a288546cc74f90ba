"""Other methods of parallel answering, as client programs on an unmodified engine.

Client forking: a child is a new completion that relies on the prefix cache. The client reads the
stream. At a fork token it sends a completion whose prompt is everything that the parent has read
and written, followed by a child token. The parent continues. A child finds whole blocks of its
prefix in the cache and computes the rest, waits for earlier requests, and is preempted on its
own. Sources: PaDoc, and ThreadWeaver (arXiv 2512.07843), which run on unmodified engines in this
way. ThreadWeaver's parent also waits for its threads and reads their text, as in `ParentStops`.

Parent stops: a thread writes its outline, up to and including its last fork, and stops (map). Its
children run concurrently, each after the whole outline and a child token (process). The thread
continues after the outline and the text of all children (reduce). Nested threads do the same.
Sources: Multiverse (arXiv 2506.09991) and Native Parallel Reasoner (arXiv 2512.07461), on their own
builds of SGLang, and ThreadWeaver's join. On an unmodified engine, only the first child's text is
found in the prefix cache when the parent continues. Multiverse and NPR join the KV of the children
without computing any. `free_merge` is a lower bound for that: the thread continues after its
outline alone.

Skeleton-of-thought: first a skeleton, then one request for each of its points. Source: arXiv
2307.15337, the prompts of section 2.2 (the skeleton prompt without its two worked examples, which
would lengthen it). The skeleton is the root thread's text, and the detail of a point is all text
below it. The text is that of the trace, so that lengths equal those of the other methods. A point's
request starts with its point as a partial answer. Questions whose answer has no points are asked
unchanged, as the method's router (SoT-R) decides, here without cost and without errors.

To the engine, all threads are ordinary requests. A marker replaces each fork and child token,
because this engine bans and rewrites control tokens of requests that do not fork. So token counts
and shared prefixes are those of the method. The client costs nothing: its requests reach the engine
before the next step, without network, HTTP or tokenizing. All of this favours the other methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apar_core.offline.data.records import ChatMessage, ParagraphRecord, thread_paragraphs
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import restore
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId
from apar_core.tree.threads import ThreadText, thread_texts
from cluster.lab.experiments.program import Submission, replay_sampling

if TYPE_CHECKING:
    from cluster.loadtest.replay_answers import AnswerText, ReplayAnswer

Texts = Mapping[ThreadId, ThreadText[int]]


class ClientProgram:
    """A program that answers a question in requests of its own, whose tokens are scripted.

    given: generated tokens by request name. marker: a token that occurs in no text. streams: the
    client needs tokens as they are generated.
    """

    streams = False

    def __init__(self, answer: ReplayAnswer, marker: int) -> None:
        self.answer = answer
        self.texts: Texts = thread_texts(answer.tree)
        self.end_id = answer.flat[-1]
        self.marker = marker
        self.given: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Keep the tokens; nothing follows before the request has ended."""
        self.given[name].extend(token_ids)
        return []

    def on_end(self, name: str) -> list[Submission]:
        """Return nothing: all requests have already been submitted."""
        return []

    def submit(self, name: str, prompt_ids: list[int], script: list[int]) -> Submission:
        """Return a request that generates the script and ends with its last token."""
        self.given[name] = []
        self.prompts[name] = prompt_ids
        sampling = replay_sampling({"": script}, max_tokens=len(script), streams=self.streams)
        sampling["extra_args"]["apar_enabled"] = False
        return Submission(name, prompt_ids, sampling)

    def script(self, thread: ThreadId) -> list[int]:
        """Return the tokens that a thread generates: its text, a marker at each fork, its end."""
        return self.texts[thread].generated(self.marker, self.end_id)

    def restored(self, paragraphs: Mapping[ThreadId, Sequence[Sequence[int]]]) -> list[int]:
        """Return the answer in reading order from the paragraphs, without an end token."""
        tree: ParagraphTree[int] = ParagraphTree()
        for thread, text in self.texts.items():
            first, *others = paragraphs[thread]
            tree.append(thread, first)
            for child, paragraph in zip(text.children, others, strict=True):
                tree.fork(thread, child)
                tree.append(thread, paragraph)
            tree.finish(thread)
        return restore(tree)


def split_paragraphs(
    given: Sequence[int], paragraphs: Sequence[Sequence[int]], *, gap: int = 1
) -> Iterator[Sequence[int]]:
    """Yield the generated tokens of each paragraph; `gap` tokens (marker or end) follow each."""
    start = 0
    for paragraph in paragraphs:
        yield given[start : start + len(paragraph)]
        start += len(paragraph) + gap


def flat_text(texts: Texts, thread: ThreadId) -> list[int]:
    """Return the text of a thread and of all threads below it, in reading order."""
    text = texts[thread]
    flat = list(text.paragraphs[0])
    for child, paragraph in zip(text.children, text.paragraphs[1:], strict=True):
        flat += flat_text(texts, child)
        flat += paragraph
    return flat


class ClientForking(ClientProgram):
    """Program in which the client sends a completion for each thread of an answer."""

    streams = True

    def start(self) -> list[Submission]:
        """Return the completion of the root thread."""
        return [self.submit(ROOT_THREAD, list(self.answer.prompt_ids), self.script(ROOT_THREAD))]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Return a completion for each fork among the new tokens."""
        given = self.given[name]
        first = len(given)
        given.extend(token_ids)
        children: list[Submission] = []
        for child in self.texts[ThreadId(name)].children:
            index = self.answer.tree.threads[child].fork_index
            if first <= index < len(given):
                read = [*self.prompts[name], *given[: index + 1], self.marker]
                children.append(self.submit(child, read, self.script(child)))
        return children

    def text_ids(self) -> list[int]:
        """Return the tokens of all threads, in reading order."""
        paragraphs = {
            thread: list(split_paragraphs(self.given[thread], text.paragraphs))
            for thread, text in self.texts.items()
        }
        return [*self.restored(paragraphs), *self.given[ROOT_THREAD][-1:]]


_REST = "/rest"
"""Suffix to a thread's name, for the request that continues it after its children."""


class ParentStops(ClientProgram):
    """Program in which a thread with children is two requests, and any other thread one."""

    def __init__(self, answer: ReplayAnswer, marker: int, *, free_merge: bool = False) -> None:
        super().__init__(answer, marker)
        self._free_merge = free_merge
        self._running: dict[ThreadId, set[ThreadId]] = {}

    def start(self) -> list[Submission]:
        """Return the request for the root thread's outline."""
        return [self._begin(ROOT_THREAD, list(self.answer.prompt_ids))]

    def on_end(self, name: str) -> list[Submission]:
        """Return the children after an outline, or the parent's rest after its last child."""
        thread = ThreadId(name.removesuffix(_REST))
        text = self.texts[thread]
        if text.children and name == thread:
            self._running[thread] = set(text.children)
            outline = [*self.prompts[thread], *self.given[name], self.marker]
            return [self._begin(child, outline) for child in text.children]
        parent = text.parent
        if parent is None:
            return []
        self._running[parent].discard(thread)
        return [] if self._running[parent] else [self._go_on(parent)]

    def text_ids(self) -> list[int]:
        """Return the tokens of all threads, in reading order."""
        paragraphs: dict[ThreadId, list[Sequence[int]]] = {}
        for thread, text in self.texts.items():
            outline = list(split_paragraphs(self.given[thread], text.paragraphs))
            if text.children:
                outline[-1] = self.given[thread + _REST][:-1]
            paragraphs[thread] = outline
        last = ROOT_THREAD + _REST if self.texts[ROOT_THREAD].children else ROOT_THREAD
        return [*self.restored(paragraphs), *self.given[last][-1:]]

    def _begin(self, thread: ThreadId, prompt_ids: list[int]) -> Submission:
        script = self.script(thread)
        if self.texts[thread].children:
            rest = self.texts[thread].paragraphs[-1]
            script = script[: len(script) - len(rest) - 1]
        return self.submit(thread, prompt_ids, script)

    def _go_on(self, thread: ThreadId) -> Submission:
        rest = [*self.texts[thread].paragraphs[-1], self.end_id]
        read = [*self.prompts[thread], *self.given[thread], *self._below(thread)]
        return self.submit(thread + _REST, read, rest)

    def _below(self, thread: ThreadId) -> list[int]:
        """Return the text of a thread's children, each after its child token."""
        if self._free_merge:
            return []
        read: list[int] = []
        for child in self.texts[thread].children:
            read += [self.marker, *self.given[child], *self._below(child)]
            read += self.given.get(child + _REST, [])
        return read


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
    """Return the prompts of a question; `record` is the paragraph tree of its answer as text.

    Prompts are created before the clock starts: no method's time includes tokenizing.
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
        # Text before a point, such as an introduction, is not part of it.
        partial_answer = point.strip().splitlines()[-1]
        prompts.append(asked(content) + text.encode(partial_answer))
    return SkeletonPrompts(asked(SKELETON_PROMPT.format(question=answer.prompt)), prompts)


class SkeletonOfThought(ClientProgram):
    """Program that asks for a skeleton, then for all of its points at once."""

    def __init__(self, answer: ReplayAnswer, marker: int, prompts: SkeletonPrompts) -> None:
        super().__init__(answer, marker)
        self._questions = prompts
        self._root = self.texts[ROOT_THREAD]

    def start(self) -> list[Submission]:
        """Ask for the skeleton."""
        text = [token for paragraph in self._root.paragraphs for token in paragraph]
        return [self.submit(SKELETON, self._questions.skeleton, [*text, self.end_id])]

    def on_end(self, name: str) -> list[Submission]:
        """Ask for all points once the skeleton is complete."""
        if name != SKELETON:
            return []
        return [
            self.submit(child, prompt, [*flat_text(self.texts, child), self.end_id])
            for child, prompt in zip(self._root.children, self._questions.points, strict=True)
        ]

    def text_ids(self) -> list[int]:
        """Return skeleton and details in reading order."""
        first, *others = split_paragraphs(self.given[SKELETON], self._root.paragraphs, gap=0)
        text = list(first)
        for child, paragraph in zip(self._root.children, others, strict=True):
            text += self.given[child][:-1]
            text += paragraph
        return [*text, *self.given[SKELETON][-1:]]
