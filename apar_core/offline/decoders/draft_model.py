"""Speculative decoding with a draft model, which may have prompt tokens itself.

The draft model continues the text, the target model verifies all guesses in one pass. With prompt
tokens the draft model writes its guesses in fewer passes. Source: speculative decoding
(arXiv 2302.01318), combined with PPD (arXiv 2405.18628), section 5.3. One thread, greedy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from transformers import DynamicCache

from apar_core.errors import CheckpointError, RequestError
from apar_core.offline.decoders.interface import (
    DecodedAnswer,
    DecodeLimits,
    DecodeStep,
    DecodeStream,
    StepRecord,
    TokenChoice,
)
from apar_core.offline.decoders.load import ThreadDecoder
from apar_core.offline.decoders.thread_family import ThreadFamily
from apar_core.offline.decoders.tree_decoder import AnswerRun
from apar_core.tree.restore import TreeStream


@dataclass
class DraftDecoder:
    """Implementation of `AnswerDecoder`: `draft` guesses, `target` verifies.

    In float32 the greedy answer is the one of `target` with plain decoding. Neither decoder forks:
    `target` is `plain`, `draft` is `plain` or `ppd`. At least `num_guesses` tokens are guessed for
    each pass of the target. `draft_passes` counts the draft model's passes over all answers.
    Raises CheckpointError if the vocabularies differ or a decoder forks.
    """

    target: ThreadDecoder
    draft: ThreadDecoder
    num_guesses: int = 4
    draft_passes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.target.vocab_size != self.draft.vocab_size:
            raise CheckpointError(
                f"the draft model has a vocabulary of {self.draft.vocab_size}, the target model of "
                f"{self.target.vocab_size}"
            )
        if self.target.decoding.forks or self.draft.decoding.forks:
            raise CheckpointError("target and draft must not fork: use the decoders plain and ppd")

    def stream(
        self,
        prompt_ids: Sequence[int],
        choice: TokenChoice | None = None,
        limits: DecodeLimits | None = None,
    ) -> DecodeStream:
        """Decode step by step; a step is a pass of the target with the draft's passes before it.

        Raises RequestError for a choice that is not greedy, and as `ThreadDecoder` does.
        """
        choice, limits = choice or TokenChoice.greedy(), limits or DecodeLimits()
        if choice.temperature > 0 or choice.tokens_of_thread is not None:
            raise RequestError("a draft model is verified greedily only", param="temperature")
        prompt = list(prompt_ids)
        self.target.check_prompt(prompt)
        most = min(self.target.max_positions, self.draft.max_positions)
        family = ThreadFamily(
            len(prompt), None, self.target.end_ids, choice, limits, self.target.max_positions
        )
        text, thread = TreeStream(family.tree), family.root
        trace: list[StepRecord] = []
        draft, verifier = _Draft(self.draft, prompt, most), _Verifier(self.target)
        pending = prompt
        while thread.alive:
            start = time.perf_counter()
            length = thread.path_length
            # The first pass is the prefill: nothing is guessed before the target's first token.
            num_guesses = self.num_guesses if trace else 0
            room = self.target.max_positions - length
            guesses = draft.propose(num_guesses)[:room] if trace else draft.propose(0)
            chosen = verifier.choose([*pending, *guesses])
            pairs = zip(guesses, chosen, strict=False)
            num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            cached = family.cached_tokens([thread])
            gained = 0
            for token in chosen[: num_right + 1]:
                if thread.alive:
                    family.add_token(thread, token)
                    gained += 1
            verifier.keep(length + num_right)
            pending = [chosen[num_right]]
            draft.accept(num_right, chosen[num_right])
            attended = gained * length + gained * (gained - 1) // 2
            seconds = time.perf_counter() - start
            trace.append(StepRecord(len(trace) + 1, 1, gained, seconds, cached, attended))
            yield DecodeStep(trace[-1], tuple(text.take()))
        self.draft_passes += draft.num_passes
        tokens = self.target.decoding.tokens
        return DecodedAnswer(
            family.decoded_threads(),
            tuple(trace),
            len(prompt),
            tokens.fork_id if tokens is not None else None,
        )


class _Verifier:
    """Target model's cache and its greedy choice after each token of a chain."""

    def __init__(self, target: ThreadDecoder) -> None:
        self._decoding = target.decoding
        self._cache = DynamicCache()

    @torch.inference_mode()
    def choose(self, token_ids: list[int]) -> list[int]:
        """Compute tokens; return the choice after each of them, after the prompt's last only."""
        model, tokens = self._decoding.model, self._decoding.tokens
        is_prefill = self._cache.get_seq_length() == 0
        logits_TV = model(
            input_ids=torch.tensor([token_ids], device=model.device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1 if is_prefill else 0,
        ).logits[0]
        if tokens is not None:
            logits_TV[:, [tokens.child_id, tokens.fork_id]] = -torch.inf
        chosen: list[int] = logits_TV.argmax(-1).tolist()
        return chosen

    def keep(self, num_tokens: int) -> None:
        """Drop the cache after the first tokens."""
        excess = self._cache.get_seq_length() - num_tokens
        if excess:
            self._cache.crop(-excess)


class _Draft:
    """Draft model's row: continues the verified text, and goes back where it was wrong.

    All tokens of its thread but the last are cached, so that text which the target confirms is
    never computed again.
    """

    def __init__(self, decoder: ThreadDecoder, prompt: list[int], max_positions: int) -> None:
        # Without end tokens and limits of its own: the target's thread decides what ends.
        limits = DecodeLimits(max_tokens=2**31)
        greedy = TokenChoice.greedy()
        family = ThreadFamily(len(prompt), None, frozenset(), greedy, limits, max_positions)
        self._thread = family.root
        self._run = AnswerRun(decoder.decoding, family, greedy, prompt)
        self._num_prompt = len(prompt)
        self._num_verified = 0
        self.num_passes = 0

    def propose(self, num_guesses: int) -> list[int]:
        """Return at least so many guesses of the next tokens, none beyond the model's context."""
        token_ids = self._thread.token_ids
        while self._run.rows and len(token_ids) <= self._num_verified + num_guesses:
            self._run.step()
            self.num_passes += 1
        # The last token is not cached, so it is not offered: the target's own may replace it.
        return token_ids[self._num_verified : -1]

    def accept(self, num_right: int, following: int) -> None:
        """Keep the first guesses, followed by the token that the target has chosen itself."""
        token_ids = self._thread.token_ids
        place = self._num_verified + num_right
        self._num_verified = place + 1
        if place < len(token_ids) and token_ids[place] == following:
            return
        del token_ids[place:]
        token_ids.append(following)
        if self._run.rows:
            row = self._run.rows[0]
            row.length, row.pending, row.state = self._num_prompt + place, following, 0
