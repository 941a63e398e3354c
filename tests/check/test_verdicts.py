"""A verdict for every file and an exit code that means it: nothing damaged is ever clean."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from tests.check.plugin import check, names, reasons, told, unable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLEAN = "import torch\n\nx = torch.ones(3)\n"
ROWS = "".join(f"{number}.5,{number % 2}\n" for number in range(40))
NOTED = "".join(f"d,{number}.5,{number % 2}\n" for number in range(40))
FLOATS = struct.pack("<4f", 1, 2, 3, 4)


def safetensors(entries: dict[str, Any], body: bytes) -> bytes:
    """Returns a file of the format with a header as given."""
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + body


def tensor(begin: int, end: int, **more: Any) -> dict[str, Any]:
    """Returns the description of a tensor of four numbers."""
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [begin, end], **more}


def parquet(folder: Path, *, damaged: str = "") -> Path:
    """Writes a table with a column that no rule looks at, damaged in one column or not at all."""
    pl = pytest.importorskip("polars")
    path = folder / "train.parquet"
    columns = {
        "x": [number * 0.37 % 1 for number in range(3000)],
        "note": [f"text number {number * number}" for number in range(3000)],
        "label": [number % 2 for number in range(3000)],
    }
    if damaged:
        columns = {damaged: columns[damaged], **columns}
    pl.DataFrame(columns).write_parquet(path, compression="zstd")
    if damaged:
        data = bytearray(path.read_bytes())
        data[60:400] = b"\xff" * 340
        path.write_bytes(data)
    return path


@pytest.mark.parametrize("column", ["x", "note"])
def test_a_column_that_cannot_be_decoded_is_an_error_also_where_no_rule_looks(
    tmp_path: Path, column: str
):
    parquet(tmp_path)
    assert names(told("train.parquet", cwd=tmp_path)) == []
    parquet(tmp_path, damaged=column)
    done = check("train.parquet", cwd=tmp_path)
    assert done.returncode == 1
    assert "error  unreadable-record" in done.stdout
    assert "cannot be read as Parquet" in done.stdout


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("x,label\n" + ROWS + '"9.5,1\n' + ROWS, 42),
        ("x,label\n" + ROWS + '"9.5,1', 42),
        ('note,x,label\n"a ""b""",1.5,0\n"two\nlines",2.5,1\n"c,3.5,1\n' + NOTED, 5),
    ],
)
def test_a_quote_that_is_never_closed_is_an_error(tmp_path: Path, content: str, line: int):
    (tmp_path / "train.csv").write_text(content)
    report = told("train.csv", cwd=tmp_path)
    (found,) = [one for one in report["findings"] if one["name"] == "unreadable-record"]
    assert (found["severity"], found["line"]) == ("error", line)
    assert "never closed" in found["message"]


def test_rows_behind_an_open_quote_are_still_judged(tmp_path: Path):
    (tmp_path / "train.csv").write_text("x,label\n" + ROWS + '"9.5,1\n' + ROWS + "nan,0\n")
    found = names(told("train.csv", cwd=tmp_path))
    assert found == [("unreadable-record", 42), ("non-finite-feature", 83)]


@pytest.mark.parametrize(
    "content",
    ['[{"x": 1, "label": 0}, {"x": 2,', '[{"x": 1} {"x": 2}]', '[{"x": 1}, , {"x": 2}]',
     '[{"x": 1}, {"x": 2}] and more', '[{"x": 1}, {"x": 2},]', '[{"x": 1}, {"x": "\udcff"}]'],
)  # fmt: skip
def test_a_list_that_is_not_json_is_an_error(tmp_path: Path, content: str):
    (tmp_path / "train.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    report = told("train.json", cwd=tmp_path)
    assert [one["severity"] for one in report["findings"]] == ["error"]
    assert names(report)[0][0] == "unreadable-record"


HOLES: dict[str, tuple[bytes, str]] = {
    "behind": (safetensors({"a.w": tensor(0, 16)}, FLOATS + bytes(8)), "last 8 bytes"),
    "before": (safetensors({"a.w": tensor(16, 32)}, FLOATS * 2), "16 bytes before a.w"),
    "twice": (
        safetensors({"a.w": tensor(0, 16), "b.w": tensor(0, 16)}, FLOATS * 2),
        "on top of another",
    ),
    "no type": (safetensors({"a.w": tensor(0, 16, dtype=None)}, FLOATS), "no type"),
}


@pytest.mark.parametrize("case", HOLES)
def test_safetensors_that_their_own_reader_refuses_are_errors(tmp_path: Path, case: str):
    content, says = HOLES[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    report = told("model.safetensors", cwd=tmp_path)
    assert names(report) == [("truncated-checkpoint", None)]
    assert says in report["findings"][0]["message"]
    library = pytest.importorskip("safetensors")
    with pytest.raises(library.SafetensorError):
        library.deserialize(content)


@pytest.mark.parametrize("case", HOLES)
def test_the_same_holds_for_data_in_safetensors(tmp_path: Path, case: str):
    content, _ = HOLES[case]
    renamed = content.replace(b'"a.w"', b'"inp"').replace(b'"b.w"', b'"y_t"')
    (tmp_path / "inputs.safetensors").write_bytes(renamed)
    report = told("inputs.safetensors", cwd=tmp_path)
    assert {one["severity"] for one in report["findings"]} == {"error"}


WHOLE = safetensors({"a.w": tensor(0, 16)}, FLOATS)
LISTED = json.dumps({"metadata": {}, "weight_map": {"a.w": "model-00001-of-00001.safetensors"}})


@pytest.mark.parametrize("kept", [0, 1, 20, len(LISTED) - 1])
def test_an_index_that_is_cut_off_is_an_error(tmp_path: Path, kept: int):
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(WHOLE)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(LISTED)
    assert names(told(".", cwd=tmp_path)) == []
    index.write_text(LISTED[:kept])
    for named in (".", index.name):
        report = told(named, cwd=tmp_path)
        assert names(report) == [("truncated-checkpoint", None)]
        assert report["findings"][0]["severity"] == "error"
        assert report["findings"][0]["path"] == index.name


@pytest.mark.parametrize("content", [b"", b":W&B\x68\xbe\x00", b":W&B\x68\xbe\x00\x01\x02"])
def test_an_empty_run_of_wandb_is_never_clean(tmp_path: Path, content: bytes):
    (tmp_path / "run-1.wandb").write_bytes(content)
    report = unable("run-1.wandb", cwd=tmp_path)
    assert reasons(report)["run-1.wandb"] == "the file holds no complete record"
    assert report["checked"] == []


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "gone.py": lambda path: None,
    "bad.py": lambda path: path.write_text("def f(:\n"),
    "bad.yaml": lambda path: path.write_text("lr: [1\n"),
    "bad.ipynb": lambda path: path.write_text("{"),
    "pipe.log": lambda path: __import__("os").mkfifo(path),
    "folder.py": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("lr = 1e-4\nepochs = 9\nepochs = 9\n", 1),
        ('name = "a"\nname = "b"\n', 2),
        ("lr = 1e-4\nepochs = 9\n", 0),
    ],
)
def test_toml_with_a_key_that_stands_twice_is_never_clean(tmp_path: Path, content: str, code: int):
    (tmp_path / "config.toml").write_text(content)
    assert check("config.toml", cwd=tmp_path).returncode == code


@pytest.mark.parametrize("name", ["a.json", "b.json"])
def test_json_with_a_number_that_python_does_not_read_is_not_checked(tmp_path: Path, name: str):
    run = '"lr": 0.1, "epochs": 3, ' if name == "a.json" else ""
    (tmp_path / name).write_text("{" + run + '"n": ' + "7" * 5_000 + "}")
    assert "a number has 5000 digits" in reasons(unable(name, cwd=tmp_path))[name]


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_named_path_that_cannot_be_read_is_code_2_also_among_others(tmp_path: Path, name: str):
    (tmp_path / "good.py").write_text(CLEAN)
    UNREADABLE[name](tmp_path / name)
    for words in ([name], [name, "good.py"], ["good.py", f"./{name}"]):
        done = check(*words, "--fail-on", "none", cwd=tmp_path)
        assert done.returncode == 2, words
        assert name in done.stdout + done.stderr
    # In a folder it is only listed: nobody asked for it.
    done = check(".", cwd=tmp_path)
    assert done.returncode == 0


def test_findings_do_not_hide_that_something_could_not_be_read(tmp_path: Path):
    (tmp_path / "train.csv").write_text("x,label\nnan,0\n1.0,1\n2.0,0\n")
    done = check("train.csv", "gone.csv", "--format", "json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "nanguard: gone.csv not checked: there is no such file\n"
    assert names(json.loads(done.stdout)) == [("non-finite-feature", 2)]


def test_nothing_to_read_is_code_2_and_nothing_to_say_is_0(tmp_path: Path):
    done = check(".", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is nothing in it that can be checked" in done.stderr
    (tmp_path / "README.md").write_text("# Title\n")
    assert check(".", cwd=tmp_path).returncode == 2
    assert check("README.md", cwd=tmp_path).returncode == 2
    # A file that was read and is about something else: a hook passes all files of a commit.
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    assert check("compose.yaml", cwd=tmp_path).returncode == 0
    assert check(".", cwd=tmp_path).returncode == 0
    (tmp_path / "good.py").write_text(CLEAN)
    assert check("good.py", "README.md", cwd=tmp_path).returncode == 0


STEPS = b"".join(b"step %d loss %.3f\n" % (at, 2 - at / 1000) for at in range(200))


def test_zeros_in_the_midst_of_a_log_hide_nothing(tmp_path: Path):
    for name in ("train.log", "train.txt", "out"):
        (tmp_path / name).write_bytes(STEPS + bytes(512) + STEPS + b"step 400 loss nan\n")
        found = [("unreadable-line", 201), ("non-finite-loss", 401)]
        assert names(told(name, cwd=tmp_path)) == found


def test_half_a_character_in_a_key_hides_nothing(tmp_path: Path):
    row = b'{"x": %d, "label": 1}\n'
    lines = [row % at for at in range(30)]
    odd = b'{"\\ud800": 1, "x": NaN, "label": 1, "note": "\\udfff"}\n'
    last = b'{"x": NaN, "label": 1}\n'
    (tmp_path / "train.jsonl").write_bytes(b"".join([*lines, odd, *lines, last]))
    assert names(told("train.jsonl", cwd=tmp_path)) == [("non-finite-feature", 31)]
    record = b'{"step": %d, "loss": 1.0}\n'
    bad = b'{"step": 31, "loss\\udfff": NaN, "loss": NaN}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(record % at for at in range(30)) + bad)
    done = check("metrics.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "non-finite-loss" in done.stdout


def test_one_bad_line_hides_nothing(tmp_path: Path):
    row = b'{"x": %d, "label": 1}\n'
    bad = [
        b"\xff\xfe{\n",
        b"{" * 100_000 + b"\n",
        bytes(512) + b"\n",
        b'{"x": ' + b"1" * 50_000 + b"}\n",
    ]
    last = b'{"x": NaN, "label": 0}\n'
    for line in bad:
        before = b"".join(row % at for at in range(20))
        (tmp_path / "train.jsonl").write_bytes(before + line + last)
        found = names(told("train.jsonl", cwd=tmp_path))
        assert ("non-finite-feature", 22) in found
        (tmp_path / "train.log").write_bytes(STEPS + line + b"step 200 loss nan\n")
        found = names(told("train.log", cwd=tmp_path))
        assert [one for one in found if one[0] != "unreadable-line"] == [("non-finite-loss", 202)]
