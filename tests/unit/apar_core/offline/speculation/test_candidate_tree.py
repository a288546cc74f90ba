from __future__ import annotations

import torch

from apar_core.offline.speculation.candidate_tree import (
    CandidateTree,
    TreeStack,
    candidate_tree,
    full_trees,
)
from apar_core.offline.speculation.sparse_tree import SparseTree

CPU = torch.device("cpu")
# Last token 0, candidates 1 and 2; two prompt tokens behind 0, one behind 1.
PROMPTED = SparseTree((0, 0, 1), (0, 1, 2), (0, 1, 0), (2, 1, 0))


def medusa_tree(*top_k: int, opens_child: bool = False) -> CandidateTree:
    return candidate_tree(full_trees(top_k)[-1], opens_child=opens_child, ensemble=0)


def test_nodes_are_depth_first_with_the_likeliest_chain_first() -> None:
    tree = medusa_tree(2, 2)

    assert tree.parents == (0, 0, 1, 1, 0, 4, 4)
    assert tree.depths == (0, 1, 2, 2, 1, 2, 2)
    assert tree.ranks == (0, 0, 0, 1, 1, 0, 1)
    assert (tree.num_candidates, tree.depth) == (6, 2)
    assert tree.children == ((1, 4), (2, 3), (), (), (5, 6), (), ())


def test_without_predictions_there_is_only_the_pending_token() -> None:
    assert [tree.parents for tree in full_trees((3, 1))[:-1]] == [(0,), (0,)]
    tree = medusa_tree()

    assert (tree.parents, tree.num_candidates, tree.children) == ((0,), 0, ((),))


def test_a_child_token_is_the_last_node_and_not_a_candidate() -> None:
    tree = medusa_tree(1, 1, opens_child=True)

    assert tree.parents == (0, 0, 1, 0)
    assert tree.depths == (0, 1, 2, 1)
    assert (tree.num_candidates, tree.child_node) == (2, 3)
    assert tree.children == ((1,), (2,), (), ())


def test_a_node_reads_only_the_prefix_and_its_own_path() -> None:
    visible = medusa_tree(2, 1, opens_child=True).visible().int().tolist()

    assert visible == [
        # prefix, nodes 0 to 5, unused slot
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 0],
    ]


def test_prompt_tokens_follow_the_candidates_and_the_child_token() -> None:
    tree = candidate_tree(PROMPTED, opens_child=True, child_prompts=2)

    assert tree.parents == (0, 0, 1, 0, 0, 4, 1, 3, 7)
    assert tree.depths == (0, 1, 2, 1, 1, 2, 2, 2, 3)
    assert tree.embeddings == (0, 0, 0, 0, 1, 2, 1, 1, 2)
    assert tree.prompts == (2, 1, 0, 2)
    assert tree.first_prompts == (4, 6, 7, 7)
    assert (tree.num_candidates, tree.num_chosen, tree.child_node, tree.depth) == (2, 4, 3, 2)
    assert tree.children == ((1,), (2,), (), ())


def test_a_member_of_an_ensemble_reads_the_same_member_at_the_distances_before_it() -> None:
    tree = candidate_tree(SparseTree((0,), (0,), (0,), (2,)), ensemble=2)

    # Distance 1 has nodes 1 and 2, distance 2 has nodes 3 and 4.
    assert tree.parents == (0, 0, 0, 1, 2)
    assert tree.embeddings == (0, 1, 2, 3, 4)
    assert tree.visible()[3].int().tolist() == [1, 1, 1, 0, 1, 0, 0]
    assert tree.visible()[4].int().tolist() == [1, 1, 0, 1, 0, 1, 0]


def test_each_row_of_a_stack_has_the_mask_of_its_own_tree() -> None:
    states = (SparseTree((0,), (0,), (0,), (1,)), PROMPTED)
    stack = TreeStack(states, CPU, child_prompts=2)
    starts = [3, 1]
    for numbers in ([0, 2], [3, 1], [2, 2]):
        trees = [stack.trees[number] for number in numbers]
        num_nodes = max(len(tree.parents) for tree in trees)
        num_slots = max(starts) + num_nodes

        mask = stack.mask(
            torch.tensor(numbers)[:, None], torch.tensor(starts)[:, None], num_nodes, num_slots
        )

        assert mask.shape == (2, 1, num_nodes, num_slots)
        for row, tree in enumerate(trees):
            size = len(tree.parents)
            expected = torch.zeros(size, num_slots, dtype=torch.bool)
            expected[:, : starts[row]] = True
            visible = tree.visible()[:, 1:-1]
            expected[:, starts[row] : starts[row] + size] = visible
            assert torch.equal(mask[row, 0, :size], expected)
            # A padding node reads the prefix only.
            assert mask[row, 0, size:].sum(-1).eq(starts[row]).all()


def test_a_stack_fills_candidates_by_distance_and_rank() -> None:
    stack = TreeStack((SparseTree((0,), (0,), (0,), (1,)), PROMPTED), CPU, child_prompts=2)
    proposals = torch.tensor([[[10, 11], [20, 21]], [[30, 31], [40, 41]]])

    tokens = stack.tokens(torch.tensor([3, 0]), 5, torch.tensor([[7], [8]]), 99, proposals)

    # Pending token, rank 1 at distance 1, rank 0 at distance 2, child token, prompt token.
    assert tokens.tolist() == [[7, 11, 20, 99, 99], [8, 99, 99, 99, 99]]
    assert stack.embeddings(torch.tensor([3, 0]), 5).tolist() == [[0, 0, 0, 0, 1], [0, 1, 0, 0, 0]]
    assert stack.depths(torch.tensor([3, 0]), 5).tolist() == [[0, 1, 2, 1, 1], [0, 1, 0, 0, 0]]
