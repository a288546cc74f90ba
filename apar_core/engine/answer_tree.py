"""What each thread of an answer generated, for callers without a server.

A request asks for it with `SamplingParams(extra_args={"apar_tree": True})`. Its answer then comes
in one piece, and `answer_tree` returns the tree of each `CompletionOutput`, from `vllm.LLM` and
`AsyncLLM` alike. Ray Data keeps only some fields of vLLM's outputs; `row_trees` finds the trees in
its rows. `docs/offline-batches.md` is the caller's view.

Nothing here imports vLLM before a request asks for a tree: processes that only read rows need none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from apar_core.engine.thread_tags import DISCARDED, Decoder, ThreadTags
from apar_core.errors import EngineError, TreeError
from apar_core.tree.statistics import TreeStatistics, unforked_statistics
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, thread_id, thread_path

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

    from apar_core.engine.thread_outputs import RequestThreads
    from apar_core.vllm_names import EngineCoreOutput

TREE_ARG = "apar_tree"
"""Key of `SamplingParams.extra_args`, and attribute of `CompletionOutput` with the tree."""
METRICS_FIELD = "apar_trees"
"""Field of `RequestOutput.metrics`, which Ray Data returns as the column `metrics`."""


@dataclass(frozen=True, slots=True)
class AnswerThread:
    """One thread of an answer.

    id, parent: such as "root.0.2" and "root.0"; the root thread has no parent.
    forked_at: how many of its parent's `token_ids` the thread has read, the fork token among them;
        None for the root, which has read the prompt.
    seed_token_ids: tokens that were forced at its start, such as APAR's child token.
    token_ids: all tokens that it generated: text, fork tokens, and its end token unless it was cut.
    logprobs: log-probability of each of them; None if the request asked for none.
    text: its part of the answer's text.
    finish_reason: vLLM's, or "discarded" for a thread that is no part of the text. None if the
        answer ended before the thread, for example at a stop string.
    """

    id: ThreadId
    parent: ThreadId | None
    forked_at: int | None
    seed_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class AnswerTree:
    """One answer and its threads, parents before their children.

    text, finish_reason: those of vLLM's `CompletionOutput`; the text has the paragraphs of all
        threads in reading order.
    statistics: threads, steps and tokens beside those of one thread that writes the same text.
    parent_waits: whether threads wait for their children and continue after their texts, so that
        `sequence` cannot tell what they have read.
    """

    text: str
    finish_reason: str
    threads: tuple[AnswerThread, ...]
    statistics: TreeStatistics
    parent_waits: bool = False

    def sequence(self, thread: str, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return all tokens of a thread: what it has read, prompt first, and what it generated.

        Its last `len(token_ids)` tokens are its own, those to train on.
        Raises TreeError for an unknown thread, and if `parent_waits`.
        """
        threads = {each.id: each for each in self.threads}
        if thread not in threads:
            raise TreeError(f"thread {thread!r} is unknown: the answer has {', '.join(threads)}")
        if self.parent_waits:
            raise TreeError(
                f"thread {thread!r} has no sequence here: in formats whose threads wait, it also "
                "reads text that no thread has generated"
            )
        own = threads[ThreadId(thread)]
        if own.parent is None or own.forked_at is None:
            return [*prompt_token_ids, *own.token_ids]
        parent = self.sequence(own.parent, prompt_token_ids)
        num_unread = len(threads[own.parent].token_ids) - own.forked_at
        read = parent[: len(parent) - num_unread]
        return [*read, *own.seed_token_ids, *own.token_ids]

    def to_plain(self) -> dict[str, Any]:
        """Return the tree as values that JSON and Arrow can hold."""
        return {**asdict(self), "statistics": self.statistics.to_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> AnswerTree:
        """Return the tree of `to_plain`, also after a way through JSON."""
        threads = (
            AnswerThread(
                **each
                | {name: tuple(each[name]) for name in ("seed_token_ids", "token_ids")}
                | {"logprobs": None if each["logprobs"] is None else tuple(each["logprobs"])}
            )
            for each in plain["threads"]
        )
        statistics = TreeStatistics(**plain["statistics"])
        return cls(**{**plain, "threads": tuple(threads), "statistics": statistics})


def answer_tree(completion: CompletionOutput) -> AnswerTree:
    """Return the tree of one of vLLM's outputs. Raises EngineError if there is none."""
    tree = getattr(completion, TREE_ARG, None)
    if tree is None:
        raise EngineError(
            f"the output has no tree: send SamplingParams(extra_args={{{TREE_ARG!r}: True}}) to an "
            "engine whose scheduler_cls is apar_core.scheduler.fork_scheduler.ForkScheduler"
        )
    return tree  # type: ignore[no-any-return]


def row_trees(row: Mapping[str, Any]) -> tuple[AnswerTree, ...]:
    """Return the trees of a row of Ray Data's vLLM stage, one for each of the `n` answers.

    Raises EngineError if there is none.
    """
    text = (row.get("metrics") or {}).get(METRICS_FIELD)
    if text is None:
        raise EngineError(
            f"the row has no trees: set extra_args={{{TREE_ARG!r}: True}} in its sampling_params, "
            "and in engine_kwargs scheduler_cls=apar_core.scheduler.fork_scheduler.ForkScheduler; "
            "leave disable_log_stats False"
        )
    return tuple(AnswerTree.from_plain(plain) for plain in json.loads(text))


@dataclass(slots=True)
class _Generated:
    """Tokens that a thread generated, as the engine reported them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class TreeRecorder:
    """Records the tokens of a request's threads, and makes them the tree of its answer.

    `threads` is the request's tree, None if it may not fork. `new_decoder` makes a detokenizer for
    text that follows the given tokens; without one, texts stay empty.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        threads: RequestThreads | None,
        new_decoder: Callable[[list[int]], Decoder] | None,
    ) -> None:
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._threads = threads
        self._new_decoder = new_decoder
        self._generated: dict[ThreadId, _Generated] = {}

    def add(self, output: EngineCoreOutput) -> None:
        """Add one thread's output of one or more steps."""
        name = thread_id(thread_path(self._request_id, output.request_id))
        generated = self._generated.setdefault(name, _Generated())
        generated.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            # The first column is the sampled token's.
            generated.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finish_reason is not None:
            generated.finish_reason = str(output.finish_reason)

    def answer(self, completion: CompletionOutput) -> AnswerTree:
        """Return the tree of the answer that vLLM has just finished."""
        text = completion.text or self._decoded(completion.token_ids)
        num_prompt = len(self._prompt_token_ids)
        if self._threads is None:
            ended = completion.finish_reason == "stop" and completion.stop_reason is None
            root = self._thread(ROOT_THREAD, None, text)
            threads = [root]
            statistics = unforked_statistics(len(root.token_ids) - ended, num_prompt, ended=ended)
        else:
            texts = self._texts()
            threads = [
                self._thread(name, record.parent, texts.get(name, ""))
                for name, record in self._threads.tree.threads.items()
            ]
            statistics = self._threads.statistics(num_prompt)
        return AnswerTree(
            text=text,
            finish_reason=str(completion.finish_reason),
            threads=tuple(threads),
            statistics=statistics,
            parent_waits=self._threads is not None and self._threads.parameters.blocks is not None,
        )

    def _thread(self, name: ThreadId, parent: ThreadId | None, text: str) -> AnswerThread:
        generated = self._generated.get(name, _Generated())
        threads = self._threads
        forked_at: int | None = None
        seed: tuple[int, ...] = ()
        if threads is not None and parent is not None:
            forked_at, seed = threads.forked_at(name), threads.parameters.seed_ids
        discarded = threads is not None and threads.tree.threads[name].discarded
        return AnswerThread(
            id=name,
            parent=parent,
            forked_at=forked_at,
            seed_token_ids=seed,
            token_ids=tuple(generated.token_ids),
            logprobs=tuple(generated.logprobs) if generated.logprobs else None,
            text=text,
            finish_reason=DISCARDED if discarded else generated.finish_reason,
        )

    def _texts(self) -> dict[ThreadId, str]:
        """Return the text of each thread by itself."""
        if self._threads is None or self._new_decoder is None:
            return {}
        tags = ThreadTags(0, self._threads.tree, self._prompt_token_ids, self._new_decoder)
        tags.read()
        return {ThreadId(update["id"]): update["text"] for update in tags.take()}

    def _decoded(self, token_ids: Sequence[int]) -> str:
        """Return the text of a request that vLLM was asked not to detokenize."""
        if self._new_decoder is None:
            return ""
        decoder = self._new_decoder(list(self._prompt_token_ids[-1:]))
        decoder.update(list(token_ids), stop_terminated=False)
        return decoder.get_next_output_text(finished=True, delta=False)


@cache
def _metrics_class() -> type:
    """Return vLLM's statistics of a request with a field for its trees."""
    from apar_core.vllm_names import RequestStateStats

    return make_dataclass(
        "RequestStateStatsWithTrees", [(METRICS_FIELD, str, "[]")], bases=(RequestStateStats,)
    )


def add_to_metrics(answer: RequestOutput) -> None:
    """Add the trees of all choices to vLLM's statistics of a request, if there are any.

    As JSON: Arrow then needs no common type for the threads of different rows.
    """
    if answer.metrics is None:
        return
    trees = [answer_tree(completion).to_plain() for completion in answer.outputs]
    text = json.dumps(trees, separators=(",", ":"))
    # A copy: vLLM still counts in its own.
    answer.metrics = _metrics_class()(**vars(answer.metrics), **{METRICS_FIELD: text})
