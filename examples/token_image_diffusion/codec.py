"""Words to token ids, and token ids to pixels: one id is one RGB colour, in base 256."""

from __future__ import annotations

import torch

COLOURS = 256**3


class TokenError(ValueError):
    """A token id that cannot be written as a pixel."""


class Tokenizer:
    """Word-level tokens whose ids are spread over a large vocabulary.

    Attributes:
        ids: The id of every known word.
    """

    def __init__(self, words: list[str], vocab_size: int) -> None:
        if len(words) > vocab_size - 1:
            raise TokenError(f"{len(words)} words do not fit into a vocabulary of {vocab_size}")
        step = (vocab_size - 1) / max(len(words), 1)
        # Id 0 is the padding.
        self.ids = {word: 1 + int(rank * step) for rank, word in enumerate(words)}
        self._words = {number: word for word, number in self.ids.items()}

    @classmethod
    def of(cls, texts: list[str], vocab_size: int) -> Tokenizer:
        """Returns the tokenizer for the words of some texts."""
        return cls(sorted({word for text in texts for word in text.split()}), vocab_size)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Returns the text of some ids; what is no word becomes a question mark."""
        return " ".join(self._words.get(number, "?") for number in ids)


def to_pixels(ids: torch.Tensor, vocab_size: int, *, checked: bool = True) -> torch.Tensor:
    """Returns ids as RGB values from -1 to 1, channels last.

    Args:
        ids: Token ids.
        vocab_size: How many ids there are.
        checked: Refuse ids outside the vocabulary. If not, they come out as other words: the
            remainder of a negative or too large id is a colour as good as any.
    """
    if checked:
        _refuse_bad(ids, vocab_size)
    digits = torch.stack([ids % 256, ids // 256 % 256, ids // 65536 % 256], -1)
    return digits.float() / 127.5 - 1


def to_ids(pixels: torch.Tensor) -> torch.Tensor:
    """Returns the ids of RGB values from -1 to 1, each rounded to the nearest colour."""
    digits = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).long()
    return digits[..., 0] + 256 * digits[..., 1] + 65536 * digits[..., 2]


def _refuse_bad(ids: torch.Tensor, vocab_size: int) -> None:
    if vocab_size > COLOURS:
        raise TokenError(f"a vocabulary of {vocab_size} has more ids than there are RGB colours")
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(bad):
        place = tuple(bad[0].tolist())
        raise TokenError(
            f"token id {int(ids[place])} at {place} is outside the vocabulary "
            f"(0 to {vocab_size - 1}); {len(bad)} ids are"
        )
