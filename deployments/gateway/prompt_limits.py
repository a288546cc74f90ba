"""What a key may send: its prompt is measured once, and only where something is limited by it."""

from typing import Any

from apar_core.errors import RequestError
from deployments.gateway.body import check_prompt, prompt_chars
from deployments.gateway.callers import Caller


def checked_prompt(fields: dict[str, Any], caller: Caller, max_chars: int | None) -> dict[str, int]:
    """The prompt's characters by field, nothing where nothing is limited by them.

    `max_chars` is everyone's limit. Raises RequestError, over a limit PromptTooLongError.
    """
    key = caller.key
    if key is not None and fields.get("priority") is not None:
        raise RequestError("`priority` is that of the API key", param="priority")
    own = None if key is None else key.max_prompt_chars
    if own is None and max_chars is None and caller.rates is None:
        return {}
    chars = prompt_chars(fields)
    check_prompt(chars, max_chars, "the limit `limits.max_prompt_chars`")
    check_prompt(chars, own, "the limit `max_prompt_chars` of this key")
    return chars
