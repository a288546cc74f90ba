"""Settings of every test: nothing outside this machine is reachable, and cores are shared."""

import os

from cluster.local_ray import SERVE_FLAGS

# Read at import by the libraries concerned, so set before any test module is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
for name, value in SERVE_FLAGS.items():
    os.environ.setdefault(name, value)
