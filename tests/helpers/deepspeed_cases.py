"""Owns what tests of DeepSpeed's configuration share: real files with their verdicts, mutations, a second reading.

`meaning` works out what an accepted configuration says from the plain values, without the code under test.
"""

import copy
import json
import math
from pathlib import Path

from hypothesis import strategies as st

from onefold.deepspeed import Given
from onefold.deepspeed.report import manual
from onefold.deepspeed.walk import declared

FILES = [json.loads(line) for line in (Path(__file__).parent / "deepspeed_configs.jsonl").read_text().splitlines()]
TRAINER = {
    "micro_batch": (4, ["train_micro_batch_size_per_gpu"]),
    "accumulation": (2, ["gradient_accumulation_steps"]),
    "max_grad_norm": (0.5, ["gradient_clipping"]),
    "lr": (2e-5, ["optimizer.params.lr", "scheduler.params.warmup_max_lr"]),
    "betas": ((0.9, 0.95), ["optimizer.params.betas"]),
    "eps": (1e-6, ["optimizer.params.eps"]),
    "weight_decay": (0.1, ["optimizer.params.weight_decay"]),
    "warmup_steps": (5, ["scheduler.params.warmup_num_steps"]),
    "total_steps": (50, ["scheduler.params.total_num_steps"]),
}
"""What the Trainer's arguments say, and the keys that must not say otherwise."""

WHOLE_NUMBERS = [0, 1, 2, 7, 2.0, "8", "5e8", 1e9, 5e7]
NASTY = [
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 3, 10**30, 1e308, math.nan, math.inf, -math.inf),
    *("", " ", "auto", "AUTO", "yes", "true", "5e8", "1_000", "0x10", "1e999", "nan", "five", "none", "é" * 50),
    *([], {}, [1], ["auto"], [[]], {"enabled": True}, {"a": {"b": {}}}, [0, 1, 2, 3]),
]
SETTINGS = [
    *(("zero_optimization.stage", value) for value in (0, 1, 2, 3, "3", 2.0)),
    *(("zero_optimization.offload_optimizer.device", value) for value in ("cpu", "none", "nvme", "CPU", "gpu")),
    *(("zero_optimization.offload_param.device", value) for value in ("cpu", "none", "nvme")),
    *(("zero_optimization.offload_optimizer", {"device": "cpu", "ratio": value}) for value in (0, "0.25", 0.5, 1, 2)),
    *(("zero_optimization.cpu_offload", value) for value in (True, False)),
    *(("zero_optimization.prefetch_bucket_size", value) for value in (0, 5e7, "1e6")),
    *(("zero_optimization", value) for value in (True, False)),
    *(("fp16.enabled", value) for value in (True, False, "auto")),
    *(("fp16", {"enabled": True, "loss_scale": value}) for value in (128, "64", 0)),
    *(("fp16.loss_scale", value) for value in (0, 128, "0")),
    *(("fp16.min_loss_scale", value) for value in (1, 2.0**20)),
    *(("bf16.enabled", value) for value in (True, False, "auto")),
    ("bfloat16", {"enabled": True}),
    *(("communication_data_type", value) for value in ("fp32", "bf16", "int8")),
    *(("gradient_clipping", value) for value in (0, "0.5", 1, "auto", -1)),
    *(("train_batch_size", value) for value in (4, 8, "32", 7)),
    *(("train_micro_batch_size_per_gpu", value) for value in (1, 2, 4.0)),
    *(("gradient_accumulation_steps", value) for value in (1, 2, "4")),
    *(("optimizer", {"type": kind, "params": {"lr": "1e-4"}}) for kind in ("Adam", "adamw", "Lion", "RMSprop", "Muon")),
    *(("optimizer.params.adam_w_mode", value) for value in (True, False)),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": "1e2"}}),
    ("torch_autocast", {"enabled": True, "dtype": "float16"}),
    ("compile.disable", False),
    ("wandb.enabled", True),
]
KNOWN = {path.rpartition(".")[2] for path, _, _ in declared()} | {
    name for _, section, _ in declared() for name in section.aliases
}
DEFAULTS = {path: default for path, default, _, _ in manual()}


def get(config, path):
    """The value at a dotted path; None if there is none."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def trainer(config):
    """What a Trainer would be given beside `config`: what is "auto" or missing there, and nothing that contradicts."""
    known = {
        name: value
        for name, (value, paths) in TRAINER.items()
        if all(get(config, path) in ("auto", None) for path in paths)
    }
    enabled = {name: get(config, f"{name}.enabled") for name in ("fp16", "bf16")}
    written = [name for name, value in enabled.items() if value is True]
    waiting = [name for name in ("bf16", "fp16") if enabled[name] == "auto"]
    return Given(num_ranks=1, hidden_size=64, precision=[*written, *waiting, "fp32"][0], **known)


def leaves(config, path=""):
    """Dotted paths of all values that are no non-empty dict."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        else:
            yield here


def put(config, path, value):
    """Set the value at a dotted path, making sections on the way."""
    *sections, name = path.split(".")
    for section in sections:
        if not isinstance(config.get(section), dict):
            config[section] = {}
        config = config[section]
    config[name] = copy.deepcopy(value)


def everywhere(config, path=""):
    """(section, key, path) of every key, sections included."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        yield config, key, here
        if isinstance(value, dict):
            yield from everywhere(value, here)


def misspell(name, place, kind):
    place %= len(name)
    return {
        "drop": name[:place] + name[place + 1 :],
        "double": name[:place] + name[place] + name[place:],
        "swap": name[:place] + name[place : place + 2][::-1] + name[place + 2 :],
        "other": name[:place] + "q" + name[place + 1 :],
    }[kind]


@st.composite
def mutations(draw):
    """(configuration, the paths of misspelled keys in it): a real file with one to three things changed."""
    config = copy.deepcopy(draw(st.sampled_from(FILES))["config"])
    kinds = ["typo", "nasty", "nasty", "set", "set", "set", "auto", "text", "drop"]
    if draw(st.booleans()):  # without what would be refused anyway, so that many are accepted
        kinds = ["set", "set", "set", "text", "auto"]
        config = {"train_batch_size": 4, **{key: config[key] for key in config if key in ("zero_optimization", "fp16")}}
    typos = set()
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        if kind == "set":
            put(config, *draw(st.sampled_from(SETTINGS)))
            continue
        keys = list(everywhere(config))
        if not keys:
            continue
        section, key, path = keys[draw(st.integers(0, len(keys) - 1))]
        value = section[key]
        if kind == "typo" and key:
            how = draw(st.sampled_from(["drop", "double", "swap", "other"]))
            new = misspell(key, draw(st.integers(0, 30)), how)
            section[new] = section.pop(key)
            typos.add(path[: len(path) - len(key)] + new)
        elif kind == "nasty":
            section[key] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        elif kind == "auto":
            section[key] = "auto"
        elif kind == "text" and isinstance(value, int | float) and not isinstance(value, bool):
            section[key] = repr(value)
        elif kind == "drop":
            del section[key]
    return config, {path for path in typos if path.rpartition(".")[2] not in KNOWN}


def number(value):
    """The number a value says; whatever does not say one must not have been accepted."""
    assert type(value) in (int, float, str), value
    assert math.isfinite(float(value)), value
    return float(value)


def switch(value, auto=False):
    """The truth a switch says, or `auto` for "auto"."""
    assert isinstance(value, bool) or value == "auto", value
    return auto if value == "auto" else value


def section(config, *names):
    found = next((config[name] for name in names if config.get(name) is not None), {})
    return {"stage": int(found)} if isinstance(found, bool) else found


def filled(value, default, given):
    """A number, its default where there is none, or what was given for "auto"."""
    return given if value == "auto" else default if value is None else number(value)


def meaning(config, known):
    """What an accepted configuration means: a dict to compare with a translation."""
    zero = section(config, "zero_optimization")
    half, brain = section(config, "fp16"), section(config, "bf16", "bfloat16")
    stage = 0 if zero.get("stage") == "auto" else int(number(zero.get("stage", 0)))
    offload, params = section(zero, "offload_optimizer"), section(zero, "offload_param")
    off = str(offload.get("device")).lower() == "cpu" or zero.get("cpu_offload") is True
    far = stage == 3 and (str(params.get("device")).lower() == "cpu" or zero.get("cpu_offload_param") is True)
    ratio = filled(offload.get("ratio"), 1.0, 1.0) if off or far else 0.0
    is_half = switch(half.get("enabled", False), known.precision == "fp16")
    is_brain = switch(brain.get("enabled", False), known.precision == "bf16")
    assert not (is_half and is_brain)
    clip = filled(config.get("gradient_clipping"), 1.0, known.max_grad_norm)
    assert clip >= 0
    return {
        "params": (stage == 3, 0.0 if not far else ratio),
        "grads": (stage >= 2, ratio if (off or far) and stage >= 2 else 0.0),
        "optim": (stage >= 1, ratio if off or far else 0.0),
        "precision": "float16" if is_half else "bfloat16" if is_brain else "None",
        "fixed_scale": (number(half.get("loss_scale", 0)) if half.get("loss_scale") != "auto" else 0.0)
        if is_half
        else 0.0,
        "clip": clip or None,
    }


def of_kind(path, value):
    """Whether a value is of the kind of the key's default, so far as that tells."""
    default = DEFAULTS.get(path)
    if default in ("true", "false"):
        return isinstance(value, bool) or value == "auto"
    if default is not None and default.replace(".", "").replace("e-", "").isdigit():
        return value == "auto" or (isinstance(value, int | float | str) and not isinstance(value, bool))
    return True
