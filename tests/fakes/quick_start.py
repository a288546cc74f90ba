"""The code blocks of the quick-start pages, one command or program at a time."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/install.md", "docs/first-answer.md")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language: str, pages: tuple[str, ...] = PAGES) -> list[str]:
    """The blocks of a language, each once."""
    found = [
        body
        for page in pages
        for name, body in _BLOCK.findall((ROOT / page).read_text())
        if name == language
    ]
    return list(dict.fromkeys(found))


def commands() -> list[str]:
    """The lines of all shell blocks, each once; continuation lines are joined."""
    lines = [
        line.strip()
        for block in blocks("bash")
        for line in re.sub(r" *\\\n *", " ", block).splitlines()
    ]
    return list(dict.fromkeys(line for line in lines if line))


def program(first_line: str, pages: tuple[str, ...] = PAGES) -> str:
    """The Python block that begins with this line."""
    [found] = [block for block in blocks("python", pages) if block.startswith(first_line)]
    return found
