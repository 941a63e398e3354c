"""Configurations of every family as rules read them."""
