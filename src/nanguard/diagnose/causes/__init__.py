"""The causes, one file each. A new file is a new cause; nothing else has to know of it."""
