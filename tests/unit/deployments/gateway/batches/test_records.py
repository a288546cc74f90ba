"""Changes of a batch's state, in any order in which gateways and clients may cause them."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from deployments.gateway.batches.records import Batch, InputProblem, Status, new_id
from deployments.wire.errors import ConflictError
from tests.fakes.batch_records import batch_of

PROBLEM = InputProblem(code="empty_file", message="nothing")
CHANGES: dict[str, Callable[[Batch, int], Batch]] = {
    "validated": lambda batch, now_s: batch.validated(3, 3, now_s),
    "refused": lambda batch, now_s: batch.refused([PROBLEM], now_s),
    "answered": lambda batch, now_s: batch.answered(now_s),
    "ended": lambda batch, now_s: batch.ended(now_s, "file-o", None, expired=False),
    "expired": lambda batch, now_s: batch.ended(now_s, "file-o", None, expired=True),
    "cancelled": lambda batch, now_s: batch.cancelled(now_s),
}
# What OpenAI's documentation shows as following each state.
FOLLOWING: dict[Status, set[Status]] = {
    Status.VALIDATING: {
        Status.IN_PROGRESS,
        Status.FAILED,
        Status.CANCELLING,
        Status.EXPIRED,
        Status.COMPLETED,
    },
    Status.IN_PROGRESS: {
        Status.FINALIZING,
        Status.FAILED,
        Status.CANCELLING,
        Status.EXPIRED,
        Status.COMPLETED,
    },
    Status.FINALIZING: {Status.COMPLETED, Status.EXPIRED, Status.CANCELLING, Status.FAILED},
    Status.CANCELLING: {Status.CANCELLED, Status.FAILED},
}


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=12))
def test_a_batch_that_has_ended_never_changes(names: list[str]) -> None:
    batch = batch_of()
    for now_s, name in enumerate(names, 1):
        before = batch
        try:
            batch = CHANGES[name](before, now_s)
        except ConflictError:
            assert not before.is_open
        if batch is before or batch.status is before.status:
            assert batch == before
            continue
        assert batch.status in FOLLOWING[before.status]
        assert batch.times == before.times | {batch.status: now_s}
        assert (batch.ended_at == now_s) == (not batch.is_open)
    assert Batch.model_validate_json(batch.model_dump_json()) == batch


def test_ids_sort_by_their_time() -> None:
    ids = [new_id("batch_") for _ in range(1000)]

    assert len(set(ids)) == 1000
    assert sorted(ids, key=lambda each: each[:18]) == ids
