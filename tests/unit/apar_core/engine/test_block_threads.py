"""Threads that wait for their children, as the API process reads them."""

from vllm.v1.engine import EngineCoreOutput, FinishReason

from apar_core.engine.block_threads import BlockThreads
from apar_core.formats.blocks import BlockRules
from apar_core.formats.shipped_formats import THREADWEAVER
from tests.fakes.block_scripts import RESULTS, TOKENIZER, block_parameters, tokens

OUTLINES = "<Outlines><Outline> 1: x</Outline> <Outline> 2: y</Outline></Outlines>"


def test_a_stop_token_of_the_client_is_the_last_token_of_the_text() -> None:
    parameters = block_parameters(THREADWEAVER)
    rules = BlockRules(THREADWEAVER, TOKENIZER)
    threads = BlockThreads("r", parameters, rules, tokens("Question"))
    (stop_id,) = tokens("!")

    assert threads.feed(EngineCoreOutput("r", tokens(OUTLINES))) == ["r~0", "r~1"]
    threads.feed(EngineCoreOutput("r~1", tokens("cd</Thread>"), finish_reason=FinishReason.STOP))
    threads.feed(
        EngineCoreOutput("r~0", tokens("ab!"), finish_reason=FinishReason.STOP, stop_reason=stop_id)
    )
    outputs = threads.take()

    text = [token_id for output in outputs for token_id in output.new_token_ids]
    assert text == tokens(OUTLINES + "\n<Thread>\n1:ab!")
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop_id)


def test_tokens_of_an_unjoined_worker_count_after_its_organizer_has_ended() -> None:
    rules = BlockRules(RESULTS, TOKENIZER)
    threads = BlockThreads("r", block_parameters(RESULTS), rules, tokens("Question"))

    assert threads.feed(EngineCoreOutput("r", tokens("<FORK-1>a</FORK-1>"))) == ["r~0"]
    threads.feed(EngineCoreOutput("r~0", tokens("xy")))
    threads.feed(EngineCoreOutput("r", tokens("b"), finish_reason=FinishReason.LENGTH))
    threads.feed(EngineCoreOutput("r~0", tokens("z", ends=True), finish_reason=FinishReason.STOP))

    statistics = threads.statistics(len("Question"))
    assert statistics.discarded_tokens == len("xyz")
    assert statistics.text_tokens == len(tokens("<FORK-1>a</FORK-1>b"))
