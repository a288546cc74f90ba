"""Sparse candidate trees from an acceptance table, and their size for the hardware.

Prompt tokens after a node predict the tokens after it, so they decide how deep the tree of the
next step can be. State k is a step that starts with k predictions, and each state has a tree of
its own: the *dynamic sparse tree*. Medusa heads predict after every node without inputs, which is
a static tree with an ensemble of 0.

`dynamic_tree` is the paper's construction for given numbers of candidates and prompt tokens. It
looks one step ahead. `optimal_tree` maximises the tokens per step in the long run for a number of
inputs, and chooses candidates and prompt tokens together.

Source: Parallel Prompt Decoding (arXiv 2405.18628), section 4, and its published trees. The paper
leaves open which probability of a candidate weighs its prompt tokens (proposition 4.3). Here, as in
the published trees, it is the probability that the candidate is the *last* one accepted.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf

import numpy as np
import numpy.typing as npt

from apar_core.offline.speculation.acceptance import AcceptanceTable

FAMILY_ROWS = (1, 2, 4, 8, 16)
"""Numbers of live rows that have a tree of their own."""

Floats = npt.NDArray[np.float64]

RankPath = tuple[int, ...]
"""Ranks from the last token to a candidate; () is the last token."""


@dataclass(frozen=True)
class SparseTree:
    """Nodes of a row in depth-first order, likeliest chain first; node 0 is the token chosen last.

    Node n continues `parents[n]` with candidate `ranks[n]` of distance `depths[n]`, and a chain of
    `prompts[n]` prompt tokens follows it. Accepting the likeliest chain moves nothing in the cache.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    prompts: tuple[int, ...]

    @classmethod
    def from_paths(cls, probabilities: Mapping[RankPath, float]) -> SparseTree:
        """Return the tree of these candidates without prompt tokens.

        `probabilities` has every candidate with the probability that it is accepted; with a
        candidate it must have all candidates before it. The root is added.
        """
        followers: dict[RankPath, list[RankPath]] = {}
        for path in probabilities:
            followers.setdefault(path[:-1], []).append(path)
        parents, depths, ranks = [0], [0], [0]

        def add_below(path: RankPath, node: int) -> None:
            likeliest = sorted(followers.get(path, ()), key=lambda p: (-probabilities[p], p))
            for follower in likeliest:
                parents.append(node)
                depths.append(len(follower))
                ranks.append(follower[-1])
                add_below(follower, len(parents) - 1)

        add_below((), 0)
        return cls(tuple(parents), tuple(depths), tuple(ranks), (0,) * len(parents))

    @cached_property
    def paths(self) -> tuple[RankPath, ...]:
        """Ranks from the root to each node."""
        found: list[RankPath] = [()]
        for node in range(1, len(self.parents)):
            found.append((*found[self.parents[node]], self.ranks[node]))
        return tuple(found)

    @property
    def num_candidates(self) -> int:
        """Nodes that predictions fill."""
        return len(self.parents) - 1

    @property
    def depth(self) -> int:
        """Candidates on the longest path; predictions that the tree needs."""
        return max(self.depths)

    @cached_property
    def num_prompts(self) -> int:
        """Prompt tokens after all nodes, each ensemble counted once."""
        return sum(self.prompts)

    def num_inputs(self, ensemble: int = 1) -> int:
        """Return the tokens of a pass: last token, candidates, and `ensemble` EPTs per prompt."""
        return len(self.parents) + ensemble * self.num_prompts

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Candidates after each node, likeliest first."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self.parents)):
            found[self.parents[node]].append(node)
        return tuple(map(tuple, found))

    def accepted(self, table: AcceptanceTable) -> tuple[float, ...]:
        """Return the probability of each node that it is accepted; 1 for the root."""
        found = [1.0]
        for node in range(1, len(self.parents)):
            probability = table.probabilities[self.depths[node] - 1][self.ranks[node]]
            found.append(found[self.parents[node]] * probability)
        return tuple(found)

    def accepted_last(self, table: AcceptanceTable) -> tuple[float, ...]:
        """Return the probability of each node that it is the last one accepted; the sum is 1."""
        accepted = self.accepted(table)
        return tuple(
            max(accepted[node] - sum(accepted[child] for child in self.children[node]), 0.0)
            for node in range(len(accepted))
        )

    def expected_length(self, table: AcceptanceTable) -> float:
        """Return f(T), the expected tokens of a step: accepted candidates and the model's own."""
        return sum(self.accepted(table))


@dataclass(frozen=True)
class DynamicTree:
    """Tree of each state: `trees[k]` is for a step that starts with k predictions, k = 0 to M.

    A thread moves from state to state as tokens are accepted: the next state is the number of
    prompt tokens after the last accepted node.
    """

    trees: tuple[SparseTree, ...]
    table: AcceptanceTable

    def __post_init__(self) -> None:
        most = self.table.num_distances
        if len(self.trees) != most + 1:
            raise ValueError(f"{most} distances need {most + 1} trees, not {len(self.trees)}")
        for state, tree in enumerate(self.trees):
            if tree.depth > state:
                raise ValueError(f"the tree of state {state} has depth {tree.depth}")
            if max(tree.prompts) > most:
                raise ValueError(
                    f"the tree of state {state} has {max(tree.prompts)} prompt tokens after a "
                    f"node, the table has {most} distances"
                )

    def num_inputs(self, ensemble: int = 1) -> int:
        """Return the tokens of the largest tree; the rows of a pass are padded to it."""
        return max(tree.num_inputs(ensemble) for tree in self.trees)

    @property
    def division(self) -> tuple[int, int]:
        """Candidates and prompt tokens of the largest tree, that of state M."""
        return self.trees[-1].num_candidates, self.trees[-1].num_prompts

    @cached_property
    def transitions(self) -> tuple[tuple[float, ...], ...]:
        """Probability of the next state (column) by state (row)."""
        rows = []
        for tree in self.trees:
            row = [0.0] * len(self.trees)
            for prompts, probability in zip(
                tree.prompts, tree.accepted_last(self.table), strict=True
            ):
                row[prompts] += probability
            rows.append(tuple(row))
        return tuple(rows)

    def steady_state(self) -> tuple[float, ...]:
        """Return the share of steps that a long thread spends in each state.

        Threads start in state M, which matters if states fall into groups that are never left.
        """
        return _long_run(self.transitions)[-1]

    def expected_length(self) -> float:
        """Return R(T), the expected tokens of a step in the long run (proposition 4.4)."""
        lengths = (tree.expected_length(self.table) for tree in self.trees)
        return sum(
            share * length for share, length in zip(self.steady_state(), lengths, strict=True)
        )


def _long_run(transitions: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Return the share of steps in each state (column) by first state (row).

    A chain that stays where it is in every second step has the same shares and no periods, so that
    its powers converge. Squaring takes 2^60 steps, enough for transitions of 1e-15.
    """
    power = (np.array(transitions) + np.eye(len(transitions))) / 2
    for _ in range(60):
        power = power @ power
        # Rounding errors would add up over the squarings.
        power /= power.sum(axis=1, keepdims=True)
    return tuple(tuple(row) for row in power.tolist())


def best_tree(table: AcceptanceTable, depth: int, num_candidates: int) -> SparseTree:
    """Return the tree of at most `num_candidates` that maximises the expected tokens of a step.

    A candidate adds the product of the probabilities on its path, and no candidate adds more than
    the one before it, so the best tree has the largest products (proposition 4.1). Candidates that
    are never right are left out. No prompt tokens are appended.
    """
    chosen: dict[RankPath, float] = {}
    # A path enters with its parent or with the better rank before it, so never too late.
    orders = [
        sorted(range(table.num_ranks), key=lambda rank: (-row[rank], rank))
        for row in table.probabilities
    ]
    heap: list[tuple[float, RankPath, float, int]] = []

    def offer(parent: RankPath, parent_probability: float, place: int) -> None:
        if len(parent) < depth and place < table.num_ranks:
            rank = orders[len(parent)][place]
            probability = parent_probability * table.probabilities[len(parent)][rank]
            if probability > 0:
                heapq.heappush(heap, (-probability, (*parent, rank), parent_probability, place))

    offer((), 1.0, 0)
    while heap and len(chosen) < num_candidates:
        negative, path, parent_probability, place = heapq.heappop(heap)
        chosen[path] = -negative
        offer(path[:-1], parent_probability, place + 1)
        offer(path, -negative, 0)
    return SparseTree.from_paths(chosen)


def prune_prompts(
    tree: SparseTree,
    table: AcceptanceTable,
    lengths: Sequence[float],
    num_prompts: int,
    *,
    as_published: bool = False,
) -> SparseTree:
    """Append M prompt tokens to every node, and remove the least useful down to `num_prompts`.

    `lengths[i]` is the expected tokens of a step in state i, 0 to M. Removing the i-th prompt token
    of a node loses `lengths[i] - lengths[i - 1]` if the node is the last one accepted (proposition
    4.3). If `lengths` grow less and less, as those of the best trees do, no other choice loses
    less. At least one prompt token stays. With `as_published`, the limits of the paper's published
    trees hold: every candidate keeps one, and the root has none if there is a candidate.
    """
    most = len(lengths) - 1
    prompts = [most] * len(tree.parents)
    least = 0
    if as_published and tree.num_candidates:
        prompts[0], least = 0, 1
    last = tree.accepted_last(table)

    def loss(node: int) -> tuple[float, int]:
        gained = lengths[prompts[node]] - lengths[prompts[node] - 1]
        # Equal losses: the node that comes last, so that the likeliest chain keeps its own.
        return last[node] * gained, -node

    heap = [loss(node) for node in range(len(prompts)) if prompts[node] > least]
    heapq.heapify(heap)
    excess = sum(prompts) - max(num_prompts, 1)
    while excess > 0 and heap:
        node = -heapq.heappop(heap)[1]
        prompts[node] -= 1
        excess -= 1
        if prompts[node] > least:
            heapq.heappush(heap, loss(node))
    return replace(tree, prompts=tuple(prompts))


def dynamic_tree(
    table: AcceptanceTable,
    num_candidates: int | Sequence[int],
    num_prompts: int | Sequence[int],
    *,
    as_published: bool = False,
) -> DynamicTree:
    """Return the paper's dynamic sparse tree: best candidates, then greedily pruned prompt tokens.

    Both numbers are limits, for all states or for each state 0 to M. A tree has fewer candidates
    if its depth and the ranks allow no more. For `as_published` see `prune_prompts`.
    """
    states = range(table.num_distances + 1)
    candidates = _per_state(num_candidates, len(states))
    prompts = _per_state(num_prompts, len(states))
    trees = [best_tree(table, state, candidates[state]) for state in states]
    lengths = [tree.expected_length(table) for tree in trees]
    return DynamicTree(
        tuple(
            prune_prompts(trees[state], table, lengths, prompts[state], as_published=as_published)
            for state in states
        ),
        table,
    )


def dynamic_tree_of_size(table: AcceptanceTable, num_inputs: int, ensemble: int = 1) -> DynamicTree:
    """Return the paper's dynamic tree of at most `num_inputs`, divided in the best way.

    All numbers of candidates are tried, with prompt tokens in the remaining inputs. `ensemble`
    counts the EPTs of a prompt token, at least 1.
    """
    # One prompt token at least stays in a tree; without room for it there are no guesses.
    trees = [optimal_tree(table, 1)]
    for candidates in range(num_inputs - ensemble):
        prompts = (num_inputs - 1 - candidates) // ensemble
        trees.append(dynamic_tree(table, candidates, prompts))
    return max(trees, key=DynamicTree.expected_length)


def _per_state(number: int | Sequence[int], num_states: int) -> Sequence[int]:
    return [number] * num_states if isinstance(number, int) else number


def static_tree(table: AcceptanceTable, num_candidates: int) -> DynamicTree:
    """Return the best trees with M prompt tokens after every node, a baseline of the paper.

    Steps then always start with M predictions, as they do with M Medusa heads. For those
    the prompt tokens stand for predictions without inputs: count them with an ensemble of 0.
    """
    most = table.num_distances
    trees = (best_tree(table, state, num_candidates) for state in range(most + 1))
    return DynamicTree(
        tuple(replace(tree, prompts=(most,) * len(tree.parents)) for tree in trees), table
    )


def random_tree(
    table: AcceptanceTable, num_candidates: int, num_prompts: int, seed: int
) -> DynamicTree:
    """Return trees of random candidates and random prompt tokens, a baseline of the paper."""
    generator = random.Random(seed)
    most = table.num_distances
    trees = []
    for state in range(most + 1):
        open_paths: list[RankPath] = [(rank,) for rank in range(table.num_ranks)] if state else []
        chosen: dict[RankPath, float] = {}
        while open_paths and len(chosen) < num_candidates:
            path = open_paths.pop(generator.randrange(len(open_paths)))
            chosen[path] = chosen.get(path[:-1], 1.0) * table.probabilities[len(path) - 1][path[-1]]
            if len(path) < state:
                open_paths += [(*path, rank) for rank in range(table.num_ranks)]
        tree = SparseTree.from_paths(chosen)
        places = [node for node in range(len(tree.parents)) for _ in range(most)]
        kept = generator.sample(places, min(num_prompts, len(places)))
        prompts = tuple(kept.count(node) for node in range(len(tree.parents)))
        trees.append(replace(tree, prompts=prompts))
    return DynamicTree(tuple(trees), table)


# Close enough to 1 that the best policy is the one of the long run.
_DISCOUNT = 1 - 1e-7
_MAX_ROUNDS = 50


@lru_cache(maxsize=512)
def optimal_tree(table: AcceptanceTable, num_inputs: int, ensemble: int = 1) -> DynamicTree:
    """Return the dynamic tree with the most tokens per step, R(T), of all with `num_inputs` a step.

    The states are those of a Markov decision process whose actions are trees, so policy iteration
    finds the best tree of every state at once. The paper fixes the candidates first, and weighs
    prompt tokens by the next step only. `ensemble` counts the EPTs of a prompt token; 0 stands for
    Medusa heads, which predict after every node.
    """
    if num_inputs < 1:
        raise ValueError(f"a tree has at least 1 input, the last token, not {num_inputs}")
    if ensemble == 0:
        return static_tree(table, num_inputs - 1)
    states = range(table.num_distances + 1)
    values = [0.0 for _ in states]
    best: DynamicTree | None = None
    for _ in range(_MAX_ROUNDS):
        trees = tuple(_improved(table, state, num_inputs, ensemble, values) for state in states)
        if best is not None and trees == best.trees:
            break
        best = DynamicTree(trees, table)
        lengths = [tree.expected_length(table) for tree in trees]
        kept = np.eye(len(trees)) - _DISCOUNT * np.array(best.transitions)
        totals = np.linalg.solve(kept, np.array(lengths))
        values = (_DISCOUNT * (totals - totals[-1])).tolist()
    assert best is not None
    return best


def _improved(
    table: AcceptanceTable, state: int, num_inputs: int, ensemble: int, values: Sequence[float]
) -> SparseTree:
    """Return the tree of a state that maximises its tokens plus the value of the next state.

    A node with i prompt tokens adds `values[i]` if it is the last one accepted. So an accepted
    child adds its token, and replaces its parent's value by its own. Nodes of a depth differ only
    by the probability that they are reached, so the best use of b inputs below a node is computed
    once per depth, i and b: a knapsack over its children.
    """
    orders = [
        sorted(
            ((rank, p) for rank, p in enumerate(row) if p > 0), key=lambda candidate: -candidate[1]
        )
        for row in table.probabilities[:state]
    ]
    # For each depth, [I, R + 1, B + 1]: gained by b inputs for the r likeliest children of a node
    # that has i prompt tokens.
    below: list[Floats] = [np.zeros((len(values), 1, num_inputs + 1))] * (state + 1)
    # For each depth, [B + 1]: gained by b inputs for an accepted node and all that is below it.
    nodes: list[Floats] = [np.zeros(0)] * (state + 1)

    def child_gains_IB(depth: int, probability: float) -> Floats:
        return probability * (1 - np.array(values)[:, None] + nodes[depth])

    for depth in range(state, -1, -1):
        if depth < state:
            stages = [np.zeros((len(values), num_inputs + 1))]
            for _, probability in orders[depth]:
                child_IB = child_gains_IB(depth + 1, probability)
                stages.append(_with_child(stages[-1], child_IB))
            below[depth] = np.stack(stages, axis=1)
        nodes[depth] = np.full(num_inputs + 1, -inf)
        for i, value in enumerate(values):
            own = 1 + ensemble * i
            gained_B = value + below[depth][i, -1, : max(num_inputs + 1 - own, 0)]
            nodes[depth][own:] = np.maximum(nodes[depth][own:], gained_B)

    accepted: dict[RankPath, float] = {}
    prompts: dict[RankPath, int] = {}

    def expand(path: RankPath, probability: float, num_inputs: int) -> None:
        depth = len(path)
        accepted[path] = probability

        def gain(i: int) -> float:
            spare = num_inputs - 1 - ensemble * i
            return values[i] + float(below[depth][i, -1, spare]) if spare >= 0 else -inf

        i = prompts[path] = max(range(len(values)), key=gain)
        spare = num_inputs - 1 - ensemble * i
        stages_RB = below[depth][i]
        for r in range(len(stages_RB) - 1, 0, -1):
            if stages_RB[r, spare] == stages_RB[r - 1, spare]:
                continue
            rank, chance = orders[depth][r - 1]
            child_B = child_gains_IB(depth + 1, chance)[i, 1 : spare + 1]
            given = 1 + int(np.argmax(stages_RB[r - 1, :spare][::-1] + child_B))
            expand((*path, rank), probability * chance, given)
            spare -= given

    expand((), 1.0, num_inputs)
    del accepted[()]
    tree = SparseTree.from_paths(accepted)
    return replace(tree, prompts=tuple(prompts[path] for path in tree.paths))


def _with_child(without_IB: Floats, child_IB: Floats) -> Floats:
    """Return the best gains of b inputs, shared between what was there and one more child."""
    most = without_IB.shape[1] - 1
    # A child takes 1 to b inputs; -inf stands for what is left of more than b.
    padded_IB = np.pad(without_IB, ((0, 0), (most, 0)), constant_values=-inf)
    rests_IBB = np.lib.stride_tricks.sliding_window_view(padded_IB, most + 1, axis=1)[:, :, ::-1]
    best_IB: Floats = (rests_IBB[:, :, 1:] + child_IB[:, None, 1:]).max(axis=2, initial=-inf)
    return np.maximum(without_IB, best_IB)


@dataclass(frozen=True, slots=True)
class SizedTree:
    """Tree of a size, and the speed predicted for it.

    `num_inputs` are the tokens of a row in a pass, `expected_length` its tokens per step (tau),
    `pass_s` the seconds of a pass with all rows.
    """

    tree: DynamicTree
    num_inputs: int
    expected_length: float
    pass_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one row."""
        return self.expected_length / self.pass_s


@dataclass(frozen=True)
class TreeFamily:
    """Trees by number of live rows: more rows leave less idle arithmetic for guesses.

    `rows` increase; `trees[i]` is meant for `rows[i]` live rows.
    """

    rows: tuple[int, ...]
    trees: tuple[DynamicTree, ...]

    @classmethod
    def of(cls, tree: DynamicTree) -> TreeFamily:
        """Return the family that has one tree for any number of rows."""
        return cls((1,), (tree,))

    def for_rows(self, rows: int) -> DynamicTree:
        """Return the tree of the smallest listed number that is not exceeded, else the last."""
        fitting = (tree for most, tree in zip(self.rows, self.trees, strict=True) if rows <= most)
        return next(fitting, self.trees[-1])


def best_size(
    table: AcceptanceTable,
    pass_s: Callable[[int], float],
    rows: int = 1,
    *,
    ensemble: int = 1,
    max_inputs: int = 64,
) -> SizedTree:
    """Return the tree that maximises tau(n) / L(rows * n) over n = 1 to `max_inputs`.

    `pass_s(tokens)` is the duration L of a pass over so many tokens. n = 1 is decoding without
    guesses. `ensemble` counts the EPTs of a prompt token; 0 stands for Medusa heads.
    """
    return max(
        size_curve(table, pass_s, rows, ensemble=ensemble, max_inputs=max_inputs),
        key=lambda sized: sized.tokens_per_s,
    )


def size_curve(
    table: AcceptanceTable,
    pass_s: Callable[[int], float],
    rows: int = 1,
    *,
    ensemble: int = 1,
    max_inputs: int = 64,
) -> tuple[SizedTree, ...]:
    """Return the best tree of each size with its predicted speed, smallest first."""
    curve = []
    for num_inputs in _sizes(max_inputs):
        tree = optimal_tree(table, num_inputs, ensemble)
        length = tree.expected_length()
        curve.append(SizedTree(tree, num_inputs, length, pass_s(rows * num_inputs)))
    return tuple(curve)


def _sizes(most: int) -> list[int]:
    """Return all sizes up to 16, then eight for each doubling."""
    return [n for n in range(1, most + 1) if n % (1 << max(n.bit_length() - 4, 0)) == 0]


def tree_family(
    table: AcceptanceTable,
    pass_s: Callable[[int], float],
    *,
    ensemble: int = 1,
    max_inputs: int = 64,
    rows: Iterable[int] = FAMILY_ROWS,
) -> TreeFamily:
    """Return the best size for each number of live rows."""
    numbers = tuple(rows)
    return TreeFamily(
        numbers,
        tuple(
            best_size(table, pass_s, number, ensemble=ensemble, max_inputs=max_inputs).tree
            for number in numbers
        ),
    )
