from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from apar_core.offline.decoders.interface import TokenChoice
from apar_core.offline.decoders.token_chooser import (
    ChosenTokens,
    TypicalAcceptance,
    accepted_path,
    choose_tokens,
)
from apar_core.offline.speculation.candidate_tree import CandidateTree, candidate_tree, full_trees

NO = -math.inf


def full_tree(*top_k: int, opens_child: bool = False) -> CandidateTree:
    return candidate_tree(full_trees(top_k)[-1], opens_child=opens_child, ensemble=0)


# 0 -> 1 -> (2, 3), 0 -> 4 -> (5, 6)
BINARY = full_tree(2, 2)


def choose(
    probabilities_QV: list[list[float]],
    tokens: list[int],
    choice: TokenChoice,
    top_k: tuple[int, ...] = (1,),
    uniform: float = 0.5,
    acceptance: TypicalAcceptance | None = None,
) -> ChosenTokens:
    logits_RQV: Tensor = torch.tensor([probabilities_QV]).log()
    uniforms = None if choice.temperature == 0 else [[uniform] * len(tokens)]
    return choose_tokens(
        logits_RQV,
        torch.tensor([tokens]),
        [full_tree(*top_k)],
        choice,
        acceptance or TypicalAcceptance(),
        uniforms,
    )


def accepts(distribution: list[float], candidate: int, temperature: float = 1.0) -> bool:
    chosen = choose([distribution, distribution], [0, candidate], TokenChoice.sampled(temperature))
    assert chosen.accepted is not None
    return bool(chosen.accepted[0][1])


def test_the_default_thresholds_are_those_of_medusa() -> None:
    assert TypicalAcceptance() == TypicalAcceptance(epsilon=0.09, delta=0.3)
    assert TypicalAcceptance().delta == pytest.approx(math.sqrt(TypicalAcceptance().epsilon))


def test_at_low_entropy_candidates_are_accepted_above_epsilon() -> None:
    # exp(-H) is 0.72 and 0.76, so 0.3 * exp(-H) is above epsilon, which bounds: 0.09.
    assert accepts([0.9, 0.1], 1)
    assert not accepts([0.92, 0.08], 1)


def test_at_high_entropy_candidates_are_accepted_above_delta_times_exp_entropy() -> None:
    # Uniform over 10 tokens: exp(-H) = 0.1, the bound is 0.03 and 0.1 is above it.
    assert accepts([0.1] * 10, 3)
    # Nine tokens of 0.108 and one of 0.028: exp(-H) = 0.1043, so the bound is 0.0313.
    assert not accepts([0.108] * 9 + [0.028], 9)
    # 0.035 is below epsilon, but above 0.3 * 0.1031.
    assert accepts([0.965 / 9] * 9 + [0.035], 9)


def test_acceptance_uses_the_temperature_of_the_request() -> None:
    # At temperature 2 the odds of 12:1 become 3.5:1, at 0.5 they become 144:1.
    assert not accepts([12 / 13, 1 / 13], 1)
    assert accepts([12 / 13, 1 / 13], 1, temperature=2.0)
    assert not accepts([0.88, 0.12], 1, temperature=0.5)


def test_thresholds_can_be_changed() -> None:
    distribution = [[0.9, 0.1]] * 2
    for epsilon, delta, accepted in ((0.11, 0.5, False), (0.5, 0.13, True), (0.5, 0.15, False)):
        chosen = choose(
            distribution,
            [0, 1],
            TokenChoice.sampled(1.0),
            acceptance=TypicalAcceptance(epsilon, delta),
        )

        # exp(-H) is 0.7225, so a delta of 0.13 gives 0.094 and one of 0.15 gives 0.108.
        assert chosen.accepted == [[True, accepted]]


@pytest.mark.parametrize(
    ("scores", "path"),
    [
        # Nothing but the first token, which is always accepted.
        ([0, NO, NO, NO, NO, NO, NO], [0]),
        # Candidates after a rejected one do not count.
        ([0, NO, -0.1, NO, NO, NO, NO], [0]),
        # The path of the second candidate is longer than that of the likelier first.
        ([0, -0.1, NO, NO, -2.0, NO, -2.0], [0, 4, 6]),
        # Two paths of two candidates: -0.5 - 1.5 is more than -0.1 - 2.0.
        ([0, -0.1, -2.0, -3.0, -0.5, -1.5, NO], [0, 4, 5]),
        ([0, -0.1, -2.0, -1.8, -0.5, -1.5, NO], [0, 1, 3]),
    ],
)
def test_the_longest_accepted_path_is_kept_and_ties_go_to_the_likeliest(
    scores: list[float], path: list[int]
) -> None:
    assert accepted_path(scores, BINARY) == [node in path for node in range(7)]


def test_a_child_token_is_not_a_candidate() -> None:
    tree = full_tree(1, opens_child=True)

    assert accepted_path([0, NO, -0.1], tree) == [True, False, False]


def test_a_row_of_logits_gives_the_path_of_its_longest_accepted_candidates() -> None:
    first, after_2 = [0.5, 0.1, 0.4], [0.1, 0.8, 0.1]
    nothing = [0.0, 0.0, 1.0]
    chosen = choose(
        # Nodes 0 -> 1 (token 0) -> 2, 3 and 0 -> 4 (token 2) -> 5, 6.
        [first, nothing, nothing, nothing, after_2, nothing, nothing],
        [0, 0, 0, 1, 2, 1, 0],
        TokenChoice.sampled(1.0),
        top_k=(2, 2),
    )

    assert chosen.accepted == [[True, False, False, False, True, True, False]]
    assert chosen.given == [[0, 0, 0, 1, 2, 1, 0]]


def test_a_banned_token_is_never_accepted_nor_drawn() -> None:
    banned = [0.0, 1.0]

    assert not accepts(banned, 0)
    for uniform in (0.0, 0.5, 0.999999):
        assert choose([banned] * 2, [0, 0], TokenChoice.sampled(1.0), uniform=uniform).chosen == [
            [1, 1]
        ]


def test_greedy_choice_takes_the_likeliest_token() -> None:
    chosen = choose([[0.3, 0.7], [0.6, 0.4]], [0, 1], TokenChoice.greedy())

    assert chosen == ChosenTokens([[1, 0]], [[0, 1]], None)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 2), (0.49, 2), (0.51, 0), (0.79, 0), (0.81, 1), (0.9999999, 1)]
)
def test_a_random_number_selects_from_the_likeliest_down(uniform: float, token: int) -> None:
    distribution = [0.3, 0.2, 0.5]

    chosen = choose([distribution] * 2, [0, 0], TokenChoice.sampled(1.0), uniform=uniform)

    assert chosen.chosen[0][0] == token


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    distribution = [0.3, 0.2, 0.5]

    def drawn(top_p: float) -> set[int]:
        return {
            choose(
                [distribution] * 2, [0, 0], TokenChoice.sampled(1.0, top_p), uniform=n / 100
            ).chosen[0][0]
            for n in range(100)
        }

    assert drawn(0.01) == {2}
    assert drawn(0.6) == {0, 2}
    assert drawn(1.0) == {0, 1, 2}


def test_a_temperature_near_zero_draws_the_likeliest_token() -> None:
    for temperature in (1e-3, 1e-30):
        chosen = choose([[0.3, 0.7]] * 2, [0, 0], TokenChoice.sampled(temperature), uniform=0.999)

        assert chosen.chosen == [[1, 1]]


def test_rows_with_different_trees_are_accepted_by_their_own_tree() -> None:
    likely, other = [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]
    logits: Tensor = torch.tensor([[likely, other, likely], [likely, likely, likely]]).log()

    chosen = choose_tokens(
        logits,
        torch.tensor([[0, 1, 2], [0, 1, 0]]),
        # A chain, and a single candidate with a padding node.
        [full_tree(1, 1), full_tree(1)],
        TokenChoice.sampled(1.0),
        TypicalAcceptance(),
        [[0.5] * 3] * 2,
    )

    assert chosen.accepted == [[True, True, True], [True, True]]
