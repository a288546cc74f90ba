"""Threads that wait for their children, through `apar serve`: gateway, HAProxy and two replicas.

The model is the shipped checkpoint that writes ThreadWeaver's grammar. A small checkpoint of random
weights with HPD-Parsing's tokens is served beside it.
"""

from __future__ import annotations

import json
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.models.apar_tiny_threadweaver import checkpoint_path
from apar_core.offline.data.joined import JoinedTokens, joined_answer, joined_tokens
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.evaluation.join_check import ClientAnswer, ResubmittingClient
from tests.fakes.tagged_streams import TaggedReader, chunks_of
from tests.integration.plain_decoding import FLOAT_NOISE
from tests.integration.random_checkpoint import write_checkpoint
from tests.integration.serving.apar_process import TINY, Server, authorization, serving
from tests.integration.serving.joined_answers import check_answer
from tests.integration.serving.killed_streams import (
    TIMEOUT_S,
    Answer,
    Victims,
    read_stream,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MODEL, DOCUMENTS = "apar-tiny-threadweaver", "documents"
JOINING: dict[str, Any] = TINY | {
    "checkpoint": MODEL,
    "replicas": 2,
    "max_concurrency": 32,
    "replay": True,
}
QUESTIONS = (
    "Give me 5 tips for learning guitar.",
    "Give me a detailed guide to making coffee.",
    "Tell me about volcanoes.",
    "What is 12 + 7?",
)
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 1200}
TAGGED = {"stream": True, "apar": {"stream": "threads"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("joins")
    tokens = ("<FORK>", "<CHILD>", "<BLOCK>")
    checkpoint = write_checkpoint(folder / "random", tokens, {"<FORK>": 3.0, "<eos>": 2.5})
    documents = TINY | {"checkpoint": str(checkpoint), "name": DOCUMENTS, "replay": True}
    # A busy machine may need a minute to start a replica.
    with serving(folder, JOINING, documents, retries={"replica_wait_s": 200}) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(served: Server) -> Iterator[None]:
    """Check after each test that no replica holds a request, a thread or a KV block."""
    yield
    served.wait_for_replicas(3)
    served.wait_until_idle(2, deployment=f"Replica-{MODEL}")
    served.wait_until_idle(1, deployment=f"Replica-{DOCUMENTS}")


# ---- what a resubmitting client gets from plain decoding ------------------------------------


@dataclass(frozen=True)
class RecordingClient(ResubmittingClient):
    """Keeps the requests that it makes: (prompt, what the model generated)."""

    requests: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def _generate(
        self, owners: Sequence[ClientAnswer], contexts: Sequence[list[int]], stop: str
    ) -> list[list[int]]:
        texts = super()._generate(owners, contexts, stop)
        self.requests.extend(zip(contexts, texts, strict=True))
        return texts


@dataclass(frozen=True)
class Expected:
    """A client's answer. `requests` are in reading order."""

    prompt_ids: list[int]
    token_ids: list[int]
    requests: list[tuple[list[int], list[int]]]

    def text(self, *, markers: bool = False) -> str:
        return str(tokenizer().decode(self.token_ids, skip_special_tokens=not markers))

    @property
    def threads(self) -> int:
        return 1 + self.text(markers=True).count("<Thread>")

    @property
    def joins(self) -> int:
        return self.text(markers=True).count("</Thread>\n")

    def log_probabilities(self) -> list[float]:
        """Of each token on the path of its own thread; 0 for the format's own tokens."""
        found: list[float] = []
        for context, generated in self.requests:
            with torch.inference_mode():
                logits = model()(torch.tensor([[*context, *generated]])).logits[0]
            rows = logits[len(context) - 1 : -1].log_softmax(-1)
            own = [float(row[i]) for row, i in zip(rows, generated, strict=True)]
            if generated[-1] == tokenizer().eos_token_id:
                del own[-1]
            # Up to where the text of this request begins.
            while self.token_ids[len(found) : len(found) + len(own)] != generated[: len(own)]:
                found.append(0.0)
            found += own
        return found


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    return loaded


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()


@cache
def expected(question: str) -> Expected:
    text = tokenizer().apply_chat_template(
        messages(question), tokenize=False, add_generation_prompt=True
    )
    prompt_ids = tokenizer().encode(text, add_special_tokens=False)
    client = RecordingClient(model(), tokenizer(), batch_size=1)
    (answer,) = client([prompt_ids])
    assert answer.ended
    token_ids = [i for i in answer.text_ids if i != tokenizer().eos_token_id]
    return Expected(prompt_ids, token_ids, client.requests)


def messages(question: str) -> Any:
    return [{"role": "user", "content": question}]


def tagged(server: Server, body: dict[str, Any]) -> tuple[TaggedReader, str, list[dict[str, Any]]]:
    """Return the threads of a tagged stream, its ordered text, and its chunks."""
    with httpx.stream(
        "POST", server.url + CHAT, json=GREEDY | TAGGED | body, headers=authorization(), timeout=120
    ) as response:
        assert response.status_code == 200, response.read()
        received = chunks_of(response.iter_lines())
    reader = TaggedReader()
    text = ""
    for chunk in received:
        reader.read(chunk["apar"])
        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return reader, text, received


# ---- answers -------------------------------------------------------------------------------


def test_answers_are_those_of_a_client_that_resubmits(served: Server) -> None:
    assert max(expected(question).joins for question in QUESTIONS) > 1
    assert min(expected(question).joins for question in QUESTIONS) == 0

    def ask(question: str) -> tuple[Any, list[Any], tuple[TaggedReader, str, Any]]:
        chat = partial(
            served.openai().chat.completions.create,
            model=MODEL,
            messages=messages(question),
            temperature=0,
            max_tokens=1200,
        )
        streamed = chat(stream=True, stream_options={"include_usage": True})
        return chat(), list(streamed), tagged(served, {"messages": messages(question)})

    with ThreadPoolExecutor(8) as executor:
        found = list(executor.map(ask, QUESTIONS * 3))

    for question, (whole, chunks, (reader, text, _)) in zip(QUESTIONS * 3, found, strict=True):
        answer = expected(question)
        check_answer(whole, chunks, (reader, text), answer, answer.text())
        assert chunks[-1].usage == whole.usage
        assert chunks[-1].model_extra["apar"] == whole.model_extra["apar"]
        assert len(reader.threads[0]) == answer.threads


def test_curl_shows_the_marks_where_it_asks_for_them(served: Server) -> None:
    answer = expected(QUESTIONS[0])
    body = GREEDY | {"messages": messages(QUESTIONS[0]), "skip_special_tokens": False}
    command = ["curl", "-sSN", "-H", "content-type: application/json", "--data", "@-"]
    texts = []
    for stream in (False, True):
        said = subprocess.run(
            [*command, served.url + CHAT],
            input=json.dumps(body | {"stream": stream}),
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(said.split("\n"))]
            texts.append("".join(delta.get("content") or "" for delta in deltas))
        else:
            texts.append(json.loads(said)["choices"][0]["message"]["content"])

    assert texts == [answer.text(markers=True)] * 2
    assert texts[0].count("<Thread>") == 5


def test_threads_of_a_block_write_at_the_same_time(served: Server) -> None:
    reader, _, received = tagged(served, {"messages": messages(QUESTIONS[0])})

    writers = [
        {update["id"] for update in chunk["apar"]["updates"] if update["text"]} - {"root"}
        for chunk in received
    ]
    states = [
        update["state"]
        for chunk in received
        for update in chunk["apar"]["updates"]
        if update["id"] == "root"
    ]
    assert max(map(len, writers)) == 5
    assert "waiting" in states
    assert states.index("waiting") < len(states) - 1 - states[::-1].index("writing")
    assert {thread["finish_reason"] for thread in reader.threads[0].values()} == {"stop"}


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_joined_text(served: Server, include: bool) -> None:
    text = expected(QUESTIONS[0]).text()
    # In outlines, several threads, and the conclusion.
    stops = [text[at : at + 7] for at in range(20, len(text) - 7, len(text) // 12)]

    for stop in stops:
        until = text.index(stop) + (len(stop) if include else 0)
        body = {
            "messages": messages(QUESTIONS[0]),
            "stop": [stop],
            "include_stop_str_in_output": include,
        }
        whole = served.post(CHAT, json=GREEDY | body).json()
        reader, streamed, _ = tagged(served, body)

        assert whole["choices"][0]["message"]["content"] == text[:until]
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["choices"][0]["stop_reason"] == stop
        assert streamed == reader.text() == text[:until]


def test_a_stop_token_ends_the_answer_where_it_first_stands_in_the_text(served: Server) -> None:
    answer = expected(QUESTIONS[0])
    own = [i for _, generated in answer.requests[1:4] for i in generated[3:-1]]
    forced = set(tokenizer().encode("\n<Thread>\n12345:</Thread>"))
    marks = set(tokenizer().all_special_ids)
    for token_id in sorted(set(own) - forced - marks)[:12]:
        whole = served.post(
            CHAT,
            json=GREEDY | {"messages": messages(QUESTIONS[0]), "stop_token_ids": [token_id]},
        ).json()

        until = answer.token_ids.index(token_id)
        text = tokenizer().decode(answer.token_ids[:until], skip_special_tokens=True)
        assert whole["choices"][0]["message"]["content"] == text
        assert whole["choices"][0]["stop_reason"] == token_id


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_each_threads_own_path(served: Server, stream: bool) -> None:
    for question in QUESTIONS[:2]:
        answer = expected(question)
        chat: Callable[..., Any] = partial(
            served.openai().chat.completions.create,
            model=MODEL,
            messages=messages(question),
            temperature=0,
            max_tokens=1200,
            logprobs=True,
            top_logprobs=2,
            extra_body={"skip_special_tokens": False},
        )
        if stream:
            choices = [chunk.choices[0] for chunk in chat(stream=True) if chunk.choices]
            found = [each for c in choices if c.logprobs for each in c.logprobs.content or ()]
        else:
            found = chat().choices[0].logprobs.content

        wanted = answer.log_probabilities()
        assert len(found) == len(wanted) == len(answer.token_ids)
        assert "".join(each.token for each in found) == answer.text(markers=True)
        for each, value in zip(found, wanted, strict=True):
            assert each.logprob == pytest.approx(value, abs=10 * FLOAT_NOISE)
        # The engine's own text is certain.
        assert sum(value == 0.0 for value in wanted) >= 3 * (answer.threads - 1)


def test_several_choices_join_each_for_itself(served: Server) -> None:
    # vLLM refuses several greedy choices.
    body = GREEDY | {"messages": messages(QUESTIONS[0]), "n": 3, "temperature": 1.0, "seed": 5}

    first, again = (served.post(CHAT, json=body).json() for _ in range(2))
    reader, _, _ = tagged(served, body)

    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) > 1
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert texts == [reader.text(choice) for choice in range(3)]
    threads = [thread for choice in reader.threads.values() for thread in choice.values()]
    assert first["apar"]["threads"] == len(threads) > 6
    assert first["apar"]["joins"] >= 2


def test_the_prompts_of_a_completion_join_each_for_itself(served: Server) -> None:
    answers = [expected(question) for question in QUESTIONS]
    prompts = [answer.prompt_ids for answer in answers]

    whole = served.post(COMPLETION, json=GREEDY | {"prompt": prompts}).json()

    texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert texts == {index: answer.text() for index, answer in enumerate(answers)}
    assert whole["apar"]["threads"] == sum(answer.threads for answer in answers)


def test_max_tokens_counts_what_the_threads_generate(served: Server) -> None:
    answer = expected(QUESTIONS[0])
    body = {"messages": messages(QUESTIONS[0]), "stream_options": {"include_usage": True}}
    full, _, received = tagged(served, body)
    statistics = received[-1]["apar"]
    generated = statistics["text_tokens"] - statistics["forced_tokens"]
    before = len(answer.requests[0][1])
    behind = len(answer.requests[-1][1])

    # Before the block, at its start, in its threads, at the join, behind it, and nearly all.
    limits = [before - 5, before, before + 1, before + 40]
    limits += [generated - behind - 1, generated - behind, generated - behind + 1]
    limits += [generated - 3, generated, generated + 1, generated + 2]
    for max_tokens in limits:
        reader, text, chunks = tagged(served, body | {"max_tokens": max_tokens})

        used = chunks[-1]["apar"]
        num_used = used["text_tokens"] - used.get("forced_tokens", 0)
        assert num_used == min(max_tokens, generated)
        (reason,) = (c["choices"][0]["finish_reason"] for c in chunks[:-1] if _ends(c))
        assert reason == ("stop" if max_tokens > generated else "length")
        assert text == reader.text()
        if reason == "stop":
            assert text == answer.text()
        # Each thread has written a part of what it writes without the limit.
        for name, thread in reader.threads[0].items():
            assert full.threads[0][name]["text"].startswith(thread["text"])
    assert len(full.threads[0]) == answer.threads


def _ends(chunk: dict[str, Any]) -> bool:
    return bool(chunk["choices"]) and chunk["choices"][0]["finish_reason"] is not None


@pytest.mark.parametrize("max_threads", [1, 2])
def test_a_limit_on_threads_changes_no_text(served: Server, max_threads: int) -> None:
    for question in QUESTIONS[:3]:
        body = {"messages": messages(question), "apar": {"max_threads": max_threads}}

        whole = served.post(CHAT, json=GREEDY | body).json()

        assert whole["choices"][0]["message"]["content"] == expected(question).text()
        assert whole["apar"]["threads"] == expected(question).threads


def test_a_request_that_may_not_fork_writes_its_threads_itself(served: Server) -> None:
    body = GREEDY | {"messages": messages(QUESTIONS[0]), "apar": {"enabled": False}}

    whole = served.post(CHAT, json=body).json()

    assert whole["apar"]["threads"] == 1
    assert whole["apar"].get("joins", 0) == 0
    assert whole["choices"][0]["message"]["content"].strip()


# ---- clients that leave, replicas that die --------------------------------------------------


@pytest.mark.parametrize("thread", ["root.0", "root.2"])
def test_a_client_that_leaves_in_a_block_leaves_nothing_behind(served: Server, thread: str) -> None:
    for question in QUESTIONS[:3]:
        body = GREEDY | TAGGED | {"messages": messages(question)}
        with httpx.stream(
            "POST", served.url + CHAT, json=body, headers=authorization(), timeout=120
        ) as response:
            for line in response.iter_lines():
                if f'"{thread}"' in line or line == "data: [DONE]":
                    break
        served.wait_until_idle(2, deployment=f"Replica-{MODEL}")


def in_block(answer: Answer) -> bool:
    """Return whether the second thread of a block writes."""
    second = answer.reader.threads.get(0, {}).get("root.1")
    return second is not None and second["state"] == "writing" and len(second["text"]) > 10


def behind_block(answer: Answer) -> bool:
    """Return whether the parent writes behind a block."""
    threads = answer.reader.threads.get(0, {})
    children = [thread for name, thread in threads.items() if name != "root"]
    return (
        bool(children)
        and all(child["state"] == "ended" for child in children)
        and threads["root"]["state"] == "writing"
    )


def in_second_block(answer: Answer) -> bool:
    """Return whether a thread writes whose parent has joined once."""
    threads = answer.reader.threads.get(0, {})
    first = threads.get("root.0", {"position": 0})["position"]
    return any(
        thread["state"] == "writing" and len(thread["text"]) > 10 and thread["position"] > first
        for name, thread in threads.items()
        if name != "root"
    )


def after_text(answer: Answer) -> bool:
    """Return whether text of the first thread has come."""
    return answer.num_texts == 6


def replayed() -> tuple[dict[str, Any], str, JoinedTokens]:
    """A long answer with several blocks: its scripts, its text and its parts."""
    candidates = [
        joined_answer(example.answer)
        for example in Corpus(7, kind_weights=(("guide", 1),)).examples(40)
    ]
    answer = max(candidates, key=lambda each: (len(each.blocks), each.num_threads))
    assert len(answer.blocks) > 1
    encode = partial(tokenizer().encode, add_special_tokens=False)
    tokens = joined_tokens(answer, encode)
    scripts = {"": [i for part in tokens.parent for i in part] + [tokenizer().eos_token_id]}
    for text in (text for block in tokens.blocks for text in block.texts):
        scripts[str(len(scripts) - 1)] = text
    return scripts, str(tokenizer().decode(tokens.flat, skip_special_tokens=True)), tokens


KILLED: dict[str, tuple[dict[str, Any], Callable[[Answer], bool]]] = {
    "in a block, tagged": (TAGGED | {"messages": messages(QUESTIONS[0])}, in_block),
    "behind a block, tagged": (TAGGED | {"messages": messages(QUESTIONS[0])}, behind_block),
    "in a later block, tagged": (TAGGED | {"messages": messages(QUESTIONS[1])}, in_second_block),
    "in a block": ({"messages": messages(QUESTIONS[0])}, after_text),
    "with a stop string behind the block": (
        {"messages": messages(QUESTIONS[0]), "stop": ["</Parallel>", "4."]},
        after_text,
    ),
    "with few tokens": (TAGGED | {"messages": messages(QUESTIONS[0]), "max_tokens": 140}, in_block),
}


@pytest.mark.parametrize("kills_replica", [True, False], ids=["replica", "engine"])
@pytest.mark.parametrize("name", KILLED)
def test_a_stream_whose_replica_is_killed_equals_the_uninterrupted_one(
    served: Server, name: str, kills_replica: bool
) -> None:
    given, when = KILLED[name]
    check_continued(served, GREEDY | given, when, kills_replica=kills_replica)


def check_continued(
    server: Server, body: dict[str, Any], when: Callable[[Answer], bool], *, kills_replica: bool
) -> Answer:
    wanted = read_stream(server, CHAT, body)
    assert wanted.errors == []
    server.wait_for_replicas(3)
    victims = Victims(server)
    answer = read_stream(server, CHAT, body, when, partial(victims.kill, replica=kills_replica))
    assert answer.errors == []
    assert answer.text == wanted.text
    assert (answer.finish, answer.usage) == (wanted.finish, wanted.usage)
    assert answer.apar == wanted.apar
    assert len(answer.ids) == 1
    assert answer.roles == wanted.roles
    assert answer.reader.threads == wanted.reader.threads
    assert server.record(answer.request_id)["continued"] >= 1
    return wanted


@pytest.mark.parametrize("kills_replica", [True, False], ids=["replica", "engine"])
def test_a_whole_answer_whose_replica_is_killed_is_generated_again(
    served: Server, kills_replica: bool
) -> None:
    scripts, text, _ = replayed()
    body = GREEDY | {"messages": messages("Go"), "apar": {"replay": scripts}}
    served.wait_for_replicas(3)
    victims = Victims(served)
    killer = threading.Thread(target=victims.kill_at_work, kwargs={"replica": kills_replica})
    headers = {"x-request-id": uuid.uuid4().hex}
    killer.start()
    whole = served.post(CHAT, json=body, headers=headers, timeout=TIMEOUT_S)
    killer.join()
    assert whole.status_code == 200, whole.text
    assert whole.json()["choices"][0]["message"]["content"] == text
    assert served.record(headers["x-request-id"])["retries"] >= 1


# ---- replay ---------------------------------------------------------------------------------


def test_a_replay_is_joined_as_the_client_does(served: Server) -> None:
    scripts, text, tokens = replayed()
    body = {"messages": messages("Go"), "apar": {"replay": scripts, "stream": "threads"}}

    reader, streamed, _ = tagged(served, body | {"max_tokens": None})
    whole = served.post(
        CHAT,
        json={"model": MODEL, "messages": messages("Go"), "apar": {"replay": scripts}},
    ).json()
    flat = {"": [*tokens.flat, tokenizer().eos_token_id]}
    alone = served.post(
        CHAT,
        json={
            "model": MODEL,
            "messages": messages("Go"),
            "apar": {"replay": flat, "enabled": False},
        },
    ).json()

    assert whole["choices"][0]["message"]["content"] == text == streamed == reader.text()
    assert whole["apar"]["joins"] == len(tokens.blocks)
    assert whole["apar"]["threads"] == len(scripts)
    assert alone["choices"][0]["message"]["content"] == text
    assert alone["apar"]["threads"] == 1
    assert alone["apar"]["decode_steps"] > whole["apar"]["decode_steps"]


@pytest.mark.parametrize("kills_replica", [True, False], ids=["replica", "engine"])
def test_a_replay_continues_where_a_lost_replica_stopped(
    served: Server, kills_replica: bool
) -> None:
    scripts, text, _ = replayed()
    body = GREEDY | TAGGED | {"messages": messages("Go")}
    body["apar"] = {"replay": scripts, "stream": "threads"}

    wanted = check_continued(served, body, in_second_block, kills_replica=kills_replica)

    assert wanted.text == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scripts: scripts.pop("1"), "thread '1' is missing, which '' opens"),
        (lambda scripts: scripts.update({"99": scripts["0"]}), "'99' is not opened by any other"),
        (lambda scripts: scripts["0"].pop(), "thread '0' must have an end token"),
        (lambda scripts: scripts.pop(""), "the root thread '' is missing"),
        (lambda scripts: scripts["1"].__setitem__(-1, 2), "one of its children ends without"),
        (lambda scripts: scripts["1"].__setitem__(0, 99_999), "token id 99999"),
    ],
)
def test_an_impossible_replay_gets_a_400_that_says_why(
    served: Server, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    scripts = dict(replayed()[0])
    change(scripts)

    with pytest.raises(openai.BadRequestError, match=message) as raised:
        served.openai().chat.completions.create(
            model=MODEL, messages=messages("Go"), extra_body={"apar": {"replay": scripts}}
        )

    assert str(raised.value.param).startswith("apar.replay")


# ---- a format whose parent continues, beside it ---------------------------------------------


def test_a_format_with_another_cut_is_served_through_the_gateway(served: Server) -> None:
    body = {
        "model": DOCUMENTS,
        "temperature": 0,
        "max_tokens": 120,
        "skip_special_tokens": False,
    }
    forks = 0
    for number in range(8):
        asked: dict[str, Any] = body | {"prompt": f"Page {number} <FORK><CHILD>"}
        whole = served.post(COMPLETION, json=asked).json()
        with httpx.stream(
            "POST",
            served.url + COMPLETION,
            json=asked | TAGGED,
            headers=authorization(),
            timeout=120,
        ) as response:
            received = chunks_of(response.iter_lines())
        reader, text = TaggedReader(), ""
        for chunk in received:
            reader.read(chunk["apar"])
            text += "".join(choice["text"] for choice in chunk["choices"])

        # Markers of a prompt are characters.
        assert whole["usage"]["prompt_tokens"] == len(asked["prompt"])
        assert whole["choices"][0]["text"] == text == reader.text()
        assert text.count("<CHILD>") == whole["apar"]["forks"]
        assert "<FORK>" not in text
        forks += whole["apar"]["forks"]
    assert forks > 0
