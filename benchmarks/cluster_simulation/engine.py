"""What ForkScheduler and vLLM's scheduler decide, over counts in place of tensors; no clock.

Forks are held back and let go by the scheduler's own `ForkAdmission`. What has begun goes before
what is new, families in order of arrival; where KV blocks run out, the youngest family's last
thread is put off and computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from apar_core.fork_parameters import ForkParameters
from apar_core.scheduler.fork_admission import ForkAdmission
from apar_core.scheduler.fork_policy import ForkPolicy
from apar_core.scheduler.thread_table import ThreadGroup
from apar_core.step_costs.costs import StepBatch
from benchmarks.cluster_simulation.blocks import BlockPool, Segment
from benchmarks.cluster_simulation.decode_batch import DecodeBatch
from benchmarks.cluster_simulation.prefix_cache import PrefixCache
from benchmarks.cluster_simulation.step_times import ReplicaModel
from benchmarks.cluster_simulation.threads import Family, Outcome, SimRequest, Thread


@dataclass(slots=True)
class StepPlan:
    """Steps that run as one: `rows` decode or are prefilled, `attended` is of the first step.

    Where `prefill_tokens` are computed, or a thread was put off, it is one step.
    """

    rows: int
    attended: int
    prefill_tokens: int
    most_steps: int


class SimEngine:
    """The threads of one replica, between its steps."""

    def __init__(self, model: ReplicaModel, policy: ForkPolicy) -> None:
        self.model = model
        self.admission: ForkAdmission[Thread] = ForkAdmission(
            None, policy, lambda child: child.length
        )
        self.pool = BlockPool(model.blocks)
        self.batch = DecodeBatch(model.block_size)
        self.families: dict[str, Family] = {}
        self.step = 0
        self.generated_tokens = 0
        self.num_waiting_forks = 0
        self.preemptions = 0
        self.most_rows = 0
        self._cache = PrefixCache(self.pool, model.block_size)
        self._waiting: list[Thread] = []
        self._prefilling: list[Thread] = []
        self._prefilled: list[Thread] = []
        self._num_families = 0
        self._parameters = ForkParameters(
            0, 0, True, max_threads=model.max_request_threads, max_forks=1 << 20, end_ids=()
        )

    @property
    def num_threads(self) -> int:
        """Threads running or waiting in the engine, those held back left out."""
        return self._num_rows() + len(self._waiting)

    def add(self, outcome: Outcome, on_end: Callable[[Outcome], None]) -> None:
        """Queue a request; `on_end` is called once, when its last thread has ended."""
        request = outcome.request
        arrival = (0, float(self._num_families))
        group = ThreadGroup[Thread](request.request_id, self._parameters, 1 << 40, arrival)
        family = Family(self._num_families, outcome, on_end, group)
        self._num_families += 1
        group.live.add("0")
        self.families[request.request_id] = family
        plan, order = request.tree.threads[0], (True, family.order, 0)
        root = Thread(family, 0, plan, Segment(None, 0), request.prompt_tokens, order)
        heappush(self._waiting, root)

    def cached_tokens(self, request: SimRequest) -> int:
        """Tokens at a prompt's beginning that would not be computed again now."""
        return self._cache.hit_blocks(request.pieces)[0] * self.model.block_size

    def attended_tokens(self) -> int:
        """Tokens of KV cache that all threads read, those that wait included."""
        waiting = sum(thread.length for thread in self._waiting)
        return self.batch.attended(self.step) + waiting

    def free_blocks_ahead(self) -> int:
        """Free blocks less those that waiting threads will take; below zero where they queue."""
        waiting = sum(
            thread.length - thread.segment.first * self.model.block_size for thread in self._waiting
        )
        return self.pool.free - self._blocks_of(waiting)

    def begin(self) -> StepPlan | None:
        """Make room, admit, and tell what runs next; None if there is nothing to do.

        Raises RuntimeError where a thread alone needs more blocks than there are.
        """
        put_off = self._make_room()
        prefill_tokens = 0 if put_off else self._admit()
        if self._num_rows() == 0 and self._waiting:
            self._free_references()
            prefill_tokens = self._admit()
            if prefill_tokens == 0:
                raise RuntimeError(
                    f"{self._waiting[0].length} tokens do not fit into {self.pool.blocks} blocks"
                )
        rows = self._num_rows()
        if rows == 0:
            return None
        self.most_rows = max(self.most_rows, rows)
        steps = 1
        event = self.batch.next_event()
        if prefill_tokens == 0 and not put_off and event is not None:
            steps = self.batch.steps_that_fit(self.step, event - self.step, self.pool.free)
        return StepPlan(rows, self.batch.attended(self.step), prefill_tokens, steps)

    def end(self, num_steps: int, now_s: float) -> None:
        """Take the tokens of the steps that have run; let threads fork and end."""
        batch = self.batch
        self.pool.free -= batch.growth(self.step, num_steps)
        self._cache.forget_overwritten()
        self.generated_tokens += num_steps * len(batch) + len(self._prefilled)
        self.step += num_steps
        for thread in self._prefilled:
            self._join(thread, now_s)
        self._prefilled.clear()
        while (thread_due := batch.pop_due(self.step)) is not None:
            self._pass_event(thread_due, now_s)
        self._start_waiting_forks()

    def _num_rows(self) -> int:
        return len(self.batch) + len(self._prefilling) + len(self._prefilled)

    def _join(self, thread: Thread, now_s: float) -> None:
        thread.length += 1
        thread.generated += 1
        # Its newest token is computed, and takes its place in the cache, in the coming step.
        self.batch.add(thread, self.step)
        outcome = thread.family.outcome
        if outcome.first_token_s is None:
            outcome.first_token_s = now_s
            self._cache.add(thread.segment, outcome.request.pieces)

    def _pass_event(self, thread: Thread, now_s: float) -> None:
        forks = thread.plan.forks
        if thread.next_fork < len(forks):
            self._fork(thread, forks[thread.next_fork][1])
            thread.next_fork += 1
            self.batch.expect(thread)
        else:
            self._end_thread(thread, now_s)

    def _fork(self, parent: Thread, index: int) -> None:
        family = parent.family
        length = parent.offset + self.step
        # The fork token is not computed yet; the half-full block before it is copied.
        segment = Segment(parent.segment, (length - 1) // self.model.block_size)
        plan = family.outcome.request.tree.threads[index]
        child = Thread(family, index, plan, segment, length + 1, (False, family.order, index))
        self.admission.wait(family.group, child)
        self.num_waiting_forks += 1

    def _start_waiting_forks(self) -> None:
        # As ForkScheduler does it.
        if self.admission.queue.first() is not None:
            rows = min(self.num_threads, self.model.max_threads)
            view = StepBatch(rows, self.batch.attended(self.step))
            while taken := self.admission.next(self.num_threads, view):
                self._queue_child(*taken)
                view = view.grown(rows=1, attended_tokens=taken[1].length)
        self.admission.settle()

    def _queue_child(self, group: ThreadGroup[Thread], child: Thread) -> None:
        group.live.add(str(child.index))
        self.num_waiting_forks -= 1
        heappush(self._waiting, child)

    def _end_thread(self, thread: Thread, now_s: float) -> None:
        family = thread.family
        self.batch.remove(thread, self.step)
        # Its last token is never computed.
        self.pool.stop(thread.segment, self._blocks_of(thread.length - 1))
        family.outcome.generated_tokens += thread.generated
        group = family.group
        group.live.discard(str(thread.index))
        if group.deferred and not group.live:
            # Nothing would ever ask for the rest of a family that has no thread alive.
            self._queue_child(group, group.deferred.popleft())
        self.admission.queue.offer(group)
        if not group.live:
            family.outcome.end_s = now_s
            del self.families[family.outcome.request.request_id]
            family.on_end(family.outcome)

    def _admit(self) -> int:
        """Let threads in while rows, blocks and the step's tokens last; returns prompt tokens."""
        budget = max(0, self.model.step_tokens - len(self.batch))
        used = 0
        for thread in list(self._prefilling):
            used += self._prefill(thread, budget - used)
        while self._waiting and used < budget and self._num_rows() < self.model.max_threads:
            thread = self._waiting[0]
            if not self._start(thread):
                break
            heappop(self._waiting)
            self._prefilling.append(thread)
            used += self._prefill(thread, budget - used)
        return used

    def _start(self, thread: Thread) -> bool:
        """Give a waiting thread its blocks, if they are free; says what is left to compute."""
        segment, request = thread.segment, thread.family.outcome.request
        intact = thread.fresh and segment.held
        num_blocks = self._blocks_of(thread.length)
        free = self.pool.free - self.batch.new_blocks(self.step)
        # A root that nobody reads from stands nowhere: it finds its prompt in the cache, or not.
        at_cache = thread.index == 0 and not segment.children
        if at_cache:
            missing = num_blocks - self._cache.hit_blocks(request.pieces)[1]
        else:
            self.pool.hold_again(segment)
            missing = self.pool.missing(segment, num_blocks)
        if missing > free:
            return False
        if at_cache:
            self._cache.attach(segment, request.pieces)
            segment.held = True
        known = max(segment.first, segment.end) * self.model.block_size
        if thread.index and intact:
            # All but the fork and the child token is there, in part by a copied block.
            known = thread.length - 2
        elif thread.fresh:
            thread.family.outcome.cached_tokens = known
        thread.prefill_left = max(1, thread.length - known)
        self.pool.start(segment, num_blocks)
        thread.fresh = False
        thread.order = (False, *thread.order[1:])
        return True

    def _prefill(self, thread: Thread, budget: int) -> int:
        """Compute what is left of a prompt, or a part; the last part brings the next token."""
        part = min(thread.prefill_left, budget)
        thread.prefill_left -= part
        if thread.prefill_left == 0:
            if thread in self._prefilling:
                self._prefilling.remove(thread)
            self._prefilled.append(thread)
        return part

    def _make_room(self) -> bool:
        """Put threads off until the coming step's blocks are free; whether any was."""
        put_off = False
        while self.batch.new_blocks(self.step) > self.pool.free:
            self._put_off(max(self.batch.rows))
            put_off = True
        return put_off

    def _put_off(self, thread: Thread) -> None:
        self.batch.remove(thread, self.step)
        self.pool.stop(thread.segment, self._blocks_of(thread.length - 1))
        thread.family.outcome.preemptions += 1
        self.preemptions += 1
        heappush(self._waiting, thread)

    def _free_references(self) -> None:
        """Take from waiting threads what keeps the first of them from running."""
        deferred = (thread for family in self.families.values() for thread in family.group.deferred)
        for thread in [*self._waiting, *deferred]:
            self.pool.let_go(thread.segment)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.model.block_size)
