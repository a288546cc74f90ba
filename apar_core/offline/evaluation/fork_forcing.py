"""Whether a model would fork at the places of recorded answers, read token by token.

The answer is given with its forks, as in training, and the model's first choice at each token is
compared with what stands there. So no earlier choice of the model has an effect on a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.packing import IGNORED_TARGET
from apar_core.offline.training.tree_forward import learned_logits
from apar_core.offline.training.tree_trainer import TreeCollator, tree_batch


class ForcedCounts(BaseModel):
    """First choices of the model within one recorded answer, or the sums of several.

    rule_places, forks: places where the rules fork, and those of them where the model forks.
    other_places, stray_forks: all other tokens of the answer, and those where the model forks.
    misplaced: tokens at which the model prefers a control token that the engine bans there: the
        child token anywhere, and the fork token right after a control token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    example: str
    kind: str
    answers: int = 1
    rule_places: int = 0
    forks: int = 0
    other_places: int = 0
    stray_forks: int = 0
    misplaced: int = 0

    def __add__(self, other: ForcedCounts) -> ForcedCounts:
        return self.model_copy(update={n: getattr(self, n) + getattr(other, n) for n in _COUNTS})


_COUNTS = ("answers", "rule_places", "forks", "other_places", "stray_forks", "misplaced")


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """What a model says of the N tokens of a recorded answer, control and end tokens included.

    logits_NV: at each token, after the one in `before_N`. is_whole: the answer was not cut.
    """

    tokens: TreeTokens
    before_N: Tensor
    targets_N: Tensor
    logits_NV: Tensor
    is_whole: bool

    def loss(self) -> tuple[float, int]:
        """Return the log-loss (nats) of the text, and its number of tokens."""
        tokens = self.tokens
        others = self.targets_N.new_tensor((tokens.fork_id, tokens.child_id, tokens.end_id))
        is_text_N = ~torch.isin(self.targets_N, others)
        logits_NV = self.logits_NV[is_text_N].float()
        loss = cross_entropy(logits_NV, self.targets_N[is_text_N], reduction="sum")
        return float(loss), int(is_text_N.sum())

    def counts(self, name: str, kind: str) -> ForcedCounts:
        """Count the first choices."""
        logits_NV, before_N = self.logits_NV.clone(), self.before_N
        fork_id, child_id = self.tokens.fork_id, self.tokens.child_id
        banned_N = (before_N == fork_id) | (before_N == child_id)
        first_N = logits_NV.argmax(-1)
        misplaced_N = (first_N == child_id) | (banned_N & (first_N == fork_id))
        # As the engine samples.
        logits_NV[:, child_id] = -torch.inf
        logits_NV[banned_N, fork_id] = -torch.inf
        forks_N = logits_NV.argmax(-1) == fork_id
        wanted_N = self.targets_N == fork_id
        return ForcedCounts(
            example=name,
            kind=kind,
            rule_places=int(wanted_N.sum()),
            forks=int((wanted_N & forks_N).sum()),
            other_places=int((~wanted_N).sum()),
            stray_forks=int((~wanted_N & forks_N).sum()),
            misplaced=int(misplaced_N.sum()),
        )


@dataclass(frozen=True, slots=True)
class ForkForcing:
    """A model with full attention, and the encoder of its recorded answers."""

    model: PreTrainedModel
    encoder: ExampleEncoder
    tokens: TreeTokens
    pad_id: int

    @torch.inference_mode()
    def read(self, example: ExampleRecord) -> ReadAnswer | None:
        """Let the model read an answer; None if its prompt alone is too long for the model."""
        packed = self.encoder.encode(example)
        if packed is None:
            return None
        tensors = TreeCollator.for_model(self.model, self.pad_id)([packed])
        batch = tree_batch({key: each.to(self.model.device) for key, each in tensors.items()})
        learned_BT = batch.targets_BT != IGNORED_TARGET
        return ReadAnswer(
            self.tokens,
            batch.token_ids_BT[learned_BT],
            batch.targets_BT[learned_BT],
            learned_logits(self.model, batch, self.model),
            is_whole=self.encoder.fitted(example) is not None,
        )


def sums_by(
    counts: Sequence[ForcedCounts], key: Callable[[ForcedCounts], str]
) -> dict[str, ForcedCounts]:
    """Add up the counts of answers by a key, in its order."""
    sums: dict[str, ForcedCounts] = {}
    for each in counts:
        name = key(each)
        sums[name] = sums[name] + each if name in sums else each
    return dict(sorted(sums.items()))
