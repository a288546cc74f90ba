"""`python -m dashboards.prometheus`: write the files, as shipped or from a settings file."""

from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dashboards.prometheus.files import FOLDER, own_files, shipped_files, write
from dashboards.prometheus.notifying import NotifySettings
from dashboards.prometheus.scraping import CLUSTER, ScrapeSettings
from dashboards.prometheus.settings import RuleSettings


class Settings(BaseModel):
    """A settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scraping: ScrapeSettings = Field(CLUSTER, description="Nodes, rules' and alerts' places.")
    rules: RuleSettings = Field(RuleSettings(), description="Thresholds of the alerts.")
    notifying: NotifySettings = Field(NotifySettings(), description="Who is told of alerts.")


def main(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = FOLDER,
    settings: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with `scraping`, `rules` and `notifying`; without it, the files are "
            "as shipped. Every field is described in dashboards/prometheus/."
        ),
    ] = None,
) -> None:
    """Write Prometheus' and Alertmanager's files."""
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
