"""Environment of all tests, and the order in which they run.

No test reaches another machine, and the tests share its cores.
"""

import gc
import os

import pytest

from cluster.local_ray import SERVE_FLAGS

# Some libraries read these at import, so they are set before any test module is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
for name, value in SERVE_FLAGS.items():
    os.environ.setdefault(name, value)

# Groups of tests that share a server or an engine run on one worker each, the longest first.
LONG_GROUPS = ("server", "engine")
# Modules whose tests need the shared server as it was started (-1), or change it.
PLACES = {"test_first_requests": -1, "test_rollout": 1, "test_continuation": 2, "test_shutdown": 3}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests, and let each module run on one worker of pytest-xdist."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection.

    transformers' Trainer collects garbage after each run, which takes seconds otherwise.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free everything when it ends: nanobind reports leaks otherwise."""
    gc.unfreeze()


def _place(item: pytest.Item) -> tuple[int, int]:
    marker = item.get_closest_marker("xdist_group")
    group = None if marker is None else marker.args[0]
    if group in LONG_GROUPS:
        return LONG_GROUPS.index(group), PLACES.get(item.path.stem, 0)
    return len(LONG_GROUPS) + ("integration" not in item.path.parts), 0
