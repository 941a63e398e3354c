"""What happened, in one sentence: the line, the expression, its value, the item.

``train.py:20 divides by x.std(), which is 0 for dataset item 1717: 0/0 = NaN``. The expression
comes from the user's source, the value from the replay. Where the operation cannot be found in the
source (it runs inside of a layer, or of a library), the call that leads to it is named, and the
cause says the rest.
"""

from __future__ import annotations

import ast
import math
import os
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import (
    ARCS,
    EXPONENTIALS,
    LARGEST,
    LOGS,
    ROOTS,
    SOFTMAX,
    STATISTICS,
    assigned,
)
from nanguard.diagnose.causes.exploding_optimization import SLOWER, multiplied
from nanguard.diagnose.lab import Usual
from nanguard.diagnose.repairs import number_made_at
from nanguard.findings import name_of
from nanguard.replay.tracer.sites import is_installed
from nanguard.source.edits import (
    SourceFile,
    argument,
    called_name,
    divisor_of,
    is_power,
    is_quotient,
    name_from,
    span_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.diagnose.cause import Case
    from nanguard.replay.tracer.sites import Site

# Characters of an expression, and of what a name stands for, that a sentence has room for.
_LONGEST, _LONGEST_VALUE = 60, 40
# Items that are named one by one.
_NAMED = 3
_FUNCTIONS = {
    "sqrt": "the square root",
    "std": "the standard deviation",
    "var": "the variance",
    "std_mean": "the standard deviation",
    "var_mean": "the variance",
    "_softmax": "the softmax",
    "_safe_softmax": "the softmax",
    "_log_softmax": "the log_softmax",
    "linalg_vector_norm": "the norm",
}
_NORMS = ("norm", "vector_norm")
# How an operation may be called in the source, where its name is another one.
_SPELLED = {
    "_softmax": ("softmax",),
    "_safe_softmax": ("softmax",),
    "_log_softmax": ("log_softmax",),
    "linalg_vector_norm": _NORMS,
    "rsqrt": ("rsqrt",),
    "float_power": ("float_power", "pow"),
}


def sentence(case: Case, code: str, summary: str, folder: str) -> str:
    """Returns what happened in a bad step.

    Args:
        case: The step.
        code: The cause.
        summary: The cause in words, for what has no shape of its own here.
        folder: The folder that the command ran in; files are named as seen from there.
    """
    site = case.origin.site
    if site is None:
        return summary
    said = _Sentence(case, code, summary).text()
    if case.origin.table is not None:
        said += f"; {case.origin.table} has held it since it was made"
    outer = users_site(site, case.origin.callers)
    inner = f"{_short_name(site.file, folder)}:{site.line} {said}"
    if outer is None:
        return inner
    call = _expression_at(outer)
    return f"{_short_name(outer.file, folder)}:{outer.line} calls {call}; in it, {inner}"


def users_site(site: Site, callers: Sequence[Site]) -> Site | None:
    """Returns the nearest line of the user's that led into a library; None if it is no library's.

    Args:
        site: Where something happened.
        callers: Where the function around it was called from, the nearest first.
    """
    if not is_installed(site.file):
        return None
    return next((caller for caller in callers if not is_installed(caller.file)), None)


def item_in_words(samples: Sequence[int], indices: Sequence[int]) -> str:
    """Returns which samples are meant, by their place in the data set if that is known."""
    known = list(indices or samples)
    if not known:
        return ""
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    listed = ", ".join(map(str, known[:_NAMED])) + more
    many = "s" if len(known) > 1 else ""
    return f"dataset item{many} {listed}" if indices else f"sample{many} {listed} of the batch"


class _Sentence:
    """What a line does, and with which result."""

    def __init__(self, case: Case, code: str, summary: str) -> None:
        self._case = case
        self._code = code
        self._summary = summary
        self._site = case.origin.site
        self._file = None if self._site is None else SourceFile.open(self._site.file)
        self._item = item_in_words(case.facts.samples, case.facts.indices)

    def text(self) -> str:
        """Returns what follows the name of the line."""
        case = self._case
        shapes: list[Callable[[], str | None]] = [
            self._by_cause,
            self._too_large,
            self._division,
            self._domain,
            self._overflow,
            self._spread,
            self._nothing,
        ]
        if case.phase == "backward":
            shapes = [self._derivative]
        found = next((said for shape in shapes if (said := shape()) is not None), None)
        return found if found is not None else self._called()

    def _called(self) -> str:
        """Names the expression, and leaves the rest to the cause."""
        code = "" if self._site is None else _expression_at(self._site)
        item = f" ({self._item})" if self._item else ""
        return f"computes {code}{item}: {self._summary}"

    def _by_cause(self) -> str | None:
        """Says what is not about an operation."""
        case, code = self._case, self._code
        if case.loaded is not None or case.origin.loaded_from is not None:
            return f"loads state that is not finite: {self._summary}"
        if code == "bad-input-data" and case.phase == "data":
            return self._data()
        if code == "bad-initialization" and case.origin.op == "aten.empty":
            name = case.origin.parameter or "a tensor"
            return f"leaves {name} unfilled: its memory holds whatever was there before"
        if code == "optimizer-misuse" and (case.facts.lr is None or math.isfinite(case.facts.lr)):
            return None if case.phase != "optimizer" else self._called()
        if code == "optimizer-misuse":
            rate, state = name_of(case.facts.lr or math.nan), case.facts.schedule_state
            if state is not None:
                return f"steps with a learning rate of {rate}: {state}"
            made = case.facts.schedule or case.origin.site != case.facts.step_site
            return (
                f"makes the learning rate {rate}"
                if made
                else f"steps with a learning rate of {rate}"
            )
        if code in ("label-out-of-range", "unknown") and case.origin.intended:
            return self._called()
        return None

    def _data(self) -> str | None:
        detail = self._case.origin.detail
        whose = f" in {self._item}" if self._item else ""
        if detail is None or not detail.output.nonfinite:
            return None if detail is not None else f"takes in data that is not finite{whose}"
        count = f"{detail.output.nonfinite} of {detail.output.count} values"
        if self._case.origin.by_numpy:
            made = f"{self._item or 'the data'} {_kind(detail.kinds)}"
            return f"makes {made} from finite numbers, without torch: {count}"
        return f"takes in data that is already {_kind(detail.kinds)}{whose}: {count}"

    def _division(self) -> str | None:
        case = self._case
        number, stats = case.by_number_zero(), case.divisor()
        if stats is None and not number:
            return None
        node = divisor_of(self._node(is_quotient))
        plain = node is None or isinstance(node, ast.Constant)
        what = "0" if plain or node is None else f"{self._named(node)}, which is 0"
        if node is None:
            return self._inside(f"divides by {what}{self._for()}: {self._quotient()}")
        count = "" if stats is None else self._share(stats.zeros, stats.count)
        source = number_made_at(case) if number else None
        made = "" if source is None else f" as {_base_name(source)} has computed it"
        return f"divides by {what}{made}{count}{self._for()}: {self._quotient()}{case.made_of()}"

    def _quotient(self) -> str:
        """Returns the division in numbers."""
        case = self._case
        kind = _kind(case.origin.detail.kinds) if case.origin.detail else "not finite"
        above = case.input("self") if case.op in ("div", "true_divide") else None
        if above is None or not above.at_fault:
            return f"the result is {kind}" if case.op != "reciprocal" else f"1/0 = {kind}"
        value = above.at_fault[0]
        if math.isnan(value):
            return f"the result is {kind}"
        sign = "NaN" if value == 0 else "inf" if value > 0 else "-inf"
        return f"{name_of(value)}/0 = {sign}"

    def _domain(self) -> str | None:
        """Says which argument a function is not defined for."""
        case = self._case
        if case.op not in (*LOGS, *ROOTS, *ARCS):
            return None
        stats = case.input("other") if case.op == "xlogy" else case.input("self")
        if stats is None or not stats.at_fault:
            return None
        return self._function_of(stats.at_fault[0])

    def _overflow(self) -> str | None:
        """Says which exponent was too large."""
        case = self._case
        if case.op not in EXPONENTIALS:
            return None
        stats = case.input("self")
        fault = stats.at_fault if stats is not None else []
        return self._function_of(max(fault)) if fault else None

    def _too_large(self) -> str | None:
        """Says what has grown, or came in, beyond what its type can hold."""
        case, large = self._case, self._case.largest_input()
        if self._code not in ("exploding-optimization", "half-precision-overflow"):
            return None
        if case.origin.buffer is not None or not large or not math.isfinite(large):
            return None
        code = "" if self._site is None else _expression_at(self._site)
        limit = "" if case.precision not in LARGEST else f" ({LARGEST[case.precision]:.5g})"
        beyond = f"the result is more than {case.precision} holds{limit}"
        if self._code == "half-precision-overflow":
            return f"computes {code}, whose inputs reach {name_of(large)}{self._for()}: {beyond}"
        said = f"computes {code}, whose inputs have grown to {name_of(large)}: {beyond}"
        grown = multiplied(case)
        if grown is not None:
            name, percent, _ = grown
            return f"{said}; {name} has grown by {percent:.2g} % in every step, the loss has not"
        rate = case.facts.lr
        if rate is None:
            return said
        slower = next((trial for trial in case.lab.trials if trial.what == SLOWER), None)
        if Usual(case.facts.losses).allows(slower):
            return f"{said}; with a tenth of the learning rate ({name_of(rate)}) it is not"
        return f"{said}; the learning rate is {name_of(rate)}"

    def _spread(self) -> str | None:
        """Says which values do not differ, or are only one."""
        case = self._case
        if case.op not in STATISTICS or self._code != "degenerate-statistics" or not case.inputs:
            return None
        node = self._argument()
        what = "values" if node is None else self._named(node)
        word = _FUNCTIONS.get(case.op, "the statistics")
        stats, detail = case.inputs[0], case.origin.detail
        each = stats.count // max(detail.output.count, 1) if detail is not None else stats.count
        few = each <= 1
        why = "which holds a single value" if few else "whose values do not differ"
        said = f"takes {word} of {what}, {why}{self._for()}"
        end = "0/0 = NaN" if few else f"the result is {_kind(detail.kinds) if detail else 'bad'}"
        return f"{said}: {end}" if node is not None else self._inside(f"{said}: {end}")

    def _nothing(self) -> str | None:
        """Says what had nothing to work on: an empty mean, a row that is masked whole."""
        case = self._case
        if self._code == "fully-masked-softmax" and case.op in SOFTMAX:
            node = self._argument()
            what = "scores" if node is None else self._named(node)
            word = _FUNCTIONS.get(case.op, f"the {case.op}")
            said = f"takes {word} of {what}, where a whole row is -inf{self._for()}: {self._made()}"
            return said if node is not None else self._inside(said)
        empty = [stats for stats in case.inputs if stats.count == 0]
        if self._code == "empty-reduction" and empty:
            node = self._argument()
            if node is None:
                return None
            return f"takes the {case.op} of {self._named(node)}, which is empty: 0/0 = NaN"
        return None

    def _derivative(self) -> str | None:
        """Says where a value is fine and its derivative is not."""
        case = self._case
        values = [v for s in case.inputs for v in s.at_fault if math.isfinite(v)]
        known = case.op in (*LOGS, *ROOTS, *ARCS, "linalg_vector_norm")
        node = self._argument() if known else None
        if node is None or self._code != "gradient-singularity" or case.origin.hand_written:
            return None
        end = f"its value is usable, its derivative is {_kind_of(case)}"
        zero = ", which is 0" if 0.0 in values and case.op not in ARCS else ""
        word = _FUNCTIONS.get(case.op, f"the {case.op}")
        of = f"takes {word} of" if case.op not in ("pow", "float_power") else "takes a power of"
        return f"{of} {self._named(node)}{zero}{self._for()}: {end}"

    def _function_of(self, value: float) -> str:
        """Returns a function, its argument in the source, and the value that this has."""
        case, node = self._case, self._argument()
        word, number = _FUNCTIONS.get(case.op, f"the {case.op}"), name_of(value)
        calculation = f"{case.op}({number}) = {_of(case.op, value, _kind_of(case))}"
        if case.op in ("pow", "float_power"):
            exponent = case.origin.detail.scalars.get("exponent") if case.origin.detail else None
            word = "a power"
            shown = name_of(exponent) if isinstance(exponent, (int, float)) else "its exponent"
            calculation = f"({number}) ** {shown} = {_kind_of(case)}"
        if node is None:
            return self._inside(f"takes {word} of {number}{self._for()}: {calculation}")
        said = f"takes {word} of {self._named(node)}, which is {number}{self._for()}"
        return f"{said}: {calculation}{case.made_of()}"

    def _inside(self, said: str) -> str:
        """Returns what happens inside of what the line calls."""
        code = "" if self._site is None else _expression_at(self._site)
        return f"calls {code}, which {said}"

    def _made(self) -> str:
        return f"the result is {_kind_of(self._case)}"

    def _for(self) -> str:
        return f" for {self._item}" if self._item else ""

    def _share(self, some: int, of: int) -> str:
        return f" in {some} of {of} places" if of > 1 and not self._item else ""

    def _node(self, accept: Callable[[ast.AST], bool]) -> ast.AST | None:
        if self._file is None or self._site is None:
            return None
        return self._file.node_at(self._site, accept)

    def _argument(self) -> ast.expr | None:
        """Returns what the operation at the origin is given, as the source has it."""
        case = self._case
        names = _SPELLED.get(case.op, (case.op,))
        power = case.op in ("pow", "sqrt", "rsqrt", "float_power")

        def accept(node: ast.AST) -> bool:
            return called_name(node).rstrip("_") in names or (power and is_power(node))

        node = self._node(accept)
        if isinstance(node, ast.BinOp):
            return node.left
        if not isinstance(node, ast.Call):
            return None
        if case.op == "xlogy":
            return node.args[-1] if node.args else None
        return argument(node)

    def _named(self, node: ast.expr) -> str:
        """Returns an expression; beside a name stands what it was set to."""
        assert self._file is not None  # noqa: S101 - the expression is from there
        text = _cut(self._file.text_of(node), _LONGEST)
        if not isinstance(node, ast.Name) or self._site is None:
            return text
        value = assigned(self._file.scope_of(self._site.line), node.id, self._site.line)
        meant = "" if value is None else " ".join(self._file.text_of(value).split())
        return f"{text} = {meant}" if 0 < len(meant) <= _LONGEST_VALUE else text


def _kind_of(case: Case) -> str:
    return _kind(case.origin.detail.kinds) if case.origin.detail else "not finite"


def _kind(kinds: frozenset[str]) -> str:
    """Returns which bad values there are, in words."""
    return next((word for kind, word in _KINDS if kind in kinds), "not finite")


_KINDS = (("nan", "NaN"), ("inf", "inf"), ("-inf", "-inf"))


def _of(op: str, value: float, otherwise: str) -> str:
    """Returns what a function gives for one value; a tensor may hold several kinds of bad ones."""
    if op in ("log", "log2", "log10") and not math.isnan(value):
        return "-inf" if value == 0 else "NaN"
    return otherwise


def _base_name(site: Site) -> str:
    return f"{os.path.basename(site.file)}:{site.line}"  # noqa: PTH119 - a name, not a file


def _expression_at(site: Site) -> str:
    """Returns the expression at a place, in a line; the whole line where it is not known."""
    file = SourceFile.open(site.file)
    if file is not None and site.span is not None:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.expr) and span_of(node) == site.span:
                return _cut(file.text_of(node), _LONGEST)
    return _cut(site.code, _LONGEST)


def _cut(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _short_name(path: str, folder: str) -> str:
    """Returns a file as seen from a folder; its last two parts, if it lies elsewhere."""
    named = name_from(path, folder)
    if os.path.realpath(os.path.join(folder, named)) == os.path.realpath(path):  # noqa: PTH118
        return named
    return "/".join(named.split("/")[-2:])
