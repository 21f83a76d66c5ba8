"""Owns names of DeepSpeed's that are there to be told no: why, and what is nearest.

They can be imported and asked about with isinstance; using one raises.
"""

from typing import Any, NoReturn

from onefold.errors import ConfigError


def refused(name: str, why: str, nearest: str) -> Any:
    """A class that raises ConfigError when it is called.

    Args:
        name: dotted, without `deepspeed.`.
        why: what Onefold does not do.
        nearest: what to use instead.
    """

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"deepspeed.{name}: {why}; nearest: {nearest}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": f"Refused: {why}.", "__module__": __name__})
