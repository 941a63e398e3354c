"""Text logs: lines, shapes and columns, and the engine for large files beside the one for small."""

from __future__ import annotations

import math
import tracemalloc
from array import array
from typing import TYPE_CHECKING

import pytest

from nanguard.check.log import text_log
from nanguard.check.log.grammar import read_line, shape_of
from nanguard.check.log.quantities import Quantity, metric_of, note_of
from nanguard.check.log.series import Log, MetricSeries, SeriesColumn, compact
from nanguard.check.log.text_log import read_text
from nanguard.check.scan import Scan
from tests.cost import cpu_seconds

if TYPE_CHECKING:
    from pathlib import Path


def said(line: str) -> dict[str, float]:
    return {value.metric.name: value.number for value in read_line(line).values}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("step=3 loss=2.5 lr=1e-4", {"loss": 2.5, "lr": 1e-4}),
        ("Epoch 2/50 | Train Loss: 0.7 | Val Acc: 97.5%", {"Train Loss": 0.7, "Val Acc": 0.975}),
        ("[Train Step] 2/9: loss_simple: 0.4, loss_vlb: 0.0", {"loss_simple": 0.4, "loss_vlb": 0}),
        ("{'loss': 0.0, 'grad_norm': 1.5, 'epoch': 0.9}", {"loss": 0.0, "grad_norm": 1.5}),
        ("loss: 1,250.5", {"loss": 1250.5}),
        ("lm loss: 1.07E+01 | grad norm: 3.1 |", {"lm loss": 10.7, "grad norm": 3.1}),
        ("Loss 2.31 (2.40)  Acc@1 12.5 (13.1)", {"Loss": 2.31, "Acc@1": 12.5}),
        ("best_val_loss = inf  # initial value", {}),
        ("val_loss improved from inf to 0.69", {}),
        ("Best checkpoint: epoch 0, val_loss=inf", {}),
        ("max_grad_norm: inf, loss_weight: nan", {}),
        ("loss NaN guard enabled", {}),
        ("if the loss is nan, stop", {}),
        ("number of nan iterations: 0", {}),
        ("[loss_scaler.py:190:update_scale]", {}),
        ("loss: nan-safe", {}),
        ("food101 and loss101", {}),
    ],
)
def test_what_a_line_says(line: str, values: dict[str, float]):
    assert said(line) == values


@pytest.mark.parametrize("nan", ["nan", "NaN", "-nan", "nan.0", "tensor(nan, device='cuda:0')"])
def test_nan_in_every_spelling(nan: str):
    assert math.isnan(said(f"step 1 | loss: {nan}")["loss"])


def test_places_of_a_line():
    line = read_line("[rank3]: Epoch 2 step 1,250 food101: Loss: 0.5")
    assert line.step is not None
    assert line.epoch is not None
    assert (line.step.number, line.epoch.number, line.rank) == (1250, 2, 3)
    assert line.label == "food101"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("train/loss_epoch", Quantity.LOSS),
        ("trainLoss", Quantity.LOSS),
        ("gnorm", Quantity.GRAD_NORM),
        ("scaler_scale", Quantity.SCALE),
        ("trainer/global_step", Quantity.STEP),
        ("learning_rate", Quantity.RATE),
        ("total_steps", None),
        ("loss_weight", None),
        ("info", None),
    ],
)
def test_what_a_name_stands_for(name: str, role: Quantity | None):
    metric = metric_of(name)
    assert (metric.role if metric else None) is role


@pytest.mark.parametrize(
    ("line", "role", "step"),
    [
        ("WARNING: NaN gradients detected at step 92261, zeroing", Quantity.GRAD_NORM, 92261),
        ("Loss became infinite or NaN at iteration=400!", Quantity.LOSS, 400),
        ("Batch 5: Invalid loss, terminating training", Quantity.LOSS, None),
        ("Current loss scale already at minimum - cannot decrease", Quantity.SCALE, None),
    ],
)
def test_what_is_said_in_words(line: str, role: Quantity, step: int | None):
    note = note_of(line, 7)
    assert note is not None
    assert (note.role, note.step, note.line) == (role, step, 7)


@pytest.mark.parametrize(
    "line",
    [
        "NaN check enabled: will raise if the loss is NaN",
        "no NaN gradients found at step 3",
        "Avengers: Infinity War, loss of info",
        "WARNING: NaN or Inf found in input tensor.",
        "overflow, step skipped",
    ],
)
def test_what_is_no_alarm(line: str):
    assert note_of(line, 1) is None


def test_a_shape_takes_the_numbers_of_like_lines_and_of_no_others():
    first = "12:00:01 step 10 |████      | loss=2.50 acc=50.0% norm"
    shape = shape_of(first, read_line(first))
    assert shape is not None
    found = shape.compiled.match("12:00:09 step  11 |█████     | loss=-1.2e-3 acc=51.0% norm")
    assert found is not None
    assert sorted(found.groups()) == ["-1.2e-3", "11", "51.0"]
    assert not shape.compiled.match("12:00:09 step 11 |█████     | loss=nan acc=51.0% norm")
    assert not shape.compiled.match("12:00:09 step 11 |█████     | val_loss=1.0 acc=51.0% norm")


def table(log: Log) -> list[tuple[object, ...]]:
    return [
        (s.name, s.rank, repr(s[i].value), s[i].step, s[i].epoch, s[i].line)
        for s in log.series
        for i in range(len(s))
    ]


def mixed_log(lines: int) -> str:
    """A log with everything in it: ranks, colours, bars, NaN, sentences, blank lines, pairs."""
    rows = []
    for i in range(lines):
        loss = "nan" if i % 97 == 96 else f"{2 + (i * 7 % 13) / 100:.4f}"
        rows.append(f"[rank{i % 2}]: step={i // 2} loss={loss} grad_norm={1 + i % 3}.5")
        if i % 50 == 0:
            rows.append(f"\x1b[32mEpoch {i // 50}\x1b[0m")
        if i % 31 == 0:
            rows.append("".join(f" {k}%|{'█' * k}   | {k}/9 [loss={k}.25]\r" for k in range(9)))
        if i % 41 == 0:
            rows.append(f"eval: val_loss {i}.5")
            rows.append("")
        if i % 211 == 0:
            rows.append(f"ERROR NaN gradients detected at step {i}")
    return "\n".join(rows) + "\n"


def test_both_engines_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("polars")
    file = tmp_path / "train.log"
    file.write_text(mixed_log(3000), encoding="utf-8", newline="")
    small = read_text(file, Scan())
    monkeypatch.setattr(text_log, "_BULK", 0)
    monkeypatch.setattr("nanguard.check.log.text_log._BLOCK_BYTES", 20_000)
    large = read_text(file, Scan())
    assert {s.name for s in small.series} >= {"loss", "grad_norm", "val_loss"}
    assert sorted(map(str, table(large))) == sorted(map(str, table(small)))
    assert large.notes == small.notes


def test_pieces_that_carriage_returns_cut_count_as_one_line(tmp_path: Path):
    file = tmp_path / "a.log"
    file.write_bytes(b"start\r\nloss=1.5\rloss=1.4\rloss=1.3\r\nloss=1.2\n")
    (series,) = read_text(file, Scan()).series
    assert [series[i].line for i in range(4)] == [2, 2, 2, 3]


def test_utf16_of_another_shell(tmp_path: Path):
    file = tmp_path / "a.log"
    file.write_text("step 1 loss 2.5\nstep 2 loss 2.4\n", encoding="utf-16")
    (series,) = read_text(file, Scan()).series
    assert [series[i].step for i in range(2)] == [1, 2]


def test_one_metric_that_is_written_in_two_ways_keeps_the_order_of_its_lines(tmp_path: Path):
    file = tmp_path / "train.log"
    epoch = "Epoch: [{0}][1/2] Train Loss 0.{0}1\nEpoch: [{0}][2/2] Train Loss 0.{0}2\n"
    file.write_text("".join(epoch.format(n) + f"train_loss: 0.{n}3\n" for n in range(1, 6)))
    (series,) = read_text(file, Scan()).series
    assert list(series.lines) == list(range(1, 16))


def test_the_number_a_writer_broke_off_in_is_not_read(tmp_path: Path):
    file = tmp_path / "a.log"
    file.write_text("step 1 loss 2.5\nstep 2 loss 3")
    (series,) = read_text(file, Scan()).series
    assert len(series) == 1
    file.write_text("step 1 loss 2.5\nstep 2 loss nan")
    (series,) = read_text(file, Scan()).series
    assert len(series) == 2


@pytest.mark.parametrize("unit", ["x", "loss=1.0 ", "loss: ", "1.5 ", "nan ", "[[[[", "=:|"])
def test_endless_lines_stay_bounded(tmp_path: Path, unit: str):
    file = tmp_path / "a.log"
    size = 6 << 20
    file.write_text("step 1 loss 2.5\n" + unit * (size // len(unit)) + "\nstep 2 loss 2.4\n")
    tracemalloc.start()
    log = read_text(file, Scan())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (series,) = [s for s in log.series if s.name == "loss"]
    assert (series[0].line, series[len(series) - 1].line) == (1, 3)
    assert peak < 40 << 20


@pytest.mark.parametrize(
    "line",
    [
        "loss: " + "1" * 60_000 + "x",
        "loss error nan " * 4000,
        "loss" + " " * 60_000 + "|",
        "step 1 loss 2.5 |####      | " + "#" * 900 + " " * 900 + "!",
        "loss [" * 10_000,
        "\x1b[" + "0" * 60_000,
        '{"loss": ' + "[" * 30_000,
        "loss=" + "1,234" * 9000,
        "epoch  loss" + "  1" * 15_000,
    ],
    ids=range(9),
)
def test_no_line_takes_long(tmp_path: Path, line: str):
    file = tmp_path / "a.log"
    head = "epoch  loss  acc\nstep 1 loss 2.5 |####      | 1/9\nstep 2 loss 2.5 |#####     | 2/9\n"
    file.write_text(head + (line + "\n") * 5)
    usual = tmp_path / "usual.log"
    usual.write_text("".join(f"step {n} loss 2.5 lr 0.001\n" for n in range(12_000)))
    # Both have some 300,000 characters.
    assert cpu_seconds(lambda: read_text(file, Scan())) < 300 * cpu_seconds(
        lambda: read_text(usual, Scan())
    )


def test_names_without_end_stay_bounded(tmp_path: Path):
    file = tmp_path / "a.log"
    file.write_text("".join(f"step {i} loss_{i:x}q: 1.5\n" for i in range(3000)))
    assert len(read_text(file, Scan()).series) == 512


def test_columns_are_ranges_where_they_are_regular():
    column = SeriesColumn()
    for start in range(0, 1000, 100):
        column.extend(compact(array("q", range(start, start + 100, 10))))
    assert list(column) == list(range(0, 1000, 10))
    assert len(column._blocks) == 1
    column.extend(compact([5, 3, 900]))
    assert (column[99], column[100], column[102]) == (990, 5, 900)


def test_a_number_beyond_single_precision_is_kept():
    metric = metric_of("loss")
    assert metric is not None
    series = MetricSeries(metric)
    series.extend(array("d", [1.0, 1e300, math.inf, math.nan]), None, None, None)
    assert series.values[1] == 1e300
    assert series.bad() == [2, 3]
    assert MetricSeries(metric).values.typecode == "f"
