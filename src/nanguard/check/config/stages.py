"""Which settings of a file belong together: sections side by side are parts of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.names import TRANSPARENT, normal, role_of, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nanguard.check.config.settings import Setting

Scope = tuple[str, ...]

# Settings that a part of a run has once; two sections that both have one are two parts.
_CORE = words(
    "lr optimizer max_steps max_epochs clip_norm clip_value min_lr warmup_steps warmup_epochs "
    "warmup_ratio fp16 bf16 precision mixed_precision amp"
)
_MAKING = frozenset(("lr", "optimizer", "max_steps", "max_epochs"))


def scopes_of(settings: Iterable[tuple[Scope, Setting]]) -> dict[int, Scope]:
    """Returns the part that each setting belongs to, by the setting's identity.

    Args:
        settings: Settings with the keys that lead to them.
    """
    found: dict[int, Scope] = {}
    pending: list[tuple[int, Scope, list[tuple[Scope, Setting]]]] = [(0, (), list(settings))]
    while pending:
        depth, scope, group = pending.pop()
        children: dict[str, list[tuple[Scope, Setting]]] = {}
        for path, setting in group:
            if len(path) == depth + 1:
                found[id(setting)] = scope
            else:
                children.setdefault(path[depth], []).append((path, setting))
        apart = _apart({name: _core(members) for name, members in children.items()})
        for name, members in children.items():
            inner = members[0][0][: depth + 1] if name in apart else scope
            pending.append((depth + 1, inner, members))
    return found


def parts(scopes: Iterable[Scope], owners: set[Scope]) -> list[Scope]:
    """Returns the scopes that are judged: those without others below, and those with a rate.

    Args:
        scopes: Every scope.
        owners: Those with a learning rate of their own.
    """
    every = set(scopes)
    outer = {scope[:length] for scope in every for length in range(len(scope))}
    return sorted(scope for scope in every if scope not in outer or scope in owners) or [()]


def _core(members: Iterable[tuple[Scope, Setting]]) -> frozenset[str]:
    return frozenset(setting.name for _, setting in members) & _CORE


def _apart(children: Mapping[str, frozenset[str]]) -> set[str]:
    """Returns which of the sections side by side are parts of their own.

    Sections about different things (optimizer, trainer) are never apart, whatever both set. One
    that is about something unknown is apart from those if both have what a part is made of.
    """
    apart: set[str] = set()
    for name in frozenset().union(*children.values()):
        sharing: dict[str | None, list[str]] = {}
        for child, core in children.items():
            if name in core:
                key = normal(child)
                known = "wrapper" if key in TRANSPARENT else role_of(key)
                sharing.setdefault(known, []).append(child)
        alone = sharing.pop(None, [])
        if len(alone) > 1 or (alone and sharing and name in _MAKING):
            apart.update(alone)
        for same in sharing.values():
            if len(same) > 1 and name in _MAKING:
                apart.update(same)
    return apart
