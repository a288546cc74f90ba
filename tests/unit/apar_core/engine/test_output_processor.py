from typing import Any

import numpy as np
import pytest
from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists

from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.engine.request_follower import RequestFollower
from apar_core.fork_parameters import EXTRA_ARG, HOLD_ARG
from tests.fakes.scripted_engine import CHILD, END, FORK, fork_parameters


def processor_with(request_id: str, *, logprobs: int | None = None, **changes: Any) -> Any:
    """Return an output processor without a tokenizer, with one request."""
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    add_request(processor, request_id, "client's", logprobs=logprobs, **changes)
    return processor


def add_request(
    processor: Any,
    request_id: str,
    external_id: str,
    *,
    logprobs: int | None = None,
    plain: bool = False,
    held: bool = False,
    resumable: bool = False,
    queue: Any = None,
    **changes: Any,
) -> None:
    """Add one; a plain one is that of a checkpoint without control tokens.

    A resumable one is a part of a streaming-input session, and one of the same id ends it.
    """
    params = SamplingParams(
        max_tokens=50,
        logprobs=logprobs,
        output_kind=RequestOutputKind.CUMULATIVE if queue is None else RequestOutputKind.DELTA,
        extra_args=({} if plain else {EXTRA_ARG: fork_parameters().to_extra_arg() | changes})
        | ({HOLD_ARG: True} if held else {}),
    )
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[5, 6],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=resumable,
    )
    request.external_req_id = external_id
    processor.add_request(request, None, queue=queue)


def output(request_id: str, tokens: list[int], finish: FinishReason | None = None) -> Any:
    return EngineCoreOutput(request_id, tokens, finish_reason=finish)


def test_request_sees_one_text_and_no_control_tokens() -> None:
    processor = processor_with("r")
    processor.process_outputs([output("r", [10, FORK])])
    processor.process_outputs([output("r", [11, END], FinishReason.STOP), output("r~0", [20])])
    last = processor.process_outputs([output("r~0", [21, END], FinishReason.STOP)])

    (_, finished) = last.request_outputs
    assert finished.finished
    assert list(finished.outputs[0].token_ids) == [10, 20, 21, 11]
    record = processor.records.take("client's")
    assert record.statistics.forks == 1


@pytest.mark.parametrize(
    ("kind", "certain"),
    [
        ({}, [1, 1, 4]),  # The text of the fork's child comes first.
        ({"plain": True}, [2, 5, 6]),
        ({"enabled": False}, [2, 5, 6]),
    ],
)
def test_a_follower_counts_the_tokens_that_are_certain(
    kind: dict[str, Any], certain: list[int]
) -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    follower = followed(processor)
    add_request(processor, "r", "client's", **kind)
    forks = not kind
    counts = []
    for outputs in (
        [output("r", [10, FORK])],
        [output("r", [11, END], FinishReason.STOP) if forks else output("r", [11, 12, 13])],
        [
            output("r~0", [20, 21, END], FinishReason.STOP)
            if forks
            else output("r", [14, END], FinishReason.STOP)
        ],
    ):
        processor.process_outputs(outputs)
        counts.append(follower.certain_tokens)

    assert counts == certain


@pytest.mark.parametrize(("held", "second"), [(True, [0.125] * 4), (False, [0.5])])
def test_the_time_between_tokens_that_come_together_is_divided_among_their_steps(
    held: bool, second: list[float]
) -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=True)
    add_request(processor, "r", "client's", plain=True, held=held)
    pauses_s = []
    for tokens, at_s in ([10], 1.0), ([11, 12, 13, 14], 1.5), ([15], 1.75):
        statistics = IterationStats()
        processor.process_outputs([output("r", tokens)], at_s, statistics)
        pauses_s.append(statistics.inter_token_latencies_iter)

    assert pauses_s == [[], second, [0.25]]


def test_text_that_waited_for_a_child_hides_no_pause() -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=True)
    add_request(processor, "r", "client's", held=True)
    processor.process_outputs([output("r", [10, FORK])], 1.0, IterationStats())
    processor.process_outputs([output("r", [11, 12, 13, 14, 15])], 1.25, IterationStats())
    statistics = IterationStats()
    last = [output("r", [16, 17]), output("r~0", [20, END], FinishReason.STOP)]

    processor.process_outputs(last, 1.5, statistics)

    # Two steps; 8 tokens became certain.
    assert statistics.inter_token_latencies_iter == [0.25, 0.25]


def test_a_clients_stop_token_ends_all_threads() -> None:
    processor = processor_with("r")
    processor.process_outputs([output("r", [10, FORK, 11])])
    stop = EngineCoreOutput("r~0", [99], finish_reason=FinishReason.STOP, stop_reason=99)

    processed = processor.process_outputs([stop])

    assert processed.request_outputs[-1].finished
    assert processed.reqs_to_abort == ["r"]
    # Later outputs are ignored.
    assert processor.process_outputs([output("r", [12])]).request_outputs == []


def test_a_request_that_may_not_fork_has_statistics() -> None:
    processor = processor_with("r", enabled=False)
    processor.process_outputs([output("r", [10, 11])])
    processed = processor.process_outputs([output("r", [12, END], FinishReason.STOP)])

    assert processed.request_outputs[-1].outputs[0].token_ids == [10, 11, 12, END]
    statistics = processor.records.take("client's").statistics
    assert (statistics.threads, statistics.text_tokens, statistics.control_tokens) == (1, 3, 1)
    # With a prompt of 2 tokens, 2 + 3 + 4 + 5 are attended to, and 5 are cached for the last one.
    assert statistics.attended_tokens == statistics.sequential_attended_tokens == 14
    assert statistics.max_cached_tokens == statistics.sequential_max_cached_tokens == 5
    assert processor._unforked == {}


@pytest.mark.parametrize("internal", [True, False])
def test_aborted_request_is_forgotten_with_all_its_threads(internal: bool) -> None:
    processor = processor_with("r")
    processor.process_outputs([output("r", [10, FORK, 11])])

    assert processor.abort_requests(["r" if internal else "client's"], internal) == ["r"]

    late = processor.process_outputs([output("r", [12]), output("r~0", [20])])
    assert late.request_outputs == []
    assert not processor.has_unfinished_requests()
    assert processor._threads == {}


def test_banned_control_tokens_are_reported_as_impossible() -> None:
    processor = processor_with("r", logprobs=2, enabled=False)
    rows = LogprobsLists(
        np.array([[10, FORK, CHILD]], dtype=np.int32),
        np.array([[-3.0, -0.1, -0.2]], dtype=np.float32),
        np.array([3], dtype=np.int32),
        None,
    )
    answer = EngineCoreOutput("r", [10], new_logprobs=rows)

    processed = processor.process_outputs([answer])

    logprobs = processed.request_outputs[0].outputs[0].logprobs[0]
    assert logprobs[10].logprob == -3.0
    assert logprobs[FORK].logprob == logprobs[CHILD].logprob == float("-inf")


def test_all_threads_of_a_request_may_be_aborted_in_one_step() -> None:
    processor = processor_with("r")
    processor.process_outputs([output("r", [10, FORK, 11]), output("r~0", [20])])
    abort = FinishReason.ABORT

    processed = processor.process_outputs([output("r", [], abort), output("r~0", [], abort)])

    assert processed.request_outputs[-1].outputs[0].finish_reason == "abort"
    assert not processor.has_unfinished_requests()


@pytest.mark.parametrize("prompts", [[""], ["-0", "-1"]])
@pytest.mark.parametrize("plain", [True, False])
def test_beams_are_followed_and_their_prompt_counts_once(prompts: list[str], plain: bool) -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    follower = RequestFollower(keeps_journal=True)
    processor.follow("cmpl-a-b1", follower)
    for prompt in prompts:
        for step in range(3):
            ids = [f"cmpl-a-b1{prompt}-{step:016x}-beam-{beam}" for beam in range(2)]
            for beam_id in ids:
                add_request(processor, beam_id, beam_id, plain=plain, enabled=False)
            processor.process_outputs([output(each, [10], FinishReason.LENGTH) for each in ids])

    assert follower.prompt_tokens == 2 * len(prompts)
    assert follower.generated_tokens == follower.take_num_tokens() == 6 * len(prompts)
    assert follower.num_roots == len(prompts)
    assert follower.statistics is None
    assert not follower.continuable
    assert follower.take_journal() == ()


@pytest.mark.parametrize("plain", [True, False])
def test_the_end_of_an_answered_session_ends_it(plain: bool) -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    for part in (10, 20):
        add_request(processor, "r", "client's", plain=plain, resumable=True, enabled=False)
        processor.process_outputs([output("r", [part, part + 1], FinishReason.LENGTH)])

    # As AsyncLLM builds it; with its own parameters the end of the session could fork.
    add_request(processor, "r", "client's", plain=plain, resumable=False, enabled=True)

    assert not processor.has_unfinished_requests()
    assert (processor._threads, processor._unforked, processor._plain) == ({}, {}, {})
    record = processor.records.take("client's")
    assert plain or record.statistics.text_tokens == 4


async def test_the_stream_of_a_session_is_paced_once() -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    processor.stream_pause_s = 0.01
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    session: dict[str, Any] = {"resumable": True, "queue": queue, "enabled": False}

    add_request(processor, "r", "client's", **session)
    paced = processor.request_states["r"].queue
    add_request(processor, "r", "client's", **session)

    assert processor.request_states["r"].queue is paced is not queue


def followed(processor: Any) -> RequestFollower:
    """Return a follower of the requests that are added next."""
    follower = RequestFollower(keeps_journal=True)
    processor.follow("client's", follower)
    return follower


@pytest.mark.parametrize("changes", [{}, {"enabled": False}, {"plain": True}])
def test_a_request_that_is_ended_early_keeps_its_text(changes: dict[str, Any]) -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    followed(processor)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    add_request(processor, "r", "client's", queue=queue, **changes)
    processor.process_outputs([output("r", [10, 11])])

    assert processor.end("someone else's") == []
    assert processor.end("client's") == ["r"]

    ended: Any = queue.get_nowait()
    assert ended.finished
    assert list(ended.outputs[0].token_ids) == [10, 11]
    assert ended.outputs[0].finish_reason == "length"
    assert processor.end("client's") == []
    # What the engine core had already sent is ignored.
    assert processor.process_outputs([output("r", [12])]).reqs_to_abort == []
    assert not processor.request_states


def test_an_embedding_that_is_ended_early_is_aborted() -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    followed(processor)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r")
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[5, 6],
        mm_features=None,
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request.external_req_id = "client's"
    processor.add_request(request, None, queue=queue)

    assert processor.end("client's") == ["r"]

    ended: Any = queue.get_nowait()
    assert ended.finished
    assert not processor.request_states


def test_a_forked_request_that_is_ended_early_keeps_the_text_of_all_threads() -> None:
    processor: Any = ForkOutputProcessor(None, log_stats=False)
    follower = followed(processor)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    add_request(processor, "r", "client's", queue=queue)
    processor.process_outputs([output("r", [10, FORK])])
    processor.process_outputs([output("r", [11, FORK]), output("r~0", [20])])
    processor.process_outputs([output("r", [12]), output("r~0", [21])])

    assert processor.end("client's") == ["r"]

    ended: Any = queue.get_nowait()
    assert list(ended.outputs[0].token_ids) == [10, 20, 21, 11, 12]
    assert ended.outputs[0].finish_reason == "length"
    statistics = processor.records.take("client's").statistics
    assert (statistics.forks, statistics.threads) == (2, 3)
    assert {each.finish_reason for each in follower.take_journal()} == {FinishReason.LENGTH}
    assert not processor._threads
