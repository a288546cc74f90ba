"""Threads that wait for their children and continue after a joined text.

For formats whose parent waits (`formats/blocks.py`). Life of a block:

1. `until_marker` finds, among the sampled tokens, the trigger or the end of a child.
2. `open` builds the children, each with its forced seed after what it inherits, and queues them
   like any forks. At the end of the step `settle` ends the parent's engine request. Its KV blocks
   stay referenced for its continuation.
3. `ended` takes the text of each child that ends. The first child's blocks replace those that are
   held, as far as its tokens are those of the joined text.
4. When all children have ended, `settle` starts the continuation: an engine request with the id of
   the parent and the context with the joined text as its prompt. It takes the place of the child
   that ended last, so no limit on threads delays it. Only a KV connector does, as long as it
   transfers blocks of the parent's earlier request.

A child that a limit keeps from starting has an empty text. A waiting parent is no live thread; its
request is alive as long as it waits.

Where a parent joins (`OpenForks`), `open` lets it continue beside its child, and `join` lets it
wait for one child. Children that it has not joined when it ends are cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

from apar_core.fork_parameters import ForkParameters
from apar_core.formats.blocks import BlockRules, JoinPoint, OpenBlock, OpenForks
from apar_core.formats.rules import JoinRules, block_rules
from apar_core.journal import Journal
from apar_core.scheduler.block_journal import ended_texts, rebuilt_threads
from apar_core.scheduler.block_sharing import BlockSharing
from apar_core.scheduler.fork_admission import ForkAdmission
from apar_core.scheduler.thread_requests import (
    build_continuation,
    build_thread_request,
    resumed_thread,
)
from apar_core.scheduler.thread_table import JoiningGroup, TextPlace, ThreadTable, WaitingParent
from apar_core.tree.thread_names import child_request_id, thread_request_id
from apar_core.vllm_names import FinishReason, Request, RequestStatus, SchedulerOutput

Group = JoiningGroup[Request]
Waiting = WaitingParent[Request]


class JoiningScheduler(Protocol):
    """The part of the scheduler that `Joins` uses."""

    requests: dict[str, Request]
    threads: ThreadTable[Request]
    admission: ForkAdmission[Request]
    block_sharing: BlockSharing
    max_model_len: int

    def refuse(self, group: Group, client_index: int, child_request_id: str) -> None:
        """Report a child that does not open as ended by length."""

    def pause_thread(self, thread: Request) -> None:
        """End the engine request of a thread that waits for its children."""

    def start_continuation(self, group: Group, thread: Request) -> None:
        """Start the engine request in which a thread continues after its children's texts."""

    def has_left(self, request_id: str) -> bool:
        """Return whether the id of a paused engine request may be used again."""

    def end_waiting(self, group: Group, thread: Request, reason: FinishReason) -> None:
        """End a thread that does not continue after its children's texts."""

    def cancel(self, group: Group, thread_ids: set[str], client_index: int) -> None:
        """End the engine requests of threads that are no part of the answer."""


class Joins:
    """Waiting parents of all requests of a scheduler.

    `load_tokenizer` is called for the first request of a format with waiting parents.
    """

    def __init__(self, scheduler: JoiningScheduler, load_tokenizer: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._load_tokenizer = load_tokenizer
        # Parents whose engine request ends at the end of the step, and those that may continue.
        self._pausing: list[tuple[Group, Waiting]] = []
        self._ready: list[tuple[Group, Waiting]] = []
        # Paused parents that are part of steps whose output has not arrived.
        self._in_flight: dict[str, Waiting] = {}
        # Requests whose root has ended beside children that it has not joined; with its client.
        self._left: list[tuple[Group, int]] = []

    @cached_property
    def _tokenizer(self) -> Any:
        return self._load_tokenizer()

    def rules(self, parameters: ForkParameters) -> JoinRules | None:
        """Return the rules of a request's format; None if its threads do not wait."""
        if parameters.blocks is None:
            return None
        return block_rules(parameters.blocks, self._tokenizer)

    def begin(self, group: Group, root: Request) -> None:
        """Add the root thread of a new request."""
        group.prompt = root.prompt_token_ids or ()
        num_tokens = root.num_prompt_tokens
        group.places[root.request_id] = TextPlace(num_tokens, num_tokens)
        if isinstance(group.rules, BlockRules) and group.rules.joins_later:
            group.forks = OpenForks(group.rules)

    def until_marker(
        self, group: Group, thread: Request, token_ids: list[int]
    ) -> tuple[list[int], list[tuple[int, OpenBlock]], OpenBlock | JoinPoint | bool]:
        """Return new tokens up to the one at which the thread waits or a child ends, if any.

        The second value are the children that the thread forks before and goes on, each with the
        number of tokens up to there. The third is the block that the last token opens, the child
        that it joins, or whether it ends the thread.
        """
        rules = _rules(group)
        is_child = thread.request_id != group.root_id
        forked: list[tuple[int, OpenBlock]] = []
        for index, token_id in enumerate(token_ids):
            if token_id not in rules.marker_ids:
                continue
            taken = token_ids[: index + 1]
            if is_child and rules.ends_child(token_id):
                return taken, forked, True
            if is_child and not rules.nests:
                continue
            start = group.places[thread.request_id].segment_start
            generated = [*thread.all_token_ids[start:], *taken]
            if group.forks is None:
                block = rules.open(generated, lambda: group.prompt)
                if block is not None:
                    return taken, forked, block
                continue
            event = group.forks.read(generated)
            if isinstance(event, JoinPoint):
                return taken, forked, event
            if event is not None:
                forked.append((len(taken), event))
        return token_ids, forked, False

    def join(self, group: Group, parent: Request, point: JoinPoint) -> None:
        """Let a parent wait for one child from the end of the step on."""
        child_id = child_request_id(parent.request_id, point.ordinal)
        waiting: Waiting = WaitingParent(parent, point.block, [child_id])
        if child_id in group.unjoined:
            waiting.texts[child_id] = group.unjoined.pop(child_id)
        self._pausing.append((group, waiting))

    def open(self, group: Group, parent: Request, block: OpenBlock) -> None:
        """Build a block's children; the parent pauses at the end of the step, unless it joins."""
        scheduler = self._scheduler
        place = group.places[parent.request_id]
        waiting: Waiting = WaitingParent(parent, block, [])
        num_inherited = 0
        if block.num_inherited is not None:
            num_inherited = place.segment_start + block.num_inherited
        for child in block.children:
            child_id, ordinal = group.next_child(parent.request_id)
            waiting.child_ids.append(child_id)
            request = self._build_child(
                group, parent, ordinal, num_inherited, child.seed, group.remaining_tokens
            )
            if request is None:
                waiting.texts[child_id] = ()
            else:
                scheduler.admission.wait(group, request)
        if group.forks is None:
            self._pausing.append((group, waiting))
        else:
            group.unjoined |= waiting.texts

    def _build_child(
        self,
        group: Group,
        parent: Request,
        ordinal: int,
        num_inherited: int,
        seed: Sequence[int],
        max_tokens: int,
    ) -> Request | None:
        """Return a child that has its place and shares its parent's blocks; None if refused."""
        scheduler = self._scheduler
        child_id = child_request_id(parent.request_id, ordinal)
        num_tokens = num_inherited + len(seed)
        if num_tokens >= scheduler.max_model_len or not group.may_fork():
            scheduler.refuse(group, parent.client_index, child_id)
            return None
        request = build_thread_request(
            parent,
            request_id=child_id,
            ordinal=ordinal,
            num_inherited=num_inherited,
            seed=seed,
            max_tokens=max_tokens,
        )
        group.num_forks += 1
        group.places[child_id] = TextPlace(num_tokens, num_tokens)
        scheduler.block_sharing.share(parent, request, num_inherited)
        return request

    def pauses(self, group: Group, request: Request) -> bool:
        """Return whether an engine request ends because its thread waits."""
        waiting = group.waiting.get(request.request_id)
        return waiting is not None and waiting.request is request

    def ended(self, group: Group, request: Request) -> None:
        """Take the text of a child, right before its blocks are freed."""
        if group.closed:
            return
        if request.request_id == group.root_id:
            self._root_ends(group, request)
            return
        own = list(request.all_token_ids[group.places[request.request_id].own_start :])
        stopped = request.status == RequestStatus.FINISHED_STOPPED
        if group.parameters.ended_itself(own, stopped=stopped):
            del own[-1]
        self._take_text(group, request.request_id, own, request)

    def _take_text(
        self, group: Group, child_id: str, text: Sequence[int], request: Request | None
    ) -> None:
        waiting = group.waiting.get(child_id.rpartition("~")[0])
        if group.forks is not None and (waiting is None or child_id not in waiting.child_ids):
            self._keep(group, child_id, tuple(text))
            return
        if waiting is None:
            return
        waiting.texts[child_id] = tuple(text)
        if request is not None and child_id == waiting.child_ids[0]:
            self._hold_first_child(group, waiting, request)
        if waiting.is_complete:
            self._is_ready(group, waiting)

    def _keep(self, group: Group, child_id: str, text: tuple[int, ...]) -> None:
        """Keep the text of a child until its parent joins it, which may be in this step."""
        for _, waiting in self._pausing:
            if child_id in waiting.child_ids:
                waiting.texts[child_id] = text
                return
        group.unjoined[child_id] = text

    def _root_ends(self, group: Group, root: Request) -> None:
        if group.forks is not None:
            self._left.append((group, root.client_index))

    def _cancel_unjoined(self) -> None:
        """Cancel the children of roots that have ended without joining them."""
        while self._left:
            group, client_index = self._left.pop()
            if group.closed:
                continue
            for child in group.deferred:
                self._scheduler.block_sharing.forget(child.request_id)
                group.forget(child.request_id)
            group.deferred.clear()
            self._scheduler.cancel(group, set(group.live), client_index)

    def _is_ready(self, group: Group, waiting: Waiting) -> None:
        group.num_joining += 1
        self._ready.append((group, waiting))

    def _hold_first_child(self, group: Group, waiting: Waiting, child: Request) -> None:
        """Hold the first child's blocks if it begins with more of the joined text."""
        rules, block = _rules(group), waiting.block
        if not rules.shows_children or block.num_inherited is None:
            return
        num_context = waiting.request.num_tokens
        joined = (*block.children[0].header, *waiting.texts[child.request_id])
        # Only a child that inherits its parent's last token begins with the whole context.
        inherited = group.places[waiting.request.request_id].segment_start + block.num_inherited
        if inherited != num_context:
            return
        num_same = 0
        for mine, its in zip(joined, child.all_token_ids[num_context:], strict=False):
            if mine != its:
                break
            num_same += 1
        num_tokens = min(num_context + num_same, child.num_computed_tokens)
        if num_tokens > waiting.num_held:
            sharing = self._scheduler.block_sharing
            waiting.num_held = sharing.hold(waiting.request.request_id, child, num_tokens)

    def step_ends(self, step: SchedulerOutput) -> None:
        """Note that the output of a step has arrived, before the scheduler handles it."""
        for thread_id, waiting in list(self._in_flight.items()):
            waiting.in_flight_tokens -= step.num_scheduled_tokens.get(thread_id, 0)
            if waiting.in_flight_tokens <= 0:
                del self._in_flight[thread_id]

    def settle(self) -> None:
        """Pause the parents of new blocks, and continue those whose children have all ended."""
        pausing, self._pausing = self._pausing, []
        for group, waiting in pausing:
            if not group.closed:
                self._pause(group, waiting)
        later: list[tuple[Group, Waiting]] = []
        while self._ready:
            group, waiting = self._ready.pop(0)
            if group.closed:
                continue
            parent_id = waiting.request.request_id
            # vLLM drops the outputs of steps in flight by id, so the id may not come back before.
            if waiting.in_flight_tokens > 0 or not self._scheduler.has_left(parent_id):
                later.append((group, waiting))
            else:
                group.num_joining -= 1
                self._continue(group, waiting)
        self._ready = later
        self._cancel_unjoined()

    def _pause(self, group: Group, waiting: Waiting) -> None:
        parent = waiting.request
        place = group.places[parent.request_id]
        place.num_generated += parent.num_output_tokens
        waiting.in_flight_tokens = parent.num_in_flight_tokens
        if waiting.in_flight_tokens > 0:
            self._in_flight[parent.request_id] = waiting
        waiting.num_held = self._scheduler.block_sharing.hold(
            parent.request_id, parent, self._num_kept(group, place, parent)
        )
        group.waiting[parent.request_id] = waiting
        # First, or another child would start in its place.
        if waiting.is_complete:
            self._is_ready(group, waiting)
        self._scheduler.pause_thread(parent)

    def _num_kept(self, group: Group, place: TextPlace, parent: Request) -> int:
        """Return how many tokens of a parent's sequence stay before the joined text."""
        generated = parent.all_token_ids[place.segment_start :]
        return place.segment_start + _rules(group).num_kept(generated)

    def _continue(self, group: Group, waiting: Waiting) -> None:
        """Start a thread's continuation, or end it where nothing follows the joined text."""
        scheduler, parent = self._scheduler, waiting.request
        thread_id = parent.request_id
        place = group.places[thread_id]
        joined = _rules(group).joined(
            waiting.block,
            parent.all_token_ids[place.segment_start :],
            [waiting.texts[child_id] for child_id in waiting.child_ids],
        )
        num_kept = place.segment_start + joined.num_kept
        sequence = [*parent.all_token_ids[:num_kept], *joined.token_ids]
        del group.waiting[thread_id]
        if not joined.continues or len(sequence) >= scheduler.max_model_len:
            reason = FinishReason.LENGTH if joined.continues else FinishReason.STOP
            own = sequence[place.own_start :]
            scheduler.end_waiting(group, parent, reason)
            if thread_id == group.root_id:
                self._root_ends(group, parent)
            else:
                self._take_text(group, thread_id, own, None)
            return
        place.segment_start = len(sequence)
        continuation = build_continuation(
            parent,
            sequence,
            num_kept=num_kept,
            num_generated=place.num_generated,
            max_tokens=group.remaining_tokens,
        )
        scheduler.block_sharing.continues(thread_id, len(sequence))
        scheduler.start_continuation(group, continuation)

    def close(self, group: Group) -> list[Request]:
        """Forget the waiting parents of a request that ends; return them."""
        parents = [waiting.request for waiting in group.waiting.values()]
        for parent in parents:
            self._in_flight.pop(parent.request_id, None)
            self._scheduler.block_sharing.forget(parent.request_id)
            self._scheduler.threads.end_thread(parent.request_id)
        return parents

    def resume(self, group: Group, request: Request, journal: Journal) -> list[Request]:
        """Return the unfinished threads of a journal that run, and note those that wait.

        Threads that have generated tokens come first, then by path.
        """
        rules = _rules(group)
        group.prompt = request.prompt_token_ids or ()
        threads = rebuilt_threads(journal, group.prompt, rules, group.parameters)
        running: list[tuple[bool, Request]] = []
        for path, thread in threads.items():
            delta = thread.delta
            group.count_text(delta.token_ids, stopped=delta.finish_reason == FinishReason.STOP)
            group.num_forks += bool(path) and not delta.was_refused
            if delta.finish_reason is not None:
                continue
            thread_id = thread_request_id(group.root_id, path)
            group.num_children[thread_id] = thread.num_children
            group.places[thread_id] = TextPlace(thread.own_start, thread.segment_start)
        group.forks = threads[()].forks
        for path, thread in threads.items():
            if thread.delta.finish_reason is not None:
                continue
            thread_id = thread_request_id(group.root_id, path)
            resumed = resumed_thread(request, thread.delta, thread.sequence, group.remaining_tokens)
            if thread.waits_for is None:
                running.append((bool(path) and not thread.delta.token_ids, resumed))
                continue
            waiting: Waiting = WaitingParent(
                resumed,
                thread.waits_for,
                [thread_request_id(group.root_id, child) for child in thread.child_paths],
            )
            group.waiting[thread_id] = waiting
            self._scheduler.threads.wait_thread(group, thread_id)
            for child_path, child_id in zip(thread.child_paths, waiting.child_ids, strict=True):
                if threads[child_path].delta.finish_reason is not None:
                    (waiting.texts[child_id],) = ended_texts(
                        [child_path], threads, rules, group.parameters
                    )
            if waiting.is_complete:
                self._is_ready(group, waiting)
        if group.forks is not None:
            awaited = threads[()].child_paths
            for path, thread in threads.items():
                if path and path not in awaited and thread.delta.finish_reason is not None:
                    child_id = thread_request_id(group.root_id, path)
                    group.unjoined[child_id] = thread.own_text(group.parameters)
        return [thread for _, thread in sorted(running, key=lambda each: each[0])]


def _rules(group: Group) -> BlockRules:
    assert isinstance(group.rules, BlockRules)
    return group.rules
