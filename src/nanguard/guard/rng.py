"""The random streams of a run, and how to put them back."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import struct
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from torch import Tensor

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
        self._torch = _TorchStream()
        self._python = _PythonStream()
        self._numpy = _NumpyStream()
        self._last: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of what looks into the memory of a stream would look at a copy of that memory.
        return RandomStreams, (self.devices, self.generators)

    def capture(self) -> dict[str, Any]:
        """Returns the state of every stream, which nobody may change."""
        # Every step of a run comes here, so what has not moved is not even asked.
        torch_, python, numpy = self._torch, self._python, self._numpy
        module, last = sys.modules.get("numpy"), self._last
        if torch_.has_moved():
            torch_.take()
            last = None
        if python.words is None or python.words.raw != python.seen or python.has_reserve():
            python.take()
            last = None
        if module is not None:
            moved = numpy.words is None or numpy.words.raw != numpy.seen
            if moved or module.random.get_bit_generator() is not numpy.generator:
                numpy.take(module)
                last = None
        if last is not None:
            return last
        state = {
            "torch": torch_.state,
            # All there is to a stream on a device, and read many times faster than its state.
            "cuda": [(stream.initial_seed(), stream.get_offset()) for stream in self._on_devices]
            if self._on_devices
            else [],
            "python": python.state,
            "numpy": None if module is None else numpy.state,
            "own": [_state_of(generator) for generator in self.generators]
            if self.generators
            else [],
        }
        self._last = None if self._on_devices or self.generators else state
        return state

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


# The words of torch's Mersenne Twister, those that it keeps its state in when it is asked, and
# where they begin there.
_TORCH_WORDS = 624
_TORCH_HEAD = struct.calcsize("=QiiQ")
# In memory: its seed and position, which come before the words, and all of it with the padding.
_BEFORE_WORDS, _TWISTER = 20, 2520


class _TorchStream:
    """Torch's global stream on the CPU, whose state is taken anew only if it has moved.

    Attributes:
        state: What ``get_state()`` returned last.
    """

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self._seen: tuple[bytes, bytes] | None = None
        place = _place_of_twister()
        self._peek = None if place is None else _Peek(_torch_stream, place)

    def has_moved(self) -> bool:
        """Returns whether the state is another one, or may be."""
        peek = self._peek
        return peek is None or peek() != self._seen

    def take(self) -> None:
        """Takes the state as it is now."""
        # Looked at first: another thread may draw in between, and its number must not be missed.
        self._seen = None if self._peek is None else self._peek()
        self.state = _torch_stream.get_state()


class _Peek:
    """What changes in the memory of a torch generator whenever it is drawn from, or seeded.

    That is the seed, the position and the first words, and the normal numbers in reserve, which
    come behind the words.
    """

    def __init__(self, generator: torch.Generator, place: int) -> None:
        self._generator = generator  # the memory is there as long as it is
        address: int = generator._cdata + place  # type: ignore[attr-defined]
        self._head = (ctypes.c_char * 32).from_address(address)
        self._reserve = (ctypes.c_char * 24).from_address(address + _TWISTER)

    def __call__(self) -> tuple[bytes, bytes]:
        return self._head.raw, self._reserve.raw


@functools.cache
def _place_of_twister() -> int | None:
    """Returns where a torch generator keeps its Mersenne Twister; None if it is not where we think.

    Nobody promises that place, so it is looked for and tried out on a generator of our own.
    """
    probe = torch.Generator("cpu").manual_seed(5489)
    address = getattr(probe, "_cdata", None)
    if not isinstance(address, int):
        return None
    state = bytes(probe.get_state().tolist())
    if len(state) < _TORCH_HEAD + 8 * _TORCH_WORDS:
        return None
    words = struct.unpack_from(f"={_TORCH_WORDS}Q", state, _TORCH_HEAD)
    # It holds its words, and so at least as many bytes.
    memory = ctypes.string_at(address, 4 * _TORCH_WORDS)
    place = memory.find(struct.pack("=64I", *words[:64])) - _BEFORE_WORDS
    if place < 0:
        return None
    peek = _Peek(probe, place)
    seen = {peek()}
    draws = [torch.rand, torch.randn, torch.randn]  # the second normal number is one in reserve
    for draw, dtype in itertools.product(draws, (torch.float32, torch.float64)):
        draw(1, generator=probe, dtype=dtype, device="cpu")
        seen.add(peek())
    probe.manual_seed(5490)
    seen.add(peek())
    return place if len(seen) == 2 * len(draws) + 2 else None


class _PythonStream:
    """Python's global stream, whose state is taken anew only if it has moved.

    Taking it makes 625 numbers, which takes longer than to look at the memory they come from.
    Where that lies is not promised by anyone, so it is tried out first.

    Attributes:
        words: The words to look at; None if it is not known where they are.
        seen: What they were when the state was taken.
        state: What ``random.getstate()`` returned then.
    """

    def __init__(self) -> None:
        self.words: Any = None
        self.seen = b""
        self.state: Any = None
        if sys.implementation.name == "cpython":
            address = id(random._inst) + object.__basicsize__
            words = random.getstate()[1]
            if ctypes.string_at(address, 625 * 4) == struct.pack("=625I", words[-1], *words[:-1]):
                self.words = _words_at(address)

    def has_reserve(self) -> bool:
        """Returns whether a normal number is, or was, in reserve: it leaves no trace when used."""
        return random._inst.gauss_next is not None or self.state[2] is not None  # type: ignore[attr-defined]

    def take(self) -> None:
        """Takes the state as it is now."""
        if self.words is not None:
            self.seen = self.words.raw
        self.state = random.getstate()


class _NumpyStream:
    """NumPy's global stream, whose state is taken anew only if it has moved.

    Taking it costs more than everything else here together, and few loops draw from it.

    Attributes:
        generator: The stream that the state was taken of.
        words: The words to look at; None if it is not known where they are, or if a normal number
            is in reserve, which leaves no trace there when it is used.
        seen: What they were when the state was taken.
        state: The state.
    """

    def __init__(self) -> None:
        self.generator: Any = None
        self.words: Any = None
        self.seen = b""
        self.state: dict[str, Any] | None = None

    def take(self, numpy: Any) -> None:
        """Takes the state as it is now."""
        self.generator = numpy.random.get_bit_generator()
        self.state = state = numpy.random.get_state(legacy=False)
        self.words = None
        if type(self.generator).__name__ == "MT19937" and not state["has_gauss"]:
            # The position comes behind the words.
            self.words = _words_at(self.generator.ctypes.state_address + 621 * 4)
            self.seen = self.words.raw


_torch_stream = torch.default_generator


def devices_in_use() -> list[torch.device]:
    """Returns the device that this process computes on, if it has begun to."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", torch.cuda.current_device())]


def is_generator(value: object) -> bool:
    """Returns whether random numbers are drawn from a value."""
    kind = type(value)
    if kind is torch.Generator or kind is random.Random:
        return True
    known = kind.__name__ in ("Generator", "RandomState")
    return known and kind.__module__.startswith("numpy.random")


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
