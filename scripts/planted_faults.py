"""Plants twelve faults, one at a time, in a copy of the package, and shows whether random programs find each.

    python scripts/planted_faults.py            # all: some minutes
    python scripts/planted_faults.py reuse      # those with the word in their name

Each fault is one that the state machines of gradients and units could have: the first is one that they had, and that
every test of its time passed. `tests/test_model_based.py` has to fail with each of them, and does without any.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onefold

ROOT = Path(__file__).parents[1]
TEST = "tests/test_model_based.py::test_any_program_gives_what_plain_pytorch_gives"


@dataclass(frozen=True)
class Fault:
    """One line of the package that is wrong."""

    name: str
    file: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "a use after the first forgets what the pass before it gave (reuse under a reentrant checkpoint)",
        "engine/grad_states.py",
        "param.grad = self._arrived.get(slot)\n",
        "param.grad = None\n",
    ),
    Fault(
        "a second backward replaces this rank's sum",
        "engine/grad_accumulator.py",
        "if not self.is_there:\n            self._begin(dense)",
        "if True:\n            self._begin(dense)",
    ),
    Fault(
        "a gradient that the caller cleared stays in the sum",
        "engine/grad_states.py",
        "        self._arrived.pop(slot, None)\n        self.gradients.clear(slot)\n        self._go(",
        "        self._arrived.pop(slot, None)\n        self._go(",
    ),
    Fault(
        "a gradient that the caller assigned lacks the loss scale",
        "engine/grad_states.py",
        "self._arrived[slot] = self.scaled(param.grad)",
        "self._arrived[slot] = param.grad",
    ),
    Fault(
        "a gradient that torch.autograd.grad returns carries the loss scale",
        "engine/hooks.py",
        "return None if reducer.scale == 1 else grad / reducer.scale",
        "return None",
    ),
    Fault(
        "a gradient that is kept for the next step is not rescaled",
        "engine/reducer.py",
        "states.gradients.multiply(factor)",
        "states.gradients.multiply(1.0)",
    ),
    Fault(
        "a second mean replaces the first, whole gradients",
        "engine/gradients.py",
        "kept = local if kept is None else kept.add_(local)",
        "kept = local",
    ),
    Fault(
        "a second mean replaces the first, shards",
        "engine/gradients.py",
        "kept = own if kept is None else kept.add_(own)",
        "kept = own",
    ),
    Fault(
        "a second mean replaces the first, shards on the host",
        "engine/gradients.py",
        "            own += before\n",
        "",
    ),
    Fault(
        "a step updates parameters without a gradient",
        "engine/reducer.py",
        "return {self._places[place][1] for place in places_in(given)},",
        "return {key for _, key in self._places},",
    ),
    Fault(
        "a gradient edited inside gathered is not stepped with",
        "setup/gathered.py",
        "if shown is not None and shown._version != version:",
        "if shown is None:",
    ),
    Fault(
        "a backward that failed leaves its sums to the pass after it",
        "engine/runtime.py",
        "            self.reducer.abort()\n",
        "",
    ),
)


def is_found(fault: Fault | None) -> bool:
    """Whether the test fails with the package like this."""
    with tempfile.TemporaryDirectory() as copy:
        package = Path(copy, "onefold")
        shutil.copytree(ROOT / "src/onefold", package, ignore=shutil.ignore_patterns("__pycache__"))
        for place in onefold.__path__:  # an editable installation has the compiled kernels elsewhere
            for library in Path(place).glob("*.so"):
                shutil.copy(library, package)
        if fault is not None:
            path = package / fault.file
            text = path.read_text(encoding="utf-8")
            if text.count(fault.right) != 1:
                raise SystemExit(f"{fault.file} has {text.count(fault.right)} times what {fault.name!r} replaces")
            path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
        # An editable installation finds its own package, whatever the path.
        first = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in f.__module__]; "
        first += f"sys.path.insert(0, {copy!r}); import onefold, pytest; "
        check = f"assert onefold.__file__.startswith({copy!r}), onefold.__file__; "
        # The first program that fails is enough: a shorter one would take minutes.
        first += "from hypothesis import Phase, settings; "
        first += "settings.register_profile('first', phases=[Phase.generate]); "
        options = ["-q", "--hypothesis-profile=first", "-x", "-p", "no:cacheprovider", TEST]
        run = subprocess.run(
            [sys.executable, "-c", f"{first}{check}sys.exit(pytest.main({options!r}))"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": copy, "OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": copy},
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode not in (0, 1):
        raise SystemExit(f"the test could not run:\n{run.stdout}\n{run.stderr}")
    return run.returncode == 1


def main(words: Sequence[str]) -> int:
    chosen: list[Fault | None] = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    wrong = 0
    for fault in chosen if words else [None, *chosen]:
        start = time.perf_counter()
        found = is_found(fault)
        wrong += found is (fault is None)
        name = "(none planted)" if fault is None else fault.name
        print(f"{'found' if found else 'not found':9}  {time.perf_counter() - start:5.0f} s  {name}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
