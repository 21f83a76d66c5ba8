"""Owns `install`: in this process, `import deepspeed` means `onefold.deepspeed`.

Invariant: a module `deepspeed.x` is the module `onefold.deepspeed.x`, the same object; it never mixes with the real
package, and a module that Onefold lacks is an ImportError that says so.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from onefold.deepspeed.version import __version__
from onefold.errors import ConfigError

_NAME, _OURS = "deepspeed", "onefold.deepspeed"
_ASK_EARLY = {"accelerate.utils": "DeepSpeedEngineWrapper"}
"""Modules that look for DeepSpeed as they are imported, and a name that they have if they found it."""

_REASONS = {  # by what a module's name starts with
    "runtime.sequence_parallel": "there is no sequence parallelism",
    "runtime.tensor_parallel": "there is no tensor parallelism",
    "runtime.pipe": "there is no pipeline parallelism",
    "runtime.hybrid_engine": "there is no engine for inference",
    "runtime.zero.stage3": "onefold.predicted tells what memory a model and its optimizer take",
    "runtime.zero.stage_1_and_2": "onefold.predicted tells what memory a model and its optimizer take",
    "launcher": "runs are started by onefold run, which takes DeepSpeed's options",
    "autotuning": "there is no autotuner",
    "compression": "quantized and compressed training is not supported",
    "inference": "there is no engine for inference",
    "linear": "use peft, whose adapters run as they are",
    "model_implementations": "there is no engine for inference",
    "module_inject": "layers are the model's own",
    "moe": "there is no expert parallelism",
    "monitor": "nothing is written to monitors",
    "profiling": "nothing is profiled; use torch.profiler",
    "sequence": "there is no sequence parallelism",
}


class _AliasDistribution(Distribution):
    """What importlib.metadata says of `deepspeed`."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {__version__}\n"
            "Summary: onefold.deepspeed under this name\n",
            "top_level.txt": f"{_NAME}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)


class _AliasLoader(Loader):
    """Loads `deepspeed.x` by importing `onefold.deepspeed.x`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_OURS + spec.name.removeprefix(_NAME))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state  # importlib put its own in its place


class DeepSpeedFinder(MetaPathFinder):
    """Finds `deepspeed` and what is in it, before other finders do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME and not fullname.startswith(f"{_NAME}."):
            return None
        ours = find_spec(_OURS + fullname.removeprefix(_NAME))
        if ours is None:
            asked = fullname.removeprefix(f"{_NAME}.")
            reasons = [why for part, why in _REASONS.items() if f"{asked}.".startswith(f"{part}.")]
            told = f"onefold.deepspeed has nothing for {fullname}" + "".join(f": {why}" for why in reasons)
            raise ModuleNotFoundError(told, name=fullname)
        # All are packages here: then what is looked for inside a plain module is looked for, and refused, here too.
        return ModuleSpec(fullname, _AliasLoader(), origin=ours.origin, is_package=True)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        wanted = (context or DistributionFinder.Context()).name
        if wanted is None or str(wanted).lower() == _NAME:
            yield _AliasDistribution()


def install() -> None:
    """From here on, `import deepspeed` in this process means `onefold.deepspeed`, for every library too.

    Call it first, before anything imports transformers or accelerate. A second call does nothing.

    Raises:
        ConfigError: the real deepspeed is imported already, or a library looked for one and found none.
    """
    if any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path):
        return
    real = sys.modules.get(_NAME)
    if real is not None and real is not sys.modules.get(_OURS):
        raise ConfigError(
            f"{getattr(real, '__file__', _NAME)} is imported already; call onefold.deepspeed.install() before anything "
            "that imports deepspeed"
        )
    late = [name for name, mark in _ASK_EARLY.items() if name in sys.modules and not hasattr(sys.modules[name], mark)]
    if late:
        raise ConfigError(
            f"{late[0]} looked for deepspeed before, and found none; call onefold.deepspeed.install() before anything "
            "imports it"
        )
    sys.meta_path.insert(0, DeepSpeedFinder())
