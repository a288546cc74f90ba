"""Detection of formats by vocabulary, and their texts as token ids."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from apar_core.errors import CheckpointError
from apar_core.formats.parallel_format import ParallelFormat, branches
from apar_core.formats.resolved_format import (
    find_format,
    refused_format,
    resolve,
    shipped_format,
)
from apar_core.formats.shipped_formats import REFUSED, REFUSED_TOKENS, SHIPPED
from tests.fakes.small_tokenizers import CONTROL_TEXTS, byte_level_tokenizer

DETECTED = [shipped for shipped in SHIPPED.values() if shipped.tokens]


def tokenizer_with(*texts: str) -> PreTrainedTokenizerFast:
    return byte_level_tokenizer([*CONTROL_TEXTS, *texts])


def vocabulary(*texts: str) -> dict[str, int]:
    return {"hello": 7, **{text: 100 + index for index, text in enumerate(texts)}}


@pytest.mark.parametrize("shipped", DETECTED, ids=lambda shipped: shipped.name)
def test_checkpoint_with_all_tokens_of_one_format_has_it(shipped: ParallelFormat) -> None:
    found = find_format(vocabulary(*shipped.tokens))

    assert found is not None
    assert (found.definition, found.source) == (shipped, "tokens")


@pytest.mark.parametrize("name", ["hpd-parsing", "threadweaver", "parallel-r1"])
def test_some_tokens_of_a_format_are_not_the_format(name: str) -> None:
    assert find_format(vocabulary(*SHIPPED[name].tokens[:-1])) is None


def test_missing_half_of_apars_pair_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"has '\[Fork\]' \(id 100\) but not '\[Child\]'"):
        find_format(vocabulary("[Fork]"))


def test_two_fitting_formats_ask_for_the_setting() -> None:
    both = vocabulary(*SHIPPED["apar"].tokens, *SHIPPED["hpd-parsing"].tokens)

    with pytest.raises(CheckpointError, match=r"'apar' and 'hpd-parsing'.*`parallel_format`"):
        find_format(both)

    named = find_format(both, shipped_format("hpd-parsing"))
    assert named is not None
    assert (named.definition.name, named.source) == ("hpd-parsing", "configuration")


@pytest.mark.parametrize("name", REFUSED_TOKENS)
def test_tokens_of_a_refused_format_fit_no_shipped_one(name: str) -> None:
    tokens = vocabulary(*REFUSED_TOKENS[name])

    assert name in REFUSED
    assert refused_format(tokens) == name
    assert find_format(tokens) is None


def test_format_needs_its_tokens_in_the_vocabulary() -> None:
    with pytest.raises(CheckpointError, match="'hpd-parsing' needs '<FORK>' as one token"):
        resolve(SHIPPED["hpd-parsing"], tokenizer_with("<CHILD>"))


def test_apar_resolves_to_its_two_control_tokens() -> None:
    tokenizer = tokenizer_with()
    ids = tokenizer.get_vocab()

    resolved = resolve(SHIPPED["apar"], tokenizer)

    assert resolved.trigger_id == ids["[Fork]"]
    assert resolved.seed_ids == (ids["[Child]"],)
    assert resolved.texts == {ids["[Fork]"]: "[Fork]", ids["[Child]"]: "[Child]"}
    assert (resolved.end_ids, resolved.replacement_ids) == ((), ())


def test_seed_with_a_number_has_markers_as_tokens_and_the_rest_as_text() -> None:
    threadweaver = SHIPPED["threadweaver"]
    tokenizer = tokenizer_with(*threadweaver.tokens)
    resolved = resolve(threadweaver, tokenizer)
    (branch,) = branches(threadweaver, "<Outlines><Outline> 1.2: a</Outline></Outlines>")

    seed = resolved.seed_of(branch)

    assert resolved.seed_ids is None
    assert tokenizer.get_vocab()["<Thread>"] in seed
    assert resolved.decode(seed) == "\n<Thread>\n1.2:"
    assert resolved.end_ids == (tokenizer.get_vocab()["</Thread>"],)


def test_trigger_of_a_waiting_parent_may_be_ordinary_text() -> None:
    resolved = resolve(SHIPPED["apr"], tokenizer_with())

    assert resolved.trigger_id is None
    assert resolved.texts == {}


def test_doubled_braces_of_a_seed_are_text_where_the_parent_continues() -> None:
    own = ParallelFormat(name="mine", trigger="[Fork]", child_seed="{{1}}", parent="continues")

    resolved = resolve(own, tokenizer_with())

    assert resolved.seed_ids is not None
    assert resolved.decode(resolved.seed_ids) == "{1}"
