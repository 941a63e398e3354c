"""Finds the lines that say in words that a loss, a gradient or the loss scale went bad."""

from __future__ import annotations

import re

from nanguard.check.log.names import Role
from nanguard.check.log.series import Note

# Cheap to search for; every sentence below has one of them.
SUSPECT = re.compile(r"nan|inf|finite|invalid loss|loss scale|overflow", re.IGNORECASE)

# A sentence is found in the beginning of a line or not at all.
_LONGEST = 400
_BAD = r"(?:nans?|infs?|infinite|infinity|non-?\s?finite|not finite)"
_HAPPENED = r"(?:detected|found|encountered|appeared|occurred|seen|observed)"
_EVENT = (
    rf"(?:\b{_HAPPENED}\b|\b(?:at|in|on) (?:global )?(?:step|iter|epoch|batch|update)"
    r"|\b(?:error|warning|warn|critical|got|stopp\w+|skipp\w+|abort\w*|terminat\w+|rais\w+|halt\w*)\b)"
)
_STEP = re.compile(r"(?i)\b(?:step|iter(?:ation)?|update)s?\W{0,3}(\d{1,15})")
_DENIED = re.compile(
    r"(?i)\b(?:no|not|never|without|zero|0|if|will|would|should|shall|can|could|may|might|when|"
    r"whenever|unless|check(?:s|ing|ed)?|guard\w*|enabled?|disabled?|filter\w*|avoid\w*|"
    r"prevent\w*|protect\w*|fix(?:ed|es)?|handl\w+|warn on|stop on|true|false|test\w*|assert\w*|"
    r"was|were|previous(?:ly)?|earlier|monitor\w*|detection|detector|safe|0 nan|any|number of|"
    r"potential|possible|threshold|config\w*|option|default|to)\b(?! finite)"
)
_LOSS = (
    rf"\b{_BAD}[ '\"]+(?:in |training |train |the |value in |total )*loss(?:es)?\b(?=.*{_EVENT})",
    rf"{_EVENT}.*\b{_BAD}[ '\"]+(?:in |training |train |the |total )*loss(?:es)?\b",
    rf"\bloss(?:es)?\W+(?:is|are|became|becomes|has become|went|contains?|turned)\W+(?:\w+\W+)"
    rf"{{0,2}}{_BAD}\b",
    rf"\b{_BAD}\b.{{0,12}}\b{_HAPPENED}\b.{{0,20}}\bloss(?:es)?\b",
    rf"\bloss(?:es)?\b.{{0,12}}\b{_BAD}\b.{{0,12}}\b{_HAPPENED}\b",
    r"\binvalid loss, terminating training\b",
)
_OF_GRADIENT = r"(?:in |the |values? in |local |global )*(?:grads?|gradients?)"
_GRADIENT = (
    rf"\b{_BAD}[ '\"]+{_OF_GRADIENT}\b(?=.*{_EVENT})",
    rf"{_EVENT}.*\b{_BAD}[ '\"]+{_OF_GRADIENT}\b",
    rf"\b(?:grads?|gradients?)(?:\W+norm)?\W+(?:is|are|became|has|have|contains?|went|turned)\W+"
    rf"(?:\w+\W+){{0,2}}{_BAD}\b",
    rf"\b{_BAD}\b.{{0,12}}\b{_HAPPENED}\b.{{0,24}}\b(?:grads?|gradients?)\b",
)
# Words of frameworks that are only ever written when it has happened.
_RAISED_LOSS = (
    rf"\bloss returned (?:in|by|from) \S+ is {_BAD}\b",
    r"\bNanLossDuringTrainingError\b",
)
_RAISED_GRADIENT = (
    rf"\btotal norm .{{0,24}}\bgradients from .{{0,24}} is {_BAD}\b",
    r"\bfunction '\w+' returned nan values\b",
)
_SCALE = (
    r"\bloss scale already at minimum\b",
    r"\bminimum loss scale reached\b",
    r"\bloss scale .{0,40}(?:reached|below|at) (?:the |its )?minimum\b",
)
_KINDS = (
    (Role.SCALE, re.compile("|".join(_SCALE), re.IGNORECASE), False),
    (Role.GRAD_NORM, re.compile("|".join(_RAISED_GRADIENT), re.IGNORECASE), False),
    (Role.LOSS, re.compile("|".join(_RAISED_LOSS), re.IGNORECASE), False),
    (Role.GRAD_NORM, re.compile("|".join(_GRADIENT), re.IGNORECASE), True),
    (Role.LOSS, re.compile("|".join(_LOSS), re.IGNORECASE), True),
)


def note_of(text: str, line: int) -> Note | None:
    """Returns what a line says in words; None if it only speaks about what might be."""
    text = text[:_LONGEST]
    if not SUSPECT.search(text):
        return None
    for role, pattern, deniable in _KINDS:
        found = pattern.search(text)
        if found is None:
            continue
        around = text[max(0, found.start() - 40) : found.end() + 24]
        if deniable and _DENIED.search(around):
            return None
        step = _STEP.search(text)
        said = text.strip()[:160]
        return Note(role, said, int(step[1]) if step else None, line)
    return None
