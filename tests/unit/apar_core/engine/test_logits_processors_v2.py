"""Our V2 logits processors inside vLLM's own V2 sampler and request states, on CPU tensors.

The runner's Triton kernels do not run here: they copy token histories to the device, which our
processors do not read, and fill the positions and tokens of a batch, which the tests compute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from apar_core.engine import logits_processors as v1
from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.engine.gpu_start import SAMPLER_VARIABLE
from apar_core.engine.input_processor import ForkInputProcessor, replays
from apar_core.engine.plugin import complete
from apar_core.engine.replay import REPLAY, replay_args
from apar_core.models.apar_tiny import checkpoint_path
from tests.fakes.examples import num_examples
from tests.fakes.scripted_engine import CHILD, FORK
from tests.fakes.torch_operations import COPIES, Operations
from tests.unit.apar_core.engine.test_logits_processors import (
    CPU,
    HPD,
    NO_CONFIG,
    PADOC,
    forking,
)

VOCABULARY = 16
SLOTS = 6
NAMES = [
    "apar_core.engine.logits_processors_v2:Replay",
    "apar_core.engine.logits_processors_v2:ForkBans",
]


@pytest.fixture(autouse=True, scope="module")
def _without_pinned_memory() -> Iterator[None]:
    """Let vLLM use its own buffers for platforms without pinned memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_utils, "is_uva_available", lambda: False)
        yield


@cache
def config() -> VllmConfig:
    arguments = EngineArgs(
        model=str(checkpoint_path()), scheduler_cls=SCHEDULER_CLS, enable_prefix_caching=True
    )
    return arguments.create_engine_config()


@dataclass
class Thread:
    extra_args: dict[str, Any] | None
    prompt: list[int]
    generated: list[int] = field(default_factory=list)


class Runner:
    """The sampling part of a V2 model runner."""

    def __init__(self) -> None:
        self.states = RequestState(SLOTS, 64, 64, 2, VOCABULARY, CPU)
        self.sampler = Sampler(
            config(), SLOTS, VOCABULARY, CPU, self.states,
            custom_logits_processors=build_custom_logits_processors(
                config(), self.states, False, NAMES
            ),
        )  # fmt: skip
        self.threads: dict[str, Thread] = {}

    def add(self, name: str, thread: Thread) -> None:
        """Add a thread; with generated tokens, it resumes after a preemption."""
        tokens = [*thread.prompt, *thread.generated]
        self.threads[name] = thread
        self.states.add_request(name, len(thread.prompt), tokens, 0, 20)
        params = SamplingParams(temperature=0.0, extra_args=thread.extra_args)
        self.sampler.add_request(self.states.req_id_to_index[name], params)
        self.sampler.apply_staged_writes()

    def remove(self, name: str) -> None:
        self.states.remove_request(name)
        del self.threads[name]

    def apply(
        self,
        names: list[str],
        logits: torch.Tensor,
        *,
        drafts: list[int] | None = None,
        computed: int | None = None,
    ) -> torch.Tensor:
        """Process a step's logits; `drafts` are given to each thread, as with speculation.

        `computed`: only so many tokens of each sequence are computed, as in a chunk of a prompt.
        """
        slots = np.array([self.states.req_id_to_index[name] for name in names], dtype=np.intp)
        fed, positions, local = [], [], []
        for name in names:
            thread = self.threads[name]
            tokens = [*thread.prompt, *thread.generated][:computed]
            for offset, token in enumerate([tokens[-1], *(drafts or [])]):
                fed.append(token)
                positions.append(len(tokens) - 1 + offset)
                local.append(offset)
        num_rows = 1 + len(drafts or [])
        lengths = [positions[num_rows * (index + 1) - 1] + 1 for index in range(len(names))]
        return self.sampler.apply_sampling_params(
            logits,
            torch.from_numpy(slots.repeat(num_rows)),
            torch.from_numpy(slots),
            slots,
            torch.tensor(positions),
            torch.tensor(fed, dtype=torch.int32),
            torch.tensor(local, dtype=torch.int32),
            # As padded for a CUDA graph.
            np.array([*lengths, 0, 0], dtype=np.int32),
        )

    def banned(self, names: list[str], **options: Any) -> list[set[int]]:
        num_rows = len(names) * (1 + len(options.get("drafts", [])))
        logits = self.apply(names, torch.zeros(num_rows, VOCABULARY), **options)
        return [set(torch.where(torch.isinf(row))[0].tolist()) for row in logits]


@pytest.mark.parametrize(
    ("extra_args", "prompt", "generated", "expected"),
    [
        (forking(), [9], [], {CHILD}),
        (forking(), [9], [10, FORK], {CHILD, FORK}),
        # The first token of a child, and of a thread resumed right after its fork token.
        (forking(), [9, FORK, CHILD], [], {CHILD, FORK}),
        (forking(), [9, FORK, CHILD], [10], {CHILD}),
        (forking(), [9, 10, FORK], [], {CHILD, FORK}),
        (forking(enabled=False), [9], [10], {CHILD, FORK}),
        (None, [9], [10], set()),
        # HPD-Parsing: a child starts with its seed and does not fork.
        (forking(**HPD), [9], [10], {CHILD}),
        (forking(**HPD, thread_path=[0]), [9, CHILD], [], {CHILD, FORK}),
        (forking(**HPD, thread_path=[0]), [9, CHILD], [10], {CHILD, FORK}),
        # PaDoc: nothing is forced.
        (forking(**PADOC), [9], [10], set()),
        (forking(**PADOC), [9], [FORK], {FORK}),
        (forking(**PADOC, thread_path=[0]), [9, FORK], [10], {FORK}),
        # A seed of two markers.
        (forking(seed_ids=[CHILD, 7], banned_ids=[CHILD, 7]), [9, 7], [], {CHILD, 7, FORK}),
    ],
)
def test_control_tokens_are_banned_where_they_cannot_stand(
    extra_args: dict[str, Any] | None, prompt: list[int], generated: list[int], expected: set[int]
) -> None:
    runner = Runner()
    runner.add("a", Thread(extra_args, prompt, generated))

    assert runner.banned(["a"]) == [expected]


def test_a_slot_takes_the_bans_of_its_next_request() -> None:
    runner = Runner()
    runner.add("a", Thread(forking(enabled=False), [9]))
    runner.add("b", Thread(forking(), [9], [FORK]))
    slot = runner.states.req_id_to_index["a"]
    runner.remove("a")
    runner.add("c", Thread(None, [9]))

    assert runner.states.req_id_to_index["c"] == slot
    assert runner.banned(["b", "c"]) == [{CHILD, FORK}, set()]


def test_a_thread_that_has_begun_a_tool_call_forks_no_more() -> None:
    calls = {"call_ids": [8]}
    runner = Runner()
    runner.add("a", Thread(forking(**calls), [9], [10]))
    runner.add("b", Thread(forking(**calls), [9], [10]))
    found = [runner.banned(["a", "b"])]
    for token in (8, 11, 12):
        runner.threads["a"].generated.append(token)
        found.append(runner.banned(["b", "a"]))
    slot = runner.states.req_id_to_index["a"]
    runner.remove("a")
    runner.add("c", Thread(forking(**calls), [8, 9]))

    assert found == [[{CHILD}, {CHILD}], *3 * [[{CHILD}, {CHILD, FORK}]]]
    assert runner.states.req_id_to_index["c"] == slot
    assert runner.banned(["b", "c"]) == [{CHILD}, {CHILD}]


def test_a_tool_call_in_the_prompt_ends_no_forks_and_children_call_no_tools() -> None:
    runner = Runner()
    runner.add("a", Thread(forking(call_ids=[8]), [9, 8, 10, 11]))
    runner.add("b", Thread(forking(call_ids=[8], thread_path=[0]), [9, FORK, CHILD], [10]))
    runner.states.prompt_len.copy_to_uva()
    # A chunk of the prompt ends with the token.
    runner.banned(["a"], computed=2)

    assert runner.banned(["a", "b"]) == [{CHILD}, {CHILD, 8}]


def test_drafted_tokens_are_checked_too() -> None:
    runner = Runner()
    runner.add("a", Thread(forking(), [9], [10]))
    runner.add("b", Thread(forking(enabled=False), [9], [10]))

    assert runner.banned(["a", "b"], drafts=[FORK, 11]) == [
        {CHILD}, {CHILD, FORK}, {CHILD}, {CHILD, FORK}, {CHILD, FORK}, {CHILD, FORK},
    ]  # fmt: skip


def test_bans_copy_nothing_from_the_host_in_a_step() -> None:
    runner = Runner()
    runner.add("a", Thread(forking(), [9], [FORK]))
    bans: Any = runner.sampler.logits_processors[-1]
    apply, operations = bans.apply, Operations()

    def watched(*given: Any) -> Any:
        with operations:
            return apply(*given)

    bans.apply = watched
    assert runner.banned(["a"]) == [{CHILD, FORK}]

    assert operations.names.isdisjoint(COPIES)
    assert "aten.masked_fill_.Scalar" in operations.names


def test_a_replay_starts_behind_the_prompt_and_goes_on_after_a_preemption() -> None:
    plan = replay_args({"": [10, 11, 12]})
    runner = Runner()
    runner.add("a", Thread({**plan, **forking()}, [9, 9, 9], [10, 11]))
    before = torch.randn(1, VOCABULARY)
    before[:, CHILD] = -torch.inf

    # A part of the prompt is computed, then all of it.
    assert torch.equal(runner.apply(["a"], before, computed=2), before)
    assert int(runner.apply(["a"], before).argmax()) == 12


# Requests of one checkpoint.
ARGUMENTS = st.sampled_from(
    [
        forking(call_ids=[12]),
        forking(call_ids=[12], enabled=False),
        forking(call_ids=[12], children_fork=False, thread_path=[0]),
    ]
)
TEXT = st.lists(st.sampled_from([FORK, 10, 11, 12]), max_size=5)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    st.lists(st.tuples(ARGUMENTS, st.sampled_from([[9], [9, FORK, CHILD]]), TEXT, st.booleans()),
             min_size=1, max_size=SLOTS),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_both_runners_choose_the_same_tokens(
    drawn: list[tuple[dict[str, Any], list[int], list[int], bool]], random: Any
) -> None:
    """Threads in any order, replayed or free, generate the same with the V1 processors."""
    runner = Runner()
    threads: dict[str, Thread] = {}
    for number, (extra_args, prompt, script, is_replayed) in enumerate(drawn):
        plan = replay_args({"": script}) if is_replayed else {}
        threads[str(number)] = Thread({**plan, **extra_args}, prompt)
        runner.add(str(number), threads[str(number)])
    generator = torch.Generator().manual_seed(random.randrange(1000))
    for _ in range(6):
        names = [*threads]
        random.shuffle(names)
        logits = torch.randn(len(names), VOCABULARY, generator=generator)
        expected = logits.clone()
        for processor in (v1.Replay(NO_CONFIG, CPU, False), v1.ForkBans(NO_CONFIG, CPU, False)):
            processor.update_state(_v1_batch([threads[name] for name in names]))
            expected = processor.apply(expected)

        found = runner.apply(names, logits)

        assert torch.equal(found, expected)
        for name, row in zip(names, found, strict=True):
            threads[name].generated.append(int(row.argmax()))


def _v1_batch(threads: list[Thread]) -> BatchUpdate:
    return BatchUpdate(
        batch_size=len(threads),
        removed=[],
        added=[
            (index, SamplingParams(extra_args=each.extra_args), each.prompt, each.generated)
            for index, each in enumerate(threads)
        ],
        moved=[],
    )


def test_an_engine_gets_the_processors_of_its_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(**arguments: Any) -> VllmConfig:
        return EngineArgs(
            model=str(checkpoint_path()), enable_prefix_caching=True, **arguments
        ).create_engine_config()

    forking_engine = engine(scheduler_cls=SCHEDULER_CLS, logits_processors=[REPLAY])
    assert forking_engine.model_config.logits_processors == [
        REPLAY, "apar_core.engine.logits_processors:ForkBans",
    ]  # fmt: skip
    plain = engine()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)

    assert complete(plain).model_config.logits_processors is None
    # A CUDA build without a compiler for FlashInfer's sampler.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(SAMPLER_VARIABLE, "1")
    monkeypatch.delenv(SAMPLER_VARIABLE)
    # Again, as a virtual engine does.
    for _ in range(2):
        assert complete(forking_engine).model_config.logits_processors == NAMES
    assert replays(forking_engine)
    assert os.environ[SAMPLER_VARIABLE] == "0"
    # vLLM loads the classes, and refuses those of the other interface.
    ForkInputProcessor(forking_engine)
