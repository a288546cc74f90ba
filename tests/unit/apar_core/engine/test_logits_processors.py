from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from apar_core.engine.logits_processors import ForkBans, Replay, bad_words
from apar_core.engine.replay import replay_args, replayed_tokens, without_generated
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters
from apar_core.journal import ThreadDelta
from apar_core.tree.thread_names import replay_key_of_path
from tests.fakes.scripted_engine import CHILD, END, FORK, fork_parameters
from tests.fakes.torch_operations import COPIES, Operations

CPU = torch.device("cpu")
NO_CONFIG: Any = SimpleNamespace()
HPD: dict[str, Any] = {"cut_tokens": 1, "children_fork": False}
PADOC: dict[str, Any] = {"seed_ids": [], "banned_ids": [], "children_fork": False}
TOKENS = st.lists(st.integers(0, 200_000), max_size=5)


def added(*rows: tuple[dict[str, Any] | None, list[int], list[int]]) -> BatchUpdate:
    """Return a batch of new rows: (extra_args, prompt ids, output ids) of each."""
    return BatchUpdate(
        batch_size=len(rows),
        removed=[],
        added=[
            (index, SamplingParams(extra_args=extra), prompt, generated)
            for index, (extra, prompt, generated) in enumerate(rows)
        ],
        moved=[],
    )


def forking(**changes: Any) -> dict[str, Any]:
    return {EXTRA_ARG: {**fork_parameters().to_extra_arg(), **changes}}


def banned(processor: LogitsProcessor, num_rows: int = 1) -> list[set[int]]:
    logits = processor.apply(torch.zeros(num_rows, 16))
    return [set(torch.where(torch.isinf(row))[0].tolist()) for row in logits]


@pytest.mark.parametrize(
    ("extra_args", "prompt", "generated", "expected"),
    [
        (forking(), [9], [], {CHILD}),
        (forking(), [9], [10], {CHILD}),
        (forking(), [9], [10, FORK], {CHILD, FORK}),
        (forking(), [9, FORK, CHILD], [], {CHILD, FORK}),
        (forking(), [9, FORK, CHILD], [10], {CHILD}),
        # A thread that is resumed right after its fork token, and its next step.
        (forking(), [9, 10, FORK], [], {CHILD, FORK}),
        (forking(), [9, 10, FORK], [11], {CHILD}),
        (forking(enabled=False), [9], [10], {CHILD, FORK}),
        # HPD-Parsing: a child starts with its seed and does not fork.
        (forking(**HPD), [9], [10], {CHILD}),
        (forking(**HPD, thread_path=[0]), [9, CHILD], [], {CHILD, FORK}),
        (forking(**HPD, thread_path=[0]), [9, CHILD], [10], {CHILD, FORK}),
        # PaDoc: nothing is forced.
        (forking(**PADOC), [9], [10], set()),
        (forking(**PADOC), [9], [FORK], {FORK}),
        (forking(**PADOC, thread_path=[0]), [9, FORK], [10], {FORK}),
        # A seed of two markers.
        (forking(seed_ids=[CHILD, 7], banned_ids=[CHILD, 7]), [9, 7], [], {CHILD, 7, FORK}),
        # Within a tool call, also of a thread that was preempted in it; not after one in the chat.
        (forking(call_ids=[8]), [9], [10, 8], {CHILD, FORK}),
        (forking(call_ids=[8]), [9], [8, 10, 11], {CHILD, FORK}),
        (forking(call_ids=[8]), [8, 9], [10], {CHILD}),
        # Children call no tools.
        (forking(call_ids=[8], thread_path=[0]), [9, FORK, CHILD], [10], {CHILD, 8}),
    ],
)
def test_control_tokens_are_banned_where_they_cannot_stand(
    extra_args: dict[str, Any], prompt: list[int], generated: list[int], expected: set[int]
) -> None:
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((extra_args, prompt, generated)))

    assert banned(bans) == [expected]


def test_rows_keep_their_bans_when_the_batch_changes() -> None:
    unforked = forking(enabled=False)
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((unforked, [9], [10]), (forking(), [9], [10]), (unforked, [9], [])))
    assert banned(bans, 3) == [{CHILD, FORK}, {CHILD}, {CHILD, FORK}]

    # The last row moves to the index of the first.
    move = (2, 0, MoveDirectionality.UNIDIRECTIONAL)
    bans.update_state(BatchUpdate(batch_size=2, removed=[], added=[], moved=[move]))
    assert banned(bans, 2) == [{CHILD, FORK}, {CHILD}]

    bans.update_state(BatchUpdate(batch_size=1, removed=[0], added=[], moved=[]))
    bans.update_state(None)
    assert banned(bans, 2) == [{CHILD}, {CHILD}]


def test_a_step_without_forks_copies_nothing_to_the_device() -> None:
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((forking(enabled=False), [9], [10]), (forking(), [9], [10])))
    logits = torch.zeros(2, 16)

    with Operations() as operations:
        bans.apply(logits)

    assert torch.isinf(logits[:, FORK]).tolist() == [True, False]
    assert operations.names.isdisjoint(COPIES)


def test_bans_follow_the_growing_output_of_each_row() -> None:
    generated: list[int] = [10]
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((forking(), [9], generated), (forking(), [9], [FORK])))
    assert banned(bans, 2) == [{CHILD}, {CHILD, FORK}]

    generated.append(FORK)
    bans.update_state(None)

    assert banned(bans, 2) == [{CHILD, FORK}, {CHILD, FORK}]


def test_a_thread_that_has_begun_a_tool_call_forks_no_more() -> None:
    generated: list[int] = [10]
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((forking(call_ids=[8]), [9], generated), (forking(), [9], [10])))
    found = [banned(bans, 2)]

    for token in (8, 11, 12):
        generated.append(token)
        bans.update_state(None)
        found.append(banned(bans, 2))

    assert found == [[{CHILD}, {CHILD}], *3 * [[{CHILD, FORK}, {CHILD}]]]


def test_rows_of_ordinary_models_are_left_alone() -> None:
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((None, [9], [10])))

    assert banned(bans) == [set()]
    assert not bans.is_argmax_invariant()


def test_bad_words_are_the_same_bans() -> None:
    assert bad_words(fork_parameters()) == [[CHILD], [FORK, FORK]]
    off = ForkParameters(FORK, (CHILD,), (CHILD,), False, 1, 1, (END,))
    assert bad_words(off) == [[CHILD], [FORK]]
    padoc = replace(fork_parameters(), seed_ids=(), banned_ids=(), children_fork=False)
    assert bad_words(padoc) == [[FORK, FORK]]
    assert bad_words(replace(padoc, thread_path=(0,))) == [[FORK]]


def test_replay_makes_the_next_token_of_each_thread_certain() -> None:
    plan = replay_args({"": [10, 11], "1": [12]})
    child = {**plan, **forking(thread_path=[1])}
    replay = Replay(NO_CONFIG, CPU, False)
    replay.update_state(added(({**plan, **forking()}, [9], [10]), (child, [9], []), (None, [], [])))
    before = torch.randn(3, 16)

    logits = replay.apply(before.clone())

    # vLLM divides by the temperature, at least 1e-5, before it samples.
    certain = (logits[:2] / 1e-5).softmax(dim=1)
    assert certain.nonzero().tolist() == [[0, 11], [1, 12]]
    assert certain.sum() == 2
    assert torch.equal(logits[2], before[2])


def test_replay_follows_the_growing_output_and_overrides_a_ban() -> None:
    plan = replay_args({"": [10, FORK, 11]})
    generated: list[int] = []
    bans, replay = ForkBans(NO_CONFIG, CPU, False), Replay(NO_CONFIG, CPU, False)
    rows = ({**plan, **forking()}, [9], generated)
    bans.update_state(added(rows))
    replay.update_state(added(rows))

    chosen = []
    for _ in range(3):
        # The engine's order.
        logits = bans.apply(replay.apply(torch.randn(1, 16)))
        chosen.append(int(logits.argmax()))
        generated.append(chosen[-1])

    assert chosen == [10, FORK, 11]


@given(st.dictionaries(st.sampled_from(["", "0", "1", "10", "0.1", "1.0"]), TOKENS))
def test_each_thread_finds_its_own_tokens(scripts: dict[str, list[int]]) -> None:
    plan = replay_args(scripts)
    paths = [(), (0,), (1,), (1, 0), (0, 1), (10,)]
    replay = Replay(NO_CONFIG, CPU, False)
    replay.update_state(added(*(({**plan, **forking(thread_path=p)}, [9], []) for p in paths)))

    found = {
        replay_key_of_path(path): list(replay.rows[row].token_ids) for row, path in enumerate(paths)
    }

    assert found == {key: scripts.get(key, []) for key in found}
    assert replayed_tokens(plan) == scripts


def test_after_its_replay_a_thread_samples_freely() -> None:
    replay = Replay(NO_CONFIG, CPU, False)
    replay.update_state(added((replay_args({"": [10]}), [9], [10])))
    before = torch.randn(1, 16)

    assert torch.equal(replay.apply(before.clone()), before)


def test_a_resumed_replay_starts_where_each_thread_stopped() -> None:
    scripts = {"": [10, FORK, 11, FORK, 12, END], "0": [13, END], "1": [14, END]}
    journal = (
        ThreadDelta((), (10, FORK, 11)),
        ThreadDelta((0,), (13, END), finish_reason=0),
        ThreadDelta((1,), ()),
    )

    rest = without_generated({"other": 1, **replay_args(scripts)}, journal)

    assert rest == {
        "other": 1,
        **replay_args({"": [FORK, 12, END], "0": [], "1": [14, END]}),
    }
    assert without_generated({"other": 1}, journal) == {"other": 1}
