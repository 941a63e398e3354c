"""Damaged and hostile files for ``nanguard``: made, checked, compared with other readers."""
