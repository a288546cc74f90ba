"""What Medusa heads learn of a packed tree."""

from __future__ import annotations

from hypothesis import given, settings

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.speculation.train_medusa import HEAD_TARGETS, MedusaCollator, head_targets
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, written_out
from apar_core.offline.training.tree_trainer import TreeCollator
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


@settings(max_examples=80, deadline=None)
@given(tree=trees)
def test_heads_look_ahead_along_each_thread_and_never_propose_a_child_token(
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


def test_a_batch_holds_the_targets_of_each_head_and_none_for_padding() -> None:
    rows = [packed("a", ParagraphRecord("bcd")), packed("a", ParagraphRecord("b"))]

    batch = MedusaCollator(TreeCollator(PAD_ID), 2)(rows)

    assert batch[HEAD_TARGETS].shape == (2, 2, 5)
    assert batch[HEAD_TARGETS][:, 0, :].tolist() == head_targets(rows[0], 2)
    assert (batch[HEAD_TARGETS][:, 1, 3:] == IGNORED_TARGET).all()
