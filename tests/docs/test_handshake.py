"""The examples of docs/handshake.md are what the core writes: its native test has the same bytes."""

from __future__ import annotations

import re

from .blocks import ROOT

BYTES = re.compile(r"(?:\b[0-9a-f]{2}\b[\s\"]+){20,}")


def examples(path: str) -> set[str]:
    return {" ".join(re.findall("[0-9a-f]{2}", run)) for run in BYTES.findall((ROOT / path).read_text())}


def test_the_bytes_in_the_document_are_those_that_the_core_is_tested_with() -> None:
    in_document = examples("docs/handshake.md")
    assert len(in_document) == 2
    assert in_document == examples("tests/native/cx7_handshake_test.cc")
