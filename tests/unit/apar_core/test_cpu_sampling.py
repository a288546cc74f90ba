"""Top-p without sorting keeps what vLLM's keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apar_core import cpu_sampling
from apar_core.cpu_sampling import keep_top_k_top_p, repeat_for_drafts
from apar_core.vllm_names import apply_top_k_top_p_pytorch


@given(
    num_rows=st.integers(1, 5),
    vocabulary=st.integers(2, 3000),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0]),
    shares=st.lists(st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 1.0]), min_size=5, max_size=5),
    ks=st.none() | st.lists(st.integers(1, 3000), min_size=5, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_the_same_tokens_are_kept(
    num_rows: int,
    vocabulary: int,
    spread: float,
    shares: list[float],
    ks: list[int] | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Without ties: distances of at least 1e-3 around multiples of the spread.
    order = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(num_rows)])
    logits = order.float() * 1e-3 + spread * (order % 3)
    p = torch.tensor(shares[:num_rows])
    k = None if ks is None else torch.tensor([min(each, vocabulary) for each in ks[:num_rows]])
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync=True)

    found = keep_top_k_top_p(logits.clone(), k, p, allow_cpu_sync=True)

    probabilities = logits.softmax(dim=1)
    differing = expected.isinf() != found.isinf()
    # Sums of thousands of probabilities in another order.
    assert (probabilities * differing).sum(dim=1).max() < 1e-4
    assert torch.equal(found[~found.isinf()], logits[~found.isinf()])
    assert not found.isinf().all(dim=1).any()


@pytest.mark.parametrize("p", [None, torch.ones(0)])
def test_a_step_without_rows_has_nothing_to_keep(p: torch.Tensor | None) -> None:
    found = keep_top_k_top_p(torch.ones(0, 9), torch.ones(0, dtype=torch.int32), p)

    assert found.shape == (0, 9)


def test_drafts_have_the_values_of_their_threads() -> None:
    temperatures, ends = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([2, 2, 5])

    found = repeat_for_drafts(temperatures, ends, 5, replace_from=-1, replace_to=1)

    assert found.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]


def test_top_p_of_1_keeps_everything_beside_other_rows() -> None:
    logits = torch.full((2, 1000), -25.0)
    logits[:, :2] = torch.tensor([5.0, 4.0])

    found = keep_top_k_top_p(logits, None, torch.tensor([1.0, 0.9]))

    assert (~found.isinf()).sum(dim=1).tolist() == [1000, 2]


def test_tokens_that_are_equal_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([[2.0] + [1.0] * 9 + [0.0] * 90])

    found = keep_top_k_top_p(logits, None, torch.tensor([0.2]))

    assert (~found.isinf()).sum(dim=1).tolist() == [10]


def test_rows_with_few_likely_tokens_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((3, 5000), -20.0)
    logits[:, :3] = torch.tensor([3.0, 2.0, 1.0])
    sorts = []

    def counted(rows: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        sorts.append(len(rows))
        return rows

    monkeypatch.setattr(cpu_sampling, "apply_top_k_top_p_pytorch", counted)

    found = keep_top_k_top_p(logits, None, torch.tensor([0.5, 0.9, 1.0]))

    assert sorts == []
    assert (~found.isinf()).sum(dim=1).tolist() == [1, 2, 5000]
