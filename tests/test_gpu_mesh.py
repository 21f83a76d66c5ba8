"""Promise: on GPUs a mesh of two axes trains as one axis of as many ranks does, under every plan."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import onefold
from gpu_models import gpus, train

PLANS = [onefold.ZERO_1, onefold.ZERO_2, onefold.ZERO_3]
MESHES = [(2, 1), (1, 2)]
PRECISIONS = {"fp32": onefold.Precision(), "bf16": onefold.Precision(params="bf16")}


def on_mesh(rank, num_ranks, plan, precision, shape):
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    # Only its ranks and names are read: the groups that shards travel over are made for the model's device.
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return train(rank, num_ranks, plan, precision, torch.device("cuda", rank), mesh)


@gpus(2)
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("plan", PLANS, ids=["zero_1", "zero_2", "zero_3"])
def test_two_gpus_on_a_mesh_agree_with_one_axis(ranks, plan, precision):
    expected = ranks(2).run(on_mesh, plan, precision, None, timeout_s=120)
    for shape in MESHES:
        found = ranks(2).run(on_mesh, plan, precision, shape, timeout_s=120)
        assert found[0][1] == found[1][1]
        for (weights, norms, matches), (wanted, wanted_norms, _) in zip(found, expected, strict=True):
            assert matches
            assert norms == pytest.approx(wanted_norms, rel=1e-3)
            for got, want in zip(weights, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        for one, other in zip(found[0][0], found[1][0], strict=True):
            assert torch.equal(one, other)
