from typing import Any

from deployments.request_terms import RequestTerms
from deployments.terms_in_body import write_terms


def test_a_key_reaches_the_engine_with_its_priority_and_its_cap() -> None:
    body: dict[str, Any] = {"prompt": "Hi", "priority": -9, "vllm_xargs": {"mine": 1}}

    assert write_terms(body, RequestTerms(key="alice", priority=2, key_max_threads=7))

    args = {"mine": 1, "apar_key": "alice", "apar_priority": 2, "apar_key_max_threads": 7}
    # The client's own priority stays: without being ours it means nothing to the engine.
    assert body == {"prompt": "Hi", "priority": -9, "vllm_xargs": args}


def test_nothing_is_written_for_a_caller_without_a_key() -> None:
    body: dict[str, Any] = {"prompt": "Hi"}

    assert not write_terms(body, RequestTerms())

    assert body == {"prompt": "Hi"}
