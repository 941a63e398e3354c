"""What a snapshot holds, and where each part of it goes back to.

A state is a tree of dicts and lists whose leaves are tensors and plain values. Live trees refer
to the tensors of the run; snapshots hold copies of them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nanguard.errors import SnapshotError
from nanguard.numerics import all_finite, is_float, local

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
