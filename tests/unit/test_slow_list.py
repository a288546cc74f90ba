"""The list of slow tests."""

from pathlib import Path

from tests.slow_list import LIST, rows, runs, slow_modules, written

REPORT = """\
<testsuites><testsuite>
<testcase classname="tests.integration.test_joins" name="a" time="60"/>
<testcase classname="tests.integration.test_joins" name="b" time="30"><failure/></testcase>
<testcase classname="tests.integration.test_joins" name="c" time="0"><skipped/></testcase>
</testsuite></testsuites>
"""


def test_the_list_names_every_module_with_slow_tests() -> None:
    text = LIST.read_text(encoding="utf-8")

    assert len(slow_modules()) > 60
    assert written(rows(text)) == text, "run: python -m tests.slow_list"


def test_a_report_replaces_the_last_run_of_its_modules(tmp_path: Path) -> None:
    report = tmp_path / "slow.xml"
    report.write_text(REPORT)
    name, other = "integration/test_joins.py", "integration/test_convert.py"
    last = {name: "old | 1 | 1.0", other: "older | 2 | 2.0"}

    [(module, run)] = runs(report).items()
    text = written(last | {module: run.row("2026-11-28")})

    assert rows(text)[name] == "2026-11-28 | 1, 1 failed, 1 skipped | 1.5"
    assert rows(text)[other] == "older | 2 | 2.0"
