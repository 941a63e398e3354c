"""Hydra's defaults lists, composed from the files that lie in the group folders."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from nanguard.check.config.leaves import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.config.document import Document
    from nanguard.check.config.node import Node

_MAX_PARTS = 50


def composed(documents: Sequence[Document]) -> tuple[list[Tree], set[str]]:
    """Returns a tree for each document, with what its defaults list names put in.

    Only files given together are looked at; nothing is opened.

    Returns:
        The trees, and the files that are part of another.
    """
    files = {_name(document.path): document for document in documents}
    trees: list[Tree] = []
    taken: set[str] = set()
    for document in documents:
        for root in document.roots:
            attached = list(_attached(root, document, files))
            parts = tuple((group, tree) for group, tree in attached if tree is not None)
            taken |= {tree.document.path for _, tree in parts}
            trees.append(Tree(root, document, parts, _own_first(attached)))
    return trees, taken


def group_files(documents: Sequence[Document]) -> frozenset[str]:
    """Returns the files that lie in a folder which a defaults list names as a group.

    Hydra may be told to take them on the command line, whatever the list itself takes.
    """
    folders = {
        PurePath(document.path).parent.joinpath(*group)
        for document in documents
        for root in document.roots
        for group, _ in _defaults(root)
        if group
    }
    return frozenset(d.path for d in documents if PurePath(d.path).parent in folders)


def _attached(
    root: Node, document: Document, files: dict[str, Document]
) -> Iterator[tuple[tuple[str, ...], Tree | None]]:
    """Yields what a defaults list names; None for the file's own entries."""
    folder = PurePath(document.path).parent
    for group, option in list(_defaults(root))[:_MAX_PARTS]:
        if option == "_self_":
            yield group, None
            continue
        found = files.get(_name(str(folder.joinpath(*group, option))))
        if found is None or found is document or not found.roots:
            continue
        if found.roots[0].kind == "mapping":
            yield group, Tree(found.roots[0], found)


def _defaults(root: Node) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the group and the option of each entry in a defaults list."""
    listed = root.get("defaults") if root.kind == "mapping" else None
    if listed is None or listed.kind != "sequence":
        return
    for item in listed.items:
        if item.kind == "scalar" and isinstance(item.value, str):
            *group, option = item.value.strip("/").split("/")
            yield tuple(group), option
        for entry in item.entries:
            name = entry.key.removeprefix("override ").split("@")[0].strip("/ ")
            if isinstance(entry.node.value, str) and name:
                yield tuple(name.split("/")), entry.node.value


def _own_first(attached: list[tuple[tuple[str, ...], Tree | None]]) -> int:
    """Returns how many parts come before the file's own entries; all where nothing is said."""
    at = next((at for at, (_, tree) in enumerate(attached) if tree is None), len(attached))
    return sum(tree is not None for _, tree in attached[:at])


def _name(path: str) -> str:
    pure = PurePath(path)
    return str(pure.with_suffix("")) if pure.suffix in (".yaml", ".yml") else str(pure)
