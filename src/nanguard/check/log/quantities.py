"""What names and sentences in a log stand for: a loss, a norm, a step, a NaN that is reported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from nanguard.check.log.series import Note


class Quantity(str, Enum):
    """What a number in a log is."""

    LOSS = "loss"
    GRAD_NORM = "gradient norm"
    SCALE = "loss scale"
    RATE = "learning rate"
    ACCURACY = "accuracy"
    STEP = "step"
    BATCH = "batch"
    EPOCH = "epoch"
    RANK = "rank"


def word_set(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


METRIC_ROLES = frozenset(
    (Quantity.LOSS, Quantity.GRAD_NORM, Quantity.SCALE, Quantity.RATE, Quantity.ACCURACY)
)


@dataclass(frozen=True, slots=True)
class Metric:
    """What a name stands for.

    Attributes:
        role: What the number is.
        name: The name as the log has it.
        key: The same for every way to write the name.
        evaluation: Whether it was measured on held-out data.
        plain: Whether nothing but the role and the phase is in the name: not one of several terms.
        adversarial: Whether it belongs to a game (GAN, reinforcement learning), where a loss may
            rise.
    """

    role: Quantity
    name: str
    key: str
    evaluation: bool = False
    plain: bool = True
    adversarial: bool = False


_EVALUATION = word_set("val valid validation dev eval evaluation test testing heldout")
_PHASES = _EVALUATION | word_set(
    "train training trn tr total avg average mean running smoothed smooth overall batch step "
    "epoch per global local current cur all sum lm model trainer metrics metric scalars "
    "scalar main the final raw"
)
_GAMES = word_set(
    "g d gen disc generator discriminator adv adversarial gan policy value actor critic "
    "entropy reward vf pg pi q qf td advantage surrogate rollout rl qf1 qf2 q1 q2 critic1 critic2"
)
# Of a game in other names, but not in "cross entropy" and "loss value".
_CROSS = frozenset(("cross", "entropy"))
# Words that make a number something else: a bound, a best value, a count, a setting.
_SETTINGS = word_set(
    "best min max scaler minimum maximum lowest highest prev previous last init initial target "
    "threshold thresh limit clip clipping clipped tol tolerance patience improved improvement "
    "weight weights coef coeff lambda smoothing type fn func function num number count counts "
    "n nan nans inf infs skip skipped window interval delta std var variance ratio time ms "
    "sec secs seconds expected reduction args default config every freq frequency from reach "
    "factor alpha beta gamma bound name mode ignore filter check checks guard detect log "
    "logging save early stopping stop monitor restore eps epsilon warmup schedule scheduler "
    "decay power gain diff change drop consecutive"
)
_LOSSES = word_set("loss losses lossg lossd gloss dloss trainloss valloss testloss")
_LOSSES_ALONE = word_set("nll xent bce mse crossentropy elbo nelbo ce")
_GRADIENTS = frozenset(["grad", "grads", "gradient", "gradients"])
_STEPS = word_set(
    "step steps iter iters iteration iterations it update updates globalstep i timestep timesteps"
)
_STEP_WORDS = _STEPS | word_set(
    "global train training trainer current cur opt optimizer num at on in optim env"
)
# Elsewhere a name with "time" in it is a duration.
_COUNTED_IN_TIME = (("time", "iterations"), ("time", "total", "timesteps"))
_NORM_WORDS = _GRADIENTS | _PHASES | frozenset(("norm", "l2", "gnorm", "gradnorm"))
_SCALE_WORDS = _PHASES | word_set(
    "scale scaler loss amp grad gradient fp16 dynamic new now lscale value to reducing"
)
_ACCURACIES = frozenset(["acc", "accuracy", "top1", "acc1", "accuracies"])
_RATES = (
    frozenset(("lr",)),
    frozenset(("learning", "rate")),
    frozenset(("lr", "pg0")),
    frozenset(("lr", "group0")),
)

_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z]$)")
_BETWEEN = re.compile(r"[^0-9A-Za-z]+")


@lru_cache(maxsize=8192)
def metric_of(name: str) -> Metric | None:
    """Returns what a name stands for; None if nothing of interest."""
    words = words_of(name)
    if not words or len(words) > 8 or len(name) > 120:
        return None
    bag = frozenset(words)
    role = None if "py" in bag else _role(words, bag)
    if role is None:
        return None
    evaluation = bool(bag & _EVALUATION) and role in METRIC_ROLES
    return Metric(
        role,
        name.strip(),
        "_".join(words),
        evaluation,
        plain=_is_plain(role, bag - _harmless(words, bag)),
        adversarial=bool((bag - _harmless(words, bag)) & _GAMES),
    )


def _harmless(words: tuple[str, ...], bag: frozenset[str]) -> frozenset[str]:
    """Returns the words that only say how a loss is computed, or that it is a number."""
    crossed = _CROSS if bag >= _CROSS else frozenset()
    return crossed | (frozenset(("value",)) if words[-1] == "value" else frozenset())


def words_of(name: str) -> tuple[str, ...]:
    """Returns the words of a name, in small letters."""
    spaced = _CAMEL.sub(" ", name)
    return tuple(word.lower() for word in _BETWEEN.split(spaced) if word)


def _role(words: tuple[str, ...], bag: frozenset[str]) -> Quantity | None:
    if words in _COUNTED_IN_TIME:
        return Quantity.STEP
    if "scale" in bag or "lscale" in bag:
        return Quantity.SCALE if bag <= _SCALE_WORDS else None
    if bag & _SETTINGS:
        return None
    alone = bag & _LOSSES_ALONE or bag >= _CROSS
    if bag & _LOSSES or (alone and bag <= _PHASES | _LOSSES_ALONE | _CROSS):
        return Quantity.LOSS
    if "gnorm" in bag or "gradnorm" in bag or ("norm" in bag and bag & _GRADIENTS):
        return Quantity.GRAD_NORM
    if words in (("total", "norm"), ("global", "norm"), ("grad",)):
        return Quantity.GRAD_NORM
    if bag & _ACCURACIES:
        return Quantity.ACCURACY
    return _place(words, bag)


def _place(words: tuple[str, ...], bag: frozenset[str]) -> Quantity | None:
    if bag - _PHASES in _RATES or bag in _RATES:
        return Quantity.RATE
    if words[-1] in _STEPS and bag <= _STEP_WORDS:
        return Quantity.STEP
    if words[-1] in ("batch", "minibatch") and len(words) == 1:
        return Quantity.BATCH
    if words[-1] in ("epoch", "ep") and bag <= frozenset(
        ("train", "training", "epoch", "ep", "start", "end", "of", "current", "at", "valid", "val")
    ):
        return Quantity.EPOCH
    if words in (("rank",), ("local", "rank"), ("global", "rank")):
        return Quantity.RANK
    return None


def _is_plain(role: Quantity, bag: frozenset[str]) -> bool:
    if role is Quantity.LOSS:
        return bag <= _PHASES | _LOSSES | _LOSSES_ALONE
    if role is Quantity.GRAD_NORM:
        return bag <= _NORM_WORDS
    return True


def suffix_of(words: list[str]) -> str:
    """Returns the end of a sentence that is a name: "the model has train loss" has "train loss".

    Words that say it is no measurement ("best", "initial") are kept, so that they are seen.
    """
    kept: list[str] = []
    for word in reversed(words[-5:]):
        parts = words_of(word)
        bag = frozenset(parts)
        known = bag & (_PHASES | _SETTINGS | _LOSSES | _LOSSES_ALONE | _GRADIENTS | _STEPS)
        known |= bag & (_ACCURACIES | _SCALE_WORDS | _CROSS | word_set("learning rate norm"))
        if kept and not known and not _is_term(word, kept):
            break
        kept.append(word)
    return " ".join(reversed(kept))


def _is_term(word: str, kept: list[str]) -> bool:
    """Returns whether a word right before "loss" names a term of it, as in "box loss"."""
    return len(kept) == 1 and kept[0].lower() in ("loss", "acc", "accuracy") and word.isalnum()


# Cheap to search for; every sentence below has one of them.
SUSPECT = re.compile(r"nan|inf|finite|invalid loss|loss scale|overflow", re.IGNORECASE)

# A sentence is found in the beginning of a line or not at all.
_LONGEST_NOTE = 400
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
    (Quantity.SCALE, re.compile("|".join(_SCALE), re.IGNORECASE), False),
    (Quantity.GRAD_NORM, re.compile("|".join(_RAISED_GRADIENT), re.IGNORECASE), False),
    (Quantity.LOSS, re.compile("|".join(_RAISED_LOSS), re.IGNORECASE), False),
    (Quantity.GRAD_NORM, re.compile("|".join(_GRADIENT), re.IGNORECASE), True),
    (Quantity.LOSS, re.compile("|".join(_LOSS), re.IGNORECASE), True),
)


def note_of(text: str, line: int) -> Note | None:
    """Returns what a line says in words; None if it only speaks about what might be."""
    text = text[:_LONGEST_NOTE]
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
