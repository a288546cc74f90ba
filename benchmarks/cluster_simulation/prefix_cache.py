"""What a simulated replica keeps of prompts it has computed."""

from __future__ import annotations

from collections import OrderedDict

from deployments.routing.views import RequestHint


class PrefixCache:
    """Beginnings of prompts by their hash, the one used longest ago given up first.

    vLLM keeps them in blocks that are free for others. Here what they hold at most is the free
    memory at the moment of asking; sharing between running requests saves time, but no blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pieces: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0

    def hit_tokens(self, hint: RequestHint, free_tokens: int) -> int:
        """Tokens at the prompt's beginning that need not be computed, in whole blocks."""
        self._shrink(free_tokens)
        hit = 0
        for prefix, covered in zip(hint.prefix_hashes, hint.prefix_tokens, strict=True):
            if prefix not in self._pieces:
                break
            hit = covered
        return hit // self._block_size * self._block_size

    def add(self, hint: RequestHint) -> None:
        """Keep the pieces of a computed prompt."""
        before = 0
        for prefix, covered in zip(hint.prefix_hashes, hint.prefix_tokens, strict=True):
            if prefix not in self._pieces:
                self._pieces[prefix] = covered - before
                self._tokens += covered - before
            before = covered
        # Later pieces go first: without the ones before them they are worth nothing.
        for prefix in reversed(hint.prefix_hashes):
            self._pieces.move_to_end(prefix)

    def _shrink(self, free_tokens: int) -> None:
        while self._tokens > free_tokens and self._pieces:
            _, tokens = self._pieces.popitem(last=False)
            self._tokens -= tokens
