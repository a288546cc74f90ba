"""Speculation with a chain of prompt tokens: PPD in vLLM, as a custom proposer.

Source: Parallel Prompt Decoding (arXiv 2405.18628), with a chain instead of a tree, because vLLM
has no tree attention. The draft of a thread is `[guesses..., prompt tokens...]`, K tokens in all:

    step   input of a thread         what its logits give
    1      x  P1 P2 P3               x: next token a.  P1, P2, P3: guesses b c d after a
    2      a  b c P1                 a, b, c: verify b, c, and the token after them.
                                     P1: one guess, if b and c were both right
    3      e  P1 P2 P3               after a wrong guess: nothing to verify

Prompt token d predicts the token d places after the next one. In a causal sequence it reads the
guesses before it, so its prediction is of use only if all of them were right.

Where this meets vLLM:

1. `PromptEmbedding` wraps the model's input embedding. Ids from the vocabulary's size on are prompt
   tokens. No client can send them, and the output layer has no logits for them, so no sampler can
   choose them.
2. `PromptChain` is the `custom_class` proposer. vLLM gives it the sampled tokens only.
3. `ChainSampler` is vLLM's rejection sampler, which sees all logits. It reads the guesses from the
   rows of the prompt tokens, and verifies the drafts before them as if no others were there. So
   every sampling parameter, log-probabilities and bans work as with other drafts.

The proposers of vLLM 0.32 that read sampled tokens run in the V1 model runner without async
scheduling. vLLM has deprecated that runner, and refuses this method in V2. Scheduler and forks see
ordinary drafts: a child starts without a guess, like a request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from apar_core.engine.checkpoint import weight_files
from apar_core.errors import CheckpointError, EngineError
from apar_core.formats.prompt_file import (
    check_model,
    files_fingerprint,
    read_prompt_file,
    refuse_variant,
)
from apar_core.scheduler.fork_settings import CONFIG_KEY, fork_settings
from apar_core.vllm_names import (
    ParallelLMHead,
    RejectionSampler,
    SamplerOutput,
    SamplingMetadata,
    SpecDecodeMetadata,
    VocabParallelEmbedding,
    replace_next_rejection_sampler,
)

logger = logging.getLogger(__name__)

PROPOSER = "apar_core.engine.prompt_chain.PromptChain"
"""Value of `model` in a `speculative_config` with `method: custom_class`."""

_SETTING = f"additional_config.{CONFIG_KEY}.prompt_tokens"
_METHOD = "custom_class"
# Fewer drafts hold no guess together with the prompt token that finds the next one.
_LEAST_DRAFTS = 2


def uses_prompt_chain(vllm_config: VllmConfig) -> bool:
    """Return whether an engine speculates with a chain of prompt tokens."""
    config = vllm_config.speculative_config
    return config is not None and config.method == _METHOD and config.model == PROPOSER


def load_prompt_rows(vllm_config: VllmConfig) -> Tensor:
    """Return the embeddings [M, D] of the chain's prompt tokens, after all checks.

    Of an ensemble it takes the first member of each prompt token: a causal chain shows it what it
    was trained with, the path and the first members before it.
    Raises EngineError for settings that do not fit, CheckpointError for missing or damaged files
    and for prompt tokens of another model. Weights that are not on this machine, or not in
    safetensors, are not compared.
    """
    folder = _check_settings(vllm_config)
    settings, embeddings_MED = read_prompt_file(folder)
    refuse_variant(settings)
    config = vllm_config.speculative_config
    assert config is not None
    drafts = config.num_speculative_tokens
    if not _LEAST_DRAFTS <= drafts <= 2 * settings.num_prompts:
        raise EngineError(
            f"speculative_config.num_speculative_tokens is {drafts}; with the "
            f"{settings.num_prompts} prompt tokens in {folder} a chain has {_LEAST_DRAFTS} to "
            f"{2 * settings.num_prompts} guesses and prompt tokens"
        )
    model = vllm_config.model_config
    files = weight_files(model.model)
    comparable = bool(files) and all(file.suffix == ".safetensors" for file in files)
    if vllm_config.load_config.load_format == "dummy" or not comparable:
        fingerprint = settings.fingerprint
        logger.warning(
            "prompt tokens are used without comparing them with the model's weights",
            extra={"model": model.model, "prompt_tokens": str(folder)},
        )
    else:
        tied = bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
        fingerprint = files_fingerprint(files, tied=tied)
    try:
        check_model(settings, hidden_size=model.get_hidden_size(), fingerprint=fingerprint)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return embeddings_MED[:, 0]


def _check_settings(vllm_config: VllmConfig) -> Path:
    """Return the folder of the prompt tokens. Raises EngineError if a chain cannot run."""
    folder = fork_settings(vllm_config).prompt_tokens
    if folder is None:
        raise EngineError(
            f"{_SETTING} must name a folder of prompt tokens (`apar train-prompts`), because "
            f"speculative_config.model is {PROPOSER}"
        )
    refused = {
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "LoRA": vllm_config.lora_config is not None,
        "prompt embeddings": vllm_config.model_config.enable_prompt_embeds,
        "multimodal models": vllm_config.model_config.is_multimodal_model,
    }
    for name, is_used in refused.items():
        if is_used:
            raise EngineError(f"{_SETTING}: a chain of prompt tokens does not run with {name}")
    return folder


class PromptEmbedding(nn.Module):
    """The model's input embedding, with rows for prompt tokens after the vocabulary."""

    def __init__(self, embedding: nn.Module, rows_MD: Tensor, first_id: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.first_id = first_id
        self.register_buffer("rows_MD", rows_MD, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [..., D] of token ids [...]; id `first_id` is the first row."""
        last_id = self.first_id - 1
        rows_MD = self.get_buffer("rows_MD")
        ordinary = self.embedding(token_ids.clamp(max=last_id))
        prompts = nn.functional.embedding((token_ids - self.first_id).clamp(min=0), rows_MD)
        return torch.where((token_ids > last_id).unsqueeze(-1), prompts, ordinary)


def add_prompt_rows(model: nn.Module, rows_MD: Tensor, first_id: int) -> None:
    """Put a `PromptEmbedding` in place of the model's input embedding.

    A tied output layer keeps the embedding as it was. Raises EngineError if the model has not
    exactly one input embedding.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(found) != 1:
        raise EngineError(
            f"{_SETTING}: {type(model).__name__} has {len(found)} input embeddings, a chain of "
            f"prompt tokens needs exactly 1"
        )
    name, embedding = found[0]
    parent_name, _, attribute = name.rpartition(".")
    weight: Any = embedding.weight
    rows_MD = rows_MD.to(device=weight.device, dtype=embedding.params_dtype)
    setattr(
        model.get_submodule(parent_name), attribute, PromptEmbedding(embedding, rows_MD, first_id)
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """One thread in a step: its guesses, its prompt tokens, and where their predictions begin."""

    num_guesses: int
    num_prompts: int
    first_prediction: int


class PromptChain:
    """vLLM's proposer: guesses from the last step's prompt tokens, then prompt tokens."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.speculative_config
        assert config is not None
        self._vllm_config = vllm_config
        self._num_drafts: int = config.num_speculative_tokens
        # Behind all ids that vLLM accepts from a client or can sample.
        self.first_id = vllm_config.model_config.get_vocab_size()
        self._prompt_ids: list[int] = []
        # The last step, until `propose` has read it.
        self._rows: list[_Row] = []
        self._predictions: Tensor | None = None
        self._on_host: Tensor | None = None
        # vLLM builds the sampler right after its proposer, which cannot reach the model runner.
        replace_next_rejection_sampler(partial(ChainSampler, self))

    def load_model(self, model: nn.Module) -> None:
        """Add the prompt tokens to the loaded model."""
        rows_MD = load_prompt_rows(self._vllm_config)
        self._prompt_ids = [self.first_id + prompt for prompt in range(len(rows_MD))]
        add_prompt_rows(model, rows_MD, self.first_id)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the next drafts of each thread; none where nothing was sampled.

        vLLM calls it after each step that `observe` has seen, with the threads in the same order.
        """
        # Waits for nothing on a GPU: vLLM has already waited for the tokens sampled after it.
        predictions = [] if self._predictions is None else self._predictions.tolist()
        rows, self._rows, self._predictions = self._rows, [], None
        drafts: list[list[int]] = []
        for index, sampled in enumerate(sampled_token_ids):
            if not sampled:
                drafts.append([])
                continue
            guesses: list[int] = []
            if index < len(rows) and len(sampled) == rows[index].num_guesses + 1:
                row = rows[index]
                end = row.first_prediction + min(row.num_prompts, self._num_drafts - 1)
                guesses = predictions[row.first_prediction : end]
            drafts.append([*guesses, *self._prompt_ids[: self._num_drafts - len(guesses)]])
        return drafts

    def rows_of(
        self, num_draft_tokens: Sequence[int], spec_token_ids: Sequence[Sequence[int]] | None
    ) -> list[_Row] | None:
        """Return how many guesses and prompt tokens each thread had; None if it is unknown.

        vLLM's dummy runs have draft tokens without naming them.
        """
        drafts = list(spec_token_ids or ())[: len(num_draft_tokens)]
        if list(map(len, drafts)) != list(num_draft_tokens):
            return None
        rows: list[_Row] = []
        num_predictions = 0
        for each in drafts:
            num_guesses = sum(token_id < self.first_id for token_id in each)
            num_prompts = len(each) - num_guesses
            rows.append(_Row(num_guesses, num_prompts, num_predictions))
            num_predictions += num_prompts
        return rows

    def observe(self, rows: list[_Row], predictions: Tensor) -> None:
        """Take the likeliest tokens at all prompt tokens of a step, without waiting for them."""
        self._rows = rows
        if predictions.is_cuda:
            if self._on_host is None or len(self._on_host) < len(predictions):
                self._on_host = torch.empty(2 * len(predictions), dtype=torch.int64).pin_memory()
            predictions = self._on_host[: len(predictions)].copy_(predictions, non_blocking=True)
        self._predictions = predictions


class ChainSampler(RejectionSampler):
    """vLLM's rejection sampler without the prompt tokens, whose predictions it hands to a chain."""

    def __init__(self, chain: PromptChain, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chain = chain

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify the guesses; `logits` [drafts + threads, V] have the rows of all drafts."""
        spec_token_ids = sampling_metadata.spec_token_ids
        rows = self._chain.rows_of(metadata.num_draft_tokens, spec_token_ids)
        if rows is None or spec_token_ids is None:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        guesses, predicting = _only_guesses(metadata, rows, logits.device)
        # Before vLLM waits for the sampled tokens.
        self._chain.observe(rows, logits[predicting].argmax(-1))
        named = [
            list(ids[: row.num_guesses]) for ids, row in zip(spec_token_ids, rows, strict=False)
        ]
        sampling_metadata = replace(sampling_metadata, spec_token_ids=named)
        if guesses.max_spec_len == 0:
            # Nothing to verify. With top_k, vLLM's rejection sampler fails without a draft.
            output: SamplerOutput = self.sampler(
                logits=logits[guesses.bonus_logits_indices], sampling_metadata=sampling_metadata
            )
            return output
        return super().forward(guesses, draft_probs, logits, sampling_metadata)


def _only_guesses(
    metadata: SpecDecodeMetadata, rows: Sequence[_Row], device: torch.device
) -> tuple[SpecDecodeMetadata, Tensor]:
    """Return the metadata of the guesses alone, and the indices of the prompt tokens' logits.

    Indices still point into the logits of all drafts. So the number of sampled tokens, by which
    vLLM finds a thread's first row for log-probabilities, stays as it was.
    """
    counts = tuple((row.num_guesses, row.num_prompts) for row in rows)
    targets, bonus, predicting, verified, cumulated = _indices(counts, device)
    guesses = SpecDecodeMetadata(
        draft_token_ids=metadata.draft_token_ids[verified],
        num_draft_tokens=[row.num_guesses for row in rows],
        cu_num_draft_tokens=cumulated,
        cu_num_sampled_tokens=metadata.cu_num_sampled_tokens,
        target_logits_indices=targets,
        bonus_logits_indices=bonus,
        logits_indices=metadata.logits_indices,
    )
    return guesses, predicting


# With few threads the same numbers come back in every other step.
@lru_cache(maxsize=256)
def _indices(counts: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return indices of logits and drafts, from the guesses and prompt tokens of each thread.

    A thread has one row of logits for its last token, then one for each draft. The indices are of
    the rows that verify guesses, of the rows after them, of the prompt tokens' rows, of the
    guesses among all drafts; the last tensor adds up the guesses.
    """
    targets: list[int] = []
    bonus: list[int] = []
    predicting: list[int] = []
    verified: list[int] = []
    start = num_drafts = 0
    for num_guesses, num_prompts in counts:
        last = start + num_guesses
        targets.extend(range(start, last))
        bonus.append(last)
        predicting.extend(range(last + 1, last + 1 + num_prompts))
        verified.extend(range(num_drafts, num_drafts + num_guesses))
        start = last + 1 + num_prompts
        num_drafts += num_guesses + num_prompts
    cumulated = list(accumulate(num_guesses for num_guesses, _ in counts))
    parts = (targets, bonus, predicting, verified, cumulated)
    # One copy to the device for all.
    on_host = torch.tensor([index for part in parts for index in part], dtype=torch.int32)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    on_device = on_host.to(device, non_blocking=True)
    return tuple(torch.split(on_device, [len(part) for part in parts]))
