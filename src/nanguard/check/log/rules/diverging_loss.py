"""LOG005: a training loss that gives back what it had gained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import (
    LogRule,
    drift_of,
    explosion_of,
    is_game,
    main_losses,
    moved_before,
    place,
    training_losses,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log
    from nanguard.findings import Finding


def _turning(epochs: int, turn: int) -> str:
    """Returns a history whose loss falls, and rises from an epoch on."""
    rows = [
        2.0 * 0.9**n if n < turn else 2.0 * 0.9**turn + 0.3 * (n - turn + 1) for n in range(epochs)
    ]
    return "epoch,train_loss\n" + "".join(f"{n},{loss:.4f}\n" for n, loss in enumerate(rows, 1))


class DivergingLoss(LogRule):
    """The training loss rises steadily and gives back most of what it had gained.

    Why it breaks a run: a loss that climbs for long ends in Inf, or in a model worse than an
    untrained one. The usual reasons are a learning rate that is too high for this phase, and Adam
    moments that no longer fit the gradients.

    Go back to the checkpoint with the lowest loss and halve the learning rate. Losses that play
    against each other (GANs, reinforcement learning) may rise: they are only reported when they
    multiply up to the end of the log. Validation losses are left alone.
    """

    code = "LOG005"
    name = "diverging-loss"
    severity = Severity.WARNING
    seen_in = "https://github.com/keras-team/keras/issues/21"
    examples = (
        Passes(_turning(24, 24), "history.csv"),
        Fails(_turning(24, 12), file="history.csv"),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields one finding for the first training loss that diverges."""
        game = is_game(source)
        for series in training_losses(source) if game else main_losses(source):
            found = explosion_of(series) if game else drift_of(series)
            if found is None:
                continue
            point, message = found
            moved = moved_before(source, series, point)
            more = f"; before, {' and '.join(moved)}" if moved else ""
            yield self.at(source, series, point, f"since {place(point)}, {message}{more}")
            return
