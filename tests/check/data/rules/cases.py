"""Small data sets, healthy and not, each with the rules that have to speak about it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

TRAINING = "optimizer: {name: AdamW, lr: 1.0e-4}\ntraining: {epochs: 3, max_grad_norm: 1.0}\n"


@dataclass(frozen=True)
class Case:
    """A data set in a folder, and what has to be said about it.

    Attributes:
        write: Writes it.
        expected: Each rule that speaks, with the line it names; None for no line.
    """

    write: Callable[[Path], None]
    expected: tuple[tuple[str, int | None], ...] = ()


CASES: dict[str, Case] = {}


def case(*expected: tuple[str, int | None]) -> Callable[[Callable[[Path], None]], None]:
    """Registers a function that writes a data set."""

    def register(write: Callable[[Path], None]) -> None:
        CASES[write.__name__] = Case(write, expected)

    return register


def lines(path: Path, records: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")


def config(folder: Path, text: str) -> None:
    (folder / "config.yaml").write_text(text + TRAINING, "utf-8")


def table(path: Path, columns: dict[str, list[object]], sep: str = ",") -> None:
    rows = zip(*columns.values(), strict=True)
    body = "\n".join(sep.join("" if c is None else str(c) for c in row) for row in rows)
    path.write_text(sep.join(columns) + "\n" + body + "\n", "utf-8")


def normal(count: int, seed: int = 0, scale: float = 1.0) -> list[float]:
    rng = Random(seed)
    return [round(rng.gauss(0, 1) * scale, 4) for _ in range(count)]


def classes(count: int, k: int) -> list[int]:
    out = [at % k for at in range(count)]
    Random(k).shuffle(out)
    return out


def safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    names = {"float32": "F32", "int64": "I64", "float16": "F16", "int32": "I32"}
    header, data = {}, b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


FOOD = (
    "model: {num_labels: 172}\ndata:\n  train_jsonl_list: [a.jsonl, b.jsonl]\n"
    "datasets:\n  dataset_configs:\n    food101: {num_classes: 101}\n"
    "    food172: {num_classes: 172}\n"
)


def food(group: str, k: int, count: int) -> list[dict[str, object]]:
    return [
        {"image": f"/mnt/{at}.jpg", "label": c, "dataset_name": group}
        for at, c in enumerate(classes(count, k))
    ]


@case(("label-out-of-range", 8))
def group_label_is_one_too_large(folder: Path) -> None:
    config(folder, FOOD)
    a = food("food101", 101, 303)
    a[7]["label"] = 101
    lines(folder / "a.jsonl", a)
    lines(folder / "b.jsonl", food("food172", 172, 516))


@case()
def the_same_label_is_fine_in_the_larger_group(folder: Path) -> None:
    config(folder, FOOD)
    lines(folder / "a.jsonl", food("food101", 101, 303))
    b = food("food172", 172, 516)
    b[7]["label"] = 101
    lines(folder / "b.jsonl", b)


@case(("label-out-of-range", 5))
def parquet_like_json_with_blank_lines(folder: Path) -> None:
    config(folder, "data: {train_file: train.jsonl, num_classes: 3}\n")
    (folder / "train.jsonl").write_text(
        '{"text": "a", "label": 0}\n\n{"text": "b", "label": 1}\n\n{"text": "c", "label": 3}\n'
        '{"text": "d", "label": 2}\n'
    )


@case(("label-out-of-range", None))
def parquet_label_too_large(folder: Path) -> None:
    config(folder, "data: {train_file: train.parquet, num_classes: 4}\n")
    y = classes(80, 4)
    y[13] = 9
    pl.DataFrame({"f0": normal(80), "f1": normal(80, 1), "label": y}).write_parquet(
        folder / "train.parquet"
    )


@case(("label-out-of-range", None))
def npz_label_too_large(folder: Path) -> None:
    config(folder, "data: {train_file: train.npz, num_classes: 5}\n")
    y = np.array(classes(100, 5))
    y[40] = 5
    np.savez(folder / "train.npz", X=np.random.default_rng(0).normal(size=(100, 8)), y=y)


@case(("label-out-of-range", None))
def safetensors_label_too_large(folder: Path) -> None:
    config(folder, "data: {train_file: train.safetensors, num_classes: 5}\n")
    y = np.array(classes(100, 5))
    y[40] = 7
    x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
    safetensors(folder / "train.safetensors", {"features": x, "labels": y})


@case()
def ignored_labels_are_declared(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 3}\nloss: {ignore_index: -1}\n")
    lines(folder / "t.jsonl", [{"text": "x", "label": y} for y in [0, 1, 2, -1, -100] * 9])


@case()
def void_pixels_are_declared(folder: Path) -> None:
    config(folder, "data: {train_file: t.npz, num_classes: 19, ignore_label: 255}\n")
    mask = np.random.default_rng(0).integers(0, 19, (20, 8, 8)).astype("uint8")
    mask[:, 0] = 255
    image = np.random.default_rng(1).normal(size=(20, 3, 8, 8)).astype("float32")
    np.savez(folder / "t.npz", images=image, labels=mask)


@case(("negative-label", 4))
def negative_json_label(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 3}\n")
    lines(folder / "t.jsonl", [{"text": "x", "label": y} for y in [0, 1, 2, -1, 1, 0, 2] * 5])


@case(("negative-label", None))
def negative_parquet_label(folder: Path) -> None:
    y = classes(80, 5)
    y[3] = y[9] = -1
    frame = pl.DataFrame({"text": ["t"] * 80, "label": y})
    frame.write_parquet(folder / "train.parquet")


@case()
def hinge_labels(folder: Path) -> None:
    table(
        folder / "svm.csv",
        {"a": normal(40), "b": normal(40, 1), "y": [1 if at % 3 else -1 for at in range(40)]},
    )


@case()
def hidden_labels_of_a_test_part(folder: Path) -> None:
    lines(folder / "test.jsonl", [{"sentence": "x", "label": -1} for _ in range(30)])


@case(("non-integer-label", 11))
def name_among_numbers(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 4}\n")
    records = [{"text": "x", "label": y} for y in classes(40, 4)]
    records[10]["label"] = "apple"
    lines(folder / "t.jsonl", records)


@case(("non-integer-label", 6))
def fraction_in_a_table(folder: Path) -> None:
    config(folder, "data: {train_file: t.csv, num_classes: 4}\n")
    y: list[object] = list(classes(40, 4))
    y[4] = 1.5
    table(folder / "t.csv", {"a": list(normal(40)), "b": list(normal(40, 1)), "label": y})


@case(("non-integer-label", None))
def fraction_in_an_array(folder: Path) -> None:
    config(folder, "data: {train_file: t.npz, num_classes: 4}\n")
    y = np.array(classes(60, 4), dtype="float32")
    y[20] = 2.5
    np.savez(folder / "t.npz", X=np.random.default_rng(0).normal(size=(60, 5)), y=y)


@case()
def whole_numbers_written_as_fractions(folder: Path) -> None:
    config(folder, "data: {train_file: t.csv, num_classes: 4}\n")
    y = [f"{c}.0" for c in classes(40, 4)]
    table(folder / "t.csv", {"a": list(normal(40)), "b": list(normal(40, 1)), "label": list(y)})


@case()
def class_names(folder: Path) -> None:
    config(folder, "data: {train_file: t.csv, num_classes: 3}\n")
    y = [("cat", "dog", "owl")[c] for c in classes(60, 3)]
    table(folder / "t.csv", {"text": ["t"] * 60, "label": list(y)})


@case()
def ratings(folder: Path) -> None:
    rng = Random(0)
    lines(
        folder / "reviews.jsonl",
        [{"text": "x", "label": rng.choice([1, 2, 3, 4, 5, 3.5, 4.5])} for _ in range(80)],
    )


@case()
def regression_targets(folder: Path) -> None:
    np.savez(
        folder / "reg.npz",
        X=np.random.default_rng(0).normal(size=(60, 5)),
        y=np.random.default_rng(1).normal(size=60) * 30,
    )


@case()
def regression_by_its_loss(folder: Path) -> None:
    config(folder, "data: {train_file: t.csv, label_column: price}\nloss: {type: MSELoss}\n")
    table(
        folder / "t.csv",
        {"a": list(normal(40)), "b": list(normal(40, 1)), "price": list(normal(40, 2, 50.0))},
    )


@case(("missing-label", 23))
def null_label(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 4}\n")
    records = [{"text": "x", "label": y} for y in classes(60, 4)]
    records[22]["label"] = None
    lines(folder / "t.jsonl", records)


@case(("missing-label", 31))
def label_left_out(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 4}\n")
    records = [{"text": "x", "label": y} for y in classes(60, 4)]
    del records[30]["label"]
    lines(folder / "t.jsonl", records)


@case(("missing-label", None))
def null_in_parquet(folder: Path) -> None:
    y: list[int | None] = list(classes(60, 4))
    y[5] = None
    pl.DataFrame({"text": ["t"] * 60, "label": y}).write_parquet(folder / "t.parquet")


@case(("missing-label", 12))
def nan_label_in_a_table(folder: Path) -> None:
    y: list[object] = list(classes(60, 4))
    y[10] = "nan"
    table(folder / "t.csv", {"a": list(normal(60)), "b": list(normal(60, 1)), "label": y})


@case(("non-finite-feature", None))
def nan_in_an_array(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
    x[17, 2] = np.nan
    np.save(folder / "X_train.npy", x)


@case(("non-finite-feature", None))
def minus_inf_in_images(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3, 8, 8)).astype("float16")
    x[4, 0, 1, 1] = -np.inf
    np.savez(folder / "t.npz", images=x, labels=np.array(classes(20, 4)))


@case(("non-finite-feature", None))
def nan_in_parquet_lists(folder: Path) -> None:
    x = [[a, b, a * b] for a, b in zip(normal(30), normal(30, 1), strict=True)]
    x[7][2] = float("nan")
    pl.DataFrame({"embedding": x, "label": classes(30, 3)}).write_parquet(folder / "t.parquet")


@case(("non-finite-feature", 9))
def nan_as_json_text(folder: Path) -> None:
    rng = Random(0)
    records = [{"features": [rng.random(), rng.random()], "label": y} for y in classes(30, 3)]
    records[8]["features"][1] = float("nan")
    lines(folder / "t.jsonl", records)


@case(("non-finite-feature", None))
def inf_in_safetensors(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 8)).astype("float32")
    x[3, 3] = np.inf
    safetensors(folder / "t.safetensors", {"x": x, "y": np.array(classes(30, 3))})


@case()
def empty_cells_and_masks(folder: Path) -> None:
    a: list[object] = list(normal(40))
    a[3] = a[9] = None
    table(folder / "t.csv", {"age": a, "b": list(normal(40, 1)), "label": list(classes(40, 2))})
    mask = np.zeros((4, 4), dtype="float32")
    mask[0, 3] = -np.inf
    np.savez(folder / "m.npz", attention_mask=mask, x=np.ones((4, 4), dtype="float32") * 0.3)


@case()
def words_that_look_like_nan(folder: Path) -> None:
    table(
        folder / "names.csv",
        {"word": ["nan", "inf", "bread", "info"] * 8, "label": list(classes(32, 2))},
    )


@case(("constant-feature", None))
def dead_channel_in_an_array(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 6))
    x[:, 4] = -0.75
    np.savez(folder / "t.npz", X=x, y=np.array(classes(60, 3)))


@case(("constant-feature", None))
def dead_sensor_in_json(folder: Path) -> None:
    a, b = normal(40), normal(40, 1)
    lines(
        folder / "t.jsonl",
        [{"s0": a[i], "s1": b[i], "s2": 0.0, "label": i % 3} for i in range(40)],
    )


@case()
def pixels_that_never_light_up(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 17, (100, 64)).astype("float64")
    x[:, (0, 32, 39)] = 0
    np.savez(folder / "digits.npz", X=x, y=np.array(classes(100, 10)))
    y = rng.random((100, 100)) * (rng.random((100, 100)) < 0.3)
    y[:, 5] = 0
    np.save(folder / "X_sparse.npy", y)


@case()
def columns_that_describe(folder: Path) -> None:
    table(
        folder / "t.csv",
        {
            "year": [2024] * 40,
            "fold": [0] * 40,
            "sample_rate": [16000.0] * 40,
            "a": list(normal(40)),
            "b": list(normal(40, 1)),
            "c": list(normal(40, 2)),
            "label": list(classes(40, 2)),
        },
    )


@case()
def almost_constant(folder: Path) -> None:
    flag: list[object] = [0.0] * 40
    flag[11] = 1.0
    table(
        folder / "t.csv",
        {"rare": flag, "a": list(normal(40)), "b": list(normal(40, 1)), "label": [0, 1] * 20},
    )


@case(("extreme-feature-scale", None))
def glitch_in_an_array(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(100, 6)).astype("float32")
    x[50, 1] = -4e18
    np.save(folder / "features.npy", x)


@case(("extreme-feature-scale", None))
def a_column_in_other_units(folder: Path) -> None:
    pl.DataFrame(
        {
            "a": normal(60),
            "b": normal(60, 1),
            "c": [v + 3 for v in normal(60, 2)],
            "d": [v * 1e12 for v in normal(60, 3)],
            "label": classes(60, 2),
        }
    ).write_parquet(folder / "t.parquet")


@case()
def times_money_and_pixels(folder: Path) -> None:
    rng = Random(0)
    table(
        folder / "t.csv",
        {
            "timestamp": [1.7e9 + 60.0 * at for at in range(60)],
            "user_id": [rng.randrange(10**14, 10**15) for _ in range(60)],
            "income": [round(rng.lognormvariate(10, 1.5), 2) for _ in range(60)],
            "rate": [round(rng.random() / 100, 5) for _ in range(60)],
            "population": [rng.randrange(10**3, 10**7) for _ in range(60)],
            "label": list(classes(60, 2)),
        },
    )


@case(("token-id-out-of-vocabulary", 3))
def token_beyond_in_json(folder: Path) -> None:
    config(folder, "model: {vocab_size: 1000}\ndata: {train_file: t.jsonl}\n")
    records = [{"input_ids": [at, 999 - at], "labels": [-100, 999 - at]} for at in range(20)]
    records[2]["input_ids"][1] = 1000
    lines(folder / "t.jsonl", records)


@case(("token-id-out-of-vocabulary", None))
def token_beyond_in_parquet(folder: Path) -> None:
    config(folder, "model: {vocab_size: 1000}\ndata: {train_file: t.parquet}\n")
    ids = [[at, 999 - at] for at in range(20)]
    ids[5].append(50256)
    pl.DataFrame({"input_ids": ids}).write_parquet(folder / "t.parquet")


@case(("token-id-out-of-vocabulary", None))
def negative_token(folder: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 500, (16, 8)).astype("int32")
    ids[3, 3] = -1
    safetensors(folder / "t.safetensors", {"input_ids": ids})


@case(("unreadable-record", 18))
def cut_off_in_the_middle(folder: Path) -> None:
    lines(folder / "t.jsonl", [{"text": "x", "label": y} for y in classes(30, 3)])
    text = (folder / "t.jsonl").read_text().splitlines(keepends=True)
    text[17] = text[17][:12] + "\n"
    (folder / "t.jsonl").write_text("".join(text))


@case(("unreadable-record", 21))
def header_again(folder: Path) -> None:
    a = table
    a(folder / "t.csv", {"a": list(normal(40)), "b": list(normal(40, 1)), "label": [0, 1] * 20})
    text = (folder / "t.csv").read_text().splitlines(keepends=True)
    (folder / "t.csv").write_text("".join([*text[:20], text[0], *text[20:]]))


@case(("unreadable-record", 15))
def text_among_numbers(folder: Path) -> None:
    b: list[object] = list(normal(40, 1))
    b[13] = "#ERROR"
    table(folder / "t.csv", {"a": list(normal(40)), "b": b, "label": [0, 1] * 20})


@case(("unreadable-record", None))
def half_a_parquet(folder: Path) -> None:
    pl.DataFrame({"a": normal(500), "label": classes(500, 3)}).write_parquet(folder / "t.parquet")
    data = (folder / "t.parquet").read_bytes()
    (folder / "t.parquet").write_bytes(data[: len(data) // 2])


@case(("unreadable-record", None))
def half_an_array(folder: Path) -> None:
    np.save(folder / "X.npy", np.random.default_rng(0).normal(size=(50, 6)))
    data = (folder / "X.npy").read_bytes()
    (folder / "X.npy").write_bytes(data[: len(data) // 2])


@case()
def quotes_breaks_and_marks_in_texts(folder: Path) -> None:
    text = 'text,label\n"he said ""no"", twice",1\n"two\nlines",0\n"<<<<<<< HEAD",1\n' * 1
    (folder / "t.csv").write_text(text * 1)
    lines(folder / "t.jsonl", [{"text": "=======\n>>>>>>> x", "label": y} for y in [0, 1] * 9])


@case(("empty-dataset", None))
def nothing_in_json(folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(b"")


@case(("empty-dataset", None))
def no_rows_in_parquet(folder: Path) -> None:
    pl.DataFrame({"a": [], "label": []}, {"a": pl.Float64, "label": pl.Int64}).write_parquet(
        folder / "t.parquet"
    )


@case(("empty-dataset", None))
def no_rows_in_an_array(folder: Path) -> None:
    np.save(folder / "X_train.npy", np.zeros((0, 6), dtype="float32"))


@case(("empty-dataset", 1))
def a_file_that_is_not_there(folder: Path) -> None:
    config(folder, "data: {train_file: a.jsonl, val_file: b.jsonl, num_classes: 3}\n")
    lines(folder / "a.jsonl", [{"text": "x", "label": y} for y in classes(30, 3)])


@case()
def a_configuration_without_its_data(folder: Path) -> None:
    config(folder, "data: {train_file: data/a.jsonl, num_classes: 3}\n")


@case(("class-count-mismatch", None))
def fewer_classes_than_said(folder: Path) -> None:
    config(folder, "data: {train_file: t.csv, num_classes: 20}\n")
    table(
        folder / "t.csv",
        {"a": list(normal(200)), "b": list(normal(200, 1)), "label": list(classes(200, 10))},
    )


@case()
def classes_spread_over_two_files(folder: Path) -> None:
    config(folder, "data: {train_jsonl_list: [a.jsonl, b.jsonl], num_classes: 20}\n")
    lines(folder / "a.jsonl", [{"text": "x", "label": y} for y in classes(100, 10)])
    lines(folder / "b.jsonl", [{"text": "x", "label": y + 10} for y in classes(100, 10)])


@case()
def a_small_part_of_many_classes(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 100}\n")
    rng = Random(0)
    lines(folder / "t.jsonl", [{"text": "x", "label": rng.randrange(100)} for _ in range(60)])


@case()
def long_tail(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 60}\n")
    rng = Random(0)
    labels = [min(59, int(rng.expovariate(0.12))) for _ in range(400)]
    lines(folder / "t.jsonl", [{"text": "x", "label": y} for y in labels])


@case()
def several_labels_in_each_record(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 6}\n")
    rng = Random(0)
    lines(
        folder / "t.jsonl",
        [{"text": "x", "labels": sorted(rng.sample(range(6), 2))} for _ in range(60)],
    )
    np.savez(
        folder / "hot.npz", X=np.random.default_rng(0).normal(size=(12, 4)), y=np.eye(12)[:, :6]
    )


@case()
def soft_labels(folder: Path) -> None:
    config(folder, "data: {train_file: t.jsonl, num_classes: 3}\n")
    lines(folder / "t.jsonl", [{"text": "x", "label": [0.2, 0.7, 0.1]} for _ in range(30)])


@case(("all-zero-record", None))
def one_record_of_zeros(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 6))
    x[9] = 0
    np.save(folder / "X.npy", x)


@case(("missing-label", 1))
def a_column_of_another_name(folder: Path) -> None:
    config(folder, "data: {train_file: t.csv, label_column: target, num_classes: 2}\n")
    table(folder / "t.csv", {"a": list(normal(20)), "b": list(normal(20, 1)), "lable": [0, 1] * 10})


@case()
def a_test_file_without_labels(folder: Path) -> None:
    config(
        folder,
        "data: {train_file: t.csv, test_file: e.csv, label_column: label, num_classes: 2}\n",
    )
    table(folder / "t.csv", {"a": list(normal(20)), "b": list(normal(20, 1)), "label": [0, 1] * 10})
    table(folder / "e.csv", {"a": list(normal(20)), "b": list(normal(20, 1))})


@case()
def a_pointer_instead_of_the_data(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
    (folder / "train.parquet").write_text(text)


@case(("label-out-of-range", None))
def labels_of_the_second_part(folder: Path) -> None:
    config(folder, "data: {path: d.npz, num_classes: 4}\n")
    x = np.random.default_rng(0).normal(size=(40, 4))
    y = np.array(classes(40, 4))
    late = y.copy()
    late[3] = 4
    np.savez(folder / "d.npz", x_train=x, y_train=y, x_test=x + 1, y_test=late)


@case(("class-count-mismatch", None))
def names_that_are_one_short(folder: Path) -> None:
    config(folder, "data: {train_file: t.csv, num_classes: 4, class_names: [cat, dog, owl]}\n")
    table(
        folder / "t.csv",
        {"a": list(normal(40)), "b": list(normal(40, 1)), "label": list(classes(40, 4))},
    )


@case(("extreme-feature-scale", 31))
def a_glitch_of_ordinary_size(folder: Path) -> None:
    b = normal(80, 1)
    b[29] = 480000.0
    table(folder / "t.csv", {"a": list(normal(80)), "b": list(b), "label": [0, 1] * 40})


@case()
def long_tailed_amounts(folder: Path) -> None:
    rng = Random(0)
    table(
        folder / "t.csv",
        {
            "amount": [round(rng.lognormvariate(3, 2.2), 2) for _ in range(400)],
            "a": list(normal(400)),
            "b": list(normal(400, 1)),
            "label": [0, 1] * 200,
        },
    )


@case(("label-out-of-range", 6))
def tags_of_words(folder: Path) -> None:
    config(folder, "model: {num_labels: 9}\ndata: {train_file: t.jsonl}\n")
    records = [{"tokens": ["a", "b", "c"], "ner_tags": [0, at % 9, -100]} for at in range(40)]
    records[5]["ner_tags"][1] = 9
    lines(folder / "t.jsonl", records)


@case(("label-out-of-range", None))
def labels_in_a_column_of_their_own(folder: Path) -> None:
    config(folder, "data: {train_file: t.npz, num_classes: 10}\n")
    y = np.array(classes(100, 10)).reshape(-1, 1)
    y[3] = 10
    x = np.random.default_rng(0).integers(0, 255, (100, 8, 8, 3)).astype("uint8")
    np.savez(folder / "t.npz", x=x, y=y)


@case(("label-out-of-range", None))
def a_pixel_of_no_class(folder: Path) -> None:
    config(folder, "data: {train_file: t.npz, num_classes: 19, ignore_label: 255}\n")
    mask = np.random.default_rng(0).integers(0, 19, (20, 8, 8)).astype("uint8")
    mask[:, 0], mask[3, 3, 3] = 255, 19
    image = np.random.default_rng(1).normal(size=(20, 3, 8, 8)).astype("float32")
    np.savez(folder / "t.npz", images=image, masks=mask)


@case(("token-id-out-of-vocabulary", None))
def a_stream_of_tokens(folder: Path) -> None:
    config(folder, "model: {vocab_size: 50257}\ndata: {train_file: train.npy}\n")
    ids = np.random.default_rng(0).integers(0, 50257, 20_000).astype("uint16")
    ids[77] = 50257
    np.save(folder / "train.npy", ids)


@case(("unreadable-record", 32))
def a_merge_in_a_table(folder: Path) -> None:
    rows = "".join(f"{at * 0.3},{at * at * 0.1},{at % 2}\n" for at in range(30))
    marks = "<<<<<<< HEAD\n1.0,2.0,1\n=======\n1.0,2.0,0\n>>>>>>> other\n"
    (folder / "t.csv").write_text("a,b,label\n" + rows + marks)


@case()
def numbers_that_describe_a_picture(folder: Path) -> None:
    lines(
        folder / "t.jsonl",
        [
            {"id": at, "width": 512, "score": 1.0, "duration": 3.5, "text": "x", "label": at % 3}
            for at in range(60)
        ],
    )
