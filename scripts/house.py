"""Draws docs/house.svg, and writes the tables of rooms and notes in docs/architecture.md: python scripts/house.py.

All of it is read from the code: which rooms there are and in what order from `ROOMS` in tests/test_rooms.py, the arrows
from what the files import, what a room owns and its words from the docstring of its folder, the notes from docstrings.
Invariant: what is drawn depends on nothing else, so that a test can hold the files to the code.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "onefold"
TABLE = next((ROOT / "tests").rglob("test_rooms.py"))
sys.path.append(str(TABLE.parent))

from test_rooms import ROOMS, SOURCES, imports, module_at, room_of  # noqa: E402

SVG, PAGE = ROOT / "docs" / "house.svg", ROOT / "docs" / "architecture.md"
ROOF = "roof"
_WIDE, _TALL, _GAP_X, _GAP_Y, _LANE, _MARGIN = 214, 62, 22, 34, 26, 16
_LETTERS = 36
"""How many letters of a box's small text one line takes."""

Graph = Mapping[str, Sequence[str]]


# --- what the code says


def docstring_of(room: str) -> str:
    """What a room's folder, or the file that is a room by itself, says of it."""
    path = PACKAGE if room == ROOF else PACKAGE / room.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def owns(room: str) -> str:
    """The first sentence of a room's docstring, without what only names it."""
    if room == ROOF:  # its docstring is what users see
        return "the public names"
    sentence = re.split(r"\.(?:\s|$)", " ".join(docstring_of(room).split()), maxsplit=1)[0]
    return re.sub(r"^(The rooms? of ([^:]+: )?|Owns )", "", sentence)


def shown(room: str) -> str:
    """What a room is called in pictures and tables: its folder."""
    return "import onefold" if room == ROOF else room.replace(".", "/")


def words(room: str) -> list[str]:
    """The words that a room's docstring explains."""
    return re.findall(r"\*([^*]+)\*", " ".join(docstring_of(room).partition("Words:")[2].split()))


def graph() -> dict[str, list[str]]:
    """The rooms that each room imports, in the order of the table."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in (module_at(path) for path in SOURCES if path.name != "__main__.py"):  # which is the command's
        names = (name.removeprefix("onefold").lstrip(".") for _, name in imports(module) if is_ours(name))
        found[module.room].update(room for name in names if (room := room_of(name)) != module.room)
    order = list(ROOMS)
    return {room: sorted(below, key=order.index) for room, below in found.items()}


def is_ours(name: str) -> bool:
    """Whether a module is one of the package."""
    return name.partition(".")[0] == "onefold"


def reduced(rooms: Graph) -> dict[str, list[str]]:
    """`rooms` without arrows that others stand for: what a room reaches through another is not drawn."""

    reach: dict[str, set[str]] = {}
    for room, below in rooms.items():  # in the order of the table: rooms below come first
        reach[room] = set(below).union(*(reach[each] for each in below))
    return {
        room: [each for each in below if not any(each in reach[other] for other in below)]
        for room, below in rooms.items()
    }


def levels(rooms: Graph) -> dict[str, int]:
    """How many rooms a room stands on, at most, one above the other. Rooms without any arrow have no level."""
    drawn = {room for room, below in rooms.items() if below}.union(*rooms.values())
    level: dict[str, int] = {}
    for room, below in rooms.items():
        if room in drawn:
            level[room] = 1 + max((level[each] for each in below), default=-1)
    return level


def notes() -> dict[str, list[str]]:
    """The names of the essays that each file's docstring holds, by path below the package."""
    found = {}
    for path in SOURCES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if titles := re.findall(r"^\[Note: ([^\]]+)\]$", text, re.MULTILINE):
            found[path.relative_to(PACKAGE).as_posix()] = titles
    return found


# --- the picture


@dataclass(slots=True, eq=False)
class Spot:
    """A room's box, or where an arrow passes a level between two rooms; `x` is its middle."""

    room: str | None
    level: int
    x: float = 0.0
    above: "list[Spot]" = field(default_factory=list)
    below: "list[Spot]" = field(default_factory=list)

    @property
    def width(self) -> int:
        return _LANE if self.room is None else _WIDE + _GAP_X


def spots(rooms: Graph) -> list[list[Spot]]:
    """The boxes of each level, the lowest first, tied by their arrows; an arrow has a spot on each level it passes."""
    level_of = levels(rooms)
    rows: list[list[Spot]] = [[] for _ in range(1 + max(level_of.values()))]
    boxes = {room: Spot(room, level) for room, level in level_of.items()}
    for box in boxes.values():
        rows[box.level].append(box)
    for room, box in boxes.items():
        for other in rooms[room]:
            upper = box
            for level in range(box.level - 1, boxes[other].level, -1):
                passing = Spot(None, level)
                rows[level].append(passing)
                tie(upper, passing)
                upper = passing
            tie(upper, boxes[other])
    return rows


def tie(upper: Spot, lower: Spot) -> None:
    """An arrow, or a part of one, from `upper` to `lower`."""
    upper.below.append(lower)
    lower.above.append(upper)


def mean(spots_there: Sequence[Spot], otherwise: float) -> float:
    """The middle of some spots."""
    return sum(spot.x for spot in spots_there) / len(spots_there) if spots_there else otherwise


def wanted(spot: Spot) -> float:
    """Where a spot is best: in the middle of those it is tied to; where an arrow passes, rather straight on."""
    tied = [*spot.above, *spot.below]
    straight = [each for each in tied if each.room is None] if spot.room is None else []
    return mean([*tied, *straight * 3], spot.x)


def arrange(rows: list[list[Spot]]) -> None:
    """Order each level so that few arrows cross, and put every spot near those it is tied to."""
    for row in rows:
        for place, spot in enumerate(row):
            spot.x = place
    best = (crossings(rows), [list(row) for row in rows])
    for sweep in range(24):
        for row in rows if sweep % 2 else reversed(rows):
            row.sort(key=lambda spot: mean(spot.below if sweep % 2 else spot.above, spot.x))
            for place, spot in enumerate(row):
                spot.x = place
        if (count := crossings(rows)) < best[0]:
            best = (count, [list(row) for row in rows])
    rows[:] = best[1]
    for row in rows:
        spread(row, [place * _LANE for place in range(len(row))])
    for _ in range(60):
        for row in (*rows, *reversed(rows)):
            spread(row, [wanted(spot) for spot in row])


def crossings(rows: Sequence[Sequence[Spot]]) -> int:
    """How many pairs of arrows between two levels cross."""
    count = 0
    for row in rows:
        lines = [(spot.x, lower.x) for spot in row for lower in spot.below]
        count += sum((a - c) * (b - d) < 0 for place, (a, b) in enumerate(lines) for c, d in lines[:place])
    return count


def spread(row: Sequence[Spot], places: Sequence[float]) -> None:
    """Put the spots of a level where they are wanted, as far as they leave each other room (least squares)."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (left.width + right.width) / 2)
    blocks: list[tuple[float, int]] = []  # (where the first of neighbours that touch would be, how many they are)
    for place, offset in zip(places, offsets, strict=True):
        block = (place - offset, 1)
        while blocks and blocks[-1][0] > block[0]:
            (x, count), (other, more) = blocks.pop(), block
            block = ((x * count + other * more) / (count + more), count + more)
        blocks.append(block)
    firsts = [x for x, count in blocks for _ in range(count)]
    for spot, first, offset in zip(row, firsts, offsets, strict=True):
        spot.x = first + offset


def draw(rooms: Graph) -> str:
    """The picture of rooms and their arrows."""
    rows = spots(rooms)
    arrange(rows)
    every = [spot for row in rows for spot in row]
    shift = _MARGIN - min(spot.x - spot.width / 2 for spot in every)
    for spot in every:
        spot.x += shift
    width = max(spot.x + spot.width / 2 for spot in every) + _MARGIN
    height = top(0, len(rows)) + _TALL + 2 * _MARGIN + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="sans-serif">',
        "<title>The rooms of Onefold, and what they import</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0.8 L8,4 L0,7.2 z" fill="#4a6f8a"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        *(line for spot in every if spot.room is not None for line in arrows(spot, len(rows))),
        *(line for spot in every if spot.room is not None for line in box(spot, spot.room, len(rows))),
        f'<text x="{_MARGIN}" y="{height - _MARGIN}" font-size="11" fill="#555555">An arrow: imports. What a room '
        "reaches through another has no arrow of its own.</text>",
    ]
    return "\n".join([*lines, "</svg>", ""])


def top(level: int, num_levels: int) -> int:
    """The upper edge of a level's boxes."""
    return _MARGIN + (num_levels - 1 - level) * (_TALL + _GAP_Y)


def box(spot: Spot, room: str, num_levels: int) -> Iterator[str]:
    """A room's rectangle, name, and what it owns."""
    left, y = spot.x - _WIDE / 2, top(spot.level, num_levels)
    fill = "#f2e3d0" if room == ROOF else "#f7f7f5"
    yield (
        f'<rect x="{left:.1f}" y="{y}" width="{_WIDE}" height="{_TALL}" rx="5" fill="{fill}" stroke="#8a8a85"/>'
        f'<text x="{spot.x:.1f}" y="{y + 16}" text-anchor="middle" font-size="14" font-weight="bold">'
        f"{shown(room)}</text>"
    )
    text = wrap(owns(room).replace("`", ""), _LETTERS)
    text = [*text[:2], f"{text[2]} ..."] if len(text) > 3 else text
    for place, line in enumerate(text):
        yield (
            f'<text x="{spot.x:.1f}" y="{y + 30 + 13 * place}" text-anchor="middle" font-size="10.5" '
            f'fill="#333333">{escape(line)}</text>'
        )


def port(spot: Spot, others: Iterable[Spot], other: Spot) -> float:
    """Where at the edge of a box the arrow to or from `other` is, so that arrows do not lie on each other."""
    if spot.room is None:
        return spot.x
    row = sorted(others, key=lambda each: each.x)
    step = min(30.0, (_WIDE - 40) / max(1, len(row) - 1))
    return spot.x + (row.index(other) - (len(row) - 1) / 2) * step


def arrows(spot: Spot, num_levels: int) -> Iterator[str]:
    """A line for each arrow that begins at a box."""
    for lower in spot.below:
        x, y = port(spot, spot.below, lower), top(spot.level, num_levels) + _TALL
        path, upper = f"M{x:.1f},{y}", spot
        while True:
            end, goal = port(lower, lower.above, upper), top(lower.level, num_levels)
            path += f" C{x:.1f},{y + _GAP_Y * 0.6:.0f} {end:.1f},{goal - _GAP_Y * 0.6:.0f} {end:.1f},{goal}"
            if lower.room is not None:
                break
            path += f" V{goal + _TALL}"
            x, y, upper, lower = end, goal + _TALL, lower, lower.below[0]
        yield f'<path d="{path}" fill="none" stroke="#4a6f8a" stroke-width="1.2" marker-end="url(#tip)"/>'


# --- the page


def room_rows() -> str:
    """The table of rooms, the highest first."""
    there = levels(graph())
    rows = [
        f"| `{shown(room)}` | {owns(room)} | {', '.join(words(room))} |\n" for room in reversed(ROOMS) if room in there
    ]
    return "| room | owns | words |\n|---|---|---|\n" + "".join(rows)


def note_rows() -> str:
    """The list of notes, by file."""
    return "".join(f"- `{path}`: {', '.join(titles)}\n" for path, titles in sorted(notes().items()))


def page(text: str) -> str:
    """`text` with what is between its marks written anew."""
    for name, rows in (("rooms", room_rows()), ("notes", note_rows())):
        mark, end = f"<!-- {name}: scripts/house.py -->\n", "<!-- end -->"
        before, _, rest = text.partition(mark)
        text = f"{before}{mark}\n{rows}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    SVG.write_text(draw(reduced(graph())), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
