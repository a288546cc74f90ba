"""Write the files of Prometheus and Alertmanager: `python -m dashboards.prometheus`."""

from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dashboards.prometheus.files import FOLDER, own_files, shipped_files, write
from dashboards.prometheus.settings import CLUSTER, NotifySettings, RuleSettings, ScrapeSettings


class Settings(BaseModel):
    """Content of a settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scraping: ScrapeSettings = Field(
        CLUSTER, description="Scrape targets, rule files and Alertmanagers."
    )
    rules: RuleSettings = Field(RuleSettings(), description="Thresholds of the alerts.")
    notifying: NotifySettings = Field(NotifySettings(), description="Receivers of alerts.")


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
        try:
            own = Settings.model_validate(yaml.safe_load(settings.read_text()) or {})
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise typer.BadParameter(f"{settings}: {error}") from error
        files = own_files(own.scraping, own.rules, own.notifying)
    write(files, out)
    for path in files:
        typer.echo(out / path)


if __name__ == "__main__":
    typer.run(main)
