"""Console script `apar`: says what is missing or hidden before it runs the command line.

It lies here, and not in `cluster`, because another package of that name may hide ours.
"""

from __future__ import annotations

import sys

from apar_core.installation import hidden_packages, missing_extra


def main() -> None:
    """Run `apar`; exits with 1 if a package is hidden by another, or an extra is missing."""
    if hidden := hidden_packages():
        sys.exit("\n".join(f"apar: {each}" for each in hidden))
    try:
        from cluster.cli.main import app

        app()
    except ModuleNotFoundError as error:
        message = missing_extra(error)
        if message is None:
            raise
        sys.exit(f"apar: {message}")
