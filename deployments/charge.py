"""What one request uses, charged to its key while it is generated."""

from deployments.answer_parts import AnswerEnd
from deployments.exchange import Exchange
from deployments.fair_queue import Ticket
from deployments.rate_limits import KeyRates


class Charge:
    """The watch on one request's answer: charges its tokens to the key's queue and rates.

    The prompt was charged to the rates by an estimate of its length, which the end puts right.
    """

    def __init__(
        self, ticket: Ticket, rates: KeyRates | None, prompt_tokens: int, exchange: Exchange
    ) -> None:
        self._ticket = ticket
        self._rates = rates
        self._prompt_tokens = prompt_tokens
        self._exchange = exchange
        self.end: AnswerEnd | None = None

    def progress(self, num_tokens: int) -> None:
        """Charge tokens that have been generated."""
        self._ticket.charge(num_tokens)
        self._exchange.record.generated_tokens += num_tokens
        if self._rates is not None:
            self._rates.use_tokens(num_tokens)

    def retried(self, *, continued: bool) -> None:
        """Note that a replica was lost."""
        record = self._exchange.record
        record.retries += 1
        record.continued += continued

    def ended(self, end: AnswerEnd | None) -> None:
        """Charge what has not been charged yet."""
        record = self._exchange.record
        if end is None and not record.generated_tokens and (record.status or 0) >= 400:
            end = AnswerEnd()  # Refused before it reached the engine.
        self.end = end
        if end is None:
            return
        # What was computed twice, after the loss of a replica, stays charged.
        unpaid = max(0, end.generated_tokens - record.generated_tokens)
        self._ticket.charge(unpaid)
        if self._rates is not None:
            self._rates.use_tokens(unpaid + end.prompt_tokens - self._prompt_tokens)
        record.take_end(end)
