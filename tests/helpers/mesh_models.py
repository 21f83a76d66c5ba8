"""Owns what the tests of meshes share: meshes of all ranks, and every way to place a model on one."""

import torch
from torch.distributed.device_mesh import init_device_mesh

import onefold
from plans import NAMED_PLANS

PATIENCE_S = 60.0
CPU = torch.device("cpu")
PLANS = {
    # the plan's name, and options of shard
    **{name: (name, {}) for name in NAMED_PLANS if name != "infinity"},
    "mix": ("offload_3", {"fraction": 0.5}),
    "kept": ("zero_3", {"keep_bytes": 2**20}),
}


def grid(shape, names=("replicate", "shard")):
    """A mesh of all ranks; None for `shape` None."""
    return None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(model, plan, shape, **options):
    name, more = PLANS[plan]
    return onefold.shard(model, NAMED_PLANS[name], mesh=grid(shape), **more, **options)
