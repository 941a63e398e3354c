"""``nanguard check`` from paths to exit codes, on files good and bad."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.check.plugin import check, install, names, reasons, told, unable

if TYPE_CHECKING:
    from pathlib import Path

CLEAN = "import torch\n\nx = torch.ones(3)\n"


def test_a_finding_is_reported_and_decides_the_exit_code(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("x = 1\nBAD = RISKY = 2\n")
    done = check("a.py", cwd=tmp_path, plugin=plugin)
    assert done.returncode == 1
    assert "2:1  error  bad-word: " in done.stdout
    assert "1 error, 1 warning in 1 file" in done.stdout
    assert check("a.py", "--fail-on", "none", cwd=tmp_path, plugin=plugin).returncode == 0
    ignored = ("a.py", "--ignore", "bad-word")
    assert check(*ignored, cwd=tmp_path, plugin=plugin).returncode == 0
    assert check(*ignored, "--fail-on", "warning", cwd=tmp_path, plugin=plugin).returncode == 1


def test_the_json_report_is_as_promised(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("x = 1\ny = BAD\n")
    report = told("a.py", "--select", "TST001", cwd=tmp_path, plugin=plugin)
    assert report["schema"] == "nanguard.report/1"
    assert report["checked"] == ["a.py"]
    assert report["not_checked"] == []
    (finding,) = report["findings"]
    diff = finding["fixes"][0].pop("diff")
    assert finding == {
        "code": "TST001",
        "name": "bad-word",
        "severity": "error",
        "path": "a.py",
        "line": 2,
        "column": 5,
        "where": None,
        "message": "BAD is bad",
        "fixes": [{"title": "write GOOD", "safe": True}],
    }
    assert diff == "--- a.py\n+++ a.py\n@@ -1,2 +1,2 @@\n x = 1\n-y = BAD\n+y = GOOD\n"


def test_rules_are_chosen_by_name_code_and_beginning(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("BAD\nRISKY\n")

    def found(*words: str) -> list[str]:
        return [name for name, _ in names(told("a.py", *words, cwd=tmp_path, plugin=plugin))]

    assert found() == ["bad-word", "risky-word"]
    assert found("--select", "risky-word") == ["risky-word"]
    assert found("--select", "TST001,TST002", "--ignore", "TST002") == ["bad-word"]
    assert found("--select", "tst") == ["bad-word", "risky-word"]
    assert found("--select", "CFG") == []
    done = check("a.py", "--select", "bad-wort", cwd=tmp_path, plugin=plugin)
    assert done.returncode == 2
    assert "Did you mean bad-word" in done.stderr


def test_a_rule_that_fails_is_an_entry_and_the_others_go_on(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("CRASH\nBAD\n")
    report = unable("a.py", cwd=tmp_path, plugin=plugin)
    assert names(report) == [("bad-word", 2)]
    assert reasons(report)["a.py"] == (
        "rule crashing-rule failed on a.py: ZeroDivisionError: inside the rule"
    )
    (tmp_path / "a.py").write_text("CRASH\n")
    assert check(".", cwd=tmp_path, plugin=plugin).returncode == 0


@pytest.mark.skipif(not hasattr(signal, "ITIMER_VIRTUAL"), reason="no clock for processor time")
def test_a_rule_that_never_ends_is_stopped(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("FOREVER\n")
    (tmp_path / "b.py").write_text("BAD\n")
    short = (
        "import nanguard.check.code_check as f; f._CPU_SECONDS_PER_FILE = 0.3\n"
        "from nanguard.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", short, "check", "--format", "json", "a.py", "b.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(plugin)},
    )
    report = json.loads(done.stdout)
    assert names(report) == [("bad-word", 1)]
    assert reasons(report)["a.py"] == "it took more than 0 s"


def test_what_is_broken_is_not_checked_and_says_why(tmp_path: Path):
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "null.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\nx = '\xe9'\n")
    (tmp_path / "cookie.py").write_bytes(b"# coding: no-such-code\n")
    (tmp_path / "rot.py").write_bytes(b"# coding: rot13\nvzcbeg bf\n")
    (tmp_path / "deep.py").write_text("x = " + "(" * 5000 + ")" * 5000)
    (tmp_path / "long.py").write_text("x = " + "-" * 100_000 + "1")
    (tmp_path / "huge.py").write_text("x = 1\n" * 400_000)
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07\x12\x07pytorch" + bytes(100))
    (tmp_path / "data.h5").write_bytes(b"\x89HDF" + bytes(100))
    (tmp_path / "blob").write_bytes(bytes(range(256)))
    report = unable(".", cwd=tmp_path)
    assert report["checked"] == []
    assert report["findings"] == []
    why = reasons(report)
    assert "not valid Python" in why["syntax.py"]
    assert "(line 1)" in why["syntax.py"]
    assert "binary file" in why["null.py"]
    assert "not text in utf-8" in why["latin.py"]
    assert "unknown encoding 'no-such-code'" in why["cookie.py"]
    assert "unknown encoding 'rot13'" in why["rot.py"]
    assert {"deep.py", "long.py"} <= set(why)
    assert why["huge.py"] == "it is larger than 2 MB"
    assert why["model.onnx"] == "no reader knows this kind of checkpoint"
    assert why["data.h5"] == "no reader knows this kind of data"
    assert "binary" in why["blob"]


def test_encodings_are_honoured(tmp_path: Path, plugin: Path):
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nx = 'é'; BAD\n".encode("latin-1"))
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbfBAD\n")
    (tmp_path / "mac.py").write_bytes(b"x = 1\rBAD\r")
    (tmp_path / "dos.py").write_bytes(b"x = 1\r\nBAD\r\n")
    report = told(".", cwd=tmp_path, plugin=plugin)
    found = {(f["path"], f["line"], f["column"]) for f in report["findings"]}
    assert found == {
        ("latin.py", 2, 10),
        ("bom.py", 1, 1),
        ("mac.py", 2, 1),
        ("dos.py", 2, 1),
    }


def test_nothing_that_exists_is_exit_code_2(tmp_path: Path):
    done = check("nope.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("nanguard: there is no such file: nope.py.")
    (tmp_path / "a.py").write_text(CLEAN)
    report = unable("a.py", "nope.py", "no/*.py", cwd=tmp_path)
    assert report["checked"] == ["a.py"]
    assert reasons(report) == {
        "nope.py": "there is no such file",
        "*.py": "no file matches this pattern",
    }


def test_standard_input_is_told_apart_by_content(tmp_path: Path, plugin: Path):
    report = told("-", cwd=tmp_path, plugin=plugin, stdin="import torch\nBAD\n")
    assert names(report) == [("bad-word", 2)]
    assert report["findings"][0]["path"] == "<stdin>"
    cell = {"cell_type": "code", "source": ["BAD\n"]}
    notebook = json.dumps({"nbformat": 4, "cells": [cell]})
    assert names(told("-", cwd=tmp_path, plugin=plugin, stdin=notebook)) == [("bad-word", 1)]
    assert "neither Python" in reasons(unable("-", cwd=tmp_path, stdin="Dear all,\n"))["<stdin>"]


def test_many_files_in_processes_give_the_same_report(tmp_path: Path, plugin: Path):
    for number in range(30):
        (tmp_path / f"f{number:02}.py").write_text(f"x = {number}\n" * number + "BAD\n")
    serial = told(".", "--jobs", "1", "--no-cache", cwd=tmp_path, plugin=plugin)
    parallel = told(".", "--jobs", "3", "--no-cache", cwd=tmp_path, plugin=plugin)
    assert serial == parallel
    assert names(serial) == [("bad-word", number + 1) for number in range(30)]


def test_a_file_that_kills_its_process_is_named(tmp_path: Path, plugin: Path):
    for number in range(12):
        (tmp_path / f"f{number:02}.py").write_text("BAD\n")
    (tmp_path / "f05.py").write_text("KILL\nBAD\n")
    report = told(".", "--jobs", "2", cwd=tmp_path, plugin=plugin)
    assert reasons(report) == {"f05.py": "the process that checked it died"}
    assert len(report["findings"]) == 11


def test_a_broken_plugin_is_an_entry(tmp_path: Path):
    (tmp_path / "a.py").write_text(CLEAN)
    for number, (rules, says) in enumerate(
        [
            ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
            ("RULES = 3", "int is no nanguard.check.rule.Rule"),
        ]
    ):
        site = install(tmp_path / f"site{number}", rules)
        (entry,) = told("a.py", cwd=tmp_path, plugin=site)["not_checked"]
        assert entry["path"] == "plugin mine (ngrules:RULES)"
        assert says in entry["reason"]


def test_ctrl_c_ends_cleanly(tmp_path: Path, plugin: Path):
    for number in range(8):
        (tmp_path / f"f{number}.py").write_text("FOREVER\n")
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from nanguard.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "check", ".", "--jobs", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(plugin)},
        start_new_session=True,
    )
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "nanguard: interrupted\n"


def test_torch_and_numpy_are_never_imported(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("import torch\nBAD = RISKY\n")
    (tmp_path / "n.ipynb").write_text(json.dumps({"nbformat": 4, "cells": []}))
    (tmp_path / "c.yaml").write_text("learning_rate: 1e-3\nfp16: true\nnum_train_epochs: 3\n")
    program = (
        "import sys\n"
        "from nanguard.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    heavy = ('torch', 'numpy', 'rich', 'ssl', 'multiprocessing')\n"
        "    sys.stderr.write(' '.join(m for m in heavy if m in sys.modules))\n"
    )
    for words in (["."], [".", "--fix", "--unsafe"], ["c.yaml"]):
        done = subprocess.run(
            [sys.executable, "-c", program, "check", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(plugin)},
        )
        assert done.stderr == "", words


def test_a_pipe_that_is_closed_early_is_no_error(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("BAD\n" * 5000)
    done = subprocess.run(
        f"{sys.executable} -m nanguard check a.py | head -1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(plugin)},
    )
    assert done.stdout == "a.py\n"
    assert done.stderr == ""


def test_the_report_can_go_to_a_file(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("BAD\n")
    done = check("a.py", "-o", "out.json", "--format", "json", cwd=tmp_path, plugin=plugin)
    assert (done.returncode, done.stdout) == (1, "")
    assert names(json.loads((tmp_path / "out.json").read_text())) == [("bad-word", 1)]
    done = check("a.py", "-o", "no/where.json", cwd=tmp_path, plugin=plugin)
    assert done.returncode == 2
    assert "the report cannot be written" in done.stderr


def test_a_file_without_an_ending_that_is_nothing_is_only_counted(tmp_path: Path):
    (tmp_path / "notes").write_text("seed: 1\nlr: [\n")
    (tmp_path / "README.md").write_text("# Title\n")
    (tmp_path / "a.py").write_text(CLEAN)
    report = told(".", cwd=tmp_path)
    assert report["not_checked"] == [
        {
            "path": "other files",
            "reason": "2 files are of kinds without rules (.md 1, no ending 1)",
        }
    ]
    assert "not YAML" in reasons(unable("notes", cwd=tmp_path))["notes"]


def test_quiet_tells_of_a_named_file_that_was_not_checked(tmp_path: Path, plugin: Path):
    (tmp_path / "good.py").write_text(CLEAN)
    done = check("typo.py", "good.py", "--quiet", cwd=tmp_path, plugin=plugin)
    assert done.stdout == ""
    assert "typo.py not checked" in done.stderr


def test_unsafe_alone_is_a_mistake(tmp_path: Path, plugin: Path):
    (tmp_path / "good.py").write_text(CLEAN)
    done = check("good.py", "--unsafe", cwd=tmp_path, plugin=plugin)
    assert done.returncode == 2
    assert "--fix --unsafe" in done.stderr
