"""The documents cover what there is, and name nothing that is not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import transfer_engine as te
from transfer_engine import errors

from .blocks import DOCUMENTS, ROOT, blocks_of

DOCS = ROOT / "docs"
BEGIN, END = "<!-- settings: begin", "<!-- settings: end -->"


def settings_table() -> str:
    def shown(value: Any) -> str:
        return "none" if value is None else f"`{value}`"

    rows = ["| setting | variable | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{row['name']}` | `{row['variable']}` | {shown(row['default'])} | {row['meaning']} |"
        for row in te.Settings.table()
    ]
    return "\n".join(rows)


def test_the_settings_table_is_that_of_the_settings() -> None:
    document = DOCS / "operations.md"
    text = document.read_text()
    head, rest = text.split(BEGIN)
    marker, rest = rest.split("-->\n", 1)
    table, tail = rest.split(END)
    if table.strip() != settings_table() and os.environ.get("UPDATE_DOCS"):
        document.write_text(f"{head}{BEGIN}{marker}-->\n\n{settings_table()}\n\n{END}{tail}")
        return
    assert table.strip() == settings_table(), 'run UPDATE_DOCS=1 make test-python ARGS="-k docs"'


def test_every_statistic_is_explained() -> None:
    text = (DOCS / "operations.md").read_text()
    with te.Engine("sim") as a, te.Engine("sim") as b:
        a.connect(b.address).wait(20)
        stats = a.stats()
    fields = {*stats["engine"], *next(iter(stats["nics"].values())), *next(iter(stats["peers"].values()))}
    assert not [field for field in sorted(fields) if f"`{field}`" not in text]


def test_every_error_has_its_section_in_troubleshooting() -> None:
    found = re.findall(r"^### `(\w+)`$", (DOCS / "troubleshooting.md").read_text(), re.M)
    assert sorted(found) == sorted(errors.__all__)


def test_every_test_that_the_contract_names_exists() -> None:
    known = {
        f"{path.name}::{name}"
        for folder in ("conformance", "gpu", "unit")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)
    }
    files = {name.split("::")[0] for name in known}
    text = (DOCS / "contract.md").read_text()
    named = re.findall(r"`(test_\w+\.py(?:::test_\w+)?)`", text)
    assert len(named) > 30
    assert not [name for name in named if name not in known | files]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
    assert not [link for link in links if not (document.parent / link).exists()]


def test_every_file_that_architecture_points_to_exists() -> None:
    named = re.findall(
        r"`((?:native|proxy|efa|tools|transfer_engine)/[\w./]*)`", (DOCS / "architecture.md").read_text()
    )
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_fenced_blocks_have_a_known_language(document: Path) -> None:
    assert {block.language for block in blocks_of(document)} <= {"", "python", "python gpu", "cuda", "sh"}
