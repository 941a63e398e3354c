"""Puts files together into runs: one file, or a run's file with those beside it that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.check.config.beside import beside, referred
from nanguard.check.config.composition import composed, group_files
from nanguard.check.config.families import Facts, Family, family_of
from nanguard.check.config.families.hydra import composes
from nanguard.check.config.keys import setting_for
from nanguard.check.config.names import normal
from nanguard.check.config.recognition import facts_of, is_training
from nanguard.check.config.run import Misspelling, Repeated, RunConfig, Stage
from nanguard.check.config.settings import Setting
from nanguard.check.config.spelling import intended
from nanguard.check.config.stages import Scope, parts, scopes_of
from nanguard.check.config.traits import read_traits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.config.document import Document
    from nanguard.check.config.leaves import Leaf, Section, Tree
    from nanguard.check.config.node import Entry
    from nanguard.check.config.usage import Usage

_MAX_STAGES = 50
_USERS = ("plain", "hydra", "yacs")  # families of files that programs of users read
_FILE_KEYS = frozenset(("config_file", "config_path", "config", "path", "file"))
_MAX_SPELLED = 2000  # keys of a file written by hand


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A file, or one of several documents in it, with what it was found to be.

    Attributes:
        tree: Its root, with what was composed into it.
        leaves: Its leaves.
        sections: Its sections.
        facts: What its family was told by.
        family: Its family.
    """

    tree: Tree
    leaves: list[Leaf]
    sections: list[Section]
    facts: Facts
    family: Family

    @property
    def path(self) -> str:
        """The file."""
        return self.tree.document.path


def read_runs(documents: Sequence[Document], usage: Usage) -> list[RunConfig]:
    """Returns the runs that files given together describe."""
    trees, taken = composed(documents)
    grouped = group_files(documents)
    read = [_part(tree) for tree in trees if tree.root.kind == "mapping"]
    chosen = [part for part in read if is_training(part.facts, part.family)]
    own = [part for part in chosen if not part.family.partial and part.path not in taken]
    aside = [part for part in chosen if part.family.partial]
    runs: list[RunConfig] = []
    reported: set[str] = set()
    for part in own:
        others = _companions(part, aside, [member.path for member in own], usage)
        runs.append(_run(part, others, reported, usage))
    runs += [_run(part, [], reported, usage) for part in aside if part.path not in reported]
    for run in runs:
        run.turns_text_into_numbers |= grouped
    return runs


def _part(tree: Tree) -> Part:
    leaves, sections = tree.read()
    facts = facts_of(leaves, sections)
    return Part(tree, leaves, sections, facts, family_of(facts))


def _companions(part: Part, aside: list[Part], runs: list[str], usage: Usage) -> list[Part]:
    """Returns the files that a launcher or DeepSpeed reads for a run.

    They are named in the run's own file, in the one that the launcher reads, or in the command
    that starts the run; else the one that lies beside it is taken.
    """
    found: list[Part] = []
    launched = [sorted(launch.files) for launch in usage.launches if launch.names(part.path)]
    for name in ("accelerate", "deepspeed"):
        candidates = {other.path: other for other in aside if other.family.name == name}
        named = [file for each in (part, *found) for file in _references(each)]
        commanded = [file for files in launched for file in files]
        path = referred(part.path, [*named, *commanded], list(candidates))
        if path is None and not (name == "deepspeed" and named) and not launched:
            path = beside(part.path, list(candidates), runs)
        if path is not None:
            found.append(candidates[path])
    return found


def _references(part: Part) -> list[str]:
    """Returns the files that a file names for DeepSpeed."""
    return [
        leaf.node.value
        for leaf in part.leaves
        if isinstance(leaf.node.value, str)
        and (
            setting_for(leaf.key, leaf.sections) == "deepspeed"
            or (leaf.sections[-1:] == ("deepspeed",) and leaf.key in _FILE_KEYS)
        )
    ]


def _run(part: Part, others: list[Part], reported: set[str], usage: Usage) -> RunConfig:
    everything = [part, *others]
    owned = {document.path for each in everything for document in each.tree.documents()}
    owned = (owned - reported) | {part.path}
    reported |= owned
    families = {each.path: each.family for each in everything}
    turning = frozenset(
        document.path
        for each in everything
        for document in each.tree.documents()
        if each.family.turns_text_into_numbers or composes(each.facts)
    )
    return RunConfig(
        documents=tuple(doc for each in everything for doc in each.tree.documents()),
        owned=frozenset(owned),
        family=part.family,
        families=families,
        stages=tuple(_stages(part, others, usage)),
        leaves=tuple(leaf for each in everything for leaf in each.leaves),
        repeated=tuple(item for each in everything for item in _repeated(each)),
        misspelled=tuple(item for each in everything for item in _misspelled(each, usage)),
        turns_text_into_numbers=turning,
        usage=usage,
        parsed=frozenset(each.path for each in everything if _has_reader(each)),
    )


def _stages(part: Part, others: list[Part], usage: Usage) -> Iterator[Stage]:
    own = [(leaf.path, setting) for leaf in part.leaves if (setting := _setting(leaf, part))]
    shared = [
        setting for other in others for leaf in other.leaves if (setting := _setting(leaf, other))
    ]
    scope_of = scopes_of(own)
    rated = {scope_of[id(setting)] for _, setting in own if setting.name == "lr"}
    merged = {section.path for section in part.sections if section.node.merged}
    scopes = parts({()} | set(scope_of.values()), rated)
    partial = frozenset(each.path for each in (part, *others) if each.family.partial)
    by_scope: dict[Scope, list[Setting]] = {(): []}
    for _, setting in own:
        by_scope.setdefault(scope_of[id(setting)], []).append(setting)
    by_scope[()] += shared
    every = set(scopes)
    chosen = [scope for scope in scopes if scope not in merged] or [()]
    for scope in chosen[:_MAX_STAGES]:
        outward = (scope[:length] for length in range(len(scope), -1, -1))
        levels = tuple(tuple(by_scope.get(level, ())) for level in outward)
        seen = [leaf for leaf in part.leaves if _visible(leaf, scope, every)]
        traits = read_traits([*seen, *(leaf for other in others for leaf in other.leaves)])
        yield Stage(scope, levels, part.family, traits, partial, usage)


def _visible(leaf: Leaf, scope: Scope, scopes: set[Scope]) -> bool:
    """Returns whether a leaf is not in a part beside this one."""
    inner = [leaf.path[:length] for length in range(1, len(leaf.path))]
    return all(path not in scopes or path == scope[: len(path)] for path in inner)


def _setting(leaf: Leaf, part: Part) -> Setting | None:
    dotted = ".".join(leaf.sections)
    if (dotted, leaf.key) in part.family.keys:
        name = part.family.keys[dotted, leaf.key]
    else:
        name = setting_for(leaf.key, leaf.sections)
    if name is None and len(part.leaves) <= _MAX_SPELLED:
        root = _at_root(leaf.sections, part.family)
        right = intended(leaf.key, part.family, root=root, closed=_is_closed(part))
        name = setting_for(right, leaf.sections) if right else None
    if name is None:
        return None
    return Setting(
        name,
        ".".join(leaf.path),
        leaf.sections,
        leaf.document,
        leaf.entry,
        leaf.node,
        leaf.parent,
        leaf.home,
    )


def _at_root(sections: tuple[str, ...], family: Family) -> bool:
    return sections == (("trainer",) if family.name == "lightning" else ())


def _has_reader(part: Part) -> bool:
    """Returns whether a program that is known reads a file, and not one of the user's."""
    at_root = part.family.at_root
    return part.family.name not in _USERS and (at_root is None or at_root(part.facts))


def _is_closed(part: Part) -> bool:
    """Returns whether the keys at a file's root go to a parser that knows all of them."""
    return part.family.closed and (part.family.at_root is None or part.family.at_root(part.facts))


def _repeated(part: Part) -> Iterator[Repeated]:
    seen: set[int] = set()
    for section in part.sections:
        if id(section.node) in seen:
            continue
        seen.add(id(section.node))
        first: dict[str, Entry] = {}
        for entry in section.node.entries:
            if entry.repeats and entry.key in first:
                dotted = ".".join((*section.path, entry.key))
                yield Repeated(first[entry.key], entry, dotted, section.node, section.document)
            if not entry.merged:
                first[entry.key] = entry


def _misspelled(part: Part, usage: Usage) -> Iterator[Misspelling]:
    seen: set[int] = set()
    closed = _is_closed(part)
    for section in part.sections:
        if id(section.node) in seen or len(part.leaves) > _MAX_SPELLED:
            continue
        seen.add(id(section.node))
        names = tuple(normal(name) for name in section.path)
        for entry in section.node.entries:
            root = _at_root(names, part.family)
            key = normal(entry.key)
            right = None if entry.merged else intended(key, part.family, root=root, closed=closed)
            if right is not None and not usage.reads(entry.key):
                dotted = ".".join((*section.path, entry.key))
                yield Misspelling(entry, right, dotted, section.document, closed and root)
