"""Onefold: train PyTorch models too big for the hardware at hand, by holding every byte of training state exactly
once."""

from onefold import errors
from onefold.access import accumulate, gathered, measured, predicted
from onefold.budget import Budget
from onefold.checkpoint import load, save
from onefold.dtypes import DynamicLossScale, Precision
from onefold.ema import EMA
from onefold.export import export
from onefold.optimizers import SGD, Adagrad, Adam, AdamW, Elementwise, Lion
from onefold.plan import INFINITY, OFFLOAD, OFFLOAD_3, ZERO_0, ZERO_1, ZERO_2, ZERO_3, Placement, Plan, Tier
from onefold.pretrained import load_pretrained
from onefold.shard import shard

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
    "gathered",
    "load",
    "load_pretrained",
    "measured",
    "predicted",
    "save",
    "shard",
]
