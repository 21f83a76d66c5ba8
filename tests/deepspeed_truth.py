"""Owns runs of the loops under DeepSpeed itself: the yardstick of the engine.

As a script it is given a directory: it runs every loop on forked ranks, and rank 0 writes down what each one saw. No
pytest here: it runs in processes of its own, so that nothing of DeepSpeed reaches other tests.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_loops import CASES, resume, train


def act(rank, num_ranks, directory):
    """The life of one forked rank."""
    import deepspeed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    meeting = f"file://{directory / f'meeting-{num_ranks}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    seen = {name: train(deepspeed, name, rank, num_ranks) for number, name in CASES if number == num_ranks}
    seen["resumed"] = resume(deepspeed, directory / f"run-{num_ranks}", "half", rank, num_ranks, is_there=False)[1]
    if rank == 0:
        torch.save(seen, directory / f"{num_ranks}.pt")
    dist.destroy_process_group()


def fork(rank, num_ranks, directory):
    """Start a rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        act(rank, num_ranks, directory)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(directory):
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles a kernel for sums on one machine
    get_accelerator().is_fp16_supported = lambda: True  # it says no of CPUs that have no instructions for it
    import deepspeed.runtime.zero.muon.muon_optimizer  # else each rank compiles its regular expressions

    torch.set_num_threads(1)
    public = sorted(name for name in dir(deepspeed.DeepSpeedEngine) if not name.startswith("_"))
    (directory / "names.txt").write_text("\n".join(public))
    for num_ranks in (1, 2):
        children = [fork(rank, num_ranks, directory) for rank in range(num_ranks)]
        if any([os.waitpid(child, 0)[1] for child in children]):
            sys.exit(f"a rank of {num_ranks} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
