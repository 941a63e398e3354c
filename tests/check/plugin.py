"""A package with rules of its own, as a third party would install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RULES = '''
import re
from nanguard.findings import Edit, Fix, Severity
from nanguard.check.rule import Fails, Passes, Rule


class Word(Rule):
    """A word that is not wanted. Why it breaks a run: it does not."""

    word, instead, safe = "", "", True
    severity = Severity.ERROR
    reads = "code"
    seen_in = "https://example.org"

    def check(self, code):
        for found in re.finditer(rf"\\b{self.word}\\b", code.text.content):
            line, column = code.text.position(found.start())
            edit = Edit(found.start(), found.end(), self.instead)
            fix = Fix(f"write {self.instead}", safe=self.safe, edits=(edit,))
            yield self.finding(f"{self.word} is bad", path=code.text.path, line=line,
                               column=column, fixes=(fix,))


class Bad(Word):
    __doc__ = Word.__doc__
    code, name, word, instead = "TST001", "bad-word", "BAD", "GOOD"
    examples = (Passes("x = GOOD"), Fails("x = BAD", line=1, fixed="x = GOOD"))


class Risky(Word):
    __doc__ = Word.__doc__
    code, name, word, instead, safe = "TST002", "risky-word", "RISKY", "CALM", False
    severity = Severity.WARNING
    examples = (Passes("x = CALM"), Fails("x = RISKY"))


class Useless(Word):
    __doc__ = Word.__doc__
    code, name, word, instead = "TST003", "useless-fix", "STAYS", "STAYS, STAYS"
    examples = (Passes("x = 1"), Fails("x = STAYS"))


class Breaking(Word):
    __doc__ = Word.__doc__
    code, name, word, instead = "TST004", "breaking-fix", "FRAGILE", "(("
    examples = (Passes("x = 1"), Fails("x = FRAGILE"))


class Crash(Word):
    __doc__ = Word.__doc__
    code, name = "TST005", "crashing-rule"
    examples = (Passes("x = 1"), Fails("x = CRASH"))

    def check(self, code):
        if "CRASH" in code.text.content:
            raise ZeroDivisionError("inside the rule")
        if "KILL" in code.text.content:
            import os
            os._exit(9)
        if "FOREVER" in code.text.content:
            while True:
                pass
        return
        yield


RULES = [Bad, Risky, Useless, Breaking, Crash]
'''


def install(folder: Path, rules: str = RULES, value: str = "ngrules:RULES") -> Path:
    """Installs the package into a folder and returns the folder."""
    info = folder / "ngrules-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "ngrules.py").write_text(rules)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ngrules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nanguard.rules]\nmine = {value}\n")
    return folder


def check(
    *words: object, cwd: Path, plugin: Path | None = None, stdin: str | bytes = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``nanguard check`` as a user would."""
    path = os.pathsep.join(filter(None, [str(plugin or ""), os.environ.get("PYTHONPATH", "")]))
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [sys.executable, "-m", "nanguard", "check", *map(str, words)],
        cwd=cwd,
        input=data,
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "100", **env},
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in out + err, err
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def told(*words: object, cwd: Path, plugin: Path | None = None, **more: Any) -> dict[str, Any]:
    """Returns the JSON report of a check that could do its work."""
    done = check("--format", "json", *words, cwd=cwd, plugin=plugin, **more)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def unable(*words: object, cwd: Path, plugin: Path | None = None, **more: Any) -> dict[str, Any]:
    """Returns the JSON report of a check that could not do its work."""
    done = check("--format", "json", *words, cwd=cwd, plugin=plugin, **more)
    assert done.returncode == 2
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.stderr.count("not checked: ") >= 1
    return report


def names(report: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Returns name and line of every finding."""
    return [(finding["name"], finding["line"]) for finding in report["findings"]]


def reasons(report: dict[str, Any]) -> dict[str, str]:
    """Returns why files were not checked."""
    return {Path(entry["path"]).name: entry["reason"] for entry in report["not_checked"]}
