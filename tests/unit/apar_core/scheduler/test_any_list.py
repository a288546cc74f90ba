"""Properties of lists that are written in parallel, under any schedule."""

from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apar_core.engine.thread_tags import ThreadTags
from apar_core.formats.lists import ListRules
from apar_core.formats.parallel_format import ListItems
from apar_core.formats.shipped_formats import LISTS
from apar_core.journal import Journal
from apar_core.scheduler.fork_policy import EagerPolicy
from apar_core.step_costs.costs import StepBatch
from cluster.lab.virtual.list_answers import list_answer
from tests.fakes.block_scripts import TOKENIZER, CharacterTokenizer, block_parameters, tokens
from tests.fakes.examples import num_examples
from tests.fakes.list_scripts import ListCase, MergingTokenizer, list_cases
from tests.fakes.scripted_engine import (
    END,
    EngineShape,
    ScriptedEngine,
    merged,
    write_model_config,
)
from tests.fakes.tagged_streams import TaggedReader

PROMPT = tokens("A question?")
shapes = st.builds(
    EngineShape,
    num_blocks=st.integers(200, 400),
    block_size=st.sampled_from([4, 16]),
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.integers(13, 64),
    max_model_len=st.just(2000),
    run_ahead=st.booleans(),
    tokens_per_step=st.integers(1, 4),
    output_interval_s=st.sampled_from([0.0, 0.003, 0.05]),
)
MERGING = MergingTokenizer()
RULES = ListRules(LISTS, TOKENIZER)
CASES = list_cases(PROMPT, TOKENIZER)
MERGED_CASES = list_cases(PROMPT, MERGING)
limits = st.tuples(st.integers(1, 6), st.integers(1, 8))
few, many = (
    settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))
    for number in (8, 300)
)


def engine_with(
    cases: list[tuple[ListCase, tuple[int, int]]],
    shape: EngineShape,
    model_dir: Path,
    tokenizer: CharacterTokenizer = TOKENIZER,
    **more: int,
) -> ScriptedEngine:
    engine = ScriptedEngine(shape, model_dir, tokenizer)
    max_tokens = more.pop("max_tokens", 1900)
    stop_token_ids = [more.pop("stop_id")] if "stop_id" in more else []
    for number, (case, (max_threads, ahead)) in enumerate(cases):
        definition = LISTS.model_copy(update={"items": ListItems(ahead=ahead)})
        engine.add(
            f"r{number}",
            PROMPT,
            case.script,
            max_tokens=max_tokens,
            parameters=block_parameters(definition, max_threads=max_threads, **more),
            arrival_time=float(number),
            stop_token_ids=stop_token_ids,
        )
    return engine


def check_text_and_contexts(
    model_dir: Path,
    shape: EngineShape,
    cases: list[tuple[ListCase, tuple[int, int]]],
    tokenizer: CharacterTokenizer = TOKENIZER,
) -> None:
    engine = engine_with(cases, shape, model_dir, tokenizer)

    engine.run(max_steps=20000)

    for number, (case, _) in enumerate(cases):
        name = f"r{number}"
        assert tokenizer.decode(engine.texts[name]) == case.text
        assert engine.finish_reasons[name] == "stop"
        contexts = {
            (name + "".join(f"~{part}" for part in key.split(".") if part), generated): context
            for (key, generated), context in case.contexts.items()
        }
        used = {k: p for k, p in engine.prompts.items() if k[0].partition("~")[0] == name}
        # A text may have other tokens as a whole than in the parts that threads have written.
        decode = tokenizer.decode
        assert all(decode(contexts[each]) == decode(prompt) for each, prompt in used.items())
        statistics = engine.threads[name].statistics(len(PROMPT))
        assert statistics.text_tokens == len(engine.texts[name])
    engine.assert_nothing_is_left()


@few
@given(shape=shapes, cases=st.lists(st.tuples(CASES, limits), min_size=1, max_size=2))
def test_text_and_contexts_are_those_of_the_list(
    model_dir: Path, shape: EngineShape, cases: list[tuple[ListCase, tuple[int, int]]]
) -> None:
    check_text_and_contexts(model_dir, shape, cases)


@pytest.mark.slow
@many
@given(shape=shapes, cases=st.lists(st.tuples(CASES, limits), min_size=1, max_size=3))
def test_many_texts_and_contexts_are_those_of_the_list(
    model_dir: Path, shape: EngineShape, cases: list[tuple[ListCase, tuple[int, int]]]
) -> None:
    check_text_and_contexts(model_dir, shape, cases)


@few
@given(shape=shapes, cases=st.lists(st.tuples(MERGED_CASES, limits), min_size=1, max_size=2))
def test_tokens_of_several_characters_give_the_same_text(
    model_dir: Path, shape: EngineShape, cases: list[tuple[ListCase, tuple[int, int]]]
) -> None:
    check_text_and_contexts(model_dir, shape, cases, MERGING)


@pytest.mark.slow
@many
@given(shape=shapes, cases=st.lists(st.tuples(MERGED_CASES, limits), min_size=1, max_size=2))
def test_tokens_of_several_characters_give_the_same_text_of_many_lists(
    model_dir: Path, shape: EngineShape, cases: list[tuple[ListCase, tuple[int, int]]]
) -> None:
    check_text_and_contexts(model_dir, shape, cases, MERGING)


@pytest.mark.slow
@many
@given(
    shape=shapes,
    cases=st.lists(st.tuples(CASES, limits), min_size=1, max_size=3),
    aborts=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 2)), max_size=3),
    max_tokens=st.integers(1, 300),
    max_forks=st.integers(1, 12),
)
def test_aborts_and_limits_leave_nothing_behind(
    model_dir: Path,
    shape: EngineShape,
    cases: list[tuple[ListCase, tuple[int, int]]],
    aborts: list[tuple[int, int]],
    max_tokens: int,
    max_forks: int,
) -> None:
    engine = engine_with(cases, shape, model_dir, max_tokens=max_tokens, max_forks=max_forks)
    for step in range(81):
        for at_step, number in aborts:
            if at_step == step and number < len(cases):
                engine.abort(f"r{number}")
        engine.step()

    engine.run(max_steps=20000)

    engine.assert_nothing_is_left()
    aborted = {f"r{number}" for _, number in aborts}
    for number, (case, _) in enumerate(cases):
        name = f"r{number}"
        if name in aborted:
            continue
        text = engine.texts[name]
        assert len(text) <= max_tokens
        reason = engine.finish_reasons[name]
        if max_forks == 12 and len(tokens(case.text)) < max_tokens:
            assert (reason, TOKENIZER.decode(text)) == ("stop", case.text)
        elif max_forks == 12:
            assert (reason, TOKENIZER.decode(text)) == ("length", case.text[:max_tokens])


@pytest.mark.slow
@many
@given(
    shape=shapes,
    case=st.tuples(CASES, limits),
    steps=st.integers(1, 160),
    run_ahead=st.booleans(),
)
def test_an_answer_continued_by_another_engine_is_the_same(
    model_dir: Path,
    shape: EngineShape,
    case: tuple[ListCase, tuple[int, int]],
    steps: int,
    run_ahead: bool,
) -> None:
    lost = engine_with([case], shape, model_dir)
    for _ in range(steps):
        lost.step()
    journal = merged(lost.followers["r0"].take_journal())
    other = ScriptedEngine(EngineShape(max_model_len=2000, run_ahead=run_ahead), model_dir)
    definition = LISTS.model_copy(update={"items": ListItems(ahead=case[1][1])})

    other.add(
        "r0",
        PROMPT,
        case[0].script,
        max_tokens=1900,
        parameters=block_parameters(definition, max_threads=case[1][0]),
        journal=journal,
    )
    other.run(max_steps=20000)

    assert TOKENIZER.decode(other.texts["r0"]) == case[0].text
    assert other.finish_reasons["r0"] == "stop"
    other.assert_nothing_is_left()


@pytest.mark.slow
@many
@given(
    shape=shapes,
    cases=st.lists(st.tuples(CASES, limits), min_size=1, max_size=2),
    # Not a full stop: within a line that may begin an item it is dropped with the line.
    stop=st.sampled_from("abx: \n3y*"),
)
def test_a_stop_token_of_the_client_ends_the_text_where_it_stands(
    model_dir: Path, shape: EngineShape, cases: list[tuple[ListCase, tuple[int, int]]], stop: str
) -> None:
    (stop_id,) = tokens(stop)
    engine = engine_with(cases, shape, model_dir, stop_id=stop_id)

    engine.run(max_steps=20000)

    engine.assert_nothing_is_left()
    for number, (case, _) in enumerate(cases):
        text = TOKENIZER.decode(engine.texts[f"r{number}"])
        assert engine.finish_reasons[f"r{number}"] == "stop"
        # What the engine forces, separators and markers, stops nothing.
        assert case.text.startswith(text)
        if text != case.text:
            assert text.endswith(stop)


@pytest.mark.slow
@many
@given(
    shape=shapes,
    case=st.tuples(CASES, limits),
    max_model_len=st.integers(20, 300),
    steps=st.integers(0, 100),
)
def test_a_full_context_ends_the_answer_and_leaves_nothing_behind(
    model_dir: Path,
    shape: EngineShape,
    case: tuple[ListCase, tuple[int, int]],
    max_model_len: int,
    steps: int,
) -> None:
    shape = replace(shape, max_model_len=max_model_len)
    engine = engine_with([case], shape, model_dir, max_tokens=max_model_len - len(PROMPT))

    engine.run(max_steps=20000)

    engine.assert_nothing_is_left()
    text = TOKENIZER.decode(engine.texts["r0"])
    assert engine.finish_reasons["r0"] in ("stop", "length")
    if engine.finish_reasons["r0"] == "stop":
        assert text == case[0].text


class SometimesPays(EagerPolicy):
    """Says at random whether threads raise the throughput."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.num_declined = 0

    def pays(self, batch: StepBatch, *, attended: int, useful_share: float) -> bool:
        pays = self._random.random() < 0.5
        self.num_declined += not pays
        return pays


def check_declined_lists(
    model_dir: Path, shape: EngineShape, texts: list[str], seed: int, steps: int
) -> int:
    """Continue the first answer on another engine; return how many lists were declined."""
    policy = SometimesPays(seed)
    engine = ScriptedEngine(shape, model_dir)
    engine.scheduler.admission.policy = policy
    answers = [list_answer(text, RULES, len(PROMPT), END) for text in texts]

    def add(number: int, to: ScriptedEngine, journal: Journal | None = None) -> None:
        to.add(
            f"r{number}",
            PROMPT,
            answers[number].script,
            max_tokens=1900,
            parameters=block_parameters(LISTS),
            arrival_time=float(number),
            journal=journal,
        )

    for number in range(len(answers)):
        add(number, engine)
    for _ in range(steps):
        engine.step()
    journal = merged(engine.followers["r0"].take_journal())
    other = ScriptedEngine(replace(shape, tokens_per_step=1), model_dir)
    other.scheduler.admission.policy = policy
    add(0, other, journal)
    for each in (engine, other):
        each.run(max_steps=20000)
        each.assert_nothing_is_left()
    for number, text in enumerate(texts):
        assert TOKENIZER.decode(engine.texts[f"r{number}"]) == text
    assert TOKENIZER.decode(other.texts["r0"]) == texts[0]
    return policy.num_declined


@few
@given(
    shape=shapes,
    cases=st.lists(CASES, min_size=1, max_size=3),
    seed=st.integers(),
    steps=st.integers(1, 160),
)
def test_the_root_writes_lists_that_the_policy_declines(
    model_dir: Path, shape: EngineShape, cases: list[ListCase], seed: int, steps: int
) -> None:
    check_declined_lists(model_dir, shape, [case.text for case in cases], seed, steps)


@pytest.mark.slow
@many
@given(
    shape=shapes,
    cases=st.lists(CASES, min_size=1, max_size=3),
    seed=st.integers(),
    steps=st.integers(1, 160),
)
def test_the_root_writes_many_lists_that_the_policy_declines(
    model_dir: Path, shape: EngineShape, cases: list[ListCase], seed: int, steps: int
) -> None:
    check_declined_lists(model_dir, shape, [case.text for case in cases], seed, steps)


class NeverPays(EagerPolicy):
    def pays(self, batch: StepBatch, *, attended: int, useful_share: float) -> bool:
        return False


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_declined_list_costs_nothing(
    model_dir: Path, run_ahead: bool, tokens_per_step: int
) -> None:
    shape = EngineShape(
        max_model_len=2000, num_blocks=600, run_ahead=run_ahead, tokens_per_step=tokens_per_step
    )
    engine = ScriptedEngine(shape, model_dir)
    engine.scheduler.admission.policy = NeverPays()
    text = "".join(f"{number}. Head: and its detail, of some length.\n" for number in range(1, 9))
    answer = list_answer(text, RULES, len(PROMPT), END)
    parameters = block_parameters(LISTS)
    engine.add("a", PROMPT, answer.script, max_tokens=1900, parameters=parameters)

    engine.run(max_steps=20000)

    engine.assert_nothing_is_left()
    assert TOKENIZER.decode(engine.texts["a"]) == text
    statistics = engine.threads["a"].statistics(len(PROMPT))
    assert (statistics.threads, statistics.forks, statistics.joins) == (1, 0, 0)
    assert statistics.discarded_tokens == 0
    # At each item from the second on.
    counters = engine.scheduler.admission.counters
    assert (counters.refused, counters.accepted) == (2 * 7, 0)
    if tokens_per_step == 1:
        assert [name for name, _ in engine.prompts] == ["a"]
        assert statistics.decode_steps == statistics.sequential_steps


def test_a_list_is_declined_or_written_in_parallel_item_by_item(model_dir: Path) -> None:
    items = "".join(f"{number}. Head: and its detail, of some length.\n" for number in range(1, 9))

    declined = [
        check_declined_lists(model_dir, EngineShape(max_model_len=2000), [items], seed, 9)
        for seed in range(8)
    ]

    assert min(declined) == 0
    assert max(declined) > 1


class CharacterDecoder:
    """Decodes each token by itself."""

    def __init__(self, context: list[int]) -> None:
        self._text = ""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        self._text += TOKENIZER.decode(new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        text, self._text = self._text, ""
        return text


@settings(max_examples=num_examples(30), deadline=None)
@given(case=st.tuples(CASES, limits), run_ahead=st.booleans())
def test_the_text_rebuilt_from_a_tagged_stream_is_that_of_the_list(
    case: tuple[ListCase, tuple[int, int]], run_ahead: bool
) -> None:
    shape = EngineShape(num_blocks=400, max_model_len=2000, run_ahead=run_ahead)
    with TemporaryDirectory() as folder:
        engine = engine_with([case], shape, write_model_config(Path(folder)))
        threads = engine.threads["r0"]
        tags = ThreadTags(0, threads.tree, [], CharacterDecoder)
        threads.tag(tags)
        reader, num_read = TaggedReader(), 0
        while engine.step():
            for token_id in engine.texts["r0"][num_read:]:
                tags.note(TOKENIZER.decode([token_id]))
            num_read = len(engine.texts["r0"])
            reader.read({"time_ms": 0, "updates": tags.take()})
    tags.end(case[0].text)
    reader.read({"time_ms": 0, "updates": tags.take()})

    assert reader.text() == case[0].text
    known = reader.threads[0]
    assert {each["state"] for each in known.values()} == {"ended"}
    discarded = [each for each in known.values() if each["finish_reason"] == "discarded"]
    assert len(discarded) == sum(record.discarded for record in threads.tree.threads.values())
