"""Owns how far a key is supported, declared beside its type, and the base of all sections.

Invariant: every key has one `Support`. The translator reads `honoured` and `adapted` keys; the others say here why
nothing comes of them, or why the run is refused.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

SupportWord = Literal["honoured", "adapted", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Support:
    """How far a key is supported: what becomes of it.

    Args:
        word: the kind.
        why: what it becomes, or why nothing does.
        nearest: for a refused key, the nearest setting that works.
        harmless: values of a refused key that ask for nothing.
    """

    word: SupportWord
    why: str
    nearest: str = ""
    harmless: tuple[Any, ...] = ()


def honoured(default: Any, becomes: str) -> Any:
    """A key that means here what it means there."""
    return Field(default, json_schema_extra={"support": Support("honoured", becomes)})  # type: ignore[dict-item]


def adapted(default: Any, becomes: str) -> Any:
    """A key whose purpose is met by other means."""
    return Field(default, json_schema_extra={"support": Support("adapted", becomes)})  # type: ignore[dict-item]


def ignored(default: Any, why: str) -> Any:
    """A key that steers a mechanism which does not exist here, or that changes no numbers."""
    return Field(default, json_schema_extra={"support": Support("ignored", why)})  # type: ignore[dict-item]


def refused(default: Any, why: str, nearest: str, harmless: tuple[Any, ...] = ()) -> Any:
    """A key that asks for what Onefold does not do, unless its value is the default or one of `harmless`."""
    support = Support("refused", why, nearest, (default, *harmless))
    return Field(default, json_schema_extra={"support": support})  # type: ignore[dict-item]


class Section(BaseModel):
    """A group of keys; one that is not declared is refused.

    `aliases` maps other spellings to declared names. `default_on_auto`: "auto" means a key's default, as in DeepSpeed,
    wherever nothing else fills it in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    aliases: ClassVar[dict[str, str]] = {}
    default_on_auto: ClassVar[bool] = False


class Switched(Section):
    """A section that counts only when it is enabled, and then has `support` as a whole."""

    support: ClassVar[Support]
    enabled: bool = False


def support_of(section: type[Section], name: str) -> Support | None:
    """The support declared for the key `name` of `section`; None for a key that is a section itself."""
    extra = section.model_fields[name].json_schema_extra
    support = extra.get("support") if isinstance(extra, dict) else None
    return support if isinstance(support, Support) else None
