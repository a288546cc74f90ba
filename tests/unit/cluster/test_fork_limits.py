from typing import Any

import pytest
from pydantic import ValidationError

from apar_core.scheduler.fork_settings import ForkSettings
from cluster.config.model import ForkLimits


@pytest.mark.parametrize(
    "values",
    [
        {"enabled": False},
        {"max_threads": 3},
        {"max_forks": 5},
        {"max_replica_threads": 100},
        {"policy": "adaptive"},
        {"policy": "adaptive", "token_time_ms": 20.0},
    ],
)
def test_each_limit_reaches_the_engine(values: dict[str, Any]) -> None:
    limits = ForkLimits(**values)

    settings = ForkSettings.model_validate(limits.model_dump(exclude_none=True))

    assert settings.model_dump() == ForkSettings().model_dump() | values


def test_a_token_time_that_nothing_keeps_to_is_refused() -> None:
    with pytest.raises(ValidationError, match="has no effect without `policy: adaptive`"):
        ForkLimits(token_time_ms=20.0)
