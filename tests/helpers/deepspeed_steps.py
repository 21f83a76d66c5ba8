"""Owns how tests make and step DeepSpeed's engine on Onefold, and look at its weights."""

from torch import nn

import onefold
import onefold.deepspeed as deepspeed
from deepspeed_loops import MICRO

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.5, 0.6]}}}
ONE = {"train_batch_size": 1}
SCRIPT = {"train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.0}
"""The script brings the optimizer."""


def engine_of(config, model=None, **arguments):
    return deepspeed.initialize(model=nn.Linear(2, 2) if model is None else model, config=config, **arguments)[0]


def steps(run, first, last):
    for micro_step in range(first, last):
        run.engine.backward(run.loss(micro_step))
        run.step()


def weights(engine):
    with onefold.gathered(engine.module):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}
