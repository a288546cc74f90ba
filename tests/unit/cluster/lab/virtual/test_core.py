from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams

from apar_core.engine.replay import ReplayText, replay_args
from apar_core.errors import EngineError
from apar_core.formats.lists import ListRules
from apar_core.formats.shipped_formats import LISTS
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text
from apar_core.step_costs.costs import StepCosts
from cluster.lab.experiments.random_model import write_random_model
from cluster.lab.virtual.core import (
    CoreEvent,
    VirtualCore,
    VirtualCores,
    VirtualRequest,
)
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from cluster.lab.virtual.executor import StepRecord
from cluster.lab.virtual.list_answers import LIST_ANSWER_ARG, list_answer
from cluster.lab.virtual.text import checkpoint_tokens

TOKENS = checkpoint_tokens()
COSTS = StepCosts(
    "test", "predicted", "made up", ((1, 0.01), (64, 0.02)), 1e-6, launch_s=1e-3, host_row_s=1e-5
)
CONFIG = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
# A cache that is too small for all requests at once, so that threads are preempted.
SPEC = VirtualSpec(CONFIG, COSTS, kv_tokens=2048, max_model_len=512, forks={"max_requests": 12})


def request(
    number: int, *, arrival_s: float = 0.0, forked: bool = True, prefix: int = 0
) -> VirtualRequest:
    """A list of two to five items, each with a detail; forked, or the same text as one thread."""
    random_ = random.Random(number)
    details = [_text(random_, 10, 60) for _ in range(random_.randint(2, 5))]
    items = [_text(random_, 3, 8) for _ in details]
    root = [token for item in items for token in (*item, TOKENS.fork_id)]
    scripts = {"": [*root, TOKENS.end_id]}
    scripts |= {str(index): [*each, TOKENS.end_id] for index, each in enumerate(details)}
    pairs = zip(items, details, strict=True)
    flat = [token for item, detail in pairs for token in (*item, *detail)] + [TOKENS.end_id]
    prompt = [7] * prefix + _text(random_, 20, 100)
    name = f"r{number}"
    return VirtualRequest(
        name, prompt, scripts if forked else {"": flat}, len(flat), forked, arrival_s
    )


def _text(random_: random.Random, least: int, most: int) -> list[int]:
    return [random_.randint(200, 900) for _ in range(random_.randint(least, most))]


def arrivals(number: int, *, forked: bool = True) -> list[VirtualRequest]:
    random_ = random.Random(0)
    times = sorted(random_.uniform(0.0, 2.0) for _ in range(number))
    return [request(index, arrival_s=at_s, forked=forked) for index, at_s in enumerate(times)]


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def cores(request: pytest.FixtureRequest) -> VirtualCores:
    return VirtualCores(replace(SPEC, is_async=request.param))


@pytest.fixture
def core(cores: VirtualCores) -> VirtualCore:
    return cores.build()


class Served(NamedTuple):
    """A request, the time of its first token, and its end."""

    request: VirtualRequest
    first_token_s: float
    end: CoreEvent


def run_open_loop(core: VirtualCore, requests: Iterable[VirtualRequest]) -> list[Served]:
    """Serve requests at their arrival times, and return them in order of completion."""
    coming = sorted(requests, key=lambda each: each.arrival_s)
    known = {each.request_id: each for each in coming}
    first_token_s: dict[str, float] = {}
    served: list[Served] = []
    while coming or core.has_work:
        while coming and (not core.has_work or coming[0].arrival_s <= core.now_s):
            core.add(coming.pop(0))
        for event in core.step():
            name = event.request_id
            if event.is_end:
                served.append(Served(known[name], first_token_s[name], event))
            else:
                first_token_s[name] = event.time_s
    return served


def recorded(core: VirtualCore) -> list[StepRecord]:
    records: list[StepRecord] = []
    core.device.on_step = records.append
    return records


def test_takes_the_steps_of_an_engine_with_its_front_end(cores: VirtualCores) -> None:
    requests = [*arrivals(30), *(request(100 + n, arrival_s=2.0, forked=False) for n in range(4))]
    core = cores.build()
    expected = recorded(core)
    run_open_loop(core, requests)

    assert core.preemptions > 0
    assert core.num_forks > 60
    assert _steps_with_front_end(cores.spec, requests) == expected


def _steps_with_front_end(spec: VirtualSpec, requests: list[VirtualRequest]) -> list[StepRecord]:
    with VirtualEngine(spec) as engine:
        found: list[StepRecord] = []
        engine.device.on_step = found.append
        _serve(engine.llm.llm_engine, engine.device.clock, requests)
    return found


def listed_request(number: int) -> VirtualRequest:
    """An answer of a sentence, a list of three to five items, and another sentence."""
    random_ = random.Random(number)
    words = ("walk", "cook", "sleep early", "read a book", "call a friend", "drink some water")

    def detail() -> str:
        return ", ".join(random_.choices(words, k=random_.randint(2, 20)))

    items = [f"{item}. Tip {item}: {detail()}." for item in range(1, random_.randint(4, 6))]
    text = "\n".join(["Here are some tips:\n", *items, "\nThat is all."])
    llama = load_text(LLAMA_TOKENIZER)
    prompt = _text(random_, 20, 100)
    answer = list_answer(text, ListRules(LISTS, llama.tokenizer), len(prompt), llama.end_id)
    return VirtualRequest(
        f"r{number}", prompt, {}, len(answer.flat), True, 0.1 * number, listed=answer
    )


def list_spec(folder: Path) -> VirtualSpec:
    return replace(
        SPEC,
        forks={"parallel_format": LISTS.name},
        checkpoint=write_random_model("llama-7b", folder),
    )


def test_lists_take_the_steps_of_an_engine_with_its_front_end(tmp_path: Path) -> None:
    requests = [listed_request(number) for number in range(12)]
    core = VirtualCores(list_spec(tmp_path)).build()
    expected = recorded(core)
    served = run_open_loop(core, requests)

    assert core.num_forks > 60
    assert len(served) == len(requests)
    for each in served:
        assert each.request.listed is not None
        assert each.end.reader is not None
        # The reader has seen the whole text, at the latest when the request ended.
        assert each.end.text_tokens == len(each.request.listed.flat) - 1
        assert each.end.generated_tokens > each.end.text_tokens
        assert each.end.reader.times.first_s == each.first_token_s
        assert each.end.reader.times.last_s is not None
        assert each.end.reader.times.last_s <= each.end.time_s
    assert _steps_with_front_end(core.spec, requests) == expected


def test_lists_need_an_engine_that_writes_them_and_have_no_journal(
    core: VirtualCore, tmp_path: Path
) -> None:
    with pytest.raises(
        EngineError, match="'r1' writes lists in parallel, and this engine has no such format"
    ):
        core.add(listed_request(1))

    listing = VirtualCores(list_spec(tmp_path)).build()
    listing.add(listed_request(1))
    with pytest.raises(
        EngineError, match="'r1' writes lists in parallel, so another core cannot continue it"
    ):
        listing.journal("r1")


def _recorded(request: VirtualRequest) -> dict[str, Any]:
    if request.listed is None:
        return dict(replay_args(request.scripts))
    return {LIST_ANSWER_ARG: ReplayText(request.listed.to_text())}


def _serve(llm_engine: Any, clock: Any, requests: list[VirtualRequest]) -> None:
    coming = list(requests)
    while coming or llm_engine.has_unfinished_requests():
        if not llm_engine.has_unfinished_requests():
            clock.advance_to(coming[0].arrival_s)
        while coming and coming[0].arrival_s <= clock.now_s:
            each = coming.pop(0)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=each.max_tokens,
                detokenize=False,
                extra_args={**_recorded(each), "apar_enabled": each.forked},
            )
            number = len(requests) - len(coming)
            llm_engine.add_request(
                each.request_id,
                {"prompt_token_ids": list(each.prompt_ids)},
                params,
                arrival_time=each.arrival_s + 1e-9 * number,
            )
        llm_engine.step()


def test_requests_of_an_open_loop_are_served_whole_and_in_time(core: VirtualCore) -> None:
    requests = arrivals(20)

    served = {each.request.request_id: each for each in run_open_loop(core, requests)}

    assert len(served) == 20
    for each in requests:
        first_token_s, end = served[each.request_id][1:]
        tokens = [token for script in each.scripts.values() for token in script]
        assert end.generated_tokens == len(tokens)
        assert end.text_tokens == each.max_tokens - 1
        assert each.arrival_s < first_token_s < end.time_s
    assert not core.has_work
    assert core.state().free_blocks == core.state().kv_blocks


def test_a_request_that_runs_alone_takes_one_step_a_token(core: VirtualCore) -> None:
    (served,) = run_open_loop(core, [request(1, arrival_s=5.0, forked=False)])

    assert served.first_token_s > 5.0
    # The executor is asked for a token more where it is scheduled ahead.
    assert core.totals.steps - served.end.generated_tokens in (0, 1)


def test_two_runs_are_identical(cores: VirtualCores) -> None:
    runs = [run_open_loop(cores.build(), arrivals(15)) for _ in range(2)]

    assert runs[0] == runs[1]


def test_a_slower_core_takes_longer_over_the_same_steps(cores: VirtualCores) -> None:
    usual, slow = cores.build(), cores.build(costs=COSTS.slower(2.0))
    requests = [request(number) for number in range(5)]

    run_open_loop(usual, requests)
    run_open_loop(slow, requests)

    assert slow.totals.rows == usual.totals.rows
    assert slow.totals.device_s == pytest.approx(2.0 * usual.totals.device_s)


def test_shared_prompts_are_found_in_the_prefix_cache(core: VirtualCore) -> None:
    first, second = request(1, prefix=64), request(2, prefix=64, arrival_s=100.0)

    served = run_open_loop(core, [first, second])

    assert [each.end.cached_tokens for each in served] == [0, 64]


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 9, 30])
def test_a_journal_continues_a_request_on_another_core(
    cores: VirtualCores, forked: bool, num_steps: int
) -> None:
    lost, other = cores.build(), cores.build()
    wanted = request(3, forked=forked)
    whole = sum(map(len, wanted.scripts.values()))
    lost.add(wanted)
    for _ in range(num_steps):
        lost.step()

    journal = lost.journal("r3")
    other.add(replace(wanted, arrival_s=lost.now_s), journal)
    events = [event for _ in range(400) if other.has_work for event in other.step()]

    known = sum(len(delta.token_ids) for delta in journal)
    assert (known > 0) == (num_steps > 0)
    assert [event.is_end for event in events] == ([True] if known else [False, True])
    assert events[-1].generated_tokens == whole


def test_the_state_counts_requests_and_threads(core: VirtualCore) -> None:
    for number in range(3):
        core.add(request(number))
    for _ in range(25):
        core.step()

    state = core.state()

    assert state.requests == core.num_requests == 3
    assert state.threads > 3
    assert state.free_blocks < state.kv_blocks == 128
    assert state.steps is not None
    assert state.steps.num_steps == pytest.approx(core.totals.steps, abs=2)


def test_a_request_that_never_fits_is_reported(core: VirtualCore) -> None:
    core.scheduler.kv_cache_manager.block_pool.get_new_blocks(124)
    core.add(VirtualRequest("long", list(range(300, 500)), {"": [TOKENS.end_id]}, 1))

    with pytest.raises(EngineError, match="none of 1 threads fits"):
        run_open_loop(core, [])


def test_a_prompt_as_long_as_the_context_is_refused(core: VirtualCore) -> None:
    with pytest.raises(EngineError, match="leaves no room in a context of 512"):
        core.add(VirtualRequest("long", [300] * 512, {"": [TOKENS.end_id]}, 1))
