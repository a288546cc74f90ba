import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from apar_core.engine.answer_tree import AnswerTree, answer_tree, row_trees
from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.errors import EngineError, TreeError
from apar_core.fork_parameters import EXTRA_ARG
from tests.fakes.scripted_engine import CHILD, END, FORK, fork_parameters

PROMPT = [5, 6]


def request_of(request_id: str, *, plain: bool = False, **settings: Any) -> EngineCoreRequest:
    """Return a request for a tree; a plain one is that of a model without control tokens."""
    extra_args: dict[str, Any] = {"apar_tree": True}
    if not plain:
        changes = settings.pop("changes", {})
        extra_args[EXTRA_ARG] = fork_parameters().to_extra_arg() | changes
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=50,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra_args,
            **settings,
        ),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request.external_req_id = "client's"
    return request


def processor_with(*requests: EngineCoreRequest, log_stats: bool = False) -> Any:
    processor: Any = ForkOutputProcessor(None, log_stats=log_stats)
    for request in requests:
        processor.add_request(request, None)
    return processor


def output(
    request_id: str,
    tokens: list[int],
    finish: FinishReason | None = None,
    logprobs: list[float] | None = None,
    **fields: Any,
) -> EngineCoreOutput:
    rows = None
    if logprobs is not None:
        # The second column is the likeliest other token.
        rows = LogprobsLists(
            np.array([[token, 99] for token in tokens], dtype=np.int32),
            np.array([[each, -0.01] for each in logprobs], dtype=np.float32),
            np.ones(len(tokens), dtype=np.int32),
            None,
        )
    return EngineCoreOutput(request_id, tokens, finish_reason=finish, new_logprobs=rows, **fields)


def finished(processor: Any, *steps: list[EngineCoreOutput]) -> Any:
    """Process steps; return the only answer."""
    answers = [
        answer for step in steps for answer in processor.process_outputs(step).request_outputs
    ]
    [answer] = answers
    assert processor._recorders == {}
    return answer


def test_each_thread_has_all_tokens_that_it_generated_with_their_log_probabilities() -> None:
    answer = finished(
        processor_with(request_of("r", logprobs=1)),
        [output("r", [10, FORK], logprobs=[-0.5, -1.0])],
        [output("r", [11], logprobs=[-2.0]), output("r~0", [20, FORK], logprobs=[-3.0, -4.0])],
        [output("r~0~0", [30, END], FinishReason.STOP, [-5.0, -6.0])],
        [output("r", [12], FinishReason.LENGTH, [-7.0])],
        [output("r~0", [END], FinishReason.STOP, [-8.0])],
    )

    tree = answer_tree(answer.outputs[0])

    assert list(answer.outputs[0].token_ids) == [10, 20, 30, 11, 12]
    root, child, grandchild = tree.threads
    assert (root.id, root.parent, root.forked_at) == ("root", None, None)
    assert root.token_ids == (10, FORK, 11, 12)
    assert root.logprobs == (-0.5, -1.0, -2.0, -7.0)
    assert (child.id, child.parent, child.forked_at) == ("root.0", "root", 2)
    assert (child.token_ids, child.logprobs) == ((20, FORK, END), (-3.0, -4.0, -8.0))
    assert (grandchild.id, grandchild.parent, grandchild.forked_at) == ("root.0.0", "root.0", 2)
    assert [each.finish_reason for each in tree.threads] == ["length", "stop", "stop"]
    assert tree.finish_reason == "length"
    assert (tree.statistics.threads, tree.statistics.text_tokens) == (3, 5)
    # What a thread reads: the prompt, its ancestors up to their fork tokens, a child token each.
    assert tree.sequence("root", PROMPT) == [5, 6, 10, FORK, 11, 12]
    assert tree.sequence("root.0.0", PROMPT) == [
        *(5, 6, 10, FORK, CHILD),
        *(20, FORK, CHILD),
        *(30, END),
    ]


def test_a_format_whose_fork_token_is_cut_shows_what_the_child_has_read() -> None:
    answer = finished(
        processor_with(request_of("r", changes={"cut_tokens": 1})),
        [output("r", [10, FORK, 11, END], FinishReason.STOP)],
        [output("r~0", [20, END], FinishReason.STOP)],
    )

    tree = answer_tree(answer.outputs[0])

    assert tree.threads[1].forked_at == 1
    assert tree.sequence("root.0", PROMPT) == [5, 6, 10, CHILD, 20, END]


def test_a_thread_that_the_end_of_the_answer_cut_has_no_reason() -> None:
    processor = processor_with(request_of("r"))
    processor.process_outputs([output("r", [10, FORK, 11])])

    [answer] = processor.process_outputs(
        [output("r~0", [99], FinishReason.STOP, stop_reason=99)]
    ).request_outputs

    root, child = answer_tree(answer.outputs[0]).threads
    assert (root.finish_reason, root.token_ids) == (None, (10, FORK, 11))
    assert (child.finish_reason, child.token_ids) == ("stop", (99,))


@pytest.mark.parametrize("plain", [True, False], ids=["ordinary model", "forks disabled"])
def test_an_answer_without_forks_is_a_tree_of_one_thread(plain: bool) -> None:
    settings: dict[str, Any] = {"plain": True} if plain else {"changes": {"enabled": False}}
    answer = finished(
        processor_with(request_of("r", logprobs=0, **settings)),
        [output("r", [10], logprobs=[-1.0]), output("other", [7])],
        [output("r", [11, END], FinishReason.STOP, [-2.0, -3.0])],
    )

    tree = answer_tree(answer.outputs[0])

    [root] = tree.threads
    assert (root.token_ids, root.logprobs) == ((10, 11, END), (-1.0, -2.0, -3.0))
    assert (tree.statistics.threads, tree.statistics.text_tokens) == (1, 2)
    assert tree.sequence("root", PROMPT) == [5, 6, 10, 11, END]


def test_every_choice_has_a_tree_of_its_own_also_in_a_row_of_ray_data() -> None:
    request = request_of("r", n=2)
    parent = ParentRequest(request)
    processor: Any = ForkOutputProcessor(None, log_stats=True)
    names = []
    for index in range(2):
        name, params = parent.get_child_info(index)
        child = request_of(name)
        child.sampling_params = params
        processor.add_request(child, None, parent, index)
        names.append(name)
    first, second = names
    answer = finished(
        processor,
        [output(first, [10, FORK]), output(second, [40, END], FinishReason.STOP)],
        [output(f"{first}~0", [20, END], FinishReason.STOP)],
        [output(first, [END], FinishReason.STOP)],
    )

    # As `ray.data.llm` makes a row of the output.
    row = {"metrics": json.loads(json.dumps(asdict(answer.metrics)))}

    trees = row_trees(row)
    assert trees == tuple(map(answer_tree, answer.outputs))
    assert [[each.token_ids for each in tree.threads] for tree in trees] == [
        [(10, FORK, END), (20, END)],
        [(40, END)],
    ]


def test_a_plain_tree_is_read_back() -> None:
    answer = finished(
        processor_with(request_of("r", logprobs=0)),
        [output("r", [10, FORK], logprobs=[-1.0, -2.0])],
        [output("r", [END], FinishReason.STOP, [-1.0])],
        [output("r~0", [], FinishReason.LENGTH)],
    )
    tree = answer_tree(answer.outputs[0])

    assert AnswerTree.from_plain(json.loads(json.dumps(tree.to_plain()))) == tree
    # No limit let the child start.
    assert (tree.threads[1].token_ids, tree.threads[1].logprobs) == ((), None)


def test_a_missing_tree_is_explained() -> None:
    completion = CompletionOutput(0, "text", [1], None, None)

    with pytest.raises(EngineError, match=r"extra_args=\{'apar_tree': True\}.*ForkScheduler"):
        answer_tree(completion)
    rows: list[dict[str, Any]] = [{"metrics": None}, {"metrics": {}}, {}]
    for row in rows:
        with pytest.raises(EngineError, match="disable_log_stats"):
            row_trees(row)


def test_a_sequence_needs_a_known_thread_of_a_format_whose_parent_continues() -> None:
    tree: Any = SimpleNamespace(threads=(SimpleNamespace(id="root"),), parent_waits=True)

    with pytest.raises(TreeError, match=r"'root\.7' is unknown: the answer has root"):
        AnswerTree.sequence(tree, "root.7", PROMPT)
    with pytest.raises(TreeError, match="no thread has generated"):
        AnswerTree.sequence(tree, "root", PROMPT)
