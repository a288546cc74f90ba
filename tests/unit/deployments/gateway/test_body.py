"""What the gateway reads from a parsed body: hint, salt, and whether its stream can continue."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.gateway.body import RequestBody
from deployments.wire.request import RequestHint
from deployments.wire.routes import ROUTES, BodyShape


def parsed(fields: dict[str, Any]) -> RequestBody:
    return RequestBody(json.dumps(fields).encode())


def request_hint(fields: dict[str, Any], salt: str | None = None) -> RequestHint:
    return parsed(fields).hint(salt)


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return {"model": "m", "messages": messages} | fields


def test_each_turn_begins_with_the_hashes_of_the_turn_before() -> None:
    first = request_hint(chat("Be kind.", "Hello"))
    second = request_hint(chat("Be kind.", "Hello", "Hi!", "Any tips?"))

    assert len(first.prefix_hashes) == 2
    assert len(second.prefix_hashes) == 4
    assert second.prefix_hashes[:2] == first.prefix_hashes
    assert second.prompt_tokens > first.prompt_tokens
    assert second.prefix_tokens[-1] == second.prompt_tokens
    assert list(second.prefix_tokens) == sorted(second.prefix_tokens)


def test_prompts_share_as_many_hashes_as_leading_pieces() -> None:
    one = request_hint(chat("Be kind.", "Hello")).prefix_hashes
    other_user = request_hint(chat("Be kind.", "Bye")).prefix_hashes
    other_system = request_hint(chat("Be brief.", "Hello")).prefix_hashes

    assert one[0] == other_user[0]
    assert one[1] != other_user[1]
    assert not set(one) & set(other_system)


def test_the_same_text_in_another_role_is_another_prompt() -> None:
    user = {"messages": [{"role": "user", "content": "x"}]}
    system = {"messages": [{"role": "system", "content": "x"}]}

    assert request_hint(user).prefix_hashes != request_hint(system).prefix_hashes


def test_prompts_under_different_salts_share_nothing() -> None:
    body = chat("Be kind.", "Hello")
    hashes = [request_hint(body, salt).prefix_hashes for salt in (None, "a", "b")]

    assert len(set(hashes)) == 3
    assert request_hint(body, "a").prefix_hashes == hashes[1]


def test_long_documents_with_different_ends_share_their_beginning() -> None:
    document = "A long text. " * 500
    one = request_hint(chat("Read:", document + "Who?"))
    other = request_hint(chat("Read:", document + "Where?"))

    shared = set(one.prefix_hashes) & set(other.prefix_hashes)
    assert len(shared) == 3  # System prompt, and the document up to two cuts.
    assert one.prefix_hashes[-1] not in shared


def test_a_long_conversation_has_a_bounded_hint() -> None:
    messages = [{"role": "user", "content": str(index)} for index in range(500)]
    before = request_hint({"messages": messages[:-2]})
    now = request_hint({"messages": messages})

    assert len(now.prefix_hashes) == len(now.prefix_tokens) == 16
    assert before.prefix_hashes[-1] in now.prefix_hashes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
        ({}, None),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": -1}, None),
    ],
)
def test_max_tokens_is_the_clients_limit(fields: dict[str, Any], expected: int | None) -> None:
    assert request_hint(chat("s", "u", **fields)).max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"apar": {"enabled": False}}, False),
        ({"apar": {"max_threads": 1}}, False),
        ({"apar": {"max_threads": 4}}, True),
        ({"tools": [{}]}, False),
        ({"tools": [{}], "tool_choice": "none"}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"response_format": {"type": "text"}}, True),
        ({"ignore_eos": True}, False),
        ({"min_tokens": 5}, False),
    ],
)
def test_hint_says_whether_the_request_may_fork(fields: dict[str, Any], expected: bool) -> None:
    assert request_hint(chat("s", "u", **fields)).may_fork is expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"tool_choice": "auto"}, True),
        ({"tool_choice": "none"}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"tool_choice": {"type": "auto"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_answers_of_a_model_with_marked_calls_fork_until_a_call(
    fields: dict[str, Any], expected: bool
) -> None:
    body = parsed(chat("u", tools=[{}], **fields))

    assert body.hint(None, forks_with_tools=True).may_fork is expected


@pytest.mark.parametrize(
    ("body", "tokens", "choices"),
    [
        ({"prompt": "x" * 400}, 104, 1),
        ({"prompt": ["x" * 400, "y"], "n": 3}, 104, 6),
        ({"prompt": [1, 2, 3, 4]}, 8, 1),
        ({"prompt": [[1, 2], [3]]}, 6, 2),
        ({"prompt": "x", "n": 2}, 5, 2),
    ],
)
def test_hint_of_a_completion(body: dict[str, Any], tokens: int, choices: int) -> None:
    hint = request_hint(body)

    assert (hint.prompt_tokens, hint.num_choices) == (tokens, choices)
    assert hint.prefix_hashes


def test_prompt_tools_and_tool_calls_count_as_prompt_text() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 400}}]
    call = {"role": "assistant", "tool_calls": [{"function": {"arguments": "y" * 400}}]}

    assert request_hint({"prompt": "x" * 400, "messages": []}).prompt_tokens == 104
    plain, tooled = request_hint(chat("s", "u")), request_hint(chat("s", "u", tools=tools))
    assert tooled.prompt_tokens > plain.prompt_tokens + 100
    assert not set(tooled.prefix_hashes) & set(plain.prefix_hashes)
    assert request_hint({"messages": [call]}).prompt_tokens > 100


def test_content_parts_hash_like_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "image_url"}, {"type": "text", "text": "lo"}]

    assert request_hint(chat(parts)).prefix_hashes == request_hint(chat("Hello")).prefix_hashes


texts = st.text("ab \ud800\u00e9", max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
names = ["messages", "prompt", "n", "max_tokens", "apar", "tools", "response_format", "role"]
messages = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), json_values), max_size=4)


@given(
    st.dictionaries(st.sampled_from(names), json_values)
    | st.fixed_dictionaries({"messages": messages, "n": json_values})
)
def test_no_body_is_too_odd_to_read(fields: dict[str, Any]) -> None:
    body = parsed(fields)
    hint = body.hint(body.cache_salt("key"))

    assert hint.prompt_tokens >= 0
    assert hint.num_choices >= 1
    assert len(hint.prefix_hashes) == len(hint.prefix_tokens)
    json.dumps(hint.prefix_tokens)
    assert body.prompt_tokens >= 0
    assert body.can_continue in (True, False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"prompt": "a"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"echo": True}, False),
        ({"return_token_ids": True}, False),
        ({"use_beam_search": True}, False),
        ({"tools": [{}]}, False),
        ({"tools": [{}], "tool_choice": "none"}, True),
    ],
)
def test_only_streams_of_one_choice_of_text_can_continue(
    fields: dict[str, Any], expected: bool
) -> None:
    assert parsed(fields).can_continue is expected


def test_a_clients_salt_cannot_reach_another_keys_cache() -> None:
    own = parsed({"cache_salt": "mine"})
    salts = {own.cache_salt("a"), own.cache_salt("b"), "mine", "a", "b"}

    assert len(salts) == 5
    assert own.cache_salt("a") == own.cache_salt("a")
    assert parsed({}).cache_salt("a") == "a"


@pytest.mark.parametrize("salt", ["", 5, [], {}])
def test_an_invalid_salt_is_left_for_vllm_to_refuse(salt: object) -> None:
    assert parsed({"cache_salt": salt}).cache_salt("a") is None


@pytest.mark.parametrize("salt", [None, "mine", 5])
def test_the_salt_of_a_caller_without_a_key_stays_as_it_is(salt: object) -> None:
    assert parsed({"cache_salt": salt}).cache_salt(None) is None


def test_prompts_under_different_salts_of_the_client_share_nothing() -> None:
    hashes = {request_hint(chat("Hello", cache_salt=salt)).prefix_hashes for salt in ("a", "b")}

    assert len(hashes) == 2


RESPONSES, MESSAGES = ROUTES["/v1/responses"].shape, ROUTES["/v1/messages"].shape


@pytest.mark.parametrize(
    ("shape", "fields", "chars"),
    [
        (RESPONSES, {"input": "x" * 9}, {"input": 9}),
        (RESPONSES, {"input": "xx", "instructions": "abc"}, {"input": 2, "instructions": 3}),
        (RESPONSES, {"input": [{"role": "user", "content": "xyz"}]}, {"input": 3}),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "xyz"}]},
                    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
                    {"type": "function_call_output", "call_id": "1", "output": "four"},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
                ]
            },
            {"input": 3 + 1 + 2 + 4 + 2},
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": "xyz"}], "system": "ab"}, None),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "xyz"},
                            {"type": "tool_use", "name": "f", "input": {"city": "Rome"}},
                            {"type": "tool_result", "content": [{"type": "text", "text": "ok"}]},
                            {"type": "image", "source": {"data": "AAAA"}},
                        ],
                    }
                ]
            },
            {"messages": 3 + 1 + len("cityRome") + 2},
        ),
        (ROUTES["/score"].shape, {"queries": "ab", "documents": ["c", "de"]}, None),
        (ROUTES["/v1/embeddings"].shape, {"input": [[1, 2], [3]]}, {"input": 12}),
    ],
)
def test_prompts_of_every_shape_are_counted(
    shape: BodyShape, fields: dict[str, Any], chars: dict[str, int] | None
) -> None:
    counted = RequestBody(json.dumps(fields).encode(), shape).prompt_chars

    assert counted == chars if chars else sum(counted.values()) == 5


@pytest.mark.parametrize(
    ("shape", "fields", "expected"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, False),
        (RESPONSES, {"text": {"format": {"type": "text"}}}, True),
        (RESPONSES, {"response_format": {"type": "json_object"}}, True),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, False),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "none"}}, True),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "any"}}, False),
        (MESSAGES, {"text": 5, "output_config": [1]}, True),
    ],
)
def test_a_constrained_answer_of_any_api_does_not_fork(
    shape: BodyShape, fields: dict[str, Any], expected: bool
) -> None:
    assert RequestBody(json.dumps(fields).encode(), shape).may_fork() is expected


def test_each_api_has_its_own_limit_on_tokens() -> None:
    fields = {"max_output_tokens": 3, "max_tokens": 5}

    limits = [RequestBody(json.dumps(fields).encode(), shape).max_tokens
              for shape in (RESPONSES, MESSAGES)]  # fmt: skip
    assert limits == [3, 5]


@pytest.mark.parametrize(
    ("fields", "num_sequences"),
    [
        ({}, 1),
        ({"messages": [], "n": 4}, 4),
        ({"prompt": "x"}, 1),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": ["x"] * 1024, "n": 32}, 32_768),
        ({"prompt": [[1, 2], [3]], "n": "3"}, 6),
        ({"prompt": ["x", "y"], "n": 2.0}, 4),
        ({"prompt_embeds": ["x", "y"], "n": 2}, 4),
        ({"prompt": "x", "n": None}, 1),
        ({"prompt": "x", "n": -2}, 1),
        ({"prompt": "x", "n": [9]}, 1),
        ({"prompt": "x", "best_of": 8}, 1),
    ],
)
def test_a_request_has_a_sequence_for_each_answer_to_each_prompt(
    fields: dict[str, Any], num_sequences: int
) -> None:
    assert RequestBody(json.dumps(fields).encode()).num_sequences == num_sequences
