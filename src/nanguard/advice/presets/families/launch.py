"""The script that starts a stable run on several GPUs, for the Accelerate file beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.advice.presets import notes
from nanguard.advice.presets.writing import comment, heading, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.advice.presets.choice import Values


def script(values: Values) -> str:
    """Returns a bash script that checks, then trains under the guard."""
    return "\n".join(_lines(values)) + "\n"


def _lines(values: Values) -> Iterator[str]:
    yield "#!/usr/bin/env bash"
    header = notes.header(values, "A stable launch on several GPUs", "", "./launch.sh")
    yield from heading(header)
    yield "#"
    yield from comment("Every value can be set from outside: LEARNING_RATE=1e-5 ./launch.sh")
    yield "set -euo pipefail"
    yield 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
    for name, value, note in _variables(values):
        yield ""
        yield from comment(note)
        yield f'{name}="${{{name}:-{value}}}"'
    yield ""
    yield from comment("Faults that can be seen before the run. Remove only what you have read.")
    yield 'nanguard check "$TRAIN" "$here/accelerate.yaml"'
    yield ""
    yield from comment(
        "The names of the options are those of most training scripts for Accelerate; change them "
        "to those of yours. What you add to the command is handed on."
    )
    yield 'exec nanguard run --on-bad "$ON_BAD" -- \\'
    yield '  accelerate launch --config_file "$here/accelerate.yaml" "$TRAIN" \\'
    for name, _, _ in _variables(values):
        if name not in ("TRAIN", "ON_BAD"):
            yield f'  --{name.lower()} "${name}" \\'
    yield '  "$@"'


def _variables(values: Values) -> Iterator[tuple[str, str, str]]:
    task = values.task
    length = "NUM_TRAIN_EPOCHS" if values.by_epochs else "MAX_TRAIN_STEPS"
    warmup = "WARMUP_EPOCHS" if values.by_epochs else "LR_WARMUP_STEPS"
    save = "SAVE_EVERY_EPOCHS" if values.by_epochs else "CHECKPOINTING_STEPS"
    again = "Detection is on: a step whose loss or gradient is not finite is not made, on any rank."
    yield "TRAIN", "train.py", "The training script."
    yield "ON_BAD", values.on_bad, f"{again} skip goes on, rollback goes back, stop ends the run."
    yield "LEARNING_RATE", number(values.lr), notes.rate(values)
    yield "LR_SCHEDULER", "cosine", notes.schedule()
    yield warmup, str(values.warmup), notes.warmup(values)
    yield "MAX_GRAD_NORM", str(values.clip), notes.clip(values)
    yield "ADAM_WEIGHT_DECAY", number(task.weight_decay), notes.decay(values)
    yield "ADAM_EPSILON", number(1e-8), notes.eps(values)
    if task.smoothing is not None:
        yield "LABEL_SMOOTHING", str(task.smoothing), notes.SMOOTHING
    yield length, str(task.length), notes.length(values)
    yield "TRAIN_BATCH_SIZE", str(task.batch), notes.BATCH
    yield "GRADIENT_ACCUMULATION_STEPS", str(values.accumulation), notes.accumulation(values)
    yield save, str(values.save), notes.save(values)
    yield "SEED", "42", notes.SEED
