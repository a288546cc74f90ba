"""Why the gateway refused a request, in the words of the metric `apar_requests_rejected_total`."""

from enum import StrEnum

from apar_core.errors import CapacityError, RequestError
from deployments.gateway.body import BodyTimeoutError, BodyTooLargeError, PromptTooLongError
from deployments.gateway.callers import UnknownKeyError
from deployments.gateway.fair_queue import QueueTimeoutError
from deployments.gateway.models import UnknownModelError
from deployments.gateway.rate_limits import RateLimitError


class Rejection(StrEnum):
    """What stood in a request's way; each refusal has one."""

    AUTHENTICATION = "authentication"
    KEY_LIMIT = "key_limit"
    OVERLOADED = "overloaded"
    QUEUE_TIMEOUT = "queue_timeout"
    BODY_TIMEOUT = "body_timeout"
    INVALID = "invalid"
    TOO_LARGE = "too_large"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_ROUTE = "unknown_route"
    NO_REPLICA = "no_replica"
    DRAINING = "draining"


def rejection_for(error: RequestError | CapacityError) -> Rejection:
    """The word for what the gateway raised before a replica saw the request."""
    match error:
        case UnknownKeyError():
            return Rejection.AUTHENTICATION
        case RateLimitError():
            return Rejection.KEY_LIMIT
        case BodyTimeoutError():
            return Rejection.BODY_TIMEOUT
        case BodyTooLargeError() | PromptTooLongError():
            return Rejection.TOO_LARGE
        case UnknownModelError():
            return Rejection.UNKNOWN_MODEL
        case QueueTimeoutError():
            return Rejection.QUEUE_TIMEOUT
        case CapacityError():
            return Rejection.OVERLOADED
        case _:
            return Rejection.INVALID
