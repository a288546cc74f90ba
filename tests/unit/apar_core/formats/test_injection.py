"""User text never becomes a control token or pattern, in every shipped format."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from apar_core.errors import RequestError
from apar_core.formats.control_tokens import neutralise, refuse_control_tokens
from apar_core.formats.parallel_format import Branch, branches
from apar_core.formats.resolved_format import ResolvedFormat, resolve
from apar_core.formats.shipped_formats import PADOC, SHIPPED, THREADWEAVER
from tests.fakes.small_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

KINDS = ("byte-level, special", "byte-level, added", "sentencepiece")
few = settings(max_examples=25, deadline=None)


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


@pytest.mark.parametrize("name", SHIPPED)
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


def test_format_without_tokens_of_its_own_leaves_prompts_alone() -> None:
    tokenizer = byte_level_tokenizer(["[fork]"])
    text = resolve(SHIPPED["apr"], tokenizer)

    assert (dict(text.texts), dict(text.spellings)) == ({}, {})
    assert resolve(PADOC, tokenizer).spellings.keys() == {tokenizer.get_vocab()["[fork]"]}
