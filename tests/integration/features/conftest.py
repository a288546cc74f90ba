"""Checkpoints of the tests of vLLM's features."""

from pathlib import Path

import pytest

from tests.integration.features.tiny_adapter import Adapter, train_adapter
from tests.integration.random_checkpoint import write_encoder


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return train_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))
