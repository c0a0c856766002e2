"""Rules that hold for every test: it runs against the installed package, never against the source tree."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

SOURCE_TREE = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    # A background job ignores Ctrl-C and hands that on to its children, which are tested for how they take it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = importlib.util.find_spec("transfer_engine")
    if spec is None or spec.origin is None:
        raise pytest.UsageError("transfer_engine is not installed: run `make build`, then `make test-python`")
    if "site-packages" not in Path(spec.origin).parts:
        raise pytest.UsageError(
            f"the tests would import {spec.origin}, not the installed wheel: use `make test-python`, "
            f"or run pytest outside of {SOURCE_TREE}"
        )
