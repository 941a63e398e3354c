"""Reads what a library has written, with the library's own reader."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from nanguard.check.log.binary_logs import _wandb_records
from nanguard.check.scan import Scan

if TYPE_CHECKING:
    from pathlib import Path


def tensorboard(folder: Path) -> tuple[dict[str, dict[int, float]], list[tuple[int, str]]]:
    """Returns the scalars by tag and step of the one run, and the texts with their steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = {file.parent for file in folder.rglob("*tfevents*")}
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {
        tag: {point.step: point.value for point in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
    texts = [
        (point.step, text.decode())
        for tag in events.Tags()["tensors"]
        for point in events.Tensors(tag)
        for text in point.tensor_proto.string_val
    ]
    return scalars, texts


def wandb(file: Path) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Returns the rows of an offline run, its alerts, and its summary."""
    rows: list[dict[str, Any]] = []
    alerts: list[Any] = []
    summary: dict[str, Any] = {}
    for record in _whole(file):
        if record.HasField("history"):
            rows.append(_items(record.history.item))
        elif record.HasField("alert"):
            alerts.append(record.alert)
        elif record.HasField("summary"):
            summary |= _items(record.summary.update)
    return rows, alerts, summary


def _whole(file: Path) -> list[Any]:
    """Returns the records of a file, once the process that writes it has come to their end."""
    from wandb.proto.wandb_internal_pb2 import Record

    end = time.monotonic() + 30
    while True:
        # The library has a writer for this file, and messages for its records, but no reader.
        records = [Record.FromString(data) for data in _wandb_records(file, Scan())]
        if any(record.HasField("exit") for record in records) or time.monotonic() > end:
            return records
        time.sleep(0.05)


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}


def mlflow(uri: str) -> tuple[dict[str, dict[int, float]], dict[str, str], str]:
    """Returns the metrics by key and step, the tags, and the status of the one run of a store."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [found.experiment_id for found in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    history = {
        key: {m.step: m.value for m in client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }
    return history, dict(run.data.tags), run.info.status
