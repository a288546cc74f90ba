"""Write the metrics reference: `python -m deployments.metrics [FILE]`."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.metrics.reference import as_markdown


def main(
    file: Annotated[Path, typer.Argument(help="Output file.")] = Path("dashboards/METRICS.md"),
) -> None:
    """Write the metrics reference."""
    file.write_text(as_markdown(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
