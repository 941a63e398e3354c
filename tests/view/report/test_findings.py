"""The formats of ``nanguard check``."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from nanguard.check.outcome import NotChecked, Outcome, Seen
from nanguard.findings import Finding, Fix, Severity
from nanguard.view.report.findings_formats import Page, as_github, as_json, as_sarif, brief


def outcome(**changes: object) -> Outcome:
    fields = {
        "code": "SRC001",
        "name": "bad-thing",
        "severity": Severity.WARNING,
        "message": "x is bad",
        "path": "a.py",
        "line": 3,
        "column": 9,
        "fixes": (Fix("write y"),),
        **changes,
    }
    diff = "--- a.py\n+++ a.py\n@@ -3 +3 @@\n-    z = x\n+    z = y\n"
    seen = Seen(Finding(**fields), "    z = x", (diff,))
    return Outcome([seen], ["a.py"], [NotChecked("b.py", "it is broken")])


def test_text_shows_the_line_the_mark_the_fix_and_what_was_not_checked():
    assert Page(outcome(), full=True).render() == (
        "a.py\n"
        "  3:9  warning  bad-thing [SRC001]\n"
        "    x is bad\n"
        "    3 | z = x\n"
        "      |     ^\n"
        "    fix: write y\n"
        "      @@ -3 +3 @@\n"
        "      -    z = x\n"
        "      +    z = y\n"
        "\n"
        "not checked\n"
        "  b.py: it is broken\n"
        "\n"
        "1 warning in 1 file; 1 entry not checked (0.0 s)\n"
        "1 can be repaired with --fix --unsafe, which changes what code computes.\n"
    )


def test_a_finding_is_a_line_with_a_mark_below_its_place():
    assert Page(outcome()).render() == (
        "a.py\n"
        "  3:9  warning  bad-thing: x is bad\n"
        "    3 | z = x\n"
        "      |     ^\n"
        "\n"
        "not checked\n"
        "  b.py: it is broken\n"
        "\n"
        "1 warning in 1 file; 1 entry not checked (0.0 s)\n"
        "1 can be repaired with --fix --unsafe, which changes what code computes.\n"
        "--format full shows fixes and diffs; nanguard explain NAME says why.\n"
    )


def test_copies_of_a_file_are_folded():
    told = outcome()
    copy = replace(told.seen[0], finding=replace(told.seen[0].finding, path="old/a.py"))
    other = replace(told.seen[0], finding=replace(told.seen[0].finding, path="b.py"))
    told.seen += [copy, other]
    text = Page(told).render()
    assert "a.py (and 1 copy of it)\n" in text
    assert "old/a.py" not in text
    assert "b.py\n  3:9" in text
    assert "3 warnings in 1 file" in text


def test_the_first_line_says_what_is_most_likely_to_break_the_run():
    told = outcome()
    assert "most likely" not in Page(told).render()
    log = Finding("LOG001", "non-finite-loss", Severity.ERROR, "NaN at 41", path="a.log", line=2)
    config = Finding("CFG001", "bad", Severity.ERROR, "lr is 9", path="c.yaml", line=7)
    told.seen += [Seen(log), Seen(config)]
    first = Page(told).render().split("\n")[0]
    assert first == "most likely to break this run: c.yaml:7: lr is 9"


def test_colour_changes_nothing_but_colour():
    coloured = Page(outcome(), colour=True).render()
    assert "\x1b[1;33mwarning\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == Page(outcome()).render()


def test_hostile_text_cannot_reach_the_terminal():
    nasty = "\x1b]0;owned\x07\u202e\r\n::error::x"
    told = outcome(message=nasty, path=nasty, where=nasty, fixes=(Fix(nasty, plan=(nasty,)),))
    told.seen[0] = Seen(told.seen[0].finding, nasty, (f"--- \n+++ \n@@\n+{nasty}\n",))
    told.not_checked = [NotChecked(nasty, nasty)]
    for text in (Page(told).render(), brief(told), as_github(told)):
        assert not any(c in text for c in "\x1b\x07\u202e\r")
    for line in as_github(told).splitlines():
        assert line.startswith(("::warning ", "::notice "))
    for form in (as_json(told), as_sarif(told, {})):
        assert form.isascii()
        json.loads(form)


def test_a_long_line_is_cut_around_the_column():
    told = outcome(column=500)
    told.seen[0] = Seen(told.seen[0].finding, "x" * 495 + "+ HERE" + "y" * 300)
    lines = Page(told, width=80).render().split("\n")
    shown = next(line for line in lines if " | ..." in line or " | xx" in line)
    assert len(shown) <= 80


def test_many_files_with_one_reason_share_a_line():
    told = Outcome(not_checked=[NotChecked(f"{n}.yaml", "no run") for n in range(50)])
    assert "  50 files: no run\n" in Page(told).render()
    assert "50 entries not checked" in Page(told).render()


def row(where: str, verdict: str) -> dict[str, str]:
    return {"setting": "precision", "where": where, "value": "true", "verdict": verdict}


def test_the_alignment_is_a_table_where_there_is_something_to_compare():
    told = Outcome(checked=["a.yaml", "b.json"])
    told.alignment = [row("a.yaml:3 fp16", "set once"), row("b.json:7 bf16.enabled", "conflicts")]
    text = Page(told).render()
    assert "  setting    where                  value  verdict\n" in text
    assert "  precision  b.json:7 bf16.enabled  true   conflicts\n" in text
    told.alignment = told.alignment[:1] * 2
    assert "alignment" not in Page(told).render()
    told.alignment = [row(f"{n}.yaml:1 fp16", "agrees") for n in range(99)]
    assert "alignment of settings: 99 places, no conflict\n" in Page(told).render()
    told.alignment.append(row("z.yaml:1 bf16", "conflicts"))
    text = Page(told).render()
    assert "  ... and 99 more places (-v lists them)\n" in text
    assert "98.yaml:1 fp16" in Page(told, verbose=True).render()
    assert "z.yaml:1 bf16" in text


def test_brief_is_one_line_each():
    assert brief(outcome()) == "a.py:3:9: warning: x is bad [bad-thing]\n"


def scanned(**changes: object) -> Outcome:
    place = {"path": "run/train.log", "line": 41, "column": None, "where": "loss", "step": 4100}
    told = outcome(**{**place, "fixes": (), **changes})
    return Outcome([Seen(told.seen[0].finding)], ["run/train.log"])


def test_a_step_is_shown_by_every_format():
    told = scanned()
    assert "  41  warning  bad-thing [SRC001]  (loss, step 4100)\n    x is bad\n" in (
        Page(told, full=True).render()
    )
    assert "  41  warning  bad-thing: x is bad (loss, step 4100)\n" in Page(told).render()
    assert brief(told) == "run/train.log:41: warning: x is bad (loss, step 4100) [bad-thing]\n"
    assert as_github(told) == (
        "::warning file=run/train.log,line=41,title=bad-thing (SRC001)"
        "::x is bad (loss, step 4100)\n"
    )
    assert json.loads(as_json(told))["findings"][0]["step"] == 4100
    (result,) = json.loads(as_sarif(told, {}))["runs"][0]["results"]
    assert result["properties"] == {"step": 4100}
    assert result["message"]["text"] == "x is bad [loss, step 4100]"
    assert result["partialFingerprints"] == {"nanguard/v1": "bad-thing:run/train.log:loss"}


def test_a_part_of_a_binary_file_is_named_by_sarif():
    told = scanned(path="s3://my bucket/a.pt", line=None, step=None, where="layers.0.weight")
    (result,) = json.loads(as_sarif(told, {}))["runs"][0]["results"]
    (place,) = result["locations"]
    assert place["physicalLocation"] == {"artifactLocation": {"uri": "s3://my%20bucket/a.pt"}}
    assert place["logicalLocations"] == [{"fullyQualifiedName": "layers.0.weight"}]


def test_github_escapes_what_means_something_to_it():
    told = outcome(message="50% of:\nit", path="a,b:c.py", severity=Severity.ERROR)
    first, second = as_github(told).splitlines()
    assert first == (
        "::error file=a%2Cb%3Ac.py,line=3,col=9,title=bad-thing (SRC001)"
        "::50%25 of:%0Ait%0AFix: write y"
    )
    assert second == "::notice file=b.py,title=not checked::it is broken"


SARIF_LEVELS = {"none", "note", "warning", "error"}


def test_sarif_has_what_the_standard_asks_for():
    """The same log validates against the schema of the standard; here its rules are spelt out."""
    told = outcome(path="/tmp/ä b.py")
    told.seen.append(Seen(Finding("CFG002", "other", Severity.ERROR, "m", "c.yaml")))
    log = json.loads(as_sarif(told, {"SRC001": "A bad thing."}))
    assert set(log) == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "nanguard"
    ids = [rule["id"] for rule in driver["rules"]]
    assert ids == ["CFG002", "SRC001"]
    assert driver["rules"][1]["shortDescription"] == {"text": "A bad thing."}
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in SARIF_LEVELS
        assert result["message"]["text"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "file:///tmp/%C3%A4%20b.py"
    assert place["region"] == {"startLine": 3, "startColumn": 9, "snippet": {"text": "    z = x"}}
    assert "region" not in run["results"][1]["locations"][0]["physicalLocation"]
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is True
    (note,) = invocation["toolExecutionNotifications"]
    assert note["message"] == {"text": "not checked: b.py: it is broken"}
