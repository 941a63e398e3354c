"""Token ids as RGB pixels, exactly there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from nanguard.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

COLOURS = 256**3


@dataclass(frozen=True)
class TokenCodec:
    """Writes each token id as one pixel in base 256: red is the lowest digit, blue the highest.

    Prevents ids that have no pixel from turning into those of other tokens: a negative id wraps
    around, an id of 256³ or more loses its highest digit, and neither fails by itself.

    Attributes:
        vocab_size: How many tokens there are; ids run from 0 to one less.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= COLOURS:
            raise _refused(
                f"vocab_size is {self.vocab_size}, and there are {COLOURS} colours",
                f"Use a vocabulary of 1 to {COLOURS} tokens.",
            )

    def encode(self, ids: Tensor, *, on_bad: Literal["raise", "assert"] = "raise") -> Tensor:
        """Returns pixels of type uint8, of the shape of the ids and a last dimension of 3.

        Args:
            ids: Whole numbers.
            on_bad: ``"raise"`` raises for an id that is not in the vocabulary, and for that waits
                for the device. ``"assert"`` does not wait: the device ends the program.
        """
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise _refused(f"the ids are {ids.dtype}", "Give it whole numbers: ids.long().")
        if on_bad == "raise":
            self._refuse_ids(ids)
        elif on_bad == "assert":
            inside = ((ids >= 0) & (ids < self.vocab_size)).all()
            torch._assert_async(inside, f"a token id is not in 0 to {self.vocab_size - 1}")
        else:
            raise _refused(f"on_bad is {on_bad!r}", "Use 'raise' or 'assert'.")
        # Every id fits into 24 bits, and a narrowing cast keeps the lowest eight.
        small = ids.to(torch.int32)
        digits = (small, small >> 8, small >> 16)
        return torch.stack([digit.to(torch.uint8) for digit in digits], -1)

    def decode(self, pixels: Tensor, *, on_bad: Literal["raise", "mark"] = "raise") -> Tensor:
        """Returns the ids of pixels.

        Args:
            pixels: Values from 0 to 255 in a last dimension of 3, of type uint8, or floating-point
                values that are rounded to the nearest.
            on_bad: A pixel is bad if a value is not from 0 to 255 (NaN is not), or if its id is not
                in the vocabulary, as happens with what a model paints. ``"raise"`` raises, and for
                that waits for the device; ``"mark"`` gives such a pixel the id -1.
        """
        if pixels.dim() == 0 or pixels.shape[-1] != 3:
            raise _refused(
                f"pixels have shape {tuple(pixels.shape)}",
                "Put red, green and blue last: images of shape (batch, 3, ...) need a permute.",
            )
        if on_bad not in ("raise", "mark"):
            raise _refused(f"on_bad is {on_bad!r}", "Use 'raise' or 'mark'.")
        digits = _digits(pixels)
        red, green, blue = digits.unbind(-1)
        ids = red + (green << 8) + (blue << 16)
        known = ids < self.vocab_size
        if pixels.dtype != torch.uint8:
            known = known & (digits >= 0).all(-1)
        if on_bad == "raise":
            self._refuse_pixels(pixels, known)
            return ids.long()
        return ids.long().where(known, -1)

    def _refuse_ids(self, ids: Tensor) -> None:
        if ids.numel() == 0:
            return
        low, high = torch.stack(ids.aminmax()).tolist()
        if low >= 0 and high < self.vocab_size:
            return
        inside = (ids >= 0) & (ids < self.vocab_size)
        place, bad = _first(inside), ids[~inside]
        value = int(bad.flatten()[0])
        if value < 0:
            what = f"token id {value} at {place} is negative"
        elif value >= COLOURS:
            what = f"token id {value} at {place} has no colour: the largest is {COLOURS - 1}"
        else:
            what = f"token id {value} at {place} is not in a vocabulary of {self.vocab_size}"
        raise _refused(
            f"{what} ({bad.numel()} of {ids.numel()} ids are bad)",
            "Look at the tokenizer and at padding (-1, -100): give padding an id of its own.",
        )

    def _refuse_pixels(self, pixels: Tensor, known: Tensor) -> None:
        if bool(known.all()):
            return
        place = _first(known)
        values = ", ".join(f"{value:g}" for value in pixels[place].tolist())
        raise _refused(
            f"the pixel ({values}) at {place} is no token of a vocabulary of {self.vocab_size} "
            f"({int((~known).sum())} of {known.numel()} pixels are bad)",
            "For images that a model made use on_bad='mark': such pixels get the id -1.",
        )


def _digits(pixels: Tensor) -> Tensor:
    """Returns whole numbers, -1 for what is not from 0 to 255."""
    if pixels.dtype == torch.uint8:
        return pixels.to(torch.int32)
    values = pixels.round() if pixels.is_floating_point() else pixels
    # NaN is in no range.
    return torch.where((values >= 0) & (values <= 255), values, -1).to(torch.int32)


def _first(good: Tensor) -> tuple[int, ...]:
    """Returns the place of the first value that is False."""
    return tuple(int(i) for i in (~good).nonzero()[0])


def _refused(what: str, do: str) -> UsageError:
    return UsageError(what, where="nanguard.ops.TokenCodec", do=do)
