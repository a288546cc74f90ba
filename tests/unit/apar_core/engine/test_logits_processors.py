from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from apar_core.engine.fork_bans import ForkBans, bad_words
from apar_core.engine.replay import Replay, replay_args
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters
from tests.fakes.scripted_engine import CHILD, END, FORK, fork_parameters

CPU = torch.device("cpu")
NO_CONFIG: Any = SimpleNamespace()


def added(*rows: tuple[dict[str, Any] | None, list[int], list[int]]) -> BatchUpdate:
    """A batch of new rows: extra arguments, prompt and output tokens of each."""
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
        # A thread that is resumed right behind its fork token, and its next step.
        (forking(), [9, 10, FORK], [], {CHILD, FORK}),
        (forking(), [9, 10, FORK], [11], {CHILD}),
        (forking(enabled=False), [9], [10], {CHILD, FORK}),
    ],
)
def test_control_tokens_are_banned_where_they_make_no_sense(
    extra_args: dict[str, Any], prompt: list[int], generated: list[int], expected: set[int]
) -> None:
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((extra_args, prompt, generated)))

    assert banned(bans) == [expected]


def test_bans_follow_the_growing_output_of_each_row() -> None:
    generated: list[int] = [10]
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((forking(), [9], generated), (forking(), [9], [FORK])))
    assert banned(bans, 2) == [{CHILD}, {CHILD, FORK}]

    generated.append(FORK)
    bans.update_state(None)

    assert banned(bans, 2) == [{CHILD, FORK}, {CHILD, FORK}]


def test_rows_of_ordinary_models_are_left_alone() -> None:
    bans = ForkBans(NO_CONFIG, CPU, False)
    bans.update_state(added((None, [9], [10])))

    assert banned(bans) == [set()]
    assert not bans.is_argmax_invariant()


def test_bad_words_are_the_same_bans() -> None:
    assert bad_words(fork_parameters()) == [[CHILD], [FORK, FORK]]
    off = ForkParameters(FORK, CHILD, False, 1, 1, (END,))
    assert bad_words(off) == [[CHILD], [FORK]]


def test_replay_leaves_one_token_to_each_thread() -> None:
    plan = replay_args({"": [10, 11], "1": [12]})
    child = {**plan, **forking(thread_path=[1])}
    replay = Replay(NO_CONFIG, CPU, False)
    replay.update_state(added(({**plan, **forking()}, [9], [10]), (child, [9], []), (None, [], [])))

    logits = replay.apply(torch.randn(3, 16))

    assert logits[:2].argmax(dim=1).tolist() == [11, 12]
    assert torch.isinf(logits[:2]).sum(dim=1).tolist() == [15, 15]
    assert not torch.isinf(logits[2]).any()


def test_replay_past_its_end_leaves_the_choice_to_the_model() -> None:
    replay = Replay(NO_CONFIG, CPU, False)
    replay.update_state(added((replay_args({"": [10]}), [9], [10])))

    assert banned(replay) == [set()]
