"""Write `tests/slow.md`, the list of the slow tests with their last runs.

    make test-slow                                     # writes out/slow.xml
    python -m tests.slow_list out/slow.xml 2026-11-28

A module that did not run keeps its row. What a module's tests guard is the first line of its
docstring.
"""

import ast
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LIST = ROOT / "slow.md"
KINDS = {"error": "error", "failure": "failed", "skipped": "skipped"}
"""What a test that has not passed is called here, by its element in a JUnit report."""
HEAD = """\
# Slow tests

The tests that `make test` leaves out, what they guard, and their last run. `make test-slow` runs
all but `test_kills.py` (`make test-kills`). In modules with "CI", continuous integration
(`.ci/run`) runs the tests with the mark `ci`. Kept by `python -m tests.slow_list`.

| Module in `tests/` | Guards | CI | Last run | Passed | Minutes |
|---|---|---|---|---|---|
"""
ROW = re.compile(r"\| `(?P<module>[^`]+)` \|.*\| (?P<run>[^|]* \| [^|]* \| [^|]*) \|")


@dataclass
class Run:
    """Results of one module's tests."""

    outcomes: Counter[str]
    seconds: float = 0.0

    def row(self, when: str) -> str:
        """Return the last three cells of the module's row."""
        passed = str(self.outcomes["passed"])
        others = [f"{self.outcomes[kind]} {kind}" for kind in KINDS.values() if self.outcomes[kind]]
        said = ", ".join([passed, *others])
        return f"{when} | {said} | {self.seconds / 60:.1f}"


def slow_modules() -> dict[str, str]:
    """Map the modules with slow tests to their next two cells: what they guard, and "CI"."""
    found = {}
    for file in sorted(ROOT.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if re.search(r"pytest\.mark\.(slow|ci|kills)\b", text):
            docstring = ast.get_docstring(ast.parse(text)) or ""
            guards = docstring.partition("\n")[0].replace("|", r"\|")
            ci = "CI" if "pytest.mark.ci" in text else ""
            found[str(file.relative_to(ROOT))] = f"{guards} | {ci}"
    return found


def runs(report: Path) -> dict[str, Run]:
    """Return the results of each module in a JUnit report."""
    found: dict[str, Run] = {}
    for case in ET.parse(report).iter("testcase"):
        name = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
        run = found.setdefault(name, Run(Counter()))
        outcome = next((KINDS[child.tag] for child in case if child.tag in KINDS), "passed")
        run.outcomes[outcome] += 1
        run.seconds += float(case.get("time", 0))
    return found


def rows(text: str) -> dict[str, str]:
    """Return the last three cells of each row of a list, by module."""
    return {match["module"]: match["run"] for match in ROW.finditer(text)}


def written(last: dict[str, str]) -> str:
    """Return the list with these last runs."""
    lines = [
        f"| `{module}` | {cells} | {last.get(module, 'not recorded |  | ')} |\n"
        for module, cells in slow_modules().items()
    ]
    return HEAD + "".join(lines)


def main() -> None:
    """Take the results of a JUnit report into the list."""
    last = rows(LIST.read_text(encoding="utf-8")) if LIST.is_file() else {}
    if len(sys.argv) > 1:
        report, when = Path(sys.argv[1]), sys.argv[2]
        last |= {module: run.row(when) for module, run in runs(report).items()}
    LIST.write_text(written(last), encoding="utf-8")


if __name__ == "__main__":
    main()
