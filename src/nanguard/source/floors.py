"""How near to the edge of its domain a quantity may come: the bounds that fixes write.

Rules that warn before a run and repairs that are found after a bad step write the same bounds. Each
fits a quantity and not an operation: what is far too small for a norm is right for its square.
"""

from __future__ import annotations

# A count: fewer than one is none.
COUNT = "1"
# A norm, a spread or another divisor that is not squared.
DIVISOR, DIVISOR_HALF = "1e-6", "1e-4"
# The square of such a quantity under a root: the root of it is the bound above. In float16 that
# square would be 0.
SQUARE, SQUARE_HALF = "1e-12", "1e-6"
# A variance: what layers that normalise add to theirs.
VARIANCE = "1e-5"
# A probability, or another argument of a logarithm: about the eps of the type, as float32 cannot
# tell two probabilities near 1 apart that differ by less.
PROBABILITY, PROBABILITY_HALF = "1e-7", "1e-3"
# A base of a power below 1: its derivative is about the bound to a power between -1 and 0.
BASE = "1e-6"
# The distance from 1 and -1 of a cosine, and of a uniform draw from 0 and 1.
COSINE, COSINE_HALF = "1e-6", "1e-3"
# A uniform draw that something is divided by.
DRAW = "1e-3"
# A temperature or another plain number that a schedule brings down to 0.
TEMPERATURE = "1e-3"


def divisor(*, half: bool = False) -> str:
    """Returns the bound of a divisor."""
    return DIVISOR_HALF if half else DIVISOR


def square(*, half: bool = False) -> str:
    """Returns the bound of a square under a root."""
    return SQUARE_HALF if half else SQUARE


def probability(*, half: bool = False) -> str:
    """Returns the bound of the argument of a logarithm."""
    return PROBABILITY_HALF if half else PROBABILITY


def inside(eps: str) -> str:
    """Returns the call that keeps a value inside of (-1, 1)."""
    return f".clamp(-1 + {eps}, 1 - {eps})"


def cosine(*, half: bool = False) -> str:
    """Returns the call that keeps a cosine inside of (-1, 1)."""
    return inside(COSINE_HALF if half else COSINE)
