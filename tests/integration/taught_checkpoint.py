"""A small checkpoint that writes given texts: random weights with a solved output layer."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

LEAST_MARGIN = 2.0
"""Least distance of the best logit to the next one: no rounding error changes the choice."""
_LOGIT = 10.0
_RIDGE = 1e-2


def teach(checkpoint: Path, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Let a checkpoint continue each context greedily with the tokens behind it.

    `texts` are pairs of context and continuation. Hidden states of random weights differ wherever
    contexts do, so a linear map from them to the wanted tokens exists if the model is at least as
    wide as there are tokens. Raises AssertionError if it does not tell the tokens apart.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    states: list[torch.Tensor] = []
    wanted: list[int] = []
    with torch.inference_mode():
        for context, text in texts:
            ids = torch.tensor([[*context, *text]])
            states.append(model.model(ids).last_hidden_state[0, len(context) - 1 : -1])
            wanted += text
        states_ND = torch.cat(states).double()
        token_N = torch.tensor(wanted)[:, None]
        targets_NV = torch.zeros(len(wanted), model.config.vocab_size, dtype=torch.double)
        targets_NV.scatter_(1, token_N, _LOGIT)
        gram_NN = states_ND @ states_ND.T + _RIDGE * torch.eye(len(wanted))
        weight_VD = torch.linalg.solve(gram_NN, targets_NV).T @ states_ND
        model.lm_head.weight.copy_(weight_VD)
        logits_NV = states_ND.float() @ model.lm_head.weight.T
        others_N = logits_NV.scatter(1, token_N, -torch.inf).amax(1)
        margin = float((logits_NV.gather(1, token_N)[:, 0] - others_N).min())
    assert margin > LEAST_MARGIN, (
        f"{len(wanted)} tokens, width {model.config.hidden_size}: {margin}"
    )
    model.save_pretrained(checkpoint)
