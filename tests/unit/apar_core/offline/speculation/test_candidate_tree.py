from __future__ import annotations

from apar_core.offline.speculation.candidate_tree import candidate_tree


def test_nodes_are_depth_first_with_the_likeliest_chain_first() -> None:
    tree = candidate_tree((2, 2), opens_child=False)

    assert tree.parents == (0, 0, 1, 1, 0, 4, 4)
    assert tree.depths == (0, 1, 2, 2, 1, 2, 2)
    assert tree.ranks == (0, 0, 0, 1, 1, 0, 1)
    assert tree.num_candidates == 6
    assert tree.children == ((1, 4), (2, 3), (), (), (5, 6), (), ())


def test_without_heads_there_is_only_the_pending_token() -> None:
    tree = candidate_tree((), opens_child=False)

    assert (tree.parents, tree.num_candidates, tree.children) == ((0,), 0, ((),))


def test_a_child_token_is_the_last_node_and_not_a_candidate() -> None:
    tree = candidate_tree((1, 1), opens_child=True)

    assert tree.parents == (0, 0, 1, 0)
    assert tree.depths == (0, 1, 2, 1)
    assert tree.num_candidates == 2
    assert tree.children == ((1,), (2,), (), ())


def test_a_node_reads_only_the_prefix_and_its_own_path() -> None:
    visible = candidate_tree((2, 1), opens_child=True).visible().int().tolist()

    assert visible == [
        # prefix, nodes 0 to 5, unused slot
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 0],
    ]
