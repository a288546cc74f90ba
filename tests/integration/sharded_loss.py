"""Compute loss and gradients of a model that FSDP2 shards over torchrun's processes.

Prints one line of JSON from the first process.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.training.packing import batch_trees
from tests.unit.apar_core.offline.training.random_trees import (
    PAD_ID,
    packed,
    random_model,
    tree_loss,
)


def main() -> None:
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    tree = packed("ab", chain([("abc", ParagraphRecord("bcde")), ("ab", ParagraphRecord("h"))]))
    batch = batch_trees([tree], PAD_ID)
    model = random_model(num_key_value_heads=2)
    plain = tree_loss(model, batch)
    plain.backward()
    head = model.lm_head.weight.grad
    assert head is not None
    expected = head.clone()
    model.zero_grad(set_to_none=True)

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = tree_loss(model, batch)
    loss.backward()
    gradient = model.lm_head.weight.grad
    assert isinstance(gradient, DTensor)
    difference = (gradient.full_tensor() - expected).abs().max().item()
    if dist.get_rank() == 0:
        print(json.dumps({"plain": plain.item(), "sharded": loss.item(), "gradient": difference}))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
