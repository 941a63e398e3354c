"""Damaged and hostile files for ``nanguard check``: made, checked, and compared with other readers."""
