"""Charges of one request to its caller, from admission to the end of the answer."""

from http import HTTPStatus
from types import TracebackType
from typing import Self

from deployments.gateway.callers import Caller
from deployments.gateway.fair_queue import Ticket
from deployments.gateway.ledger import Ledger, Tally, usage_model
from deployments.gateway.rate_limits import Admission
from deployments.gateway.request_log import RequestRecord
from deployments.wire.response import ResponseEnd


class Bill:
    """Charges a request to its key's rate limits, budgets and account in the fair queue.

    A context manager: on exit it releases the request's slots, records its usage, and refunds the
    rates if no replica took the admitted request. A request refused for its content still
    counts towards the rates: checking it costs as much as admitting it.

    The prompt is charged by an estimate of its tokens until the replica reports the true number.
    If the client leaves before that, the estimate stands.
    """

    def __init__(
        self, caller: Caller, admission: Admission, ledger: Ledger, record: RequestRecord
    ) -> None:
        """`admission` is what `KeyRates.admit_request` returned.

        A line of a batch leaves half of the token rate to other requests.
        """
        self._caller = caller
        self._admission = admission
        self._ledger = ledger
        self._record = record
        self._is_admitted = False
        self._prompt_tokens = 0
        self._tally: Tally | None = None
        self._ticket: Ticket | None = None
        self.end: ResponseEnd | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        if self._record.sent_s is None and self._is_admitted:
            self.refund()
        if self._tally is not None:
            self._tally.close(self._record)

    def refund(self) -> None:
        """Refund what was charged to the rates."""
        if self._caller.rates is not None:
            self._caller.rates.refund(self._admission)

    async def admit(self, prompt_tokens: int) -> None:
        """Charge the estimated tokens of the prompt to rates and budgets.

        Raises RateLimitError or BudgetError if a rate or a budget is used up, and
        PromptTooLongError if the prompt exceeds the whole token rate.
        """
        key, rates, record = self._caller.key, self._caller.rates, self._record
        self._prompt_tokens = prompt_tokens
        if rates is not None:
            self._admission = (
                *self._admission,
                *await rates.admit_tokens(prompt_tokens, leaves_half=record.batch_id is not None),
            )
        self._is_admitted = True
        if key is not None:
            self._tally = self._ledger.begin(key, usage_model(record), prompt_tokens)

    def placed(self, ticket: Ticket) -> None:
        """Record the ticket for the request's slots at the model that answers."""
        record = self._record
        self._ticket = ticket
        record.queue_s = round(ticket.queued_s, 6)
        if self._tally is not None and record.fallback_of is not None:
            self._tally.answered_by(usage_model(record))

    @property
    def _slots(self) -> Ticket:
        assert self._ticket is not None, "only an admitted request is answered"
        return self._ticket

    def progress(self, num_tokens: int, prompt_tokens: int) -> None:
        """Charge newly generated tokens, and the prompt tokens counted so far."""
        # The count restarts on another replica, and comes in parts if there are several prompts.
        if prompt_tokens > (self._record.prompt_tokens or 0):
            self._record.prompt_tokens = prompt_tokens
            self._charge_prompt(prompt_tokens)
            self._slots.charge_prompt(prompt_tokens)
        if not num_tokens:
            return
        self._slots.charge(num_tokens)
        self._record.generated_tokens += num_tokens
        if self._tally is not None:
            self._tally.generated(num_tokens)
        self._use_tokens(num_tokens)

    def retried(self, *, continued: bool) -> None:
        """Record the loss of a replica."""
        self._record.retries += 1
        self._record.continued += continued

    def ended(self, end: ResponseEnd | None) -> None:
        """Charge the rest of the final cost, None if that is unknown."""
        record = self._record
        if record.found_no_replica:
            # As if it had never left the queue: `__exit__` refunds all of it.
            record.sent_s = None
            return
        status = record.status or 0
        if end is None and status >= HTTPStatus.BAD_REQUEST and not record.generated_tokens:
            if status < HTTPStatus.INTERNAL_SERVER_ERROR:
                end = ResponseEnd()  # Refused before it reached the engine.
            else:
                # Refund the prompt: the request was lost with its replica before any token.
                record.prompt_tokens = None
                self._charge_prompt(0)
        self.end = end
        if end is None:
            return
        # After the loss of a replica, the second answer may be shorter than the first.
        unpaid = max(0, end.generated_tokens - record.generated_tokens)
        self._slots.charge(unpaid)
        self._slots.charge_prompt(end.prompt_tokens)
        if self._tally is not None:
            self._tally.generated(unpaid)
        self._use_tokens(unpaid)
        self._charge_prompt(end.prompt_tokens)
        record.take_end(end)

    def _leave(self) -> None:
        """Release the slots at the replicas."""
        record, ticket = self._record, self._ticket
        if ticket is None:
            return
        if record.sent_s is None:
            ticket.give_up()
            return
        if record.prompt_tokens is None and self._prompt_tokens:
            record.prompt_tokens = self._prompt_tokens
        # A stream reports its tokens as they are generated, even if its client leaves.
        reported = record.stream and record.generated_tokens > 0
        ticket.leave(cost_is_known=reported or self.end is not None)

    def _charge_prompt(self, num_tokens: int) -> None:
        """Charge the prompt's tokens to rates and budgets, replacing the previous charge."""
        self._use_tokens(num_tokens - self._prompt_tokens)
        if self._tally is not None:
            self._tally.prompt(num_tokens)
        self._prompt_tokens = num_tokens

    def _use_tokens(self, num: int) -> None:
        if self._caller.rates is not None:
            self._caller.rates.use_tokens(num)
