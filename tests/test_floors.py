"""Promise: the floors hold. A module imports only from modules below it, and each outside thing has one door.

Each check is shown samples that it must refuse: a floor that nothing can break is not held.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onefold"

# Lowest first; within a row, a module may import those before it. A folder counts as one module.
FLOORS = (
    ("numbers", ("errors", "plan", "layout", "dtypes", "mix", "budget")),
    ("bytes", ("labels", "replace", "tensorfiles", "calls", "native", "streams", "buffer")),
    (
        "wire",
        ("conversation", "refreshes", "groups", "sums", "comm", "alone", "over", "mesh", "pools", "inbox", "peers"),
    ),
    ("tiers", ("cores", "worker", "pages", "tier", "disk")),
    (
        "state",
        (
            "meeting",
            "released",
            "localsum",
            "gradients",
            "schedule",
            "flat",
            "unit",
            "bound",
            "slots",
            "reducer",
            "saved",
            "running",
            "runtime",
            "hooks",
        ),
    ),
    ("update", ("kernels", "rules", "fused", "elementwise", "scaler", "update", "session", "optimizer", "optimizers")),
    (
        "face",
        (
            "tensor",
            "discover",
            "agree",
            "meta",
            "nursery",
            "fraction",
            "hostfit",
            "keep",
            "gather",
            "build",
            "access",
            "ema",
            "shard",
            "naming",
            "checkpoint",
            "export",
            "pretrained",
        ),
    ),
    ("launch", ("affinity", "interfaces", "start_rank", "failure", "ending", "launch")),
    ("machines", ("hostfile", "variables", "answer", "reach", "nodes", "attempts", "schedulers")),
    (
        "tools",
        (
            "planner",
            "probe",
            "options",
            "request",
            "report",
            "importing",
            "deepspeed",
            "commands",
            "cli",
            "testing",
            "__main__",
        ),
    ),
    ("roof", ("__init__",)),
)
ORDER = [module for _, row in FLOORS for module in row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """An outside thing, by its qualified names and its methods, and the modules that may touch it."""

    names: tuple[str, ...]
    methods: tuple[str, ...] = ()
    modules: tuple[str, ...]

    def leads_to(self, name: str) -> bool:
        return any(name == outside or name.startswith(f"{outside}.") for outside in self.names)


DOORS = (
    # The launcher starts torchrun, the report asks which backends there are: neither communicates. The facade hands
    # torch.distributed on to scripts that know it by DeepSpeed's name.
    Door(
        names=("torch.distributed",),
        modules=(
            *("comm", "conversation", "groups", "pools", "tensor", "shard", "testing", "checkpoint"),
            *("launch", "report", "deepspeed"),
        ),
    ),
    Door(
        names=(
            *("torch.Stream", "torch.Event", "torch.cuda.streams", "torch.cuda.graphs"),
            *("torch.cuda.Stream", "torch.cuda.ExternalStream", "torch.cuda.Event", "torch.cuda.StreamContext"),
            *("torch.cuda.stream", "torch.cuda.set_stream", "torch.cuda.current_stream", "torch.cuda.default_stream"),
            *("torch.accelerator.current_stream", "torch.accelerator.set_stream"),
        ),
        methods=("record_stream", "record_event", "wait_stream", "wait_event"),
        modules=("streams",),
    ),
    # A rank asks the kernel to end it with its launcher; it cannot import native.py for that.
    Door(names=("ctypes", "_ctypes", "cffi"), modules=("native", "replace", "start_rank")),
    # What starts processes: the launcher, a rank's first moment, and the harness that tests run ranks with.
    Door(names=("os.environ", "os.environb", "os.getenv", "os.putenv"), modules=("launch", "start_rank", "testing")),
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
    """The text of a module, and the place in the table that it takes."""

    place: str
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


def check_place(module: Module) -> list[str]:
    if module.place in ORDER:
        return []
    return [f"{module.place} has no place in the table of floors: give it one in FLOORS, next to what it works with"]


def check_imports_go_down(module: Module) -> list[str]:
    below = ORDER[: ORDER.index(module.place)] if module.place in ORDER else ()
    complaints = []
    for line, name in imports(module):
        package, _, other = name.partition(".")
        other = other.partition(".")[0]
        if not package:
            complaints.append(f"line {line}: relative import of {name.strip('.')}; write onefold.<module>")
        elif package == "onefold" and other not in (*below, module.place):
            complaints.append(f"line {line}: {name} is not below {module.place} in the table of floors")
    return complaints


def check_doors(module: Module) -> list[str]:
    shut = [door for door in DOORS if module.place not in door.modules]
    complaints = [
        f"line {line}: {name} is for {', '.join(door.modules)} only"
        for line, name in uses(module)
        for door in shut
        if door.leads_to(name)
    ]
    methods = {method: door for door in shut for method in door.methods}
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in methods:
            complaints.append(f"line {node.lineno}: .{node.attr} is for {', '.join(methods[node.attr].modules)} only")
    return complaints


def check_no_stage(module: Module) -> list[str]:
    if module.place in MAY_SAY_STAGE:
        return []
    lines = enumerate(module.source.splitlines(), start=1)
    return [
        f"line {number}: a decision is made once, by the plan; say what it decided"
        for number, line in lines
        if STAGE.search(line)
    ]


def check_one_rank_is_no_case(module: Module) -> list[str]:
    if module.place in MAY_COUNT_RANKS:
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
    check_place,
    check_imports_go_down,
    check_doors,
    check_no_stage,
    check_one_rank_is_no_case,
    check_asserts_have_no_effect,
)


def place_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_floors_hold(check, path):
    assert check(Module(place=place_of(path), source=path.read_text(encoding="utf-8"))) == []


def test_every_source_file_is_seen():
    assert {path.name for path in SOURCES} >= {"__init__.py", "errors.py", "plan.py", "layout.py", "dtypes.py"}


def test_no_place_is_given_twice():
    assert len(ORDER) == len(set(ORDER))


REFUSED = [
    (check_place, "brand_new", ""),
    (check_imports_go_down, "errors", "from onefold.plan import Plan"),
    (check_imports_go_down, "plan", "import onefold.layout"),
    (check_imports_go_down, "comm", "from onefold import tier"),
    (check_imports_go_down, "buffer", "def late():\n    import onefold.comm as wire"),
    (check_imports_go_down, "kernels", "from onefold.rules import AdamW"),
    (check_imports_go_down, "shard", "if TYPE_CHECKING:\n    from onefold.testing import RankPool"),
    (check_imports_go_down, "cli", "from onefold.brand_new import Thing"),
    (check_imports_go_down, "brand_new", "from onefold.cli import main"),
    (check_imports_go_down, "cli", "from onefold import ZERO_3"),
    (check_imports_go_down, "cli", "import onefold"),
    (check_imports_go_down, "cli", "from onefold.__init__ import ZERO_3"),
    (check_imports_go_down, "unit", "from . import plan"),
    (check_imports_go_down, "unit", "from .plan import Plan"),
    (check_doors, "unit", "import torch.distributed as dist"),
    (check_doors, "unit", "from torch.distributed.tensor import DTensor"),
    (check_doors, "unit", "from torch import distributed"),
    (check_doors, "unit", "import torch as t\nt.distributed.barrier()"),
    (check_doors, "comm", "import torch\nside = torch.cuda.Stream()"),
    (check_doors, "comm", "from torch.cuda import Event"),
    (check_doors, "comm", "from torch import cuda\nwith cuda.stream(side):\n    pass"),
    (check_doors, "unit", "flat.record_stream(side)"),
    (check_doors, "disk", "import ctypes"),
    (check_doors, "disk", "from ctypes import CDLL"),
    (check_doors, "shard", "import os\nrank = os.environ['RANK']"),
    (check_doors, "shard", "from os import getenv"),
    (check_doors, "shard", "import os as system\nsystem.getenv('RANK')"),
    (check_no_stage, "shard", "if plan.stage == 3:\n    pass"),
    (check_no_stage, "shard", '"""Stages 1 and 2."""'),
    (check_no_stage, "shard", "zero_stage = 3"),
    (check_one_rank_is_no_case, "comm", "# when world_size == 1"),
    (check_one_rank_is_no_case, "comm", "if self.world_size > 1:\n    pass"),
    (check_one_rank_is_no_case, "comm", "if 1 == num_ranks:\n    pass"),
    (check_one_rank_is_no_case, "comm", "if 2 <= get_world_size(group):\n    pass"),
    (check_one_rank_is_no_case, "comm", "if layout.num_shards < 2:\n    pass"),
    (check_asserts_have_no_effect, "disk", "assert ticket.wait() == count"),
    (check_asserts_have_no_effect, "disk", "assert not (left := queue)"),
    (check_asserts_have_no_effect, "disk", "async def f():\n    assert await ready"),
    (check_asserts_have_no_effect, "disk", "assert free.pop() is not None, 'empty'"),
    (check_asserts_have_no_effect, "disk", "assert bool(flat.zero_())"),
    (check_asserts_have_no_effect, "disk", "assert optimizer_step(model)"),
]


@pytest.mark.parametrize(("check", "place", "source"), REFUSED)
def test_what_breaks_a_floor_is_refused(check, place, source):
    assert len(check(Module(place=place, source=source))) >= 1


ACCEPTED = [
    ("budget", "from onefold.layout import Layout"),
    ("kernels", "from onefold.kernels.adamw import update"),
    ("tier", "from onefold import comm\nfrom onefold.streams import Ticket"),
    ("__init__", "from onefold.shard import shard\nfrom onefold.cli import main"),
    ("comm", "import torch.distributed as dist\ndist.all_reduce(flat)"),
    ("streams", "import torch\nside = torch.cuda.Stream()\nside.wait_stream(torch.cuda.current_stream())"),
    ("native", "import ctypes"),
    ("launch", "import os\nrank = os.environ['RANK']"),
    ("unit", "import os\nimport torch\nos.path.join(a, b)\ntorch.cuda.is_available()"),
    ("unit", "distributed = environ = 1"),
    ("plan", "# ZeRO stage 3"),
    ("disk", "# the staging buffer is staged; a backstage pass"),
    ("comm", "if num_ranks < 1 or rank == 1 or len(shape) == 1:\n    pass"),
    ("disk", "assert ticket.done and len(queue) == 1 and all(isinstance(t, Ticket) for t in queue)"),
]


@pytest.mark.parametrize(("place", "source"), ACCEPTED)
def test_what_keeps_the_floors_is_accepted(place, source):
    assert [complaint for check in CHECKS for complaint in check(Module(place=place, source=source))] == []


def test_every_check_has_refused_something():
    assert {check for check, _, _ in REFUSED} == set(CHECKS)


@pytest.mark.parametrize(("door", "name"), [(door, name) for door in DOORS for name in door.names])
def test_every_name_behind_a_door_is_refused(door, name):
    base, _, last = name.rpartition(".")
    source = f"from {base} import {last}" if base else f"import {last}"
    assert len(check_doors(Module(place="errors", source=source))) == 1
    assert all(check_doors(Module(place=place, source=source)) == [] for place in door.modules)


@pytest.mark.parametrize(("door", "method"), [(door, method) for door in DOORS for method in door.methods])
def test_every_method_behind_a_door_is_refused(door, method):
    source = f"thing.{method}(other)"
    assert len(check_doors(Module(place="errors", source=source))) == 1
    assert all(check_doors(Module(place=place, source=source)) == [] for place in door.modules)
