"""Steps of the engines: how many, how long, how much in each."""

from cluster.metrics import catalogue as of
from dashboards.grafana.panels import SECONDS, STEPS_PER_S, TOKENS, AnyPanel, Query, Text, lines
from dashboards.grafana.promql import rate, ratio


def panels() -> list[AnyPanel]:
    steps = rate(of.ENGINE_STEPS, "model")
    return [
        lines(
            Text("Steps", "Forward passes a second, over all replicas.", STEPS_PER_S),
            Query(steps, "{{model}}"),
        ),
        tokens_a_step("model"),
        time_per_step("model"),
    ]


def tokens_a_step(*by: str, span: int = 8, height: int = 8) -> AnyPanel:
    """How many threads share a step."""
    text = Text(
        "Tokens a step",
        "Generated tokens per forward pass: how many threads share one.",
        TOKENS,
        span,
        height,
    )
    tokens = ratio(rate(of.GENERATED_TOKENS, *by), rate(of.ENGINE_STEPS, *by))
    return lines(text, Query(tokens, "{{model}}" if by else "tokens"))


def time_per_step(*by: str, span: int = 8, height: int = 8) -> AnyPanel:
    """How long a forward pass takes."""
    text = Text("Time per step", "Mean time of a forward pass.", SECONDS, span, height)
    seconds = ratio(rate(of.ENGINE_BUSY_SECONDS, *by), rate(of.ENGINE_STEPS, *by))
    return lines(text, Query(seconds, "{{model}}" if by else "step"))
