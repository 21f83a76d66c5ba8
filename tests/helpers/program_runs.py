"""Owns how a program is run: every statement by plain PyTorch and by a sharded model, and what they have compared.

Invariant: a statement is text, executed as it is printed; only what `onefold`, `model` and `optimizer` mean differs.
"""

import inspect
from textwrap import indent
from types import CodeType

import onefold
import program_model
from program_model import Net, Plain, differences, values_of, with_gradient
from programs import INSIDE_A_BLOCK, LARGE, LOOK, PARTS, TAME, Choose, Writer

PLANS = ("ZERO_0", "ZERO_1", "ZERO_2", "ZERO_3", "OFFLOAD", "OFFLOAD_3")
UNITS = ("[Block]", "[Block, torch.nn.Linear]", "[Net]", "None")
SCALED = "onefold.Precision(params=torch.float32, loss_scale=onefold.DynamicLossScale(initial=2.0**8, window=2))"


class Different(AssertionError):
    """A sharded model does what plain PyTorch does not; the message holds a program that shows it."""


def draw_options(choose: Choose) -> tuple[str, str, tuple[str, ...]]:
    """As source: arguments of `shard` after the model, options of SGD, modules that may be called by themselves."""
    plan, units, is_scaled = choose(PLANS), choose(UNITS), choose((False, False, True))
    options = [f"onefold.{plan}", f"units={units}"]
    if plan == "ZERO_3":
        options += [f"keep_bytes={choose((0, 64, 2**30))}"]
    options += choose(([], [], ["prefetch_bytes=0"], ["prefetch_bytes=50"]))
    options += [f"precision={SCALED}"] * is_scaled
    is_refused = units == "[Block]" and (is_scaled or plan.endswith("3"))  # what is inside of a unit is no entrance
    parts = PARTS if is_refused else (*PARTS, INSIDE_A_BLOCK)
    return ", ".join(options), f"lr=2**-6, momentum={choose((0.0, 0.0, 0.5))}", parts


class Program:
    """A program that is written while it runs. In one half of all programs weights and gradients are compared after
    every operation; in the others where the program reads them, since reading has sums reduced that were only added up.
    """

    def __init__(self, choose: Choose, rank: int = 0, num_ranks: int = 1) -> None:
        self.options, self.optimizer_options, parts = draw_options(choose)
        self.writer = Writer(choose, parts, num_ranks)
        self.does_look = choose((True, False))
        self.statements: list[str] = []
        self.has_failed = False
        self.num_ranks = num_ranks
        common = {name: value for name, value in vars(program_model).items() if name[0] != "_"} | {"rank": rank}
        self.plain = common | {"model": Net()}
        self.plain["optimizer"] = eval(self._optimizer("torch.optim.SGD(model.parameters()"), self.plain)
        self.plain["onefold"] = Plain(self.plain["model"], self.plain["optimizer"])
        self.sharded = common | {"onefold": onefold}
        self.sharded["model"] = eval(f"onefold.shard(Net(), {self.options})", self.sharded)
        self.sharded["optimizer"] = eval(self._optimizer("onefold.SGD(model"), self.sharded)
        self._given = set(self.sharded) | {"__builtins__"}

    def _optimizer(self, call: str) -> str:
        return f"{call}, {self.optimizer_options})"

    def operate(self, name: str) -> None:
        """Write an operation, run it and compare."""
        if any(float(param.detach().abs().max()) > LARGE for param in self.plain["model"].parameters()):
            self.writer.pending = []
            self.run(TAME)
        self.run(self.writer.write(name))
        if self.does_look:
            self.run(LOOK)

    def end(self) -> None:
        if not self.has_failed:
            self.run(LOOK)

    def run(self, statement: str) -> None:
        self.statements.append(statement)
        code = compile(statement, "the program", "exec")
        self._run(code, self.plain, RuntimeError, "plain PyTorch cannot run what was written")
        self._run(code, self.sharded, Different, "the sharded model cannot run this")
        found = differences(self._compared(self.sharded), self._compared(self.plain))
        if found:
            self.has_failed = True
            raise Different("\n".join([*found, "", self.pasteable()]))

    def _run(self, code: CodeType, names: dict, failure: type[Exception], words: str) -> None:
        try:
            exec(code, names)
        except Exception as error:
            self.has_failed = True
            raise failure(f"{words}: {type(error).__name__}: {error}\n\n{self.pasteable()}") from error

    def _compared(self, names: dict) -> dict:
        values = values_of({name: value for name, value in names.items() if name not in self._given})
        if self.num_ranks == 1:  # other ranks' gradients are not seen before ranks meet
            values["has_gradient"] = with_gradient(names["model"])
        return values

    def pasteable(self) -> str:
        """Source that shows the same without the tests; for several ranks, to be started by torchrun."""
        body = [*self.statements, "has_gradient = with_gradient(model)" if self.num_ranks == 1 else ""]
        body += ["return values_of(locals())"]
        start = ["import onefold", ""]
        if self.num_ranks > 1:
            start = [f"# torchrun --nproc-per-node {self.num_ranks}", *start, 'dist.init_process_group("gloo")']
        rank = "dist.get_rank()" if self.num_ranks > 1 else "0"
        end = [
            "plain = Net()",
            f"optimizer = {self._optimizer('torch.optim.SGD(plain.parameters()')}",
            f"want = program(Plain(plain, optimizer), plain, optimizer, {rank})",
            f"model = onefold.shard(Net(), {self.options})",
            f"got = program(onefold, model, {self._optimizer('onefold.SGD(model')}, {rank})",
            'print("\\n".join(differences(got, want)) or "no difference")',
        ]
        lines = [*start, "", "def program(onefold, model, optimizer, rank):", indent("\n".join(body), "    "), "", ""]
        return "\n".join([inspect.getsource(program_model), *lines, *end])
