"""The random streams of a run, and how to put them back."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    Stream = torch.Generator | random.Random | np.random.Generator


class RandomStreams:
    """Every stream a training loop draws from: torch on CPU and CUDA, Python, NumPy.

    Attributes:
        devices: The CUDA devices whose stream belongs to the run.
        generators: The user's own generators, if the loop draws from any.
    """

    def __init__(self, devices: Iterable[torch.device], generators: Sequence[Stream] = ()) -> None:
        self.devices = [device for device in devices if device.type == "cuda"]
        self._on_devices = [torch.cuda.default_generators[d.index or 0] for d in self.devices]
        self.generators = tuple(generators)
        self._python = _PythonStream()
        self._numpy = _NumpyStream()

    def capture(self) -> dict[str, Any]:
        """Returns the state of every stream."""
        numpy = sys.modules.get("numpy")
        return {
            "torch": torch.default_generator.get_state(),
            # All there is to a stream on a device, and read many times faster than its state.
            "cuda": [(stream.initial_seed(), stream.get_offset()) for stream in self._on_devices],
            "python": self._python.capture(),
            "numpy": None if numpy is None else self._numpy.capture(numpy),
            "own": [_state_of(generator) for generator in self.generators],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts every stream back to a captured state."""
        torch.set_rng_state(state["torch"])
        for stream, saved in zip(self._on_devices, state["cuda"], strict=False):
            if isinstance(saved, torch.Tensor):  # of a snapshot that an earlier version has made
                stream.set_state(saved)
            else:
                seed, offset = saved
                stream.manual_seed(seed)
                stream.set_offset(offset)
        random.setstate(state["python"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and state["numpy"] is not None:
            numpy.random.set_state(state["numpy"])
        for own, saved in zip(self.generators, state["own"], strict=False):
            _set_state(own, saved)


def _words_at(address: int) -> Any:
    """Returns the words of a Mersenne Twister that change when a number is drawn or a seed is set.

    These are its position and three of its 624 words: once all of them are used up, they are made
    anew. To look at them (``raw``) takes a thousandth of the time that taking the state does.
    """
    return (ctypes.c_char * 16).from_address(address)


class _PythonStream:
    """Python's global stream, whose state is taken anew only if it has moved.

    Taking it makes 625 numbers, which takes longer than to look at the memory they come from.
    Where that lies is not promised by anyone, so it is tried out first.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, Any, Any] | None = None
        self._words: Any = None
        if sys.implementation.name == "cpython":
            address = id(random._inst) + object.__basicsize__
            words = random.getstate()[1]
            if ctypes.string_at(address, 625 * 4) == struct.pack("=625I", words[-1], *words[:-1]):
                self._words = _words_at(address)

    def capture(self) -> Any:
        """Returns what ``random.getstate()`` returns."""
        if self._words is None:
            return random.getstate()
        at, reserve = self._words.raw, random._inst.gauss_next  # type: ignore[attr-defined]
        known = self._known
        if known is None or known[0] != at or known[1] != reserve:
            self._known = known = (at, reserve, random.getstate())
        return known[2]


class _NumpyStream:
    """NumPy's global stream, whose state is taken anew only if it has moved.

    Taking it costs more than everything else here together, and few loops draw from it.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, dict[str, Any]] | None = None
        self._generator: Any = None
        self._words: Any = None

    def capture(self, numpy: Any) -> dict[str, Any]:
        """Returns the state."""
        generator = numpy.random.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._known, self._words = generator, None, None
            if type(generator).__name__ == "MT19937":
                # The position comes behind the words.
                self._words = _words_at(generator.ctypes.state_address + 621 * 4)
        if self._words is None:
            state: dict[str, Any] = numpy.random.get_state(legacy=False)
            return state
        at, known = self._words.raw, self._known
        # A normal number in reserve can be used up without a trace in the generator itself.
        if known is None or known[0] != at or known[1]["has_gauss"]:
            self._known = known = (at, numpy.random.get_state(legacy=False))
        return known[1]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Returns whether nothing was drawn between two captures of the CPU-side streams."""
    return (
        torch.equal(left["torch"], right["torch"])
        and left["python"] == right["python"]
        and _same_numpy(left["numpy"], right["numpy"])
        and all(map(_same_own, left["own"], right["own"]))
    )


def _state_of(generator: Stream) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):  # NumPy's older kind
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Stream, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _same_own(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return _plain(left) == _plain(right)


def _plain(state: Any) -> str:
    """Returns a state in words; those of NumPy's generators hold arrays, which know no equality."""
    if isinstance(state, dict):
        return str({key: _plain(value) for key, value in state.items()})
    return str(state.tolist()) if hasattr(state, "tolist") else str(state)


def _same_numpy(left: dict[str, Any] | None, right: dict[str, Any] | None) -> bool:
    if left is None or right is None:
        return left is right
    if "pos" not in left["state"] or "pos" not in right["state"]:
        return _plain(left) == _plain(right)  # another generator than NumPy's usual one
    return bool(
        left["state"]["pos"] == right["state"]["pos"]
        and left["has_gauss"] == right["has_gauss"]
        and (left["state"]["key"] == right["state"]["key"]).all()
    )
