"""Writes a run to where its people already look: TensorBoard, W&B, Trackio, MLflow."""

from nanguard.trackers.choosing import TRACK, TRACK_DIR, check_names, trackers_for
from nanguard.trackers.writing import Trackers

__all__ = ["TRACK", "TRACK_DIR", "Trackers", "check_names", "trackers_for"]
