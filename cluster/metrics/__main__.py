"""`python -m cluster.metrics [FILE]` writes the page of all metrics; dashboards/METRICS.md here."""

import argparse
from pathlib import Path

from cluster.metrics.table import as_markdown

PAGE = Path("dashboards/METRICS.md")


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=PAGE)
    parser.parse_args().file.write_text(as_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
