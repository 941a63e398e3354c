"""Paths that lead elsewhere: an S3-compatible server on loopback, and memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nanguard.errors import SourceError
from tests.check.plugin import check, reasons, told, unable
from tests.check.test_ray import needs_ray
from tests.check.test_scans import project, records, safetensors, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

fsspec = pytest.importorskip("fsspec", reason="needs the extra remote")

from nanguard.check.remote_files import Mirror, is_remote  # noqa: E402 - needs fsspec

__all__ = ["shown"]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server that speaks S3, with what a client needs to reach it and nothing else."""
    pytest.importorskip("s3fs", reason="needs the extra remote")
    pytest.importorskip("moto.server", reason="needs moto[server]")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address)
        (folder / "none").write_text("")
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "for-this-test",
            "AWS_SECRET_ACCESS_KEY": "for-this-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        }
    finally:
        server.terminate()
        server.wait(timeout=20)


def _wait(address: str) -> None:
    for _ in range(150):
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(address)


UPLOAD = """
import pathlib, sys, s3fs
system = s3fs.S3FileSystem()
system.mkdir("bucket")
top = pathlib.Path(sys.argv[1])
for file in top.rglob("*"):
    if file.is_file():
        system.put_file(str(file), f"bucket/runs/7/{file.relative_to(top)}")
"""


@pytest.fixture(scope="module")
def bucket(s3: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A bucket with a project in it."""
    folder = project(tmp_path_factory.mktemp("project"))
    (folder / "lists" / "large.jsonl").write_text(records(90_000))
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD.json").write_text('{"lr": 1}')
    command = [sys.executable, "-c", UPLOAD, str(folder)]
    subprocess.run(command, check=True, env={**os.environ, **s3}, timeout=60)
    return s3


def test_a_folder_of_a_bucket_is_checked_like_any_other(
    tmp_path: Path, bucket: dict[str, str], shown: Path
):
    report = told("s3://bucket/runs/7", "--select", "TST", cwd=tmp_path, plugin=shown, **bucket)
    assert report["checked"] == [
        "s3://bucket/runs/7/config.yaml",
        "s3://bucket/runs/7/lists/large.jsonl",
        "s3://bucket/runs/7/lists/train.jsonl",
        "s3://bucket/runs/7/out/checkpoint-100/model.safetensors",
        "s3://bucket/runs/7/out/checkpoint-200/model.safetensors",
        "s3://bucket/runs/7/out/train.log",
        "s3://bucket/runs/7/train.py",
    ]
    said = {finding["path"]: finding["message"] for finding in report["findings"]}
    assert said["s3://bucket/runs/7/lists/train.jsonl"] == (
        "s3://bucket/runs/7/lists/train.jsonl: 40 of 4 classes"
    )
    assert said["s3://bucket/runs/7/lists/large.jsonl"] == (
        "s3://bucket/runs/7/lists/large.jsonl: 90000 of None classes"
    )
    assert said["s3://bucket/runs/7/out/checkpoint-200"] == "1 files of step 200"
    assert list(reasons(report)) == ["other files"]
    assert not list(tmp_path.glob("nanguard-*"))


@needs_ray
def test_workers_of_a_cluster_fetch_for_themselves(
    tmp_path: Path, bucket: dict[str, str], shown: Path
):
    words = ("s3://bucket/runs/7/lists", "--select", "TST", "--engine", "ray")
    report = told(*words, cwd=tmp_path, plugin=shown, RAY_ADDRESS="local", **bucket)
    (finding,) = report["findings"]
    assert finding["message"] == (
        "s3://bucket/runs/7/lists/large.jsonl: 90000, "
        "s3://bucket/runs/7/lists/train.jsonl: 40 of None classes"
    )


def test_files_patterns_and_what_is_not_there(tmp_path: Path, bucket: dict[str, str], shown: Path):
    words = ("--select", "TST")
    report = told("s3://bucket/runs/*/lists/t*.jsonl", *words, cwd=tmp_path, plugin=shown, **bucket)
    assert report["checked"] == ["s3://bucket/runs/7/lists/train.jsonl"]
    report = told(
        "s3://bucket/runs/7/out/train.log",
        "s3://bucket/runs/8",
        "s3://bucket/runs/*.nothing",
        *words,
        cwd=tmp_path,
        plugin=shown,
        **bucket,
    )
    assert report["checked"] == ["s3://bucket/runs/7/out/train.log"]
    assert reasons(report) == {
        "8": "there is no such file",
        "*.nothing": "no file matches this pattern",
    }
    done = check("s3://no-such-bucket/x", cwd=tmp_path, **bucket)
    assert done.returncode == 2
    assert "there is no such file: s3://no-such-bucket/x" in done.stderr
    done = check("s3://bucket/runs/7", "--fix", cwd=tmp_path, **bucket)
    assert done.returncode == 2
    assert "files that lie elsewhere are not repaired" in done.stderr


def test_what_cannot_be_reached_is_said(tmp_path: Path):
    done = check("nosuchservice://x/y", cwd=tmp_path)
    assert done.returncode == 2
    assert "nosuchservice://x/y" in done.stderr
    (tmp_path / "a.py").write_text("x = 1\n")
    report = unable("a.py", "nosuchservice://x/y", cwd=tmp_path)
    assert report["checked"] == ["a.py"]
    assert "it cannot be reached" in reasons(report)["y"]


def memory(files: dict[str, bytes]) -> Any:
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, content in files.items():
        system.pipe_file(name, content)
    return system


def test_a_stand_in_tells_what_a_file_is_without_all_of_it(tmp_path: Path):
    large = safetensors() + bytes(3 << 20)
    memory({"/run/model.safetensors": large, "/run/small.json": b"{}", "/run/film.mp4": large})
    mirror = Mirror(tmp_path)
    (top,) = mirror.take("memory://run")
    model = Path(top) / "model.safetensors"
    assert model.stat().st_size == len(large)
    assert model.read_bytes()[: 64 << 10] == large[: 64 << 10]
    assert model.stat().st_blocks * 512 < 1 << 20
    assert (Path(top) / "small.json").read_bytes() == b"{}"
    assert (Path(top) / "film.mp4").stat().st_blocks == 0
    with mirror.bring(model) as here:
        assert here != model
        assert here.name == model.name
        assert here.read_bytes() == large
    assert not here.exists()
    with mirror.bring(Path(top) / "small.json") as here:
        assert here == Path(top) / "small.json"
    assert mirror.name_of(f"{model}: bad") == "memory:///run/model.safetensors: bad"


def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path):
    memory({"/run/../../escaped.json": b"{}", "/run/fine.json": b"{}"})
    mirror = Mirror(tmp_path / "inner" / "folder")
    mirror.take("memory://run")
    assert not list(tmp_path.rglob("escaped*"))
    assert [file.name for file in tmp_path.rglob("*.json")] == ["fine.json"]


def test_a_file_that_shrank_or_does_not_fit_is_refused(tmp_path: Path, monkeypatch: Any):
    system = memory({"/run/model.safetensors": safetensors() + bytes(3 << 20)})
    mirror = Mirror(tmp_path)
    (top,) = mirror.take("memory://run")
    model = Path(top) / "model.safetensors"
    system.pipe_file("/run/model.safetensors", b"short")
    with pytest.raises(SourceError, match="it ended early"), mirror.bring(model):
        pass
    monkeypatch.setattr("nanguard.check.remote_files._ROOM_LEFT_BYTES", 1 << 62)
    with pytest.raises(SourceError, match="there is room for 0 MB"), mirror.bring(model):
        pass


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("s3://bucket/x", True),
        ("hf://datasets/a/b", True),
        ("simplecache::s3://bucket/x", True),
        ("file:///tmp/x", False),
        ("a/b.py", False),
        ("C:/data", False),
        ("odd:name", False),
    ],
)
def test_what_is_an_address(path: str, remote: bool):
    assert is_remote(path) is remote


def test_a_configuration_cannot_make_us_fetch(tmp_path: Path, bucket: dict[str, str]):
    (tmp_path / "c.yaml").write_text(
        "data: {train_file: 's3://bucket/runs/7/lists/train.jsonl', num_classes: 2}\n"
        "optimizer: {name: adamw, lr: 0.0001}\ntraining: {max_steps: 100, warmup_steps: 5}\n"
    )
    report = told("c.yaml", "--fail-on", "none", cwd=tmp_path, **bucket)
    assert report["checked"] == ["c.yaml"]
    assert "s3://" not in json.dumps(report["findings"])
