"""Everything that is checked of an overlay without a cluster."""

from collections.abc import Iterator

from k8s import connections, hardening, network, serving
from k8s.objects import Object
from k8s.schemas import CustomSchemas
from k8s.schemas import problems as schema_problems


def problems(objects: list[Object], custom: CustomSchemas | None) -> Iterator[str]:
    """What is wrong with an overlay's objects; schemas only where the custom ones are at hand."""
    if custom is not None:
        yield from schema_problems(objects, custom)
    for check in (connections, hardening, network, serving):
        yield from check.problems(objects)
