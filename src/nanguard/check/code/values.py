"""What is known about a value without running anything: bounds, kind, what its name says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from nanguard.check.code.scopes import Class, Function

INF = float("inf")
# What an eps is taken for when its value is not known.
SMALL = 1e-12
NO_KINDS: frozenset[str] = frozenset()

# Operations that move numbers about and leave them as they are.
SHAPE = frozenset(
    [
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "expand",
        "expand_as",
        "repeat",
        "contiguous",
        "clone",
        "detach",
        "float",
        "half",
        "double",
        "bfloat16",
        "to",
        "type",
        "type_as",
        "cpu",
        "cuda",
        "chunk",
        "split",
        "unbind",
        "gather",
        "index_select",
        "getitem",
        "item",
        "requires_grad_",
        "t",
        "T",
        "mT",
        "mH",
        "movedim",
        "swapaxes",
        "diagonal",
        "diag",
        "tile",
        "broadcast_to",
        "view_as",
        "reshape_as",
        "narrow",
        "select",
        "take",
        "take_along_dim",
        "rearrange",
        "roll",
        "flip",
        "as_tensor",
        "tensor",
        "numpy",
        "tolist",
        "squeeze_",
        "unsqueeze_",
        "repeat_interleave",
        "sort",
        "topk",
        "values",
        "indices",
        "join",
        "index",
        "masked_select",
        "unfold",
        "tril",
        "triu",
        "data",
        "stack",
        "cat",
        "concat",
        "hstack",
        "vstack",
        "to_dense",
        "real",
        "named",
        "buffer",
        "result",
        "pad",
        "interpolate",
        "grid_sample",
        "upsample",
    ]
)


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """One value in the flow of a function, as far as it can be known.

    Attributes:
        lo: It is never below this.
        hi: It is never above this.
        kinds: What it is: ``softmax``, ``norm``, ``mask``, ``loss``, ``labels`` and so on.
        const: The number, text or truth value it is, where that is written down.
        op: The operation that made it, in one spelling; empty for parameters and the unknown.
        inputs: What the operation was given, by position.
        keywords: What it was given by name.
        node: The expression.
        name: The name it has, or was given last.
        half: Whether it is float16; None if not known.
        path: The dotted path of an imported thing.
        items: The parts of a tuple or list.
        cls: The class of the file it is an instance of.
        function: The function of the file it is.
        scope: The function it was made in.
        grad: Whether gradients are recorded where it was made.
        guards: The names and expressions that conditions around it have looked at.
        autocast: The type of the autocast region it was made in, if any.
    """

    lo: float = -INF
    hi: float = INF
    kinds: frozenset[str] = NO_KINDS
    const: Any = None
    op: str = ""
    inputs: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    node: ast.AST | None = None
    name: str = ""
    half: bool | None = None
    path: str = ""
    items: tuple[Value, ...] | None = None
    cls: Class | None = None
    function: Function | None = None
    scope: Function | None = None
    grad: bool = True
    guards: frozenset[str] = NO_KINDS
    autocast: str = ""

    def __repr__(self) -> str:
        return f"<{self.op or 'value'} {self.name!r} in line {self.line}>"

    @property
    def line(self) -> int:
        """The line it stands in."""
        return getattr(self.node, "lineno", 0)

    @property
    def core(self) -> Value:
        """The value whose numbers these are, before they were moved about."""
        value = self
        while value.op in SHAPE and value.inputs:
            value = value.inputs[0]
        return value

    def arg(self, position: int, name: str) -> Value | None:
        """Returns an argument given by position, the receiver counted, or by name."""
        if name in self.keywords:
            return self.keywords[name]
        return self.inputs[position] if position < len(self.inputs) else None

    def number(self) -> float | None:
        """Returns the number it is, where that is known."""
        if isinstance(self.const, (int, float)) and not isinstance(self.const, bool):
            try:
                return float(self.const)
            except OverflowError:
                return None  # an integer of hundreds of digits
        return None

    def has(self, *kinds: str) -> bool:
        """Returns whether it is of one of these kinds."""
        return not self.kinds.isdisjoint(kinds)

    def upstream(self, limit: int = 64) -> Iterator[Value]:
        """Yields this value and everything it was made from, nearest first."""
        seen: set[int] = set()
        queue = [self]
        while queue and len(seen) < limit:
            value = queue.pop(0)
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield value
            queue += value.inputs


def is_small(value: Value) -> bool:
    """Returns whether a value is what people add to keep away from zero."""
    number = value.number()
    if number is not None:
        return number > 0
    return value.has("eps") or (value.lo > 0 and value.hi < INF)


_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "labels",
            r"(labels?|targets?|tgts?|gts?|y|yb|y_true|classes|class_ids?|label_ids|lbls?|ys|cls_ids?)$"
            r"|.*_(labels?|targets?|class_ids?)$|(labels?|target|tgt)_(ids?|idx|batch|flat)$|y_[a-z]+$",
        ),
        (
            "mask",
            r".*mask.*$|valid|valids|keep|keeps|pad|padding|is_pad|pads|.*_valid|valid_.*|.*_keep"
            r"|present|observed|occ|active|ok|alive|visible|visibility|inside|(is|has)_[a-z]+",
        ),
        (
            "loss",
            r"(loss(es)?|nll|bce|kld?|mse|ce|elbo|objective|cost)$|.*loss$|.*_losses$|loss_.*|l_[a-z]+$"
            r"|(nll|kld?|mse|ce|bce)_[a-z]+$",
        ),
        (
            "logscale",
            r"log_?(var(iance)?|std|sigma|scale|s|sig|alpha|temp(erature)?|tau|gamma|w|weights?|beta"
            r"|kappa|precision|prec|det|ls|rate|lambda|lam|dt)\w*$|.*_log_?(var|std|sigma|scale)$"
            r"|lv$|ls$|d(w|h|wh)$|t(w|h|wh)$|pred_(w|h|wh)$|.*_logvar$|logit_scale$|raw_(scale|std|sigma|var)$|s_log$",
        ),
        (
            "logprob",
            r"(old_|new_|ref_|behaviou?r_|target_|cur_)?log_?(p|prob|probs|ps|pi|q|mu)s?(_\w+)?$|.*_log_?p(robs?|s)?$|lp$",
        ),
        (
            "probability",
            r"(probs?|probabilit(y|ies)|likelihoods?|conf(idences?)?)$|.*_probs?$|probs?_.*",
        ),
        (
            "count",
            r"(counts?|cnt|num|n_valid|n_tok(en)?s?|denom(inator)?|degrees?|deg)$|.*_(counts?|cnt)$|num_(valid|tokens?|pos|neg|positives?|items?|labels|masked)$|n_(pos|neg|valid|tokens|masked)$",
        ),
        (
            "maximum",
            r"(row_?)?max(es|imum)?|mx|max_[a-z]+|[a-z]+_max|lse|logsumexp|log_?z|log_?(norm|partition)[a-z]*",
        ),
        (
            "magnitude",
            r"mag(nitudes?)?|spec(trum|trogram)?|power|energy|amp(litudes?)?|psd|mels?|images?|img|rgb|hdr|pixels?|.*_mag|p|q",
        ),
        (
            "distance",
            r"(sq_?|squared_)?dist(ance)?s?(_?(sq|squared|2|mat(rix)?))?|d2|d_sq|dsq|[a-z_]+_dist(ance)?s?(_sq)?",
        ),
        ("logratio", r"log_?(ratios?|rhos?|is_weights?|importance(_weights?)?)(_[a-z]+)?"),
        (
            "weights",
            r"(weights?|sample_weights?|wts?|ws?|adj(acency)?|affinit(y|ies))$|.*_weights?$",
        ),
        (
            "eps",
            r"(_?eps(ilon)?|tiny|smooth(ing)?|delta|EPS(ILON)?|TINY|.*_eps|eps_.*|_EPS|.*_EPS|laplace|floor|min_(norm|std|var|denom|scale))$",
        ),
        ("gradnorm", r"(g(rad(ient)?)?_?norm|total_norm|norm|gnorm|gn|.*grad_norm)$"),
        (
            "logits",
            r"(logits?|.*_logits?|logits_.*|scores?|.*_scores?|attn(_weights|_scores|_logits)?|att|sim(s|ilarity)?|energy|.*_sim)$",
        ),
        (
            "network",
            r"(model|net|network|module|encoder|decoder|backbone|policy|actor|critic|generator|discriminator|student|teacher|unet|transformer|vae|classifier|head|G|D|netG|netD|.*_(model|net|network|head)"
            r"|(actor|critic|policy|encoder|decoder|generator|discriminator)_(local|target|new|old|net|main|online|q|k|[ab12]))$",
        ),
    )
)
_CACHE: dict[str, frozenset[str]] = {}
# Greek letters as people spell them in Latin ones.
_GREEK = str.maketrans(
    {0x3C3: "sigma", 0x3BC: "mu", 0x3C0: "pi", 0x3B1: "alpha", 0x3B2: "beta", 0x3B3: "gamma",
     0x3C4: "tau", 0x3BB: "lambda", 0x3B5: "eps", 0x3F5: "eps", 0x3BA: "kappa", 0x3B4: "delta",
     0x3C1: "rho"}
)  # fmt: skip


def kinds_of(name: str) -> frozenset[str]:
    """Returns what a name says about the value it is given to."""
    known = _CACHE.get(name)
    if known is None:
        lower = name if name.isupper() and len(name) == 1 else name.lower()
        lower = lower if lower.isascii() else lower.translate(_GREEK)
        known = frozenset(kind for kind, pattern in _HINTS if pattern.fullmatch(lower))
        if len(_CACHE) < 50_000:
            _CACHE[name] = known
    return known
