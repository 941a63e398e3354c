"""MLflow: metrics in batches, and tags for what metrics cannot hold."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from nanguard.trackers.tracker import Step, TrackedEvent, TrackedPlace, Tracker

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_IN_KEYS = re.compile(r"[^\w\-. :/]")
_ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"
_NON_FINITE_STEPS = "nanguard.nonfinite_steps"
_EVENTS = "nanguard.events"
# What servers take: metrics in a batch, characters of a tag, and tags before a page is unreadable.
_BATCH = 500
_LONGEST = 4500
_MOST_EVENTS = 200


class MLflow(Tracker):
    """Writes to MLflow through its client, which knows no active run of its own."""

    name: ClassVar[str] = "mlflow"
    modules: ClassVar[tuple[str, ...]] = ("mlflow", "mlflow.entities")

    def __init__(self, place: TrackedPlace) -> None:
        super().__init__(place)
        self._client: Any = None
        self._run: str | None = None
        self._uri: str | None = None
        self._adopted = False
        self._batch: list[Any] = []
        self._bad: list[str] = []
        self._written_bad = 0
        self._events = 0

    def adopt(self) -> None:
        """Notes the user's run, which is known in their thread only, and where it is kept."""
        mlflow = importlib.import_module("mlflow")
        active = mlflow.active_run()
        if active is not None:
            self._run, self._uri = active.info.run_id, mlflow.get_tracking_uri()
            self._adopted = True

    def start(self) -> None:
        """Begins a run in a local store, unless the environment names another one."""
        mlflow = importlib.import_module("mlflow")
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or self._local()
        with _files_allowed(uri):
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            if self._run is None:
                self._run = self._begun()

    def step(self, step: Step) -> None:
        """Holds a step back until there are several."""
        metric = importlib.import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        if step.bad:
            self._bad.append(step.in_words())
        self._batch += [
            metric(_NOT_IN_KEYS.sub("_", name), value, now, step.step)
            for name, value in step.numbers.items()
        ]
        self.held += 1
        if len(self._batch) >= _BATCH:
            self.flush()

    def event(self, event: TrackedEvent) -> None:
        """Writes a tag."""
        self._events += 1
        if self._events <= _MOST_EVENTS:
            text = f"{event.title}: {event.text}"[:_LONGEST]
            self._client.set_tag(self._run, f"nanguard.event.{self._events:04d}", text)
        self._client.set_tag(self._run, _EVENTS, str(self._events))

    def flush(self) -> None:
        """Writes the steps that were held back."""
        batch, self._batch, self.held = self._batch, [], 0
        for start in range(0, len(batch), _BATCH):
            self._write(batch[start : start + _BATCH])
        if len(self._bad) > self._written_bad:
            self._written_bad = len(self._bad)
            self._client.set_tag(self._run, _NON_FINITE_STEPS, _listed(self._bad))

    def finish(self) -> None:
        """Ends the run if it is our own."""
        self.flush()
        if not self._adopted:
            self._client.set_terminated(self._run)

    def _write(self, batch: list[Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        try:
            self._client.log_batch(self._run, metrics=batch)
        except mlflow.MlflowException:
            finite = [metric for metric in batch if abs(metric.value) < float("inf")]
            if len(finite) == len(batch):
                raise
            # A store that takes no NaN: the tag says which steps had one.
            self._client.log_batch(self._run, metrics=finite)

    def _local(self) -> str:
        self.place.folder.mkdir(parents=True, exist_ok=True)
        if importlib.util.find_spec("sqlalchemy") and importlib.util.find_spec("alembic"):
            return f"sqlite:///{self.place.folder / 'mlflow.db'}"
        # The small MLflow knows no database.
        return (self.place.folder / "mlruns").as_uri()

    def _begun(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "nanguard"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=self.place.name)
        return str(run.info.run_id)


def _listed(steps: list[str]) -> str:
    """Returns the first and the last steps, as many as a tag holds."""
    text = "; ".join(steps)
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2 - 50
    return f"{text[:half]} ... {text[-half:]} ({len(steps)} in all)"


@contextmanager
def _files_allowed(uri: str) -> Iterator[None]:
    """Lets MLflow open a store of files, which it refuses by default since version 3.

    It is used only where there is no database to write to.
    """
    if not uri.startswith("file:") or _ALLOW_FILES in os.environ:
        yield
        return
    os.environ[_ALLOW_FILES] = "true"
    try:
        yield
    finally:
        del os.environ[_ALLOW_FILES]
