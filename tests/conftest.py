"""Environment of all tests, and the order in which they run.

No test but one of the slow ones reaches another machine, and the tests share its cores.
"""

import gc
import os
import signal
from typing import Any

import pytest
from hypothesis import settings

from deployments.serve_flags import SERVE_FLAGS
from tests.fakes.examples import num_examples

# Some libraries read these at import, so they are set before any test module is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
for name, value in SERVE_FLAGS.items():
    os.environ.setdefault(name, value)

# A background job of a shell ignores SIGINT, and would hand that down to the commands of tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By default an example fails after 0.2 s, which a busy machine cannot promise.
settings.register_profile("ours", deadline=None, max_examples=num_examples(100))
settings.load_profile("ours")

SERVING = "tests/integration/serving/"
OWN_SERVERS = f"{SERVING}test_apar_serve.py"
# Tests that share a server or an engine run on one worker of pytest-xdist, the longest group first.
GROUPS = {
    "server": (SERVING,),
    "engine": (
        "tests/integration/sampling/",
        "tests/integration/experiments/",
        "tests/integration/test_decoders.py",
        "tests/integration/test_equality.py",
    ),
}
# Modules whose tests need the shared server as it was started (-1), or change it.
PLACES = {"test_first_requests": -1, "test_rollout": 1, "test_continuation": 2, "test_shutdown": 3}


def group_of(nodeid: str) -> str:
    """Return the group that a test belongs to; by default, its module."""
    module = nodeid.partition("::")[0]
    if module != OWN_SERVERS:
        for group, prefixes in GROUPS.items():
            if module.startswith(prefixes):
                return group
    return module


def place_of(item: pytest.Item) -> tuple[int, int]:
    """Return where a test comes in the order of all tests."""
    group = group_of(item.nodeid)
    if group in GROUPS:
        return list(GROUPS).index(group), PLACES.get(item.path.stem, 0)
    return len(GROUPS) + ("integration" not in item.path.parts), 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: groups that take long first. Tests with the mark `ci` are slow ones."""
    items.sort(key=place_of)
    for item in items:
        if item.get_closest_marker("ci"):
            item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each group on one worker, in the order of the tests.

    pytest-xdist's `--dist loadgroup` would do it, but 3.8 ignores groups under pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # untyped
        """Distributes groups."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def exempt_from_collection() -> None:
    """Exempt all objects that are alive from garbage collection.

    With everything that is imported one takes half a second, and transformers' Trainer collects
    after each run.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Exempt what the test modules have imported."""
    exempt_from_collection()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempt what a module's tests have imported or cached."""
    if nextitem is not None and nextitem.path != item.path:
        exempt_from_collection()


def pytest_sessionfinish() -> None:
    """Let the interpreter free everything when it ends: nanobind reports leaks otherwise."""
    gc.unfreeze()
