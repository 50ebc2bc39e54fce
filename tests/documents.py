"""What the documents tell people to type: the commands of their code blocks, and their Python.

A block that is fenced as `sh`, or indented, holds commands, one a line; everything else says its language.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    ROOT / name
    for pattern in ("docs/*.md", "models/*/README.md", "README.md", "CONTRIBUTING.md")
    for name in ROOT.glob(pattern)
)
COMMENT = re.compile(r"(?:^|\s)\s*#\s.*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page."""

    page: str  # relative to the checkout
    line: int  # of the page, from 1
    language: str  # sh for what is indented
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page in their order."""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language = "sh" if token.type == "code_block" else token.info.strip()
            line = token.map[0] + 1 if token.map else 0
            yield Block(str(page.relative_to(ROOT)), line, language, token.content)


def commands(block: Block) -> list[str]:
    """The commands of a block, each in one line with single spaces, without comments."""
    whole = re.sub(r"\\\n\s*", "", block.text)
    lines = (COMMENT.sub("", line).split() for line in whole.splitlines())
    return [" ".join(words) for words in lines if words]


def all_commands() -> dict[str, str]:
    """Each command of any document → where it stands first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in blocks(page):
            for command in commands(block) if block.language == "sh" else ():
                found.setdefault(command, f"{block.page}:{block.line}")
    return found
