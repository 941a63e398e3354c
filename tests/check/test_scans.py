"""Data, checkpoints and logs in ``nanguard check``: found, read, judged by rules, reported."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.check.plugin import check, install, reasons, told

RULES = '''
from nanguard.findings import Severity
from nanguard.check.rule import Fails, Passes, Rule


class Named(Rule):
    """Names what it is shown. Why it breaks a run: it does not."""

    severity, seen_in, examples = Severity.WARNING, "https://example.org", ()

    def check(self, source):
        if "crash" in str(source.path):
            raise ZeroDivisionError("inside the rule")
        yield self.finding(self.about(source), path=str(source.path), line=None, where="part",
                           step=7)


class Data(Named):
    code, name, reads = "TST101", "data-shown", "data"

    def about(self, source):
        files = ", ".join(f"{f.path}: {f.ledger.records}" for f in source.files)
        return f"{files} of {source.request.expected.classes} classes"


class Checkpoint(Named):
    code, name, reads = "TST102", "checkpoint-shown", "checkpoint"

    def about(self, source):
        return f"{len(source.files)} files of step {source.step}"


class Log(Named):
    code, name, reads = "TST103", "log-shown", "log"

    def about(self, source):
        return ", ".join(f"{s.name}: {len(s)}" for s in source.series)


RULES = [Data, Checkpoint, Log]
'''
LOG = "".join(f"step {n} loss: {2.0 - n / 100}\n" for n in range(30))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("shown"), RULES)


def records(count: int, classes: int = 4) -> str:
    return "".join(f'{{"text": "t{n}", "label": {n % classes}}}\n' for n in range(count))


def safetensors(name: str = "layer.weight") -> bytes:
    head = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(head)) + head + struct.pack("<2f", 0.5, -0.5)


def project(folder: Path) -> Path:
    """A project with everything in it."""
    (folder / "train.py").write_text("import torch\n\nx = torch.ones(3)\n")
    (folder / "config.yaml").write_text(
        "data: {train_file: lists/train.jsonl, num_classes: 4, label_column: label}\n"
        "optimizer: {name: AdamW, lr: 1.0e-4}\n"
        "training: {epochs: 10, warmup_steps: 100, max_grad_norm: 1.0, save_every_epochs: 1}\n"
    )
    (folder / "lists").mkdir()
    (folder / "lists" / "train.jsonl").write_text(records(40))
    for step in (100, 200):
        (folder / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (folder / "out" / f"checkpoint-{step}" / "model.safetensors").write_bytes(safetensors())
    (folder / "out" / "train.log").write_text(LOG)
    (folder / "README.md").write_text("# Title\n")
    return folder


def messages(report: dict[str, Any]) -> dict[str, str]:
    return {f"{f['path']} {f['name']}": f["message"] for f in report["findings"]}


def test_a_project_is_covered_in_one_pass(tmp_path: Path, shown: Path):
    report = told(".", "--select", "TST", cwd=project(tmp_path), plugin=shown)
    assert report["checked"] == [
        "config.yaml",
        "lists/train.jsonl",
        "out/checkpoint-100/model.safetensors",
        "out/checkpoint-200/model.safetensors",
        "out/train.log",
        "train.py",
    ]
    assert messages(report) == {
        "lists/train.jsonl data-shown": "lists/train.jsonl: 40 of 4 classes",
        "out/checkpoint-100 checkpoint-shown": "1 files of step 100",
        "out/checkpoint-200 checkpoint-shown": "1 files of step 200",
        "out/train.log log-shown": "loss: 30",
    }
    assert {finding["step"] for finding in report["findings"]} == {7}
    assert list(reasons(report)) == ["other files"]


def test_data_that_a_configuration_points_to_is_checked_once(tmp_path: Path, shown: Path):
    project(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "config.yaml").rename(tmp_path / "conf" / "a.yaml")
    text = (tmp_path / "conf" / "a.yaml").read_text()
    (tmp_path / "conf" / "b.yaml").write_text(text.replace("num_classes: 4", "num_classes: 9"))
    alone = told("conf", "--select", "TST", cwd=tmp_path, plugin=shown)
    assert alone["checked"] == ["conf/a.yaml", "conf/b.yaml", "lists/train.jsonl"]
    # Two runs read it; what is fine for one of them is no fault.
    assert messages(alone) == {"lists/train.jsonl data-shown": "lists/train.jsonl: 40 of 9 classes"}
    both = told("lists", "conf", "--select", "TST", cwd=tmp_path, plugin=shown)
    assert messages(both) == messages(alone)
    flag = told("conf", "--classes", "3", "--select", "TST", cwd=tmp_path, plugin=shown)
    assert messages(flag)["lists/train.jsonl data-shown"].endswith("of 3 classes")


def test_what_data_is_checked_against_comes_from_flags_and_settings(tmp_path: Path, shown: Path):
    (tmp_path / "a.jsonl").write_text(records(8))
    settings = tmp_path / "nanguard.toml"
    settings.write_text('[data]\nclasses = 6\nlabel-key = "label"\n')
    report = told("a.jsonl", "--select", "TST", cwd=tmp_path, plugin=shown)
    assert messages(report)["a.jsonl data-shown"].endswith("of 6 classes")
    report = told("a.jsonl", "--classes", "5", "--select", "TST", cwd=tmp_path, plugin=shown)
    assert messages(report)["a.jsonl data-shown"].endswith("of 5 classes")
    done = check("a.jsonl", "--group", "dataset_name=food101", cwd=tmp_path)
    assert done.returncode == 2
    assert "'dataset_name=food101' is no group of data sets." in done.stderr
    settings.write_text("[data]\nclasses = 0\n")
    done = check("a.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "data.classes has to be a whole number above 0, not 0." in done.stderr


def test_files_beyond_the_limits_of_text_are_read(tmp_path: Path, shown: Path):
    (tmp_path / "big.jsonl").write_text(records(90_000))
    (tmp_path / "big.log").write_text(LOG * 5000)
    assert min(p.stat().st_size for p in tmp_path.iterdir()) > 2 << 20
    report = told(".", "--select", "TST", cwd=tmp_path, plugin=shown)
    assert report["checked"] == ["big.jsonl", "big.log"]
    assert messages(report)["big.jsonl data-shown"] == "big.jsonl: 90000 of None classes"


def test_a_rule_that_fails_is_an_entry_and_the_others_go_on(tmp_path: Path, shown: Path):
    (tmp_path / "crash.log").write_text(LOG)
    (tmp_path / "train.log").write_text(LOG)
    report = told(".", "--select", "TST", cwd=tmp_path, plugin=shown)
    assert list(messages(report)) == ["train.log log-shown"]
    assert reasons(report)["crash.log"] == (
        "rule log-shown failed on crash.log: ZeroDivisionError: inside the rule"
    )


def test_what_no_selected_rule_reads_is_not_read_and_not_called_clean(tmp_path: Path, shown: Path):
    (tmp_path / "train.log").write_text(LOG)
    (tmp_path / "a.jsonl").write_text(records(8))
    report = told(".", "--select", "TST103", cwd=tmp_path, plugin=shown)
    assert report["checked"] == ["train.log"]
    assert reasons(report) == {"a.jsonl": "no rule that reads it is selected"}


def test_the_baseline_knows_findings_without_a_source_line(tmp_path: Path, shown: Path):
    (tmp_path / "train.log").write_text(LOG)
    words = (".", "--select", "TST")
    check(*words, "--write-baseline", "known.json", cwd=tmp_path, plugin=shown)
    (tmp_path / "train.log").write_text(LOG * 2)
    report = told(*words, "--baseline", "known.json", cwd=tmp_path, plugin=shown)
    assert report["findings"] == []
    assert report["baseline"]["known"] == 1
    (tmp_path / "nanguard.toml").write_text('[per-file-ignores]\n"*.log" = ["TST"]\n')
    assert told(*words, cwd=tmp_path, plugin=shown)["findings"] == []


def test_standard_input_may_be_a_log_or_data(tmp_path: Path, shown: Path):
    report = told("-", "--select", "TST", cwd=tmp_path, plugin=shown, stdin=LOG)
    assert messages(report) == {"<stdin> log-shown": "loss: 30"}
    assert report["checked"] == ["<stdin>"]
    report = told("-", "--select", "TST", cwd=tmp_path, plugin=shown, stdin=records(9))
    assert messages(report) == {"<stdin> data-shown": "<stdin>: 9 of None classes"}


def test_the_report_does_not_depend_on_the_number_of_threads(tmp_path: Path, shown: Path):
    for number in range(12):
        (tmp_path / f"{number:02}.log").write_text(LOG * (number + 1))
        (tmp_path / f"{number:02}.jsonl").write_text(records(5 + number))
        (tmp_path / f"{number:02}.safetensors").write_bytes(safetensors())
    one = told(".", "--jobs", "1", cwd=tmp_path, plugin=shown)
    assert one == told(".", "--jobs", "4", cwd=tmp_path, plugin=shown)
    assert len(one["checked"]) == 36


def test_hostile_and_odd_files_end_as_entries_or_findings(tmp_path: Path):
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "half.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "lies.parquet").write_bytes(b"PAR1" + b"\xff" * 64 + b"PAR1")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "one.jsonl").write_text('{"label": "' + "x" * 3_000_000)
    (tmp_path / "noise.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + os.urandom(500))
    (tmp_path / "events.out.tfevents.1").write_bytes(os.urandom(300))
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07\x12\x07pytorch" + bytes(50))
    (tmp_path / "table.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50))
    report = told(".", "--fail-on", "none", cwd=tmp_path)
    spoken = {f["path"] for f in report["findings"]} | {e["path"] for e in report["not_checked"]}
    assert {path.name for path in tmp_path.iterdir()} - spoken <= {".nanguard"}
    assert reasons(report)["model.onnx"] == "no reader knows this kind of checkpoint"
    assert reasons(report)["table.h5"] == "no reader knows this kind of data"


def test_nothing_heavy_is_imported_for_code_and_configurations(tmp_path: Path):
    (tmp_path / "a.py").write_text("import torch\n")
    (tmp_path / "c.yaml").write_text("lr: 0.001\noptimizer: adam\nepochs: 3\n")
    (tmp_path / "README.md").write_text("x\n")
    program = (
        "import sys\nfrom nanguard.cli import main\ntry:\n    main()\nfinally:\n"
        "    heavy = ('numpy', 'polars', 'fsspec', 'ray', 'tempfile')\n"
        "    found = [m for m in sys.modules if m in heavy or m.startswith("
        "('nanguard.check.data.rules', 'nanguard.check.log.rules', "
        "'nanguard.check.checkpoint.rules'))]\n"
        "    sys.stderr.write(' '.join(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "check", "a.py", "c.yaml", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""


def is_reading(pid: int, name: str) -> bool:
    """Returns whether a process, or one that it started, has a file open, or in its memory."""
    try:
        opened = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        if name in " ".join(opened) or name in Path(f"/proc/{pid}/maps").read_text():
            return True
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # the process, or one of its files, has just gone
        return False
    return any(is_reading(int(child), name) for child in below)


def test_ctrl_c_ends_a_scan_at_once(tmp_path: Path):
    line = json.dumps({"text": "x" * 80, "label": 1}) + "\n"
    with (tmp_path / "big.jsonl").open("w") as file:
        for _ in range(40):
            file.write(line * 100_000)
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from nanguard.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "check", "."],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not is_reading(process.pid, "big.jsonl"):
        time.sleep(0.005)
    assert process.returncode is None, "the scan was over before it could be interrupted"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors == "nanguard: interrupted\n"
