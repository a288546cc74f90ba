"""Writes what the gateway has decided about a request into vLLM's fields of its body."""

import hashlib
from typing import Any

from deployments.request_terms import RequestTerms

_SALT_CHARS = 32


def write_terms(body: dict[str, Any], terms: RequestTerms) -> bool:
    """Write the terms of a caller with a key, in place; returns whether anything was changed."""
    if terms.key is None:
        return False
    # Not vLLM's own field, which its header x-vllm-priority, open to every client, would overrule.
    args: dict[str, Any] = {"apar_key": terms.key, "apar_priority": terms.priority}
    if terms.key_max_threads is not None:
        args["apar_key_max_threads"] = terms.key_max_threads
    # Values of any other type are vLLM's to refuse, and so stay as they are.
    given_args = body.get("vllm_xargs")
    if given_args is None or isinstance(given_args, dict):
        body["vllm_xargs"] = {**(given_args or {}), **args}
    given_salt = body.get("cache_salt")
    if terms.cache_salt is not None and (given_salt is None or _is_text(given_salt)):
        body["cache_salt"] = salt_within(terms.cache_salt, given_salt)
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def salt_within(key_salt: str, given: str | None) -> str:
    """The salt of a request: the key's, or the one that its client gives, within the key's."""
    if given is None:
        return key_salt
    return hashlib.sha256(f"{key_salt}/{given}".encode()).hexdigest()[:_SALT_CHARS]
