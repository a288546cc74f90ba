"""Threads that wait for their children, in vLLM with a model that has learned nothing.

The reference is a client that resubmits requests to plain greedy decoding with transformers.
"""

import contextlib
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import REPLAY, replay_args
from apar_core.formats.shipped_formats import PARALLEL_R1, THREADWEAVER
from apar_core.scheduler.core_state import CoreState, core_state
from tests.fakes.block_scripts import MARKERS, NESTED, Client
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import count_calls
from tests.integration.random_checkpoint import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
PATHS = PARALLEL_R1.model_copy(update={"children_fork": True})
# A model without training says little else, but opens blocks and ends threads.
SAYS = (*"abcdefghijklmnopqrst", "<Parallel>", "</Path>", "</Parallel>")
CONTEXT = 768
# Without a penalty on what it has said, such a model repeats one token forever.
PENALTY = 2.0
MAX_COMPLETIONS = 40
NUM_PROMPTS = 50
# Room for the longest thread and a few blocks more, so that threads find no free block.
SHORT_MEMORY: dict[str, Any] = {"block_size": 16, "spare_blocks": 1}
WAYS: dict[str, dict[str, Any]] = {
    "large batch": {},
    "short memory": SHORT_MEMORY,
    "chunked prefill": {"max_num_batched_tokens": 32, "max_num_seqs": 6},
    "n-gram speculation": {"speculative_config": NGRAM},
    "n-gram speculation in short memory": {**SHORT_MEMORY, "speculative_config": NGRAM},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("random"), MARKERS, context_tokens=CONTEXT, spread=0.3
    )


def greedy(
    checkpoint: Path,
    allowed: list[int],
    prompt: list[int],
    begun: list[int],
    stop_ids: set[int],
) -> list[int]:
    """Return what plain greedy decoding generates, of which `begun` is given."""
    model, choices = _reference(checkpoint), torch.tensor(allowed)
    generated = list(begun)
    while True:
        with torch.no_grad():
            logits_V = model(torch.tensor([[*prompt, *generated]])).logits[0, -1]
        for token_id in generated:
            logits_V[token_id] -= PENALTY
        generated.append(int(choices[logits_V[choices].argmax()]))
        if generated[-1] in stop_ids:
            return generated


class TooLongError(Exception):
    """An answer has too many threads."""


class PlainDecoding(Client):
    """A client whose completions are plain greedy decoding with transformers."""

    def complete(self, key: str, prompt: list[int], stop_ids: set[int]) -> list[int]:
        if len(self.contexts) == MAX_COMPLETIONS:
            raise TooLongError
        stop_ids = {*stop_ids, self.end_id}
        checkpoint = Path(self.tokenizer.name_or_path)
        return greedy(checkpoint, self.script["allowed"], prompt, [], stop_ids)

    @property
    def end_id(self) -> int:
        end_id: int = self.tokenizer.eos_token_id
        return end_id


@dataclass(frozen=True)
class Expected:
    """What a client gets for a prompt, and which blocks of threads it met."""

    token_ids: tuple[int, ...]
    joins: int
    depth: int
    longest: int = field(default=0, compare=False)

    @classmethod
    def of(cls, client: Client, prompt: list[int]) -> "Expected":
        token_ids = tuple(client.answer(prompt))
        keys = [key for key, _, _ in client.contexts]
        # Each completion of a thread but its first continues behind a block.
        joins = len(keys) - len(set(keys))
        depth = max(len(key.split(".")) if key else 0 for key in keys)
        longest = max(len(before) + len(generated) for _, before, generated in client.contexts)
        return cls(token_ids, joins, depth, longest)


@dataclass(frozen=True)
class Run:
    token_ids: list[tuple[int, ...]]
    reasons: list[str]
    joins: list[int]
    depths: list[int]
    state: CoreState
    shortages: int


def answer(engine: OfflineEngine, prompts: list[list[int]], sampling: Any) -> Run:
    """Answer prompts at once. Runs in the engine's process."""
    scheduler = engine.scheduler
    # Clients may not name control tokens, but a model without training rarely says them by itself.
    engine._engine.input_processor._refuse_control_ids = lambda _params: None
    preemptions = count_calls(scheduler, "_preempt_request")
    # Called where no block is free while some are held for threads that wait.
    given_up = count_calls(scheduler.block_sharing, "_allocate_without_waiting_prefixes")
    answers = engine.generate([{"prompt_token_ids": each} for each in prompts], sampling)
    records = [each.record for each in answers if each.record is not None]
    return Run(
        [each.token_ids for each in answers],
        [each.finish_reason for each in answers],
        [record.statistics.joins for record in records],
        [record.statistics.max_depth for record in records],
        core_state(scheduler),
        preemptions[0] + given_up[0],
    )


@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_a_client_that_resubmits_to_plain_decoding(
    checkpoint: Path, way: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    allowed = [tokenizer.encode(text)[0] for text in SAYS] + [tokenizer.eos_token_id]
    answers = _answers(checkpoint, tuple(allowed))
    prompts = [tokenizer.encode(text) for text in answers]
    engine_args = dict(WAYS[way])
    settings: dict[str, Any] = {"parallel_format": PATHS.model_dump(mode="json")}
    context = CONTEXT
    if spare_blocks := engine_args.pop("spare_blocks", 0):
        context = 16 * (max(each.longest for each in answers.values()) // 16 + 2)
        engine_args["num_gpu_blocks_override"] = context // 16 + spare_blocks
        settings["growth_reserve_tokens"] = 0
    engine = EngineProcess(
        model=str(checkpoint),
        max_model_len=context,
        additional_config={"apar": settings},
        **engine_args,
    )
    try:
        sampling = {
            "temperature": 0.0,
            "frequency_penalty": PENALTY,
            "max_tokens": 500,
            "allowed_token_ids": allowed,
        }
        run = engine.call(answer, prompts, sampling)
    finally:
        engine.close()

    found = zip(run.token_ids, run.joins, run.depths, strict=True)
    assert [Expected(*each) for each in found] == list(answers.values())
    assert set(run.reasons) == {"stop"}
    # Every answer has a block, and some have blocks in blocks.
    assert all(each.joins for each in answers.values())
    assert max(each.depth for each in answers.values()) >= 2
    assert run.state.free_blocks == run.state.kv_blocks
    assert (run.shortages > 0) == bool(spare_blocks)


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
    assert run.state.free_blocks == run.state.kv_blocks


def test_children_read_only_a_message_and_their_results_replace_the_call(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    end_id = tokenizer.eos_token_id
    allowed = [*tokenizer.encode("abcdefghijkl"), end_id]
    prompt = tokenizer.encode("Reach 24 with 3 and 8.")
    search = "Current State: 24:[3, 8], Operations: []\n"
    written = f"Moving to Node #0\n{search}Generated Node #0,1: 24:[24] Operation: 3*8=24\n"
    call = (
        "<Calling Sub Searches>\n<Start Sub Search 0 at level 1> Moving to Node #0\n"
        "<Start Sub Search 1 at level 1> Moving to Node #0,1\n<End Calling Sub Searches>"
    )
    found = "\nGoal Reached\n24\nGoal Reached\n"
    # The engine generates this, and then whatever the model chooses.
    script = {"": tokenizer.encode(written + call), "0": tokenizer.encode(found)}
    engine = EngineProcess(
        model=str(checkpoint),
        max_model_len=CONTEXT,
        logits_processors=[REPLAY],
        additional_config={"apar": {"parallel_format": "apr"}},
    )
    try:
        sampling = {
            "temperature": 0.0,
            "frequency_penalty": PENALTY,
            "max_tokens": 500,
            "allowed_token_ids": allowed,
            "extra_args": replay_args(script),
        }
        run = engine.call(answer, [prompt], sampling)
    finally:
        engine.close()

    messages = (
        "Moving to Node #0\nCurrent State: 24:[3, 8], Operations: []",
        "Moving to Node #0,1\nCurrent State: 24:[24], Operations: ['3*8=24']",
    )
    texts = [
        greedy(checkpoint, allowed, tokenizer.encode(message), begun, {end_id})[:-1]
        for message, begun in zip(messages, (script["0"], []), strict=True)
    ]
    result = str(tokenizer.decode(texts[0])).removeprefix("\nGoal Reached\n")
    joined = tokenizer.encode(
        "<Sub Searches>\n"
        f"<Goal Reached in Sub Search 0 at level 1 at Node #0>\n{result}\n"
        "<No Solution in Sub Search 1 at level 1 at Node #0,1>\n<End Sub Searches>\n"
    )
    context = [*prompt, *tokenizer.encode(written), *joined]
    behind = greedy(checkpoint, allowed, context, [], {end_id})[:-1]
    assert list(run.token_ids[0]) == [*script[""], *texts[0], *texts[1], *joined, *behind]
    assert all(texts)
    assert behind
    assert run.joins == [1]
    assert run.state.free_blocks == run.state.kv_blocks


@cache
def _answers(checkpoint: Path, allowed: tuple[int, ...]) -> dict[str, Expected]:
    """Return the answers that have blocks, but not too many threads."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers: dict[str, Expected] = {}
    for number in range(NUM_PROMPTS):
        text = "".join(random.Random(number).choices("abcdefgh ?!", k=3 + number))
        client = PlainDecoding(PATHS, {"allowed": list(allowed)}, tokenizer)
        with contextlib.suppress(TooLongError):
            expected = Expected.of(client, tokenizer.encode(text))
            if expected.depth:
                answers[text] = expected
    return answers


@cache
def _reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
