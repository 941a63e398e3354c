"""Puts files together into runs: a file, those beside it that it needs, and defaults lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from nanguard.check.config.document import ConfigTree, facts_of, is_training
from nanguard.check.config.families import Family, FileFacts, composes, family_of
from nanguard.check.config.keys import (
    TRANSPARENT,
    intended,
    normal,
    role,
    role_of,
    setting_for,
    words,
)
from nanguard.check.config.run_config import (
    Misspelling,
    Repeated,
    RunConfig,
    Setting,
    TrainingStage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nanguard.check.config.document import Document, Leaf, Section
    from nanguard.check.config.key_usage import Usage
    from nanguard.check.config.node import KeyedNode, Node

_NEAR = 2


def referred(path: str, references: list[str], candidates: list[str]) -> str | None:
    """Returns the candidate that a run's file names; None if it names none of them.

    Args:
        path: The run's file.
        references: The names it gives.
        candidates: The files there are.
    """
    for reference in references:
        wanted = PurePath(reference.replace("\\", "/"))
        named = [c for c in candidates if PurePath(c).name == wanted.name]
        if named:
            return min(named, key=lambda candidate: _steps(path, candidate))
    return None


def beside(path: str, candidates: list[str], runs: list[str]) -> str | None:
    """Returns the one candidate that lies nearest to a run's file.

    Where several lie equally near nothing says which one is meant. The same holds where the
    candidate lies among many runs, as in a folder of examples.

    Args:
        path: The run's file.
        candidates: The files there are.
        runs: The files of all runs.
    """
    if not candidates:
        return None
    steps = {candidate: _steps(path, candidate) for candidate in candidates}
    nearest = min(steps.values())
    found = [candidate for candidate, count in steps.items() if count == nearest]
    if len(found) != 1 or nearest > _NEAR or len(candidates) > 2 or len(runs) > 4:
        return None
    return found[0]


def _steps(path: str, other: str) -> int:
    """Returns how many folders lie on the way from one file to another."""
    here, there = PurePath(path).parent.parts, PurePath(other).parent.parts
    common = 0
    while common < min(len(here), len(there)) and here[common] == there[common]:
        common += 1
    return len(here) + len(there) - 2 * common


_MAX_PARTS = 50


def composed(documents: Sequence[Document]) -> tuple[list[ConfigTree], set[str]]:
    """Returns a tree for each document, with what its defaults list names put in.

    Only files given together are looked at; nothing is opened.

    Returns:
        The trees, and the files that are part of another.
    """
    files = {_name(document.path): document for document in documents}
    trees: list[ConfigTree] = []
    taken: set[str] = set()
    for document in documents:
        for root in document.roots:
            attached = list(_attached(root, document, files))
            parts = tuple((group, tree) for group, tree in attached if tree is not None)
            taken |= {tree.document.path for _, tree in parts}
            trees.append(ConfigTree(root, document, parts, _own_first(attached)))
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
) -> Iterator[tuple[tuple[str, ...], ConfigTree | None]]:
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
            yield group, ConfigTree(found.roots[0], found)


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


def _own_first(attached: list[tuple[tuple[str, ...], ConfigTree | None]]) -> int:
    """Returns how many parts come before the file's own entries; all where nothing is said."""
    at = next((at for at, (_, tree) in enumerate(attached) if tree is None), len(attached))
    return sum(tree is not None for _, tree in attached[:at])


def _name(path: str) -> str:
    pure = PurePath(path)
    return str(pure.with_suffix("")) if pure.suffix in (".yaml", ".yml") else str(pure)


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


_LANGUAGE = (
    r"llama|qwen|mistral|mixtral|gemma|falcon|deepseek|starcoder|codegen|(?<![a-z])gpt|bloom"
    r"|(?<![a-z])opt-\d|(?<![a-z])phi-?\d|pythia|internlm|baichuan|chatglm|(?<![a-z])yi-\d|olmo"
    r"|(?<![a-z])llm(?![a-z])|vicuna|alpaca|hymba|cohere|smollm|granite|megatron"
)
_SIGNS: dict[str, re.Pattern[str]] = {
    trait: re.compile(pattern)
    for trait, pattern in {
        "recurrent": r"(?<![a-z])(?:bi)?lstm|(?<![a-z])(?:bi)?gru(?![a-z])|(?<![a-z])c?rnn(?![a-z])"
        r"|tacotron|seq2seq|deepspeech|(?<![a-z])rnnt",
        "language": _LANGUAGE,
        "transformer": _LANGUAGE + r"|bert|electra|deberta|(?<![a-z])m?t5|flan|bart(?![a-z])"
        r"|(?<![a-z])vit(?![a-z])|deit|swin|transformer|conformer|(?<![eun])dit(?![a-z])"
        r"|n_heads?\b|num_heads|attention_heads|wav2vec|whisper|hubert"
        r"|(?<![a-z])attn|beit(?![a-z])|(?<![a-z])mae(?![a-z])|detr(?![a-z])|evoformer",
        "t5": r"(?<![a-z])(?:m|by|flan-?)?t5",
        "diffusion": r"diffusion|ddpm|ddim|(?<![eun])dit(?![a-z])|noise_sched"
        r"|(?<![a-z]_)(?<![a-z])timesteps|train_timesteps|diffusion_steps"
        r"|sdxl|(?<![a-z])flux|latent_diff|beta_schedule|denois|controlnet"
        r"|score_model|pred_(?:x0|noise)",
        "reinforcement": r"(?<![a-z])ppo|(?<![a-z])a2c|(?<![a-z])a3c|dqn|(?<![a-z])sac(?![a-z])"
        r"|(?<![a-z])td3|(?<![a-z])ddpg|gae_lambda|n_timesteps|n_envs|replay_buffer|trpo|dreamer"
        r"|impala|num_envs|mlppolicy|cnnpolicy|exploration_",
        "adversarial": r"generator|discriminator|(?<![a-z])[a-z]{0,7}gan(?![a-z])|adversarial"
        r"|hifigan",
        "graph": r"(?<![a-z])gcn|(?<![a-z])gat(?![a-z])|(?<![a-z])gnn|graphsage"
        r"|(?<![a-z])gin(?![a-z])"
        r"|cora(?![a-z])|pubmed|ogbn",
        "field": r"(?<![a-z])nerf|splatting|instant-?ngp|hash_?grid|tensorf|(?<![a-z])sdf",
        "adapter": r"(?<![a-z])(?:q|ada|dy)?lora|(?<![a-z])dora(?![a-z])|(?<![a-z])peft"
        r"|adapter|(?<![a-z])ia3",
        "prompt": r"prompt_tuning|prefix_tuning|p_tuning|ptuning|virtual_tokens|textual_inversion"
        r"|prefix_tokens|soft_prompt",
        "tuned": r"finetun|fine-tun|fine_tun|instruct|(?<![a-z])sft|(?<![a-z])dpo|(?<![a-z])grpo"
        r"|model_name_or_path|base_model|pretrained_model|from_pretrained|torchtune|dreambooth",
        "convolution": r"resnet|efficientnet|vgg|convnext|mobilenet|(?<![a-z])yolo|densenet|regnet",
        "vision": r"(?<![a-z])vit|swin|deit|beit|(?<![a-z])mae(?![a-z])|image|img_|resolution",
        "distillation": r"distil",
        "quantised": r"load_in_4bit|load_in_8bit|qlora|quantiz|bnb_4bit",
        "noam": r"noam",
    }.items()
}
_BILLIONS = re.compile(r"(?<![a-z\d.])(\d{1,3}(?:[._]\d+)?)\s?b(?![a-z0-9])")
_MILLIONS = re.compile(r"(?<![a-z\d.])[1-4]?\d{2}\s?m(?![a-z0-9])")
_MODEL_WIDTH = frozenset(
    ["hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "hidden_dim", "dim"]
)
_OFF = (None, False, "", "none", "null", "false", 0)


def read_traits(leaves: Iterable[Leaf]) -> frozenset[str]:
    """Returns what is being trained, in words such as ``transformer`` or ``adapter``."""
    found: set[str] = set()
    words: set[str] = set()
    for leaf in leaves:
        if role(leaf.sections) == "aside":
            continue
        value = leaf.node.value if leaf.node.kind == "scalar" else "list"
        if value in _OFF and not isinstance(value, float):
            continue  # a thing that is switched off or left empty says nothing
        words.update(leaf.sections)
        words.add(leaf.key)
        if isinstance(value, str) and len(value) <= 200 and role(leaf.sections) != "data":
            words.add(value.lower())
        if isinstance(value, (int, float)) and leaf.key in _MODEL_WIDTH and value >= 2048:
            found.add("large")
        if leaf.key == "pretrained" and value:
            found.add("tuned")
    text = "\n".join(sorted(words))
    found.update(trait for trait, sign in _SIGNS.items() if sign.search(text))
    if any(float(size.replace("_", ".")) >= 1 for size in _BILLIONS.findall(text)):
        found.add("large")
    elif _MILLIONS.search(text):
        found.add("small")
    return frozenset(found)


_MAX_STAGES = 50
_USERS = ("plain", "hydra", "yacs")  # families of files that programs of users read
_FILE_KEYS = frozenset(("config_file", "config_path", "config", "path", "file"))
_MAX_SPELLED = 2000  # keys of a file written by hand


@dataclass(frozen=True, slots=True, eq=False)
class RunPart:
    """A file, or one of several documents in it, with what it was found to be.

    Attributes:
        tree: Its root, with what was composed into it.
        leaves: Its leaves.
        sections: Its sections.
        facts: What its family was told by.
        family: Its family.
    """

    tree: ConfigTree
    leaves: list[Leaf]
    sections: list[Section]
    facts: FileFacts
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


def _part(tree: ConfigTree) -> RunPart:
    leaves, sections = tree.read()
    facts = facts_of(leaves, sections)
    return RunPart(tree, leaves, sections, facts, family_of(facts))


def _companions(
    part: RunPart, aside: list[RunPart], runs: list[str], usage: Usage
) -> list[RunPart]:
    """Returns the files that a launcher or DeepSpeed reads for a run.

    They are named in the run's own file, in the one that the launcher reads, or in the command
    that starts the run; else the one that lies beside it is taken.
    """
    found: list[RunPart] = []
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


def _references(part: RunPart) -> list[str]:
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


def _run(part: RunPart, others: list[RunPart], reported: set[str], usage: Usage) -> RunConfig:
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


def _stages(part: RunPart, others: list[RunPart], usage: Usage) -> Iterator[TrainingStage]:
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
        yield TrainingStage(scope, levels, part.family, traits, partial, usage)


def _visible(leaf: Leaf, scope: Scope, scopes: set[Scope]) -> bool:
    """Returns whether a leaf is not in a part beside this one."""
    inner = [leaf.path[:length] for length in range(1, len(leaf.path))]
    return all(path not in scopes or path == scope[: len(path)] for path in inner)


def _setting(leaf: Leaf, part: RunPart) -> Setting | None:
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


def _has_reader(part: RunPart) -> bool:
    """Returns whether a program that is known reads a file, and not one of the user's."""
    at_root = part.family.at_root
    return part.family.name not in _USERS and (at_root is None or at_root(part.facts))


def _is_closed(part: RunPart) -> bool:
    """Returns whether the keys at a file's root go to a parser that knows all of them."""
    return part.family.closed and (part.family.at_root is None or part.family.at_root(part.facts))


def _repeated(part: RunPart) -> Iterator[Repeated]:
    seen: set[int] = set()
    for section in part.sections:
        if id(section.node) in seen:
            continue
        seen.add(id(section.node))
        first: dict[str, KeyedNode] = {}
        for entry in section.node.entries:
            if entry.repeats and entry.key in first:
                dotted = ".".join((*section.path, entry.key))
                yield Repeated(first[entry.key], entry, dotted, section.node, section.document)
            if not entry.merged:
                first[entry.key] = entry


def _misspelled(part: RunPart, usage: Usage) -> Iterator[Misspelling]:
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
