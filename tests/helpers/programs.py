"""Owns how random programs are written: statement by statement, as text, each one that plain PyTorch can run.

A `Writer` keeps what the next statement depends on: which outputs wait for a backward, which parameters are frozen.
Everything random comes from `choose`, so that Hypothesis or a seed can be behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

Choose = Callable[[Sequence[Any]], Any]

MODULES = (
    "model",
    "model.blocks",
    "model.blocks[0]",
    "model.blocks[1]",
    "model.side",
    "model.side.linear",
    "model.tied",
)
PARTS = ("model.blocks[0]", "model.blocks[1]", "model.side", "model.tied", "model.head")
INSIDE_A_BLOCK = "model.side.linear"
PARAMS = (
    "model.stem",
    "model.blocks[0].gain",
    "model.blocks[0].linear.weight",
    "model.blocks[1].linear.weight",
    "model.blocks[2].linear.bias",
    "model.side.gain",
    "model.head.weight",
    "model.tied.bias",
)
FREEZABLE = ("model", "model.stem", "model.blocks[0]", "model.blocks[2].gain", "model.side", "model.head")
VALUES = ("[[1.0, -1.0], [2.0, 1.0]]", "[[0.0, 1.0], [-1.0, 3.0]]", "[[2.0, 0.0], [1.0, -2.0]]", "[[1.0, 1.0]]")
EDITS = (
    "param.grad.mul_(2.0)",
    "param.grad.add_(1.0)",
    "param.grad.zero_()",
    "param.grad = 2 * param.grad",
    "param.grad = -param.grad",
    "param.grad = torch.full(param.shape, 2.0)",
    "param.grad = None",
)
WRITES = ("param.neg_()", "param.add_(1.0)", "param.fill_(2.0)")
LOOK = "seen = look(onefold, model)"
TAME = """\
with onefold.gathered(model, write=True), torch.no_grad():
    for param in model.parameters():
        param.copy_(param.round().remainder(3) - 1)"""
"""Small integers in place of weights that have become large."""
LARGE = 4.0

# What a sharded model does otherwise than plain PyTorch, for now. Programs leave it out until it is mended.
FREEZES_UNDER_GRAPHS = False
EDITS_COUNT_INSIDE_GATHERED = False
FAILED_BACKWARDS_KEEP_GRADIENTS = False
FAILED_BACKWARDS_END_AT_ONCE = False

MOST_USES = 6
"""Of modules in one forward: products of more would not be exact."""


@dataclass(frozen=True)
class Out:
    """An output of a forward that waits for its backward.

    Attributes:
        graph: the outputs whose graphs its own goes through, itself among them.
        calls: the source of all those forwards.
    """

    name: str
    graph: frozenset[str]
    calls: str

    @property
    def fails(self) -> bool:
        return "bomb" in self.calls or "stop when" in self.calls

    def has(self, word: str) -> bool:
        return word in self.calls


def block(head: str, body: str) -> str:
    return f"{head}:\n{indent(body, '    ')}"


def parameters_of(target: str) -> str:
    return f"[{target}]" if target in PARAMS else f"{target}.parameters()"


def forgiving(body: str) -> str:
    return f"{block('try', body)}\n{block('except Stop', 'pass')}"


OPERATIONS: dict[str, tuple[Callable[["Writer"], str], Callable[["Writer"], bool]]] = {}
"""{name: what writes the statement, whether it can be written now}"""


def operation(when: Callable[["Writer"], bool] = lambda writer: True) -> Callable[..., Any]:
    def register(method: Callable[["Writer"], str]) -> Callable[["Writer"], str]:
        OPERATIONS[method.__name__] = (method, when)
        return method

    return register


class Writer:
    """Writes one program for `num_ranks` ranks."""

    def __init__(self, choose: Choose, parts: Sequence[str], num_ranks: int = 1) -> None:
        self.choose = choose
        self.parts = parts
        self.rank = " + rank" if num_ranks > 1 else ""
        self.inputs: list[str] = []
        self.pending: list[Out] = []
        self.frozen: set[str] = set()
        self.accumulating: list[str] = []
        self._numbers: dict[str, int] = {}
        self._uses = 0

    def possible(self) -> list[str]:
        return [name for name, (_, is_possible) in OPERATIONS.items() if is_possible(self)]

    def write(self, name: str) -> str:
        return OPERATIONS[name][0](self)

    # --- parts of statements

    def fresh(self, kind: str) -> str:
        number = self._numbers[kind] = self._numbers.get(kind, -1) + 1
        return f"{kind}{number}"

    def often(self, *values: Any) -> Any:
        """One of them; the first most often."""
        return self.choose([values[0]] * len(values) + list(values[1:]))

    def some(self, values: Sequence[Any], most: int) -> list[Any]:
        chosen = [self.choose(values) for _ in range(self.choose(range(1, most + 1)))]
        return list(dict.fromkeys(chosen))

    def steps(self, depth: int = 2, is_reentrant: bool = False, last: str = "") -> str:
        found = [self.step(depth, is_reentrant) for _ in range(self.choose((1, 1, 2, 3)))]
        return ", ".join(found + [last] * bool(last))

    def step(self, depth: int, is_reentrant: bool) -> str:
        places = ["0", "1", "2", "'tied'"] + ["'side'"] * (not self.rank)
        kinds = ["use", "use", "use", "branch" if self.rank else "peek"]
        if depth and self._uses < MOST_USES:
            kinds += ["recomputed", "then", "sum", "try"] + ([] if is_reentrant else ["reentrant"])
        kind = self.choose(kinds) if self._uses < MOST_USES else "skip"
        self._uses += 1

        def inner(last: str = "") -> str:
            return self.steps(depth - 1, is_reentrant or kind == "reentrant", last)

        match kind:
            case "use":
                return self.choose(places)
            case "branch":
                return "'side' if rank else 'skip'"
            case "then":
                return f"({self.choose('012')}, {inner()})"
            case "sum":
                return f"('sum', ({inner()},), ({inner()},))"
            case "try":
                return f"('try', {inner(last=repr('stop'))})"
            case "recomputed" | "reentrant":
                return f"({kind!r}, {inner()})"
        return repr(kind)

    def source(self) -> tuple[str, str, Out | None]:
        """What makes the input of a forward, if anything does, its name, and the output that it is."""
        kind = self.often("new", "old", "out")
        if kind == "out" and self.pending:
            out = self.choose(self.pending)
            return "", out.name, out
        if kind == "old" and self.inputs:
            return "", self.choose(self.inputs), None
        name = self.fresh("x")
        self.inputs.append(name)
        return f"{name} = (torch.tensor({self.choose(VALUES)}){self.rank}).requires_grad_()\n", name, None

    def out(self, trouble: str = "") -> str:
        """The statement that makes one more output. `trouble` is a step that fails in backward."""
        first, x, before = self.source()
        self._uses = 0
        whole = f"model({x}, {self.steps()}{self.troubled(trouble)})"
        call = whole
        if self.parts and not trouble:
            part = f"{self.choose(self.parts)}({x})"
            call = self.often(whole, part, f"model.blocks[0]({x}, model.blocks[{self.choose('012')}])")
        name = self.fresh("out")
        line = f"{name} = {call}"
        wrap = self.often("", *(f"with onefold.gathered({target})" for target in ("model", "model.side")))
        graph, calls = (before.graph, before.calls) if before else (frozenset(), "")
        self.pending.append(Out(name, graph | {name}, calls + call))
        return first + (block(wrap, line) if wrap else line)

    def troubled(self, trouble: str) -> str:
        if not trouble:
            return ""
        self._uses = MOST_USES - 2
        if trouble == "stop when recording":
            return f", ('reentrant', {self.steps(0, last=repr(trouble))}), {self.steps(0)}"
        kind = self.choose(("", "'recomputed', ", "'reentrant', ", "1, "))
        return f", ({kind}{self.steps(0, last=repr(trouble))}), {self.steps(0)}" if kind else f", {trouble!r}"

    def forget(self, gone: Callable[[Out], bool]) -> None:
        self.pending = [out for out in self.pending if not gone(out)]

    def loss(self, outs: Sequence[Out]) -> str:
        factors = [self.often("", "2 * ", "4 * ") for _ in outs]
        return " + ".join(f"{factor}{out.name}.sum()" for factor, out in zip(factors, outs, strict=True))

    def backward_of(self, outs: Sequence[Out]) -> str:
        retained = self.often("", "retain_graph=True")
        fails = any(out.fails for out in outs)
        form = self.choose(("at once", "at once", "in place"))
        loss = self.loss(outs)
        lines = f"({loss}).backward({retained})"
        if form == "in place":
            lines = f"loss = {loss}\nloss *= 2\nloss.backward({retained})"
        if fails or not retained:
            used = frozenset().union(*(out.graph for out in outs))
            self.forget(lambda out: bool(used & out.graph))
        if fails:
            lines = forgiving(lines)
            before = "" if FAILED_BACKWARDS_KEEP_GRADIENTS else "optimizer.zero_grad()\n"
            after = "" if FAILED_BACKWARDS_END_AT_ONCE else f"\n{LOOK}"
            if before or after:
                return self.choose((f"{before}{lines}{after}", f"{lines}\noptimizer.zero_grad()"))
        around = self.often("", "with onefold.accumulate(model)", "with onefold.gathered(model)", "edited")
        if around == "edited":
            if not EDITS_COUNT_INSIDE_GATHERED:
                return lines
            return block("with onefold.gathered(model)", f"{self.edit_of('model')}\n{lines}")
        return block(around, lines) if around else lines

    def edit_of(self, target: str) -> str:
        return block(f"for param in {parameters_of(target)}", block("if param.grad is not None", self.choose(EDITS)))

    # --- operations

    @operation()
    def forward(self) -> str:
        return self.out()

    @operation()
    def train(self) -> str:
        """Forward and backward at once."""
        made = self.out()
        return f"{made}\n{self.backward_of(self.pending[-1:])}"

    @operation(lambda writer: bool(writer.pending))
    def backward(self) -> str:
        return self.backward_of(self.some(self.pending, most=3))

    @operation()
    def fail_in_forward(self) -> str:
        first, x, _ = self.source()
        return first + forgiving(f"model({x}, {self.steps()}{self.troubled('stop')})")

    @operation()
    def fail_in_backward(self) -> str:
        made = self.out(self.choose(("bomb", "bomb", "stop when recording")))
        return made if self.choose((True, False)) else f"{made}\n{self.backward_of(self.pending[-1:])}"

    @operation()
    def fail_in_a_context(self) -> str:
        context = self.choose(("gathered(model)", "gathered(model.side)", "accumulate(model)"))
        return forgiving(block(f"with onefold.{context}", "raise Stop"))

    @operation(lambda writer: any(not out.fails and not out.has("reentrant") for out in writer.pending))
    def grad(self) -> str:
        out = self.choose([out for out in self.pending if not out.fails and not out.has("reentrant")])
        is_frozen = {name: any(name.startswith(target) for target in self.frozen) for name in PARAMS}
        params = self.choose((0, 1)) * self.some(PARAMS, most=3)
        wanted = [self.choose(self.inputs)] + [name for name in params if not is_frozen[name]]
        retained = self.choose((True, True, False))
        if not retained:
            self.forget(lambda other: bool(out.graph & other.graph))
        options = f"retain_graph={retained}, allow_unused=True"
        line = f"found = torch.autograd.grad({self.loss([out])}, [{', '.join(wanted)}], {options})"
        return block("with onefold.gathered(model)", line) if len(wanted) > 1 else line

    @operation(lambda writer: len(writer.accumulating) < 2)
    def enter_accumulate(self) -> str:
        name = self.fresh("accumulating")
        self.accumulating.append(name)
        return f"{name} = onefold.accumulate(model)\n{name}.__enter__()"

    @operation(lambda writer: bool(writer.accumulating))
    def leave_accumulate(self) -> str:
        return f"{self.accumulating.pop()}.__exit__(None, None, None)"

    @operation()
    def edit(self) -> str:
        target = self.choose(MODULES + PARAMS)
        return block(f"with onefold.gathered({target})", self.edit_of(target))

    @operation()
    def assign(self) -> str:
        value = self.choose(("1.0", "-2.0", "3.0")) + self.rank
        return block(
            f"for param in {parameters_of(self.choose(MODULES + PARAMS))}",
            f"param.grad = torch.full(param.shape, {value})",
        )

    @operation()
    def clear(self) -> str:
        param, module = self.choose(PARAMS), self.choose(MODULES)
        ways = (
            "optimizer.zero_grad()",
            "model.zero_grad()",
            f"{module}.zero_grad()",
            f"{param}.grad = None",
            f"del {param}.grad",
            block("with onefold.gathered(model)", "optimizer.zero_grad()"),
            block(f"with onefold.gathered({param})", f"{param}.grad = None"),
        )
        return self.choose(ways)

    @operation()
    def read(self) -> str:
        target = self.choose(MODULES + PARAMS)
        part = f"seen = [(copied(param), copied(param.grad)) for param in {parameters_of(target)}]"
        ways = ("seen = look(onefold, model)", "weights = onefold.full_state_dict(model)")
        return self.choose((*ways, block(f"with onefold.gathered({target})", part)))

    @operation()
    def write_weights(self) -> str:
        target = self.choose(MODULES + PARAMS)
        lines = block(f"for param in {parameters_of(target)}", self.choose(WRITES))
        if self.often(False, True):
            lines += f"\n{self.edit_of(target)}"
        self.forget(lambda out: True)
        return block(f"with onefold.gathered({target}, write=True), torch.no_grad()", lines)

    @operation()
    def optimizer_step(self) -> str:
        self.forget(lambda out: True)
        inside = f"{self.edit_of('model')}\noptimizer.step()" if EDITS_COUNT_INSIDE_GATHERED else "optimizer.step()"
        ways = ("optimizer.step()\noptimizer.zero_grad()", block("with onefold.gathered(model)", inside))
        return self.often("optimizer.step()", *ways)

    @operation()
    def evaluate(self) -> str:
        first, x, _ = self.source()
        self._uses = 0
        mode = self.choose(("torch.no_grad()", "torch.inference_mode()"))
        call = block(f"with {mode}", f"seen = model({x}, {self.steps(is_reentrant=True)})")
        return f"{first}model.eval()\n{call}\nmodel.train()"

    @operation()
    def freeze(self) -> str:
        target = self.choose(FREEZABLE)
        self.frozen.add(target)
        self.forget(lambda out: not FREEZES_UNDER_GRAPHS or out.has("reentrant") or out.has("recomputed"))
        return f"{target}.requires_grad_(False)"

    @operation(lambda writer: bool(writer.frozen))
    def thaw(self) -> str:
        target = self.choose(sorted(self.frozen))
        self.frozen = {name for name in self.frozen if not name.startswith(target)}
        self.forget(lambda out: out.has("reentrant") or out.has("recomputed"))
        return f"{target}.requires_grad_(True)"
