"""Owns runs of DeepSpeed itself, and of what replaces it in a whole process: in processes of their own, so that nothing
of them reaches those of other tests. One process imports everything once, and forks its ranks.
"""

import os
import subprocess
import sys
import traceback

import torch
import torch.distributed as dist


def start(script, *words):
    """A process that runs a Python file on the CPU."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, script, *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    """Wait for it; it has to end well."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, f"{process.args[1:]} ended with {process.returncode}:\n{output[-6000:]}"


def prepare_deepspeed():
    """Import DeepSpeed, and spare its ranks what they would do each for itself."""
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles a kernel for sums on one machine
    get_accelerator().is_fp16_supported = lambda: True  # it says no of CPUs that have no instructions for it
    import deepspeed.runtime.zero.muon.muon_optimizer


def run_ranks(num_ranks, directory, act, *words):
    """Fork ranks that meet over gloo, run `act(rank, num_ranks, *words)` each, and end; all have to end well."""
    children = [_fork(rank, num_ranks, directory, act, words) for rank in range(num_ranks)]
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(f"a rank of {num_ranks} failed")


def _fork(rank, num_ranks, directory, act, words):
    child = os.fork()
    if child:
        return child
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
        os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        torch.set_num_threads(1)
        meeting = f"file://{directory / f'meeting-{num_ranks}'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
        act(rank, num_ranks, *words)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
