"""`python -m k8s`: write what is made of dashboards/, and check the overlays.

    python -m k8s [--crds FOLDER] [OVERLAY ...]

An OVERLAY is one of ours or a folder of yours. Custom resources are checked against their schemas
where the folder of their definitions is given.
"""

import argparse
import sys
from pathlib import Path

from k8s.checks import problems
from k8s.made import write
from k8s.objects import FOLDER, OVERLAYS, BuildError, build
from k8s.schemas import CustomSchemas


def main() -> int:
    """The number of problems."""
    parser = argparse.ArgumentParser(prog="python -m k8s", description=__doc__)
    parser.add_argument("overlays", nargs="*", default=OVERLAYS, metavar="OVERLAY")
    parser.add_argument("--crds", type=Path, help="Folder of custom resource definitions.")
    arguments = parser.parse_args()
    write()
    custom = None if arguments.crds is None else CustomSchemas(arguments.crds)
    number = 0
    for name in arguments.overlays:
        folder = FOLDER / "overlays" / name if name in OVERLAYS else Path(name)
        try:
            found = list(problems(build(folder), custom))
        except BuildError as error:
            found = [str(error)]
        number += len(found)
        print(f"{name}: {'in order' if not found else f'{len(found)} problems'}")
        for problem in found:
            print(f"  {problem}")
    return number


if __name__ == "__main__":
    sys.exit(min(main(), 1))
