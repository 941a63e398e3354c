"""The settings of a preset with their notes, and the text of the file they make."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.advice.presets import LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nanguard.advice.presets import Values

Scalar = bool | int | float | str
SEED = "A bad step can only be looked into if the run can be repeated."
DROP_LAST = (
    "A last batch of one sample has no variance for BatchNorm, and uneven ranks wait for each "
    "other. Set it to false only for evaluation."
)
RESUME = (
    "Resume from the last checkpoint that was finite, not simply from the last one; load with "
    "weights_only=True."
)
KEEP = (
    "The newest checkpoint may hold NaN already. Keep three at least, and delete none that was "
    "the last good one."
)
LOG = "A spike lasts one or two steps; a log of every 100th does not show it."
OPTIMIZER = "AdamW keeps its own scale for every weight. Other optimizers need other rates."
BETA2 = (
    "How long squared gradients are remembered; 0.95 forgets a spike fifty times sooner than "
    "0.999. Lower it if the loss jumps after single large gradients."
)
BATCH = (
    "Samples for each device. Out of memory: halve it and double the accumulation. Not below 2 "
    "with BatchNorm."
)
SMOOTHING = (
    "Keeps the logits of a classifier from growing without end. 0.0 where the labels are soft "
    "already."
)


@dataclass(frozen=True, slots=True)
class SettingLine:
    """A key with a value.

    Attributes:
        key: The key.
        value: The value.
        note: Why it is so, and when to change it.
    """

    key: str
    value: Scalar | tuple[Scalar, ...]
    note: str


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """A key with further keys below it.

    Attributes:
        key: The key.
        members: What is below it.
        note: What the section is for.
        listed: Whether it is a list with this one member.
    """

    key: str
    members: tuple[SettingLine | SettingGroup, ...]
    note: str = ""
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration.

    Attributes:
        header: What it is, paragraph by paragraph.
        members: What stands at its root.
    """

    header: tuple[str, ...]
    members: tuple[SettingLine | SettingGroup, ...]

    def notes(self) -> Iterator[tuple[str, str]]:
        """Yields every dotted key there is something to say about, and what."""
        yield from _notes(self.members, "")


def _notes(
    members: tuple[SettingLine | SettingGroup, ...], before: str
) -> Iterator[tuple[str, str]]:
    for member in members:
        dotted = f"{before}{member.key}"
        if member.note:
            yield dotted, member.note
        if isinstance(member, SettingGroup):
            yield from _notes(member.members, f"{dotted}.")


_LINE_LENGTH = 92
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
# Words that YAML 1.1 takes for yes, no or nothing.
_NOT_TEXT = frozenset(("yes", "no", "on", "off", "true", "false", "null", "none", "y", "n"))
_Members = tuple[SettingLine | SettingGroup, ...]


def written(config: Config, language: str) -> str:
    """Returns a configuration in one of the languages."""
    return _WRITERS[language](config)


def notes_of(config: Config) -> str:
    """Returns the notes on a configuration that cannot hold comments."""
    header = (line.removeprefix("#").removeprefix(" ") for line in heading(config.header))
    paragraphs = ["\n".join(header)]
    for key, note in config.notes():
        filled = textwrap.fill(note, _LINE_LENGTH, initial_indent="    ", subsequent_indent="    ")
        paragraphs.append(f"{key}\n{filled}")
    return "\n\n".join(paragraphs) + "\n"


def number(value: float) -> str:
    """Returns a number so that every reader takes it for one, YAML 1.1 included."""
    if value != 0 and abs(value) < 1e-3:
        digits, _, power = f"{value:e}".partition("e")
        return f"{float(digits)}e{int(power)}"
    return repr(value)


def comment(text: str, indent: str = "") -> Iterator[str]:
    """Yields a paragraph as lines of comment; a command, which is indented, stays one line."""
    if text.startswith("    "):
        yield f"{indent}# {text}"
        return
    hanging = " " * (5 if text.startswith("  ") else 0)
    for line in textwrap.wrap(text, _LINE_LENGTH - len(indent), subsequent_indent=hanging):
        yield f"{indent}# {line}"


def heading(lines: tuple[str, ...]) -> Iterator[str]:
    """Yields what stands above a file as lines of comment."""
    for line in lines:
        yield from comment(line) if line else ("#",)


def _yaml(config: Config) -> str:
    return "\n".join([*heading(config.header), "", *_yaml_members(config.members, "")]) + "\n"


def _yaml_members(members: _Members, indent: str) -> Iterator[str]:
    for member in members:
        yield from comment(member.note, indent)
        if isinstance(member, SettingLine):
            yield f"{indent}{member.key}: {_value(member.value, _yaml_text)}"
            continue
        yield f"{indent}{member.key}:"
        inner = _yaml_members(member.members, indent + ("    " if member.listed else "  "))
        yield from _as_item(inner, indent) if member.listed else inner


def _as_item(lines: Iterator[str], indent: str) -> Iterator[str]:
    """Yields the lines of a mapping as the one item of a list."""
    marked = False
    for line in lines:
        if marked or line.lstrip().startswith("#"):
            yield line
        else:
            marked = True
            yield f"{indent}  - {line.lstrip()}"


def _toml(config: Config) -> str:
    lines = [*heading(config.header), "", *_toml_table(config.members, "")]
    return "\n".join(lines) + "\n"


def _toml_table(members: _Members, name: str) -> Iterator[str]:
    for member in members:
        if isinstance(member, SettingLine):
            yield from comment(member.note)
            yield f"{member.key} = {_value(member.value, json.dumps)}"
    for member in members:
        if isinstance(member, SettingGroup):
            dotted = f"{name}.{member.key}" if name else member.key
            yield ""
            yield from comment(member.note)
            yield f"[[{dotted}]]" if member.listed else f"[{dotted}]"
            yield from _toml_table(member.members, dotted)


def _json(config: Config) -> str:
    return "\n".join(_json_object(config.members, "")) + "\n"


def _json_object(members: _Members, indent: str) -> Iterator[str]:
    inner = indent + "  "
    yield "{"
    for at, member in enumerate(members):
        comma = "," if at + 1 < len(members) else ""
        if isinstance(member, SettingLine):
            yield f"{inner}{json.dumps(member.key)}: {_value(member.value, json.dumps)}{comma}"
            continue
        first, *rest = _json_object(member.members, inner)
        opened, closed = ("[", "]") if member.listed else ("", "")
        yield f"{inner}{json.dumps(member.key)}: {opened}{first}"
        yield from rest[:-1]
        yield f"{rest[-1]}{closed}{comma}"
    yield f"{indent}}}"


def _value(value: Scalar | tuple[Scalar, ...], text: Callable[[str], str]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item, text) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return text(value)
    return number(value) if isinstance(value, float) else str(value)


def _yaml_text(text: str) -> str:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT
    return text if plain else f"'{text}'"


_WRITERS: dict[str, Callable[[Any], str]] = {"yaml": _yaml, "toml": _toml, "json": _json}


def header(values: Values, file: str, start: str, whole: str = "") -> tuple[str, ...]:
    """Returns what stands above a configuration, line by line.

    Args:
        values: The values.
        file: What the file is.
        start: The command that trains with it.
        whole: How to start the run where that is not the command under the guard.
    """
    run = whole or f"nanguard run --on-bad {values.on_bad} -- {start}"
    plan = [f"  {at}. {step}" for at, step in enumerate(values.task.plan, start=1)]
    return (
        f"{file}: {values.task.about}.",
        f"Level {values.level}, {values.precision}; made by nanguard preset.",
        "",
        "Train with detection on, so that no bad step reaches the weights:",
        f"    {run}",
        "",
        "Once it has held, in this order:",
        *plan,
    )


def count(values: Values, length: int) -> str:
    """Returns a length of the task in words."""
    return values.task.unit[:-1] if length == 1 else f"{length} {values.task.unit}"


def rate(values: Values) -> str:
    """Returns why the learning rate is what it is."""
    return f"{_step_up(values)}{values.task.rate_why}"


def floor(values: Values) -> str:
    """Returns why the schedule ends where it does."""
    return (
        f"The schedule ends at {number(values.floor)}, below every rate that is known to break. "
        f"It has to stay below the learning rate."
    )


def clip(values: Values) -> str:
    """Returns why gradients are clipped to this norm."""
    scaled = values.precision == "fp16"
    order = " With a GradScaler it comes after scaler.unscale_(optimizer)." if scaled else ""
    return (
        f"Gradients longer than this are shortened to it. {values.task.clip_why} Lower it when "
        f"the norm spikes, never switch it off. It does not help once a gradient is NaN.{order}"
    )


def warmup(values: Values) -> str:
    """Returns why the learning rate rises slowly."""
    return (
        f"The rate rises over the first {count(values, values.warmup)} of {values.task.length}, "
        f"as AdamW knows nothing of its gradients yet. Longer if NaN comes early; never 0 in half "
        f"precision."
    )


def decay(values: Values) -> str:
    """Returns why weights decay as they do."""
    return (
        f"Keeps weights from growing until they overflow. {number(values.task.weight_decay)} is "
        f"mild; raise it if norms of weights grow through the whole run."
    )


def eps(values: Values) -> str:
    """Returns why AdamW's eps is what it is."""
    kept = (
        "Good for fp32 state."
        if values.precision == "fp32"
        else "Good while weights and state stay in fp32, as they do in mixed precision."
    )
    return f"{kept} 1e-8 is 0 in fp16: weights that are half themselves need 1e-6 or more."


def precision(values: Values) -> str:
    """Returns what the precision costs and risks."""
    if values.precision == "fp32":
        return (
            "Everything in fp32: slowest, and nothing overflows. Go to bf16 once a whole run has "
            "held."
        )
    if values.precision == "bf16":
        return (
            "bf16 has the range of fp32 with 8 bits of precision, and needs no loss scaling. Go "
            "back to fp32 to find out whether NaN comes from rounding."
        )
    return (
        "fp16 ends at 65504 and needs loss scaling. Take it only where the device has no bf16; "
        "go back to fp32 to find out whether NaN comes from overflow."
    )


def scale(values: Values) -> str:
    """Returns why loss scaling begins where it does."""
    return (
        f"The loss scale is found while training, from {2**values.scale_power} on. A high start "
        f"costs a few skipped steps; a scale that keeps falling means that gradients are NaN."
    )


def accumulation(values: Values) -> str:
    """Returns why a step has this number of micro-batches."""
    if values.accumulation == 1:
        return "Micro-batches for each step. 2 to 4 make gradients steadier; divide the loss by it."
    return (
        "Micro-batches for each step: steadier gradients without more memory. Lower it when "
        "nothing was skipped for a whole run."
    )


def save(values: Values) -> str:
    """Returns why checkpoints are written as often as they are."""
    return (
        f"A checkpoint every {count(values, values.save)}: what a run that breaks loses at "
        f"most. Seldomer only if writing takes more than a few per cent of the time."
    )


def length(values: Values) -> str:
    """Returns what to watch when the length is changed."""
    return (
        f"How long the run is, in {values.task.unit}. The schedule ends with it: change the "
        f"warm-up too when this changes a lot."
    )


def schedule() -> str:
    """Returns why the schedule has the shape it has."""
    return "Warm-up, then a cosine down to the lowest rate: no jump anywhere."


def _step_up(values: Values) -> str:
    if values.at + 1 == len(LEVELS):
        return "The highest rate that is known to hold here. "
    above = number(values.task.rates[values.at + 1])
    return f"Raise it to {above} (level {LEVELS[values.at + 1]}) after a run without a bad step. "
