"""Keys that are almost a known one."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

from nanguard.check.config.keys import USUAL
from nanguard.check.config.names import ROLES, words

if TYPE_CHECKING:
    from nanguard.check.config.families import Family

# Words of other meanings, or other spellings, that are one letter away from a word of a setting.
_WORDS = words(
    "patch match latch hatch catch step steps stem stems delay decays trail brain grain "
    "trains trainer macro micros model models modal mode modes weights height weighted mixer "
    "fixed mixes rates ratios rated gate date scales scaled scaler stale scalar norms form "
    "forms normed clips clipped flip chip slip crop grads graph grid grade masks masked mask "
    "losses lost less cross label labels class classes save saved wave size sizes sized epoch "
    "epochs optimiser optimisers optimisation optimization optimizers schedulers scheduled "
    "schedule schedules smooth smoothed moment momenta devices batches batched logits logit "
    "dropped dropouts warm warmups warmed precise precisions accumulate accumulated gradients "
    "gradual learned learner value valued values clipping dtypes types typed names named "
    "counts count point points private interval intervals frequencies regularisation "
    "regularization normalisation normalization restart restarts initial final minimal "
    "maximal limit limits latent latents parameter parameters process processes processed "
    "update updates updated iteration iterations data date rank ranks world word words words_ "
    "total totals stops start starts state states stage stages steep"
)
_MIN_WORD = 5


def intended(key: str, family: Family, *, root: bool, closed: bool = True) -> str | None:
    """Returns the known key that a key is a misspelling of; None if it is fine or unknown.

    Args:
        key: The key in normal form.
        family: The family of the file.
        root: Whether it stands where the family's own keys stand.
        closed: Whether the family's reader reads the file there, and no program of the user's.
    """
    if len(key) < _MIN_WORD or key in _usual() or key in family.known:
        return None
    if root and family.known:
        found = _near_key(key, family, closed=closed and family.closed)
        if found:
            return found
    return _near_words(key)


@lru_cache(maxsize=2048)
def _near_words(key: str) -> str | None:
    """Returns the usual key that differs in one word, which is no word itself."""
    parts = key.split("_")
    for at, word in enumerate(parts):
        if word in _words() or word in _WORDS or not word.isalpha() or len(word) < 4:
            continue
        for right in _words():
            if _slip(word, right):
                whole = "_".join([*parts[:at], right, *parts[at + 1 :]])
                if whole in _usual() or whole in _sections():
                    return whole
    return None


def _slip(word: str, right: str) -> bool:
    if len(right) < 4 or word == right or _british(word) == _british(right):
        return False
    if word + "s" == right or right + "s" == word or word + "d" == right:
        return False
    if _swapped(word, right):
        return True
    return len(right) >= _MIN_WORD + 1 and distance(word, right, 1) <= 1


def _near_key(key: str, family: Family, *, closed: bool) -> str | None:
    """Returns the family's key that differs in one word, in its ending, or in underscores."""
    squeezed, parts = key.replace("_", ""), key.split("_")
    for right in sorted(family.known):
        if len(right) < 6 or abs(len(right) - len(key)) > 2 or _british(key) == _british(right):
            continue
        shut = closed and right not in family.script
        if shut and (right in (key + "s", key + "es") or key == right + "s"):
            return right
        if shut and right.replace("_", "") == squeezed:
            return right
        if _one_word_off(parts, right.split("_"), least=3 if closed else 4):
            return right
    return None


def _one_word_off(parts: list[str], right: list[str], least: int) -> bool:
    if len(parts) != len(right):
        return False
    off = [(one, other) for one, other in zip(parts, right, strict=True) if one != other]
    if len(off) != 1:
        return False
    word, wanted = off[0]
    if word in _WORDS or word in _words() or not word.isalpha() or not wanted.isalpha():
        return False
    if word + "s" == wanted or wanted + "s" == word or len(wanted) < least:
        return False
    if _swapped(word, wanted):
        return True
    if len(wanted) <= 4:  # a letter typed twice, and nothing shorter than a word
        return len(parts) > 1 and len(word) == len(wanted) + 1 and distance(word, wanted, 1) == 1
    limit = 2 if len(wanted) >= 9 else 1
    return distance(word, wanted, limit) <= limit


def _swapped(word: str, right: str) -> bool:
    if len(word) != len(right):
        return False
    off = [at for at in range(len(word)) if word[at] != right[at]]
    if len(off) != 2 or off[1] != off[0] + 1:
        return False
    return word[off[0]] == right[off[1]] and word[off[1]] == right[off[0]]


def _british(word: str) -> str:
    return word.replace("ise", "ize").replace("isa", "iza").replace("our", "or")


def distance(one: str, other: str, limit: int) -> int:
    """Returns how many letters have to change, or more than the limit where it is passed."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        row = [at]
        for to, wanted in enumerate(other, 1):
            row.append(min(before[to] + 1, row[-1] + 1, before[to - 1] + (letter != wanted)))
        if min(row) > limit:
            return limit + 1
        before = row
    return before[-1]


@cache
def _usual() -> frozenset[str]:
    return frozenset(name for names in USUAL.values() for name in names.split())


@cache
def _sections() -> frozenset[str]:
    return frozenset(name for names in ROLES.values() for name in names)


@cache
def _words() -> frozenset[str]:
    return frozenset(word for name in _usual() | _sections() for word in name.split("_") if word)
