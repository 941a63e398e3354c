"""Files of every format, read whole: what is counted, and what is expected of it."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

from nanguard.check.data import records, table_files, tables
from nanguard.check.data.data_reader import open_sources, read_request
from nanguard.check.data.dataset import DataFile, Request
from nanguard.check.data.formats import recognises
from nanguard.check.scan import Expected, Scan

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path, scan: Scan | None = None, **expected: object) -> DataFile:
    (file,) = read_request(Request((path,), Expected(**expected)), scan or Scan()).files
    return file


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def numbers(file: DataFile) -> dict[int, int]:
    assert file.ledger.labels is not None
    return file.ledger.labels.numbers(every=True)


RECORDS = [{"text": f"no. {at}", "label": at % 5, "f": at / 7 - 3} for at in range(200)]
COUNTS = dict.fromkeys(range(5), 40)


def as_jsonl(path: Path) -> Path:
    return write(path / "t.jsonl", "".join(json.dumps(r) + "\n" for r in RECORDS))


def as_crlf(path: Path) -> Path:
    return write(path / "t.jsonl", "\ufeff" + "".join(json.dumps(r) + "\r\n" for r in RECORDS))


def as_json(path: Path) -> Path:
    return write(path / "t.json", json.dumps(RECORDS, indent=1))


def as_csv(path: Path) -> Path:
    pl.DataFrame(RECORDS).write_csv(path / "t.csv")
    return path / "t.csv"


def as_csv_of_old_macs(path: Path) -> Path:
    return write(path / "t.csv", pl.DataFrame(RECORDS).write_csv(line_terminator="\r"))


def as_tsv(path: Path) -> Path:
    pl.DataFrame(RECORDS).write_csv(path / "t.tsv", separator="\t", line_terminator="\r\n")
    return path / "t.tsv"


def as_quoted(path: Path) -> Path:
    frame = pl.DataFrame(RECORDS).with_columns(text=pl.col("text") + ',\n"x"')
    frame.write_csv(path / "t.csv")
    return path / "t.csv"


def as_parquet(path: Path) -> Path:
    pl.DataFrame(RECORDS).write_parquet(path / "t.parquet", row_group_size=30)
    return path / "t.parquet"


def as_arrow(path: Path) -> Path:
    pl.DataFrame(RECORDS).write_ipc(path / "t.arrow")
    return path / "t.arrow"


def as_stream(path: Path) -> Path:
    level = pl.CompatLevel.oldest()
    pl.DataFrame(RECORDS).write_ipc_stream(path / "t.arrow", compat_level=level)
    return path / "t.arrow"


def as_npz(path: Path) -> Path:
    frame = pl.DataFrame(RECORDS)
    np.savez_compressed(path / "t.npz", f=frame["f"].to_numpy(), label=frame["label"].to_numpy())
    return path / "t.npz"


@pytest.mark.parametrize(
    "make",
    [
        as_jsonl,
        as_crlf,
        as_json,
        as_csv,
        as_csv_of_old_macs,
        as_tsv,
        as_quoted,
        as_parquet,
        as_arrow,
        as_stream,
        as_npz,
    ],
)
def test_every_format_holds_the_same(make, tmp_path: Path):
    file = read(make(tmp_path), classes=5)
    assert file.broken is None
    assert file.ledger.records == 200
    assert file.ledger.unreadable.count == 0
    assert numbers(file) == COUNTS
    column = file.ledger.columns["f"]
    assert (column.count, column.low) == (200, -3.0)
    assert column.high == pytest.approx(199 / 7 - 3)


def test_blocks_give_what_the_whole_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"label": at % 7, "x": [0.5, at]} for at in range(3000)]
    lines = [json.dumps(row) for row in rows]
    lines[1234] = '{"label": 3, "x": [NaN, 1]}'
    lines[2500] = "{"
    path = write(tmp_path / "t.jsonl", "\n".join(lines))
    whole = read(path).ledger
    monkeypatch.setattr(records, "blocks_of", lambda path: tables.blocks_of(path, 1000))
    monkeypatch.setattr(records, "REFUSED_LINE_BYTES", 300)
    small = read(path).ledger
    for ledger in (whole, small):
        assert (ledger.records, ledger.lines) == (2999, 3000)
        assert [place.line for place in ledger.unreadable.first] == [2501]
        bad = [c.bad.line for c in ledger.columns.values() if c.bad.count]
        assert bad == [1235]
        assert ledger.labels is not None
        assert sum(ledger.labels.numbers().values()) == 2999


def test_an_endless_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "MAX_RECORD_BYTES", 5000)
    path = write(
        tmp_path / "t.jsonl", '{"label": 1}\n{"label": "' + "x" * 50_000 + '"}\n{"label": 0}\n'
    )
    monkeypatch.setattr(records, "blocks_of", lambda path: tables.blocks_of(path, 1000))
    ledger = read(path).ledger
    assert [place.line for place in ledger.unreadable.first] == [2]
    assert (ledger.records, ledger.lines) == (2, 3)


def test_progress_adds_up_to_the_file(tmp_path: Path):
    path = as_jsonl(tmp_path)
    seen: list[int] = []
    read(path, Scan(progress=lambda name, count: seen.append(count)))
    assert sum(seen) == path.stat().st_size


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("<<<<<<< HEAD", "mark of an unfinished merge"),
        ('{"label": 1', "not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[1, 2]", "a list, not an object"),
        ('{"label": ' + "9" * 5000 + "}", "not JSON"),
        ("{'label': 1}", "not JSON"),
    ],
)
def test_a_line_that_is_no_record_is_named_with_the_reason(line: str, why: str, tmp_path: Path):
    path = write(tmp_path / "t.jsonl", '{"label": 1}\n' + line + '\n{"label": 0}\n')
    ledger = read(path).ledger
    (place,) = ledger.unreadable.first
    assert place.line == 2
    assert place.value.startswith(why)
    assert ledger.records == 2


def test_rows_of_another_length_and_comments(tmp_path: Path):
    text = "a,b,label\n# made by hand\n" + "0.5,1.5,1\n" * 20 + "0.5,1\n" + "0.5,1.5,0,9\n"
    ledger = read(write(tmp_path / "t.csv", text)).ledger
    assert [place.line for place in ledger.unreadable.first] == [23, 24]
    assert ledger.records == 20


@pytest.mark.parametrize(
    "head", ['# {"t_start": 1551811845.69, "env_id": "Hopper-v2"}\nr,l,t\n', "#r,l,t\n"]
)
def test_a_remark_above_the_header_is_no_record(tmp_path: Path, head: str):
    rows = "".join(f"{n}.5,{n},0.{n}\n" for n in range(1, 9))
    ledger = read(write(tmp_path / "t.csv", head + rows)).ledger
    assert not ledger.unreadable.first
    assert ledger.records == 8


def test_a_pickle_that_is_called_an_array_is_left_alone(tmp_path: Path):
    (tmp_path / "t.npz").write_bytes(pickle.dumps({"a": [1, 2]}))
    file = read(tmp_path / "t.npz")
    assert file.broken is None
    assert file.error is not None
    assert "it is a pickle" in file.error.what


def test_a_table_without_header_has_no_label(tmp_path: Path):
    file = read(write(tmp_path / "t.csv", "0.5,1.5,1\n0.7,1.1,0\n"))
    assert file.ledger.records == 2
    assert file.ledger.labels is None


def test_a_table_of_texts_is_not_empty(tmp_path: Path):
    assert read(write(tmp_path / "t.csv", "name,text\na,b\nc,d\n")).ledger.records == 2


@pytest.mark.parametrize("make", [as_parquet, as_arrow, as_stream, as_npz])
def test_half_a_file_is_broken(make, tmp_path: Path):
    path = make(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert read(path).broken


@pytest.mark.parametrize("ending", ["parquet", "arrow", "npy", "npz", "safetensors"])
def test_a_foreign_file_is_broken(ending: str, tmp_path: Path):
    path = tmp_path / f"t.{ending}"
    path.write_bytes(b"\x89PNG\r\n" + bytes(range(256)) * 40)
    file = read(path)
    assert file.broken
    assert "\n" not in file.broken


def test_objects_are_never_unpickled(tmp_path: Path):
    array = np.empty(2, dtype=object)
    array[0] = {"a": 1}
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    file = read(tmp_path / "t.npy")
    assert file.broken is None
    assert file.error is not None
    assert "Python objects" in file.error.what


def test_what_a_stream_only_promises_takes_no_memory(tmp_path: Path):
    for size in (1 << 29, -5):
        path = tmp_path / "damaged.arrow"
        path.write_bytes(b"\xff\xff\xff\xff" + size.to_bytes(4, "little", signed=True))
        tracemalloc.start()
        try:
            assert "damaged" in str(read(path).broken)
            assert tracemalloc.get_traced_memory()[1] < 1 << 22
        finally:
            tracemalloc.stop()


def test_settings_twice_in_one_file_are_no_data(tmp_path: Path):
    """They would be called clean, and whoever reads the settings refuses the second object."""
    rows = b'{"lr": 1e-4, "nest": [1]}\n' * 2
    assert recognises(tmp_path / "train.json", rows)
    assert not recognises(tmp_path / "config.json", rows)
    assert not recognises(tmp_path / "ds_config_zero2.json", rows)


def test_an_array_that_promises_more_than_it_has(tmp_path: Path):
    np.save(tmp_path / "t.npy", np.zeros((4, 4)))
    data = (tmp_path / "t.npy").read_bytes().replace(b"(4, 4)", b"(9, 9)")
    (tmp_path / "t.npy").write_bytes(data)
    assert "cut off" in str(read(tmp_path / "t.npy").broken)


@pytest.mark.parametrize(("kind", "loads"), [("4f4", False), ("(1,)f4", True)])
def test_elements_that_are_arrays_are_read_as_numpy_reads_them(
    kind: str, loads: bool, tmp_path: Path
):
    path = tmp_path / "t.npy"
    np.save(path, np.zeros((4, 4), "<f4"))
    head, numbers = path.read_bytes()[:128], path.read_bytes()[128:]
    changed = head.replace(b"'<f4'", repr(kind).encode())
    path.write_bytes(changed.replace(b" " * (len(changed) - 128) + b"\n", b"\n") + numbers * 4)
    if loads:
        assert np.load(path).shape[:2] == (4, 4)
        assert read(path).broken is None
    else:
        with pytest.raises(ValueError, match="Failed to read all data"):
            np.load(path)
        assert "its elements are arrays" in str(read(path).broken)


def test_a_packed_array_that_would_fill_the_memory(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.zeros(4))
    short, long = b"(4,), }" + b" " * 10, b"(99999999999,), }"
    head = (tmp_path / "x.npy").read_bytes()[:128].replace(short, long)
    assert long in head
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", head + bytes(1 << 20))
    assert read(tmp_path / "t.npz").broken


def test_a_folder_of_datasets_knows_its_classes(tmp_path: Path):
    part = tmp_path / "train"
    part.mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (part / "state.json").write_text('{"_data_files": [{"filename": "data-00000.arrow"}]}')
    info = {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}
    (part / "dataset_info.json").write_text(json.dumps(info))
    pl.DataFrame({"label": [0, 1, 2]}).write_ipc_stream(part / "data-00000.arrow")
    (source,) = open_sources([tmp_path], Scan())
    assert source.request.expected.classes == 2
    assert source.request.expected.label_key == "label"
    assert numbers(source.files[0]) == {0: 1, 1: 1, 2: 1}


def test_measurements_stay_small(tmp_path: Path):
    values = np.random.default_rng(0).normal(size=120_000)
    np.savez(tmp_path / "t.npz", X=values.reshape(-1, 1), y=values)
    labels = read(tmp_path / "t.npz").ledger.labels
    assert labels is not None
    assert labels.overflowed
    assert labels.fractional == labels.total
    assert len(labels.seen) < 60_000


def test_what_is_no_file_beside_data_is_not_waited_for(tmp_path: Path):
    table = write(tmp_path / "t.csv", "x,label\n1,0\n")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (source,) = open_sources([table], Scan())
    assert len(source.files) == 1


def test_a_table_of_old_macs_is_read_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(table_files, "_HEAD_BYTES", 300)
    monkeypatch.setattr(table_files, "MAX_CELL", 2000)
    table = as_csv_of_old_macs(tmp_path)
    file = read(table)
    assert (file.ledger.records, numbers(file)) == (200, COUNTS)
    with table.open("ab") as grown:
        grown.write(b"x" * 5000 + b"\rno. 200,0,1.5\r")
    ledger = read(table).ledger
    assert (ledger.unreadable.count, ledger.records, ledger.lines) == (1, 201, 203)
