"""The fields of an incident: read as if from a stranger, and put into words."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.findings import Finding
    from nanguard.incident import Incident

# Characters of a text that are shown.
LINE = 200
# Longer whole numbers are no count of anything; Python refuses to print those beyond 4300 digits.
_LARGEST = 10**18
_ACTIONS = {
    "step": "The guard let the step pass",
    "overflow": "The GradScaler skipped the step and lowered its scale",
    "skip": "The guard skipped the step",
    "cut-lr": "The guard skipped the step and cut the learning rate",
    "rollback": "The guard rolled back to the last good snapshot",
    "stop": "The guard stopped the run",
}
_PHASES = {
    "init": "while the model was made",
    "data": "while the data was prepared",
    "forward": "forward",
    "backward": "backward (the line is the forward line whose derivative failed)",
    "optimizer": "in the step of the optimizer",
}
_MODULES = {
    "<root>": "<root> (the forward of the model itself)",
    "loss": "loss (outside of the model)",
    "input": "input (before the model)",
    "optimizer": "optimizer",
}
_METHODS = {
    "second-run": "The script was run again from its first line.",
    "in-place": "The step was made again in the run itself, from what it began with.",
}
_VERDICTS = {
    "reproduced": "The step was bad again.",
    "low-precision-only": "The step was bad again, but it is finite in float32: only low "
    "precision makes it bad.",
    "not-reproduced": "The replay did not give what the run gave.",
    "not-replayed": "The step was not replayed, so nothing about its cause is proven.",
}
_NO_ORIGIN = {
    "not-reproduced": "Not known: the step was finite when it was replayed.",
    "not-replayed": "Not known: the step was not replayed.",
}
_NO_FIX = {
    "not-reproduced": "No fix is known. Watch whether it happens again, and on which machine.",
    "not-replayed": "Replay the step to find its cause; the command is below.",
}
# The confidence from which a cause is called proven, and likely.
_PROVEN = 0.9
_LIKELY = 0.7
_BAD = ("", "nan", "inf", "-inf")
# Points of a curve that are read, and characters that it is drawn with.
_POINTS, _SPARKS = 1000, 24
_HEIGHTS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
# Characters of a sentence about an incident that are shown.
_SENTENCE = 400


def literal(value: Any, limit: int = LINE) -> str:
    r"""Returns a string as it can safely be shown on a terminal; empty if it is no string.

    Escape sequences, line breaks, marks that reverse the direction of text and lone surrogates
    become visible, as in ``\x1b``.

    Args:
        value: Anything.
        limit: How many characters are shown.
    """
    if not isinstance(value, str):
        return ""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in value[: limit + 1]
    )
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


def source(line: Any) -> str:
    """Returns a line of source, safe to be shown; empty if it is no string."""
    # Cut first: a tab may become four characters.
    return literal(line[: 2 * LINE].expandtabs(4).rstrip()) if isinstance(line, str) else ""


def text(holder: Mapping[str, Any], key: str, limit: int = LINE) -> str:
    """Returns a field that is a string, safe to be shown; empty if it is none."""
    return literal(holder.get(key), limit)


def whole(holder: Mapping[str, Any], key: str) -> int | None:
    """Returns a field that is a count; None if it is none."""
    value = holder.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        return None
    return value


def branch(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns a field that holds fields; empty if it does not."""
    value = holder.get(key)
    return value if isinstance(value, dict) else {}


def entries(holder: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns those members of a list that hold fields."""
    return [entry for entry in _list(holder, key) if isinstance(entry, dict)]


def texts(holder: Mapping[str, Any], key: str) -> list[str]:
    """Returns those members of a list that are strings, safe to be shown."""
    return [literal(entry) for entry in _list(holder, key) if isinstance(entry, str) and entry]


def numbers(holder: Mapping[str, Any], key: str) -> list[str]:
    """Returns those members of a list that are numbers, in words."""
    return [word for entry in _list(holder, key) if (word := number(entry))]


def number(value: Any) -> str:
    """Returns how a number is written, also one whose name JSON holds; empty if it is none."""
    if isinstance(value, str):
        return value if value in ("nan", "inf", "-inf") else ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if isinstance(value, int):
        return str(value) if abs(value) < _LARGEST else ""
    return name_of(value)


def listed(words: Sequence[str], most: int = 10) -> str:
    """Returns a few words, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def place_in_words(finding: Finding) -> str:
    """Returns what a finding names besides file and line: a part of it, a step, a rank."""
    step = "" if finding.step is None else f"step {finding.step}"
    rank = "" if finding.rank is None else f"rank {finding.rank}"
    return ", ".join(part for part in (finding.where or "", step, rank) if part)


def _list(holder: Mapping[str, Any], key: str) -> list[Any]:
    value = holder.get(key)
    return value if isinstance(value, list) else []


def symptom(fields: Mapping[str, Any]) -> str:
    """Returns what was seen, as a sentence goes on."""
    where, kind = text(fields, "where", 60), text(fields, "kind", 60) or "not finite"
    named, loss = listed(texts(fields, "names"), 3), number(fields.get("loss"))
    if where == "loss":
        return f"the loss is {loss or kind}"
    if where == "gradient":
        of = f" of {named}" if named else ""
        return f"the gradient{of} is {kind}" + (f", while the loss is {loss}" if loss else "")
    if where:
        return f"{where}{' ' if named else ''}{named} is {kind} after the step"
    return "what was bad about it is not recorded"


def action(incident: Mapping[str, Any]) -> str:
    """Returns what was done about the step of an incident, as a sentence."""
    fields = branch(incident, "action")
    taken, reason = text(fields, "taken", 60), text(fields, "reason")
    if not taken:
        return "What the guard did is not recorded."
    done = _ACTIONS.get(taken, f"The guard did this: {taken}")
    if incident.get("by_script") is True:
        done = "The step was not made"  # by the script itself, as the reason says
    return done + (f" ({reason})." if reason else ".")


def phase(origin: Mapping[str, Any]) -> str:
    """Returns when it happened."""
    name = text(origin, "phase", 60)
    return _PHASES.get(name, name)


def op(origin: Mapping[str, Any]) -> str:
    """Returns which operation made the bad value."""
    name, kernel = text(origin, "op", 100), text(origin, "kernel", 100)
    if name == "input":
        return "none: the data was bad when torch first saw it"
    if not name or kernel in ("", name):
        return name
    backward = text(origin, "phase") == "backward"
    return f"{name} ({'its derivative' if backward else 'it'} calls {kernel})"


def module(origin: Mapping[str, Any]) -> str:
    """Returns in which part of the model it happened."""
    name = text(origin, "module")
    return _MODULES.get(name, name)


def optimizer(fields: Mapping[str, Any]) -> str:
    """Returns which optimizer made the step, and with which settings."""
    parts = [f"{key} {value}" for key in ("lr", "eps") if (value := number(fields.get(key)))]
    return ", ".join(filter(None, [text(fields, "name", 60), *parts]))


def sureness(confidence: Any, *, proven: bool = False) -> str:
    """Returns how sure a cause is.

    Args:
        confidence: A number from 0 to 1; anything else counts as unknown.
        proven: Whether a replay showed it: no number stands for that.
    """
    if isinstance(confidence, bool) or not isinstance(confidence, (int, float)):
        return "unknown"
    if not 0 < confidence <= 1:
        return "unknown"
    if confidence >= _PROVEN and proven:
        return "proven by replay"
    return "likely" if confidence >= _LIKELY else "possible"


def confidence(incident: Incident) -> str:
    """Returns how sure the cause of an incident is, as a sentence."""
    sure = _sureness_of(incident)
    if sure == "unknown":
        return "The confidence is not recorded."
    value = branch(incident, "cause").get("confidence")
    return f"{sure.capitalize()} (confidence {number(value)})."


def _sureness_of(incident: Incident) -> str:
    replayed = not text(branch(incident, "replay"), "verdict").startswith("not-")
    proven = any(trial.get("finite") is True for trial in entries(incident, "trials"))
    proven = proven or any(fix.get("verified") is True for fix in entries(incident, "fixes"))
    return sureness(branch(incident, "cause").get("confidence"), proven=proven and replayed)


def sentence(incident: Incident) -> str:
    """Returns what happened, and in brackets the cause and how sure it is; empty if unknown.

    ``train.py:20 divides by x.std(), which is 0 ...: 0/0 = NaN   [degenerate-statistics, proven]``
    """
    cause = branch(incident, "cause")
    code, summary = text(cause, "code", 60), text(cause, "summary", _SENTENCE)
    if not code:
        return ""
    said = text(incident, "sentence", _SENTENCE)
    if not said:
        origin = branch(incident, "origin")
        file, line = text(origin, "file", _SENTENCE), whole(origin, "line")
        place = f"{PurePath(file).name}:{line}: " if file and line is not None else ""
        said = place + summary
    if code == "unknown":
        return f"{said}   [{code}]"
    sure = _sureness_of(incident).removesuffix(" by replay")
    return f"{said}   [{code}, {sure}]"


def in_a_line(incident: Incident) -> str | None:
    """Returns what was found out about an incident, in a line; None if nothing was."""
    said = sentence(incident)
    if not said:
        return None
    ranks = whole(branch(incident, "run"), "ranks") or 1
    rank = f" on rank {whole(incident, 'rank')}" if ranks > 1 else ""
    return f"step {whole(incident, 'step')}{rank}: {said}"


def drift(incident: Incident) -> str:
    """Returns which learned quantity moved away, since when, and its curve; empty if none did."""
    fields = branch(incident, "drift")
    name, began = text(fields, "tensor", 100), whole(fields, "first_step")
    values = [
        point[1]
        for point in _curve(fields)[:_POINTS]
        if isinstance(point, list) and len(point) == 2 and number(point[1]) not in _BAD
    ]
    if not name or began is None or len(values) < 2:
        return ""
    low, high = min(values), max(values)
    shown = values[:: max(1, len(values) // _SPARKS)]
    span = (high - low) or 1.0
    curve = "".join(_HEIGHTS[int((v - low) / span * (len(_HEIGHTS) - 1))] for v in shown)
    return f"{name} since step {began}: {number(values[0])} {curve} {number(values[-1])}"


def _curve(fields: Mapping[str, Any]) -> list[Any]:
    curve = fields.get("curve")
    return curve if isinstance(curve, list) else []


def is_fixable(incident: Incident) -> bool:
    """Returns whether ``nanguard fix`` has a change to make."""
    fixes = entries(incident, "fixes")
    return any(fix.get("verified") is True and text(fix, "diff") for fix in fixes)


def trial(finite: Any) -> tuple[str, str]:
    """Returns what came of a trial, and the style to show it in."""
    if finite is True:
        return "ok", "green"
    return ("still bad", "red") if finite is False else ("could not be tried", "yellow")


def fix(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Returns whether a fix is known to work, and the style to show it in."""
    how = text(fields, "how")
    if fields.get("verified") is True:
        return f"Verified{': ' if how else ''}{how}", "green"
    if how in ("", "not tried"):
        return "Not tried, so it is not known whether it helps.", "yellow"
    return f"Not verified: {how}", "yellow"


def no_origin(replay_fields: Mapping[str, Any]) -> str:
    """Returns why it is not known where it happened."""
    unknown = "Not known: no operation was found that made the bad value."
    return _NO_ORIGIN.get(text(replay_fields, "verdict"), unknown)


def no_fix(replay_fields: Mapping[str, Any]) -> str:
    """Returns what to do where no fix is known."""
    return _NO_FIX.get(text(replay_fields, "verdict"), "No fix is known.")


def diff_style(line: str) -> str:
    """Returns the style of a line of a diff."""
    if line.startswith(("---", "+++")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")


def replay(fields: Mapping[str, Any]) -> str:
    """Returns how the step was replayed and what that showed, in sentences."""
    verdict, method = text(fields, "verdict", 60), text(fields, "method", 60)
    seconds, why = number(fields.get("seconds")), text(fields, "why")
    known = f"Verdict: {verdict}." if verdict else "Whether the step was replayed is not recorded."
    parts = [
        _METHODS.get(method, f"Method: {method}." if method else ""),
        _VERDICTS.get(verdict, known),
        f"This took {seconds} s." if seconds else "",
        f"Reason: {why}" if why else "",
    ]
    return " ".join(filter(None, parts))
