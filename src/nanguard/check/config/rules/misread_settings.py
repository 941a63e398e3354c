"""Settings that are read in another way than they were written, or not at all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import rename, take_out
from nanguard.check.config.run_config import reads_as_text
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.document import Leaf
    from nanguard.check.config.key_usage import Usage
    from nanguard.check.config.node import Node
    from nanguard.check.config.run_config import Repeated, RunConfig, TrainingStage
    from nanguard.findings import Finding

_NAMES = (
    "name",
    "id",
    "commit",
    "sha",
    "hash",
    "tag",
    "version",
    "revision",
    "run",
    "note",
    "seed",
)


class ScientificNotationIsString(ConfigRule):
    """A number in scientific notation without a point, or without a sign, in YAML.

    Why it breaks a run: YAML 1.1, which PyYAML reads, takes ``1e-5`` and ``1.0e5`` for text; a
    number needs the point and the sign of the exponent. The optimizer then gets a string: the run
    ends with a TypeError in the best case, and compares text with numbers in the worst.

    Write ``1.0e-5``. It is an error where the project's code is seen to load the file with PyYAML
    and to compute with the value; where that was not seen, a remark. Nothing is said where
    yacs, OmegaConf, ruamel.yaml, Lightning's command line or a schema reads the file, or where the
    code itself makes a number of the text (``float(cfg["lr"])``, an option of argparse with
    ``type=float``, a field of a pydantic model).
    """

    code = "CFG004"
    name = "scientific-notation-is-string"
    severity = Severity.ERROR
    as_read = False
    seen_in = "https://github.com/hiyouga/LlamaFactory/issues/4014"
    examples = (
        Passes("lr: 1.0e-5\nepochs: 3\nsteps: !!float 1e7\n", "run.yaml"),
        Passes("optimizer: {_target_: torch.optim.AdamW, lr: 1e-5}\nepochs: 3\n", "hydra.yaml"),
        Passes('{"learning_rate": 1e-5, "epochs": 3}', "run.json"),
        Fails("lr: 1e-5  # peak\nepochs: 3\n", 1, "a.yaml", "lr: 1.0e-5  # peak\nepochs: 3\n"),
        Fails(
            "lr: 0.1\nepochs: 3\nsamples: 1.5e6\n",
            3,
            "a.yaml",
            "lr: 0.1\nepochs: 3\nsamples: 1.5e+6\n",
        ),
    )

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields one finding for each value that is meant as a number."""
        for leaf in source.leaves:
            path = leaf.document.path
            if leaf.document.format != "yaml" or path in source.turns_text_into_numbers:
                continue
            if leaf.key.split("_")[-1] in _NAMES:
                continue
            texts = [n for n in [leaf.entry.node, *leaf.entry.node.items] if reads_as_text(n)]
            if texts and not _is_made_a_number(source.usage, leaf):
                yield self._text(leaf, texts, source.usage)

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields nothing: the rule looks at whole files."""
        yield from ()

    def _text(self, leaf: Leaf, texts: list[Node], usage: Usage) -> Finding:
        raw = texts[0].raw.strip()
        line, column = leaf.document.text.position(texts[0].start)
        edits = tuple(Edit(n.start, n.end, _respelled(n.raw.strip())) for n in texts)
        loads = usage.values.loader_of(leaf.document.path) if usage.known else ""
        needs = usage.computes_with(leaf.path) if loads else ""
        seen = f": {loads} loads it with PyYAML, {needs} needs a number" if needs else ""
        return self.finding(
            f"{'.'.join(leaf.path)} is {raw}, which YAML 1.1 reads as text, not as a number{seen}",
            path=leaf.document.path,
            line=line,
            column=column,
            where=".".join(leaf.path),
            severity=None if needs else Severity.INFO,
            fixes=(
                change(f"write {edits[0].text}: a point, and a sign before the exponent", edits),
            ),
        )


def _is_made_a_number(usage: Usage, leaf: Leaf) -> bool:
    """Returns whether the project's reader or its code makes a number of a text."""
    if not usage.known:
        return False
    if usage.makes_number(leaf.key) or usage.declares_number(leaf.path):
        return True
    return bool(usage.values.converters) and not usage.values.loads


def _respelled(raw: str) -> str:
    """Returns a number as it is written, with a point, and a sign before the exponent."""
    mantissa, exponent = re.split("[eE]", raw, maxsplit=1)
    if "." not in mantissa:
        mantissa += ".0"
    elif mantissa.endswith("."):
        mantissa += "0"
    return f"{mantissa}e{exponent if exponent[0] in '-+' else '+' + exponent}"


_SILENT = "readers keep the last one and say nothing"


class DuplicateKey(ConfigRule):
    """A key that stands twice in the same mapping.

    Why it breaks a run: readers of YAML and JSON keep the last one and say nothing. Whoever changes
    the first, to lower a learning rate or to clip, sees no effect. Readers of TOML refuse the file.

    Keep one. A key that overrides one taken over by a merge (``<<``) is not concerned.
    """

    code = "CFG018"
    name = "duplicate-key"
    severity = Severity.ERROR
    as_read = False
    seen_in = "https://github.com/snowflakedb/ArcticTraining/issues/85"
    examples = (
        Passes("base: &b {lr: 1.0e-4, epochs: 3}\nlong:\n  <<: *b\n  epochs: 9\n", "a.yaml"),
        Fails(
            "lr: 1.0e-3  # old\nepochs: 3\nlr: 1.0e-4\n",
            line=3,
            file="a.yaml",
            fixed="# lr: 1.0e-3  # old\nepochs: 3\nlr: 1.0e-4\n",
        ),
        Fails(
            '{\n  "lr": 0.1,\n  "epochs": 3,\n  "lr": 0.01\n}\n',
            line=4,
            file="a.json",
            fixed='{\n  "epochs": 3,\n  "lr": 0.01\n}\n',
        ),
    )

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields one finding for each key that stands further up already."""
        for found in source.repeated:
            first, second = found.first, found.second
            column = found.document.text.position(second.start)[1]
            refused = found.document.text.path.lower().endswith(".toml")
            come = "TOML has no reader that takes it" if refused else _SILENT
            yield self.finding(
                f"{found.dotted} stands in line {first.line} already; {come}",
                path=found.document.path,
                line=second.line,
                column=column,
                where=found.dotted,
                severity=Severity.INFO if _same(found) and not refused else None,
                fixes=(
                    Fix(
                        f"take out the one in line {first.line}, which has no effect",
                        safe=True,
                        edits=take_out(found),
                        plan=("Check that the value that is left is the one that was meant.",),
                    ),
                ),
            )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields nothing: the rule looks at whole files."""
        yield from ()


def _same(found: Repeated) -> bool:
    """Returns whether both say the same, so that nothing is lost."""
    content = found.document.text.content
    first, second = found.first.node, found.second.node
    return content[first.start : first.end] == content[second.start : second.end]


class MisspelledKey(ConfigRule):
    """A key that is almost one that is known.

    Why it breaks a run: most programs take what they know from a configuration and pass over the
    rest. A misspelled ``max_grad_norm`` means no clipping, a misspelled ``mixed_precision`` means
    another precision, and nothing says so.

    Spell it as the fix does. British spelling, other words, and keys of your own are not concerned.
    """

    code = "CFG019"
    name = "misspelled-key"
    severity = Severity.WARNING
    as_read = False
    seen_in = "https://github.com/unslothai/unsloth/pull/10452"
    examples = (
        Passes("optimiser: {name: adam, lr: 1.0e-4}\nepochs: 3\npatch_size: 16\n", "a.yaml"),
        Fails(
            "learning_rate: 1.0e-4\nepochs: 3\nmax_grad_nrom: 1.0\n",
            line=3,
            file="a.yaml",
            fixed="learning_rate: 1.0e-4\nepochs: 3\nmax_grad_norm: 1.0\n",
        ),
    )

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields one finding for each key that looks like another."""
        for found in source.misspelled:
            entry = found.entry
            usage = source.usage
            unread = usage.known and not usage.reads(found.right)
            yield self.finding(
                f"{entry.key} is no key that is known; {found.right} is, and this one has no "
                f"effect",
                path=found.document.path,
                line=entry.line,
                column=found.document.text.position(entry.start)[1],
                where=found.dotted,
                severity=Severity.INFO if unread and not found.closed else None,
                fixes=(
                    change(
                        f"write {found.right}",
                        rename(found),
                        "The setting now takes effect: check that its value is the one you want.",
                        keys=True,
                    ),
                ),
            )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields nothing: the rule looks at whole files."""
        yield from ()
