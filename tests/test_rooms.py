"""Promise: the rooms hold. A folder imports only from the folders that the table below says, and each outside thing has
one door.

Each check is shown samples that it must refuse: a wall that nothing can break is not held.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onefold"

# A room, and the rooms it may import from; those may in turn stand only above. `errors` is everybody's.
BASE = ("plan", "memory", "comm")
ENGINE = (*BASE, "tiers", "engine")
STEP = (*ENGINE, "optim.kernels", "optim")
FACE = (*STEP, "system", "setup")
ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "plan": (),
    "system": (),
    "memory": ("plan",),
    "comm": ("plan", "memory"),
    "comm.copies": BASE,
    "tiers": ("plan", "memory", "system"),
    "engine": (*BASE, "tiers"),
    "optim.kernels": BASE,
    "optim": (*ENGINE, "optim.kernels"),
    "setup": (*STEP, "comm.copies", "system"),
    "files": ("plan",),
    "checkpoint": (*STEP, "files", "system"),
    "interop": (),
    "interop.huggingface": (*FACE, "files", "checkpoint"),
    "interop.imports": ("checkpoint", "files"),
    "deepspeed": (*FACE, "checkpoint", "interop.huggingface"),
    "launch": ("system",),
    "launch.cluster": ("system", "launch"),
    "cli": ("optim.kernels", "system", "interop.huggingface", "interop.imports", "deepspeed", "launch.cluster"),
    "testing": (),
    "roof": (*STEP, "setup", "checkpoint", "interop.huggingface", "cli"),
}
"""`roof` is the package itself: `import onefold` and `python -m onefold`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """An outside thing, by its qualified names and its methods, and the rooms that may touch it."""

    names: tuple[str, ...]
    methods: tuple[str, ...] = ()
    rooms: tuple[str, ...]

    def leads_to(self, name: str) -> bool:
        return any(name == outside or name.startswith(f"{outside}.") for outside in self.names)


DOORS = (
    # The launcher starts torchrun, the command line reports which backends there are: neither communicates. The
    # facade hands torch.distributed on to scripts.
    Door(
        names=("torch.distributed",),
        rooms=("comm", "comm.copies", "deepspeed", "launch", "cli", "testing"),
    ),
    Door(
        names=(
            *("torch.Stream", "torch.Event", "torch.cuda.streams", "torch.cuda.graphs"),
            *("torch.cuda.Stream", "torch.cuda.ExternalStream", "torch.cuda.Event", "torch.cuda.StreamContext"),
            *("torch.cuda.stream", "torch.cuda.set_stream", "torch.cuda.current_stream", "torch.cuda.default_stream"),
            *("torch.accelerator.current_stream", "torch.accelerator.set_stream"),
        ),
        methods=("record_stream", "record_event", "wait_stream", "wait_event"),
        rooms=("memory",),
    ),
    # Kernels; one system call that Python lacks; and a rank asks the kernel to end it with its launcher.
    Door(names=("ctypes", "_ctypes", "cffi"), rooms=("optim.kernels", "system", "launch")),
    Door(names=("os.environ", "os.environb", "os.getenv", "os.putenv"), rooms=("system", "launch", "testing")),
)

# So may the facade that speaks DeepSpeed's language; the harness counts its ranks.
MAY_SAY_STAGE, MAY_COUNT_RANKS = ("plan", "deepspeed"), ("plan", "deepspeed", "testing")
STAGE = re.compile(r"(?<![a-z])stages?(?![a-z])", re.IGNORECASE)
ONE_RANK = re.compile(r"world_size\s*==\s*1\b")
RANKS = re.compile(r"(world_size|num_ranks|num_shards)$")
# "Is there one rank, or are there more?", however it is put.
ASKS_FOR_ONE = {(ast.Eq, 1), (ast.NotEq, 1), (ast.Gt, 1), (ast.LtE, 1), (ast.Lt, 2), (ast.GtE, 2)}
MIRROR = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
EFFECT = re.compile(
    r"(^|_)(wait|step|update|pop|popitem|append|extend|insert|remove|discard|clear|setdefault|write|flush|close|start"
    r"|stop|send|recv|next|fetch|store|gather|scatter|reduce|release|synchronize|barrier|backward|allocate)$|[a-z]_$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """The text of a module, and the room it stands in."""

    room: str
    source: str

    @property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.source)))


Check = Callable[[Module], list[str]]


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, qualified name) of everything imported, also inside functions and under TYPE_CHECKING."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def uses(module: Module) -> Iterator[tuple[int, str]]:
    """(line, qualified name) of every import and every dotted name that starts from one."""
    yield from imports(module)
    local = {}  # name in this file -> qualified name
    for node in module.nodes:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if isinstance(node, ast.ImportFrom):
                local[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif alias.asname:
                local[alias.asname] = alias.name
            else:  # `import a.b` binds `a`
                root = alias.name.split(".")[0]
                local[root] = root
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in local:
                yield node.lineno, f"{local[root]}.{rest}"


def last_name(node: ast.AST) -> str:
    """`size` of `size`, `a.b.size`, `a.size()`; nothing for other expressions."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def check_room(module: Module) -> list[str]:
    if module.room in ROOMS:
        return []
    return [f"{module.room} is no room of the table: put the file into one, or give the new room a row in ROOMS"]


def room_of(name: str) -> str:
    """The room of a module below `onefold`, by its dotted name: the longest in the table that it begins with."""
    parts = name.split(".")
    found = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((room for room in found if room in ROOMS), parts[0] or "roof")


def check_imports(module: Module) -> list[str]:
    allowed = {*ROOMS.get(module.room, ()), module.room, "errors"}
    complaints = []
    for line, name in imports(module):
        package, _, other = name.partition(".")
        if not package:
            complaints.append(f"line {line}: relative import of {name.strip('.')}; write onefold.<module>")
        elif package == "onefold" and room_of(other) not in allowed:
            complaints.append(f"line {line}: {name} is in {room_of(other)}, which {module.room} does not import")
    return complaints


def check_doors(module: Module) -> list[str]:
    shut = [door for door in DOORS if module.room not in door.rooms]
    complaints = [
        f"line {line}: {name} is for {', '.join(door.rooms)} only"
        for line, name in uses(module)
        for door in shut
        if door.leads_to(name)
    ]
    methods = {method: door for door in shut for method in door.methods}
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in methods:
            complaints.append(f"line {node.lineno}: .{node.attr} is for {', '.join(methods[node.attr].rooms)} only")
    return complaints


def check_no_stage(module: Module) -> list[str]:
    if module.room in MAY_SAY_STAGE:
        return []
    lines = enumerate(module.source.splitlines(), start=1)
    return [
        f"line {number}: a decision is made once, by the plan; say what it decided"
        for number, line in lines
        if STAGE.search(line)
    ]


def check_one_rank_is_no_case(module: Module) -> list[str]:
    if module.room in MAY_COUNT_RANKS:
        return []
    found = {number for number, line in enumerate(module.source.splitlines(), start=1) if ONE_RANK.search(line)}
    for node in module.nodes:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, operator, right = node.left, type(node.ops[0]), node.comparators[0]
            if isinstance(left, ast.Constant):
                left, operator, right = right, MIRROR.get(operator, operator), left
            asks = isinstance(right, ast.Constant) and (operator, right.value) in ASKS_FOR_ONE
            if asks and RANKS.search(last_name(left)):
                found.add(node.lineno)
    return [f"line {number}: one rank is not a case; a collective over it is the identity" for number in sorted(found)]


def check_asserts_have_no_effect(module: Module) -> list[str]:
    complaints = []
    for node in module.nodes:
        for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
            effect = isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
            if effect or (isinstance(part, ast.Call) and EFFECT.search(last_name(part))):
                complaints.append(
                    f"line {node.lineno}: `python -O` drops {ast.unparse(part)}; run it before the assert"
                )
    return complaints


CHECKS: tuple[Check, ...] = (
    check_room,
    check_imports,
    check_doors,
    check_no_stage,
    check_one_rank_is_no_case,
    check_asserts_have_no_effect,
)


SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_at(path: Path) -> Module:
    *folders, file = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(folders if file.startswith("__") else [*folders, file])
    return Module(room=room_of(name), source=path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_rooms_hold(path):
    module = module_at(path)
    assert [complaint for check in CHECKS for complaint in check(module)] == []


def test_every_folder_is_a_room_and_says_what_it_owns():
    folders = {path.parent for path in SOURCES if "deepspeed" not in path.relative_to(PACKAGE).parts}
    for folder in folders:
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert docstring, f"{folder} does not say what it owns"


def test_rooms_are_in_no_circle():
    above: dict[str, set[str]] = {}  # rooms in the order of the table: each stands on those before it
    for room, below in ROOMS.items():
        assert set(below) <= above.keys(), f"{room} imports {set(below) - above.keys()}, which stand no lower"
        above[room] = set(below)


def test_every_room_of_the_table_is_there():
    assert {module_at(path).room for path in SOURCES} == set(ROOMS)


REFUSED = [
    (check_room, "brand_new", ""),
    (check_imports, "errors", "from onefold.plan.table import Plan"),
    (check_imports, "plan", "import onefold.memory.buffer"),
    (check_imports, "comm", "from onefold.comm.copies import staging"),
    (check_imports, "memory", "def late():\n    import onefold.comm.comm as wire"),
    (check_imports, "optim.kernels", "from onefold.optim.rules import AdamW"),
    (check_imports, "setup", "if TYPE_CHECKING:\n    from onefold.testing import RankPool"),
    (check_imports, "cli", "from onefold.brand_new import Thing"),
    (check_imports, "cli", "from onefold import ZERO_3"),
    (check_imports, "cli", "import onefold"),
    (check_imports, "engine", "from . import unit"),
    (check_imports, "engine", "from .unit import Unit"),
    (check_imports, "deepspeed", "from onefold.launch.launch import Node"),
    (check_doors, "engine", "import torch.distributed as dist"),
    (check_doors, "engine", "from torch.distributed.tensor import DTensor"),
    (check_doors, "engine", "from torch import distributed"),
    (check_doors, "engine", "import torch as t\nt.distributed.barrier()"),
    (check_doors, "comm", "import torch\nside = torch.cuda.Stream()"),
    (check_doors, "comm", "from torch import cuda\nwith cuda.stream(side):\n    pass"),
    (check_doors, "engine", "flat.record_stream(side)"),
    (check_doors, "tiers", "from ctypes import CDLL"),
    (check_doors, "setup", "import os\nrank = os.environ['RANK']"),
    (check_doors, "setup", "from os import getenv"),
    (check_doors, "setup", "import os as system\nsystem.getenv('RANK')"),
    (check_no_stage, "setup", "if plan.stage == 3:\n    pass"),
    (check_no_stage, "setup", '"""Stages 1 and 2."""'),
    (check_no_stage, "setup", "zero_stage = 3"),
    (check_one_rank_is_no_case, "comm", "# when world_size == 1"),
    (check_one_rank_is_no_case, "comm", "if self.world_size > 1:\n    pass"),
    (check_one_rank_is_no_case, "comm", "if 1 == num_ranks:\n    pass"),
    (check_one_rank_is_no_case, "comm", "if 2 <= get_world_size(group):\n    pass"),
    (check_one_rank_is_no_case, "comm", "if layout.num_shards < 2:\n    pass"),
    (check_asserts_have_no_effect, "tiers", "assert ticket.wait() == count"),
    (check_asserts_have_no_effect, "tiers", "assert not (left := queue)"),
    (check_asserts_have_no_effect, "tiers", "async def f():\n    assert await ready"),
    (check_asserts_have_no_effect, "tiers", "assert free.pop() is not None, 'empty'"),
    (check_asserts_have_no_effect, "tiers", "assert bool(flat.zero_())"),
]


@pytest.mark.parametrize(("check", "room", "source"), REFUSED)
def test_what_breaks_a_wall_is_refused(check, room, source):
    assert len(check(Module(room=room, source=source))) >= 1


ACCEPTED = [
    ("plan", "from onefold.plan.layout import Layout\n# ZeRO stage 3"),
    ("roof", "from onefold.setup.shard import shard\nfrom onefold.cli.main import main"),
    ("comm", "import torch.distributed as dist\ndist.all_reduce(flat)"),
    ("memory", "import torch\nside = torch.cuda.Stream()\nside.wait_stream(torch.cuda.current_stream())"),
    ("launch", "import os\nrank = os.environ['RANK']"),
    ("engine", "import os\nimport torch\nos.path.join(a, b)\ntorch.cuda.is_available()\ndistributed = environ = 1"),
    ("tiers", "# the staging buffer is staged; a backstage pass"),
    ("comm", "if num_ranks < 1 or rank == 1 or len(shape) == 1:\n    pass"),
    ("tiers", "assert ticket.done and len(queue) == 1 and all(isinstance(t, Ticket) for t in queue)"),
]


@pytest.mark.parametrize(("room", "source"), ACCEPTED)
def test_what_keeps_the_walls_is_accepted(room, source):
    assert [complaint for check in CHECKS for complaint in check(Module(room=room, source=source))] == []


def test_every_check_has_refused_something():
    assert {check for check, _, _ in REFUSED} == set(CHECKS)


@pytest.mark.parametrize(("door", "name"), [(door, name) for door in DOORS for name in door.names])
def test_every_name_behind_a_door_is_refused(door, name):
    base, _, last = name.rpartition(".")
    source = f"from {base} import {last}" if base else f"import {last}"
    assert len(check_doors(Module(room="errors", source=source))) == 1
    assert all(check_doors(Module(room=room, source=source)) == [] for room in door.rooms)


@pytest.mark.parametrize(("door", "method"), [(door, method) for door in DOORS for method in door.methods])
def test_every_method_behind_a_door_is_refused(door, method):
    source = f"thing.{method}(other)"
    assert len(check_doors(Module(room="errors", source=source))) == 1
    assert all(check_doors(Module(room=room, source=source)) == [] for room in door.rooms)
