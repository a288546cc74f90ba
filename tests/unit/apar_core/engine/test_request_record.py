from vllm.v1.engine import EngineCoreOutput

from apar_core.engine.thread_outputs import RequestRecords, UnforkedThread
from tests.fakes.scripted_engine import fork_parameters


def finished(*token_ids: int) -> UnforkedThread:
    thread = UnforkedThread(fork_parameters())
    thread.watch(EngineCoreOutput("r", list(token_ids)))
    return thread


def test_a_record_can_be_taken_once() -> None:
    records = RequestRecords()
    records.add("a", finished(1, 2), num_prompt_tokens=3)

    record = records.take("a")

    assert record is not None
    assert record.statistics.text_tokens == 2
    assert records.take("a") is None


def test_choices_of_one_request_are_summed() -> None:
    records = RequestRecords()
    records.add("a", finished(1, 2), num_prompt_tokens=3)
    records.add("a", finished(1), num_prompt_tokens=3)

    record = records.take("a")

    assert record is not None
    assert (record.statistics.text_tokens, record.statistics.threads) == (3, 2)


def test_trees_are_kept_only_on_request() -> None:
    records = RequestRecords()
    records.add("a", finished(1), num_prompt_tokens=3)
    records.keep_trees = True
    records.add("b", finished(1), num_prompt_tokens=3)
    records.add("b", finished(2), num_prompt_tokens=3)

    without, kept = records.take("a"), records.take("b")

    assert without is not None
    assert without.trees == ()
    assert kept is not None
    assert [each.root.items[0].token_id for each in kept.trees] == [1, 2]


def test_prompts_of_one_completion_are_taken_together() -> None:
    records = RequestRecords()
    for index in range(3):
        records.add(f"cmpl-{index}", finished(*range(index)), num_prompt_tokens=1)
    records.add("cmpl-x", finished(1), num_prompt_tokens=1)

    record = records.take("cmpl")

    assert record is not None
    assert record.statistics.text_tokens == 0 + 1 + 2
    assert records.take("cmpl-x") is not None


def test_records_that_nobody_takes_are_dropped() -> None:
    records = RequestRecords(capacity=2)
    for name in "abc":
        records.add(name, finished(1), num_prompt_tokens=1)

    assert records.take("a") is None
    assert records.take("b") is not None
    assert records.take("c") is not None
