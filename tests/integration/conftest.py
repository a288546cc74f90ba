"""One engine for all tests that need no settings of their own."""

from collections.abc import Iterator

import pytest

from apar_core.engine.replay import REPLAY
from tests.integration.engine_process import EngineProcess


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(
        logits_processors=[REPLAY],
        # The small model could write white space for ever.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    yield process
    process.close()
