"""Token ids as pixels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from nanguard import ops
from nanguard.errors import UsageError

CODEC = ops.TokenCodec(151_643)
WHOLE = ops.TokenCodec(256**3)


@given(ids=st.lists(st.integers(0, 256**3 - 1), max_size=20))
def test_there_and_back_exactly(ids):
    given_ids = torch.tensor(ids, dtype=torch.int64)
    pixels = WHOLE.encode(given_ids)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (len(ids), 3)
    for value, pixel in zip(ids, pixels.tolist(), strict=True):
        assert pixel == [value % 256, value // 256 % 256, value // 65536 % 256]
    assert torch.equal(WHOLE.decode(pixels), given_ids)
    assert torch.equal(WHOLE.decode(pixels.float() + 0.4), given_ids)


def test_every_id_of_a_real_vocabulary_and_other_types_and_shapes():
    ids = torch.arange(151_643)
    assert torch.equal(CODEC.decode(CODEC.encode(ids)), ids)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        small = torch.arange(100, dtype=dtype).view(4, 5, 5)
        assert torch.equal(CODEC.decode(CODEC.encode(small)), small.long())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "token id -1 at (0, 2) is negative"),
        (151_643, "token id 151643 at (0, 2) is not in a vocabulary of 151643"),
        (256**3, "token id 16777216 at (0, 2) has no colour: the largest is 16777215"),
        (2**40, "token id 1099511627776 at (0, 2) has no colour"),
    ],
)
def test_ids_without_a_pixel_are_refused(value, message):
    with pytest.raises(UsageError) as caught:
        CODEC.encode(torch.tensor([[0, 1, value]]))
    assert message in str(caught.value)
    assert "1 of 3 ids are bad" in str(caught.value)
    with pytest.raises(RuntimeError, match="a token id is not in 0 to 151642"):
        CODEC.encode(torch.tensor([[0, 1, value]]), on_bad="assert")


@pytest.mark.parametrize("size", [0, -5, 256**3 + 1])
def test_vocabularies_that_cannot_be(size):
    with pytest.raises(UsageError, match=f"vocab_size is {size}, and there are 16777216 colours"):
        ops.TokenCodec(size)


def test_other_input_is_refused():
    with pytest.raises(UsageError, match=r"the ids are torch.float32"):
        CODEC.encode(torch.ones(3))
    with pytest.raises(UsageError, match=r"pixels have shape \(3, 8\)"):
        CODEC.decode(torch.zeros(3, 8, dtype=torch.uint8))
    with pytest.raises(UsageError, match="on_bad is 'mark'"):
        CODEC.encode(torch.tensor([1]), on_bad="mark")
    with pytest.raises(UsageError, match="on_bad is 'assert'"):
        CODEC.decode(torch.zeros(3, dtype=torch.uint8), on_bad="assert")


@pytest.mark.parametrize(
    "pixel", [[255, 255, 255], [-1, 0, 0], [0, 256, 0], [math.nan, 0, 0], [0, 0, math.inf]]
)
def test_pixels_that_are_no_token(pixel):
    pixels = torch.tensor([[1.0, 0.0, 0.0], [float(v) for v in pixel]])
    with pytest.raises(UsageError) as caught:
        CODEC.decode(pixels)
    assert "at (1,) is no token of a vocabulary of 151643 (1 of 2 pixels are bad)" in str(
        caught.value
    )
    assert CODEC.decode(pixels, on_bad="mark").tolist() == [1, -1]


def test_what_a_model_paints_is_marked_and_cannot_be_written_again():
    painted = torch.tensor([[255, 255, 255]], dtype=torch.uint8)
    ids = CODEC.decode(painted, on_bad="mark")
    assert ids.tolist() == [-1]
    with pytest.raises(UsageError, match="token id -1"):
        CODEC.encode(ids)


def test_forms_that_do_not_wait_compile_and_vmap():
    ids = torch.arange(12).view(3, 4)

    def both(ids: torch.Tensor) -> torch.Tensor:
        return CODEC.decode(CODEC.encode(ids, on_bad="assert"), on_bad="mark")

    assert torch.equal(torch.compile(both, backend="eager", fullgraph=True)(ids), ids)
    pixels = CODEC.encode(ids)
    assert torch.equal(vmap(lambda p: CODEC.decode(p, on_bad="mark"))(pixels), ids)
