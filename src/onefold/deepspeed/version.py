"""Owns the version that libraries compare: DeepSpeed's, whose names and meanings are kept here."""

__version__ = "0.19.8"
version = __version__
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
