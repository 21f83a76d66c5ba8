"""Owns runs of the loops under DeepSpeed itself: the yardstick of the engine.

As a script it is given a directory: it runs every loop on forked ranks, and rank 0 writes down what each one saw. No
pytest here: it runs in processes of its own, so that nothing of DeepSpeed reaches other tests.
"""

import sys
from pathlib import Path

import torch

from apart import prepare_deepspeed, run_ranks
from deepspeed_loops import CASES, resume, train


def act(rank, num_ranks, directory):
    """What each forked rank does."""
    import deepspeed

    seen = {name: train(deepspeed, name, rank, num_ranks) for number, name in CASES if number == num_ranks}
    seen["resumed"] = resume(deepspeed, directory / f"run-{num_ranks}", "half", rank, num_ranks, is_there=False)[1]
    if rank == 0:
        torch.save(seen, directory / f"{num_ranks}.pt")


def main(directory):
    prepare_deepspeed()
    import deepspeed

    public = sorted(name for name in dir(deepspeed.DeepSpeedEngine) if not name.startswith("_"))
    (directory / "names.txt").write_text("\n".join(public))
    for num_ranks in (1, 2):
        run_ranks(num_ranks, directory, act, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
