"""Programs outside Python that some tests run."""

import os
import shutil

import pytest

PACKAGES = {
    "alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
    "chromium": "chromium",
    "kubectl": "kubectl",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "redis-server": "redis-server",
}
"""Debian package of each program; `.ci/install-tools` installs them all."""


def find(program: str) -> str | None:
    """Return the path of a program; Debian calls Alertmanager `prometheus-alertmanager`."""
    return shutil.which(program) or shutil.which(PACKAGES[program])


def needs(program: str) -> pytest.MarkDecorator:
    """Skip tests where the program is missing, except in continuous integration: fail there."""
    missing = find(program) is None and not os.environ.get("CI")
    reason = f"{program} is not installed (Debian: apt install {PACKAGES[program]})"
    return pytest.mark.skipif(missing, reason=reason)
