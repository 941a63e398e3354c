"""What options can be set to."""

from __future__ import annotations

from enum import Enum


class OnBad(str, Enum):
    """What to do about a bad step."""

    SKIP = "skip"
    ROLLBACK = "rollback"
    STOP = "stop"


class Spikes(str, Enum):
    """What to do about a finite number that is far above the usual."""

    ACT = "act"
    WARN = "warn"
    OFF = "off"


class Precision(str, Enum):
    """A type to compute in."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Format(str, Enum):
    """How a command answers."""

    TEXT = "text"
    JSON = "json"


class CheckFormat(str, Enum):
    """How ``nanguard check`` answers."""

    TEXT = "text"
    FULL = "full"
    CONCISE = "concise"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


class Engine(str, Enum):
    """Where ``nanguard check`` scans many files."""

    LOCAL = "local"
    RAY = "ray"


class FailOn(str, Enum):
    """From which severity on ``nanguard check`` fails."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    NONE = "none"
