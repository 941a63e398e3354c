"""Hides what looks like a secret in a text that may be shown to others."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
_WORDS = (
    r"(?:api[_-]?key|secret|passw(?:or)?d|passphrase|credential|access[_-]?key|private[_-]?key|"
    r"auth[_-]?token)"
)
_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,}\]\"']+)"
_SWITCH = r"(?![\"']?(?:true|false|null|none|~|yes|no|on|off)[\"']?\s*(?:[,}\]#\n]|$))"
# A key and its value: in YAML, TOML, JSON, shell; in one line or one of many in a line.
_PAIR = re.compile(rf"(?i)(?P<key>{_WORDS}[\w-]{{0,80}}[\"']?[ \t]*[:=][ \t]*){_SWITCH}{_VALUE}")
# A token is mostly a word of a text: only what is long is one that opens a door.
_TOKEN = re.compile(r"(?i)(?P<key>token[\"']?[ \t]*[:=][ \t]*)[\"']?[\w\-+/=.]{12,}[\"']?")
_OPTION = re.compile(
    rf"(?i)(?P<key>(?<!\S)--?[\w-]{{0,80}}(?:{_WORDS}[\w-]{{0,80}}|token)[ =])(?!-){_VALUE}"
)
# Keys of well-known services, and passwords in addresses.
_KNOWN = re.compile(
    r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"
    r"|(?P<user>://[^\s/:@]{1,80}:)[^\s/@]{1,200}(?=@)"
)


def hidden(text: str) -> str:
    """Returns a text without what looks like a key or a password."""
    for pattern in (_PAIR, _TOKEN, _OPTION):
        text = pattern.sub(rf"\g<key>{HIDDEN}", text)
    return _KNOWN.sub(lambda found: f"{found['user'] or ''}{HIDDEN}", text)
