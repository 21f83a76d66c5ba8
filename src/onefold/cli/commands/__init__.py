"""Owns the commands of `onefold`: a file each, with a function `command` that `main.py` finds."""
