"""What a request will probably bring, learnt from what the last requests have brought.

By model alone: also to tell requests apart by their system prompt and length brought nothing in
the simulation (the replicas' loads differ by what they run, not by one request's error).
"""

from dataclasses import dataclass

from deployments.wire.answer import AnswerEnd
from deployments.wire.request import RequestHint

# Until requests have ended: answers of a chat model, about half of them forked.
PRIOR_GENERATED_TOKENS = 256.0
PRIOR_PATH_TOKENS = 128.0
# The last so many requests count, and the prior as much as so many.
WINDOW = 256
PRIOR_WEIGHT = 8.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected cost of a request.

    `threads` is the mean number alive while it runs, `steps` the length of its critical path,
    `generated_tokens` its thread steps, and `kv_tokens` what it holds in the KV cache at its end.
    """

    threads: float
    steps: float
    generated_tokens: float
    kv_tokens: float


@dataclass(slots=True)
class _Means:
    """Moving means over requests, for one choice of each."""

    weight: float = PRIOR_WEIGHT
    generated_tokens: float = PRIOR_GENERATED_TOKENS
    path_tokens: float = PRIOR_PATH_TOKENS

    def add(self, generated_tokens: float, path_tokens: float) -> None:
        self.weight = min(self.weight + 1.0, WINDOW)
        share = 1.0 / self.weight
        self.generated_tokens += share * (generated_tokens - self.generated_tokens)
        self.path_tokens += share * (path_tokens - self.path_tokens)


class Forecaster:
    """Learns from ended requests, apart by whether they may fork."""

    def __init__(self) -> None:
        unforked = _Means(path_tokens=PRIOR_GENERATED_TOKENS)
        self._means = {True: _Means(), False: unforked}

    def forecast(self, hint: RequestHint) -> Forecast:
        """What a request with this hint will probably bring."""
        means = self._means[hint.may_fork]
        generated, path = means.generated_tokens, means.path_tokens
        threads = max(1.0, generated / path)
        if hint.max_tokens is not None and generated > hint.max_tokens:
            generated = float(max(hint.max_tokens, 1))
            path = min(path, generated)
        choices = max(hint.num_choices, 1)
        generated *= choices
        return Forecast(choices * threads, path, generated, hint.prompt_tokens + generated)

    def learn(self, hint: RequestHint, end: AnswerEnd) -> None:
        """Count what a request brought; one that never ran teaches nothing."""
        if end.generated_tokens > 0 and end.critical_path_tokens > 0:
            generated = end.generated_tokens / max(hint.num_choices, 1)
            self._means[hint.may_fork].add(generated, end.critical_path_tokens)
