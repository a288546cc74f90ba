"""Overlays and schemas, made once for all tests."""

import copy
import functools
import shutil
from pathlib import Path

import pytest

from k8s.objects import FOLDER, Object, build
from k8s.schemas import CustomSchemas

CRDS = Path(__file__).parents[4] / "shared" / "crds"
NEEDS_KUBECTL = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed"
)
NEEDS_CRDS = pytest.mark.skipif(
    not CRDS.is_dir(), reason=f"no custom resource definitions in {CRDS}"
)


def objects_of(overlay: str) -> list[Object]:
    """The objects of an overlay, for the caller alone."""
    return copy.deepcopy(_built(overlay))


@functools.cache
def _built(overlay: str) -> list[Object]:
    return build(FOLDER / "overlays" / overlay)


@functools.cache
def schemas() -> CustomSchemas:
    """Those of the custom resources."""
    return CustomSchemas(CRDS)
