"""Replays of a step: in place, from what it began with, or in a second run of the command."""
