"""Watches every operation of one step and finds where the first bad value came from."""
