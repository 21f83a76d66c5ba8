"""Owns DeepSpeed's module `accelerator`: the device of this process, asked in DeepSpeed's words."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import torch

from onefold.deepspeed import comm
from onefold.deepspeed.world import accelerator_name

Result = TypeVar("Result")


class Accelerator:
    """What both kinds of devices answer alike. Sizes are in bytes."""

    _name: str
    _communication_backend_name: str

    def device_name(self, device_index: int | None = None) -> str:
        """The kind of device, or the name of one."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The device of this process."""
        return self._name

    def communication_backend_name(self) -> str:
        """What its collectives run on."""
        return self._communication_backend_name

    def is_available(self) -> bool:
        """True: it is chosen because it is there."""
        return True

    def is_bf16_supported(self) -> bool:
        """True: where hardware lacks it, torch computes it."""
        return True

    def is_fp16_supported(self) -> bool:
        """True: where hardware lacks it, torch computes it."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether kernels in Triton run on it."""
        return self._name == "cuda"

    def supported_dtypes(self) -> list[torch.dtype]:
        """What models may compute in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """`tensor`, in locked host memory where a device copies from it."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def lazy_call(self, callback: Callable[[], Result]) -> Result:
        """Call it now."""
        return callback()

    def random(self) -> Any:
        """torch.random."""
        return torch.random

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when they return."""
        return self._name == "cpu"


class Cpu(Accelerator):
    """The host. Memory is that of this process."""

    _name, _communication_backend_name = "cpu", "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device(self) -> int:
        """The number of the device of this process."""
        return comm.get_local_rank()

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        """A context in which the device is current: it always is."""
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def device_count(self) -> int:
        """Devices on this machine."""
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        """Operations on the host are done when they return."""

    def empty_cache(self) -> None:
        """The host keeps no memory back."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Resident memory."""
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Peaks of the host are not recorded: the maximum is what there is now."""

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the machine."""
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Of the machine."""
        return int(psutil.virtual_memory().available)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """torch's seed."""
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Of torch's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Of torch's generator."""
        torch.set_rng_state(new_state)


class Cuda(Accelerator):
    """The GPU of this process; what is not said here is what torch.cuda says."""

    _name, _communication_backend_name = "cuda", "nccl"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)

    def current_device_name(self) -> str:
        """The device of this process."""
        return f"cuda:{torch.cuda.current_device()}"

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the device."""
        return int(torch.cuda.get_device_properties(torch.device(self.device_name(device_index))).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Of the device: what no process has taken."""
        return int(torch.cuda.mem_get_info(device_index)[0])


_KINDS: Mapping[str, type[Accelerator]] = {"cuda": Cuda, "cpu": Cpu}


def get_accelerator() -> Accelerator:
    """The accelerator of this process: its GPU if torch sees one, else the host. DS_ACCELERATOR=cpu chooses the host.

    Raises:
        ConfigError: DS_ACCELERATOR names a kind that is not there.
    """
    return _accelerator(accelerator_name())


@cache
def _accelerator(name: str) -> Accelerator:
    return _KINDS[name]()
