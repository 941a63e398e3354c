"""A configuration file as it was written: its settings in order; whether it is about training."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, NamedTuple

from nanguard.check.config.families import Family, FileFacts, family_of
from nanguard.check.config.keys import normal, role, setting_for, words
from nanguard.check.config.node import MAX_CHARACTERS, Node
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nanguard.check.config.node import KeyedNode
    from nanguard.source.text import Text

Format = Literal["yaml", "json", "toml"]
_ENDINGS: dict[str, Format] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".jsonc": "json",
    ".toml": "toml",
}


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A configuration file.

    Attributes:
        text: What it holds.
        format: The language it is written in.
        roots: The root of each document in it; more than one only in YAML.
    """

    text: Text
    format: Format
    roots: tuple[Node, ...]

    @property
    def path(self) -> str:
        """The file, as the user named it."""
        return self.text.path


def read_document(text: Text) -> Document:
    """Reads a configuration file.

    The language is told by the ending of the name, and by the text where the ending says nothing.

    Raises:
        SourceError: The text is broken, too large, or nested too deep.
    """
    if len(text.content) > MAX_CHARACTERS:
        raise SourceError(
            f"the file has {len(text.content)} characters; "
            f"configurations have at most {MAX_CHARACTERS}",
            where=text.path,
            do="Leave it out: it is not a training configuration.",
        )
    kind = _ENDINGS.get(PurePath(text.path).suffix.lower()) or _by_content(text.content)
    return Document(text, kind, tuple(_reader(kind)(text)))


def looks_like_training(document: Document) -> bool:
    """Returns whether a file configures a training run, judged by what it holds."""
    trees = (ConfigTree(root, document) for root in document.roots if root.kind == "mapping")
    return any(is_training(facts_of(*tree.read())) for tree in trees)


def _by_content(content: str) -> Format:
    return "json" if content.lstrip("\ufeff \t\r\n")[:1] in ("{", "[") else "yaml"


def _reader(kind: Format) -> Callable[[Text], list[Node]]:
    if kind == "json":
        from nanguard.check.config.json_reader import read_json

        return read_json
    if kind == "toml":
        from nanguard.check.config.toml_reader import read_toml

        return read_toml
    from nanguard.check.config.yaml_reader import read_yaml

    return read_yaml


MAX_LEAVES = 10_000
MAX_TIMES = 100  # that a value named in several places is looked at
MAX_NESTING = 40
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z0-9_.\[\]-]+)\s*\}")


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """An entry that holds a value, not a section.

    Attributes:
        path: The keys from the root, the entry's own last.
        sections: The keys around it in normal form.
        key: Its own key in normal form.
        entry: The entry.
        node: The value that counts.
        parent: The mapping it stands in.
        document: The file.
        home: The file the value that counts stands in.
    """

    path: tuple[str, ...]
    sections: tuple[str, ...]
    key: str
    entry: KeyedNode
    node: Node
    parent: Node
    document: Document
    home: Document


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """A mapping, and the way to it.

    Attributes:
        path: The keys from the root.
        node: The mapping.
        document: The file.
    """

    path: tuple[str, ...]
    node: Node
    document: Document


@dataclass(frozen=True, slots=True, eq=False)
class ConfigTree:
    """A document's root, with what was composed into it from other files.

    Attributes:
        root: The root.
        document: The file it stands in.
        attached: Other files' roots, each with the sections it goes below; what stands in several
            counts from the last.
        own_first: How many of them its own entries count over; those that follow count over it.
    """

    root: Node
    document: Document
    attached: tuple[tuple[tuple[str, ...], ConfigTree], ...] = ()
    own_first: int = 0

    def documents(self) -> Iterator[Document]:
        """Yields the files it is made of, its own first."""
        yield self.document
        for _, tree in self.attached:
            yield from tree.documents()

    def read(self) -> tuple[list[Leaf], list[Section]]:
        """Returns the leaves and the sections of all files, those of its own first."""
        leaves: dict[tuple[str, ...], Leaf] = {}
        sections: list[Section] = []
        before, after = self.attached[: self.own_first], self.attached[self.own_first :]
        for below, tree in (*reversed(after), ((), self), *reversed(before)):
            for section in _walk(tree, below):
                sections.append(section)
                for leaf in _leaves(section):
                    leaves.setdefault(leaf.path, leaf)
            if len(leaves) > MAX_LEAVES:
                break
        followed = [_follow(leaf, self) for leaf in list(leaves.values())[:MAX_LEAVES]]
        return sorted(followed, key=lambda leaf: leaf.document is not self.document), sections


def _walk(tree: ConfigTree, below: tuple[str, ...]) -> Iterator[Section]:
    """Yields sections; what contains itself, or is written once and named often, stays bounded."""
    count = 0
    times: dict[int, int] = {}
    stack = [_Step(tree.root, below, frozenset())]
    while stack and count < MAX_LEAVES:
        step = stack.pop()
        node = step.node
        times[id(node)] = times.get(id(node), 0) + 1
        if id(node) in step.inside or times[id(node)] > MAX_TIMES or len(step.path) > MAX_NESTING:
            continue
        count += 1 + len(node.entries) + len(node.items)
        inside = step.inside | {id(node)}
        if node.kind == "mapping":
            yield Section(step.path, node, tree.document)
            inner = [
                (entry.key, entry.node)
                for entry in node.effective()
                if entry.key != "defaults" or entry.node.kind == "mapping"  # a list names files
            ]
        else:
            inner = [(f"[{at}]", item) for at, item in enumerate(node.items)]
        stack += [
            _Step(member, (*step.path, name), inside)
            for name, member in reversed(inner)
            if _is_section(member)
        ]


class _Step(NamedTuple):
    """A place on the way through a tree, with the nodes it lies in."""

    node: Node
    path: tuple[str, ...]
    inside: frozenset[int]


def _leaves(section: Section) -> Iterator[Leaf]:
    names = tuple(normal(part) for part in section.path)
    file = section.document
    for entry in section.node.effective():
        if not _is_section(entry.node):
            path, key = (*section.path, entry.key), normal(entry.key)
            yield Leaf(path, names, key, entry, entry.node, section.node, file, file)


def _is_section(node: Node) -> bool:
    if node.kind == "mapping":
        return bool(node.entries)
    return node.kind == "sequence" and any(item.kind != "scalar" for item in node.items)


def _follow(leaf: Leaf, tree: ConfigTree) -> Leaf:
    """Returns the leaf with the value it refers to, as ``${a.b}`` does, where that can be found."""
    node, home = leaf.node, leaf.home
    for _ in range(8):
        found = _REFERENCE.fullmatch(node.raw.strip("'\" ")) if node.kind == "scalar" else None
        target = _find(tree, found.group(1), leaf.path) if found else None
        if target is None or target[0] is node:
            break
        node, home = target
    return leaf if node is leaf.node else replace(leaf, node=node, home=home)


def _find(tree: ConfigTree, dotted: str, path: tuple[str, ...]) -> tuple[Node, Document] | None:
    dots = len(dotted) - len(dotted.lstrip("."))
    names = [name for name in dotted.strip(".").split(".") if name]
    if dots:
        names = [*path[: max(len(path) - dots, 0)], *names]
    places = [(tree.root, names, tree.document)]
    for below, part in tree.attached:
        if tuple(names[: len(below)]) == below:
            places.append((part.root, names[len(below) :], part.document))
    for root, rest, document in places:
        node: Node | None = root
        for name in rest:
            node = node.get(name) if node is not None and node.kind == "mapping" else None
        if node is not None:
            return node, document
    return None


_CORE = frozenset(("lr", "optimizer", "other_lr"))
_SUPPORT = words(
    "max_steps max_epochs batch_size micro_batch_size global_batch_size weight_decay "
    "warmup_steps warmup_epochs warmup_ratio clip_norm clip_value scheduler fp16 bf16 "
    "precision mixed_precision amp betas accumulation eps save_steps save_epochs "
    "save_interval min_lr momentum beta1 beta2 param_dtype loss_scale"
)
# Keys at the root that say a file is something else, whatever else it holds.
_OTHER = words(
    "log_history architectures services apiversion api_version jobs weight_map added_tokens "
    "build_system dependencies devdependencies scripts repos nbformat cells tool "
    "image_processor_type feature_extractor_type tokenizer_class transformers_version "
    "best_model_checkpoint global_step openapi swagger mcpservers site_name"
)
_MEASURED = frozenset(
    ["loss", "val_loss", "train_loss", "eval_loss", "accuracy", "train_runtime", "val_acc"]
)
_ALWAYS = frozenset(("accelerate", "deepspeed", "axolotl"))


def facts_of(leaves: list[Leaf], sections: list[Section]) -> FileFacts:
    """Returns what a file's family is told by."""
    inner: dict[str, frozenset[str]] = {}
    keys: set[str] = set()
    top: frozenset[str] = frozenset()
    defaults = False
    for section in sections:
        own = frozenset(normal(entry.key) for entry in section.node.entries)
        keys |= own
        if not section.path:
            top = own
            listed = section.node.get("defaults")
            defaults = listed is not None and listed.kind == "sequence"
        elif len(section.path) == 1:
            inner[normal(section.path[0])] = own
    return FileFacts(top, frozenset(keys), inner, tuple(leaves), defaults)


def is_training(facts: FileFacts, family: Family | None = None) -> bool:
    """Returns whether a file configures a training run."""
    family = family or family_of(facts)
    if family.name in _ALWAYS:
        return True
    if facts.top & _OTHER:
        return False
    if family.name == "huggingface":
        return True
    if any(_measured(leaf) for leaf in facts.leaves):
        return False
    names = {
        setting_for(leaf.key, leaf.sections)
        for leaf in facts.leaves
        if role(leaf.sections) != "aside" and not leaf.node.entries
    }
    if names & _CORE and names & _SUPPORT:
        return True
    if len(names & _SUPPORT) >= 3 or "logits_masking" in names:
        return True
    return (family.name == "lightning" and bool(names & _SUPPORT)) or _counts_classes(facts)


def _counts_classes(facts: FileFacts) -> bool:
    places = {
        leaf.path for leaf in facts.leaves if setting_for(leaf.key, leaf.sections) == "num_labels"
    }
    return len(places) > 1 or ("nc" in facts.top and "names" in facts.keys)


def _measured(leaf: Leaf) -> bool:
    value = leaf.node.value
    return len(leaf.path) == 1 and leaf.key in _MEASURED and isinstance(value, float)
