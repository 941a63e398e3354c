"""Writes a run to where its people already look: TensorBoard, W&B, Trackio, MLflow."""

from nanguard.trackers.tracker import (
    TRACK,
    TRACK_DIR,
    Trackers,
    be_silent,
    check_names,
    trackers_for,
)

__all__ = ["TRACK", "TRACK_DIR", "Trackers", "be_silent", "check_names", "trackers_for"]
