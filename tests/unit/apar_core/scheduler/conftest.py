from pathlib import Path

import pytest

from tests.fakes.scripted_engine import write_model_config


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder without weights, for a `ScriptedEngine`."""
    return write_model_config(tmp_path_factory.mktemp("model"))
