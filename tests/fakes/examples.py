"""Numbers of examples of property tests."""

import os

ALL = "APAR_ALL_EXAMPLES"
"""Environment variable with which properties are tested on all of their examples."""


def num_examples(number: int) -> int:
    """Return a property's number of examples: all in `make test-slow`, else a quarter."""
    return number if os.environ.get(ALL) else max(10, number // 4)
