"""What a request will probably bring, learnt from what requests like it have brought."""

from collections import OrderedDict
from dataclasses import dataclass

from deployments.answer_parts import AnswerEnd
from deployments.routing.views import RequestHint

# Until requests have ended: answers of a chat model, about half of them forked.
PRIOR_GENERATED_TOKENS = 256.0
PRIOR_PATH_TOKENS = 128.0
# The last so many requests count; a few of a class weigh as much as what is known without it.
WINDOW = 256
SHRINKAGE = 8.0
MAX_CLASSES = 1024


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
    """Moving means over the requests of a class, for one choice."""

    weight: float = 0.0
    generated_tokens: float = 0.0
    path_tokens: float = 0.0

    def add(self, generated_tokens: float, path_tokens: float) -> None:
        self.weight = min(self.weight + 1.0, WINDOW)
        share = 1.0 / self.weight
        self.generated_tokens += share * (generated_tokens - self.generated_tokens)
        self.path_tokens += share * (path_tokens - self.path_tokens)


class Forecaster:
    """Learns from ended requests, by model, prompt length and first piece of the prompt.

    A class is trusted by how many of its requests are known; the wider class fills the rest.
    """

    def __init__(self) -> None:
        self._classes: OrderedDict[tuple[int, ...], _Means] = OrderedDict()

    def forecast(self, hint: RequestHint) -> Forecast:
        """What a request with this hint will probably bring."""
        generated, path = PRIOR_GENERATED_TOKENS, PRIOR_PATH_TOKENS
        for key in _class_keys(hint):
            means = self._classes.get(key)
            if means is not None:
                share = means.weight / (means.weight + SHRINKAGE)
                generated += share * (means.generated_tokens - generated)
                path += share * (means.path_tokens - path)
        if not hint.may_fork:
            path = generated = max(path, 1.0)
        threads = max(1.0, generated / max(path, 1.0))
        if hint.max_tokens is not None and generated > hint.max_tokens:
            generated = float(max(hint.max_tokens, 1))
            path = min(path, generated)
        choices = max(hint.num_choices, 1)
        generated *= choices
        return Forecast(choices * threads, path, generated, hint.prompt_tokens + generated)

    def learn(self, hint: RequestHint, end: AnswerEnd) -> None:
        """Count what a request brought; one that never ran teaches nothing."""
        if end.generated_tokens <= 0 or end.critical_path_tokens <= 0:
            return
        generated = end.generated_tokens / max(hint.num_choices, 1)
        for key in _class_keys(hint):
            means = self._classes.get(key)
            if means is None:
                means = self._classes[key] = _Means()
            self._classes.move_to_end(key)
            means.add(generated, end.critical_path_tokens)
        while len(self._classes) > MAX_CLASSES:
            self._classes.popitem(last=False)


def _class_keys(hint: RequestHint) -> tuple[tuple[int, ...], ...]:
    """The classes of a request, from the widest to the narrowest."""
    fork = int(hint.may_fork)
    length_class = (fork, hint.prompt_tokens.bit_length())
    if not hint.prefix_hashes:
        return (fork,), length_class
    return (fork,), length_class, (fork, -1, hint.prefix_hashes[0])
