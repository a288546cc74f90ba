"""JSON files of the dashboards, as Grafana imports them."""

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.grafana.forks import forks
from dashboards.grafana.overview import overview

FOLDER = Path(__file__).with_name("json")


def dashboards() -> dict[str, str]:
    """Map the uid of each dashboard, which is also its file name, to its JSON text."""
    return {
        board.uid: json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for board in (overview(), forks())
    }


def write(folder: Path = FOLDER) -> None:
    """Write one file per dashboard and remove files of deleted dashboards."""
    folder.mkdir(exist_ok=True)
    texts = dashboards()
    for file in folder.glob("*.json"):
        if file.stem not in texts:
            file.unlink()
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text)
