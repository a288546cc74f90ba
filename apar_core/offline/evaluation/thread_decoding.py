"""Greedy decoding of forking answers with plain transformers, one row a thread.

The reference for every faster decoder: no thread reads anything but its own path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.decoders.decoded_answer import DecodedThread
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_thread

# Prompts as token ids in, the threads of each answer out, parents before their children.
DecodeAnswers = Callable[[Sequence[Sequence[int]]], list[list[DecodedThread]]]


class GreedyModel(Protocol):
    """A causal language model of transformers."""

    def generate(self, inputs: Tensor, **settings: Any) -> Any:
        """Return the padded prompts of `inputs` [B, T] with their continuations."""


@dataclass(frozen=True, slots=True)
class _PendingThread:
    answer: int
    thread: ThreadId
    parent: ThreadId | None
    fork_ordinal: int
    prefix: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformersThreadDecoder:
    """Decodes threads in waves: all roots, then all their children, and so on.

    No token is banned, so that a check sees every mistake of the model. An answer gets at most
    `max_threads` threads: those beyond it are returned empty and unended, so that a bad model
    cannot fork for ever. Call it with prompts.
    """

    model: GreedyModel
    tokens: TreeTokens
    pad_id: int
    max_thread_tokens: int = 256
    max_threads: int = 64
    batch_size: int = 64

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[list[DecodedThread]]:
        """Return the threads of each prompt's answer."""
        answers: list[list[DecodedThread]] = [[] for _ in prompts]
        wave = [
            _PendingThread(answer, ROOT_THREAD, None, 0, tuple(prompt))
            for answer, prompt in enumerate(prompts)
        ]
        while wave:
            following: list[_PendingThread] = []
            # Rows of like length waste little padding.
            wave.sort(key=lambda pending: len(pending.prefix))
            for start in range(0, len(wave), self.batch_size):
                batch = wave[start : start + self.batch_size]
                for pending, (token_ids, ended) in zip(batch, self._decode(batch), strict=True):
                    answers[pending.answer].append(
                        DecodedThread(
                            pending.thread, pending.parent, pending.fork_ordinal, token_ids, ended
                        )
                    )
                    following.extend(self._children(pending, token_ids))
            wave = self._admit(following, answers)
        return answers

    def _admit(
        self, following: list[_PendingThread], answers: list[list[DecodedThread]]
    ) -> list[_PendingThread]:
        """Return the threads that may run; give the others their empty place in the answer."""
        room = [self.max_threads - len(threads) for threads in answers]
        wave: list[_PendingThread] = []
        for pending in following:
            room[pending.answer] -= 1
            if room[pending.answer] >= 0:
                wave.append(pending)
            else:
                answers[pending.answer].append(
                    DecodedThread(
                        pending.thread, pending.parent, pending.fork_ordinal, (), ended=False
                    )
                )
        return wave

    def _decode(self, batch: Sequence[_PendingThread]) -> list[tuple[tuple[int, ...], bool]]:
        """Return what each row samples up to its end of thread, and whether it ended."""
        width = max(len(pending.prefix) for pending in batch)
        padded = [
            [self.pad_id] * (width - len(pending.prefix)) + list(pending.prefix)
            for pending in batch
        ]
        attention = [
            [0] * (width - len(pending.prefix)) + [1] * len(pending.prefix) for pending in batch
        ]
        with torch.inference_mode():
            rows = self.model.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(attention),
                max_new_tokens=self.max_thread_tokens,
                do_sample=False,
                eos_token_id=self.tokens.end_id,
                pad_token_id=self.pad_id,
            )
        return [self._cut(row) for row in rows[:, width:].tolist()]

    def _cut(self, sampled: list[int]) -> tuple[tuple[int, ...], bool]:
        if self.tokens.end_id in sampled:
            return tuple(sampled[: sampled.index(self.tokens.end_id)]), True
        return tuple(sampled), False

    def _children(
        self, pending: _PendingThread, token_ids: tuple[int, ...]
    ) -> list[_PendingThread]:
        forks = [i for i, token_id in enumerate(token_ids) if token_id == self.tokens.fork_id]
        return [
            _PendingThread(
                pending.answer,
                child_thread(pending.thread, ordinal),
                pending.thread,
                ordinal,
                (*pending.prefix, *token_ids[: index + 1], self.tokens.child_id),
            )
            for ordinal, index in enumerate(forks)
        ]
