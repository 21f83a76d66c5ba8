"""Owns what this process's environment says: no rank and no facade reads it elsewhere."""

import os


def environ() -> dict[str, str]:
    """The environment of this process, copied."""
    return dict(os.environ)
