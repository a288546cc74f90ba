"""The rule that decides about family attention, by results that were made up."""

from typing import Any

import pytest

from benchmarks.gpu.decision import decide

SHARES = (0.9, 0.3)


def results(
    forked: tuple[float, float] = (1.2, 1.1),
    sequential: tuple[float, float] = (1.0, 1.0),
    passes: float = 0.8,
    kernel: float = 0.9,
    **rivals: float,
) -> dict[str, Any]:
    """Return results in which one pass takes a second, and the others as long as given."""
    runs = {
        f"{method}, 350 requests, {share} of KV": ratio
        for method, ratios in (("eager", forked), ("sequential", sequential))
        for share, ratio in zip(SHARES, ratios, strict=True)
    }
    seconds = {"one pass": 1.0, "two passes": passes, "our kernel": kernel, **rivals}
    points = [{"prefix": prefix, "seconds": seconds} for prefix in (128, 256, 512, 1024)]
    return {
        "replay": {}, "families": {"speed_ups": runs}, "families_f32": {}, "bf16": {},
        "prefixes": {"points": points},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (results(), "Make it the default"),
        (results(forked=(1.2, 1.04)), "Keep it optional"),
        (results(sequential=(1.0, 0.98)), "Keep it optional"),
        (results(passes=1.04), "Keep it optional"),
        (results(forked=(1.02, 1.029)), "Remove it"),
        (results(forked=(0.9, 1.031)), "Keep it optional"),
    ],
)
def test_verdicts(given: dict[str, Any], verdict: str) -> None:
    assert decide(given).verdict == verdict


def test_nothing_is_decided_without_equality() -> None:
    given = results()
    del given["families_f32"]

    decision = decide(given)

    assert decision.verdict == "No decision"
    assert decision.reasons == ("not passed: families_f32",)


def test_the_better_backend_counts_with_all_its_figures() -> None:
    given = results(forked=(1.0, 1.0))
    runs = given["families"]["speed_ups"]
    given["triton_families"] = {"speed_ups": {name: 1.06 for name in runs}}

    assert decide(given).verdict == "Make it the default"
    assert "1.060 (eager, 350 requests, 0.9 of KV)" in decide(given).reasons[0]


def test_a_backend_without_runs_that_share_nothing_is_no_default() -> None:
    given = results(forked=(1.0, 1.0))
    given["triton_families"] = {"speed_ups": {"eager, 350 requests, 0.9 of KV": 2.0}}

    assert decide(given).verdict == "Keep it optional"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (results(), "remove the Triton kernel: at most 0.89 times as fast as two passes"),
        (results(kernel=0.7), "keep the Triton kernel: up to 1.14 times as fast as two passes"),
        (results(), "FlashInfer's cascade was not measured"),
        (results(FlashInfer=0.8), "FlashInfer's cascade is 1.00 times as fast as our best"),
        (results(FlashInfer=0.5), "replace our passes by FlashInfer's cascade, which is 1.60"),
    ],
)
def test_implementations_are_compared(given: dict[str, Any], reason: str) -> None:
    assert any(reason in each for each in decide(given).reasons)
