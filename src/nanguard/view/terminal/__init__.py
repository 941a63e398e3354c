"""Runs as they are watched in a terminal: files are followed, judged and drawn."""
