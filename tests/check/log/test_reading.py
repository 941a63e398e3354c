"""Which files are logs, what belongs together, and what is read from each form."""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import TYPE_CHECKING

import pytest

from nanguard.check.log.binary_logs import checksummed, masked_crc
from nanguard.check.log.log_reader import open_sources, recognises, recognises_folder
from nanguard.check.log.quantities import Quantity
from nanguard.check.scan import Scan

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.log.series import Log


def read(*paths: Path) -> list[Log]:
    return list(open_sources(paths, Scan()))


def is_log(path: Path) -> bool:
    return recognises(path, path.read_bytes()[: 1 << 16])


def points(log: Log, name: str) -> list[tuple[int | None, float]]:
    (series,) = [s for s in log.series if s.name == name]
    return [(series[i].step, round(series[i].value, 4)) for i in range(len(series))]


# ------------------------------------------------------------------ event files, made by hand
def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def chunk(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return (
        length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))
    )


def scalar(tag: str, step: int, value: float, *, tensor: str = "") -> bytes:
    body = chunk(1, tag.encode())
    if tensor == "float_val":
        body += chunk(8, b"\x08\x01" + chunk(5, struct.pack("<f", value)))
    elif tensor == "double":
        body += chunk(8, b"\x08\x02" + chunk(4, struct.pack("<d", value)))
    elif tensor == "half":
        body += chunk(8, b"\x08\x13" + chunk(4, struct.pack("<e", value)))
    elif tensor == "bfloat16":
        body += chunk(8, b"\x08\x0e" + chunk(4, struct.pack("<f", value)[2:]))
    else:
        body += b"\x15" + struct.pack("<f", value)
    event = b"\x09" + struct.pack("<d", 1.0) + b"\x10" + varint(step) + chunk(5, chunk(1, body))
    return record(event)


VERSION = record(b"\x09" + struct.pack("<d", 1.0) + chunk(3, b"brain.Event:2"))


def test_event_files_of_one_folder_are_one_log(tmp_path: Path):
    for number in range(2):
        steps = range(number * 10, number * 10 + 10)
        data = VERSION + b"".join(scalar("train/loss", s, 2.0 - s / 100) for s in steps)
        (tmp_path / f"events.out.tfevents.{number}.host").write_bytes(data)
    assert recognises_folder(tmp_path)
    (log,) = read(*tmp_path.iterdir())
    assert log.problem is None
    assert points(log, "train/loss")[0] == (0, 2.0)
    assert points(log, "train/loss")[-1] == (19, 1.81)
    (same,) = read(tmp_path)
    assert points(same, "train/loss") == points(log, "train/loss")


@pytest.mark.parametrize("kind", ["", "float_val", "double", "half", "bfloat16"])
def test_every_way_to_write_a_scalar(tmp_path: Path, kind: str):
    file = tmp_path / "events.out.tfevents.1.host"
    big = record(chunk(5, chunk(1, chunk(1, b"image") + chunk(4, b"x" * 100_000))))
    rows = [scalar("Loss/train", 3, 1.5, tensor=kind), big]
    file.write_bytes(VERSION + b"".join(rows) + scalar("Loss/train", 4, math.nan, tensor=kind))
    (log,) = read(file)
    (series,) = log.series
    assert (series[0].step, series[0].value) == (3, 1.5)
    assert series[1].step == 4
    assert math.isnan(series[1].value)


@pytest.mark.parametrize("cut", [3, 15, 40])
def test_an_event_file_that_is_still_being_written(tmp_path: Path, cut: int):
    file = tmp_path / "events.out.tfevents.1.host"
    whole = VERSION + scalar("loss", 1, 1.0) + scalar("loss", 2, 2.0)
    file.write_bytes(whole[:-cut])
    (log,) = read(file)
    assert log.problem is None
    assert points(log, "loss")[0] == (1, 1.0)


def test_an_event_file_of_nonsense_is_a_problem_not_a_crash(tmp_path: Path):
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(VERSION + record(b"\xff" * 40))
    (log,) = read(file)
    assert log.problem is not None
    assert "no event" in log.problem.what
    file.write_bytes(VERSION[:20])
    (log,) = read(file)
    assert log.problem is not None
    assert "no complete record" in log.problem.what
    file.write_bytes(VERSION + struct.pack("<Q", 1 << 60) + b"\0" * 40)
    (log,) = read(file)
    assert log.series == []
    assert not recognises_folder(tmp_path / "nowhere")


def test_checksums_are_those_of_the_format():
    """CRC-32C of the digits is 0xE3069283 in every book; event files turn and shift it."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("size", [16_383, 16_384, 20_000, 200_001])
def test_checksums_of_long_data_are_those_of_its_bytes_one_by_one(size: int):
    data, half = bytes(range(251)) * (size // 251 + 1), size // 2
    in_pieces = checksummed(data[half:size], checksummed(data[:half], 5))
    slowly = 5
    for byte in data[:size]:
        slowly = checksummed(bytes([byte]), slowly)
    assert in_pieces == checksummed(data[:size], 5) == slowly


def test_the_checksum_of_an_image_is_looked_at(tmp_path: Path):
    path = tmp_path / "events.out.tfevents.1.host"
    image = bytearray(record(chunk(5, chunk(1, chunk(1, b"image") + chunk(4, b"x" * 100_000)))))
    path.write_bytes(VERSION + image + scalar("train/loss", 1, 0.5))
    assert read(path)[0].problem is None
    image[50_000] ^= 1
    path.write_bytes(VERSION + image + scalar("train/loss", 1, 0.5))
    problem = read(path)[0].problem
    assert problem is not None
    assert "checksum is wrong" in problem.what


@pytest.mark.parametrize("at", [3, 9, 30, -2])
def test_an_event_file_is_read_up_to_a_wrong_checksum(tmp_path: Path, at: int):
    """In the length, its checksum, the data, or the checksum of the data of the second record."""
    path = tmp_path / "events.out.tfevents.1.host"
    second = bytearray(scalar("train/loss", 2, 0.25))
    second[at] ^= 1
    rest = bytes(second) + scalar("train/loss", 3, 0.1)
    path.write_bytes(VERSION + scalar("train/loss", 1, 0.5) + rest)
    (log,) = read(path)
    assert points(log, "train/loss") == [(1, 0.5)]
    assert "checksum" in str(log.problem)


@pytest.mark.parametrize(
    "event",
    [
        chunk(3, b"\xff\xfe"),  # texts that are no UTF-8: the version, a tag, the name of a plugin
        chunk(5, chunk(1, chunk(1, b"\xff"))),
        chunk(5, chunk(1, chunk(9, chunk(1, chunk(1, b"\xff"))))),
        chunk(5, chunk(1, chunk(5, chunk(6, b"1234567")))),  # seven bytes of numbers of eight
        chunk(5, chunk(1, chunk(8, chunk(10, b"\xff")))),  # a number that does not end
        b"\x00\x01",  # field 0
        chunk(5, b"\x0e"),  # a type of field that there is not
    ],
    ids=range(7),
)
def test_an_event_that_tensorboard_refuses_is_a_problem(tmp_path: Path, event: bytes):
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(VERSION + scalar("loss", 1, 0.5) + record(event) + scalar("loss", 2, 0.4))
    (log,) = read(path)
    assert points(log, "loss") == [(1, 0.5)]
    assert "a record is damaged" in str(log.problem)


# ------------------------------------------------------------------ wandb
def wandb_file(path: Path, rows: list[dict[str, float]]) -> None:
    out = b":W&B" + b"\xe1\xbe\x00"
    for number, row in enumerate(rows):
        items = b"".join(
            chunk(1, chunk(1, key.encode()) + chunk(16, json.dumps(value).encode()))
            for key, value in row.items()
        )
        data = b"\x08" + varint(number) + chunk(2, items + chunk(2, b"\x08" + varint(number * 10)))
        while data is not None:
            room = 32768 - len(out) % 32768
            if room < 7:
                out += b"\0" * room
                continue
            part, rest = data[: room - 7], data[room - 7 :]
            begins = number == 0 or not getattr(wandb_file, "inside", False)
            kind = (1 if begins else 4) if not rest else (2 if begins else 3)
            wandb_file.inside = bool(rest)  # type: ignore[attr-defined]
            checksum = zlib.crc32(bytes([kind]) + part)
            out += struct.pack("<IHB", checksum, len(part), kind) + part
            data = rest or None
    path.write_bytes(out)


def test_an_offline_run_of_wandb(tmp_path: Path):
    file = tmp_path / "run-abc.wandb"
    wandb_file(file, [{"train/loss": 2.0 - i / 1000, "lr": 1e-4} for i in range(1500)])
    assert file.stat().st_size > 2 * 32768
    assert is_log(file)
    (log,) = read(file)
    assert log.problem is None
    found = points(log, "train/loss")
    assert len(found) == 1500
    assert found[700] == (7000, 1.3)
    file.write_bytes(file.read_bytes()[:40_000])
    (log,) = read(file)
    assert 0 < len(log.series[0]) < 1500


def test_an_offline_run_is_read_up_to_a_wrong_checksum(tmp_path: Path):
    file = tmp_path / "run-abc.wandb"
    wandb_file(file, [{"train/loss": 2.0 - i / 10} for i in range(9)])
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    file.write_bytes(damaged)
    (log,) = read(file)
    assert 2 < len(log.series[0]) < 9
    assert "its checksum is wrong" in str(log.problem)


# ------------------------------------------------------------------ histories and run folders
def test_a_trainer_state_has_steps_and_lines(tmp_path: Path):
    file = tmp_path / "trainer_state.json"
    history = [{"loss": 2.0 - i / 10, "step": i * 10, "epoch": i / 10} for i in range(1, 6)]
    history.insert(2, {"eval_loss": 1.9, "step": 20, "epoch": 0.2})
    file.write_text(json.dumps({"global_step": 50, "log_history": history}, indent=2))
    assert is_log(file)
    (log,) = read(file)
    assert points(log, "loss")[0] == (10, 1.9)
    assert points(log, "eval_loss") == [(20, 1.9)]
    line = log.series[0][0].line
    assert line is not None
    assert '"step": 10' in file.read_text().split("\n")[line - 1]


def test_a_trainer_state_that_is_cut_short(tmp_path: Path):
    file = tmp_path / "trainer_state.json"
    file.write_text('{"log_history": [{"loss": 2.0, "step": 1}, {"lo')
    assert is_log(file)
    (log,) = read(file)
    assert log.problem is not None
    assert "cut short" in log.problem.do


def test_a_run_folder_of_the_guard(tmp_path: Path):
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    metrics.write_text(
        "".join(
            f'{{"step":{i},"loss":{2 - i / 9},"terms":{{"text":1.0}},"grad_norm":1.0}}\n'
            for i in range(9)
        )
    )
    events.write_text(
        '{"time":1.0,"action":"skip","code":"RUN002","name":"non-finite-gradient","step":4,'
        '"message":"the gradient norm is nan"}\n'
    )
    assert is_log(metrics)
    assert is_log(events)
    (log,) = read(metrics, events)
    assert [(n.role, n.step, n.line) for n in log.notes] == [(Quantity.GRAD_NORM, 4, 1)]
    assert "terms/text" not in [s.name for s in log.series if s.role is Quantity.LOSS]


# ------------------------------------------------------------------ what is no log
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.jsonl", '{"text": "loss: 2.0 and loss: 3.0", "label": 1}\n' * 3),
        ("data.csv", "x,y,label\n1,2,3\n4,5,6\n"),
        ("config.json", '{\n "hidden_size": 768,\n "loss_scale": 0,\n "lr": 1e-4\n}\n'),
        ("config.yaml", "loss: 1.0\nlr: 0.1\nloss_weight: 2\n"),
        ("train.py", "loss = 2.0\nloss = 3.0\n"),
        ("snippet.txt", "import torch\nfrom x import y\nloss = 2.0\nloss = 3.0\n"),
        ("README.md", "step 1 loss 2.0\nstep 2 loss 1.0\n"),
        ("prose.txt", "The loss was 0.3 after epoch 3. A loss of time.\n"),
        ("notes.txt", "Nothing here.\n"),
        ("empty.log", ""),
        ("model.bin", "\0\1\2" * 1000),
        ("tokenizer.json", '{"vocab": {"loss": 12, "step": 13}}'),
    ],
)
def test_what_is_no_log(tmp_path: Path, name: str, text: str):
    file = tmp_path / name
    file.write_text(text)
    assert not is_log(file)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nohup.out", "iter 0: loss 2.1\niter 1: loss 2.0\n"),
        ("slurm-17", "step 1 | loss 2.1\nstep 2 | loss 2.0\n"),
        ("history.csv", "epoch,train_loss\n1,2.0\n"),
        ("m.jsonl", '{"step": 1, "loss": null, "eval_loss": 1.0}\n'),
        ("loss.json", '[{"step": 1, "loss": 2.0},\n {"step": 2, "loss": 1.0}]'),
        ("setup.log", "installing\n" * 10_000),
    ],
)
def test_what_is_a_log(tmp_path: Path, name: str, text: str):
    file = tmp_path / name
    file.write_text(text)
    assert is_log(file)


def test_a_file_that_is_gone_is_a_problem(tmp_path: Path):
    (log,) = read(tmp_path / "gone.log")
    assert log.problem is not None
    assert "cannot be read" in log.problem.what
