"""What the files of a run say about precision, clipping and batch size, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.config.run_config import RunConfig, Setting, TrainingStage

# Ways to train: full, mixed with one half type, or everything in one half type.
World = Literal["fp32", "fp16", "bf16", "pure-fp16", "pure-bf16"]
Worlds = frozenset[World]
ALL: Worlds = frozenset(("fp32", "fp16", "bf16", "pure-fp16", "pure-bf16"))
_UNMIXED: Worlds = frozenset(("fp32", "pure-fp16", "pure-bf16"))
_FP16: Worlds = frozenset(("fp16", "pure-fp16"))
_BF16: Worlds = frozenset(("bf16", "pure-bf16"))
_MIXED: Worlds = frozenset(("fp16", "bf16"))

PRECISION_SETTINGS = (
    "fp16",
    "bf16",
    "precision",
    "mixed_precision",
    "amp",
    "amp_dtype",
    "dtype",
    "param_dtype",
)
_TYPES: dict[str, str] = {
    **dict.fromkeys(
        [
            "fp16",
            "float16",
            "half",
            "16",
            "f16",
            "16_mixed",
            "fp16_mixed",
            "amp_fp16",
            "mixed_fp16",
        ],
        "fp16",
    ),
    **dict.fromkeys(
        ["bf16", "bfloat16", "bf16_mixed", "amp_bf16", "mixed_bf16", "bfloat16_mixed"], "bf16"
    ),
    **dict.fromkeys(
        ["fp32", "float32", "32", "full", "float", "single", "f32", "32_true", "fp32_true"], "fp32"
    ),
    **dict.fromkeys(["16_true", "fp16_true", "pure_fp16"], "pure-fp16"),
    **dict.fromkeys(["bf16_true", "pure_bf16"], "pure-bf16"),
    **dict.fromkeys(["no", "none", "off", "false", "disabled"], "off"),
}
# Which way is kept where settings contradict each other and as many speak for one as for another.
_PREFERRED: tuple[World, ...] = ("bf16", "fp32", "pure-bf16", "fp16", "pure-fp16")


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What one setting allows.

    Attributes:
        setting: The setting.
        worlds: The ways to train it can be true in.
    """

    setting: Setting
    worlds: Worlds


@dataclass(frozen=True, slots=True, eq=False)
class RunPrecision:
    """How a run computes, as far as its settings tell.

    Attributes:
        claims: What each setting says; those that say nothing are left out.
        worlds: The ways to train that are left; all of them if nothing is said.
    """

    claims: tuple[Claim, ...]
    worlds: Worlds

    @property
    def conflicting(self) -> bool:
        """Whether the settings cannot all be true."""
        return bool(self.claims) and not self.worlds

    @property
    def half(self) -> str | None:
        """The half type in use: ``fp16``, ``bf16``, ``half`` if it may be either, or None."""
        worlds = self.worlds or frozenset((self.kept(),))
        if not self.claims or "fp32" in worlds:
            return None
        if worlds <= _FP16:
            return "fp16"
        return "bf16" if worlds <= _BF16 else "half"

    @property
    def pure(self) -> bool:
        """Whether the weights themselves are in the half type."""
        if self.half is None:
            return False
        names = {claim.setting.name for claim in self.claims if claim.worlds <= _FP16 | _BF16}
        mixing = any(claim.worlds <= _MIXED for claim in self.claims)
        return (bool(self.worlds) and self.worlds <= _UNMIXED) or (
            "param_dtype" in names and not mixing
        )

    def kept(self, within: Iterable[Claim] = ()) -> World:
        """Returns the way to train that most settings agree with.

        Args:
            within: Claims that it has to agree with.
        """
        allowed = ALL
        for claim in within:
            allowed = allowed & claim.worlds or allowed
        score = {world: sum(world in claim.worlds for claim in self.claims) for world in _PREFERRED}
        return max((world for world in _PREFERRED if world in allowed), key=score.__getitem__)


def read_precision(settings: Iterable[Setting], partial: frozenset[str]) -> RunPrecision:
    """Returns what settings say about precision.

    Args:
        settings: Those that concern precision.
        partial: The files among them that a launcher reads, where "off" casts nothing.
    """
    chosen = list(settings)
    idle = {id(s.parent) for s in chosen if s.name == "amp" and s.truth is False}
    alone = not any(setting.path in partial for setting in chosen)
    claims = []
    for setting in chosen:
        if setting.name == "amp_dtype" and id(setting.parent) in idle:
            continue  # the type of a mode that is off
        if setting.name == "amp" and setting.truth is False and _is_cast_by(chosen, partial):
            continue  # the program leaves casting to DeepSpeed
        worlds = _worlds(setting, launched=setting.path in partial)
        if alone and worlds == {"bf16"} and setting.name == "bf16":
            worlds = _BF16  # without autocast it can only mean the weights
        if worlds != ALL:
            claims.append(Claim(setting, worlds))
    left = ALL
    for claim in claims:
        left = left & claim.worlds
    return RunPrecision(tuple(claims), left)


def _is_cast_by(settings: list[Setting], partial: frozenset[str]) -> bool:
    """Returns whether DeepSpeed is told to cast, which it does without the program's help."""
    return any(s.path in partial and s.name in ("fp16", "bf16") and s.truth for s in settings)


def type_of(setting: Setting) -> str | None:
    """Returns the type that a setting's value names; None if it names none."""
    value = setting.value
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return _TYPES.get(f"{value:g}" if abs(value) < 1e6 else "")  # whole numbers have no bound
    text = setting.text.replace("torch.", "").replace("-", "_").strip()
    return _TYPES.get(text)


def _worlds(setting: Setting, *, launched: bool) -> Worlds:
    if setting.name in ("fp16", "bf16"):
        return _flag(setting, launched=launched)
    if setting.name in ("amp", "mixed_precision") and setting.truth is not None:
        return _MIXED if setting.truth else _UNMIXED
    named = type_of(setting)
    if named is None:
        return _FP16 if setting.name == "param_dtype" and setting.truth else ALL
    return _of_type(setting.name, named)


def _flag(setting: Setting, *, launched: bool) -> Worlds:
    if setting.truth is None or setting.is_null:
        return ALL
    own: World = "fp16" if setting.name == "fp16" else "bf16"
    if setting.truth:
        return frozenset((own,))
    cast = _FP16 if own == "fp16" else _BF16
    return ALL - (cast if launched else frozenset((own,)))


def _of_type(name: str, named: str) -> Worlds:
    if named == "off":
        return _UNMIXED if name in ("mixed_precision", "amp", "precision") else ALL
    if named in ("pure-fp16", "pure-bf16"):
        return frozenset((named,))  # type: ignore[arg-type]
    if named == "fp32":
        return frozenset(("fp32",)) if name == "precision" else ALL - _UNMIXED | {"fp32"}
    both = _FP16 if named == "fp16" else _BF16
    if name == "amp_dtype":
        return both | {"fp32"}
    if name in ("mixed_precision", "amp"):
        return both & _MIXED
    return both


_BATCH_SETTINGS = ("micro_batch_size", "batch_size")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting in one place.

    Attributes:
        setting: What is set: ``precision``, ``clipping`` or ``batch size``.
        where: The file, the line and the key.
        value: The value as it is written.
        verdict: ``agrees``, ``conflicts``, or ``set once``.
    """

    setting: str
    where: str
    value: str
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """Returns the row as the report's JSON has it."""
        return {
            "setting": self.setting,
            "where": self.where,
            "value": self.value,
            "verdict": self.verdict,
        }


def alignment(runs: Iterable[RunConfig]) -> list[Row]:
    """Returns a row for each place that sets precision, clipping or batch size.

    Args:
        runs: The runs, each with all the files it was read from.
    """
    rows: dict[tuple[str, str], Row] = {}
    for run in runs:
        for stage in run.stages:
            for row in (*_precision(stage), *_clipping(stage), *_batch(stage)):
                known = rows.get((row.setting, row.where))
                if known is None or known.verdict != "conflicts":
                    rows[row.setting, row.where] = row
    return list(rows.values())


def _precision(stage: TrainingStage) -> Iterator[Row]:
    precision = stage.precision
    kept = precision.kept([c for c in precision.claims if c.setting.path in stage.partial])
    said = {id(claim.setting): claim for claim in precision.claims}
    for setting in stage.all(*PRECISION_SETTINGS):
        claim = said.get(id(setting))
        if not precision.conflicting or claim is None:
            verdict = "agrees" if len(said) > 1 else "set once"
        else:
            verdict = "agrees" if kept in claim.worlds else "conflicts"
        yield _row("precision", setting, verdict)


def _clipping(stage: TrainingStage) -> Iterator[Row]:
    yield from _numbers("clipping", stage.all("clip_norm", "clip_value"))


def _batch(stage: TrainingStage) -> Iterator[Row]:
    per_device = stage.all(*_BATCH_SETTINGS)
    yield from _numbers("batch size", per_device)
    shared = stage.get("global_batch_size")
    if shared is not None:
        yield _row("batch size", shared, _product(stage, shared))


def _product(stage: TrainingStage, shared: Setting) -> str:
    """Returns whether the batch of all devices is what each device, steps and devices give."""
    parts = [
        stage.number(*_BATCH_SETTINGS),
        stage.number("accumulation"),
        stage.number("processes", "devices"),
    ]
    if shared.number is None or any(part is None for part in parts):
        return "set once"
    product = 1.0
    for part in parts:
        product *= part or 1.0
    return "agrees" if product == shared.number else "conflicts"


def _numbers(name: str, settings: list[Setting]) -> Iterator[Row]:
    """Yields the rows of settings that have to have one number; ``auto`` agrees with any."""
    values = {setting.number for setting in settings if setting.number is not None}
    for setting in settings:
        verdict = "set once" if len(settings) == 1 else "agrees" if len(values) < 2 else "conflicts"
        yield _row(name, setting, verdict)


def _row(name: str, setting: Setting, verdict: str) -> Row:
    where = f"{setting.path}:{setting.line} {setting.key}"
    return Row(name, where, setting.written or "null", verdict)
