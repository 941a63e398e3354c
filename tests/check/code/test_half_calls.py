"""Calls without the arguments that they need: half a line, or another function of that name."""

from __future__ import annotations

import re
from pathlib import Path

import nanguard.check.code
from nanguard.check.engine import Check, Plan

HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
LOOP = """\
def train{number}(model, optimizer, loader, scaler):
    for x in loader:
        loss = model(x)
        {line}
        loss.backward()
        optimizer.step()


"""
LINES = (
    "loss = torch.{name}()",
    "loss = F.{name}()",
    "loss = loss.{name}()",
    "loss = torch.{name}(eps=1e-8)",
    "loss = x / torch.{name}()",
    "loss = torch.log(torch.{name}())",
    "loss = torch.sqrt(F.{name}(dim=-1)).mean()",
    "loss = torch.where(torch.{name}(), x, loss)",
    "loss = 1 - torch.{name}()",
    "if torch.{name}(): continue",
    "if not loss.{name}(): loss = x.{name}()",
    "loss = torch.{name}(torch.{name}())",
    "loss = -torch.{name}() ** 0.5",
    "optimizer.{name}()",
    "scaler.{name}()",
)


def test_no_rule_fails_on_a_call_without_arguments(tmp_path: Path):
    """Every name that the rules know, as a function of torch and as a method."""
    folder = Path(nanguard.check.code.__file__).parent
    code = " ".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    names = sorted(set(re.findall(r'"([a-z][a-z0-9_]{1,30})"', code)))
    assert len(names) > 400
    for name in names:
        loops = (
            LOOP.format(number=number, line=line.format(name=name))
            for number, line in enumerate(LINES)
        )
        (tmp_path / f"of_{name}.py").write_text(HEAD + "".join(loops))
    missed = Check(Plan(jobs=1)).run(sorted(map(str, tmp_path.iterdir()))).not_checked
    assert [entry.reason for entry in missed if "failed on" in entry.reason] == []
