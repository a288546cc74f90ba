"""A resumed answer starts with exactly the text that the client already has."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.engine.replay import REPLAY_ARG, replay_args, replayed_tokens
from apar_core.engine.request_follower import RequestFollower, can_continue
from apar_core.engine.resume_request import completed, hand_to_scheduler
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.journal import Journal, ThreadDelta
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.scheduler.thread_requests import RESUME_ARG
from tests.fakes.scripted_engine import merged

TOKENIZER = AutoTokenizer.from_pretrained(checkpoint_path())
TOKENS = find_control_tokens(TOKENIZER.get_vocab())
assert TOKENS is not None
FORK, END = TOKENS.fork_id, TOKENIZER.eos_token_id
PARAMETERS = ForkParameters(FORK, (TOKENS.child_id,), (TOKENS.child_id,), True, 16, 100, (END,))
TEXTS = {
    "": ["1. Grüße an alle:", "\n2. Play \U0001f600 songs:", "\n3. Rest."],
    "~0": [" Say hello to everyone you meet."],
    "~1": [" Take three of them", " and sing. stop here"],
    "~1~0": [" with your \U0001f600 friends"],
}


def thread_tokens(texts: list[str]) -> list[int]:
    ids: list[int] = []
    for number, text in enumerate(texts):
        ids += [FORK] * bool(number) + TOKENIZER.encode(text, add_special_tokens=False)
    return [*ids, END]


def steps() -> Iterator[list[EngineCoreOutput]]:
    """Outputs with one token per thread and step; a child starts after its fork."""
    tokens = {thread: thread_tokens(texts) for thread, texts in TEXTS.items()}
    at = {"": 0}
    while at:
        outputs = []
        for thread, index in list(at.items()):
            token = tokens[thread][index]
            last = index + 1 == len(tokens[thread])
            reason = FinishReason.STOP if last else None
            outputs.append(EngineCoreOutput(f"r{thread}", [token], finish_reason=reason))
            at[thread] = index + 1
            if last:
                del at[thread]
            if token == FORK:
                forks = tokens[thread][:index].count(FORK)
                at[f"{thread}~{forks}"] = 0
        yield outputs


class ApiProcess:
    """Output processor with one request, and the text that the client has got."""

    def __init__(
        self,
        journal: Journal | None = None,
        *,
        parameters: ForkParameters | None = PARAMETERS,
        max_tokens: int = 500,
        **params: Any,
    ) -> None:
        self.processor = ForkOutputProcessor(TOKENIZER, log_stats=False)
        self.request: Any = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=TOKENIZER.encode("Hello"),
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                output_kind=RequestOutputKind.DELTA,
                extra_args=None if parameters is None else {EXTRA_ARG: parameters.to_extra_arg()},
                **params,
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.request.external_req_id = "chatcmpl-1"
        self.follower = RequestFollower(keeps_journal=True, resume=journal)
        self.processor.follow("chatcmpl-1", self.follower)
        self.processor.add_request(self.request, None, queue=self)
        self.text = ""
        self.num_tokens = 0
        self.finish: tuple[str | None, Any] | None = None
        self.needs_engine = True
        if journal is not None:
            known = completed(self.request, journal, 4096)
            self.needs_engine = self.processor.replay(self.request, known)

    def put(self, output: Any) -> None:
        (choice,) = output.outputs
        self.text += choice.text
        self.num_tokens += len(choice.token_ids)
        if output.finished:
            self.finish = (choice.finish_reason, choice.stop_reason)


MANNERS: list[dict[str, Any]] = [
    {},
    {"stop": ["stop here"]},
    {"stop": ["\n2."]},
    {"stop": ["sing"], "include_stop_str_in_output": True},
    {"stop_token_ids": [TOKENIZER.encode(" Rest", add_special_tokens=False)[-1]]},
]


@pytest.mark.parametrize("params", MANNERS)
def test_an_answer_resumed_at_any_step_starts_with_the_text_already_sent(
    params: dict[str, Any],
) -> None:
    whole = ApiProcess(**params)
    sent: list[tuple[str, int]] = [("", 0)]
    journals: list[Journal] = [()]
    for outputs in steps():
        whole.processor.process_outputs(outputs)
        sent.append((whole.text, whole.num_tokens))
        journals.append(merged([*journals[-1], *whole.follower.take_journal()]))
    assert whole.finish is not None

    for (text, num_tokens), journal in zip(sent, journals, strict=True):
        again = ApiProcess(journal, **params)
        assert again.text.startswith(text)
        assert again.num_tokens >= num_tokens
        assert whole.text.startswith(again.text)
        if not again.needs_engine:
            assert (again.text, again.finish) == (whole.text, whole.finish)
            assert again.num_tokens == whole.num_tokens
    assert not again.needs_engine  # The last journal holds the whole answer.


def test_a_request_that_may_not_fork_is_resumed_with_its_stop_token() -> None:
    plain = ForkParameters(FORK, PARAMETERS.seed_ids, PARAMETERS.banned_ids, False, 16, 100, (END,))
    ids = TOKENIZER.encode("Hello \U0001f600", add_special_tokens=False)
    stop = ids[-1]

    again = ApiProcess(
        (ThreadDelta((), tuple(ids), int(FinishReason.STOP)),),
        parameters=plain,
        stop_token_ids=[stop],
    )

    assert not again.needs_engine
    assert again.finish == ("stop", stop)
    assert again.num_tokens == len(ids)


def test_an_ordinary_models_request_is_followed_and_resumed() -> None:
    first = ApiProcess(parameters=None)
    first.processor.process_outputs([EngineCoreOutput("r", [100, 101])])
    journal = merged(first.follower.take_journal())

    again = ApiProcess(journal, parameters=None)

    assert journal == (ThreadDelta((), (100, 101)),)
    assert (again.text, again.needs_engine) == (first.text, True)
    again.processor.process_outputs(
        [EngineCoreOutput("r", [102], finish_reason=FinishReason.LENGTH)]
    )
    assert again.follower.take_num_tokens() == 1
    assert again.follower.generated_tokens == 3
    assert again.processor._plain == {}


def test_unreported_ends_of_threads_are_completed_by_the_token_budget() -> None:
    journal = (ThreadDelta((), (100, FORK, 101)), ThreadDelta((0,), (102,)))

    again = ApiProcess(journal, max_tokens=3)

    assert not again.needs_engine
    assert again.finish == ("length", None)
    assert again.num_tokens == 3


def test_unreported_children_are_opened_within_the_limits() -> None:
    journal = (ThreadDelta((), (100, FORK, 101, FORK, 102)), ThreadDelta((1,), (103,)))
    request = ApiProcess().request
    tight = replace(PARAMETERS, max_forks=1)

    opened = completed(request, journal, 4096)
    request.sampling_params.extra_args = {EXTRA_ARG: tight.to_extra_arg()}
    refused = completed(request, journal, 4096)

    assert [(each.path, each.finish_reason) for each in opened] == [
        ((), None),
        ((0,), None),
        ((1,), None),
    ]
    assert [each.finish_reason for each in refused] == [None, int(FinishReason.LENGTH), None]


def test_a_resumed_replay_continues_after_the_journal() -> None:
    scripts = {path.replace("~", "."): thread_tokens(texts) for path, texts in TEXTS.items()}
    scripts = {path.removeprefix("."): ids for path, ids in scripts.items()}
    journal = (ThreadDelta((), tuple(scripts[""][:9])), ThreadDelta((0,), tuple(scripts["0"][:2])))
    request = ApiProcess().request
    request.sampling_params.extra_args |= replay_args(scripts)

    hand_to_scheduler(request, journal)

    rest = replayed_tokens(request.sampling_params.extra_args)
    assert rest == {**scripts, "": scripts[""][9:], "0": scripts["0"][2:]}
    assert request.sampling_params.extra_args.keys() == {EXTRA_ARG, REPLAY_ARG, RESUME_ARG}


def test_context_without_room_opens_no_child() -> None:
    request = ApiProcess().request
    prompt = len(request.prompt_token_ids)

    # Room for the fork token, the child token, and one token of the child.
    full = completed(request, (ThreadDelta((), (100, FORK)),), prompt + 3)
    room = completed(request, (ThreadDelta((), (100, FORK)),), prompt + 4)

    assert full[1].finish_reason == int(FinishReason.LENGTH)
    assert room[1].finish_reason is None


def test_client_cannot_write_a_journal() -> None:
    process = ApiProcess()
    request = process.request
    request.request_id = "other"
    hand_to_scheduler(request, (ThreadDelta((), (1,)),))

    process.processor.add_request(request, None)

    assert RESUME_ARG not in request.sampling_params.extra_args


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"repetition_penalty": 1.2, "seed": 5, "stop": ["a"], "logit_bias": {3: 1.0}}, True),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"min_tokens": 1}, False),
        ({"bad_words": ["a b"]}, False),
        ({"trace_decode_token_ids": [1, 2]}, False),
        ({"structured_outputs": StructuredOutputsParams(json_object=True)}, False),
    ],
)
def test_which_requests_another_engine_can_continue(params: dict[str, Any], expected: bool) -> None:
    assert can_continue(SamplingParams(**params)) is expected


def test_several_choices_are_counted_and_not_continued() -> None:
    follower = RequestFollower(keeps_journal=True)
    for choice in range(2):
        follower.begin(f"{choice}_r", 7, SamplingParams(), choice=choice)
        follower.add(EngineCoreOutput(f"{choice}_r", [1, 2]))

    assert not follower.continuable
    assert follower.take_journal() == ()
    assert (follower.prompt_tokens, follower.take_num_tokens()) == (7, 4)


@pytest.mark.parametrize("parameters", [PARAMETERS, None])
def test_a_request_that_the_engine_core_aborts_has_not_ended(
    parameters: ForkParameters | None,
) -> None:
    process = ApiProcess(parameters=parameters)
    process.processor.process_outputs([EngineCoreOutput("r", [40, 41])])
    assert not process.follower.aborted

    process.processor.process_outputs([EngineCoreOutput("r", [], finish_reason=FinishReason.ABORT)])

    assert process.follower.aborted
    assert process.follower.take_journal() == (ThreadDelta((), (40, 41)),)


def test_a_clients_abort_is_not_one_of_the_engine_core() -> None:
    process = ApiProcess()
    process.processor.process_outputs([EngineCoreOutput("r", [40])])

    process.processor.abort_requests(["chatcmpl-1"], internal=False)

    assert not process.follower.aborted
