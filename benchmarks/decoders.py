"""Decoders on transformers, generating the same tokens, one request at a time."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.decoders.interface import TokenChoice, decode_answer
from apar_core.offline.decoders.load import (
    DECODER_NAMES,
    SINGLE_THREAD,
    ThreadDecoder,
    load_decoder,
)
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.offline.training.pretrained import tree_tokens
from apar_core.tree.threads import thread_scripts


@dataclass(frozen=True)
class RecordedAnswer:
    """Prompt, tokens of each thread, and the same text as a single thread."""

    prompt_ids: list[int]
    threads: TokenChoice
    flat: TokenChoice

    def choice(self, name: str) -> TokenChoice:
        """Return the replay for a decoder, which may have a single thread."""
        return self.flat if name in SINGLE_THREAD else self.threads


def run(console: Console, *, repeats: int, num_answers: int) -> dict[str, Any]:
    """Time the decoders in turn; return medians over the repeats, without prefill."""
    folder = checkpoint_path()
    decoders: dict[str, ThreadDecoder] = {
        name: load_decoder(
            name,
            folder,
            medusa_heads=SHIPPED_HEADS["apar-tiny"],
            prompt_tokens=SHIPPED_PROMPTS["apar-tiny"],
            dtype=torch.float32,
        )
        for name in DECODER_NAMES
    }
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = tree_tokens(tokenizer)
    answers: list[RecordedAnswer] = []
    for example in Corpus(0, held_out=True).examples(10 * num_answers):
        if example.answer.first_child is None or len(answers) == num_answers:
            continue
        prompt = prompt_token_ids(example, tokenizer)
        answer = decode_answer(decoders["vanilla_apar"], prompt)
        if not all(thread.ended for thread in answer.threads):
            continue
        scripts = thread_scripts(answer.tree, tokens.fork_id, tokens.end_id)
        flat = {"": [*answer.text_ids, tokens.end_id]}
        answers.append(
            RecordedAnswer(prompt, TokenChoice.replay(scripts), TokenChoice.replay(flat))
        )
    times: dict[str, list[float]] = {name: [] for name in decoders}
    steps: dict[str, int] = dict.fromkeys(decoders, 0)
    for number in track(range(repeats + 1), description="decoders", transient=True):
        for name, decoder in decoders.items():
            decoder.forget()
            start, prefill_s, passes = time.perf_counter(), 0.0, 0
            for recorded in answers:
                trace = decode_answer(decoder, recorded.prompt_ids, recorded.choice(name)).trace
                prefill_s += trace[0].seconds
                passes += len(trace)
            if number > 0:  # the first repeat is a warm-up
                times[name].append(time.perf_counter() - start - prefill_s)
            steps[name] = passes
    return _report(console, steps, times, len(answers))


def _report(
    console: Console, steps: dict[str, int], times: dict[str, list[float]], num_answers: int
) -> dict[str, Any]:
    table = Table(title=f"The same {num_answers} answers, batch 1, float32 (interleaved)")
    for column in ("decoder", "steps", "seconds", "fewer steps", "faster", "faster / fewer steps"):
        table.add_column(column, justify="right")
    results: dict[str, Any] = {}
    plain_s = statistics.median(times["plain"])
    for name, seconds in times.items():
        median_s = statistics.median(seconds)
        step_ratio, wall_ratio = steps["plain"] / steps[name], plain_s / median_s
        results[name] = {
            "steps": steps[name],
            "seconds": median_s,
            "step_ratio": step_ratio,
            "wall_ratio": wall_ratio,
        }
        table.add_row(
            name,
            str(steps[name]),
            f"{median_s:.2f}",
            f"{step_ratio:.2f}x",
            f"{wall_ratio:.2f}x",
            f"{wall_ratio / step_ratio:.2f}",
        )
    console.print(table)
    return {"decoders": results, "num_answers": num_answers, "executors": torch.get_num_threads()}
