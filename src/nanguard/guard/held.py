"""Tensors that a step changes in place, and how they were before it.

BatchNorm statistics, statistics that a module keeps in plain attributes, an EMA's averages, a
GradScaler's scale: none of them is covered by an optimizer that skips its step, and BatchNorm does
not even bump a version counter when it writes.
So they are copied before the step and put back after a bad one, on the device, without the host
having to know the verdict.
"""

from __future__ import annotations

import weakref
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from nanguard.numerics import all_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

# A place that holds a tensor: a container and the key of the tensor in it.
Slot = tuple[Any, Any]
# Which tensor objects, or None, were in which places, and which modules had places at all.
Shape = tuple[list[Slot], list[Any], list[dict[str, Any]]]

# What is registered is heard of at once. Whether places came or went in another way is looked at
# now and then.
_NOW_AND_THEN = 16
# Elements of a plain attribute that may be a statistic; what is larger is kept for another reason.
_LARGEST_STATISTIC = 4096
# Elements that are looked at together when tensors are put back by a device-side verdict.
_CHUNK = 1 << 22


class BufferPlaces:
    """The places of all buffers of some models, also of those that hold none yet.

    Attributes:
        homes: Where the modules keep their buffers.
        news: Whether buffers or modules were registered, anywhere, since the places were found.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self.homes: list[dict[str, Any]] = []
        self.news = True
        self._counted: list[dict[str, Any]] = []
        self.close = weakref.finalize(self, _remove, _listen(weakref.ref(self)))

    def find(self) -> list[Slot]:
        """Returns the places."""
        self.news = False
        found = (module for model in self._models for module in model.modules())
        # What is compiled keeps its buffers where nobody else can hold them.
        modules = [module for module in found if not isinstance(module, torch.jit.ScriptModule)]
        self.homes = [module._buffers for module in modules]
        self._counted = [*self.homes, *(module._modules for module in modules)]
        slots = [(module._buffers, name) for module in modules for name in module._buffers]
        for module in modules:
            if not type(module).__module__.startswith("torch."):
                kept = vars(module)
                slots += [(kept, name) for name, value in kept.items() if _is_statistic(value)]
        return slots

    def size(self) -> int:
        """Returns a number that changes when buffers or modules are added; cheap."""
        return sum(map(len, self._counted))


def _is_statistic(value: object) -> bool:
    """Returns whether an attribute may be what a module remembers from step to step."""
    return (
        isinstance(value, torch.Tensor)
        and value.grad_fn is None
        and not value.requires_grad
        and value.numel() <= _LARGEST_STATISTIC
    )


def _listen(places: weakref.ref[BufferPlaces]) -> list[RemovableHandle]:
    """Makes every registration of a buffer or module known to some places."""

    def notice(*_registration: Any) -> None:
        alive = places()
        if alive is not None:
            alive.news = True

    return [
        register_module_buffer_registration_hook(notice),
        register_module_module_registration_hook(notice),
    ]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class FixedPlaces:
    """Places that are always the same, or that their owner finds anew."""

    def __init__(self, find: Callable[[], list[Slot]]) -> None:
        self.find = find
        self.homes: list[dict[str, Any]] = []
        self.news = False

    def size(self) -> int:
        """Returns a number that does not change."""
        return 0


class Held:
    """Copies of tensors, and the ways to put them back.

    Args:
        places: Where the tensors are; asked again whenever their number may have changed.
    """

    def __init__(self, places: BufferPlaces | FixedPlaces) -> None:
        self._places = places
        self._seen_size = -1
        self._marks = 0
        self._slots: list[Slot] = []
        self._planned: list[Any] = []
        self._groups: list[_Group] = []

    @property
    def shape(self) -> Shape:
        """Which tensors were where at the last mark."""
        return self._slots, self._planned, self._places.homes

    def look_again(self) -> None:
        """Makes the next mark look for places that came or went without changing their number."""
        self._seen_size = -1

    def mark(self) -> None:
        """Copies the tensors as they are now."""
        self._marks += 1
        looks = self._marks % _NOW_AND_THEN == 0 and self._seen_size != self._places.size()
        # Attributes come unnoticed, mostly in the first steps: looked for after 1, 2, 4, 8, ...
        looks = looks or self._marks & (self._marks - 1) == 0
        if looks or self._places.news or self._seen_size < 0:
            self._look()
        if not self._slots:
            return
        try:
            live = [container[key] for container, key in self._slots]
        except (KeyError, IndexError):  # one was removed, unnoticed so far
            self._look()
            live = [container[key] for container, key in self._slots]
        if len(live) != len(self._planned) or not all(map(is_, live, self._planned)):
            if any(one is not None and not _is_kept(one) for one in live):
                self._look()
                live = [container[key] for container, key in self._slots]
            self._plan(live)
        if self._groups:
            with torch.no_grad():
                for group in self._groups:
                    torch._foreach_copy_(group.copies, group.live)

    @torch.no_grad()
    def restore(self, shape: Shape) -> None:
        """Puts every tensor back as it was at a mark.

        Args:
            shape: Which tensors were where then. What was made or replaced since, goes.
        """
        slots, planned, homes = shape
        known = {(id(container), key) for container, key in slots}
        at_home = set(map(id, homes))
        # A script may set attributes between two steps, so that good ones stay as they are.
        kept = at_home.union(*(group.spoilt_homes() for group in self._groups))
        for group in self._groups:
            pairs = zip(group.slots, group.live, group.copies, strict=True)
            back = [
                (live, copy) for (home, _), live, copy in pairs if id(home) in kept or not homes
            ]
            if back:
                # Through .data: to autograd, which may need them for a graph, nothing has changed.
                torch._foreach_copy_([live.data for live, _ in back], [copy for _, copy in back])
        for container, key in self._places.find():
            made = id(container) in at_home and (id(container), key) not in known
            # A module that was added since is the loop's own doing, and a good buffer does no harm.
            if made and container[key] is not None and not all_finite([container[key]]):
                del container[key]
        for (container, key), tensor in zip(slots, planned, strict=True):
            if id(container) in kept or not homes:
                container[key] = tensor

    @torch.no_grad()
    def restore_if(self, latch: Tensor) -> None:
        """Puts every tensor back if the latch, a 0-dim tensor on the device, is set."""
        for group in self._groups:
            if group.gated_by(latch):
                bad = latch.to(group.flat.device, non_blocking=True) > 0
                for copies, live in (*group.chunks(), *group.replaced()):
                    chosen = _choose(bad, copies, live, spoilt=group.of_attributes)
                    # Through .data, as autograd would take a new version for a change.
                    torch._foreach_copy_([t.data for t in live], chosen)

    def loose(self, latch: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns copies of the tensors that a latch on its device cannot put back."""
        return [
            (live, copy.clone())
            for group in self._groups
            if not group.gated_by(latch)
            for live, copy in zip(group.live, group.copies, strict=True)
        ]

    def follow(self) -> None:
        """Looks where the tensors are now, if they are as many; their copies go there, too."""
        self._seen_size = -1
        slots = self._places.find()
        if len(slots) == len(self._slots):
            for group in self._groups:
                group.slots = [slots[index] for index in group.indices]

    def release(self) -> None:
        """Frees the copies; the next mark makes new ones."""
        self._planned, self._groups = [], []

    def _look(self) -> None:
        self._slots, self._planned = self._places.find(), []
        self._seen_size = self._places.size()

    def _plan(self, live: list[Any]) -> None:
        self._planned = live
        at_home = set(map(id, self._places.homes))
        groups: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for index, tensor in enumerate(live):
            if tensor is not None and tensor.layout == torch.strided and not _overlaps(tensor):
                attribute = bool(at_home) and id(self._slots[index][0]) not in at_home
                groups.setdefault((tensor.device, tensor.dtype, attribute), []).append(index)
        self._groups = [
            _Group(
                indices,
                [self._slots[i] for i in indices],
                [live[i] for i in indices],
                of_attributes=attribute,
            )
            for (_, _, attribute), indices in groups.items()
        ]


class _Group:
    """Tensors of one device and dtype, all buffers or all attributes, copied into a flat tensor."""

    def __init__(
        self, indices: list[int], slots: list[Slot], live: list[Tensor], *, of_attributes: bool
    ) -> None:
        self.of_attributes = of_attributes
        self.indices = indices
        self.slots = slots
        self.live = live
        sizes = [tensor.numel() for tensor in live]
        with torch.inference_mode(mode=False):
            self.flat = torch.empty(sum(sizes), dtype=live[0].dtype, device=live[0].device)
        parts = self.flat.split(sizes)
        self.copies = [part.view(tensor.shape) for part, tensor in zip(parts, live, strict=True)]

    def spoilt_homes(self) -> set[int]:
        """Returns, by identity, the places of modules in which an attribute has gone bad."""
        if not self.of_attributes:
            return set()
        found = [(home, home.get(key), copy) for (home, key), copy in self._pairs()]
        return {
            id(home)
            for home, now, copy in found
            if isinstance(now, torch.Tensor) and not all_finite([now]) and all_finite([copy])
        }

    def _pairs(self) -> Iterator[tuple[Slot, Tensor]]:
        return zip(self.slots, self.copies, strict=True)

    def gated_by(self, latch: Tensor) -> bool:
        return self.flat.device.type == latch.device.type

    def replaced(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yields copies and the tensors of the mark, where others are in their places now.

        A step may have written to such a tensor before it put another in its place.
        """
        for (container, key), copy, tensor in zip(self.slots, self.copies, self.live, strict=True):
            now = container.get(key) if isinstance(container, dict) else container[key]
            if now is not tensor:
                yield [copy], [tensor]

    def chunks(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yields copies and the tensors in place now, in portions of bounded size.

        A tensor whose shape changed (a cache that grew) has no copy to choose and is left out. If
        the step was bad, the tensor object from before it comes back when the host knows.
        """
        copies: list[Tensor] = []
        live: list[Tensor] = []
        count = 0
        for (container, key), copy in self._pairs():
            # A step may remove a buffer, too.
            tensor: Any = container.get(key) if isinstance(container, dict) else container[key]
            if not _alike(tensor, copy):
                continue
            if count and count + copy.numel() > _CHUNK:
                yield copies, live
                copies, live, count = [], [], 0
            copies.append(copy)
            live.append(tensor)
            count += copy.numel()
        if live:
            yield copies, live


def _is_kept(value: object) -> bool:
    """Returns whether what is in a place is no part of a graph, which nobody may keep alive."""
    return isinstance(value, torch.Tensor) and value.grad_fn is None


def _overlaps(tensor: Tensor) -> bool:
    """Returns whether a tensor is an expanded one, which nothing can write to."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _alike(tensor: object, copy: Tensor) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == copy.shape
        and tensor.dtype == copy.dtype
        and tensor.device == copy.device
    )


def _choose(bad: Tensor, copies: list[Tensor], live: list[Tensor], *, spoilt: bool) -> list[Tensor]:
    """Returns, for each tensor, its copy if bad and the tensor as it is otherwise.

    Args:
        bad: Whether the step is.
        copies: The tensors as they were.
        live: The tensors as they are.
        spoilt: Whether only what is not finite is taken from the copies.
    """
    old = torch.cat([copy.reshape(-1) for copy in copies])
    new = torch.cat([tensor.reshape(-1) for tensor in live])
    if spoilt:
        bad = bad & ~torch.isfinite(new)
    parts = torch.where(bad, old, new).split([tensor.numel() for tensor in live])
    return [part.view(tensor.shape) for part, tensor in zip(parts, live, strict=True)]
