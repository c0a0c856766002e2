"""Every example in the documents runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import transfer_engine as te

from .blocks import DOCUMENTS, ROOT, blocks_of, script_of

COMMAND = Path(sys.executable).with_name("transfer-engine")
# Examples keep to the loopback interface, and to the defaults otherwise.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("TE_")},
    "TE_NICS": "lo",
    "TE_PEER_TIMEOUT_S": "10",
}
DEADLINE_S = 100


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def parameters(language: str) -> list[Path]:
    return [path for path in DOCUMENTS if any(block.language == language for block in blocks_of(path))]


@pytest.mark.parametrize("document", parameters("python"), ids=lambda path: path.name)
def test_the_python_of_a_document_runs(document: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{document.stem}.py"
    script.write_text(script_of(document))
    result = run([sys.executable, str(script)], tmp_path)
    assert result.returncode == 0, f"{document.name}, lines as there:\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("document", parameters("python gpu"), ids=lambda path: path.name)
def test_the_python_of_a_document_that_needs_a_gpu_compiles(document: Path) -> None:
    compile(script_of(document, "python gpu"), str(document), "exec")


@pytest.mark.gpu
@pytest.mark.parametrize("document", parameters("python gpu"), ids=lambda path: path.name)
def test_the_python_of_a_document_runs_on_a_gpu(document: Path, tmp_path: Path) -> None:
    try:
        te.kernels.load("waits", 0)
    except te.TransportUnavailable as cause:
        pytest.skip(f"no usable GPU: {cause.message}")
    pytest.importorskip("torch")
    script = tmp_path / f"{document.stem}.py"
    script.write_text(script_of(document, "python gpu"))
    result = run([sys.executable, str(script)], tmp_path)
    assert result.returncode == 0, f"{document.name}, lines as there:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("document", parameters("sh"), ids=lambda path: path.name)
def test_the_commands_of_a_document_run(document: Path, tmp_path: Path) -> None:
    for block in blocks_of(document):
        for line in block.code.splitlines() if block.language == "sh" else ():
            program, *arguments = line.split()
            assert program == "transfer-engine", f"{document.name}: {line}"
            result = run([str(COMMAND), *arguments], tmp_path)
            assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"


def test_the_two_process_example_works(tmp_path: Path) -> None:
    names = {block.file_name: block.code for block in blocks_of(ROOT / "docs/getting-started.md") if block.file_name}
    assert set(names) == {"receiver.py", "sender.py"}
    for name, code in names.items():
        (tmp_path / name).write_text(code)
    receiver = subprocess.Popen(
        [sys.executable, "receiver.py"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        sender = run([sys.executable, "sender.py", address], tmp_path)
        assert sender.returncode == 0, sender.stderr
        output, _ = receiver.communicate(timeout=DEADLINE_S)
        assert output == f"received {1 << 20}\n"
        assert receiver.returncode == 0
    finally:
        receiver.kill()
        receiver.wait()
