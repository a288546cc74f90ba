"""Write the files of Prometheus and Alertmanager: `python -m dashboards.prometheus`."""

from pathlib import Path
from typing import Annotated

import typer

from dashboards.prometheus.files import FOLDER, own_files, shipped_files, write
from dashboards.prometheus.settings import read_settings


def main(
    out: Annotated[Path, typer.Option(help="Output folder.")] = FOLDER,
    settings: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with `scraping`, `rules` and `notifying`; its fields are documented in "
            "dashboards/prometheus/settings.py. Default: the values of the committed files."
        ),
    ] = None,
) -> None:
    """Write the configuration and rules of Prometheus and Alertmanager."""
    if settings is None:
        files = shipped_files()
    else:
        own = read_settings(settings)
        files = own_files(own.scraping, own.rules, own.notifying)
    write(files, out)
    for path in files:
        typer.echo(out / path)


if __name__ == "__main__":
    typer.run(main)
