"""Hides keys and passwords in everything nanguard writes or shows to others.

Commands, configurations, lines of source and messages of exceptions go through here before they get
into an incident, a record, a tracker, a report or a note. What looks like a secret is hidden:
a value beside a telling name, and the keys of well-known services wherever they stand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = "(hidden)"
_WORDS = (
    r"(?:api[_-]?key|secret|passw(?:or)?d|passphrase|credential|access[_-]?key|private[_-]?key|"
    r"auth[_-]?token|auth(?![a-z]))"
)
_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|\[[^\]\n]*\]?|[^\s,}\]\"']+)"
_SWITCH = r"(?![\"']?(?:true|false|null|none|~|yes|no|on|off)[\"']?\s*(?:[,}\]#\n]|$))"
# A key and its value: in YAML, TOML, JSON, shell; in one line or one of many in a line.
_PAIR = re.compile(rf"(?i)(?P<key>{_WORDS}[\w-]{{0,80}}[\"']?[ \t]*[:=][ \t]*){_SWITCH}{_VALUE}")
# A text of several lines below its key, as YAML has them: the lines that are further in.
_BLOCK = re.compile(
    rf"(?im)^(?P<key>(?P<indent>[ \t]*)[\w\"'.-]{{0,80}}{_WORDS}[\w-]{{0,80}}[\"']?[ \t]*:[ \t]*)"
    r"[|>][-+\d]{0,3}[ \t]*(?:\n(?:[ \t]*$|(?P=indent)[ \t]+[^\n]*))+"
)
# A token is mostly a word of a text: only what is long is one that opens a door.
_TOKEN = re.compile(r"(?i)(?P<key>token[\"']?[ \t]*[:=][ \t]*)[\"']?[\w\-+/=.]{12,}[\"']?")
_OPTION = re.compile(
    rf"(?i)(?P<key>(?<!\S)--?[\w-]{{0,80}}(?:{_WORDS}[\w-]{{0,80}}|token)[ =])(?!-){_VALUE}"
)
# Keys of well-known services, and passwords in addresses. A W&B key is 40 hexadecimal digits, and
# so is a commit, which is known by the word before it.
_KNOWN = re.compile(
    r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*"
    r"|(?P<header>(?i:\bauthorization[\"']?[ \t]*[:=][ \t]*[\"']?(?:bearer|basic|token)?|\bbearer)"
    r"[ \t]+)[\w\-+/=.~]{12,}"
    r"|(?P<signed>(?i:\b(?:X-Amz-Signature|X-Goog-Signature|AccountKey|SharedAccessKey|sig)=))"
    r"[\w+/=%-]{12,}"
    r"|(?P<hook>https://(?:hooks\.slack\.com/|(?:\w+\.)?discord(?:app)?\.com/api/webhooks/|"
    r"[\w.-]{1,200}\.(?:webhook\.office|logic\.azure|powerplatform)\.com[:\d]{0,6}/))[^\s\"']+"
    r"|(?P<user>://[^\s/:@]{1,80}:)[^\s/@]{1,200}(?=@)"
    r"|(?P<commit>(?i:commit|revision|rev|sha1?|hash|git)[\"']?[ \t]{0,3}[:=@]?[ \t]{0,3}[\"']?"
    r"[0-9a-f]{40}\b)"
    r"|(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])"
)
# The name of an option whose value is the next word of a command, and of a key in a tree.
_NAMES_SECRET = re.compile(rf"(?i)(?:{_WORDS}[\w-]{{0,80}}|token)$")
_SWITCHES = frozenset({"true", "false", "null", "none", "~", "yes", "no", "on", "off", ""})
# Trees of others may be deep without end.
_DEEPEST = 100


def hidden(text: str) -> str:
    """Returns a text without what looks like a key or a password."""
    for pattern in (_BLOCK, _PAIR, _TOKEN, _OPTION):
        text = pattern.sub(rf"\g<key>{HIDDEN}", text)
    return _KNOWN.sub(_known, text)


def _known(found: re.Match[str]) -> str:
    kept = (found[name] for name in ("hook", "user", "header", "signed"))
    return found["commit"] or f"{next(filter(None, kept), '')}{HIDDEN}"


def hidden_words(command: Sequence[str]) -> list[str]:
    """Returns the words of a command without what looks like a key or a password."""
    out: list[str] = []
    follows = False
    for word in command:
        out.append(HIDDEN if follows and not word.startswith("-") else hidden(word))
        follows = word.startswith("-") and "=" not in word and bool(_NAMES_SECRET.search(word))
    return out


def hidden_tree(value: Any) -> Any:
    """Returns a tree of plain values in which no text holds what looks like a key or a password.

    A list of texts is taken for a command: an option and its value may be two of them.
    """
    return _hidden_tree(value, _DEEPEST)


def _hidden_tree(value: Any, deeper: int) -> Any:
    if isinstance(value, str):
        return hidden(value)
    if deeper <= 0:
        return value
    if isinstance(value, dict):
        return {key: _hidden_value(key, inner, deeper - 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        if all(isinstance(inner, str) for inner in value):
            return hidden_words(value)
        return [_hidden_tree(inner, deeper - 1) for inner in value]
    return value


def _hidden_value(key: Any, value: Any, deeper: int) -> Any:
    if not isinstance(key, str) or not _NAMES_SECRET.search(key) or deeper <= 0:
        return _hidden_tree(value, deeper)
    if isinstance(value, (list, tuple)):
        return [_hidden_value(key, inner, deeper - 1) for inner in value]
    if isinstance(value, dict):
        return {name: _hidden_value(key, inner, deeper - 1) for name, inner in value.items()}
    short = key.lower().endswith("token") and len(str(value)) < 12
    if short or value is None or isinstance(value, bool) or str(value).lower() in _SWITCHES:
        return _hidden_tree(value, deeper)
    return HIDDEN
