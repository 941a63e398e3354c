"""Writes a run to where its people already look: TensorBoard, W&B, Trackio, MLflow."""

from nanguard.trackers.choosing import TRACK, TRACK_DIR, be_silent, check_names, trackers_for
from nanguard.trackers.writing import Trackers

__all__ = ["TRACK", "TRACK_DIR", "Trackers", "be_silent", "check_names", "trackers_for"]
