"""The builders of machines lie beside the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "CUDA_VISIBLE_DEVICES", "HWLOC_XMLFILE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TE_HWLOC", "TE_NICS",
        "TE_NIC_COUNT", "TE_CORE", "TE_TRANSPORT", "TE_GID_INDEX", "TE_PKEY_INDEX",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
