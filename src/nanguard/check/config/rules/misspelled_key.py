"""CFG019: a key that nobody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import rename
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import RunConfig, TrainingStage
    from nanguard.findings import Finding


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
