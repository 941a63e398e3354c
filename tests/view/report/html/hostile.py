"""A run in which every string is an attack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from tests.view.runs.runs import incident, write_record

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = "<script>window.owned=1</script><img src=x onerror=window.owned=2>"
CLOSING = "</script></style></textarea>--><svg onload=window.owned=3>"
TERMINAL = "\x1b[31mred\x1b]0;title\x07\x00"
REVERSED = "\u202egpj.exe\u2066\u200f"
ATTACK = f"{SCRIPT}{CLOSING}{TERMINAL}{REVERSED}\" onclick='window.owned=4' ${{7*7}}"


def spoiled(value: Any, key: str = "") -> Any:
    """Returns the same with an attack in every string that is not needed to recognise it."""
    if isinstance(value, dict):
        return {name: spoiled(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [spoiled(entry) for entry in value]
    if isinstance(value, str) and key != "schema":
        return ATTACK
    return value


def write_hostile(folder: Path) -> Path:
    """Writes a run folder of a stranger."""
    own = folder / "<b onmouseover=window.owned=5>run"
    write_record(own)
    evil = spoiled(incident(41))
    evil["symptom"]["terms"] = {ATTACK: "nan", "x" * 500: ATTACK}
    # With more than the limit of an incident's file, it would be refused as a whole.
    evil["fixes"].append({"summary": "y" * 5_000_000, "diff": "+" + "z" * 1_000_000, "how": "h"})
    evil["losses_before"] = [ATTACK, 1e400, None, {"a": 1}]
    path = own / "incidents" / "step-000041-rank0"
    path.mkdir(parents=True)
    (path / incidents.NAME).write_text(json.dumps(evil))
    event = {"action": ATTACK, "name": ATTACK, "severity": ATTACK, "message": ATTACK, "step": 7}
    lines = [
        event,
        {**event, "action": "skip", "reason": ATTACK, "step": 8, "message": "m" * 70_000},
    ]
    lineage = {"attempt": ATTACK, "checkpoint": ATTACK, "changes": [ATTACK], "reason": ATTACK}
    (own / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (own / "lineage.jsonl").write_text(json.dumps(lineage) + "\n" + json.dumps([ATTACK]) + "\n")
    with (own / "metrics.jsonl").open("a") as file:
        terms = {"<i>evil": 1.0, ATTACK[:70]: 2.0}
        file.write(json.dumps({"step": 120, "loss": 1.0, "terms": terms}, separators=(",", ":")))
        file.write("\n" + "q" * 10_000_000 + "\n")
    finding = dict.fromkeys(("code", "name", "severity", "message", "path", "where"), ATTACK)
    finding |= {"fixes": [{"title": ATTACK, "diff": ATTACK}], "line": 3, "step": 4}
    report = {"schema": "nanguard.report/1", "findings": [finding, [], None]}
    (own / "check.json").write_text(json.dumps(report))
    (own / "config.yaml").write_text(f"a: {ATTACK}\n" + "w" * 100_000)
    return own
