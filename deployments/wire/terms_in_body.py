"""Writes what the gateway has decided about a request into vLLM's fields of its body."""

import hashlib
from typing import Any

from deployments.wire.request import RequestTerms

_SALT_CHARS = 32


def write_terms(body: dict[str, Any], terms: RequestTerms) -> bool:
    """Write the cache salt of a caller with a key, in place; returns whether it was written.

    Priority, key and cap are no fields of a body: they reach the engine as `KeyTerms`.
    """
    given_salt = body.get("cache_salt")
    # Values of any other type are vLLM's to refuse, and so stay as they are.
    if terms.cache_salt is None or not (given_salt is None or _is_text(given_salt)):
        return False
    body["cache_salt"] = salt_within(terms.cache_salt, given_salt)
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def salt_within(key_salt: str, given: str | None) -> str:
    """The salt of a request: the key's, or the one that its client gives, within the key's."""
    if given is None:
        return key_salt
    # JSON can carry lone surrogates.
    salt = f"{key_salt}/{given}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(salt).hexdigest()[:_SALT_CHARS]
