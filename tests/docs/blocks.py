"""Code in the documents: fenced blocks with their language and place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMED = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block. A Python block that begins with `# name.py` is a file of that name."""

    language: str
    line: int  # of its first line of code, from 1
    code: str

    @property
    def file_name(self) -> str | None:
        match = NAMED.match(self.code) if self.language == "python" else None
        return match[1] if match else None


def blocks_of(document: Path) -> list[Block]:
    found, language, begin, lines = [], None, 0, []
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if language is None:
            if line.startswith("```"):
                language, begin, lines = line[3:].strip(), number + 1, []
        elif line.startswith("```"):
            found.append(Block(language, begin, "".join(f"{code}\n" for code in lines)))
            language = None
        else:
            lines.append(line)
    assert language is None, f"{document.name}: the block from line {begin} on does not end"
    return found


def script_of(document: Path, language: str = "python") -> str:
    """All its blocks of a language in order, on the lines of the document, so that tracebacks point there.

    "python gpu" is Python that needs a GPU.
    """
    lines: list[str] = []
    for block in blocks_of(document):
        if block.language == language and block.file_name is None:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.code.splitlines()
    return "\n".join(lines) + "\n"
