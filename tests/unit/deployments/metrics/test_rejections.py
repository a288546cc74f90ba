"""Each refusal of the gateway has one reason."""

import inspect
from collections.abc import Iterator

import pytest

from apar_core.errors import CapacityError, RequestError
from cluster.metrics import catalogue
from deployments.gateway import body, fair_queue, keys, models, rate_limits
from deployments.gateway.body import BodyTimeoutError, BodyTooLargeError, PromptTooLongError
from deployments.gateway.callers import UnknownKeyError
from deployments.gateway.fair_queue import QueueTimeoutError
from deployments.gateway.models import UnknownModelError
from deployments.gateway.rate_limits import RateLimitError
from deployments.metrics.rejections import Rejection, rejection_for


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnknownKeyError("no"), Rejection.AUTHENTICATION),
        (RateLimitError("no", kind="tokens", retry_after_s=1), Rejection.KEY_LIMIT),
        (BodyTimeoutError("no"), Rejection.BODY_TIMEOUT),
        (BodyTooLargeError("no"), Rejection.TOO_LARGE),
        (PromptTooLongError("no"), Rejection.TOO_LARGE),
        (UnknownModelError("m"), Rejection.UNKNOWN_MODEL),
        (QueueTimeoutError("no"), Rejection.QUEUE_TIMEOUT),
        (CapacityError("no"), Rejection.OVERLOADED),
        (RequestError("no"), Rejection.INVALID),
    ],
)
def test_each_error_has_its_reason(error: RequestError | CapacityError, reason: Rejection) -> None:
    assert rejection_for(error) is reason


def test_no_kind_of_refusal_is_left_to_the_general_reasons() -> None:
    def kinds() -> Iterator[type[RequestError | CapacityError]]:
        for module in (fair_queue, keys, rate_limits, body, models):
            for _, kind in inspect.getmembers(module, inspect.isclass):
                is_own = kind.__module__ == module.__name__
                if is_own and issubclass(kind, RequestError | CapacityError):
                    yield kind

    found = list(kinds())

    assert len(found) == 7
    for kind in found:
        reason = rejection_for(kind.__new__(kind))
        assert reason not in (Rejection.INVALID, Rejection.OVERLOADED), kind


def test_the_catalogue_names_every_reason() -> None:
    described = catalogue.REQUESTS_REJECTED.labels["reason"]

    for reason in Rejection:
        assert reason.value in described
