"""TensorBoard: scalars as they are, events as texts."""

from __future__ import annotations

import importlib
import time
from typing import Any, ClassVar

from nanguard.trackers.tracker import PREFIX, Step, TrackedEvent, TrackedPlace, Tracker

EVENTS = PREFIX + "events"
_WRITER = "tensorboard.summary.writer.event_file_writer"
_PROTO = "tensorboard.compat.proto."


class TensorBoard(Tracker):
    """Writes an event file of its own: two writers in one file would garble it.

    It lies in a folder of its own, too: TensorBoard takes all files of a folder for one run.
    """

    name: ClassVar[str] = "tensorboard"
    modules: ClassVar[tuple[str, ...]] = (
        _WRITER,
        *(f"{_PROTO}{kind}_pb2" for kind in ("event", "summary", "tensor", "tensor_shape")),
    )

    def __init__(self, place: TrackedPlace) -> None:
        super().__init__(place)
        self._writer: Any = None
        self._last = 0

    def start(self) -> None:
        """Opens the file."""
        folder = self.place.folder / self.place.name
        folder.mkdir(parents=True, exist_ok=True)
        writer = importlib.import_module(_WRITER)
        # The queue of the writer is there for bursts; one that is full makes only us wait.
        self._writer = writer.EventFileWriter(str(folder), filename_suffix=".nanguard")

    def step(self, step: Step) -> None:
        """Writes a step; a NaN is written as NaN."""
        summary = importlib.import_module(f"{_PROTO}summary_pb2")
        self._last = step.step
        values = [
            summary.Summary.Value(tag=tag, simple_value=value)
            for tag, value in step.numbers.items()
        ]
        self._add(values, step.step)

    def event(self, event: TrackedEvent) -> None:
        """Writes a text."""
        summary = importlib.import_module(f"{_PROTO}summary_pb2")
        tensor = importlib.import_module(f"{_PROTO}tensor_pb2")
        shape = importlib.import_module(f"{_PROTO}tensor_shape_pb2")
        plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
        one = shape.TensorShapeProto(dim=[shape.TensorShapeProto.Dim(size=1)])
        text = f"**{event.title}** {event.text}".encode()
        value = summary.Summary.Value(
            tag=EVENTS,
            metadata=summary.SummaryMetadata(plugin_data=plugin),
            tensor=tensor.TensorProto(dtype="DT_STRING", string_val=[text], tensor_shape=one),
        )
        self._add([value], self._last if event.step is None else event.step)

    def flush(self) -> None:
        """Lets a TensorBoard that is open see it."""
        self._writer.flush()

    def finish(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _add(self, values: list[Any], step: int) -> None:
        events = importlib.import_module(f"{_PROTO}event_pb2")
        summary = importlib.import_module(f"{_PROTO}summary_pb2")
        self._writer.add_event(
            events.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=values))
        )
