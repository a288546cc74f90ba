"""Formats whose parents continue, with random weights: threads against plain decoding, float32.

What a child reads, and what the client of each project makes of the threads, is written here once
more, without the code under test. The model forks by itself: its fork token is chosen now and then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.thread_outputs import TextToken
from apar_core.tree.threads import thread_texts
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import FLOAT_NOISE
from tests.integration.random_checkpoint import write_checkpoint, write_image_checkpoint

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

    token_ids: tuple[int, ...]
    text: str
    threads: tuple[Thread, ...]


def answer(engine: OfflineEngine, prompts: list[Any], max_tokens: int) -> list[Answered]:
    """Answer all prompts at once, greedily. Runs in the engine's process."""
    tokenizer, resolved = engine.tokenizer, engine.format
    assert resolved is not None
    assert resolved.trigger_id is not None
    fork, end = TextToken(resolved.trigger_id, None), TextToken(tokenizer.eos_token_id, None)
    settings = {"temperature": 0.0, "max_tokens": max_tokens, "skip_special_tokens": False}
    answered = []
    for each in engine.generate(prompts, settings):
        assert each.record is not None
        (tree,) = each.record.trees
        threads = tuple(
            Thread(
                tuple(map(int, name.split(".")[1:])),
                tuple(token.token_id for token in text.generated(fork, end)),
            )
            for name, text in thread_texts(tree).items()
        )
        answered.append(Answered(each.token_ids, each.text, threads))
    return answered


class PlainDecoding:
    """transformers' model of a checkpoint, which decodes one sequence."""

    def __init__(self, checkpoint: Path, project: Project, model_class: Any) -> None:
        self.model = model_class.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.project = project
        self.fork_id = self.tokenizer.get_vocab()[project.tokens[0]]
        self.context = self.ids(project.context)
        self.shown = self.ids(project.shown)
        # What only the engine writes.
        self.forced = [i for i in self.context if i != self.fork_id and i > 255]

    def ids(self, texts: Sequence[str]) -> list[int]:
        return [i for text in texts for i in self.tokenizer.encode(text)]

    def prefixes(self, prompt: list[int], answered: Answered) -> dict[tuple[int, ...], list[int]]:
        """What each thread has read before its first token."""
        sequences: dict[tuple[int, ...], list[int]] = {}
        found: dict[tuple[int, ...], list[int]] = {}
        for thread in answered.threads:
            prefix = prompt
            if thread.path:
                parent = sequences[thread.path[:-1]]
                start = len(found[thread.path[:-1]])
                forks = [i for i in range(start, len(parent)) if parent[i] == self.fork_id]
                prefix = [*parent[: forks[thread.path[-1]]], *self.context]
            found[thread.path] = prefix
            sequences[thread.path] = [*prefix, *thread.generated]
        return found

    def gaps(self, prefix: list[int], thread: Thread, image: Mapping[str, Any]) -> list[float]:
        """How far each token's logit is below that of the token which plain decoding chooses.

        `image` are the model's inputs besides tokens.
        """
        tokens = torch.tensor([*prefix, *thread.generated])
        with torch.no_grad():
            logits_TV = self.model(tokens[None], **image).logits[0, len(prefix) - 1 : -1]
        logits_TV[:, self.forced] = -torch.inf
        if thread.path and not self.project.nested:
            logits_TV[:, self.fork_id] = -torch.inf
        control = torch.tensor([self.fork_id, *self.forced])
        behind_control = torch.isin(tokens[len(prefix) - 1 : -1], control)
        logits_TV[behind_control, self.fork_id] = -torch.inf
        chosen = logits_TV.gather(1, tokens[len(prefix) :, None])[:, 0]
        return [float(gap) for gap in logits_TV.max(1).values - chosen]

    def check(
        self, prompt: list[int], answered: Answered, image: Mapping[str, Any] | None = None
    ) -> None:
        """Compare each thread with plain decoding, and the answer with the client's."""
        prefixes = self.prefixes(prompt, answered)
        for thread in answered.threads:
            gaps = self.gaps(prefixes[thread.path], thread, image or {})
            assert max(gaps, default=0.0) < FLOAT_NOISE
        expected = self.client_tokens(answered)
        assert list(answered.token_ids) == expected
        # vLLM leaves out a last character that is not complete.
        text = self.tokenizer.decode(expected)
        assert answered.text == text[: len(answered.text)]
        assert set(text[len(answered.text) :]) <= {"\ufffd"}

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
        attack = f"What do {' and '.join(project.tokens)} mean?{project.tokens[0]}"
        prompts = [*PROMPTS, attack]
        answers = engine.call(answer, prompts, 120)
    finally:
        engine.close()

    plain = PlainDecoding(checkpoint, project, AutoModelForCausalLM)
    for prompt, answered in zip(prompts, answers, strict=True):
        # Character by character, so that a marker in a prompt is none.
        plain.check(plain.ids(prompt), answered)
    children = [t for answered in answers for t in answered.threads if t.path]
    assert len(children) >= len(PROMPTS)
    assert sum(len(thread.generated) for thread in children) > 100
    assert project.nested == any(len(thread.path) > 1 for thread in children)


IMAGE_WAYS: dict[str, dict[str, Any]] = {
    "large blocks": {},
    "short memory, chunked prefill": {
        "block_size": 16,
        "num_gpu_blocks_override": 40,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
    },
}


@pytest.mark.parametrize("way", IMAGE_WAYS)
def test_children_of_a_request_with_an_image_read_the_image(tmp_path: Path, way: str) -> None:
    project = PROJECTS["hpd-parsing"]
    checkpoint = write_image_checkpoint(tmp_path, project.tokens, {"<FORK>": 4.0})
    noise = np.random.default_rng(0)
    images = [
        Image.fromarray(noise.integers(0, 255, (40, 56, 3), dtype=np.uint8)) for _ in range(6)
    ]
    text = "<image>Parse this page."
    engine = EngineProcess(model=str(checkpoint), max_model_len=256, **IMAGE_WAYS[way])
    try:
        prompts = [{"prompt": text, "multi_modal_data": {"image": image}} for image in images]
        answers = engine.call(answer, prompts, 100)
    finally:
        engine.close()

    plain = PlainDecoding(checkpoint, project, AutoModelForImageTextToText)
    processor = AutoProcessor.from_pretrained(checkpoint, backend="pil")
    for image, answered in zip(images, answers, strict=True):
        inputs = dict(processor(images=[image], text=text, return_tensors="pt"))
        del inputs["attention_mask"]
        plain.check(inputs.pop("input_ids")[0].tolist(), answered, inputs)
    children = [t for answered in answers for t in answered.threads if t.path]
    assert sum(len(thread.generated) for thread in children) > 100
    assert len({answered.token_ids for answered in answers}) > 1
