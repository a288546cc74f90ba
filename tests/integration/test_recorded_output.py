"""Output that the documentation shows, against what the commands print now.

The answer of `apar generate` in `docs/first-answer.md` is compared in `test_readme.py`, where the
command runs anyway.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.engine
def test_the_plan_of_the_sizing_page_is_the_present_one() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```console\n\$ apar (.*?)^```", page, re.DOTALL | re.MULTILINE)
    command, _, output = shown.partition("\n")

    answer = subprocess.run(
        [Path(sys.executable).with_name("apar"), *shlex.split(command)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    assert " ".join(output.split()) in " ".join(answer.stdout.split())
