"""What a user can do about a bad step: a change to a line, where possible as a diff."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import made_at
from nanguard.replay.tracer.sites import is_installed
from nanguard.source import floors
from nanguard.source.edits import (
    SourceFile,
    argument,
    called_name,
    divides,
    divisor_of,
    is_chain,
    is_quotient,
    span_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial
    from nanguard.replay.tracer.op_records import Stats
    from nanguard.replay.tracer.sites import Site

_NARROW = ("int8", "uint8", "int16", "short", "int32", "int")
_ADDING_UP = ("sum", "item", "len", "numel", "size", "count_nonzero", "norm", "float")
# Gradients that are clipped to this norm are clipped: no larger one is common.
_CLIPPED = 10.0
# What makes the settings of a framework, and the one that clips.
_CLIPPING = {
    "TrainingArguments": "max_grad_norm",
    "Seq2SeqTrainingArguments": "max_grad_norm",
    "SFTConfig": "max_grad_norm",
    "Trainer": "gradient_clip_val",
}
# Quotients beyond this are no weights that somebody meant, or no numbers of a 16-bit type.
_LARGEST, _LARGEST_HALF = 1e9, 1e4


@dataclass(slots=True)
class Repair:
    """One way to repair a run.

    Attributes:
        summary: What to change, and where.
        source: The changed file, as (path, text); None if the change is not one of text.
        diff: The change, for the reader.
        trial: The result of trying it, if that was done already.
        later: The result of some steps with it, if they were made.
        on_good: The loss of a good step without it and with it, if that was tried.
        exact: Whether it computes the same as before, wherever that was finite.
        silences: Why the change only hides the fault, where it does; "" where it repairs it.
        acts_later: Whether it changes what the next step begins with, so that replaying the bad
            step alone shows nothing about it.
    """

    summary: str
    source: tuple[str, str] | None = None
    diff: str | None = None
    trial: Trial | None = None
    later: Trial | None = None
    on_good: tuple[float, float] | None = None
    exact: bool = False
    silences: str = ""
    acts_later: bool = False


def edit(
    site: Site | None,
    summary: str,
    make: Callable[[SourceFile, Site], str | None],
) -> list[Repair]:
    """Returns the repair that a change to a user's file makes, if it can be made."""
    if site is None or is_installed(site.file):
        return []  # nobody edits a library
    file = SourceFile.open(site.file)
    if file is None:
        return []
    new = make(file, site)
    if new is None or new == file.text:
        return []
    try:
        ast.parse(new)
    except (SyntaxError, ValueError):
        return []
    where = f"line {site.line}: "
    return [Repair(where + summary, (site.file, new), file.diff(new))]


def bounded_operand(case: Case, names: tuple[str, ...], bound: str, summary: str) -> list[Repair]:
    """Bounds what an operation is given: ``torch.log(x)`` becomes ``torch.log((x).clamp(...))``.

    Args:
        case: The case.
        names: The functions that may be called at the origin.
        bound: The call that bounds, such as ``.clamp(min=1e-7)``.
        summary: The change in words.
    """

    def make(file: SourceFile, site: Site) -> str | None:
        def accept(node: ast.AST) -> bool:
            power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
            return called_name(node) in names or (power and "pow" in names)

        node = file.node_at(site, accept)
        if node is None:
            return None
        # What is written twice in a function goes wrong twice.
        text = file.text_of(node)
        scope = file.scope_of(site.line)
        same = [] if isinstance(scope, ast.Module) else [n for n in ast.walk(scope) if accept(n)]
        changes: list[tuple[ast.AST, str]] = []
        for one in [n for n in same if file.text_of(n) == text] or [node]:
            inner = one.left if isinstance(one, ast.BinOp) else argument(one)  # type: ignore[arg-type]
            if inner is None:
                return None
            changes.append((inner, bounded(file.text_of(inner), bound)))
        return file.replaced(changes)

    return edit(case.origin.site, summary, make)


def bounded(text: str, bound: str) -> str:
    """Returns an expression with a call added to it."""
    return f"{text}{bound}" if is_chain(text) else f"({text}){bound}"


def bounded_divisor(case: Case) -> list[Repair]:
    """Keeps a divisor away from zero."""
    stats = case.divisor()
    count = stats is not None and _is_count(case, stats)
    rooted = case.op == "rsqrt"
    small = (floors.square if rooted else floors.divisor)(half=case.is_half)
    bound = f".clamp(min={floors.COUNT if count else small})"
    signed = stats is not None and stats.negatives > 0
    summary = f"keep the divisor away from zero with {bound}"
    if signed:
        summary = "divide by a small number where the divisor is zero"

    def make(file: SourceFile, site: Site) -> str | None:
        divisor = divisor_of(file.node_at(site, is_quotient))
        if divisor is None:
            return None
        text = file.text_of(divisor)
        where = f"torch.where(({text}) == 0, {small}, {text})"
        new = where if signed else bounded(text, bound)
        return file.replaced([(divisor, new)])

    return edit(case.origin.site, summary, make)


def positive_number(case: Case) -> list[Repair]:
    """Keeps a plain number that is divided by away from zero.

    A whole number counts something, so that 1 is the smallest that makes sense. Any other, such as
    a temperature, may be far below 1 in good steps.
    """
    number = case.origin.detail.scalars.get("other") if case.origin.detail else None
    whole = isinstance(number, int)
    source = number_made_at(case)
    scheduled = source is not None and not whole and not _adds_up(source)
    least = floors.COUNT if whole else floors.TEMPERATURE if scheduled else floors.DIVISOR
    summary = f"keep the divisor away from zero with max(..., {least})"
    if whole:
        summary = "divide by 1 where the count is 0: max(..., 1)"
    if scheduled:
        at_source = edit(
            source,
            f"keep what the schedule gives away from zero with max(..., {least})",
            lambda file, at: _at_least(file, at, least),
        )
        if at_source:
            return at_source

    def make(file: SourceFile, site: Site) -> str | None:
        divisor = divisor_of(file.node_at(site, divides))
        if divisor is None:
            return None
        return file.replaced([(divisor, f"max({file.text_of(divisor)}, {least})")])

    return edit(case.origin.site, summary, make)


def number_made_at(case: Case) -> Site | None:
    """Returns the line that computed the plain number which is divided by."""
    site = case.origin.site
    file = None if site is None else SourceFile.open(site.file)
    if site is None or file is None:
        return None
    divisor = divisor_of(file.node_at(site, divides))
    return None if divisor is None else made_at(divisor, site, case.origin.callers)


def _at_least(file: SourceFile, site: Site, least: str) -> str | None:
    """Returns a text in which the number that an expression gives is bounded from below."""
    node = file.node_at(site, lambda node: span_of(node) == site.span)
    if node is None:
        return None
    if isinstance(node, ast.Call) and called_name(node) == "max":
        zero = [n for n in node.args if isinstance(n, ast.Constant) and n.value == 0]
        if zero:
            return file.replaced([(zero[0], least)])
    return file.replaced([(node, f"max({file.text_of(node)}, {least})")])


def _adds_up(site: Site) -> bool:
    """Returns whether a number was counted or added up: no schedule brings it down to 0."""
    file = SourceFile.open(site.file)
    node = None if file is None else file.node_at(site, lambda node: span_of(node) == site.span)
    return node is None or any(called_name(inner) in _ADDING_UP for inner in ast.walk(node))


def bounded_quotient(case: Case) -> list[Repair]:
    """Bounds what a division by zero gave, where it is infinite and no count is divided by.

    A weight such as ``1 / t`` is infinite at 0. With a bounded divisor it is finite there, but so
    large that one sample decides the step. The bound is above all other quotients of the step:
    these are good and stay as they are.
    """
    stats, detail = case.divisor(), case.origin.detail
    if stats is None or detail is None or stats.negatives or _is_count(case, stats):
        return []
    if case.op not in ("div", "true_divide") or detail.output.nans or detail.output.neg_infs:
        return []
    if not 0 <= detail.output.high < (_LARGEST_HALF if case.is_half else _LARGEST):
        return []  # nothing says how large a good quotient is
    bound = f".clamp(max={_power_above(detail.output.high)})"

    def make(file: SourceFile, site: Site) -> str | None:
        def accept(node: ast.AST) -> bool:
            return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)

        node = file.node_at(site, accept)
        return None if node is None else file.replaced([(node, bounded(file.text_of(node), bound))])

    return edit(case.origin.site, f"bound the quotient with {bound}", make)


def _power_above(value: float) -> int:
    """Returns a power of ten above a number, at least 100."""
    bound = 100
    while bound <= value:
        bound *= 10
    return bound


def _is_count(case: Case, stats: Stats) -> bool:
    """Returns whether a divisor counts something, so that 1 is the smallest that makes sense."""
    if "int" in stats.dtype or stats.dtype == "bool":
        return True
    made = case.ancestor_ops(stats.name, 2)
    spread = {"std", "var", "norm", "linalg_vector_norm", "pow", "sub", "mean"}
    sums = bool(made & {"sum", "bincount", "count_nonzero"})
    return stats.whole and stats.low >= 0 and sums and not made & spread


def finite_masks(case: Case) -> list[Repair]:
    """Writes a large negative number where the user wrote an infinity."""
    half = case.precision == "float16" or case.facts.autocast == "float16"
    value = "-1e4" if half or case.facts.half_parameters else "-1e9"
    sites = case.origin.literals
    if not sites:
        return []
    file = SourceFile.open(sites[0].file)
    if file is None:
        return []
    # A layer that comes several times in a model has masked as often, in the same line.
    lines = sorted({site.line for site in sites if site.file == file.path})
    changes = [(node, value) for line in lines for node in _infinities(file, line)]
    if not changes:
        return []
    new = file.replaced(changes)
    where = ", ".join(map(str, lines))
    summary = (
        f"line {where}: mask with {value} instead of -inf, so that a row never sums to nothing"
    )
    return [Repair(summary, (file.path, new), file.diff(new))]


def _infinities(file: SourceFile, line: int) -> list[ast.AST]:
    """Returns the expressions on a line that stand for an infinity, whole ones only."""
    found: list[ast.AST] = []
    for node in ast.walk(file.tree):
        if getattr(node, "lineno", None) != line or not isinstance(node, ast.expr):
            continue
        text = file.text_of(node)
        if re.fullmatch(
            r"-?\s*(float\(\s*['\"]-?inf(inity)?['\"]\s*\)|(torch|math|np|numpy)\.inf)", text
        ):
            found.append(node)
    # The minus belongs to it: keep the outer of two that overlap.
    outer = {id(inner) for node in found for inner in ast.walk(node) if inner is not node}
    return [node for node in found if id(node) not in outer]


def with_keyword(
    site: Site | None, name: str, value: str, summary: str, *, called: str | None = None
) -> list[Repair]:
    """Gives a call on a line a keyword argument, or changes the one it has."""

    def make(file: SourceFile, at: Site) -> str | None:
        def accept(node: ast.AST) -> bool:
            return isinstance(node, ast.Call) and (called is None or called in called_name(node))

        call = file.node_at(at, accept)
        return None if not isinstance(call, ast.Call) else set_keyword(file, call, name, value)

    return edit(site, summary, make)


def set_keyword(file: SourceFile, call: ast.Call, name: str, value: str) -> str:
    """Returns the text of a file with a keyword argument of a call set."""
    known = next((k for k in call.keywords if k.arg == name), None)
    if known is not None:
        return file.replaced([(known.value, value)])
    return file.replaced([(call, call_with(file, call, name, value))])


def call_with(file: SourceFile, call: ast.Call, name: str, value: str) -> str:
    """Returns the text of a call with a keyword argument set."""
    text = file.text_of(call).rstrip()
    known = next((k for k in call.keywords if k.arg == name), None)
    if known is not None:
        before = rf"\b{name}\s*=\s*{re.escape(file.text_of(known.value))}"
        return re.sub(before, f"{name}={value}", text, count=1)
    inner = text[:-1].rstrip().rstrip(",")
    comma = "" if inner.endswith("(") else ", "
    return f"{inner}{comma}{name}={value})"


def numbers_on_line(
    site: Site | None, summary: str, accept: Callable[[float], bool], new: str
) -> list[Repair]:
    """Replaces numbers on a line."""

    def make(file: SourceFile, at: Site) -> str | None:
        found = [
            node
            for node in file.nodes_on(at.line, ast.Constant)
            if isinstance(node.value, (int, float))
            and not isinstance(node.value, bool)
            and math.isfinite(node.value)
            and accept(float(node.value))
        ]
        return file.replaced([(node, new) for node in found]) if found else None

    return edit(site, summary, make)


def replaced_text(site: Site | None, summary: str, pattern: str, new: str) -> list[Repair]:
    """Replaces what a pattern finds in a whole file."""

    def make(file: SourceFile, _at: Site) -> str | None:
        text, count = re.subn(pattern, new, file.text)
        return text if count else None

    found = edit(site, summary, make)
    for repair in found:
        repair.summary = summary
    return found


def silencing(repairs: list[Repair], why: str) -> list[Repair]:
    """Returns repairs that are marked as hiding a fault which lies elsewhere."""
    return [replace(repair, silences=why) for repair in repairs]


def wider_integers(case: Case) -> list[Repair]:
    """Counts in int64 where a narrower type went over its end."""
    wrapped = case.origin.wrapped
    site = None if wrapped is None else wrapped.site or case.origin.site
    if site is None:
        return []
    summary = "count in int64: the type there is too narrow for these numbers"
    here = edit(site, summary, lambda file, at: _with_int64(file, at.line))
    if here and wrapped is not None and wrapped.site is not None:
        return here
    # Tensors that were made before the step stay as they are: this cannot be tried in it.
    found = edit(site, summary, lambda file, _at: _with_int64(file, None))
    return [replace(repair, source=None) for repair in found] or [
        Repair(f"line {site.line} of {Path(site.file).name}: {summary}")
    ]


def _with_int64(file: SourceFile, line: int | None) -> str | None:
    """Returns a text in which narrow types of whole numbers, on one line or all, are int64."""
    found = [
        node
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr in _NARROW
        and (line is None or node.lineno == line)
    ]
    return file.replaced([(node, "torch.int64") for node in found]) if found else None


def clipped_gradients(case: Case) -> list[Repair]:
    """Clips gradients after backward; where a framework calls it, by the framework's setting."""
    limit, site = case.facts.clip_limit, case.facts.backward_site
    if limit is not None and limit <= _CLIPPED:
        return []  # it does so already
    if site is not None and is_installed(site.file):
        tried = case.lab.try_out("gradients clipped to norm 1 in every step", clip=1.0)
        set_there = [replace(repair, trial=tried) for repair in _clipped_by_setting(case)]
        advice = Repair("clip the gradients to norm 1 in the framework's settings", trial=tried)
        return set_there or [advice]
    model = case.facts.model_name or "model"

    def make(file: SourceFile, site: Site) -> str | None:
        return file.inserted_after(
            site.line, f"torch.nn.utils.clip_grad_norm_({model}.parameters(), 1.0)", "backward"
        )

    made = edit(site, "clip the gradients after backward", make)
    # Weights that are too large by now stay so, whatever is done after this step's backward.
    return [replace(repair, acts_later=case.phase != "backward") for repair in made]


def _clipped_by_setting(case: Case) -> list[Repair]:
    """Sets the norm that a framework clips to, where the user's code makes its settings."""
    origin = case.origin
    sites = [
        site for site in (origin.site, *origin.callers) if site and not is_installed(site.file)
    ]

    # Both Lightning and transformers have a Trainer.
    backward = case.facts.backward_site
    lightning = backward is not None and "lightning" in backward.file
    settings = ("gradient_clip_val",) if lightning else ("max_grad_norm",)

    def make(file: SourceFile, _site: Site) -> str | None:
        for node in ast.walk(file.tree):
            known = _CLIPPING.get(called_name(node))
            if known is not None and isinstance(node, ast.Call) and known in settings:
                return set_keyword(file, node, known, "1.0")
        return None

    for site in sites:
        found = edit(site, "clip the gradients to norm 1 in the framework's settings", make)
        if found:
            summary = "clip the gradients to norm 1 in the framework's settings"
            return [replace(repair, summary=summary, acts_later=True) for repair in found]
    return []


def inside_a_library(case: Case) -> list[Repair]:
    """Names the line of the user's that led into a library, where nothing else can be changed."""
    site = case.origin.site
    if site is None or not is_installed(site.file):
        return []
    outer = next((at for at in case.origin.callers if not is_installed(at.file)), None)
    if outer is None:
        return []
    where = f"{Path(outer.file).name}:{outer.line}"
    inside = f"{Path(site.file).name}:{site.line}"
    return [Repair(f"{where}: change what the library is given; {case.op} runs in {inside}")]


def without_samples(case: Case, what: str) -> list[Repair]:
    """Leaves the samples at fault out."""
    trial = case.without_samples()
    if trial is None:
        return []
    listed = ", ".join(map(str, case.facts.samples[:8]))
    return [Repair(f"{what} (sample {listed} of the batch)", trial=trial)]
