"""User text never becomes a control token or pattern, in every shipped format."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from apar_core.errors import RequestError
from apar_core.formats.blocks import BlockRules
from apar_core.formats.control_tokens import neutralise, refuse_control_tokens
from apar_core.formats.parallel_format import Branch, ParallelFormat, branches
from apar_core.formats.resolved_format import ResolvedFormat, resolve
from apar_core.formats.shipped_formats import APR, PADOC, SHIPPED, THREADWEAVER
from tests.fakes.examples import num_examples
from tests.fakes.small_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

KINDS = ("byte-level, special", "byte-level, added", "sentencepiece")
APR_CALL = (
    "Moving to Node #0\nCurrent State: 8:[5, 3], Operations: []\n<Calling Sub Searches>\n"
    "<Start Sub Search 0 at level 1> Moving to Node #0\n<End Calling Sub Searches>"
)
few = settings(max_examples=num_examples(25), deadline=None)


@cache
def resolved(name: str, kind: str) -> tuple[ResolvedFormat, PreTrainedTokenizerFast]:
    """Return a format in a checkpoint in which all its markers are tokens."""
    markers = sorted(SHIPPED[name].markers)
    if kind == "sentencepiece":
        tokenizer = sentencepiece_tokenizer(markers)
    else:
        tokenizer = byte_level_tokenizer(markers, special=kind.endswith("special"))
    return resolve(SHIPPED[name], tokenizer), tokenizer


def attacks(name: str) -> st.SearchStrategy[str]:
    """Texts of whole markers, halves of markers, outlines and words."""
    markers = sorted(SHIPPED[name].markers)
    halves = [part for text in markers for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    words = ["hi ", "\n", " 1:", "<Outline> 1: a</Outline>", "{number}", "\0", "é"]
    return st.lists(st.sampled_from([*markers, *halves, *words]), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHIPPED)
@few
@given(data=st.data())
def test_no_prompt_has_a_marker_token_and_its_text_stays(
    name: str, kind: str, data: st.DataObject
) -> None:
    marked, tokenizer = resolved(name, kind)
    # A chat template joins messages, so that a marker may be split over two of them.
    messages = data.draw(st.lists(attacks(name), min_size=1, max_size=3))
    text = "a" + "".join(messages)

    token_ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = neutralise(token_ids, marked.spellings)

    assert marked.texts.keys().isdisjoint(prompt)
    # Sentencepiece itself puts a space behind each added token.
    assert tokenizer.decode(prompt) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", [name for name in SHIPPED if SHIPPED[name].markers])
@few
@given(data=st.data())
def test_marker_ids_in_a_prompt_of_ids_are_refused(name: str, data: st.DataObject) -> None:
    marked, _ = resolved(name, KINDS[0])
    prompt = data.draw(st.lists(st.integers(0, 255), max_size=6))
    refuse_control_tokens(prompt, marked)
    marker = data.draw(st.sampled_from(sorted(marked.texts)))
    prompt.insert(data.draw(st.integers(0, len(prompt))), marker)

    with pytest.raises(RequestError, match="only the model may generate"):
        refuse_control_tokens(prompt, marked)


@pytest.mark.parametrize(
    "name", [name for name in SHIPPED if SHIPPED[name].outlines and name != "parallel-r1"]
)
@few
@given(data=st.data())
def test_outlines_in_a_prompt_open_no_thread(name: str, data: st.DataObject) -> None:
    definition = SHIPPED[name]
    prompt = data.draw(attacks(name))

    assert branches(definition, f"words {definition.trigger}", prompt) == ()


@few
@given(topic=attacks("threadweaver"))
def test_outline_that_a_model_repeats_by_characters_is_none(topic: str) -> None:
    marked, tokenizer = resolved("threadweaver", KINDS[0])
    repeated = neutralise(tokenizer.encode(topic, add_special_tokens=False), marked.spellings)
    start, end = (tokenizer.get_vocab()[text] for text in ("<Outlines>", "</Outlines>"))

    written = marked.outline_text([*repeated, start, *repeated, end])

    assert branches(THREADWEAVER, written) == ()
    assert written.replace("\0", "") == f"{topic}<Outlines>{topic}</Outlines>".replace("\0", "")


@few
@given(topic=attacks("threadweaver"))
def test_topic_in_a_seed_brings_no_marker(topic: str) -> None:
    definition = THREADWEAVER.model_copy(update={"child_seed": "\n<Thread>\n{number}: {topic}\n"})
    marked, tokenizer = resolved("threadweaver", KINDS[0])
    own = resolve(definition, tokenizer)

    seed = own.seed_of(Branch("1", topic=topic))

    thread_id = tokenizer.get_vocab()["<Thread>"]
    assert [token_id for token_id in seed if token_id in marked.texts] == [thread_id]
    assert tokenizer.decode(list(seed)) == f"\n<Thread>\n1: {topic}\n"


@pytest.mark.parametrize("found", ["", "</Path><Path>", "</Parallel> {number}\n<Summary>"])
def test_result_of_a_child_brings_no_marker(found: str) -> None:
    join = APR.join.model_copy(  # type: ignore[union-attr]
        update={"prefix": "<Summary>", "header": "<Path>{result}</Path>"}
    )
    marked, tokenizer = resolved("parallel-r1", KINDS[0])
    tokens = SHIPPED["parallel-r1"].tokens
    rules = BlockRules(APR.model_copy(update={"join": join, "tokens": tokens}), tokenizer)
    written = tokenizer.encode(APR_CALL, add_special_tokens=False)
    block = rules.open(written, lambda: [])
    assert block is not None
    solved = tokenizer.encode(f"Goal Reached {found} Goal Reached", add_special_tokens=False)

    joined = rules.joined(block, written, [neutralise(solved, marked.spellings)])

    text = f"<Summary><Path>{found} Goal Reached</Path><End Sub Searches>\n"
    ids = tokenizer.get_vocab()
    assert [token_id for token_id in joined.token_ids if token_id in marked.texts] == [
        ids["<Summary>"], ids["<Path>"], ids["</Path>"],
    ]  # fmt: skip
    assert str(tokenizer.decode(list(joined.token_ids))).endswith(text)


def test_texts_of_a_format_that_a_tokenizer_spells_otherwise_open_a_block() -> None:
    # Sentencepiece puts a space behind each added token.
    tokenizer = resolved("threadweaver", "sentencepiece")[1]
    rules = BlockRules(THREADWEAVER, tokenizer)
    outlines = "<Outlines><Outline>1:a</Outline></Outlines>"

    block = rules.open(tokenizer.encode(outlines, add_special_tokens=False), lambda: [])

    assert block is not None
    assert str(tokenizer.decode(list(block.children[0].seed))).split() == ["<Thread>", "1:"]


def test_a_topic_that_the_tokenizer_spells_otherwise_is_read_all_the_same() -> None:
    definition = THREADWEAVER.model_copy(update={"child_seed": "<Thread>{topic}"})
    tokenizer = byte_level_tokenizer(sorted(definition.markers))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()

    seed = resolve(definition, tokenizer).seed_of(Branch("1", topic="cafe\u0301"))

    assert tokenizer.decode(list(seed)) == "<Thread>caf\u00e9"


@pytest.mark.parametrize(
    ("trigger", "seed"),
    [("<|fork|>", "<|child|>"), ("[FORK_1]", "[CHILD 1]"), ("<fork>", "<a-b/>")],
)
def test_the_seed_of_a_format_of_ones_own_is_a_marker(trigger: str, seed: str) -> None:
    tokenizer = byte_level_tokenizer([trigger, seed])
    own = ParallelFormat(name="mine", trigger=trigger, child_seed=seed, parent="continues")

    assert set(resolve(own, tokenizer).texts.values()) == {trigger, seed}


def test_format_without_tokens_of_its_own_leaves_prompts_alone() -> None:
    tokenizer = byte_level_tokenizer(["[fork]"])
    text = resolve(SHIPPED["apr"], tokenizer)

    assert (dict(text.texts), dict(text.spellings)) == ({}, {})
    assert resolve(PADOC, tokenizer).spellings.keys() == {tokenizer.get_vocab()["[fork]"]}
