import numpy as np
import pytest
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from apar_core.engine.thread_outputs import RequestThreads, TextToken
from apar_core.tree.restore import Edge
from tests.fakes.scripted_engine import CHILD, END, FORK, fork_parameters


def threads() -> RequestThreads:
    return RequestThreads("r", fork_parameters(), None)


def output(
    request_id: str,
    tokens: list[int],
    finish: FinishReason | None = None,
    *,
    stop_reason: int | None = None,
    logprobs: LogprobsLists | None = None,
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id, tokens, finish_reason=finish, stop_reason=stop_reason, new_logprobs=logprobs
    )


def rows(*values: float) -> LogprobsLists:
    """Return one row per token: its log-probability and that of one alternative."""
    number = len(values)
    return LogprobsLists(
        np.arange(2 * number, dtype=np.int32).reshape(number, 2),
        np.array([[value, value - 1] for value in values], dtype=np.float32),
        np.ones(number, dtype=np.int32),
        None,
    )


def text_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token_id for each in outputs for token_id in each.new_token_ids]


def test_text_after_a_fork_waits_for_the_child() -> None:
    request = threads()
    assert request.feed(output("r", [10, FORK])) == ["r~0"]
    assert text_of(request.take()) == [10]

    request.feed(output("r", [11]))
    assert request.take() == []

    request.feed(output("r~0", [20, END], FinishReason.STOP))
    assert text_of(request.take()) == [20, 11]


def test_a_fork_among_accepted_tokens_splits_them() -> None:
    request = threads()

    children = request.feed(output("r", [10, FORK, 11, FORK, 12, END], FinishReason.STOP))
    request.feed(output("r~1", [30, END], FinishReason.STOP))
    request.feed(output("r~0", [20, END], FinishReason.STOP))

    assert children == ["r~0", "r~1"]
    assert text_of(request.take()) == [10, 20, 11, 30, 12]


def test_the_finish_reason_comes_in_an_output_without_tokens() -> None:
    request = threads()
    request.feed(output("r", [10, END], FinishReason.STOP))

    text, end = request.take()

    assert (text.new_token_ids, text.finish_reason) == ([10], None)
    assert (end.new_token_ids, end.finish_reason) == ([], FinishReason.STOP)


def test_finish_waits_for_every_thread() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, END], FinishReason.STOP))
    assert not any(each.finished for each in request.take())

    request.feed(output("r~0", [20, END], FinishReason.STOP))

    assert [each.finish_reason for each in request.take()] == [None, FinishReason.STOP]


def test_a_thread_that_ends_by_length_ends_its_request_by_length() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, END], FinishReason.STOP))
    request.feed(output("r~0", [], FinishReason.LENGTH))

    assert request.take()[-1].finish_reason == FinishReason.LENGTH


def test_an_end_by_length_has_no_stop_reason() -> None:
    request = threads()
    request.feed(output("r", [10, FORK]))
    repeated = EngineCoreOutput(
        "r~0", [20], finish_reason=FinishReason.REPETITION, stop_reason="repetition_detected"
    )
    request.feed(repeated)
    request.feed(output("r", [], FinishReason.LENGTH))

    end = request.take()[-1]

    assert (end.finish_reason, end.stop_reason) == (FinishReason.LENGTH, None)


def test_a_clients_stop_token_ends_the_answer_at_its_position() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, 11]))
    request.feed(output("r~0", [20, 99], FinishReason.STOP, stop_reason=99))

    (end,) = request.take()

    # 11 comes after the stop token. The stop token itself is passed on, as in vLLM.
    assert end.new_token_ids == [10, 20, 99]
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, 99)


def test_the_first_stop_token_in_reading_order_is_the_stop_reason() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, 11, FORK, 12]))
    request.feed(output("r~1", [77], FinishReason.STOP, stop_reason=77))
    request.feed(output("r", [99], FinishReason.STOP, stop_reason=99))
    assert text_of(request.take()) == [10]

    request.feed(output("r~0", [20, END], FinishReason.STOP))
    [last] = request.take()

    assert last.new_token_ids == [20, 11, 77]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, 77)


def test_error_of_one_thread_ends_the_request() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, 11]))

    request.feed(output("r~0", [], FinishReason.ERROR))

    assert request.take()[-1].finish_reason == FinishReason.ERROR
    assert request.tree.finished


def test_logprobs_follow_the_restored_order() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, 11], logprobs=rows(-1.0, -9.0, -2.0)))
    request.feed(output("r~0", [20, END], FinishReason.STOP, logprobs=rows(-3.0, -9.0)))

    (text,) = request.take()

    assert text.new_token_ids == [10, 20, 11]
    assert text.new_logprobs is not None
    assert text.new_logprobs.logprobs[:, 0].tolist() == [-1.0, -3.0, -2.0]


def wide_rows(width: int, *values: float) -> LogprobsLists:
    """One row per token: its log-probability, and those of alternatives named 100, 101, ..."""
    number = len(values)
    alternatives = np.tile(np.arange(100, 99 + width, dtype=np.int32), (number, 1))
    chosen = np.arange(number, dtype=np.int32).reshape(number, 1)
    return LogprobsLists(
        np.hstack([chosen, alternatives]),
        np.array([[value] + [-7.0] * (width - 1) for value in values], dtype=np.float32),
        np.ones(number, dtype=np.int32),
        None,
    )


@pytest.mark.parametrize("num_logprobs", [0, 1, 2, 5])
def test_logprob_rows_get_the_width_that_the_request_asked_for(
    num_logprobs: int,
) -> None:
    request = RequestThreads("r", fork_parameters(), None, num_logprobs=num_logprobs)
    request.feed(output("r", [10, FORK, 11], logprobs=wide_rows(6, -1.0, -9.0, -2.0)))
    request.feed(output("r~0", [20], logprobs=wide_rows(3, -3.0)))
    request.feed(output("r~0", [21, END], FinishReason.STOP, logprobs=wide_rows(1, -4.0, -9.0)))

    (text,) = request.take()

    assert text.new_token_ids == [10, 20, 21, 11]
    assert text.new_logprobs is not None
    assert text.new_logprobs.logprobs.shape == (4, num_logprobs + 1)
    assert text.new_logprobs.logprob_token_ids.shape == (4, num_logprobs + 1)
    assert text.new_logprobs.logprobs[:, 0].tolist() == [-1.0, -3.0, -4.0, -2.0]
    # A row without enough entries repeats its last one.
    assert set(text.new_logprobs.logprob_token_ids[2]) == {0}


def test_rows_of_all_logprobs_are_not_cut() -> None:
    request = RequestThreads("r", fork_parameters(), None, num_logprobs=-1)
    request.feed(output("r", [10], logprobs=wide_rows(9, -1.0)))

    (text,) = request.take()

    assert text.new_logprobs is not None
    assert text.new_logprobs.logprobs.shape == (1, 9)


def test_a_separator_has_probability_1() -> None:
    def line_break(_: TextToken, __: TextToken, edge: Edge) -> list[TextToken]:
        return [TextToken(7, None)] if edge is Edge.FIRST_CHILD else []

    request = RequestThreads("r", fork_parameters(), line_break)
    request.feed(output("r", [10, FORK], logprobs=rows(-1.0, -9.0)))
    request.feed(output("r~0", [20, END], FinishReason.STOP, logprobs=rows(-3.0, -9.0)))

    (text,) = request.take()

    assert text.new_token_ids == [10, 7, 20]
    assert text.new_logprobs is not None
    assert text.new_logprobs.logprobs[:, 0].tolist() == [-1.0, 0.0, -3.0]


def test_a_sampled_child_token_is_not_text() -> None:
    request = threads()
    request.feed(output("r", [10, CHILD, 11, END], FinishReason.STOP))

    assert text_of(request.take()) == [10, 11]


def test_open_threads_of_a_cut_request_have_not_ended() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, 11]))

    request.cut()

    assert request.tree.finished
    assert [record.ended for record in request.tree.threads.values()] == [False, False]


@pytest.mark.parametrize("first", [[10], [FORK]])
def test_fields_of_the_first_output_come_with_the_first_text(first: list[int]) -> None:
    request = threads()
    queued = EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)
    request.feed(EngineCoreOutput("r", first, events=[queued], trace_headers={"a": "b"}))
    request.feed(output("r", [11, END], FinishReason.STOP))
    if first == [FORK]:
        request.feed(output("r~0", [20, END], FinishReason.STOP))

    outputs = request.take()

    assert outputs[0].events == [queued]
    assert outputs[1].events is None
    assert outputs[-1].trace_headers == {"a": "b"}


@pytest.mark.parametrize("root_ends_last", [True, False])
def test_fields_of_the_roots_end_come_with_the_end_of_the_answer(root_ends_last: bool) -> None:
    request = threads()
    root_end = EngineCoreOutput(
        "r",
        [11, END],
        finish_reason=FinishReason.STOP,
        kv_transfer_params={"remote_block_ids": [1]},
        ec_transfer_params={"a": 1},
        mm_cache_miss_hashes=["h"],
    )
    child_end = EngineCoreOutput(
        "r~0",
        [20, END],
        finish_reason=FinishReason.STOP,
        kv_transfer_params={"remote_block_ids": [2]},
    )
    request.feed(output("r", [10, FORK]))
    ends = [child_end, root_end] if root_ends_last else [root_end, child_end]
    for each in ends:
        request.feed(each)

    *before, end = request.take()

    assert end.kv_transfer_params == {"remote_block_ids": [1]}
    assert end.ec_transfer_params == {"a": 1}
    assert end.mm_cache_miss_hashes == ["h"]
    # vLLM reads these fields from the last output.
    assert all(each.kv_transfer_params is None for each in before)


def test_nans_in_the_logits_of_any_thread_are_reported() -> None:
    request = threads()
    request.feed(output("r", [10, FORK, 11]))
    request.feed(EngineCoreOutput("r~0", [20], num_nans_in_logits=3))
    request.feed(output("r", [12]))

    (text,) = request.take()
    request.feed(output("r~0", [21]))
    (later,) = request.take()

    assert (text.num_nans_in_logits, later.num_nans_in_logits) == (3, 0)


def test_sampling_masks_follow_the_restored_order() -> None:
    def line_break(_: TextToken, __: TextToken, edge: Edge) -> list[TextToken]:
        return [TextToken(7, None)] if edge is Edge.FIRST_CHILD else []

    request = RequestThreads("r", fork_parameters(), line_break)
    several = SamplingMaskLists(np.array([10, 90, FORK, 11, 91, 92]), np.array([0, 2, 3, 6]))
    # The mask of a single token has no offsets.
    single = SamplingMaskLists(np.array([20, 93]))
    request.feed(EngineCoreOutput("r", [10, FORK, 11], new_sampling_mask=several))
    request.feed(EngineCoreOutput("r~0", [20], new_sampling_mask=single))
    request.feed(output("r~0", [END], FinishReason.STOP))

    (text,) = request.take()

    assert text.new_token_ids == [10, 7, 20, 11]
    assert text.new_sampling_mask is not None
    assert text.new_sampling_mask.to_nested_list() == [[10, 90], [7], [20, 93], [11, 91, 92]]
