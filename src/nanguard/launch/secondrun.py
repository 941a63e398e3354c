"""What is done in a second run of a command, for an incident of the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.diagnosis.task import Task
from nanguard.findings import number

if TYPE_CHECKING:
    from nanguard.diagnosis.task import Outcome
    from nanguard.launch.timeline import Fork


def serve_second_run(message: dict[str, Any], fork: Fork) -> None:
    """Explains an incident, or replays its step once and writes the answer to a file."""
    incident = incidents.read(Path(message["folder"]))
    run = incident["run"]
    skipped = tuple(run.get("skipped", ()))
    if message["mode"] == "explain":
        from nanguard.diagnosis.session import explain

        told = {
            "folder": message["folder"],
            "incident": incident,
            "target": run["ordinal"],
            "method": "second-run",
            "control": message.get("control"),
            "skipped": skipped,
        }
        explain(told, fork)
        return
    task = Task(
        run["ordinal"],
        trace=True,
        table=bool(message.get("table")),
        precision=message.get("precision"),
        without=tuple(message.get("without", ())),
        skipped=skipped,
    )
    outcome = fork.run(task, message["patience"])
    Path(message["answer"]).write_text(json.dumps(_told(outcome)), encoding="utf-8")


def _told(outcome: Outcome | None) -> dict[str, Any]:
    """Returns an outcome as JSON holds it."""
    if outcome is None:
        return {"error": "the replay did not come to the step in time"}
    if outcome.error is not None:
        return {"error": outcome.error}
    origin, site = outcome.origin, outcome.origin.site if outcome.origin else None
    return {
        "finite": outcome.finite,
        "step": outcome.step,
        "loss": None if outcome.loss is None else number(outcome.loss),
        "symptom": None if outcome.symptom is None else outcome.symptom.to_json(),
        "said": None if outcome.symptom is None else outcome.symptom.in_words(),
        "origin": None
        if origin is None
        else {
            "phase": origin.phase,
            "op": origin.op,
            "module": origin.module,
            "file": site.file if site else None,
            "line": site.line if site else None,
        },
        "samples": outcome.facts.samples,
        "operations": [
            {**row, "min": _number(row["min"]), "max": _number(row["max"])}
            for row in outcome.facts.table
        ],
    }


def _number(value: Any) -> Any:
    return number(value) if isinstance(value, (int, float)) else None
