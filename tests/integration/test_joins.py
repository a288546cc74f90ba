"""Threads that wait for their children, in vLLM with a model that has learned nothing.

The reference is a client that resubmits requests to plain greedy decoding with transformers.
"""

import contextlib
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import REPLAY, replay_args
from apar_core.formats.shipped_formats import PARALLEL_R1, THREADWEAVER
from apar_core.scheduler.core_state import core_state
from tests.fakes.block_scripts import MARKERS, NESTED, Client
from tests.integration.engine_process import EngineProcess
from tests.integration.random_checkpoint import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
PATHS = PARALLEL_R1.model_copy(update={"children_fork": True})
# A model without training says little else, but opens blocks and ends threads.
SAYS = ("a", "b", "<Parallel>", "</Path>", "</Parallel>")
CONTEXT = 768
# Without a penalty on what it has said, such a model repeats one token forever.
PENALTY = 2.0
MAX_COMPLETIONS = 40
NUM_PROMPTS = 120
# name: (engine arguments, what must happen)
WAYS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "large batch": ({}, set()),
    "short memory": ({"num_gpu_blocks_override": 30}, {"preempted"}),
    "chunked prefill": ({"max_num_batched_tokens": 32, "max_num_seqs": 6}, set()),
    "n-gram speculation": ({"speculative_config": NGRAM, "num_gpu_blocks_override": 60}, set()),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("random"), MARKERS, context_tokens=CONTEXT, spread=0.3
    )


class TooLongError(Exception):
    """An answer has too many threads."""


class PlainDecoding(Client):
    """A client whose completions are plain greedy decoding with transformers."""

    def complete(self, key: str, prompt: list[int], stop_ids: set[int]) -> list[int]:
        checkpoint = Path(self.tokenizer.name_or_path)
        model, allowed = _reference(checkpoint), torch.tensor(self.script["allowed"])
        if len(self.contexts) == MAX_COMPLETIONS:
            raise TooLongError
        generated: list[int] = []
        while True:
            with torch.no_grad():
                logits_V = model(torch.tensor([[*prompt, *generated]])).logits[0, -1]
            for token_id in generated:
                logits_V[token_id] -= PENALTY
            generated.append(int(allowed[logits_V[allowed].argmax()]))
            if generated[-1] in stop_ids or generated[-1] == self.end_id:
                break
        return generated

    @property
    def end_id(self) -> int:
        end_id: int = self.tokenizer.eos_token_id
        return end_id


@dataclass(frozen=True)
class Run:
    token_ids: list[tuple[int, ...]]
    reasons: list[str]
    joins: list[int]
    depths: list[int]
    state: dict[str, Any]
    preemptions: int


def answer(engine: OfflineEngine, prompts: list[list[int]], sampling: Any) -> Run:
    """Answer prompts at once. Runs in the engine's process."""
    preemptions = [0]
    preempt = engine.scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        preemptions[0] += 1
        return preempt(*args, **kwargs)

    engine.scheduler._preempt_request = counted
    answers = engine.generate([{"prompt_token_ids": each} for each in prompts], sampling)
    records = [each.record for each in answers if each.record is not None]
    return Run(
        [each.token_ids for each in answers],
        [each.finish_reason for each in answers],
        [record.statistics.joins for record in records],
        [record.statistics.max_depth for record in records],
        core_state(engine.scheduler),
        preemptions[0],
    )


@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_a_client_that_resubmits_to_plain_decoding(
    checkpoint: Path, way: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    allowed = [tokenizer.encode(text)[0] for text in SAYS] + [tokenizer.eos_token_id]
    expected_texts = _answers(checkpoint, tuple(allowed))
    prompts = [tokenizer.encode(text) for text in expected_texts]
    engine_args, expected = WAYS[way]
    engine = EngineProcess(
        model=str(checkpoint),
        max_model_len=CONTEXT,
        additional_config={"apar": {"parallel_format": PATHS.model_dump(mode="json")}},
        **engine_args,
    )
    try:
        sampling = {
            "temperature": 0.0,
            "frequency_penalty": PENALTY,
            "max_tokens": 300,
            "allowed_token_ids": allowed,
        }
        run = engine.call(answer, prompts, sampling)
    finally:
        engine.close()

    assert [list(each) for each in run.token_ids] == list(expected_texts.values())
    assert set(run.reasons) == {"stop"}
    assert len(prompts) >= 8
    assert sum(run.joins) >= 10
    assert max(run.depths) >= 2
    assert run.state["free_blocks"] == run.state["kv_blocks"]
    assert (run.preemptions > 0) == ("preempted" in expected)


@pytest.mark.parametrize("definition", [THREADWEAVER, NESTED], ids=lambda each: each.name)
def test_replayed_threads_are_joined_as_their_client_does(
    checkpoint: Path, definition: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    outlines = "<Outlines><Outline> 1: x</Outline> <Outline> 2: y</Outline></Outlines>"
    texts = {
        "": f"a<Parallel>{outlines}b</Parallel>c<Parallel>{outlines}d",
        "0": " one</Thread>",
        "1": " two</Thread>",
        "2": f" three<Parallel>{outlines}</Parallel></Thread>",
        "3": " four</Thread>",
    }
    if definition.children_fork:
        texts |= {"2.0": " five</Thread>", "2.1": " six"}
    script = {key: tokenizer.encode(text) for key, text in texts.items()}
    for key, text in texts.items():
        script[key] += [] if text.endswith("</Thread>") else [tokenizer.eos_token_id]
    engine = EngineProcess(
        model=str(checkpoint),
        max_model_len=CONTEXT,
        logits_processors=[REPLAY],
        additional_config={"apar": {"parallel_format": definition.model_dump(mode="json")}},
    )
    try:
        sampling = {"temperature": 0.0, "max_tokens": 400, "extra_args": replay_args(script)}
        run = engine.call(answer, [tokenizer.encode("Question")], sampling)
    finally:
        engine.close()

    class Scripted(Client):
        @property
        def end_id(self) -> int:
            return int(tokenizer.eos_token_id)

    client = Scripted(definition, script, tokenizer)
    assert [list(each) for each in run.token_ids] == [client.answer(tokenizer.encode("Question"))]
    assert run.state["free_blocks"] == run.state["kv_blocks"]


@cache
def _answers(checkpoint: Path, allowed: tuple[int, ...]) -> dict[str, list[int]]:
    """Return the answers that have blocks, but not too many threads."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers: dict[str, list[int]] = {}
    for number in range(NUM_PROMPTS):
        text = "".join(random.Random(number).choices("abcdefgh ?!", k=3 + number))
        client = PlainDecoding(PATHS, {"allowed": list(allowed)}, tokenizer)
        with contextlib.suppress(TooLongError):
            answer = client.answer(tokenizer.encode(text))
            if len(client.contexts) > 1:
                answers[text] = answer
    return answers


@cache
def _reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
