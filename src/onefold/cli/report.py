"""Owns the report on a machine: versions, cards, links, kernels, what is missing and how to get it.

Invariant: it always comes to an end with all its parts. What cannot be found out says so in its line, for a broken
machine is when reports are needed; and it holds no user's or host's name, for it is pasted into public bug reports.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from onefold.optim.kernels import host
from onefold.system import affinity

_PACKAGES = ("onefold", "torch", "triton", "numpy", "transformers", "accelerate", "peft", "safetensors", "deepspeed")
_GIB = 1 << 30


def machine_report() -> str:
    """The report, one fact a line, in parts."""
    parts = {"versions": _versions, "machine": _machine, "cards": _cards, "links": _links, "kernels": _kernels}
    missing: list[str] = []
    lines = []
    for name, find in parts.items():
        lines.append(name)
        lines += [f"  {line}" for line in _found(find, missing)]
    lines.append("missing")
    lines += [f"  {line}" for line in missing or ["nothing"]]
    return "\n".join(lines)


def _found(find: Callable[[list[str]], Iterator[str]], missing: list[str]) -> list[str]:
    try:
        return list(find(missing))
    except Exception as error:  # drivers and packages break in every way; the rest of the report is still wanted
        return [f"not to be found out: {type(error).__name__}: {error}"]


def _versions(missing: list[str]) -> Iterator[str]:
    yield f"python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    for name in _PACKAGES:
        version = _version(name)
        if version is not None:
            yield f"{name} {version}"
    yield f"torch was built for CUDA {torch.version.cuda or '-'}, ROCm {torch.version.hip or '-'}"
    backends = (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available), ("mpi", dist.is_mpi_available))
    yield f"torch.distributed: {', '.join(name for name, there in backends if there()) or 'no backend'}"
    if dist.is_nccl_available():
        yield f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # Run from a checkout, or put there by other means than pip.
        return {"torch": torch.__version__, "onefold": "from a checkout that is not installed"}.get(package)


def _machine(missing: list[str]) -> Iterator[str]:
    cores = affinity.read_cores(os.sched_getaffinity(0))
    threads = sum(len(core.threads) for core in cores)
    nodes = len({core.node for core in cores})
    yield f"{len(cores)} cores ({threads} hardware threads) on {nodes} NUMA node(s)"
    memory = psutil.virtual_memory()
    yield f"memory: {memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB available"
    disk = shutil.disk_usage(os.curdir)
    yield f"disk here: {disk.total / _GIB:.1f} GiB, {disk.free / _GIB:.1f} GiB free"


def _cards(missing: list[str]) -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "none that torch sees"
        if torch.version.cuda is None and torch.version.hip is None:
            missing.append(
                "GPUs: this torch has no CUDA or ROCm; https://pytorch.org/get-started lists builds that have"
            )
        elif shutil.which("nvidia-smi") is None:
            missing.append("GPUs: there is no NVIDIA driver here (no nvidia-smi); install it, or run on a GPU machine")
        else:
            missing.append(
                "GPUs: there is a driver, but torch sees no card; compare `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            )
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        capability = f"{card.major}.{card.minor}"
        yield f"{index}: {card.name}, {card.total_memory / _GIB:.1f} GiB, compute capability {capability}"


def _links(missing: list[str]) -> Iterator[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield "none: no cards"
        return
    for index in range(count):
        peers = [str(p) for p in range(count) if p != index and torch.cuda.can_device_access_peer(index, p)]
        yield f"{index}: reaches the memory of {', '.join(peers) or 'no other card'} directly"
    if shutil.which("nvidia-smi") is None:
        yield "PCIe and NVLink: no nvidia-smi to ask"
        return
    query = "--query-gpu=index,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
    yield "card, PCIe generation now, at most, lanes"
    yield from _said("nvidia-smi", query, "--format=csv,noheader")
    yield from _said("nvidia-smi", "topo", "-m")


def _said(*words: str) -> list[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    return [line.rstrip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]


def _kernels(missing: list[str]) -> Iterator[str]:
    kernel = host.host_kernel()
    if isinstance(kernel, host.NativeKernel):
        yield f"host updates: native ({kernel.name})"
    else:
        yield "host updates: torch's operations, several times slower"
        missing.append("compiled host kernels: install a C++ compiler (g++), then install Onefold again with pip")
    if _version("triton") is not None:
        yield "updates on a GPU: Triton"
    else:
        yield "updates on a GPU: torch's operations"
        missing.append("fused updates on a GPU: Triton, which comes with torch's builds for GPUs")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        missing.append("torch.compile: a C++ compiler (g++)")
