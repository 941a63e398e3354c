"""When an op may use a kernel of ours, and how autograd and whoever traces see it.

On CUDA, with Triton there and plain tensors, an op is one kernel forward and one backward instead
of a dozen of torch's. Everywhere else it is made of torch's own: on a CPU, while a compiler traces
(which fuses by itself), under ``torch.func``, for subclasses of tensors, and where a derivative is
to be differentiated again.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

DEVICE = "cuda"
_modes = torch._C._len_torch_dispatch_stack
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
LONGEST_ROW = 65536  # elements that one program may have to sum up
MOST_GROUPS = 65535  # what the second dimension of a grid may be


def ready(first: Tensor, *others: Tensor, strided: bool = False) -> bool:
    """Returns whether kernels of ours can work on some tensors.

    Args:
        first: A floating-point one.
        others: More of them, which have to be contiguous.
        strided: Whether the first need not be.
    """
    cuda = first.is_cuda
    # The name of a device is slower to be had than an answer.
    if not (cuda if DEVICE == "cuda" else first.device.type == DEVICE):
        return False
    if first.dtype not in _TYPES:
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    device = first.get_device()
    # Triton asks for no other device than the current one.
    if not kernels_there() or (cuda and device != torch._C._cuda_getDevice()):
        return False
    if type(first) not in _PLAIN or first.numel() == 0 or not (strided or first.is_contiguous()):
        return False
    for x in others:
        if type(x) not in _PLAIN or x.get_device() != device or x.is_cuda != cuda:
            return False
        if not x.is_contiguous() or x.numel() == 0:
            return False
    return True


def once(grad: Tensor) -> bool:
    """Returns whether a gradient can go to a kernel of ours: it is not differentiated again."""
    return not torch.is_grad_enabled() and type(grad) in _PLAIN and grad.is_contiguous()


@cache
def kernels_there() -> bool:
    """Returns whether there is Triton, in a version whose kernels work here."""
    if find_spec("triton") is None:
        return False
    try:
        _kernels()
    except (ImportError, AttributeError):
        return False  # a version that lacks what the kernels are made of
    return True


@cache
def _kernels() -> ModuleType:
    from nanguard.ops import kernels

    return kernels


_LIBRARY = torch.library.Library("nanguard", "FRAGMENT")


def kernel(schema: str) -> Callable[..., Any]:
    """Returns a function that runs a kernel of ours, and that a dispatch mode gets to see.

    A mode, such as the tracer's, is handed ``torch.ops.nanguard.NAME``. Without one, the way
    through the dispatcher, which takes longer than a small kernel, is saved.

    Args:
        schema: Its name in ``kernels/``, what it takes and what it returns.
    """
    name = schema.partition("(")[0]
    made: Any = None

    def run(*args: Any) -> Any:
        nonlocal made
        if made is None:
            made = getattr(_kernels(), name)
        return made(*args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    seen = getattr(torch.ops.nanguard, name)

    def call(*args: Any) -> Any:
        if _modes():
            return seen(*args)
        return run(*args) if made is None else made(*args)

    return call


def apply(form: Any, *args: Any) -> Any:
    """Calls a function that has a derivative of its own, past what torch does before each call.

    Torch binds the arguments to the signature first, which takes longer than a small op, and looks
    for tensors of ``torch.func`` that outlived their transform.

    Args:
        form: The ``torch.autograd.Function``.
        args: All of its arguments, by place.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return form.apply(*args)
    return super(torch.autograd.Function, form).apply(*args)


def traced() -> bool:
    """Returns whether somebody looks at every operation."""
    return _modes() > 0


def rows_of(small: Tensor, large: Tensor) -> int | None:
    """Returns how many values of a tensor share one of another; None if they are no rows.

    Args:
        small: Of the shape of the other, but for trailing dimensions of 1.
        large: The other.
    """
    few, many = small.shape, large.shape
    if few == many:
        return 1
    last = len(few)
    if last != len(many) or small.numel() == 0:
        return None
    while last and few[last - 1] == 1:
        last -= 1
    return large.numel() // small.numel() if few[:last] == many[:last] else None


def again(
    plain: Callable[..., Tensor], inputs: Sequence[Any], grad: Tensor, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    """Returns gradients that can be differentiated themselves, by way of torch's own operations.

    Args:
        plain: The op, made of those.
        inputs: What it was called with.
        grad: The gradient of its result.
        wanted: Which inputs need a gradient.
    """
    with torch.enable_grad():
        # Views, so that what one input owes to another does not count twice.
        own = [x.view_as(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        asked = [x for x, want in zip(own, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(plain(*own), asked, grad, create_graph=True))
    return tuple(next(found) if want else None for want in wanted)
