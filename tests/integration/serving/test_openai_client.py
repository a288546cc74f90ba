"""OpenAI's unmodified client and a running server."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from deployments.metrics import catalogue
from tests.integration.serving.apar_process import ENGINE, Server, held
from tests.integration.serving.metrics_reading import metrics_url, read_when

pytestmark = pytest.mark.cluster
MODEL = "apar-tiny"
PROMPT = "Give me 5 tips for sleeping well."


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.openai()


def chat(
    client: openai.OpenAI, prompt: str = PROMPT, model: str = MODEL
) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=500,
    )


def test_models_lists_the_served_model(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_list_answer_comes_from_several_threads(server: Server, client: openai.OpenAI) -> None:
    answer = chat(client)

    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    statistics = answer.model_extra["apar"] if answer.model_extra else {}
    assert statistics["threads"] == statistics["forks"] + 1 > 2
    assert statistics["decode_steps"] < statistics["sequential_steps"]
    assert answer.usage.completion_tokens == statistics["text_tokens"]


def test_stream_and_whole_answer_are_the_same_text(server: Server, client: openai.OpenAI) -> None:
    whole = chat(client)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0,
        max_tokens=500,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    details = {"completion_tokens_details", "prompt_tokens_details"}  # what the cache held
    assert chunks[-1].usage.model_dump(exclude=details) == whole.usage.model_dump(exclude=details)
    assert chunks[-1].model_extra is not None
    assert whole.model_extra is not None
    assert chunks[-1].model_extra["apar"] == whole.model_extra["apar"]


def test_completions_stream_and_whole_are_the_same_text(
    server: Server, client: openai.OpenAI
) -> None:
    whole = client.completions.create(
        model=MODEL, prompt="The best tea", temperature=0, max_tokens=40
    )
    stream = client.completions.create(
        model=MODEL, prompt="The best tea", temperature=0, max_tokens=40, stream=True
    )

    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0


def test_forks_can_be_switched_off_and_bounded(server: Server, client: openai.OpenAI) -> None:
    def threads_and_rows(apar: dict[str, object]) -> tuple[int, float]:
        """Return the answer's threads and their mean number in an engine step."""
        before = server.wait_until_idle()["steps"]
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            max_tokens=500,
            extra_body={"apar": apar},
        )
        after = server.wait_until_idle()["steps"]
        rows, steps = (after[name] - before[name] for name in ("num_rows", "num_steps"))
        assert answer.model_extra is not None
        return answer.model_extra["apar"]["threads"], rows / steps

    free_threads, free_rows = threads_and_rows({"enabled": True})
    one_threads, one_rows = threads_and_rows({"max_threads": 1})
    _, two_rows = threads_and_rows({"max_threads": 2})
    unforked_threads, unforked_rows = threads_and_rows({"enabled": False})

    assert free_threads == one_threads > 2
    assert unforked_threads == 1
    assert one_rows <= 1 < two_rows <= 2 < free_rows
    assert unforked_rows <= 1


def test_the_fork_token_spelled_in_a_prompt_is_plain_text(
    server: Server, client: openai.OpenAI
) -> None:
    spelled = chat(client, "Say [Fork][Child] twice.")
    bare = client.completions.create(
        model=MODEL, prompt="[Fork][Child]", max_tokens=1, temperature=0, echo=True
    )

    assert spelled.usage is not None
    assert bare.usage is not None
    assert bare.usage.prompt_tokens > 3  # two control tokens would be two, or three with BOS
    assert bare.choices[0].text.startswith("[Fork][Child]")


def test_an_unknown_model_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        chat(client, model="nope")

    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"


def test_concurrent_answers_have_as_many_alternatives_as_each_asked_for(
    server: Server, client: openai.OpenAI
) -> None:
    def ask(order: int, num_alternatives: int) -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            # They share some steps of the engine and not others.
            max_tokens=40 * (order + 1),
            logprobs=True,
            top_logprobs=num_alternatives,
            timeout=120,
        )

    engines = server.processes(ENGINE)
    numbers = (1, 5, 0, 2, 5)
    with ThreadPoolExecutor(len(numbers)) as executor:
        with held(engines):
            asked = executor.map(ask, range(len(numbers)), numbers)
            read_when(
                metrics_url(server),
                lambda page: page.total(catalogue.REQUESTS_RUNNING) == len(numbers),
            )
        answers = list(asked)

    # A lost engine would be replaced, and its requests answered by the next one.
    assert server.processes(ENGINE) == engines
    for number, answer in zip(numbers, answers, strict=True):
        tokens = answer.choices[0].logprobs
        assert tokens is not None
        assert tokens.content is not None
        assert {len(token.top_logprobs) for token in tokens.content} == {number}
