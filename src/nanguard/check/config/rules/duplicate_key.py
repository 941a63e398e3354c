"""CFG018: a key that stands twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule
from nanguard.check.config.node import take_out
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Repeated, RunConfig, TrainingStage
    from nanguard.findings import Finding


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
