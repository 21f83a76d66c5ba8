"""Onefold: train PyTorch models too big for the hardware at hand, by holding every byte of training state exactly
once."""

from onefold import errors
from onefold.checkpoint import load, save
from onefold.interop.huggingface.export import export, full_state_dict
from onefold.interop.huggingface.pretrained import load_pretrained
from onefold.optim.ema import EMA
from onefold.optim.optimizers import SGD, Adagrad, Adam, AdamW, Elementwise, Lion
from onefold.plan.budget import Budget
from onefold.plan.precision import DynamicLossScale, Precision
from onefold.plan.table import INFINITY, OFFLOAD, OFFLOAD_3, ZERO_0, ZERO_1, ZERO_2, ZERO_3, Placement, Plan, Tier
from onefold.setup.gathered import accumulate, gathered, measured, predicted
from onefold.setup.shard import shard

__all__ = [
    "EMA",
    "INFINITY",
    "OFFLOAD",
    "OFFLOAD_3",
    "SGD",
    "ZERO_0",
    "ZERO_1",
    "ZERO_2",
    "ZERO_3",
    "Adagrad",
    "Adam",
    "AdamW",
    "Budget",
    "DynamicLossScale",
    "Elementwise",
    "Lion",
    "Placement",
    "Plan",
    "Precision",
    "Tier",
    "accumulate",
    "errors",
    "export",
    "full_state_dict",
    "gathered",
    "load",
    "load_pretrained",
    "measured",
    "predicted",
    "save",
    "shard",
]
