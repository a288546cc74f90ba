"""Asks an engine and brings back all that a test may want to know of an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import replay_args
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.scheduler.core_state import core_state
from apar_core.tree.statistics import TreeStatistics
from apar_core.tree.threads import thread_prefix, thread_texts

FULL_TEXT = "Tips:\n1. Rest: sleep well.\n2. Food: eat greens, early.\n3. Play."
FORK = object()
# What each thread writes, by its path; read in order it is FULL_TEXT.
SCRIPT: dict[str, list[Any]] = {
    "": ["Tips:\n1. Rest", FORK, "\n2. Food", FORK, "\n3. Play."],
    "0": [": sleep well."],
    "1": [": eat", FORK, " early."],
    "1.0": [" greens,"],
}
READING_ORDER = (
    "Tips:\n1. Rest",
    ": sleep well.",
    "\n2. Food",
    ": eat",
    " greens,",
    " early.",
    "\n3. Play.",
)
QUESTION = "Give me 5 tips for learning guitar."


@dataclass(frozen=True)
class Thread:
    """Token ids of one thread: what it read before, and what it generated itself."""

    prefix: tuple[int, ...]
    generated: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One choice of an answer, in vLLM's own words."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    # For each token the log-probability and rank of every token named there, by token id.
    logprobs: list[dict[int, tuple[float, int]]] | None


@dataclass(frozen=True)
class Answer:
    """All choices of one prompt; `threads` of all choices, empty if the request could not fork."""

    choices: tuple[Completion, ...]
    prompt_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, tuple[float, int]] | None] | None
    statistics: TreeStatistics | None
    threads: tuple[Thread, ...]
    # Threads alive and KV blocks in use when all prompts of the call were answered.
    threads_left: int
    blocks_in_use: int

    @property
    def choice(self) -> Completion:
        """The only choice."""
        [choice] = self.choices
        return choice


def ask(engine: OfflineEngine, prompts: Sequence[Any], settings: Sequence[Any]) -> list[Answer]:
    """Answer prompts with settings (arguments of SamplingParams). Runs in the engine's process."""
    from vllm import SamplingParams

    params = [SamplingParams(**arguments) for arguments in settings]
    outputs = engine.llm.generate(list(prompts), params, use_tqdm=False)
    processor: Any = engine.llm.llm_engine.output_processor
    state = core_state(engine.scheduler)
    answers: list[Answer] = []
    for output in outputs:
        record = processor.records.take(output.request_id)
        prompt_ids = tuple(output.prompt_token_ids or ())
        trees = () if record is None else record.trees
        answers.append(
            Answer(
                choices=tuple(_completion(choice) for choice in output.outputs),
                prompt_ids=prompt_ids,
                prompt_logprobs=_plain_logprobs(output.prompt_logprobs),
                statistics=None if record is None else record.statistics,
                threads=tuple(
                    thread for tree in trees for thread in _threads(engine, tree, prompt_ids)
                ),
                threads_left=state.threads,
                blocks_in_use=state.kv_blocks - state.free_blocks,
            )
        )
    return answers


def chat(engine: OfflineEngine, settings: Sequence[Any], question: str = QUESTION) -> list[Answer]:
    """The answer to one question with each of the settings, all at once."""
    return ask(engine, [engine.chat_prompt(question)] * len(settings), settings)


def replayed(script: Mapping[str, Sequence[Any]] = SCRIPT, **settings: Any) -> dict[str, Any]:
    """Settings that make the engine generate a script's threads, each to its end token."""
    fork_id, end_id = token_id("[Fork]"), token_id("<eos>")
    tokens_of_thread: dict[str, list[int]] = {}
    for path, parts in script.items():
        tokens: list[int] = []
        for part in parts:
            tokens.extend([fork_id] if part is FORK else encode(part))
        tokens_of_thread[path] = [*tokens, end_id]
    extra_args = {**replay_args(tokens_of_thread), **settings.pop("extra_args", {})}
    return {"temperature": 0.0, "max_tokens": 200, **settings, "extra_args": extra_args}


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint_path())


def token_id(text: str) -> int:
    """Id of the token that is spelled like this."""
    return int(tokenizer().get_vocab()[text])


@cache
def encode(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def full_ids() -> list[int]:
    """The script's tokens in reading order."""
    return [token for part in READING_ORDER for token in encode(part)]


def _completion(choice: Any) -> Completion:
    return Completion(
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=_plain_logprobs(choice.logprobs),
    )


def _plain_logprobs(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        entry and {token: (each.logprob, each.rank) for token, each in entry.items()}
        for entry in logprobs
    ]


def _threads(engine: OfflineEngine, tree: Any, prompt_ids: tuple[int, ...]) -> list[Thread]:
    control = engine.control_tokens
    assert control is not None
    from apar_core.engine.thread_outputs import TextToken

    fork, child = TextToken(control.fork_id, None), TextToken(control.child_id, None)
    end = TextToken(engine.tokenizer.eos_token_id, None)
    texts = thread_texts(tree)
    return [
        Thread(
            (*prompt_ids, *(item.token_id for item in thread_prefix(texts, name, [], fork, child))),
            tuple(item.token_id for item in text.generated(fork, end)),
        )
        for name, text in texts.items()
    ]
