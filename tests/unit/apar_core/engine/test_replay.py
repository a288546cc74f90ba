"""Replays of a client: accepted, or refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from apar_core.engine.replay import PARAM, ReplayRules
from apar_core.errors import RequestError
from apar_core.formats.parallel_format import ParallelFormat
from apar_core.formats.rules import block_rules
from apar_core.formats.shipped_formats import PARALLEL_R1, THREADWEAVER
from tests.fakes.block_scripts import NESTED, TOKENIZER, block_parameters, tokens
from tests.fakes.scripted_engine import CHILD, END, FORK, fork_parameters

PROMPT_TOKENS, CONTEXT_TOKENS = 6, 16
RULES = ReplayRules(100, frozenset({END, 99}))
FORKING = fork_parameters(max_forks=3)
UNFORKED = replace(FORKING, enabled=False)
TREE = {
    "": [10, FORK, 11, FORK, 12, END],
    "0": [13, 14, END],
    "1": [15, FORK, 99],
    "1.0": [16, END],
}
TEXT_TOKENS = 7


def parse(
    text: object, parameters: Any, max_tokens: int | None, prompt_tokens: int = PROMPT_TOKENS
) -> dict[str, list[int]]:
    return RULES.parse(
        text,
        parameters,
        prompt_ids=[5] * prompt_tokens,
        context_tokens=CONTEXT_TOKENS,
        max_tokens=max_tokens,
    )


def test_a_valid_tree_is_accepted() -> None:
    assert parse(json.dumps(TREE), FORKING, TEXT_TOKENS + 1) == TREE
    assert parse(json.dumps(TREE), FORKING, None) == TREE


@pytest.mark.parametrize("parameters", [UNFORKED, None, FORKING])
def test_a_single_thread_is_accepted_with_or_without_forks(parameters: Any) -> None:
    assert parse('{"": [10, 11, 3]}', parameters, 3) == {"": [10, 11, 3]}


def test_a_model_without_control_tokens_may_use_their_ids() -> None:
    assert parse(f'{{"": [{FORK}, {CHILD}, 3]}}', None, 3) == {"": [FORK, CHILD, 3]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0": None}, "thread '0' is missing: '' forks 2 times"),
        ({"1.0": None}, "thread '1.0' is missing: '1' forks 1 times"),
        ({"": None}, "the root thread '' is missing"),
        ({"2": [13, END]}, "thread '2' is not forked by any other"),
        ({"00": [13, END]}, "thread '00' is not forked by any other"),
        ({"0": []}, "thread '0' has no token"),
        ({"0": [100, END]}, "thread '0' has token id 100, which is not among the model's 100"),
        ({"0": [-1, END]}, "thread '0' has token id -1"),
        ({"0": [2**70, END]}, f"thread '0' has token id {2**70}"),
        ({"0": [CHILD, 13, END]}, f"thread '0' has the child token {CHILD}"),
        ({"0": [13]}, r"thread '0' must have an end token \[3, 99\] at its end and nowhere else"),
        ({"0": [13, END, 14, END]}, "thread '0' must have an end token"),
        ({"1": [FORK, 15, END]}, "thread '1' forks right after a control token"),
        ({"1": [15, FORK, FORK, END], "1.1": [END]}, "thread '1' forks right after a control"),
        ({"0": [13, FORK, END], "0.0": [END]}, "4 forks exceed the limit of 3"),
    ],
)
def test_scripts_that_the_engine_cannot_generate_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    scripts = {path: ids for path, ids in {**TREE, **changes}.items() if ids is not None}

    with pytest.raises(RequestError, match=f"`apar.replay`.*{message}") as raised:
        parse(json.dumps(scripts), FORKING, 500)

    assert raised.value.param == PARAM


def test_children_fork_only_where_the_format_lets_them() -> None:
    hpd = replace(FORKING, children_fork=False, cut_tokens=1)
    flat = {"": [10, FORK, 11, END], "0": [13, 14, END]}

    assert parse(json.dumps(flat), hpd, None) == flat
    with pytest.raises(RequestError, match="thread '1' forks, but in this model's format no child"):
        parse(json.dumps(TREE), hpd, None)


@pytest.mark.parametrize(("cut", "seed_ids", "fits"), [(1, (), 7), (0, (CHILD,) * 3, 3)])
def test_the_context_holds_what_a_child_reads(
    cut: int, seed_ids: tuple[int, ...], fits: int
) -> None:
    parameters = replace(FORKING, seed_ids=seed_ids, cut_tokens=cut)
    room = CONTEXT_TOKENS - PROMPT_TOKENS

    for number in (fits, fits + 1):
        # The child reads 10 11 [Fork], or 10 11 without it, and its seed.
        scripts = {"": [10, 11, FORK, END], "0": [*[13] * number, END]}
        read = 3 - cut + len(seed_ids)
        assert (read + number + 1 <= room) == (number == fits)
        if number == fits:
            parse(json.dumps(scripts), parameters, None)
        else:
            with pytest.raises(RequestError, match="thread '0' needs 17 tokens"):
                parse(json.dumps(scripts), parameters, None)


@pytest.mark.parametrize("parameters", [UNFORKED, None])
def test_a_tree_is_refused_if_the_request_does_not_fork(parameters: Any) -> None:
    with pytest.raises(RequestError, match=r"only the root thread.*does not fork, not '0'"):
        parse(json.dumps(TREE), parameters, 500)
    with pytest.raises(RequestError, match="only the root thread"):
        parse("{}", parameters, 500)


def test_a_fork_token_is_refused_if_the_request_does_not_fork() -> None:
    with pytest.raises(RequestError, match=f"has the control token {FORK}"):
        parse(json.dumps({"": [10, FORK, END]}), UNFORKED, 500)


def test_max_tokens_must_cover_the_text_and_one_end_token() -> None:
    with pytest.raises(
        RequestError, match=f"needs {TEXT_TOKENS + 1} tokens, more than `max_tokens` allows: 7"
    ):
        parse(json.dumps(TREE), FORKING, TEXT_TOKENS)
    with pytest.raises(RequestError, match="needs 3 tokens"):
        parse('{"": [10, 11, 3]}', UNFORKED, 2)


@pytest.mark.parametrize(
    ("changes", "prompt_tokens", "message"),
    [
        # The prompt, the root's text, and its end token.
        ({}, 11, "thread '' needs 17 tokens, 11 of them for the prompt"),
        # The prompt, four tokens of the root, the child token, and its own tokens.
        ({"1": [15, FORK, 16, 16, 16, 99]}, 6, "thread '1' needs 17 tokens, 11 of them"),
        # The same, then two tokens of its parent, another child token, and its own tokens.
        ({"1.0": [16, 17, END]}, 6, "thread '1.0' needs 17 tokens, 14 of them for the prompt and"),
    ],
)
def test_a_thread_that_exceeds_the_context_is_refused_with_its_numbers(
    changes: dict[str, Any], prompt_tokens: int, message: str
) -> None:
    scripts = json.dumps({**TREE, **changes})

    with pytest.raises(RequestError, match=f"{message}.* the model's context holds 16") as raised:
        parse(scripts, FORKING, 500, prompt_tokens)

    assert raised.value.param == PARAM


def test_the_last_token_may_be_the_last_of_the_context() -> None:
    assert parse(json.dumps(TREE), FORKING, 500, 6) == TREE
    with pytest.raises(RequestError, match=r"thread '1.0' needs 17 tokens"):
        parse(json.dumps(TREE), FORKING, 500, 7)


def test_a_limit_that_comes_from_the_context_is_named() -> None:
    # Each thread fits, but not their joined text.
    wide = {**TREE, "0": [*[13] * 6, END]}
    with pytest.raises(
        RequestError, match=r"needs 12 tokens.*the model's context after the prompt allows: 10"
    ):
        parse(json.dumps(wide), FORKING, CONTEXT_TOKENS - PROMPT_TOKENS)


@pytest.mark.parametrize("parameters", [UNFORKED, None])
def test_a_single_thread_must_fit_the_context(parameters: Any) -> None:
    scripts = json.dumps({"": [*[10] * 8, END]})

    assert parse(scripts, parameters, 9, 7)
    with pytest.raises(RequestError, match="thread '' needs 17 tokens, 8 of them"):
        parse(scripts, parameters, 9, 8)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"": "abc"}', '{"": [10.0, 3]}', '{"": ["10", 3]}', '{"": [10, 3.5]}', 5]
)
def test_only_a_mapping_of_lists_of_ids_is_accepted(text: object) -> None:
    with pytest.raises(RequestError, match=r"`apar\.replay`: "):
        parse(text, FORKING, 500)


OUTLINES = "<Outlines><Outline> 1: x</Outline> <Outline> 2: y</Outline></Outlines>"
BLOCKS = {
    "": tokens(f"a{OUTLINES}b{OUTLINES}c", ends=True),
    "0": tokens("one</Thread>"),
    "1": tokens("two</Thread>"),
    "2": tokens(f"three{OUTLINES}</Thread>"),
    "3": tokens("four</Thread>"),
}
NESTED_BLOCKS = BLOCKS | {"2.0": tokens("five</Thread>"), "2.1": tokens("six", ends=True)}
NUM_TEXT = sum(map(len, BLOCKS.values())) - 1
# What the root thread reads before its last token.
JOINED = f"a{OUTLINES}" + "\n<Thread>\n1:one</Thread><Thread>\n2:two</Thread>\n"
JOINED += f"b{OUTLINES}\n<Thread>\n1:three{OUTLINES}</Thread><Thread>\n2:four</Thread>\nc"
NUM_JOINED = len(tokens(JOINED))


def parse_blocks(
    definition: ParallelFormat,
    scripts: dict[str, list[int]],
    *,
    max_tokens: int | None = None,
    context_tokens: int = 1000,
    max_forks: int = 9,
) -> dict[str, list[int]]:
    rules = block_rules(definition.model_dump_json(), TOKENIZER)
    return ReplayRules(10_000, frozenset({END}), rules).parse(
        json.dumps(scripts),
        block_parameters(definition, max_forks=max_forks),
        prompt_ids=tokens("Hi"),
        context_tokens=context_tokens,
        max_tokens=max_tokens,
    )


def test_threads_that_wait_are_accepted_with_all_children_of_their_blocks() -> None:
    paths = {"": tokens("a<Parallel>b", ends=True), "0": tokens("x</Path>"), "1": tokens("</Path>")}

    # Where children do not fork, a trigger is text. There, an open end would end the answer.
    assert parse_blocks(THREADWEAVER, BLOCKS, max_tokens=NUM_TEXT + 1) == BLOCKS
    assert parse_blocks(NESTED, NESTED_BLOCKS) == NESTED_BLOCKS
    assert parse_blocks(PARALLEL_R1, paths) == paths
    assert parse_blocks(THREADWEAVER, BLOCKS, context_tokens=len("Hi") + NUM_JOINED + 1) == BLOCKS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1": None}, "thread '1' is missing, which '' opens"),
        ({"": None}, "the root thread '' is missing"),
        ({"4": tokens("x</Thread>")}, "thread '4' is not opened by any other"),
        ({"2.0": tokens("x</Thread>")}, "thread '2.0' is not opened by any other"),
        ({"0": tokens("one")}, "thread '0' must have an end token"),
        ({"0": tokens("o</Thread>ne", ends=True)}, "thread '0' must have an end token"),
        ({"0": tokens("one", ends=True)}, "'' continues, but one of its children ends without"),
        ({"": tokens(f"a{OUTLINES}b</Thread>")}, "thread '' must have an end token"),
    ],
)
def test_scripts_that_no_block_would_join_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    scripts = {key: ids for key, ids in {**BLOCKS, **changes}.items() if ids is not None}

    with pytest.raises(RequestError, match=message):
        parse_blocks(THREADWEAVER, scripts)


def test_limits_count_joined_texts_and_what_threads_generate() -> None:
    with pytest.raises(RequestError, match=f"needs {NUM_TEXT + 1} tokens, more than `max_tokens`"):
        parse_blocks(THREADWEAVER, BLOCKS, max_tokens=NUM_TEXT)
    with pytest.raises(RequestError, match="4 threads exceed the limit of 3"):
        parse_blocks(THREADWEAVER, BLOCKS, max_forks=3)
    needed = len("Hi") + NUM_JOINED + 1
    with pytest.raises(RequestError, match=f"thread '' needs {needed} tokens"):
        parse_blocks(THREADWEAVER, BLOCKS, context_tokens=needed - 1)
    with pytest.raises(RequestError, match="thread '2' needs 84 tokens, 61 of them"):
        parse_blocks(THREADWEAVER, BLOCKS, context_tokens=60)
