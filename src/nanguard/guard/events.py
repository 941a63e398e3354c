"""The kinds of findings a guarded run produces."""

from __future__ import annotations

from nanguard.findings import Kind, Severity

NON_FINITE_LOSS = Kind("RUN001", "non-finite-loss", Severity.ERROR)
NON_FINITE_GRADIENT = Kind("RUN002", "non-finite-gradient", Severity.ERROR)
NON_FINITE_PARAMETER = Kind("RUN003", "non-finite-parameter", Severity.ERROR)
LOSS_SPIKE = Kind("RUN004", "loss-spike", Severity.WARNING)
GRADIENT_SPIKE = Kind("RUN005", "grad-norm-spike", Severity.WARNING)
DIVERGING_LOSS = Kind("RUN006", "diverging-loss", Severity.WARNING)
FALLING_SCALE = Kind("RUN007", "falling-loss-scale", Severity.WARNING)
LR_RESTORED = Kind("RUN008", "lr-restored", Severity.INFO)
BATCH_REUSED = Kind("RUN009", "batch-changed-in-place", Severity.INFO)
BATCH_LOST = Kind("RUN010", "batch-lost", Severity.WARNING)
LOOP_LEFT = Kind("RUN011", "loop-left-early", Severity.WARNING)
UNEVEN_RANKS = Kind("RUN012", "uneven-ranks", Severity.WARNING)
LOADER_DRAWS = Kind("RUN013", "loader-draws-random-numbers", Severity.INFO)
SNAPSHOT_FAILED = Kind("RUN014", "snapshot-not-written", Severity.WARNING)
SNAPSHOT_REJECTED = Kind("RUN015", "snapshot-not-finite", Severity.WARNING)
RECORD_FAILED = Kind("RUN016", "record-not-written", Severity.WARNING)
RESUMED = Kind("RUN017", "resumed", Severity.INFO)
TRACKER_FAILED = Kind("RUN019", "tracker-not-written", Severity.WARNING)
STEP_FORGOTTEN = Kind("RUN018", "no-guard-step", Severity.WARNING)
