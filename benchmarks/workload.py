"""What the programs that time training share: the model, its tokens, the clock, rows in processes of their own, and
what the numbers depend on.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from onefold.optim.kernels.host import host_kernel

SIZES = {
    0.004: (64, 256, 2, 4),
    0.125: (768, 2048, 12, 12),
    0.4: (1024, 2816, 24, 16),
    1.35: (2048, 5504, 24, 16),
    3.82: (3072, 8192, 32, 24),
    6.74: (4096, 11008, 32, 32),
    13.0: (5120, 13824, 40, 40),
}
"""Billions of parameters: width, width of the feed-forward, layers, heads. The first only tries a program."""
VOCABULARY = 32000


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank computes in a step: a Llama-shaped causal language model on random tokens."""

    params: float
    """Billions of parameters, a key of `SIZES`."""
    batch: int
    """Sequences."""
    context: int
    """Tokens a sequence."""
    is_checkpointed: bool = True
    layers: int | None = None
    """In place of the layers of the size, to step up between sizes."""

    @classmethod
    def of(cls, words: argparse.Namespace) -> "Work":
        """What the arguments of `train_rows.add_work` say."""
        return cls(
            params=words.params,
            batch=words.batch,
            context=words.context,
            is_checkpointed=words.checkpointing,
            layers=words.layers,
        )

    @property
    def num_layers(self) -> int:
        return SIZES[self.params][2] if self.layers is None else self.layers

    def model(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """In training mode, on the current default device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        width, hidden, _, heads = SIZES[self.params]
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads,
            vocab_size=VOCABULARY,
            max_position_embeddings=self.context,
            use_cache=False,
            dtype=dtype,
        )
        model = LlamaForCausalLM(config).to(dtype)
        if self.is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def tokens(self, seed: int, device: str) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCABULARY, (self.batch, self.context), generator=generator).to(device)

    def flops(self, num_params: int) -> float:
        """Floating-point operations of forward and backward: 6 a parameter and token, and attention's two products,
        half of which a causal mask leaves. What checkpoints compute again is not counted."""
        attention = 6 * self.num_layers * SIZES[self.params][0] * self.context
        return self.batch * self.context * (6 * num_params + attention)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(
    steps: int, warm_up: int, once: Callable[[int], float], warmed: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Seconds of each step that counts, and the losses of all. A step ends when its loss is there, as in a loop that
    shows it; what it leaves to other streams and threads is paid by the next one, and by the last one itself.
    `warmed` is called before the first step that counts."""
    losses, ends = [], []
    for step in range(warm_up + steps):
        losses.append(once(step))
        if step + 1 == warm_up + steps:
            synchronize()
        if step + 1 == warm_up:
            warmed()
        ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)][warm_up - 1 :], losses


def peak_bytes(device: str) -> tuple[int, int]:
    """(allocated, reserved) at the peak; zeros where there is no GPU."""
    if device != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def used_bytes() -> int:
    """What this process has of its GPU, if it is alone there: torch's and the driver's, contexts and NCCL's too."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def limit_card(nbytes: int | None) -> None:
    """Have torch take no more than a card of `nbytes` leaves beside what the driver has taken so far."""
    if nbytes is not None:
        beside = used_bytes() - torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((nbytes - beside) / torch.cuda.mem_get_info()[1])


def tell(row: dict[str, Any]) -> None:
    """Print a row for `apart`, in one write: several ranks that fail at once write to one pipe."""
    sys.stdout.write("\n" + json.dumps(row) + "\n")
    sys.stdout.flush()


def row_in(line: str) -> dict[str, Any] | None:
    """The row that a line of output begins with, whatever another rank wrote behind it."""
    if not line.startswith('{"system"'):
        return None
    try:
        row: dict[str, Any] = json.JSONDecoder().raw_decode(line)[0]
    except ValueError:
        return None
    return row


def end_in_order() -> None:
    """Let SIGTERM end the program as Ctrl-C does, so that what it has started ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def write_whole(path: str | Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    beside = Path(f"{path}.part")
    beside.write_text(text)
    os.replace(beside, path)


def check_writable(parser: argparse.ArgumentParser, *paths: str | Path | None) -> None:
    """End the program in the parser's way, before it measures, if a file could not be written afterwards."""
    for path in map(Path, filter(None, paths)):
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            parser.error(f"{path} cannot be written: is its folder there?")


def check_launched(parser: argparse.ArgumentParser, device: str) -> None:
    """End the program in the parser's way unless torchrun started it, where its GPUs are."""
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as --help shows: it runs on several ranks")
    if device == "cuda" and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        parser.error(f"there is no GPU for rank {os.environ['RANK']}: {torch.cuda.device_count()} are here")


def apart(name: str, words: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The row that a command prints: its first line that starts with {"system", for the rank that fails first tells
    why. It runs in a process group of its own:
    what it holds is given back, if it dies it dies alone, and compilers that it starts are stopped with it. A command
    that is late or ends without a row gives one that says why. If this program is interrupted, or ended by SIGTERM
    after `end_in_order`, the command is stopped as well."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, stop)
    timer.start()
    row, said = None, ["nothing"]
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = row_in(line)
            if found is not None:
                row = row or found
            elif line.strip():
                said = [*said[-7:], line.strip()]
                if line.startswith(f"{name}: "):  # progress; what its libraries log is not shown
                    print(said[-1], flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        if process.returncode is None:
            stop()
            process.wait()
    if row is not None:
        return row
    if late.is_set():
        reason = f"stopped after {limit_s:g} s"
    elif code < 0:
        reason = f"killed ({signal.Signals(-code).name})"
    else:
        reason = f"exit code {code}"
    return {"system": name, "error": f"{reason}; it said last: {said[-1]}", "said": said}


def find_compilers(device: str) -> None:
    """Lets DeepSpeed compile: it looks for ninja on the PATH, and refuses architectures such as the "9.0a" that some
    images list. Has to come before its import."""
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"


def deepspeed_config(batch: int, clip: float, adam: dict[str, Any], zero: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration: its defaults but for what the work asks for. `zero` goes into `zero_optimization`."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"overlap_comm": True, "contiguous_gradients": True, **zero},
        "steps_per_print": 10**9,
    }


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processor() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def asked(*words: str) -> str:
    """What a command prints, "unknown" where it cannot be run."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on."""

    def release(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "from source" if package == "onefold" else "not installed"

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "driver": (asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split() or ["unknown"])[
            0
        ],
        "cuda": torch.version.cuda,
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {
            package: release(package) for package in ("torch", "transformers", "triton", "onefold", "deepspeed")
        },
        "kernel": host_kernel().name,
    }
