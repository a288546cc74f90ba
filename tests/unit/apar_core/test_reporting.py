"""Report folders: self-contained pages, unrounded data, and valid figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

from apar_core.offline.evaluation.speed_report import SpeedRun, speed_report
from apar_core.reporting import Column, ReportTable, write_report
from tests.unit.apar_core.offline.evaluation.test_measurement import FORKED, measurement

TIMED = SpeedRun(
    "m & <co>", "mine", (FORKED, measurement()), (measurement(decoder="plain", text_tokens=12),)
)
UNTIMED = SpeedRun("m", "mine", (measurement(decode_s=None, timed_tokens=None),))


def test_a_table_shows_rounded_numbers_and_stores_exact_ones() -> None:
    table = ReportTable(
        "t", "Title", (Column("Task"), Column("Share", ".0%"), Column("N", "d")),
        (("A|B", 0.254, 3), ("Mean", None, 12)), "A note.",
    )  # fmt: skip

    assert table.as_markdown().splitlines() == [
        "### Title",
        "",
        "| Task | Share | N |",
        "| :-- | --: | --: |",
        "| A\\|B | 25% | 3 |",
        "| Mean | - | 12 |",
        "",
        "A note.",
    ]
    assert list(csv.reader(table.as_csv().splitlines())) == [
        ["Task", "Share", "N"],
        ["A|B", "0.254", "3"],
        ["Mean", "", "12"],
    ]
    assert '<tr class="mean"><td class="text">Mean</td>' in table.as_html()


def test_the_report_is_a_self_contained_page(tmp_path: Path) -> None:
    page = write_report(speed_report("A < B", {"Model": "x & y"}, [TIMED]), tmp_path)

    text = page.read_text()
    assert "A &lt; B" in text
    assert "m &amp; &lt;co&gt; on mine" in text
    assert text.count('src="data:image/png;base64,') == 2
    assert "http" not in text


def test_tables_figures_and_averages_are_also_files(tmp_path: Path) -> None:
    write_report(speed_report("T", {"Model": "x"}, [TIMED]), tmp_path)

    data = json.loads((tmp_path / "report.json").read_text())
    assert data["facts"] == {"Model": "x"}
    assert data["runs"][0]["answers"]["averages"]["all"]["num_answers"] == 2
    assert len(list((tmp_path / "tables").glob("*.csv"))) == len(data["tables"]) == 6
    assert (tmp_path / "figure4_speed.png").read_bytes().startswith(b"\x89PNG")
    figure = ElementTree.parse(tmp_path / "figure6_response_length.svg")
    texts = "".join(element.text or "" for element in figure.iter())
    assert "tokens of an answer" in texts
    markdown = (tmp_path / "report.md").read_text()
    assert "![figure4_speed](figure4_speed.png)" in markdown
    assert "Table 2: average attended tokens" in markdown


def test_without_times_there_is_no_speed_figure(tmp_path: Path) -> None:
    write_report(speed_report("T", {}, [UNTIMED]), tmp_path)

    assert not (tmp_path / "figure4_speed.png").exists()
    assert (tmp_path / "figure6_response_length.png").exists()
