"""Targets and training of Medusa heads."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from safetensors.torch import load_file

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.evaluation.own_answers import measure_and_write
from apar_core.offline.speculation.acceptance import read_table
from apar_core.offline.speculation.frozen_training import train_beside, train_tiny_beside
from apar_core.offline.speculation.medusa_heads import load_medusa_heads
from apar_core.offline.speculation.train_medusa import (
    HEAD_TARGETS,
    MEDUSA_HEADS,
    MedusaCollator,
    head_targets,
    initial_heads,
)
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, written_out
from apar_core.offline.training.pretrained import load_model, load_tokenizer
from apar_core.offline.training.recipe import MedusaRecipe
from apar_core.offline.training.tree_trainer import StepReport, TreeCollator
from tests.fakes.example_files import write_examples
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.training.random_trees import PAD_ID, TOKENS, encode, packed, trees


def test_a_small_tree_gives_the_targets_worked_out_by_hand() -> None:
    tree = packed("hg", chain([("a", ParagraphRecord("bc"))], closing="d"))
    a, b, c, d = (encode(letter)[0] for letter in "abcd")
    no, fork, end = IGNORED_TARGET, TOKENS.fork_id, TOKENS.end_id

    first, second = head_targets(tree, 2)

    # The row:      h    g     a    [Fork] [Child] b    c    end  d   end
    assert first == [no, fork, d,   end,   c,      end, no,  no,  no, no]  # fmt: skip
    assert second == [no, d,   end, no,    end,    no,  no,  no,  no, no]  # fmt: skip
    assert list(tree.targets[1:4]) == [a, fork, d]
    assert b in tree.targets


@settings(max_examples=num_examples(80), deadline=None)
@given(tree=trees)
def test_targets_follow_each_thread_and_are_never_child_tokens(
    tree: PackedTree,
) -> None:
    found = head_targets(tree, 2)

    for row in written_out(tree, TOKENS):
        learned = [i for i, target in enumerate(row.targets) if target != IGNORED_TARGET]
        path = tuple(row.token_ids)
        for head in (0, 1):
            for at in learned:
                ahead = at + 2 + head
                wanted = path[ahead] if ahead < len(path) else IGNORED_TARGET
                assert wanted in found[head]
    for targets in found:
        assert TOKENS.child_id not in targets
        assert len(targets) == len(tree.token_ids)


def test_a_batch_has_targets_of_each_head_but_not_for_padding() -> None:
    rows = [packed("a", ParagraphRecord("bcd")), packed("a", ParagraphRecord("b"))]

    batch = MedusaCollator(TreeCollator(PAD_ID), 2)(rows)

    assert batch[HEAD_TARGETS].shape == (2, 2, 5)
    assert batch[HEAD_TARGETS][:, 0, :].tolist() == head_targets(rows[0], 2)
    assert (batch[HEAD_TARGETS][:, 1, 3:] == IGNORED_TARGET).all()


RECIPE = MedusaRecipe(
    batch_size=4, micro_batch_size=2, num_steps=12, learning_rate=3e-3, dtype="float32",
    context_length=256, structured_share=1.0, validation_share=0.5, validate_every_steps=50,
    save_every_steps=50, log_every_steps=1,
)  # fmt: skip


def examples() -> list[ExampleRecord]:
    answer = chain([(f"{i}. Tune it:", ParagraphRecord(" play slowly.\n")) for i in range(1, 4)])
    return [
        ExampleRecord(
            "ordered_list", (ChatMessage("user", f"Tip {i}?"),), answer, example_id=str(i)
        )
        for i in range(8)
    ]


def test_heads_learn_while_the_model_is_frozen(tmp_path: Path) -> None:
    write_examples(tmp_path / "examples.jsonl", examples())
    reports: list[StepReport] = []
    before = load_file(checkpoint_path() / "model.safetensors")

    result = train_beside(
        MEDUSA_HEADS, str(checkpoint_path()), tmp_path / "examples.jsonl", tmp_path / "heads",
        RECIPE, measure=measure_and_write, on_step=reports.append,
    )  # fmt: skip

    heads = load_medusa_heads(tmp_path / "heads")
    assert heads.settings.medusa_num_heads == heads.settings.medusa_num_layers == 2
    assert next(heads.parameters()).dtype == torch.bfloat16
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert result.validation_loss is not None
    assert result.validation_loss < reports[0].loss
    assert result.table == read_table(tmp_path / "heads")
    assert result.table.num_distances == 2
    after = load_file(checkpoint_path() / "model.safetensors")
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_heads_start_as_copies_of_the_output_layer() -> None:
    model = load_model(str(checkpoint_path()), torch.float32, torch.device("cpu"))

    recipe = RECIPE.model_copy(update={"num_heads": 3, "num_layers": 1})
    heads = initial_heads(model, recipe)

    hidden = torch.randn(4, model.config.hidden_size)
    expected = model.get_output_embeddings()(hidden)
    assert torch.equal(heads(hidden), expected.expand(3, -1, -1))


def test_heads_of_the_embedded_model_are_trained(tmp_path: Path) -> None:
    settings = MEDUSA_HEADS.tiny_recipe()
    small = {"num_steps": 2, "batch_size": 2, "micro_batch_size": 2}
    recipe = settings.recipe.model_copy(update=small)
    settings = settings.model_copy(update={"recipe": recipe, "num_held_out": 2})

    table = train_tiny_beside(
        MEDUSA_HEADS, checkpoint_path(), tmp_path, settings, measure=measure_and_write
    )

    assert table == read_table(tmp_path)
    assert (
        load_medusa_heads(tmp_path).settings
        == load_medusa_heads(SHIPPED_HEADS["apar-tiny"]).settings
    )


def test_the_shipped_heads_are_small_and_fit_the_embedded_model() -> None:
    folder = SHIPPED_HEADS["apar-tiny"]

    heads = load_medusa_heads(folder)

    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < 6_000_000
    assert heads.settings.vocab_size == len(load_tokenizer(str(checkpoint_path())))
    assert heads.settings.hidden_size == 256
    assert heads.settings.medusa_num_heads == heads.settings.medusa_num_layers == 2
