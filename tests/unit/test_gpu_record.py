"""What docs/results says about GPUs is of this source: same kernels, a commit of this history, nothing failed."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transfer_engine.tools import gpu_record

from transfer_engine import kernels

ROOT = Path(__file__).resolve().parents[2]
HEADER = {
    "commit": str, "date": str, "gpu": str, "gpus": int, "driver": str, "cuda": str, "nvrtc": str,
    "kernels_sha256": str,
}  # fmt: skip


@pytest.fixture(params=[gpu_record.TESTS, gpu_record.BENCH])
def record(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = ROOT / "docs/results" / request.param
    if not path.exists():
        pytest.skip(f"no {request.param}: `make test-gpu` and `make bench-gpu` have not been run on this history")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_it_says_where_and_when_it_was_made(record: dict[str, Any]) -> None:
    assert {name: type(record.get(name)) for name in HEADER} == HEADER
    assert record["gpu"]
    assert re.fullmatch(r"\d+\.\d+", record["cuda"])
    assert datetime.datetime.fromisoformat(record["date"]).tzinfo is not None


def test_its_commit_is_of_this_history(record: dict[str, Any]) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", record["commit"])
    try:
        inside = subprocess.run(["git", "-C", str(ROOT), "rev-parse"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        inside = False
    if not inside:
        pytest.skip("this is no git checkout")
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", record["commit"], "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{record['commit']} is no ancestor of HEAD {done.stderr}"


def test_its_kernels_are_those_of_today(record: dict[str, Any]) -> None:
    expected = gpu_record.kernels_digest(ROOT / "transfer_engine" / "kernels")
    assert record["kernels_sha256"] == expected, "kernels changed: run `make test-gpu` and `make bench-gpu` again"


def test_its_tests_passed_and_none_failed(record: dict[str, Any]) -> None:
    if "figures" in record:
        assert record["figures"]
        return
    assert record["failed"] == 0
    assert record["passed"] > 0
    assert all(entry["test"] and entry["reason"] for entry in record["skipped"])


def test_the_installed_kernels_are_those_of_the_source() -> None:
    assert gpu_record.kernels_digest(kernels.include_dir()) == gpu_record.kernels_digest(
        ROOT / "transfer_engine" / "kernels"
    )


def test_the_digest_changes_with_every_name_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"bc")
    digests = {gpu_record.kernels_digest(tmp_path)}
    (tmp_path / "a").write_bytes(b"bd")
    digests.add(gpu_record.kernels_digest(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    digests.add(gpu_record.kernels_digest(tmp_path))
    (tmp_path / "__pycache__").mkdir()
    assert len(digests | {gpu_record.kernels_digest(tmp_path)}) == 3


def test_the_commit_comes_from_the_environment_or_else_from_git(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TE_COMMIT", "named")
    assert gpu_record.commit_of(tmp_path) == "named"
    monkeypatch.delenv("TE_COMMIT")
    assert gpu_record.commit_of(tmp_path) == ""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TE_COMMIT", "named")
    assert gpu_record.commit_of(tmp_path) == "named"


def test_records_are_written_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TE_GPU_RESULTS", str(tmp_path / "new"))
    path = gpu_record.write(ROOT, "x.json", {"a": 1})
    assert path == tmp_path / "new/x.json"
    assert json.loads(path.read_text()) == {"a": 1}
    monkeypatch.delenv("TE_GPU_RESULTS")
    assert gpu_record.results_folder(Path("/r")) == Path("/r/docs/results")
