"""What a snapshot holds, where each part of it goes back to, and its copy in host memory.

A state is a tree of dicts and lists whose leaves are tensors and plain values. Live trees refer
to the tensors of the run; snapshots hold copies of them, made without making the device wait.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nanguard.errors import SnapshotError
from nanguard.numerics import all_finite, is_float, local, non_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer


class Part(Protocol):
    """A part of a run that a snapshot covers: anything with the usual two methods."""

    def state_dict(self) -> Any:
        """Returns the part's state; tensors may be the live ones."""

    def load_state_dict(self, state: Any) -> Any:
        """Continues from a state."""


# The parts that may hold infinities on purpose, such as an attention mask in a buffer.
BUFFERS = "buffers"
_MAY_BE_INFINITE = (BUFFERS, "ema")


class TrainingState:
    """All parts of a run that a snapshot covers.

    Attributes:
        parts: The parts by name.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        self._began_finite = frozenset(
            path
            for name in _MAY_BE_INFINITE
            if name in self.parts
            for path, tensor in tensors_in(self.parts[name].state_dict(), name)
            if is_float(tensor) and all_finite([tensor])
        )

    def tree(self) -> dict[str, Any]:
        """Returns the live state of all parts."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, tree: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> None:
        """Puts the parts back to a state, except some by name."""
        missing = [name for name in self.parts if name not in tree and name not in without]
        if missing:
            raise SnapshotError(
                f"the snapshot has no {missing[0]}.",
                where="restoring a snapshot",
                do="Resume with what the run was started with, or start in a new run folder.",
            )
        for name, part in self.parts.items():
            if name not in without:
                part.load_state_dict(tree[name])

    def floats(self, tree: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the tensors, by path, that must be finite for a state to be good.

        A buffer that began with infinities, or that was made since, may hold them.
        """
        return {
            path: tensor
            for path, tensor in tensors_in(tree)
            if is_float(tensor)
            and (path.split("/", 1)[0] not in _MAY_BE_INFINITE or path in self._began_finite)
        }

    def finite_buffers(self) -> dict[str, Tensor]:
        """Returns the live buffers, by name, that must stay finite."""
        if not self._began_finite:
            return {}
        found = self.floats({BUFFERS: self.parts[BUFFERS].state_dict()})
        return {path.removeprefix(f"{BUFFERS}/"): tensor for path, tensor in found.items()}


class Parameters:
    """Parameters as a part: filled in place, so that everyone who holds them sees it."""

    def __init__(self, find: Callable[[], dict[str, Tensor]]) -> None:
        self._find = find

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the live tensors by name."""
        return {name: tensor.detach() for name, tensor in self._find().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Fills the live tensors; refuses a state of another model and then changes nothing."""
        live = self._find()
        _check_same(live, state)
        for name, tensor in live.items():
            local(tensor).copy_(local(state[name]), non_blocking=True)


class Buffers:
    """Buffers as a part: filled in place where they fit, and made or removed where they do not.

    Caches grow, and some modules make a buffer when they first need one. Going back undoes that.
    """

    def __init__(self, find: Callable[[], dict[str, dict[str, Any]]], device: torch.device) -> None:
        self._find = find
        self._device = device
        self._at_first = frozenset(self.state_dict())

    def state_dict(self) -> dict[str, Tensor | None]:
        """Returns the live buffers by name; None stands for one that is yet to be made."""
        return {
            f"{module}.{key}" if module else key: buffer
            for module, registry in self._find().items()
            for key, buffer in registry.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        """Fills the live buffers; refuses a state of another model and then changes nothing."""
        registries = self._find()
        homes = {name: registries.get(name.rpartition(".")[0]) for name in state}
        _refuse_if(
            missing=sorted(self._at_first - state.keys()),
            foreign=sorted(name for name, home in homes.items() if home is None),
        )
        for name in self.state_dict().keys() - state.keys():
            module, _, key = name.rpartition(".")
            del registries[module][key]
        for name, saved in state.items():
            home, key = homes[name], name.rpartition(".")[2]
            assert home is not None  # noqa: S101 - refused above
            live = home.get(key)
            if saved is not None and live is not None and _fits(live, saved):
                local(live).copy_(local(saved), non_blocking=True)
            else:
                home[key] = None if saved is None else saved.to(self._device, copy=True)


class SchedulerPart:
    """A scheduler as a part, which gets a copy of what the snapshot holds."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> Any:
        """Returns the scheduler's state."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continues from a state."""
        self._scheduler.load_state_dict(copy.deepcopy(state))


class OptimizerPart:
    """An optimizer as a part: filled in place where it can be, rebuilt where it must."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the live state in torch's own form."""
        return self._optimizer.state_dict()

    def parameters(self) -> list[Tensor]:
        """Returns the parameters in the order in which the state numbers them."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def size(self) -> int:
        """Returns how many parameters it has; cheap."""
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the optimizer back."""
        self._check_shapes(state)
        live = self._optimizer.state_dict()
        if not _same_shape(live["state"], state["state"]):
            self._optimizer.load_state_dict(copy.deepcopy(state))
            return
        _fill(live["state"], state["state"])
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            values = {key: value for key, value in saved.items() if key != "params"}
            for key, value in values.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.deepcopy(value)

    def _check_shapes(self, state: dict[str, Any]) -> None:
        """Refuses a state that does not fit: torch's fused kernels would write past its end."""
        parameters = self.parameters()
        for index, values in state["state"].items():
            shape = local(parameters[index]).shape
            for name, tensor in values.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                wrong = name in _LIKE_PARAMETER and local(tensor).shape != shape
                if wrong or (name == "step" and tensor.numel() != 1):
                    _refuse_if(
                        missing=(),
                        foreign=(),
                        changed=[f"{name} of parameter {index} ({tuple(tensor.shape)} saved)"],
                    )


# The state of torch's optimizers that has an element for each one of the parameter.
_LIKE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"),
    *("square_avg", "grad_avg", "acc_delta", "exp_inf", "ax"),
)


def tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the path and the tensor of every tensor leaf."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_in(value, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from tensors_in(value, f"{path}/{index}" if path else str(index))


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a tree with new containers and with every tensor leaf replaced."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        new = copy.copy(tree) if type(tree) is not dict else {}
        for key, value in tree.items():
            new[key] = map_tensors(value, change)
        return new
    if isinstance(tree, list):
        return [map_tensors(value, change) for value in tree]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(map_tensors(value, change) for value in tree)
    return tree


def _same_shape(live: Any, saved: Any) -> bool:
    """Returns whether two trees have the same keys and, leaf by leaf, tensors that fit."""
    if isinstance(live, torch.Tensor) or isinstance(saved, torch.Tensor):
        both = isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor)
        return both and _fits(live, saved)
    if isinstance(live, dict) and isinstance(saved, dict):
        return live.keys() == saved.keys() and all(_same_shape(live[k], saved[k]) for k in live)
    return not isinstance(live, (list, tuple)) and type(live) is type(saved)


def _fits(live: Tensor, saved: Tensor) -> bool:
    return local(live).shape == local(saved).shape and live.dtype == saved.dtype


def _fill(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key, value in saved.items():
        if isinstance(value, torch.Tensor):
            local(live[key]).copy_(local(value), non_blocking=True)
        elif isinstance(value, dict):
            _fill(live[key], value)
        else:
            live[key] = value


def _check_same(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    _refuse_if(
        missing=sorted(live.keys() - saved.keys()),
        foreign=sorted(saved.keys() - live.keys()),
        changed=sorted(
            f"{name} ({tuple(saved[name].shape)} saved, {tuple(live[name].shape)} now)"
            for name in live.keys() & saved.keys()
            if local(live[name]).shape != local(saved[name]).shape
        ),
    )


def _refuse_if(
    *, missing: Sequence[str], foreign: Sequence[str], changed: Sequence[str] = ()
) -> None:
    """Refuses a state of another model."""
    details = [
        f"{title} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for title, names in (("missing", missing), ("unknown", foreign), ("other shape", changed))
        if names
    ]
    if details:
        raise SnapshotError(
            f"the snapshot is of another model: {'; '.join(details)}.",
            where="restoring a snapshot",
            do="Resume with the model that the snapshot was taken from, or start in a new run "
            "folder.",
        )


class Snapshot:
    """A copy of a run's state in host memory.

    Attributes:
        update: How many updates the state has seen.
        step: The step it was taken after.
        on_disk: Whether it is to be written to disk once it is known to be good.
        tree: The state.
    """

    def __init__(self, update: int, step: int, slot: Slot, *, on_disk: bool = False) -> None:
        self.update = update
        self.step = step
        self.on_disk = on_disk
        self.tree: dict[str, Any] = {}
        self._slot = slot
        self._holders = 1
        self._flag: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def is_good(self) -> bool:
        """Returns whether every number in it is finite; waits until it is copied."""
        self.wait()
        return self._flag is None or not bool(self._flag)

    def wait(self) -> None:
        """Waits until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()

    def hold(self) -> Snapshot:
        """Keeps its memory from being used again until it is released once more."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Gives its memory back when no one holds it any more."""
        self._holders -= 1
        if self._holders == 0:
            self._slot.free = True

    def fill(self, tree: dict[str, Any], copied_at_once: tuple[str, ...], bad: Tensor) -> None:
        """Starts copying a live tree.

        Args:
            tree: The live state.
            copied_at_once: The parts that the next forward pass changes, so that their copy
                must not lag behind.
            bad: Whether the state is non-finite, as a 0-dim bool on the device.
        """
        first = {name: part for name, part in tree.items() if name in copied_at_once}
        rest = {name: part for name, part in tree.items() if name not in copied_at_once}
        self._slot.begin()
        if bad.device.type != "cuda":
            self.tree = {**self._slot.copy(first), **self._slot.copy(rest)}
            self._flag = bad.clone()
            return
        side = self._slot.stream(bad.device)
        self.tree = self._slot.copy(first)
        side.wait_stream(torch.cuda.current_stream(bad.device))
        with torch.cuda.stream(side):
            self.tree.update(self._slot.copy(rest))
            bad.record_stream(side)
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(bad, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(side)

    def fence(self) -> None:
        """Makes the device, not the host, wait for the copy before it goes on."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)


class Slot:
    """Host memory for one snapshot, used again for the next."""

    def __init__(self) -> None:
        self.free = True
        self._memory: list[Tensor] = []
        self._next = 0
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Starts again at the first tensor."""
        self._next = 0

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream that copies run on, beside the training."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def copy(self, tree: Any) -> Any:
        """Returns a tree of host copies."""
        return map_tensors(tree, self._copy_tensor)

    @torch.no_grad()
    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        source = local(tensor.detach())
        if source.layout != torch.strided:
            return source.to("cpu", copy=True)
        index, self._next = self._next, self._next + 1
        if index == len(self._memory):
            self._memory.append(_host_like(source))
        memory = self._memory[index]
        if not _is_like(memory, source):
            memory = self._memory[index] = _host_like(source)
        # Only the device that the copying stream belongs to can be waited for later.
        beside = self._stream is not None and source.device == self._stream.device
        return memory.copy_(source, non_blocking=beside)


class MemorySnapshots:
    """The last good snapshot in memory, and those that may replace it.

    Each takes a slot: the last good one, the next one, which may turn out bad, and one that is
    still being written to disk.

    Attributes:
        last_good: The newest snapshot known to be good.
    """

    def __init__(
        self,
        *,
        slots: int,
        copied_at_once: tuple[str, ...],
        floats: Callable[[dict[str, Any]], Mapping[str, Tensor]],
        agree: Callable[[Tensor], Tensor],
    ) -> None:
        self._agree = agree
        self._copied_at_once = copied_at_once
        self._floats = floats
        self._slots = [Slot() for _ in range(slots)]
        self._copying: Snapshot | None = None
        self.last_good: Snapshot | None = None

    @property
    def has_room(self) -> bool:
        """Whether there is a free slot."""
        return any(slot.free for slot in self._slots)

    def flag(self, tree: dict[str, Any], bad: Tensor) -> Tensor:
        """Returns, on the device, whether a state is bad or holds a non-finite number, anywhere."""
        return self._agree(bad | non_finite(self._floats(tree).values(), bad.device))

    def take(
        self, tree: dict[str, Any], update: int, step: int, bad: Tensor, *, on_disk: bool = False
    ) -> Snapshot:
        """Starts a snapshot of a live tree; there must be room for it.

        Args:
            tree: The live state.
            update: How many updates it has seen.
            step: The step it is taken after.
            bad: Whether anything else than non-finite numbers in the tree makes it bad.
            on_disk: Whether it is to be written to disk once it is known to be good.
        """
        slot = next(slot for slot in self._slots if slot.free)
        slot.free = False
        snapshot = Snapshot(update, step, slot, on_disk=on_disk)
        snapshot.fill(tree, self._copied_at_once, self.flag(tree, bad))
        self._copying = snapshot
        return snapshot

    def fence(self) -> None:
        """Call before the weights change: the device waits for a copy that is under way."""
        if self._copying is not None:
            self._copying.fence()
            self._copying = None

    def settle(self, snapshot: Snapshot, *, good: bool) -> bool:
        """Ends a snapshot whose step is now known; returns whether it became the last good one."""
        if not (good and snapshot.is_good()):
            snapshot.wait()
            snapshot.release()
            return False
        self.forget()
        self.last_good = snapshot
        return True

    def forget(self) -> None:
        """Lets go of the last good snapshot."""
        if self.last_good is not None:
            self.last_good.release()
        self.last_good = None


def bytes_of(tree: Any) -> int:
    """Returns how much host memory one snapshot of a live tree takes."""
    return sum(local(t).numel() * t.element_size() for _, t in tensors_in(tree))


def _host_like(tensor: Tensor) -> Tensor:
    # Fused optimizers walk memory without looking at strides, so a copy must be laid out alike.
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _is_like(memory: Tensor, tensor: Tensor) -> bool:
    same = memory.shape == tensor.shape and memory.dtype == tensor.dtype
    return same and memory.stride() == _dense_strides(tensor)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides that a copy which keeps the layout of a tensor has."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()
