"""Loading of decoders by name, and checks of their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from apar_core.errors import CheckpointError, RequestError
from apar_core.formats.control_tokens import (
    ControlTokens,
    TreeTokens,
    find_control_tokens,
    refuse_control_tokens,
)
from apar_core.formats.prompt_file import refuse_variant
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.decoders.interface import (
    DecodedAnswer,
    DecodeLimits,
    DecodeStep,
    DecodeStream,
    TokenChoice,
)
from apar_core.offline.decoders.pass_times import PassTimes, ProposerName
from apar_core.offline.decoders.proposer import (
    MedusaProposer,
    PromptProposer,
    Proposer,
    TreesOfRows,
    TreeStacks,
)
from apar_core.offline.decoders.thread_family import ThreadFamily
from apar_core.offline.decoders.token_chooser import TypicalAcceptance
from apar_core.offline.decoders.tree_decoder import AnswerRun, DecodingModel
from apar_core.offline.decoders.weightless import (
    LOOKUP_TABLE,
    RECYCLING_TABLE,
    LookupProposer,
    RecyclingProposer,
)
from apar_core.offline.speculation.acceptance import ACCEPTANCE_FILE, AcceptanceTable, read_table
from apar_core.offline.speculation.candidate_tree import candidate_tree, full_trees
from apar_core.offline.speculation.medusa_heads import MedusaHeads, load_medusa_heads
from apar_core.offline.speculation.prompt_tokens import (
    PromptTokens,
    check_prompt_tokens,
    load_prompt_tokens,
)
from apar_core.offline.speculation.sparse_tree import (
    FAMILY_ROWS,
    SparseTree,
    TreeFamily,
    tree_family,
)
from apar_core.offline.training.tree_forward import limited_attention
from apar_core.step_costs.costs import StepCosts
from apar_core.suggestions import did_you_mean
from apar_core.tree.restore import TreeStream

DecoderName = Literal[
    "plain", "vanilla_apar", "medusa", "medusa_apar", "ppd", "ppd_apar", "lookup", "lookup_apar",
    "recycling", "recycling_apar",
]  # fmt: skip
DECODER_NAMES: tuple[DecoderName, ...] = get_args(DecoderName)
UNFORKED: Mapping[str, DecoderName] = {
    "vanilla_apar": "plain",
    "medusa_apar": "medusa",
    "ppd_apar": "ppd",
    "lookup_apar": "lookup",
    "recycling_apar": "recycling",
}
"""For each decoder that forks, the one that decodes a single thread in the same way."""
SINGLE_THREAD: frozenset[str] = frozenset(UNFORKED.values())
"""Decoders that never fork; they decode any causal model."""
HEADED: frozenset[str] = frozenset({"medusa", "medusa_apar"})
"""Decoders that need Medusa heads."""
UNSPECULATED: frozenset[str] = frozenset({"plain", "vanilla_apar"})
"""Decoders that guess nothing."""
PROMPTED: frozenset[str] = frozenset({"ppd", "ppd_apar"})
"""Decoders that need prompt tokens."""

# On a GPU passes are memory-bound, so more candidates cost little; a CPU computes each one.
_CANDIDATES_ON_CPU, _CANDIDATES_ON_GPU = 1, 2
# Milliseconds of a pass of apar-tiny in float32 on one core by its tokens, with its proposals.
_CPU_PASS_MS = ((1, 3.5), (4, 4.5), (8, 5.5), (16, 6.3), (32, 8.2), (64, 11.5))
# Tokens that make a pass on a GPU twice as long: in table 1 of PPD (arXiv 2405.18628), 60 tokens of
# a 13B model take 15 % longer than one.
_DOUBLING_ON_GPU = 400


def pass_seconds(device: torch.device) -> Callable[[int], float]:
    """Return the default duration of a pass by its tokens; only the ratios count.

    Fixed values keep sampled answers reproducible. Measured durations give better trees:
    pass them as `pass_times` to `load_decoder`.
    """
    if device.type != "cpu":
        return lambda num_tokens: 1 + num_tokens / _DOUBLING_ON_GPU
    costs = StepCosts("apar-tiny", "measured", "one core", _CPU_PASS_MS, 0.0)
    return costs.matrix_time_s


@dataclass(frozen=True, slots=True)
class ThreadDecoder:
    """Implementation of `AnswerDecoder`.

    Between answers it keeps what Token Recycling has learned, so one answer at a time is decoded.
    """

    decoding: DecodingModel
    control: ControlTokens | None
    end_ids: frozenset[int]
    vocab_size: int
    max_positions: int

    def stream(
        self,
        prompt_ids: Sequence[int],
        choice: TokenChoice | None = None,
        limits: DecodeLimits | None = None,
    ) -> DecodeStream:
        """Decode step by step; see `AnswerDecoder`."""
        choice, limits = choice or TokenChoice.greedy(), limits or DecodeLimits()
        prompt = list(prompt_ids)
        self.check_prompt(prompt)
        self._check_replay(choice)
        tokens = self.decoding.tokens
        family = ThreadFamily(
            len(prompt),
            tokens if self.decoding.forks else None,
            self.end_ids,
            choice,
            limits,
            self.max_positions,
        )
        run = AnswerRun(self.decoding, family, choice, prompt)
        text, trace = TreeStream(family.tree), []
        while run.rows:
            record = run.step()
            trace.append(record)
            yield DecodeStep(record, tuple(text.take()))
        return DecodedAnswer(
            family.decoded_threads(),
            tuple(trace),
            len(prompt),
            tokens.fork_id if tokens is not None else None,
        )

    def forget(self) -> None:
        """Drop what Token Recycling has learned."""
        if self.decoding.proposer is not None:
            self.decoding.proposer.forget()

    def check_prompt(self, prompt: list[int]) -> None:
        """Raise RequestError for a prompt that this decoder does not accept."""
        if not prompt:
            raise RequestError("prompt is empty: at least 1 token is needed", param="prompt")
        if len(prompt) >= self.max_positions:
            raise RequestError(
                f"prompt has {len(prompt)} tokens, which leaves no room in a context of "
                f"{self.max_positions}",
                param="prompt",
            )
        self._check_ids(prompt, "prompt")
        if self.control is not None:
            refuse_control_tokens(prompt, self.control)

    def _check_replay(self, choice: TokenChoice) -> None:
        for path, token_ids in (choice.tokens_of_thread or {}).items():
            field = f"tokens_of_thread[{path!r}]"
            self._check_ids(token_ids, field)
            ends = [place for place, token in enumerate(token_ids) if token in self.end_ids]
            if ends and ends[0] != len(token_ids) - 1:
                raise RequestError(f"{field} continues after its end token", param=field)
            if path == "" and not token_ids:
                raise RequestError(f"{field} is empty", param=field)
            banned = self._unforceable() & set(token_ids)
            if banned:
                raise RequestError(
                    f"{field} contains control token {min(banned)}, which this decoder never "
                    "generates",
                    param=field,
                )
        if choice.tokens_of_thread is not None:
            self._check_paths(choice.tokens_of_thread)

    def _check_paths(self, replay: Mapping[str, Sequence[int]]) -> None:
        if "" not in replay:
            raise RequestError(
                "tokens_of_thread lacks the root thread ''", param="tokens_of_thread"
            )
        tokens = self.decoding.tokens
        opened = {""}
        for path, token_ids in replay.items():
            num_forks = sum(tokens is not None and token == tokens.fork_id for token in token_ids)
            opened |= {f"{path}.{n}" if path else str(n) for n in range(num_forks)}
        for path in replay:
            if path not in opened:
                field = f"tokens_of_thread[{path!r}]"
                raise RequestError(
                    f"{field} is a thread that no fork token opens",
                    param=field,
                )

    def _unforceable(self) -> set[int]:
        tokens = self.decoding.tokens
        if tokens is None:
            return set()
        return {tokens.child_id} if self.decoding.forks else {tokens.child_id, tokens.fork_id}

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"token {position} of {field} has id {token_id}; the model has ids 0 to "
                    f"{self.vocab_size - 1}",
                    param=field,
                )


def load_decoder(
    name: str,
    model: str | Path | PreTrainedModel,
    tokenizer: Any = None,
    *,
    medusa_heads: Path | None = None,
    prompt_tokens: Path | None = None,
    trees: TreeFamily | None = None,
    pass_times: Mapping[ProposerName, PassTimes] | None = None,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    top_k: tuple[int, ...] | None = None,
    acceptance: TypicalAcceptance | None = None,
) -> ThreadDecoder:
    """Return a decoder of a loaded model, or of a model folder or hub name.

    `trees` are the candidate trees by number of live rows. By default they are built from the
    acceptance table beside the heads or prompt tokens, for `pass_times` or `pass_seconds`. With
    `top_k`, Medusa heads fill a full tree with so many candidates of each head instead. Heads
    without a table have one candidate each on a CPU and two elsewhere.

    Raises CheckpointError for an unknown name, missing control tokens, heads or prompt tokens that
    do not fit, and a missing table of prompt tokens or missing pass times.
    """
    if name not in DECODER_NAMES:
        raise CheckpointError(
            f"decoder must be one of {', '.join(DECODER_NAMES)}, got {name!r}"
            f"{did_you_mean(name, DECODER_NAMES)}"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(model, str | Path):
        tokenizer = tokenizer or load_tokenizer(model)
        model = _load(load_causal_model, model, dtype=dtype or "auto")
    if tokenizer is None:
        raise CheckpointError("tokenizer must be given with a loaded model")
    loaded: Any = model
    loaded = loaded.to(device=device, dtype=dtype or loaded.dtype).eval()
    control = find_control_tokens(tokenizer.get_vocab())
    if control is None and name not in SINGLE_THREAD:
        raise CheckpointError(f"{name} needs a model with control tokens: this vocabulary has none")
    heads = prompts = folder = None
    if name in HEADED:
        folder, heads = medusa_heads, _heads(name, medusa_heads, loaded)
    elif name in PROMPTED:
        folder, prompts = prompt_tokens, _prompts(name, prompt_tokens)
    if trees is None and top_k is None and folder is not None:
        trees = _family_of_table(folder, loaded, heads, prompts, pass_times)
    elif trees is None and (table := _WEIGHTLESS.get(UNFORKED.get(name, name))) is not None:
        trees = _weightless_family(table, loaded, pass_times)
    return build_decoder(
        name,
        loaded,
        control,
        _end_ids(loaded, tokenizer),
        heads=heads,
        prompts=prompts,
        trees=None if trees is None else _by_rows(trees),
        top_k=top_k,
        acceptance=acceptance,
    )


def load_tokenizer(name: str | Path) -> Any:
    """Return a checkpoint's tokenizer. Raises CheckpointError if it cannot be loaded."""
    return _load(AutoTokenizer.from_pretrained, name)


def build_decoder(
    name: DecoderName,
    model: PreTrainedModel,
    control: ControlTokens | None,
    end_ids: frozenset[int],
    *,
    heads: MedusaHeads | None = None,
    prompts: PromptTokens | None = None,
    trees: TreesOfRows | None = None,
    top_k: tuple[int, ...] | None = None,
    acceptance: TypicalAcceptance | None = None,
) -> ThreadDecoder:
    """Return a decoder of loaded parts; see `load_decoder`. Prompt tokens need `trees`."""
    config: Any = model.config
    limited = limited_attention(config, config.max_position_embeddings)
    if limited is not None:
        raise CheckpointError(
            f"the decoders need full attention in every layer; model {config.name_or_path!r} has "
            f"{limited}"
        )
    proposer: Proposer | None = None
    if heads is not None:
        if trees is None:
            trees = _full_trees(heads, top_k, model.device)
        _check_heads(heads, config)
        proposer = MedusaProposer(heads, model)
    elif prompts is not None:
        check_prompt_tokens(prompts, model)
        refuse_variant(prompts.settings)
        proposer = PromptProposer(prompts, model)
    else:
        proposer = _weightless_proposer(name, model)
    if trees is None:
        if proposer is not None:
            raise CheckpointError(f"{name} needs candidate trees")
        trees = _no_candidates
    ensemble = proposer.ensemble if proposer is not None else 0
    _check_trees(trees, config, heads, prompts, ensemble, name)
    tokens = TreeTokens(control.fork_id, control.child_id, min(end_ids)) if control else None
    decoding = DecodingModel(
        model,
        tokens,
        name not in SINGLE_THREAD,
        proposer,
        TreeStacks(trees, model.device, ensemble),
        acceptance or TypicalAcceptance(),
    )
    return ThreadDecoder(
        decoding, control, end_ids, config.vocab_size, config.max_position_embeddings
    )


def _load(load: Callable[..., Any], name: str | Path, **arguments: Any) -> Any:
    try:
        return load(str(name), **arguments)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot load model {str(name)!r}: {error}") from error


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured) if isinstance(configured, list) else {configured}
    end_ids = frozenset(each for each in (*ids, tokenizer.eos_token_id) if each is not None)
    if not end_ids:
        raise CheckpointError("eos_token_id: neither the tokenizer nor the model has one")
    return end_ids


def _heads(name: str, folder: Path | None, model: Any) -> MedusaHeads:
    if folder is None:
        raise CheckpointError(
            f"{name} needs medusa_heads, the folder of trained heads (`apar train-medusa` writes "
            "it)"
        )
    heads = load_medusa_heads(folder)
    return heads.to(device=model.device, dtype=model.dtype)


def _prompts(name: str, folder: Path | None) -> PromptTokens:
    if folder is None:
        raise CheckpointError(
            f"{name} needs prompt_tokens, the folder of trained prompt tokens "
            "(`apar train-prompts` writes it)"
        )
    return load_prompt_tokens(folder)


def _family_of_table(
    folder: Path,
    model: Any,
    heads: MedusaHeads | None,
    prompts: PromptTokens | None,
    pass_times: Mapping[ProposerName, PassTimes] | None,
) -> TreeFamily | None:
    """Return the trees for the acceptance table in a folder; None for heads without one."""
    if heads is not None and pass_times is None and not (folder / ACCEPTANCE_FILE).exists():
        return None
    ensemble = prompts.settings.ensemble if prompts is not None else 0
    if pass_times is not None:
        name: ProposerName = "medusa_heads" if heads is not None else "prompt_tokens"
        if name not in pass_times:
            raise CheckpointError(
                f"the pass times have no {name}, only {', '.join(sorted(pass_times))}: measure "
                f"them with `apar evaluate passes --{name.replace('_', '-')}`"
            )
        return pass_times[name].family(read_table(folder), ensemble=ensemble)
    return tree_family(read_table(folder), pass_seconds(model.device), ensemble=ensemble)


_WEIGHTLESS: Mapping[str, AcceptanceTable] = {
    "lookup": LOOKUP_TABLE, "recycling": RECYCLING_TABLE
}  # fmt: skip


def _weightless_proposer(name: str, model: Any) -> Proposer | None:
    kind = UNFORKED.get(name, name)
    if kind == "lookup":
        return LookupProposer(LOOKUP_TABLE.num_distances)
    if kind == "recycling":
        return RecyclingProposer(model.config.vocab_size, RECYCLING_TABLE.num_ranks, model.device)
    return None


def _weightless_family(
    table: AcceptanceTable, model: Any, pass_times: Mapping[ProposerName, PassTimes] | None
) -> TreeFamily:
    """Return the trees of a proposer that needs neither weights nor further inputs."""
    if pass_times is not None:
        # Those of a decoder that guesses with weights are a little longer.
        return pass_times[max(pass_times)].family(table, ensemble=0)
    return tree_family(table, pass_seconds(model.device), ensemble=0)


def _by_rows(family: TreeFamily) -> TreesOfRows:
    return lambda num_rows: family.for_rows(num_rows).trees


def _full_trees(
    heads: MedusaHeads, top_k: tuple[int, ...] | None, device: torch.device
) -> TreesOfRows:
    settings = heads.settings
    if top_k is None:
        candidates = _CANDIDATES_ON_CPU if device.type == "cpu" else _CANDIDATES_ON_GPU
        top_k = (candidates,) * settings.medusa_num_heads
    if not 1 <= len(top_k) <= settings.medusa_num_heads or not all(
        1 <= k <= settings.vocab_size for k in top_k
    ):
        raise CheckpointError(
            f"top_k must give 1 to {settings.medusa_num_heads} heads at least 1 candidate each, "
            f"got {top_k}"
        )
    states = full_trees(top_k)
    return lambda _num_rows: states


def _no_candidates(_num_rows: int) -> tuple[SparseTree, ...]:
    return full_trees(())


def _check_heads(heads: MedusaHeads, config: Any) -> None:
    for field in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(heads.settings, field), getattr(config, field)
        if theirs != ours:
            raise CheckpointError(f"Medusa heads have {field} {theirs}, the model has {ours}")


def _check_trees(
    trees: TreesOfRows,
    config: Any,
    heads: MedusaHeads | None,
    prompts: PromptTokens | None,
    ensemble: int,
    name: str,
) -> None:
    """Raise CheckpointError for trees that the proposer cannot fill or the context cannot hold."""
    most = table.num_distances if (table := _WEIGHTLESS.get(UNFORKED.get(name, name))) else 0
    ranks = config.vocab_size if table is None else table.num_ranks
    if heads is not None:
        most = heads.settings.medusa_num_heads
    elif prompts is not None:
        most = prompts.settings.num_prompts
    for num_rows in FAMILY_ROWS:
        states = trees(num_rows)
        if len(states) - 1 > most:
            raise CheckpointError(
                f"the candidate trees need predictions at {len(states) - 1} distances, and {name} "
                f"has {most}"
            )
        for tree in states:
            if max(tree.ranks) >= ranks:
                raise CheckpointError(
                    f"a candidate tree has rank {max(tree.ranks)}; {name} has {ranks} candidates "
                    "at a distance"
                )
            nodes = candidate_tree(
                tree, opens_child=True, ensemble=ensemble, child_prompts=len(states) - 1
            )
            if len(nodes.parents) > config.max_position_embeddings:
                raise CheckpointError(
                    f"a candidate tree of {len(nodes.parents)} tokens for {num_rows} rows is "
                    f"larger than the model's context of {config.max_position_embeddings}"
                )
