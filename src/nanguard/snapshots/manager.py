"""Takes snapshots when they are due, trusts them when they are proven good, and goes back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import SnapshotError
from nanguard.numerics import all_finite
from nanguard.snapshots.disk import DiskSnapshots, remove_leftovers
from nanguard.snapshots.training_state import MemorySnapshots, OptimizerPart, Slot, bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nanguard.settings import Settings
    from nanguard.snapshots.sharded import ShardedSnapshots, ShardRanks
    from nanguard.snapshots.training_state import Snapshot, TrainingState


# The part that says where in the run a state belongs; a rollback leaves it as it is.
GUARD = "guard"


class Recovery:
    """The last good state of a run and the ways back to it.

    Attributes:
        memory: The snapshots in memory.
        disk: The snapshots on disk that the first rank writes; None without a run folder.
        sharded: Those that all ranks write together; None unless the model is sharded.

    Args:
        state: What a snapshot holds.
        settings: When one is taken.
        folder: Where they are written; None for memory only.
        ranks: The ranks.
        sharded: Whether all ranks write together.
        on_failure: Called with what could not be written.
        before_finish: Called before a snapshot on disk counts: what belongs to it has to be there.
    """

    def __init__(
        self,
        state: TrainingState,
        settings: Settings,
        *,
        folder: Path | None,
        ranks: ShardRanks,
        sharded: bool,
        on_failure: Callable[[str], None],
        before_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._settings = settings
        self._on_failure = on_failure
        self._room = 0
        self._told = False
        self._ranks = ranks
        self._size = -1
        self._slots = 2 if folder is None or sharded or not settings.disk_every else 3
        self.memory = MemorySnapshots(
            slots=self._slots,
            copied_at_once=("buffers", "scaler"),
            floats=state.floats,
            agree=ranks.any,
        )
        self.disk: DiskSnapshots | None = None
        self.sharded: ShardedSnapshots | None = None
        if folder is None or not settings.disk_every:
            return
        if ranks.first:
            remove_leftovers(folder)
        keep = settings.keep
        if sharded:
            from nanguard.snapshots.sharded import ShardedSnapshots

            self.sharded = ShardedSnapshots(
                folder, keep=keep, ranks=ranks, on_failure=on_failure, before_finish=before_finish
            )
        else:
            self.disk = DiskSnapshots(
                folder, keep=keep, on_failure=on_failure, before_finish=before_finish
            )

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a good snapshot in memory."""
        return self.memory.last_good is not None

    def wants_first(self) -> bool:
        """Returns whether snapshots are taken and there is none yet of the model as it is now."""
        if not self._settings.snapshot_every:
            return False
        size = sum(part.size() for part in self._optimizers.values())
        if size != self._size:
            # Parameters came or went, so what was taken before is of another model.
            self._size = size
            self.memory.forget()
        return self.memory.last_good is None

    def is_due_in_memory(self, update: int) -> bool:
        """Returns whether a snapshot is due after a number of updates."""
        every = self._settings.snapshot_every
        return bool(every) and update % every == 0

    def is_due_on_disk(self, update: int) -> bool:
        """Returns whether that snapshot is to be written to disk."""
        on_disk = self.disk is not None or self.sharded is not None
        return on_disk and update > 0 and update % self._settings.disk_every == 0

    def is_ready(self, update: int) -> bool:
        """Returns whether a snapshot can be taken now; says so if not."""
        if not self._enough_memory():
            return False
        if not self.memory.has_room:
            self._miss(update)
        return self.memory.has_room

    def take(self, update: int, step: int, bad: Tensor, *, on_disk: bool) -> Snapshot:
        """Starts a snapshot of the run as it is now; there must be room for it."""
        return self.memory.take(self._state.tree(), update, step, bad, on_disk=on_disk)

    def settle(self, snapshot: Snapshot, *, good: bool) -> bool:
        """Ends a snapshot whose step is now known; returns whether it is good."""
        if not self.memory.settle(snapshot, good=good):
            return False
        writes = snapshot.on_disk and self._ranks.first
        if writes and self.disk is not None and not self.disk.write_later(snapshot):
            self._miss(snapshot.update)
        return True

    def finite_buffers(self) -> dict[str, Tensor]:
        """Returns the live buffers, by name, that must stay finite."""
        return self._state.finite_buffers()

    @property
    def _optimizers(self) -> dict[str, OptimizerPart]:
        parts = self._state.parts.items()
        return {name: part for name, part in parts if isinstance(part, OptimizerPart)}

    def _miss(self, update: int) -> None:
        self._on_failure(
            f"the snapshot after update {update}: the one before it is still being written; "
            "raise disk_every"
        )

    def write_together(self, update: int, step: int, guard: dict[str, Any], bad: Tensor) -> bool:
        """Writes the run as it is now; all ranks call it at the same step, which must be good.

        Args:
            update: How many updates the run has seen.
            step: The step that came last.
            guard: The state of the guard.
            bad: Whether the state is known to be bad.

        Returns:
            Whether the state was finite, so that it could be written.
        """
        assert self.sharded is not None  # noqa: S101 - the caller has looked
        tree = {**self._state.tree(), GUARD: guard}
        if bool(self.memory.flag(tree, bad)):
            return False
        self.sharded.write(tree, self._sharded_parts(), update=update, step=step)
        return True

    def _sharded_parts(self) -> list[str]:
        names = ("parameters", "buffers", "ema")
        return [n for n in self._state.parts if n in names or n.startswith("optimizer-")]

    def roll_back(self) -> int:
        """Puts the run back to the last good snapshot; returns its number of updates."""
        snapshot = self.memory.last_good
        if snapshot is None:
            raise SnapshotError(
                "there is no good snapshot to roll back to.",
                where="rolling back",
                do="Set snapshot_every, so that snapshots are taken.",
            )
        snapshot.wait()
        self._state.load(snapshot.tree, without=(GUARD,))
        return snapshot.update

    def resume(self) -> dict[str, Any] | None:
        """Loads the last good snapshot on disk; returns its manifest, None if there is none."""
        manifest, error = None, None
        try:
            manifest = self._load_last_good()
        except SnapshotError as failed:
            error = failed
        answers = self._ranks.gather((None if manifest is None else manifest["update"], error))
        errors = [failed for _, failed in answers if failed is not None]
        if errors:
            raise errors[0]
        if len({update for update, _ in answers}) > 1:
            raise misfit(f"the ranks found those of updates {[update for update, _ in answers]}")
        return manifest

    def _load_last_good(self) -> dict[str, Any] | None:
        if self.disk is not None:
            return self.disk.load_last_good(self._use)
        if self.sharded is None:
            return None
        parameters = {name: part.parameters() for name, part in self._optimizers.items()}
        return self.sharded.load_last_good(self._state.tree, parameters, self._use)

    def _use(self, tree: dict[str, Any]) -> None:
        """Continues from a state; if that fails half-way, everything is as it was."""
        before = Slot().copy({n: t for n, t in self._state.tree().items() if n != GUARD})
        try:
            self._refuse_non_finite(tree)
            self._state.load(tree, without=(GUARD,))
            # What was finite in the file may not be so in a narrower type.
            self._refuse_non_finite(self._state.tree())
            self._state.parts[GUARD].load_state_dict(tree[GUARD])
        except SnapshotError:
            self._state.load(before, without=(GUARD,))
            raise
        except Exception as error:  # the file may be a stranger's
            self._state.load(before, without=(GUARD,))
            raise misfit(f"{type(error).__name__}: {error}") from error

    def _refuse_non_finite(self, tree: dict[str, Any]) -> None:
        for path, tensor in self._state.floats(tree).items():
            if not all_finite([tensor]):
                raise misfit(f"{path} is not finite")
        for name in self._optimizers:
            for path, number in _numbers_in(tree[name]["param_groups"], name):
                if not math.isfinite(number):
                    raise misfit(f"{path} is {number}")

    def close(self) -> None:
        """Waits for what is being written."""
        if self.disk is not None:
            self.disk.close()

    def _enough_memory(self) -> bool:
        size = bytes_of(self._state.tree())
        if size <= self._room:
            return True
        free = _free_memory()
        if free is None or self._slots * size < 0.8 * free + self._slots * self._room:
            self._room = size
            return True
        if not self._told:
            self._told = True
            self._on_failure(
                f"snapshots: they need {self._slots * size / 2**30:.1f} GiB of host memory and "
                f"{free / 2**30:.1f} GiB are free"
            )
        return False


def _numbers_in(tree: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(tree, float):
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _numbers_in(value, f"{path}/{key}")


def misfit(why: str) -> SnapshotError:
    """Returns the error for a state that cannot be continued from."""
    return SnapshotError(
        f"the snapshot cannot be used: {why}.",
        where="resuming",
        do="Resume with the model, optimizer and schedulers that the run was started with, from "
        "a folder that all ranks see, or start in a new one.",
    )


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
