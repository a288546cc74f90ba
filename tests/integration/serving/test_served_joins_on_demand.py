"""Organizers that join their workers one by one (AsyncThink), through `apar serve`.

The model is a small checkpoint that writes a few given answers. It is served twice: with
workers that read their organizer's text up to their fork, and with workers that read only a task.
The reference is a client that resubmits requests to plain greedy decoding with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.formats.parallel_format import ParallelFormat
from tests.fakes.block_scripts import MESSAGES, RESULTS, Client
from tests.fakes.tagged_streams import TaggedReader, chunks_of
from tests.integration.plain_decoding import FLOAT_NOISE
from tests.integration.random_checkpoint import write_checkpoint
from tests.integration.serving.apar_process import TINY, Server, authorization, serving
from tests.integration.serving.joined_answers import check_answer
from tests.integration.serving.killed_streams import Answer, Victims, read_stream
from tests.integration.taught_checkpoint import teach

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTEXT = 768
FORMATS = {"results": RESULTS, "messages": MESSAGES}
# Joins what a client sends without a border.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TWO = "Which of 91 and 97 are prime? "
THREE = "Name three towns by the sea. "
FEW = "What did you leave out? "
NONE = "What is 12 + 7? "
ANSWERS: dict[str, dict[str, str]] = {
    # Joined in another order than forked, the first one long after its end.
    TWO: {
        "": "<FORK-1>is 91 prime</FORK-1>I think that 97 is.<FORK-2>is 97 prime</FORK-2>"
        "Now I wait for both of them.<JOIN-2>Good.<JOIN-1>So it is 97 alone.",
        "0": "It is 7 * 13.<RETURN>no, it is 7 * 13</RETURN>",
        "1": "No factor up to 9 divides it.<RETURN>yes</RETURN> I am sure.",
    },
    # The organizer waits at once, and uses a number again; the last worker returns nothing.
    THREE: {
        "": "<FORK-1>north</FORK-1><JOIN-1>One.<FORK-1>south</FORK-1><FORK-3>east</FORK-3>"
        "<JOIN-1>Two.<JOIN-3>Three, and that is all.",
        "0": "Thinking of the north.<RETURN>Oslo</RETURN>",
        "1": "Thinking of the south.<RETURN>Nice</RETURN>",
        "2": "I know no town there.",
    },
    # A worker that nobody joins, joins of workers that nobody forked.
    FEW: {
        "": "<FORK-1>used</FORK-1><FORK-2>left out</FORK-2><JOIN-1><JOIN-1><JOIN-7>Done, and"
        " what is left to say is long enough for a process to be killed while it is written.",
        "0": "Short.<RETURN>this</RETURN>",
        "1": "A long text that nobody will ever read, for nobody joins it.<RETURN>that</RETURN>",
    },
    NONE: {"": "12 + 7 is 19, and for that I need nobody."},
}
TAGGED = {"stream": True, "apar": {"stream": "threads"}}


# ---- what a resubmitting client gets from plain decoding ------------------------------------


@dataclass
class Reference(Client):
    """The client, with the tokenizer of a checkpoint."""

    @property
    def end_id(self) -> int:
        end_id: int = self.tokenizer.eos_token_id
        return end_id

    def ends(self, key: str) -> set[int]:
        """Return the tokens after which a completion is looked at."""
        return {self.end_id} if key else {self.end_id, *self._tokens(">")}


class Scripted(Reference):
    """Completions are what the model is to write."""

    def complete(self, key: str, prompt: list[int], stop_ids: set[int]) -> list[int]:
        return super().complete(key, prompt, self.ends(key))


class Plain(Reference):
    """Completions are plain greedy decoding with transformers."""

    def complete(self, key: str, prompt: list[int], stop_ids: set[int]) -> list[int]:
        context = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model(self.tokenizer.name_or_path).generate(
                context,
                attention_mask=torch.ones_like(context),
                do_sample=False,
                max_new_tokens=CONTEXT - len(prompt),
                eos_token_id=sorted(self.ends(key)),
                pad_token_id=self.end_id,
            )
        generated: list[int] = whole[0, len(prompt) :].tolist()
        return generated


def lessons(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Return contexts, and what the model is to continue them with."""
    found = []
    for definition in FORMATS.values():
        for question, texts in ANSWERS.items():
            script = {
                key: [*tokenizer.encode(text), tokenizer.eos_token_id]
                for key, text in texts.items()
            }
            client = Scripted(definition, script, tokenizer)
            client.answer(tokenizer.encode(question))
            # Organizers read the same in both formats.
            found += [
                (prompt, text)
                for key, prompt, text in client.contexts
                if key or definition is RESULTS
            ]
    return found


@dataclass(frozen=True)
class Expected:
    """What a client gets, in reading order."""

    client: Client
    token_ids: list[int]
    text: str

    @property
    def threads(self) -> int:
        return len({key for key, _, _ in self.client.contexts})

    @property
    def joins(self) -> int:
        return sum(not key for key, _, _ in self.client.contexts) - 1

    def log_probabilities(self) -> list[float]:
        """Of each token that a thread of the answer has generated, sorted."""
        found: list[float] = []
        for key, prompt, generated in self.client.contexts:
            if key in self.client.unjoined:
                continue
            with torch.inference_mode():
                logits = model(self.client.tokenizer.name_or_path)(
                    torch.tensor([[*prompt, *generated]])
                ).logits[0]
            rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
            own = [float(row[i]) for row, i in zip(rows, generated, strict=True)]
            found += own[:-1] if generated[-1] == self.client.end_id else own
        return sorted(found)


@cache
def model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@dataclass(frozen=True, eq=False)
class Served:
    server: Server
    checkpoint: Path

    @cache  # noqa: B019  # lives as long as the module's server
    def expected(self, name: str, question: str) -> Expected:
        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        client = Plain(FORMATS[name], {}, tokenizer)
        token_ids = client.answer(tokenizer.encode(question))
        return Expected(client, token_ids, str(tokenizer.decode(token_ids)))

    def tagged(self, body: dict[str, Any]) -> tuple[TaggedReader, str, list[dict[str, Any]]]:
        """Return the threads of a tagged stream, its ordered text, and its chunks."""
        with httpx.stream(
            "POST",
            self.server.url + CHAT,
            json=body | TAGGED | {"stream_options": {"include_usage": True}},
            headers=authorization(),
            timeout=120,
        ) as response:
            assert response.status_code == 200, response.read()
            received = chunks_of(response.iter_lines())
        reader = TaggedReader(in_order=False)
        text = ""
        for chunk in received:
            reader.read(chunk["apar"])
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        return reader, text, received


def settings(definition: ParallelFormat) -> dict[str, Any]:
    """Return a format as a configuration file has it."""
    found: dict[str, Any] = definition.model_dump(mode="json", exclude_unset=True)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("joins")
    checkpoint = write_checkpoint(folder / "model", context_tokens=CONTEXT, spread=0.1, width=1280)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    teach(checkpoint, lessons(AutoTokenizer.from_pretrained(checkpoint)))
    models = [
        TINY
        | {
            "checkpoint": str(checkpoint),
            "name": name,
            "parallel_format": settings(definition),
            "replicas": 2 if name == "results" else 1,
            "replay": True,
        }
        for name, definition in FORMATS.items()
    ]
    # A busy machine may need a minute to start a replica.
    with serving(folder, *models, retries={"replica_wait_s": 200}) as server:
        yield Served(server, checkpoint)


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    """Check after each test that no replica holds a request, a thread or a KV block."""
    yield
    served.server.wait_for_replicas(3)
    served.server.wait_until_idle(2, deployment="Replica-results")
    served.server.wait_until_idle(1, deployment="Replica-messages")


def greedy(name: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": name, "messages": messages, "temperature": 0, "max_tokens": 600} | fields


# ---- answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_those_of_a_client_that_resubmits(served: Served, name: str) -> None:
    wanted = {question: served.expected(name, question) for question in ANSWERS}
    # The model writes what it was to write.
    assert [answer.joins for answer in wanted.values()] == [2, 3, 1, 0]
    assert [answer.threads for answer in wanted.values()] == [3, 4, 3, 1]

    def ask(question: str) -> tuple[Any, list[Any], tuple[TaggedReader, str, Any]]:
        chat = partial(served.server.openai().chat.completions.create, **greedy(name, question))
        streamed = chat(stream=True, stream_options={"include_usage": True})
        return chat(), list(streamed), served.tagged(greedy(name, question))

    questions = list(ANSWERS) * 2
    with ThreadPoolExecutor(8) as executor:
        found = list(executor.map(ask, questions))

    for question, (whole, chunks, (reader, text, received)) in zip(questions, found, strict=True):
        answer = wanted[question]
        check_answer(whole, chunks, (reader, text), answer, answer.text)
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == len(question)
        assert received[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens
        # A worker that nobody joined is not shown.
        assert len(reader.threads[0]) == 1 + answer.joins
        assert {thread["state"] for thread in reader.threads[0].values()} == {"ended"}


def test_an_organizer_writes_beside_its_workers(served: Served) -> None:
    answer = served.expected("results", TWO)

    statistics = served.server.post(CHAT, json=greedy("results", TWO)).json()["apar"]

    longest = {key: len(text) for key, _, text in answer.client.contexts if key}
    organizer = sum(len(text) for key, _, text in answer.client.contexts if not key)
    assert organizer <= statistics["decode_steps"] < organizer + sum(longest.values())


@pytest.mark.parametrize("name", FORMATS)
def test_a_stop_string_cuts_the_text(served: Served, name: str) -> None:
    text = served.expected(name, TWO).text
    for at in range(20, len(text) - 9, len(text) // 12):
        stop = text[at : at + 9]
        body = greedy(name, TWO, stop=[stop])

        whole = served.server.post(CHAT, json=body).json()["choices"][0]
        reader, streamed, _ = served.tagged(body)

        assert whole["message"]["content"] == text[: text.index(stop)]
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
        assert streamed == reader.text() == whole["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_each_threads_own_path(served: Served, stream: bool) -> None:
    for question in (TWO, THREE):
        answer = served.expected("results", question)
        chat: Callable[..., Any] = partial(
            served.server.openai().chat.completions.create,
            **greedy("results", question),
            logprobs=True,
        )
        if stream:
            choices = [chunk.choices[0] for chunk in chat(stream=True) if chunk.choices]
            found = [each for c in choices if c.logprobs for each in c.logprobs.content or ()]
        else:
            found = chat().choices[0].logprobs.content

        assert "".join(each.token for each in found) == answer.text
        wanted = answer.log_probabilities()
        # The engine's own text is certain.
        num_forced = len(answer.token_ids) - len(wanted)
        values = sorted(each.logprob for each in found)
        assert values == pytest.approx(sorted([*wanted, *[0.0] * num_forced]), abs=10 * FLOAT_NOISE)


def test_the_prompts_of_a_completion_join_each_for_itself(served: Served) -> None:
    body = {"model": "results", "prompt": list(ANSWERS), "temperature": 0, "max_tokens": 600}

    whole = served.server.post(COMPLETION, json=body).json()

    wanted = [served.expected("results", question) for question in ANSWERS]
    texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert texts == {index: answer.text for index, answer in enumerate(wanted)}
    assert whole["apar"]["threads"] == sum(answer.threads for answer in wanted)
    assert whole["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in wanted)


@pytest.mark.parametrize("question", [TWO, FEW])
def test_max_tokens_counts_what_the_threads_generate(served: Served, question: str) -> None:
    answer = served.expected("results", question)
    full, _, received = served.tagged(greedy("results", question))

    def generated(statistics: dict[str, Any]) -> int:
        own: int = statistics["text_tokens"] - statistics.get("forced_tokens", 0)
        return own + int(statistics.get("discarded_tokens", 0))

    total = generated(received[-1]["apar"])
    for max_tokens in [1, *range(5, total, total // 12), total - 1, total, total + 1, total + 2]:
        reader, text, chunks = served.tagged(greedy("results", question, max_tokens=max_tokens))

        (reason,) = (c["choices"][0]["finish_reason"] for c in chunks if _ends(c))
        assert text == reader.text()
        assert answer.text.startswith(text)
        assert chunks[-1]["usage"]["completion_tokens"] == chunks[-1]["apar"]["text_tokens"]
        assert generated(chunks[-1]["apar"]) <= max_tokens
        if reason == "stop":
            assert text == answer.text
        else:
            assert reason == "length"
            assert generated(chunks[-1]["apar"]) == max_tokens
        for thread_id, thread in reader.threads[0].items():
            assert full.threads[0][thread_id]["text"].startswith(thread["text"])
    assert reason == "stop"


def _ends(chunk: dict[str, Any]) -> bool:
    return bool(chunk["choices"]) and chunk["choices"][0]["finish_reason"] is not None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("max_threads", [1, 2])
def test_a_limit_on_threads_changes_no_text(served: Served, name: str, max_threads: int) -> None:
    for question in ANSWERS:
        body = greedy(name, question, apar={"max_threads": max_threads})

        whole = served.server.post(CHAT, json=body).json()

        assert whole["choices"][0]["message"]["content"] == served.expected(name, question).text


def test_a_request_that_may_not_fork_writes_the_marks_alone(served: Served) -> None:
    body = greedy("results", TWO, apar={"enabled": False})

    whole = served.server.post(CHAT, json=body).json()

    assert whole["apar"]["threads"] == 1
    assert whole["apar"].get("joins", 0) == 0
    first = ANSWERS[TWO][""].partition("<JOIN-2>")[0]
    assert whole["choices"][0]["message"]["content"].startswith(first)


def test_a_replay_is_refused(served: Served) -> None:
    answer = served.server.post(CHAT, json=greedy("results", TWO, apar={"replay": {"": [5, 6]}}))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("apar.replay")


# ---- clients that leave, replicas that die --------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("said", ['"text": "<F', '"root.0"', '"root.1"'])
def test_a_client_that_leaves_leaves_nothing_behind(served: Served, name: str, said: str) -> None:
    for question in ANSWERS:
        with httpx.stream(
            "POST",
            served.server.url + CHAT,
            json=greedy(name, question) | TAGGED,
            headers=authorization(),
            timeout=120,
        ) as response:
            for line in response.iter_lines():
                if said in line or line == "data: [DONE]":
                    break


def some_text(answer: Answer) -> bool:
    """Return whether the organizer has forked, and not joined."""
    threads = answer.reader.threads.get(0, {})
    return "</FORK-1>" in threads.get("root", {"text": ""})["text"]


def in_joined_worker(answer: Answer) -> bool:
    """Return whether a worker writes for which its organizer waits."""
    threads = answer.reader.threads.get(0, {})
    return any(
        thread["state"] == "writing" and thread["text"]
        for name, thread in threads.items()
        if name != "root"
    )


def behind_join(answer: Answer) -> bool:
    """Return whether the organizer writes behind a join."""
    threads = answer.reader.threads.get(0, {})
    return len(threads) > 1 and threads["root"]["state"] == "writing"


KILLED: dict[str, tuple[str, Callable[[Answer], bool]]] = {
    "after a fork": (TWO, some_text),
    "in a worker that is waited for": (THREE, in_joined_worker),
    "behind a join": (THREE, behind_join),
    "beside a worker that nobody joins": (FEW, some_text),
}


@pytest.mark.parametrize("kills_replica", [True, False], ids=["replica", "engine"])
@pytest.mark.parametrize("case", KILLED)
def test_a_stream_whose_replica_is_killed_equals_the_uninterrupted_one(
    served: Served, case: str, kills_replica: bool
) -> None:
    question, when = KILLED[case]
    body, server = greedy("results", question) | TAGGED, served.server
    read = partial(read_stream, server, CHAT, body, in_order=False)
    wanted = read()
    server.wait_for_replicas(3)
    victims = Victims(server)

    answer = read(when, partial(victims.kill, replica=kills_replica))

    assert wanted.errors == answer.errors == []
    assert answer.text == wanted.text == served.expected("results", question).text
    assert (answer.finish, answer.usage) == (wanted.finish, wanted.usage)
    assert answer.reader.threads == wanted.reader.threads
    assert server.record(answer.request_id)["continued"] >= 1
