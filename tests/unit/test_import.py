from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import transfer_engine as te


def test_importing_loads_nothing_heavy(run_python: Any) -> None:
    result = run_python(
        "import sys, transfer_engine\n"
        "heavy = ('torch', 'numpy', 'asyncio', 'trio', 'rich', 'click', 'cuda')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert result.stdout == "[]\n", result.stderr


def test_a_missing_core_is_explained(run_python: Any) -> None:
    result = run_python("import sys\nsys.modules['transfer_engine._core'] = None\nimport transfer_engine")
    assert result.returncode == 1
    assert "compiled core" in result.stderr
    assert "pip install" in result.stderr


def test_the_source_folder_before_the_installed_package_is_explained(run_python: Any) -> None:
    installed, source = Path(te.__file__).parents[1], Path(__file__).parents[2]
    result = run_python(f"import sys\nsys.path[:0] = [{str(source)!r}, {str(installed)!r}]\nimport transfer_engine")
    assert result.returncode == 1
    assert f"{source / 'transfer_engine'} is the source folder" in result.stderr
    assert f"before the installed package in {str(installed)!r}" in result.stderr
    assert "python -P" in result.stderr


def test_a_core_of_another_version_is_refused(run_python: Any) -> None:
    result = run_python(
        "import sys\n"
        "from unittest import mock\n"
        "core = mock.MagicMock()\n"
        "core.lib.te_abi_version.return_value = 99\n"
        "sys.modules['transfer_engine._core'] = core\n"
        "import transfer_engine"
    )
    assert "ImportError" in result.stderr
    assert "ABI version 99" in result.stderr


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", te.__version__)


def test_all_public_names_exist() -> None:
    assert all(hasattr(te, name) for name in te.__all__)
    assert list(te.__all__) == sorted(te.__all__)
