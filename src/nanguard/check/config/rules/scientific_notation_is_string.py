"""CFG004: a number that YAML 1.1 reads as text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.run_config import reads_as_text
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.document import Leaf
    from nanguard.check.config.key_usage import Usage
    from nanguard.check.config.node import Node
    from nanguard.check.config.run_config import RunConfig, TrainingStage
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
