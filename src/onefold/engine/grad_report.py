"""Owns what a rank tells of its gradients at a step: one value that packs and unpacks itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct

_NUMBERS = Struct("<IIQ?IId")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """What one rank tells the others before gradients are used. A mask has one bit for each trained parameter of the
    model, in the order of `Reducer.all_states`, or for each unit that is reduced."""

    num_reduced: int
    """Times that units were reduced since the last report."""
    num_failed: int
    """Backward passes that an exception ended since then."""
    settings: int
    """What is to be done with the gradients, in one number that must be equal on all ranks."""
    is_order_stale: bool
    """Whether this rank uses units in another order than the one they are gathered in."""
    order: tuple[int, int]
    """Digests of the units that this rank used since the last report: in their order, and whatever the order."""
    squares: float
    """The sum of the squares of this rank's range of the mean, where sums travel with reports; else 0."""
    given: int
    """Mask of parameters to whose gradient this rank gave."""
    kept: int
    """Mask of parameters of which a mean lies here that the caller could have thrown away."""
    cleared: int
    """Mask of parameters of which a mean was thrown away here."""
    pending: int
    """Mask of units of which something is not reduced yet."""

    @staticmethod
    def num_bytes(num_params: int, num_units: int) -> int:
        """Bytes of a packed report."""
        return _NUMBERS.size + 3 * _bytes_for(num_params) + _bytes_for(num_units)

    def pack(self, num_params: int, num_units: int) -> bytes:
        masks = [(self.given, num_params), (self.kept, num_params), (self.cleared, num_params)]
        masks.append((self.pending, num_units))
        numbers = (self.num_reduced, self.num_failed, self.settings, self.is_order_stale, *self.order, self.squares)
        return _NUMBERS.pack(*numbers) + b"".join(mask.to_bytes(_bytes_for(bits), "little") for mask, bits in masks)

    @classmethod
    def unpack(cls, packed: bytes, num_params: int, num_units: int) -> "GradientReport":
        num_reduced, num_failed, settings, is_order_stale, ordered, units, squares = _NUMBERS.unpack_from(packed)
        masks, place = [], _NUMBERS.size
        for bits in (num_params, num_params, num_params, num_units):
            masks.append(int.from_bytes(packed[place : place + _bytes_for(bits)], "little"))
            place += _bytes_for(bits)
        given, kept, cleared, pending = masks
        return cls(
            num_reduced=num_reduced,
            num_failed=num_failed,
            settings=settings,
            is_order_stale=is_order_stale,
            order=(ordered, units),
            squares=squares,
            given=given,
            kept=kept,
            cleared=cleared,
            pending=pending,
        )


@dataclass(frozen=True, slots=True)
class Told:
    """The reports of all ranks, by rank."""

    reports: Sequence[GradientReport]

    @property
    def given(self) -> int:
        """Parameters that have a gradient on some rank."""
        return union(report.given for report in self.reports)

    @property
    def cleared(self) -> int:
        """Parameters whose mean was thrown away on some ranks, but not on all."""
        everywhere = ~0
        for report in self.reports:
            everywhere &= report.cleared
        return union(report.cleared for report in self.reports) & ~everywhere

    @property
    def torn(self) -> int:
        """Parameters whose mean some ranks threw away, and others hold on to."""
        return self.cleared & union(report.kept for report in self.reports)

    @property
    def pending(self) -> int:
        """Units of which some rank has something that is not reduced yet."""
        return union(report.pending for report in self.reports)

    @property
    def is_order_stale(self) -> bool:
        return any(report.is_order_stale for report in self.reports)


def mask_of(flags: Iterable[bool]) -> int:
    """A number whose bit `n` is the `n`-th flag."""
    mask = 0
    for place, flag in enumerate(flags):
        if flag:
            mask |= 1 << place
    return mask


def union(masks: Iterable[int]) -> int:
    """The bits that are set in any of `masks`."""
    united = 0
    for mask in masks:
        united |= mask
    return united


def places_in(mask: int) -> list[int]:
    """The bits that are set, lowest first."""
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _bytes_for(bits: int) -> int:
    return -(-bits // 8)
