"""The answers to requests that the gateway does not let in."""

from apar_core.errors import CapacityError, RequestError
from deployments.error_responses import (
    ErrorAnswer,
    answer_for,
    body_timeout,
    body_too_large,
    prompt_too_long,
    rate_limited,
    unknown_key,
    unknown_model,
)
from deployments.keys import UnknownKeyError
from deployments.rate_limits import RateLimitError
from deployments.request_body import BodyTimeoutError, BodyTooLargeError, PromptTooLongError
from deployments.served_models import UnknownModelError


def refusal_for(error: RequestError | CapacityError) -> ErrorAnswer:
    """The answer for what stood in a request's way."""
    match error:
        case UnknownKeyError():
            return unknown_key(str(error))
        case RateLimitError():
            return rate_limited(str(error), error.kind, error.retry_after_s)
        case BodyTooLargeError():
            return body_too_large(str(error))
        case BodyTimeoutError():
            return body_timeout(str(error))
        case PromptTooLongError():
            return prompt_too_long(str(error), error.param)
        case UnknownModelError():
            return unknown_model(error.name)
        case _:
            return answer_for(error)
