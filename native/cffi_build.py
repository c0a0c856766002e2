"""Writes the C source of transfer_engine._core from the C header: cffi_build.py HEADER OUTPUT.

The header is the only declaration of the boundary; what stands between its CDEF marks is what Python sees.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

BEGIN, END = "/* BEGIN CDEF */", "/* END CDEF */"


def declarations(header: str) -> str:
    """Returns the text between the two marks of `header`; ValueError unless each stands there exactly once."""
    if header.count(BEGIN) != 1 or header.count(END) != 1:
        raise ValueError(f"the header must hold {BEGIN!r} and {END!r} once each")
    return header.split(BEGIN, 1)[1].split(END, 1)[0]


def main() -> None:
    """Reads the header and writes the C source."""
    header, output = sys.argv[1:]
    builder = cffi.FFI()
    builder.cdef(declarations(Path(header).read_text(encoding="utf-8")))
    builder.set_source("transfer_engine._core", '#include "native/te.h"\n')
    builder.emit_c_code(output)


if __name__ == "__main__":
    main()
