"""The rule that decides about family attention, by results that were made up."""

from typing import Any

import pytest

from benchmarks.gpu.decision import decide

SHARES = (0.9, 0.3)
Pair = tuple[float, float]


def runs(forked: Pair, sequential: Pair, spread: float = 0.0) -> dict[str, Any]:
    speed_ups = {
        f"{method}, 350 requests, {share} of KV": ratio
        for method, ratios in (("eager", forked), ("sequential", sequential))
        for share, ratio in zip(SHARES, ratios, strict=True)
    }
    return {"speed_ups": speed_ups, "spread": spread}


def results(
    forked: Pair = (1.2, 1.1),
    sequential: Pair = (1.0, 1.0),
    passes: Pair = (0.8, 0.7),
    kernel: Pair = (0.9, 0.9),
    flashinfer: Pair | None = None,
    spread: float = 0.0,
) -> dict[str, Any]:
    """Return results in which one pass takes a second, and the others as long as given.

    The pairs are for prefixes of 128 and of 1,024 tokens.
    """
    points = []
    for index, prefix in enumerate((128, 1024)):
        seconds = {"one pass": 1.0, "two passes": passes[index], "our kernel": kernel[index]}
        if flashinfer is not None:
            seconds["FlashInfer"] = flashinfer[index]
        points.append({"prefix": prefix, "seconds": seconds})
    return {
        "engine": {"arguments": {"attention_backend": "FLASH_ATTN"}}, "replay": {},
        "families": runs(forked, sequential, spread), "families_f32": {}, "bf16": {},
        "prefixes": {"points": points},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (results(), "Make it the default"),
        (results(forked=(1.2, 1.04)), "Keep it optional"),
        (results(sequential=(1.0, 0.98)), "Keep it optional"),
        (results(passes=(1.04, 0.5)), "Keep it optional"),
        (results(forked=(1.02, 1.029)), "Remove it"),
        (results(forked=(0.9, 1.031)), "Keep it optional"),
        # What lies within the spread of equal runs decides nothing.
        (results(forked=(1.2, 1.06), spread=0.02), "Keep it optional"),
        (results(forked=(1.02, 1.02), spread=0.02), "Keep it optional"),
        (results(forked=(1.2, 1.08), spread=0.02), "Make it the default"),
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


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_backend": "TRITON_ATTN"},
        {"attention_backend": "FLASH_ATTN", "compilation_config": {"mode": 0}},
    ],
)
def test_nothing_is_decided_against_a_baseline_that_users_do_not_have(
    arguments: dict[str, Any],
) -> None:
    given = results()
    given["engine"]["arguments"] = arguments

    assert decide(given).verdict == "No decision"


def test_each_backend_is_judged_by_its_own_figures() -> None:
    """Two passes gain nothing; the kernel gains, but is slow where prefixes are short."""
    given = results(forked=(1.0, 1.0), passes=(0.8, 0.8), kernel=(1.2, 0.5))
    given["triton_families"] = runs((1.2, 1.2), (1.0, 1.0))

    decision = decide(given)

    assert decision.verdict == "Keep it optional"
    assert "two passes: remove it" in decision.reasons
    assert "our kernel: keep it optional" in decision.reasons


def test_one_backend_that_is_good_enough_is_enough() -> None:
    given = results()
    given["triton_families"] = runs((1.3, 1.0), (1.0, 1.0))

    assert decide(given).verdict == "Make it the default"


def test_a_backend_without_runs_that_share_nothing_is_no_default() -> None:
    given = results(forked=(1.0, 1.0))
    given["triton_families"] = {"speed_ups": {"eager, 0.9 of KV": 2.0}, "spread": 0.0}

    assert decide(given).verdict == "Keep it optional"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (results(), "remove the Triton kernel: at most 0.89 times as fast as two passes"),
        (results(kernel=(0.9, 0.6)), "keep the Triton kernel: up to 1.17 times as fast"),
        (results(), "FlashInfer's cascade was not measured"),
        # Only prefixes from 256 tokens count.
        (results(flashinfer=(0.1, 0.7)), "FlashInfer's cascade is 1.00 times as fast as our best"),
        (
            results(flashinfer=(2.0, 0.5)),
            "replace our passes by FlashInfer's cascade, which is 1.4",
        ),
    ],
)
def test_implementations_are_compared(given: dict[str, Any], reason: str) -> None:
    assert any(reason in each for each in decide(given).reasons)
