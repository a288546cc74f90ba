"""What one request uses, charged to its key while it is generated."""

from deployments.gateway.exchange import Exchange
from deployments.gateway.fair_queue import Ticket
from deployments.gateway.rate_limits import Admission, KeyRates
from deployments.wire.answer import AnswerEnd


class Charge:
    """The watch on one request's answer: charges its tokens to the key's queue and rates.

    The prompt was charged to the rates by an estimate of its length, which the end puts right.
    """

    def __init__(
        self,
        ticket: Ticket,
        rates: KeyRates | None,
        admission: Admission,
        prompt_tokens: int,
        exchange: Exchange,
    ) -> None:
        self._ticket = ticket
        self._rates = rates
        self._admission = admission
        self._prompt_tokens = prompt_tokens
        self._exchange = exchange
        self.end: AnswerEnd | None = None

    def progress(self, num_tokens: int) -> None:
        """Charge tokens that have been generated."""
        self._ticket.charge(num_tokens)
        self._exchange.record.generated_tokens += num_tokens
        self._use_tokens(num_tokens)

    def retried(self, *, continued: bool) -> None:
        """Note that a replica was lost."""
        record = self._exchange.record
        record.retries += 1
        record.continued += continued

    def ended(self, end: AnswerEnd | None) -> None:
        """Charge what has not been charged yet."""
        record = self._exchange.record
        status = record.status or 0
        if end is None and status >= 400 and not record.generated_tokens:
            if status < 500:
                end = AnswerEnd()  # Refused before it reached the engine.
            else:
                # Lost with its replica: nobody pays for the prompt of an answer that never came.
                self._use_tokens(-self._prompt_tokens)
        self.end = end
        if end is None:
            return
        # After the loss of a replica the second answer may be shorter than the first was.
        unpaid = max(0, end.generated_tokens - record.generated_tokens)
        self._ticket.charge(unpaid)
        self._use_tokens(unpaid + end.prompt_tokens - self._prompt_tokens)
        record.take_end(end)

    def close(self) -> None:
        """Give the place at the replicas back; once, at the last."""
        record = self._exchange.record
        if record.sent_s is None:
            self._ticket.give_up()
            if self._rates is not None:
                self._rates.give_back(self._admission)
            return
        # A stream has told its tokens as they came, also one that its client has cut.
        told = record.stream and record.generated_tokens > 0
        self._ticket.leave(cost_is_known=told or self.end is not None)

    def _use_tokens(self, num: int) -> None:
        if self._rates is not None:
            self._rates.use_tokens(num)
