"""Lists that are written in parallel: what `formats/lists.py` says, done by the scheduler.

Life of a list:

1. `take` reads every sampled token. At the end of a head it builds the threads of the item's detail
   and of the next head. The root thread then waits for the item; a head thread ends. Where the
   fork policy expects no gain, a list is declined instead: the root thread goes on.
2. Heads that are far ahead of the root wait (`ListItems.ahead`).
3. When the item is complete, `settle` continues the root after it: an engine request with the
   root's id, whose prompt ends with the item.
4. Where the root begins another item, it drops these tokens and waits for that one. Where it writes
   anything else or ends, `settle` cancels the threads of later items in the same step.

Tokens that are no part of the text are given back to the request's budget.
"""

from __future__ import annotations

from typing import Protocol, cast

from apar_core.formats.blocks import OpenBlock
from apar_core.formats.lists import HeadThread, ListBlock, ListEnd, NextItem, RootThread
from apar_core.journal import Journal
from apar_core.scheduler.held_outputs import HeldOutputs
from apar_core.scheduler.joins import Group, JoiningScheduler, Joins, Waiting
from apar_core.scheduler.list_journal import rebuilt_lists, stop_ids_of
from apar_core.scheduler.thread_requests import build_continuation, resumed_thread
from apar_core.scheduler.thread_table import ListGroup, TextPlace, WaitingParent
from apar_core.step_costs.costs import StepBatch
from apar_core.tree.thread_names import thread_request_id
from apar_core.vllm_names import FinishReason, Request, RequestStatus

USEFUL_SHARE = 0.15
"""Text that a row of a list's threads is taken to give, as a share of that of another row.

The rest is discarded, or computed once more when the root continues after an item. Chosen in
virtual time, so that lists lose at no number of requests (docs/lists.md).
"""
_ITEM = "item"
_NO_BLOCK = OpenBlock((), (), None)


class ListScheduler(JoiningScheduler, Protocol):
    """The part of the scheduler that `Lists` uses."""

    held: HeldOutputs

    def coming_batch(self) -> StepBatch:
        """Return the next step's batch as far as it is known."""

    def take_token(self, thread: Request, token_id: int, is_stale: bool) -> tuple[list[int], bool]:
        """Let vLLM take one token of a thread; return it, and whether the thread has ended."""


class Lists(Joins):
    """Lists of all requests of a scheduler."""

    _scheduler: ListScheduler

    def __init__(self, scheduler: ListScheduler) -> None:
        super().__init__(scheduler, lambda: None)
        # Requests whose list has ended, with the first thread after it, and the root's client.
        self._ended: list[tuple[ListGroup[Request], str, int]] = []
        self._cancelling: str | None = None

    def begin(self, group: Group, root: Request) -> None:
        """Add the root thread of a new request."""
        super().begin(group, root)
        lists = _lists(group)
        lists.readers[root.request_id] = lists.rules.root_reader(group.prompt)

    def take(
        self, group: ListGroup[Request], thread: Request, token_ids: list[int], is_stale: bool
    ) -> tuple[list[int], bool]:
        """Take a thread's new tokens up to one with which it ends or waits; return these.

        The second value is whether the thread has ended.
        """
        reader = group.readers[thread.request_id]
        taken: list[int] = []
        for index, token_id in enumerate(token_ids, 1):
            # One by one: what a token shows depends on whether vLLM ends the thread with it.
            new, stopped = self._scheduler.take_token(thread, token_id, is_stale)
            taken += new
            has_stopped = stopped and thread.status == RequestStatus.FINISHED_STOPPED
            if group.parameters.ended_itself(new, stopped=has_stopped):
                return taken, True
            group.used_tokens += 1
            mark = reader.read(token_id, stopped=stopped or group.exhausted)
            if isinstance(mark, ListEnd):
                self._end_list(group, mark.number, thread.client_index)
            if stopped or group.exhausted:
                return taken, stopped
            if mark is True:
                thread.status = RequestStatus.FINISHED_STOPPED
                return taken, True
            if isinstance(mark, ListBlock | NextItem):
                return taken, self._open(group, thread, mark, is_last=index == len(token_ids))
        return taken, False

    def _open(
        self,
        group: ListGroup[Request],
        thread: Request,
        mark: ListBlock | NextItem,
        *,
        is_last: bool,
    ) -> bool:
        """Open an item, or let the root wait for one; return whether the thread ends.

        `is_last`: the step has given the thread no further token.
        """
        self._scheduler.held.release(group.root_id)
        is_root = thread.request_id == group.root_id
        if isinstance(mark, NextItem):
            group.num_kept = 0
            self._start_next_heads(group)
        else:
            if is_root:
                group.num_kept, group.heads = mark.num_inherited or 0, {}
            if is_root and not self._pays(thread):
                self._decline(group, thread, mark)
                if is_last:
                    return False
            else:
                self._open_item(group, thread, mark)
        if is_root:
            waiting: Waiting = WaitingParent(thread, _NO_BLOCK, [_ITEM])
            self._pausing.append((group, waiting))
            return False
        thread.status = RequestStatus.FINISHED_STOPPED
        return True

    def _pays(self, root: Request) -> bool:
        """Return whether the threads of a list that the root has begun raise the throughput."""
        scheduler = self._scheduler
        batch = scheduler.coming_batch().grown(rows=scheduler.admission.num_new, attended_tokens=0)
        return scheduler.admission.policy.pays(
            batch, attended=root.num_tokens, useful_share=USEFUL_SHARE
        )

    def _decline(self, group: ListGroup[Request], root: Request, block: ListBlock) -> None:
        """Refuse the threads of a list; the root writes it itself."""
        for reader in group.rules.child_readers(block):
            child_id, _ = group.next_child(group.root_id)
            self._scheduler.refuse(group, root.client_index, child_id)
            reader.ends((), refused=True)

    def _open_item(self, group: ListGroup[Request], parent: Request, block: ListBlock) -> None:
        """Build the threads of an item's detail and of the next head."""
        segment_start = group.places[parent.request_id].segment_start
        readers = group.rules.child_readers(block)
        for child, num_inherited, reader in zip(
            block.children, block.inherited(segment_start), readers, strict=True
        ):
            child_id, ordinal = group.next_child(parent.request_id)
            if isinstance(reader, HeadThread):
                group.heads[reader.number] = child_id
            request = self._build_child(
                group, parent, ordinal, num_inherited, child.seed, _max_tokens(group)
            )
            if request is None:
                reader.ends((), refused=True)
                continue
            group.readers[child_id] = reader
            if group.rules.is_ahead(reader):
                group.ahead[child_id] = request
            else:
                self._scheduler.admission.wait(group, request)

    def _start_next_heads(self, group: ListGroup[Request]) -> None:
        for child_id, child in list(group.ahead.items()):
            if not group.rules.is_ahead(group.readers[child_id]):
                del group.ahead[child_id]
                self._scheduler.admission.wait(group, child)

    def ended(self, group: Group, request: Request) -> None:
        """Take the text of a thread that has ended, right before its blocks are freed."""
        lists, thread_id = _lists(group), request.request_id
        if group.closed or self._is_cancelled(thread_id):
            return
        reader = lists.readers[thread_id]
        if isinstance(reader, RootThread):
            if reader.run is not None:
                self._end_list(lists, reader.run.number, request.client_index)
            return
        own = list(request.all_token_ids[group.places[thread_id].own_start :])
        stopped = request.status == RequestStatus.FINISHED_STOPPED
        if group.parameters.ended_itself(own, stopped=stopped):
            del own[-1]
        reader.ends(own)
        num_text = reader.num_text(len(own))
        lists.num_text[thread_id] = num_text
        self._discard(lists, len(own) - num_text)
        waiting = group.waiting.get(group.root_id)
        if waiting is not None and reader.number == reader.run.first_number:
            self._hold_detail(lists, waiting, request, num_text)
        self._item_may_be_known(lists)

    def _item_may_be_known(self, group: ListGroup[Request]) -> None:
        waiting = group.waiting.get(group.root_id)
        if waiting is None or waiting.is_complete:
            return
        run = _root_reader(group).run
        if run is not None and run.item(run.number).is_known:
            waiting.texts[_ITEM] = ()
            self._is_ready(group, waiting)

    def _hold_detail(
        self, group: ListGroup[Request], waiting: Waiting, detail: Request, num_text: int
    ) -> None:
        """Hold the blocks of the second item's detail, after which the root continues."""
        own_start = group.places[detail.request_id].own_start
        num_tokens = min(own_start + num_text, detail.num_computed_tokens)
        if num_tokens > waiting.num_held:
            sharing = self._scheduler.block_sharing
            waiting.num_held = sharing.hold(group.root_id, detail, num_tokens)

    def settle(self) -> None:
        """Pause and continue root threads, and cancel the threads after the ends of lists."""
        self._cancel()
        super().settle()
        self._cancel()

    def _cancel(self) -> None:
        while self._ended:
            group, first, client_index = self._ended.pop()
            if not group.closed:
                self._cancel_from(group, first, client_index)

    def _end_list(self, group: ListGroup[Request], number: int, client_index: int) -> None:
        """Note that a list ends with an item."""
        first = group.heads.get(number + 1)
        group.heads = {}
        if first is not None:
            self._ended.append((group, first, client_index))

    def _pause(self, group: Group, waiting: Waiting) -> None:
        super()._pause(group, waiting)
        self._item_may_be_known(_lists(group))

    def _num_kept(self, group: Group, place: TextPlace, parent: Request) -> int:
        return place.segment_start + _lists(group).num_kept

    def _continue(self, group: Group, waiting: Waiting) -> None:
        """Continue the root after the item that it has waited for, or after its own tokens."""
        lists = _lists(group)
        scheduler, parent = self._scheduler, waiting.request
        place, run = group.places[group.root_id], _root_reader(lists).run
        assert run is not None
        del group.waiting[group.root_id]
        num_kept = parent.num_tokens
        item_ids: tuple[int, ...] = ()
        if run.gives_item:
            num_kept = place.segment_start + lists.num_kept
            item_ids = lists.rules.item_tokens(run, run.number)
            place.segment_start = num_kept + len(item_ids)
            self._discard(lists, parent.num_tokens - num_kept)
        sequence = [*parent.all_token_ids[:num_kept], *item_ids]
        if len(sequence) >= scheduler.max_model_len:
            self._end_list(lists, run.number, parent.client_index)
            scheduler.end_waiting(group, parent, FinishReason.LENGTH)
            return
        continuation = build_continuation(
            parent,
            sequence,
            num_kept=num_kept,
            num_generated=place.num_generated,
            max_tokens=_max_tokens(lists),
        )
        scheduler.block_sharing.continues(group.root_id, len(sequence))
        scheduler.start_continuation(group, continuation)

    def _cancel_from(self, group: ListGroup[Request], first: str, client_index: int) -> None:
        """Cancel the thread of a head, and all threads below it."""
        scheduler, self._cancelling = self._scheduler, first
        queued = [c for c in group.deferred if self._is_cancelled(c.request_id)]
        queued += [child for name, child in group.ahead.items() if self._is_cancelled(name)]
        for child in queued:
            if group.ahead.pop(child.request_id, None) is None:
                group.deferred.remove(child)
            scheduler.block_sharing.forget(child.request_id)
            group.forget(child.request_id)
        live = {name for name in group.live if self._is_cancelled(name)}
        num_tokens = sum(scheduler.requests[name].num_output_tokens for name in live)
        ended = [name for name in group.num_text if self._is_cancelled(name)]
        num_tokens += sum(group.num_text.pop(name) for name in ended)
        scheduler.cancel(group, live, client_index)
        self._cancelling = None
        self._discard(group, num_tokens)

    def _is_cancelled(self, thread_id: str) -> bool:
        first = self._cancelling
        return first is not None and (thread_id == first or thread_id.startswith(f"{first}~"))

    def _discard(self, group: ListGroup[Request], num_tokens: int) -> None:
        """Give back tokens that are no part of the text."""
        group.used_tokens -= num_tokens
        self._scheduler.block_sharing.join_counters.discarded_tokens += num_tokens

    def close(self, group: Group) -> list[Request]:
        """Forget the waiting root of a request that ends, and heads ahead; return them."""
        lists = _lists(group)
        ahead = list(lists.ahead.values())
        lists.ahead.clear()
        for child in ahead:
            self._scheduler.block_sharing.forget(child.request_id)
        return super().close(group) + ahead

    def resume(self, group: Group, request: Request, journal: Journal) -> list[Request]:
        """Return the unfinished threads of a journal that run; the root may wait.

        Threads that have generated tokens come first, then by path.
        """
        lists = _lists(group)
        lists.prompt = request.prompt_token_ids or ()
        rebuilt = rebuilt_lists(
            journal, lists.prompt, lists.rules, group.parameters, stop_ids_of(request)
        )
        lists.num_kept = rebuilt.num_kept
        lists.heads = {
            number: thread_request_id(group.root_id, path) for number, path in rebuilt.heads.items()
        }
        running: list[tuple[bool, Request]] = []
        for path, thread in rebuilt.threads.items():
            delta, thread_id = thread.delta, thread_request_id(group.root_id, path)
            num_text = thread.num_text(group.parameters)
            group.used_tokens += num_text
            group.num_forks += bool(path) and not delta.was_refused
            if delta.finish_reason is not None:
                lists.num_text[thread_id] = num_text
        for path, thread in rebuilt.threads.items():
            delta, thread_id = thread.delta, thread_request_id(group.root_id, path)
            if delta.finish_reason is not None:
                continue
            group.num_children[thread_id] = thread.num_children
            group.places[thread_id] = TextPlace(thread.own_start, thread.segment_start)
            lists.readers[thread_id] = thread.reader
            resumed = resumed_thread(request, delta, thread.sequence, _max_tokens(lists))
            if not delta.token_ids and lists.rules.is_ahead(thread.reader):
                lists.ahead[thread_id] = resumed
                continue
            if not thread.waits:
                running.append((bool(path) and not delta.token_ids, resumed))
                continue
            waiting: Waiting = WaitingParent(resumed, _NO_BLOCK, [_ITEM])
            group.waiting[thread_id] = waiting
            self._scheduler.threads.wait_thread(group, thread_id)
        self._item_may_be_known(lists)
        return [thread for _, thread in sorted(running, key=lambda each: each[0])]


def _lists(group: Group) -> ListGroup[Request]:
    assert isinstance(group, ListGroup)
    return group


def _max_tokens(group: ListGroup[Request]) -> int:
    """Return how many tokens one thread may generate."""
    return min(group.remaining_tokens, group.token_budget // group.rules.work_factor)


def _root_reader(group: ListGroup[Request]) -> RootThread:
    # A root that waits keeps its reader.
    return cast(RootThread, group.readers[group.root_id])
