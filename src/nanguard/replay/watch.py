"""Follows the steps of a script that knows nothing of it, and judges each of them."""

from __future__ import annotations

import contextlib
import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanguard.guard.optimizers import (
    Round,
    innermost,
    largest_rate,
    moments_of,
    parameters_of,
    state_tensors,
)
from nanguard.guard.verdicts import Symptom, kind_of
from nanguard.numerics import (
    Gradients,
    all_finite,
    holds_nan,
    holds_plus_inf,
    is_float,
    kind_in,
    norm_at_hand,
    whole,
)
from nanguard.replay.task import Loaded
from nanguard.replay.tracer.modules import all_modules
from nanguard.replay.tracer.sites import here

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.patches import FuncGradients
    from nanguard.replay.task import Curve
    from nanguard.replay.tracer.sites import Site


# Steps after which a script's buffers are looked for again, and the first steps, in which some
# modules only make theirs.
_LOOK_AGAIN = 64
_YOUNG = 4
# Losses of good steps that are remembered, and batches that a loader may prepare ahead.
_RECENT = 64
_AHEAD = 1024
# Numbers that are looked at when state is loaded: more take seconds. And how often that is done:
# some scripts hand state from one model to another in every step.
_MOST_LOADED, _LOADS = 1 << 26, 64
_PLAIN = (torch.Tensor, nn.Parameter)
# As torch has it: what a script reads goes through a function of ours.
as_number = torch._C.TensorBase.item


@dataclass
class Made:
    """An optimizer, and where the script made it."""

    optimizer: weakref.ref[Optimizer]
    site: Site | None


@dataclass(slots=True)
class StepCount:
    """How many steps an optimizer has tried."""

    optimizer: weakref.ref[Any]
    tried: int


class Watch(ABC):
    """Counts steps, collects losses and judges.

    Attributes:
        ordinal: How many steps all optimizers together have tried.
        made: The optimizers of the script.
    """

    def __init__(self) -> None:
        self.ordinal = 0
        # How many steps each optimizer has tried, by its identity.
        self._counts: dict[int, StepCount] = {}
        self.made_by: list[Made] = []
        self.losses: list[Tensor] = []
        # What backward is going back from.
        self.roots: list[Tensor] = []
        self.terms: dict[str, float] = {}
        self.backwards = 0
        # The norm of all gradients since the last backward, where the script has computed it.
        self.clipped_norm: Tensor | None = None
        # The norm that the script clips its gradients to, if it does.
        self.clip_limit: float | None = None
        # The norm of the gradients of this step, where it was looked at.
        self.grad_norm: float | None = None
        # What was clipped last: how many parameters are trained, which ones it were, and whether
        # these are all.
        self._clipped: list[int] = []
        self._clips_all = False
        self._depth = 0
        self._unscaled: Tensor | None = None
        self._scaler: Any = None
        self._is_made = False  # what a scaler was asked to do
        # Each buffer at the first look: which tensor it was, whether it held no NaN, and whether it
        # held no infinity either.
        self._baseline: dict[str, tuple[int, bool, bool]] = {}
        self.curves = Curves()
        # State that was bad when a module took it over, by its name.
        self.loaded_bad: dict[str, Loaded] = {}
        self._loads = 0
        # The losses of the last good steps.
        self.recent_losses: deque[float] = deque(maxlen=_RECENT)
        # The samples of batches that a loader has begun, in the order in which it hands them out.
        self.chosen: weakref.WeakKeyDictionary[Any, deque[list[int]]]
        self.chosen = weakref.WeakKeyDictionary()
        # Takes a data set and the samples chosen for a batch, and leaves out those known to be bad.
        self.left_out: Callable[[Any, Any], Any] | None = None
        self._models: list[nn.Module] | None = None
        self._buffers: dict[str, Tensor] | None = None
        self.round = Round()

    # What the patches tell.

    def made(self, optimizer: Optimizer) -> None:
        """Notes a new optimizer."""
        self.made_by.append(Made(weakref.ref(optimizer), here(constructs=optimizer)))
        self._models = self._buffers = None
        self._clipped = []

    def loaded(self, state: Any) -> None:
        """Notes what is bad in state that a module has taken over, where looking is cheap."""
        self._loads += 1
        if self._loads > _LOADS or not isinstance(state, Mapping):
            return
        held = [(str(name), t) for name, t in state.items() if type(t) in _PLAIN]
        floats = [(n, t) for n, t in held if is_float(t) and t.device.type == "cpu"]
        if sum(t.numel() for _, t in floats) > _MOST_LOADED:
            return
        for name, tensor in floats:
            # Some types have no arithmetic: theirs cannot be looked at, and the others can.
            with contextlib.suppress(RuntimeError):
                if not all_finite([tensor]):
                    kind = str(tensor.dtype).removeprefix("torch.")
                    infinite = bool(torch.isinf(tensor).any())
                    self.loaded_bad[name] = Loaded(kind, infinite, here())

    def scaled(self, scaler: Any, loss: Any) -> None:
        """Notes the loss before it is scaled."""
        if isinstance(loss, torch.Tensor) and scaler.is_enabled():
            self._unscaled = loss.detach()
            self._scaler = scaler

    def backward(self, call: Callable[[], Any], tensors: Any) -> Any:
        """Notes the loss, and runs backward."""
        if isinstance(tensors, torch.Tensor):
            self.roots = [tensors]
        else:
            self.roots = [root for root in tensors if isinstance(root, torch.Tensor)]
        known = self._unscaled
        self._unscaled = None
        if known is not None and known.numel() == 1:
            losses = [known]
        else:
            # What is no single number comes with a gradient of its own, and may hold infinities.
            losses = [root.detach() for root in self.roots if root.numel() == 1]
        self.losses += losses
        self.clipped_norm = None
        self.before_backward(losses)
        result = call()
        self.backwards += 1
        self.after_backward()
        self.roots = []
        return result

    def grad(self, call: Callable[[], Any], outputs: Any) -> Any:
        """Computes gradients for the script."""
        return call()

    def func_grad(self, found: FuncGradients) -> Any:
        """Returns what the script is given of what ``torch.func`` has computed for it."""
        return found.result

    def read(self, tensor: Tensor, value: float) -> None:  # noqa: B027 - most have nothing to do
        """Hears of a number that is not finite and that the script has read."""

    def step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Lets an optimizer step if all is well."""
        if self._depth:
            self._is_made = True
            return call()
        self._depth += 1
        try:
            result = self.judged_step(optimizer, call, closure)
        finally:
            self._depth -= 1
        self.end_step(optimizer)
        return result

    def scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Lets a GradScaler step. It looks at the gradients itself, but not at the loss."""
        if self._depth or not scaler.is_enabled():
            return call()
        self._depth += 1
        self._scaler, self._is_made = scaler, False
        try:
            result = self.judged_scaler_step(scaler, optimizer, call)
        finally:
            self._depth -= 1
        self.end_step(optimizer)
        return result

    def captured(self, optimizer: Optimizer) -> None:  # noqa: B027 - only the live run can do more
        """Hears of a step that a CUDA graph takes up."""

    def replayed_graph(self) -> None:  # noqa: B027
        """Hears that a CUDA graph was replayed."""

    def collective(self) -> None:  # noqa: B027
        """Hears that the script is about to do something together with other ranks."""

    def clipped(self, parameters: list[Tensor], norm: Any) -> None:
        """Notes the norm of the gradients that a script has clipped, if it is that of them all."""
        optimizers = self.optimizers()
        clipped = [len(g["params"]) for o in optimizers for g in o.param_groups]
        clipped += map(id, parameters)
        if clipped != self._clipped:
            trained = {id(p) for optimizer in optimizers for p in parameters_of([optimizer])}
            self._clipped, self._clips_all = clipped, trained <= set(map(id, parameters))
        self.clipped_norm = norm if self._clips_all and isinstance(norm, torch.Tensor) else None

    def begin_pass(self, loader: Any) -> None:  # noqa: B027 - the live run has nothing to do
        """Hears that the script is about to go over a loader."""

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Hands on a batch of a loader."""
        return draw(own)

    def choose(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Returns which samples a loader takes for its next batch, without those left out."""
        indices = draw(own)
        if self.left_out is not None:
            kept = self.left_out(own._dataset, indices)
            while kept is None:
                kept = self.left_out(own._dataset, draw(own))
            indices = kept
        ahead = self.chosen.get(own)
        if ahead is None:
            ahead = self.chosen[own] = deque(maxlen=_AHEAD)
        ahead.append(indices)
        return indices

    def indices_of(self, own: Any) -> list[int]:
        """Returns which samples are in the batch that a loader has just handed out."""
        ahead = self.chosen.get(own)
        indices = ahead.popleft() if ahead else []
        return indices if type(indices) is list and set(map(type, indices)) <= {int} else []

    # What the live run and the replay do differently.

    @abstractmethod
    def before_backward(self, losses: list[Tensor]) -> None:
        """Called before each backward."""

    @abstractmethod
    def after_backward(self) -> None:
        """Called after each backward."""

    @abstractmethod
    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Judges and makes a step."""

    @abstractmethod
    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Judges and makes the step of a GradScaler."""

    @abstractmethod
    def boundary(self) -> None:
        """Called between two steps."""

    # What both need.

    def number_of(self, optimizer: Any) -> int:
        """Returns how many steps an optimizer has tried before."""
        return self._count_of(optimizer).tried

    def _count_of(self, optimizer: Any) -> StepCount:
        count = self._counts.get(id(optimizer))
        if count is None or count.optimizer() is not optimizer:
            inner = innermost(optimizer)
            if inner is not optimizer:
                return self._count_of(inner)
            count = self._counts[id(optimizer)] = StepCount(weakref.ref(optimizer), 0)
        return count

    def set_count(self, optimizer: Any, tried: int) -> None:
        """Says how many steps an optimizer has tried."""
        self._count_of(optimizer).tried = tried

    def most_steps(self, *, default: int) -> int:
        """Returns how many steps the optimizer has tried that has tried most of them.

        Args:
            default: What to return if none has tried any.
        """
        alive = (c.tried for c in self._counts.values() if c.optimizer() is not None)
        return max(alive, default=default)

    def optimizers(self) -> list[Optimizer]:
        """Returns the optimizers that are alive."""
        return [o for made in self.made_by if (o := made.optimizer()) is not None]

    def place_of(self, optimizer: Any) -> int:
        """Returns which of the script's optimizers one is; 0 for the first."""
        known, inner = self.optimizers(), innermost(optimizer)
        return next((place for place, other in enumerate(known) if other is inner), 0)

    def models(self) -> list[nn.Module]:
        """Returns the models that are trained: those that hold what an optimizer moves."""
        if self._models is None:
            trained = {id(p) for p in parameters_of(self.optimizers())} if self.made_by else set()
            found = all_modules()
            inner = {id(child) for module in found for child in module._modules.values()}
            self._models = [
                module
                for module in found
                if id(module) not in inner
                and any(id(p) in trained or not trained for p in module.parameters())
            ]
        return self._models

    def named_parameters(self) -> dict[str, Tensor]:
        """Returns the parameters of the models, and those that only an optimizer knows.

        Those that hold no values yet are left out: some libraries call models without any first.
        """
        named: dict[str, Tensor] = {}
        for index, model in enumerate(self.models()):
            for name, parameter in model.named_parameters():
                if parameter.is_meta:
                    continue
                clash = name in named and named[name] is not parameter
                named[f"{index}.{name}" if clash else name] = parameter
        known = {id(p) for p in named.values()}
        for index, optimizer in enumerate(self.optimizers()):
            for place, tensor in enumerate(parameters_of([optimizer])):
                if id(tensor) not in known:
                    named[f"optimizer {index} parameter {place}"] = tensor
        return named

    def buffers(self) -> dict[str, Tensor]:
        """Returns the buffers of the models that can go bad."""
        return {
            name: buffer
            for model in self.models()
            for name, buffer in model.named_buffers()
            if is_float(buffer) and not buffer.is_meta
        }

    def bad_loss(self) -> Symptom | None:
        """Returns what is wrong with the losses of this step."""
        for loss in self.losses:
            if not is_good(loss):
                value = math.nan if loss.is_complex() else float(loss)
                return Symptom("loss", kind_in(loss), value, terms=self.terms)
        return None

    def verdict(self, optimizer: Optimizer) -> tuple[Symptom | None, Symptom | None]:
        """Returns what is wrong with the losses and with the gradients of a step."""
        loss, gradient = self.bad_loss(), self.bad_gradient(optimizer)
        own = self.grad_norm
        for other in self.round.others(optimizer):
            gradient = gradient or self.bad_gradient(other)
        if gradient is None:
            self.grad_norm = own
        if loss is not None and gradient is None and is_good(self.losses[-1]):
            # The script has thrown the bad one away by itself, and gone on to another batch.
            loss = None
        return loss, gradient

    def bad_end_loss(self) -> Symptom | None:
        """Returns what is wrong with a step that evaluates its loss several times.

        The point it begins with and the one it ends with count. A bad trial point in between, that
        a line search recovers from, is nobody's business.
        """
        for loss in (self.losses[:1], self.losses[-1:]):
            if loss and not all_finite(loss):
                self.losses = loss
                return self.bad_loss()
        return None

    def loss_value(self) -> float | None:
        """Returns the sum of the losses of this step."""
        values = [float(loss) for loss in self.losses if not loss.is_complex()]
        return sum(values) if values else None

    def bad_rate(self, optimizer: Optimizer) -> Symptom | None:
        """Returns what is wrong with a learning rate that an optimizer is about to apply."""
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if type(rate) is float and rate - rate == 0.0:
                continue  # every step comes here, and nearly always leaves here
            value = largest_rate([group])
            if value is None or math.isfinite(value):
                continue
            if any(p.grad is not None for p in group["params"]):
                return Symptom("learning rate", kind_of(value), self.loss_value(), self.grad_norm)
        return None

    def bad_gradient(self, optimizer: Optimizer) -> Symptom | None:
        """Returns what is wrong with the gradients of an optimizer."""
        clipped = self.clipped_norm
        if type(clipped) is torch.Tensor and clipped.is_cpu:
            self.grad_norm = as_number(clipped)
            if math.isfinite(self.grad_norm):
                return None  # nearly always
        trained = parameters_of([optimizer])
        gradients = [grad for p in trained if (grad := p.grad) is not None]
        if not gradients or gradients[0].is_meta:
            return None
        norm = None if clipped is not None else norm_at_hand(gradients)
        if norm is None:
            norm = float(whole(Gradients(trained).norm() if clipped is None else clipped))
        self.grad_norm = norm
        if math.isfinite(norm):
            return None
        grads: dict[int, Any] = {id(p): p.grad for p in trained if p.grad is not None}
        if all_finite(grads.values()):
            return None  # large numbers, whose squares are too large
        names = [
            name
            for name, p in self.named_parameters().items()
            if id(p) in grads and not all_finite([p.grad])  # type: ignore[list-item]
        ]
        first = next(g for g in grads.values() if not all_finite([g]))
        return Symptom("gradient", kind_in(first), self.loss_value(), norm, self.terms, names)

    def bad_state(self, optimizer: Optimizer) -> Symptom | None:
        """Returns what a step has made of parameters, optimizer state and buffers."""
        # What is not trained may hold what it likes, such as the -inf of a mask.
        parameters = [p for p in parameters_of([optimizer]) if p.requires_grad and not p.is_meta]
        if not all_finite(parameters):
            bad = {id(p) for p in parameters if not all_finite([p])}
            names = [name for name, p in self.named_parameters().items() if id(p) in bad]
            first = next(p for p in parameters if id(p) in bad)
            return Symptom("parameter", kind_in(first), self.loss_value(), names=names)
        state = [tensor for tensor in state_tensors([optimizer]) if not tensor.is_meta]
        if not all_finite(state):
            nan = any(holds_nan(tensor) for tensor in state)
            # A single number may be infinite on purpose, such as the best loss so far.
            if nan or not all_finite(moments_of(optimizer)):
                kind, name = "nan" if nan else "inf", type(optimizer).__name__
                return Symptom("optimizer state", kind, self.loss_value(), names=[name])
        return None

    def bad_buffers(self) -> Symptom | None:
        """Returns which buffers have gone bad since the first look."""
        # To look for buffers takes longer than to look at them, so it is done now and then.
        young = self.ordinal < _YOUNG
        if self._buffers is None or young or self.ordinal % _LOOK_AGAIN == 0:
            self._buffers = self.buffers()
            for name, buffer in self._buffers.items():
                if self._baseline.get(name, (0, True, True))[0] != id(buffer):
                    good = not _is_spoilt(buffer)
                    self._baseline[name] = (id(buffer), good, all_finite([buffer]))
        if not self._buffers or all_finite(self._buffers.values()):
            return None
        names = [
            name
            for name, buffer in self._buffers.items()
            if (self._baseline[name][1] and _is_spoilt(buffer))
            or (self._baseline[name][2] and holds_plus_inf(buffer))
        ]
        if not names:
            return None
        kind = "nan" if any(holds_nan(self._buffers[name]) for name in names) else "inf"
        return Symptom("buffer", kind, self.loss_value(), names=names)

    def bad_manual_gradient(self) -> Symptom | None:
        """Returns what is wrong with the gradients of a script that has no optimizer."""
        named = {n: p for n, p in self.named_parameters().items() if p.grad is not None}
        names = [name for name, p in named.items() if not all_finite([p.grad])]  # type: ignore[list-item]
        if not names:
            return None
        kind = kind_in(named[names[0]].grad)  # type: ignore[arg-type]
        return Symptom("gradient", kind, self.loss_value(), math.nan, self.terms, names)

    def end_manual_step(self) -> None:
        """Counts a step of a script that has no optimizer."""
        self.ordinal += 1
        self.forget_step()
        self.boundary()

    def replayable(self) -> dict[str, Any]:
        """Returns what a replay needs to go on counting."""
        keep = ("ordinal", "backwards", "_baseline", "_models", "round")
        kept = {name: vars(self)[name] for name in keep}
        kept["_counts"] = {key: replace(count) for key, count in self._counts.items()}
        kept["made_by"] = list(self.made_by)
        return kept

    def add_step(self, optimizer: Any) -> None:
        """Counts a step of an optimizer."""
        self._count_of(optimizer).tried += 1

    def end_step(self, optimizer: Any) -> None:
        """Counts a step that is over."""
        self.add_step(optimizer)
        self.ordinal += 1
        self.forget_step()
        self.boundary()

    def forget_step(self) -> None:
        """Forgets what belonged to the step that is over."""
        self.losses = []
        self.terms = {}
        self.grad_norm = None
        self._unscaled = None
        self._scaler = None


def is_good(loss: Tensor) -> bool:
    """Returns whether a loss is finite; quick where it is a single number at hand."""
    if loss.is_meta:
        return True
    if type(loss) is torch.Tensor and not loss.is_complex():
        return math.isfinite(as_number(loss))
    return all_finite([loss])


def single_number(outputs: Any) -> Tensor | None:
    """Returns the loss that gradients are computed of, if it is one number."""
    roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    single = len(roots) == 1 and isinstance(roots[0], torch.Tensor) and roots[0].numel() == 1
    return roots[0].detach() if single else None


def _is_spoilt(buffer: Tensor) -> bool:
    """Returns whether a buffer holds what nobody meant.

    An infinity may be meant, as in a mask or a running minimum, but hardly in a 16-bit type, where
    it is an overflow. A NaN never is.
    """
    half = buffer.dtype in (torch.float16, torch.bfloat16)
    return holds_nan(buffer) or (half and not all_finite([buffer]))


# Elements of a tensor, and tensors, that are looked at: scales, temperatures and biases are small.
_SMALL, _MOST_TENSORS = 1 << 12, 64
# Points of a curve that are kept; beyond that every other one goes.
_MOST_POINTS = 128


class Curves:
    """The element farthest from zero of each small parameter, over the steps of a run."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._every = 1
        self._looks = 0

    def look(self, step: int, named: Mapping[str, Tensor], *, last: bool = False) -> None:
        """Adds a point to each curve, unless there are many already.

        Args:
            step: How many steps were made.
            named: The parameters by their names; those on a device are left alone.
            last: Whether this is the end of the curves, which is always of interest.
        """
        self._looks += 1
        if self._looks % self._every and not last:
            return
        small = [(n, p) for n, p in named.items() if 0 < p.numel() <= _SMALL]
        for name, parameter in small[:_MOST_TENSORS]:
            plain = type(parameter) in (torch.Tensor, nn.Parameter)
            if not plain or parameter.device.type != "cpu" or not parameter.is_floating_point():
                continue
            # Some types know no smallest element: theirs has no curve.
            with contextlib.suppress(RuntimeError):
                low, high = (float(end) for end in parameter.detach().aminmax())
                value = low if abs(low) > abs(high) else high
                if math.isfinite(value):
                    self._points.setdefault(name, []).append((step, value))
        if max(map(len, self._points.values()), default=0) > _MOST_POINTS:
            self._every *= 2
            self._points = {name: points[::2] for name, points in self._points.items()}

    def all(self) -> dict[str, Curve]:
        """Returns the curves by the names of their parameters."""
        return {name: list(points) for name, points in self._points.items()}
