"""Threads that wait for their children, as the API process reads them."""

from vllm.v1.engine import EngineCoreOutput, FinishReason

from apar_core.engine.block_threads import BlockThreads
from apar_core.formats.blocks import BlockRules
from apar_core.formats.shipped_formats import THREADWEAVER
from tests.fakes.block_scripts import TOKENIZER, block_parameters, tokens

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
