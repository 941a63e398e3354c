"""The page of an incident: what it says, and what a stranger cannot make it say."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from nanguard.incident import Incident
from nanguard.view.report.incident_page import cause_page, incident_page

DIFF = """--- a/train.py
+++ b/train.py
@@ -4,3 +4,3 @@
     p = self.gate(x)
-    q = torch.log(p)
+    q = torch.log(p.clamp(min=1e-8))
     return q
"""

INCIDENT: dict[str, Any] = {
    "schema": "nanguard.incident/1",
    "step": 7,
    "rank": 2,
    "symptom": {
        "where": "loss",
        "kind": "nan",
        "loss": "nan",
        "grad_norm": 3.1,
        "terms": {"text": 2.125, "latent": "nan"},
        "names": [],
        "loss_scale": 65536.0,
    },
    "action": {"taken": "skip", "reason": "bad step 1 of at most 5 in 100"},
    "run": {
        "command": ["python", "train.py", "--name", "two words"],
        "folder": "/nowhere",
        "python": "3.11.7",
        "torch": "2.13.0",
        "nanguard": "0.1.0",
        "platform": "Linux",
        "device": "cpu",
    },
    "origin": {
        "phase": "forward",
        "op": "aten.log",
        "kernel": "aten.log",
        "module": "head.gate",
        "file": "train.py",
        "line": 5,
        "function": "forward",
        "code": "q = torch.log(p)",
        "excerpt": {
            "first": 3,
            "lines": ["def forward(self, x):", "    p = self.gate(x)", "    q = torch.log(p)"],
        },
    },
    "cause": {
        "code": "log-or-sqrt-domain",
        "summary": "log(0): 3 of 512 elements of p are exactly 0",
        "confidence": 0.97,
    },
    "evidence": [
        {
            "what": "input of aten.log",
            "shape": [64, 8],
            "dtype": "float32",
            "min": 0.0,
            "max": 1.0,
            "zeros": 3,
            "nonfinite": 0,
            "nan": 0,
        },
        {"what": "norm of all parameters", "first": 1.5, "last": 300.0},
    ],
    "samples": [3, 11],
    "dataset_indices": [903, 17],
    "batch_size": 64,
    "autocast": "float16",
    "optimizer": {"name": "AdamW", "lr": 0.001, "eps": 1e-08},
    "losses_before": [2.5, 2.25],
    "notes": ["the batch was too large to be saved"],
    "other_causes": [
        {"code": "division-by-zero", "summary": "a divisor is 0", "confidence": 0.95},
        {"code": "exp-overflow", "summary": "exp of 90", "confidence": 0.4},
    ],
    "trials": [
        {"what": "the log clamped", "finite": True, "result": "replayed step 7: loss 0.41"},
        {"what": "float64", "finite": False, "result": "step 7: the loss is nan"},
        {"what": "float32", "finite": None, "result": "could not be tried: no memory"},
    ],
    "fixes": [
        {"summary": "lower the learning rate", "verified": False, "how": "not tried"},
        {"summary": "use float64", "verified": False, "how": "step 7: the loss is nan"},
        {"summary": "clamp p", "verified": True, "how": "replayed: loss 0.41", "diff": DIFF},
    ],
    "replay": {"verdict": "reproduced", "method": "second-run", "seconds": 2.5, "why": None},
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(INCIDENT), **fields}


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in INCIDENT.items() if key not in names}


def shown(incident: dict[str, Any], *, width: int = 100, folder: str | None = None) -> str:
    return rendered(incident_page(Incident(incident), folder=folder), width)


def rendered(page: Any, width: int = 100) -> str:
    # A real file with a real encoding: a lone surrogate must not get as far as this.
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    Console(file=file, width=width, color_system=None).print(page, crop=False)
    file.flush()
    file.seek(0)
    return file.read()


def section(page: str, title: str) -> list[str]:
    lines = page.splitlines()
    begin = lines.index(title) + 1
    ends = [i for i, line in enumerate(lines) if i > begin and line and not line.startswith(" ")]
    return [line.strip() for line in lines[begin : min(ends, default=len(lines))]]


# What the page says.


def test_the_sections_come_in_the_order_in_which_they_are_read():
    lines = shown(INCIDENT).splitlines()
    titles = [line for line in lines[4:] if line and not line.startswith(" ")]
    assert titles == ["Where", "Why", "What was tried", "What to do", "Replay"]


def test_the_headline_says_what_happened_and_what_the_guard_did():
    assert shown(INCIDENT).splitlines()[:2] == [
        "Step 7, rank 2: the loss is nan.",
        "The guard skipped the step (bad step 1 of at most 5 in 100).",
    ]


@pytest.mark.parametrize(
    ("symptom", "words"),
    [
        ({"where": "loss", "kind": "inf", "loss": "-inf"}, "the loss is -inf."),
        ({"where": "loss", "kind": "inf"}, "the loss is inf."),
        (
            {"where": "gradient", "kind": "inf", "loss": 2.0, "names": list("abcde")},
            "the gradient of a, b, c and 2 more is inf, while the loss is 2.",
        ),
        ({"where": "gradient", "kind": "nan"}, "the gradient is nan."),
        (
            {"where": "buffer", "kind": "nan", "names": ["bn.mean"]},
            "buffer bn.mean is nan after the step.",
        ),
        ({}, "what was bad about it is not recorded."),
    ],
)
def test_symptoms_in_words(symptom, words):
    assert shown(changed(symptom=symptom)).splitlines()[0] == f"Step 7, rank 2: {words}"


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        ("cut-lr", "The guard skipped the step and cut the learning rate."),
        ("rollback", "The guard rolled back to the last good snapshot."),
        ("stop", "The guard stopped the run."),
        ("dance", "The guard did this: dance."),
        (None, "What the guard did is not recorded."),
    ],
)
def test_actions_in_words(taken, words):
    assert shown(changed(action={"taken": taken})).splitlines()[1] == words


def test_a_step_that_the_script_did_not_make_is_not_said_to_be_the_guards():
    done = {"taken": "skip", "reason": "the script ended itself"}
    page = shown({**changed(action=done), "by_script": True})
    assert page.splitlines()[1] == "The step was not made (the script ended itself)."


@pytest.mark.parametrize("step", [None, True, -1, "7", 7.5])
def test_a_step_that_is_no_number_is_left_out(step):
    assert shown(changed(step=step)).startswith("A bad step, rank 2: the loss is nan.\n")


def test_a_step_that_was_bad_before_anyone_noticed():
    page = shown(changed(replay={"verdict": "reproduced", "noticed_at": 9}))
    assert "It was noticed at step 9; the replay shows that it began earlier.\n" in page


def test_where():
    assert section(shown(INCIDENT), "Where") == [
        "phase   forward",
        "op      aten.log",
        "module  head.gate",
        "line    train.py:5, in forward",
        "",
        "3 | def forward(self, x):",
        "4 |     p = self.gate(x)",
        "-> 5 |     q = torch.log(p)",
        "",
    ]


def test_in_backward_the_page_says_whose_line_it_is():
    origin = {"phase": "backward", "op": "aten.sqrt", "kernel": "aten.div", "module": "<root>"}
    assert section(shown(changed(origin=origin)), "Where")[:3] == [
        "phase   backward (the line is the forward line whose derivative failed)",
        "op      aten.sqrt (its derivative calls aten.div)",
        "module  <root> (the forward of the model itself)",
    ]


def test_why():
    page = section(shown(INCIDENT), "Why")
    assert page == [
        "log-or-sqrt-domain: log(0): 3 of 512 elements of p are exactly 0",
        "Proven by replay (confidence 0.97).",
        "",
        "what               shape  dtype    min  max  zeros  not finite",
        "input of aten.log  64x8   float32    0    1      3           0",
        "",
        "norm of all parameters: first 1.5, last 300",
        "",
        "samples        3, 11 (of 64 in the batch, counted from 0)",
        "dataset index  903, 17",
        "loss terms     text 2.125, latent nan",
        "losses before  2.5, 2.25",
        "loss scale     6.554e+04",
        "autocast       float16",
        "optimizer      AdamW, lr 0.001, eps 1e-08",
        "notes          the batch was too large to be saved",
        "",
        "Other causes that were considered:",
        "division-by-zero  likely: a divisor is 0",
        "exp-overflow      possible: exp of 90",
        "",
        "More about this cause: nanguard explain log-or-sqrt-domain",
        "",
    ]


def test_what_was_tried():
    assert section(shown(INCIDENT), "What was tried")[1:-1] == [
        "ok                  the log clamped",
        "replayed step 7: loss 0.41",
        "still bad           float64",
        "step 7: the loss is nan",
        "could not be tried  float32",
        "no memory",
    ]


def test_what_to_do_begins_with_the_verified_fix_and_shows_its_diff():
    page = section(shown(INCIDENT), "What to do")
    assert page == [
        "1. clamp p",
        "Verified: replayed: loss 0.41",
        *(line.strip() for line in DIFF.splitlines()),
        "",
        "2. lower the learning rate",
        "Not tried, so it is not known whether it helps.",
        "",
        "3. use float64",
        "Not verified: step 7: the loss is nan",
        "",
    ]


def test_a_diff_can_be_copied_from_the_page():
    lines = shown(INCIDENT).splitlines()
    begin = lines.index("       --- a/train.py")
    copied = "".join(f"{line[7:]}\n" for line in lines[begin : begin + len(DIFF.splitlines())])
    assert copied == DIFF


def test_a_diff_keeps_the_blank_line_at_its_end_because_its_header_counts_it():
    fixes = [{"summary": "s", "diff": "@@ -1,2 +1,2 @@\n-a\n+b\n \n"}, {"summary": "t"}]
    page = section(shown(changed(fixes=fixes)), "What to do")
    assert page[page.index("+b") :][:4] == ["+b", "", "", "2. t"]


def test_the_replay_and_the_command_to_look_again():
    page = section(shown(INCIDENT, folder="/tmp/a b/step-000007-rank2"), "Replay")
    assert page == [
        "The script was run again from its first line. The step was bad again. This took 2.5 s.",
        "command   python train.py --name 'two words'",
        "versions  nanguard 0.1.0, torch 2.13.0, python 3.11.7, device cpu, platform Linux",
        "",
        "To look again:",
        "nanguard replay '/tmp/a b/step-000007-rank2'",
    ]


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("low-precision-only", "only low precision makes it bad."),
        ("not-reproduced", "The replay did not give what the run gave."),
        ("not-replayed", "The step was not replayed, so nothing about its cause is proven."),
        (None, "Whether the step was replayed is not recorded."),
    ],
)
def test_verdicts_get_a_sentence(verdict, sentence):
    page = section(shown(changed(replay={"verdict": verdict, "why": "no time"})), "Replay")
    assert f"{sentence} Reason: no time" in " ".join(page)


# What it does not claim.


def test_an_unknown_cause():
    cause = {"code": "unknown", "summary": "the step could not be replayed", "confidence": 0.0}
    page = section(shown(changed(cause=cause)), "Why")
    assert page[0] == "The cause is unknown: the step could not be replayed"
    assert not [line for line in page if "onfidence" in line or "nanguard explain" in line]


@pytest.mark.parametrize(
    ("confidence", "words"),
    [
        (0.9, "Proven by replay (confidence 0.9)."),
        (0.89, "Likely (confidence 0.89)."),
        (0.7, "Likely (confidence 0.7)."),
        (0.69, "Possible (confidence 0.69)."),
        (0.0, "The confidence is not recorded."),
        ("nan", "The confidence is not recorded."),
        (float("nan"), "The confidence is not recorded."),
        (True, "The confidence is not recorded."),
        (17, "The confidence is not recorded."),
    ],
)
def test_confidence_in_words(confidence, words):
    cause = {"code": "exp-overflow", "summary": "s", "confidence": confidence}
    assert section(shown(changed(cause=cause)), "Why")[1] == words


@pytest.mark.parametrize(
    "fields",
    [
        {"trials": [], "fixes": []},
        {"trials": INCIDENT["trials"][1:], "fixes": INCIDENT["fixes"][:2]},
        {"replay": {"verdict": "not-replayed"}},
    ],
)
def test_nothing_is_proven_that_no_replay_showed(fields):
    page = shown(changed(**fields))
    assert "Likely (confidence 0.97)." in page
    assert "Proven" not in page


def test_a_fix_is_verified_by_true_and_by_nothing_else():
    page = shown(changed(fixes=[{"summary": "pray", "verified": "yes", "how": None}]))
    assert section(page, "What to do")[:2] == [
        "1. pray",
        "Not tried, so it is not known whether it helps.",
    ]


def test_an_incident_that_nobody_has_explained_yet():
    bare = {key: INCIDENT[key] for key in ("schema", "step", "rank", "symptom", "action", "run")}
    page = shown({**bare, "replay": {"verdict": "not-replayed", "method": None}})
    assert section(page, "Where")[0] == "Not known: the step was not replayed."
    assert section(page, "Why")[0] == "The cause is unknown."
    assert section(page, "What was tried")[0] == "Nothing."
    assert section(page, "What to do")[0].startswith("Replay the step")


# The source.


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("".join(f"line_{n}()\n" for n in range(1, 8)) + "\tq = log(p)\nend()")
    return path


def origin_at(path: Any, line: int = 8, code: str = "q = log(p)") -> dict[str, Any]:
    return changed(origin={"phase": "forward", "file": str(path), "line": line, "code": code})


def test_the_arrow_is_at_the_line_in_a_file_on_disk(script):
    page = section(shown(origin_at(script)), "Where")
    assert page[page.index("5 | line_5()") - 1 :] == [
        "",
        "5 | line_5()",
        "6 | line_6()",
        "7 | line_7()",
        "-> 8 |     q = log(p)",
        "9 | end()",
        "",
    ]


def test_a_path_is_seen_from_the_folder_of_the_run(script):
    incident = origin_at("train.py")
    incident["run"] = {"folder": str(script.parent)}
    assert "-> 8 |     q = log(p)\n" in shown(incident)


@pytest.mark.parametrize(
    ("line", "code"), [(7, "q = log(p)"), (8, "q = log(r)"), (99, "x"), (0, "end()")]
)
def test_a_file_that_has_changed_is_not_shown(script, line, code):
    page = shown(origin_at(script, line, code))
    assert f"-> {code}\n" in page
    assert "line_7" not in page


@pytest.mark.parametrize(
    "name", ["gone.py", "a\0b.py", "x" * 5000 + ".py", "secret.env", "folder.py"]
)
def test_a_file_that_cannot_be_shown_leaves_the_line_alone(tmp_path, name):
    (tmp_path / "secret.env").write_text("PASSWORD=1\nq = log(p)\n")
    (tmp_path / "folder.py").mkdir()
    page = shown(origin_at(f"{tmp_path}/{name}", line=2))
    assert "-> q = log(p)\n" in page
    assert "PASSWORD" not in page


@pytest.mark.parametrize("first", [7, 9])
def test_an_excerpt_that_does_not_hold_the_line_is_not_trusted(script, first):
    incident = origin_at(script)
    incident["origin"]["excerpt"] = {"first": first, "lines": ["wrong()"]}
    page = shown(incident)
    assert "-> 8 |     q = log(p)\n" in page
    assert "wrong" not in page


# What strangers write.

HOSTILE = {
    "markup": ("[red]boo[/red]", "[red]boo[/red]"),
    "broken markup": ("[/nothing]", "[/nothing]"),
    "emoji code": (":skull:", ":skull:"),
    "colour": ("\x1b[31mboo", "\\x1b[31mboo"),
    "title": ("\x1b]0;boo\x07", "\\x1b]0;boo\\x07"),
    "one-byte escape": ("\x9b31mboo", "\\x9b31mboo"),
    "lines": ("a\r\nb\u2028c", "a\\r\\nb\\u2028c"),
    "direction": ("a\u202eb", "a\\u202eb"),
    "surrogate": ("a\ud800b", "a\\ud800b"),
}


@pytest.mark.parametrize(("given_text", "expected"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_strings_are_shown_literally_in_every_field(given_text, expected):
    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poisoned(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [poisoned(inner) for inner in value]
        return given_text if isinstance(value, str) else value

    incident = poisoned(INCIDENT)
    incident["symptom"]["terms"] = {given_text: 1.0}
    incident["evidence"][0][given_text] = 1.0
    page = shown(incident, width=1000)
    # Symptom, action, origin, cause, evidence, circumstances, trials, fixes, replay.
    assert page.count(expected) > 40
    assert_clean(page)


def assert_clean(page: str) -> None:
    assert [c for c in page if not c.isprintable() and c != "\n"] == []


def test_a_hostile_diff_and_a_hostile_excerpt():
    incident = changed(fixes=[{"summary": "s", "diff": "-a\x1b[2J\n+[bold]b\r\n+\tc"}])
    incident["origin"]["excerpt"] = {"first": 5, "lines": ["\tx = '[red]\x1b[2J'", None, 7]}
    page = shown(incident)
    assert "-a\\x1b[2J\n" in page
    assert "+[bold]b\n" in page
    assert "-> 5 |     x = '[red]\\x1b[2J'\n" in page
    assert_clean(page)


def test_a_folder_with_a_hostile_name():
    page = shown(INCIDENT, folder="a; rm -rf \x1b[2J")
    assert "nanguard replay 'a; rm -rf \\x1b[2J'\n" in page


def test_no_command_is_made_of_a_code_that_could_do_harm():
    page = shown(changed(cause={"code": "x-y; rm -rf /", "confidence": 0.9}))
    assert "nanguard explain" not in page


def test_lengths_are_bounded():
    huge = "x" * 10_000
    incident = changed(
        sentence="short",
        samples=list(range(1000)),
        trials=[{"what": huge, "finite": True, "result": huge}] * 1000,
        fixes=[{"summary": huge, "diff": f"+{huge}\n" * 1000, "verified": True}] * 1000,
        cause={"code": huge, "summary": huge, "confidence": 0.5},
        evidence=[{"what": huge, "dtype": huge, huge: huge}] * 1000,
        other_causes=[{"code": huge, "summary": huge}] * 1000,
        notes=[huge] * 1000,
    )
    incident["symptom"]["names"] = [huge] * 1000
    incident["symptom"]["terms"] = {f"{n}{huge}": 1.0 for n in range(100)}
    page = shown(incident, width=400)
    assert len(page) < 150_000
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more" in page
    assert "... and 980 more\n" in page  # trials
    assert "... and 994 more\n" in page  # fixes
    assert "... and 960 more\n" in page  # lines of a diff
    assert "x" * 200 in page
    assert "x" * 201 not in page


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, 10**400, -1, "nan", "[/x]", "\x1b[2J", "\ud800"])
    | st.floats()
    | st.text(max_size=20)
)
_anything = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the way to everything in an incident, however deep."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, part in inner for place in [(*path, key), *places(part, (*path, key))]]


def replaced(incident: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    incident = copy.deepcopy(incident)
    holder: Any = incident
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return incident


WRONG = [None, 10**5000, ["x", 3], {"a": {}}]


@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))
def test_a_wrong_type_anywhere_does_not_stop_the_page(value):
    for place in places(INCIDENT):
        page = shown(replaced(INCIDENT, place, value), folder="f")
        assert "nanguard replay f\n" in page, place


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(places(INCIDENT)), _anything), min_size=1, max_size=4))
def test_whatever_a_field_holds_the_page_is_complete_and_clean(changes):
    incident = INCIDENT
    # The deepest first, so that each place is still there.
    for place, value in sorted(changes, key=lambda change: -len(change[0])):
        try:
            incident = replaced(incident, place, value)
        except (KeyError, IndexError, TypeError):
            continue
    page = shown(incident, folder="f", width=80)
    assert page.endswith("nanguard replay f\n")
    assert_clean(page)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(INCIDENT)), _anything))
def test_an_incident_of_nothing_but_nonsense(incident):
    assert_clean(shown(incident))


def test_a_field_that_is_missing_does_not_stop_the_page():
    for name in INCIDENT:
        assert "nanguard replay FOLDER\n" in shown(without(name))


# How it is shown.


@pytest.mark.parametrize(("terminal", "told"), [(60, None), (200, 60), (60, 200)])
def test_the_page_keeps_to_its_width(terminal, told):
    lines = rendered(incident_page(Incident(INCIDENT), width=told), terminal).splitlines()
    assert 50 < max(map(len, lines)) <= 60


def test_a_diff_is_never_wrapped():
    long = "-    loss = " + " + ".join(f"term_{i}" for i in range(16))
    fix = {
        "summary": "clamp p",
        "verified": True,
        "how": "replayed",
        "diff": f"@@ -1 +1 @@\n{long}",
    }
    lines = shown(changed(fixes=[fix]), width=60).splitlines()
    assert f"       {long}" in lines
    assert max(len(line) for line in lines if "term_" not in line) <= 60


def test_the_source_and_the_command_are_never_wrapped():
    long = "    loss = " + " + ".join(f"term_{i}" for i in range(16))
    kept = {"first": 40, "lines": ["def f(p):", f"{long}  # above", long]}
    origin = {**INCIDENT["origin"], "line": 42, "code": long.strip(), "excerpt": kept}
    folder = "/data/" + "night/" * 20
    lines = rendered(incident_page(changed(origin=origin), folder=folder), 60).splitlines()
    assert f"     41 | {long}  # above" in lines
    assert f"  -> 42 | {long}" in lines
    assert f"  nanguard replay {folder}" in lines


def test_lines_end_without_blanks():
    lines = shown(INCIDENT).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_colour_is_there_on_a_terminal():
    file = io.StringIO()
    Console(file=file, width=100, force_terminal=True, color_system="standard").print(
        incident_page(Incident(INCIDENT))
    )
    assert "\x1b[32m+    q = torch.log(p.clamp(min=1e-8))\x1b[0m" in file.getvalue()
    assert "\x1b[31m-    q = torch.log(p)\x1b[0m" in file.getvalue()


def test_the_page_of_a_cause():
    cause = SimpleNamespace(code="a-cause", meaning="it is [bold]bad\x1b", why="Because " * 30)
    lines = rendered(cause_page(cause), 60).splitlines()
    assert lines[:3] == ["a-cause: it is [bold]bad\\x1b", "", "  " + "Because " * 6 + "Because"]
    assert " ".join(lines[2:]).split() == ["Because"] * 30


def test_the_page_needs_no_torch():
    heavy = "print('torch' in sys.modules, 'numpy' in sys.modules)"
    code = f"import sys, nanguard.view.report.incident_page; {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
