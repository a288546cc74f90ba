"""Formats whose parents continue, with random weights: threads against plain decoding, float32.

What a child reads, and what the client of each project makes of the threads, is written here once
more, without the code under test. The model forks by itself: its fork token is chosen now and then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.thread_outputs import TextToken
from apar_core.tree.threads import thread_texts
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import FLOAT_NOISE
from tests.integration.random_checkpoint import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = [
    "Parse this page.",
    "Read the second page: it has a table and two columns of text.",
    "What is on the third one?",
    *(f"Page {number}" for number in range(4, 12)),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
WAYS: dict[str, dict[str, Any]] = {
    "large blocks": {},
    "short memory, chunked prefill": {
        "block_size": 16,
        "num_gpu_blocks_override": 40,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 16,
    },
    "speculation": {"block_size": 16, "speculative_config": NGRAM},
}


@dataclass(frozen=True)
class Project:
    """One project's format, by hand.

    `context` is what a child reads behind its parent's tokens up to before the fork token; `shown`
    is what the client writes where it finds the fork token.
    """

    tokens: tuple[str, ...]
    context: tuple[str, ...]
    shown: tuple[str, ...]
    nested: bool = False
    setting: Any = None


PROJECTS = {
    "hpd-parsing": Project(("<FORK>", "<CHILD>"), ("<CHILD>",), ("<CHILD>",)),
    "padoc": Project(("[fork]",), ("[fork]",), ("[fork]",), setting="padoc"),
    "padoc with a seed": Project(
        ("[fork]", "<text>"),
        ("[fork]", "<text>", "\n"),
        ("[fork]",),
        setting={"like": "padoc", "child_seed": "<text>\n"},
    ),
    "apar-released": Project(
        ("[SplitMask]", "[SplitSop]"), ("[SplitMask]", "[SplitSop]"), (), nested=True
    ),
}


@dataclass(frozen=True)
class Thread:
    """Tokens that one thread generated, with fork and end tokens; `path` as in a request id."""

    path: tuple[int, ...]
    generated: tuple[int, ...]


@dataclass(frozen=True)
class Answered:
    """One answer and its threads, parents before their children."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    threads: tuple[Thread, ...]


def answer(engine: OfflineEngine, prompts: list[str], max_tokens: int) -> list[Answered]:
    """Answer all prompts at once, greedily. Runs in the engine's process."""
    tokenizer, resolved = engine.tokenizer, engine.format
    assert resolved is not None
    assert resolved.trigger_id is not None
    fork, end = TextToken(resolved.trigger_id, None), TextToken(tokenizer.eos_token_id, None)
    settings = {"temperature": 0.0, "max_tokens": max_tokens, "skip_special_tokens": False}
    answered = []
    for prompt, each in zip(prompts, engine.generate(prompts, settings), strict=True):
        assert each.record is not None
        (tree,) = each.record.trees
        threads = tuple(
            Thread(
                tuple(map(int, name.split(".")[1:])),
                tuple(token.token_id for token in text.generated(fork, end)),
            )
            for name, text in thread_texts(tree).items()
        )
        prompt_ids = tuple(tokenizer.encode(prompt))
        answered.append(Answered(prompt_ids, each.token_ids, each.text, threads))
    return answered


class PlainDecoding:
    """transformers' model of a checkpoint, which decodes one sequence."""

    def __init__(self, checkpoint: Path, project: Project) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.project = project
        self.fork_id = self.tokenizer.get_vocab()[project.tokens[0]]
        self.context = self.ids(project.context)
        self.shown = self.ids(project.shown)
        # What only the engine writes.
        self.forced = [i for i in self.context if i != self.fork_id and i > 255]

    def ids(self, texts: Sequence[str]) -> list[int]:
        return [i for text in texts for i in self.tokenizer.encode(text)]

    def prefixes(self, answered: Answered) -> dict[tuple[int, ...], list[int]]:
        """What each thread has read before its first token."""
        sequences: dict[tuple[int, ...], list[int]] = {}
        found: dict[tuple[int, ...], list[int]] = {}
        for thread in answered.threads:
            prefix = list(answered.prompt)
            if thread.path:
                parent = sequences[thread.path[:-1]]
                start = len(found[thread.path[:-1]])
                forks = [i for i in range(start, len(parent)) if parent[i] == self.fork_id]
                prefix = [*parent[: forks[thread.path[-1]]], *self.context]
            found[thread.path] = prefix
            sequences[thread.path] = [*prefix, *thread.generated]
        return found

    def gaps(self, prefix: list[int], thread: Thread) -> list[float]:
        """How far each token's logit is below that of the token which plain decoding chooses."""
        tokens = torch.tensor([*prefix, *thread.generated])
        with torch.no_grad():
            logits_TV = self.model(tokens[None]).logits[0, len(prefix) - 1 : -1]
        logits_TV[:, self.forced] = -torch.inf
        if thread.path and not self.project.nested:
            logits_TV[:, self.fork_id] = -torch.inf
        control = torch.tensor([self.fork_id, *self.forced])
        behind_control = torch.isin(tokens[len(prefix) - 1 : -1], control)
        logits_TV[behind_control, self.fork_id] = -torch.inf
        chosen = logits_TV.gather(1, tokens[len(prefix) :, None])[:, 0]
        return [float(gap) for gap in logits_TV.max(1).values - chosen]

    def client_tokens(self, answered: Answered) -> list[int]:
        """What the project's client makes of the threads."""
        by_path = {thread.path: thread.generated for thread in answered.threads}

        def written(path: tuple[int, ...]) -> list[int]:
            tokens: list[int] = []
            child = 0
            for token_id in by_path[path]:
                if token_id == self.fork_id:
                    tokens += [*self.shown, *written((*path, child))]
                    child += 1
                elif token_id != self.tokenizer.eos_token_id:
                    tokens.append(token_id)
            return tokens

        return written(())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROJECTS)
def test_threads_equal_plain_decoding_and_the_text_is_the_clients(
    tmp_path: Path, name: str, way: str
) -> None:
    project = PROJECTS[name]
    boosted = {project.tokens[0]: 3.0, "<eos>": 2.5}
    checkpoint = write_checkpoint(tmp_path, project.tokens, boosted)
    setting = {} if project.setting is None else {"parallel_format": project.setting}
    engine = EngineProcess(
        model=str(checkpoint),
        max_model_len=256,
        additional_config={"apar": {"separators": "off", **setting}},
        **WAYS[way],
    )
    try:
        answers = engine.call(answer, PROMPTS, 120)
    finally:
        engine.close()

    plain = PlainDecoding(checkpoint, project)
    for answered in answers:
        prefixes = plain.prefixes(answered)
        for thread in answered.threads:
            assert max(plain.gaps(prefixes[thread.path], thread), default=0.0) < FLOAT_NOISE
        assert list(answered.token_ids) == plain.client_tokens(answered)
        assert answered.text == plain.tokenizer.decode(plain.client_tokens(answered))
    children = [t for answered in answers for t in answered.threads if t.path]
    assert len(children) >= len(PROMPTS)
    assert sum(len(thread.generated) for thread in children) > 100
    assert project.nested == any(len(thread.path) > 1 for thread in children)
