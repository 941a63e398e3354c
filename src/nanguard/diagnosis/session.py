from __future__ import annotations
from pathlib import Path
from nanguard import incident as incidents
from nanguard.launch.task import Task
import dataclasses

def explain(message, fork):
    base = dict(message["incident"])
    out = fork.run(Task(message["target"], trace=True, folder=message["folder"]), 60)
    if out is None:
        base["replay"] = {"verdict": "not-replayed", "why": "no answer"}
    else:
        base["replay"] = {"verdict": "reproduced" if out.symptom else "not-reproduced", "method": message["method"], "error": out.error}
        if out.symptom: base["step"] = out.step
        o = out.origin
        if o:
            base["origin"] = {"phase": o.phase, "op": o.op, "module": o.module, "line": o.site and o.site.line, "file": o.site and o.site.file,"code": o.site and o.site.code}
            base["debug"] = repr(dataclasses.asdict(out.facts)), repr(o.detail), repr(o.sources)
        base["samples"] = out.facts.samples
        base["notes"] = out.facts.notes
    incidents.write(Path(message["folder"]), base)
