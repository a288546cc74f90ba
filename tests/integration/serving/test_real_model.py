"""A small real model that forks, served as `make serve` does after `apar fetch`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from apar_core.models.smollm2 import APAR_SMOLLM2
from cluster.local_ray import free_port
from tests.integration.serving.apar_process import apar_serve, wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not APAR_SMOLLM2.folder.is_dir(), reason="`apar fetch` was not run"),
    pytest.mark.timeout(900),
]
# None of them is in benchmarks/questions.txt, and none was asked before they were written here.
LISTS = (
    "What are 5 ways to stay motivated while studying?",
    "Give me 4 tips for taking better photographs.",
    "List 6 things to check before a long car trip.",
    "What are the benefits of learning a second language?",
    "How can I make my garden attractive to birds?",
    "Suggest 5 presents for someone who likes to read.",
)
OTHERS = (
    "What is the capital of Portugal?",
    "Translate 'thank you' into Spanish.",
    "Write one sentence about the sea.",
    "Is a whale a fish?",
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of `apar serve` without a model and without a file."""
    log, port = tmp_path_factory.mktemp("real") / "log", free_port()
    with apar_serve("--port", str(port), log=log) as process:
        wait_for(log, "Press Ctrl-C to stop", process)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as made:
            yield made


def answer(client: openai.OpenAI, question: str, **options: Any) -> Any:
    """The greedy answer to a question."""
    return client.chat.completions.create(
        model=APAR_SMOLLM2.name,
        messages=[{"role": "user", "content": question}],
        **{"temperature": 0, "max_tokens": 400} | options,
    )


def test_questions_that_nobody_prepared_are_answered(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(len(LISTS) + len(OTHERS)) as pool:
        found = list(pool.map(lambda each: answer(client, each), (*LISTS, *OTHERS)))

    texts = [each.choices[0].message.content for each in found]
    threads = [each.apar["threads"] for each in found]
    shown = "\n\n".join(f"{n} threads: {text}" for n, text in zip(threads, texts, strict=True))
    assert all(text.strip() for text in texts), shown
    assert not any("[Fork]" in text or "[Child]" in text for text in texts), shown
    # Which lists fork is a property of the model (docs/limits.md).
    assert any(each > 2 for each in threads[: len(LISTS)]), shown
    forked = [each.apar for each in found if each.apar["threads"] > 2]
    assert all(each["decode_steps"] < each["sequential_steps"] for each in forked), shown


def test_a_request_that_may_not_fork_gets_a_whole_answer_of_the_base_model(
    client: openai.OpenAI,
) -> None:
    found = answer(client, LISTS[1], extra_body={"apar": {"enabled": False}})

    # With the adapter and without forks, the answer ends behind its first heading.
    text = found.choices[0].message.content
    assert len(text.split()) > 60, text
    assert found.apar["threads"] == 1
