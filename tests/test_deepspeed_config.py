"""Promise: a DeepSpeed configuration means here what its author meant, or is refused with the key's path."""

import base64
import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cases import FILES, KNOWN, WHOLE_NUMBERS, get, leaves, meaning, mutations, of_kind, put, trainer
from onefold import Placement, Plan, Tier
from onefold.deepspeed import examine, report, translate
from onefold.deepspeed.report import manual
from onefold.deepspeed.source import read
from onefold.errors import ConfigError
from plans import NAMED_PLANS

WHOLE, PART, HOST = Placement(False), Placement(True), Placement(True, Tier.HOST)
PLANS = {**NAMED_PLANS, "part device, part host, part host": Plan(PART, HOST, HOST)}
OUTSIDE = {
    "1-bit",
    "LAMB",
    "compression_training",
    "GPT-NeoX",
    "autotuning",
    "progressive_layer_drop",
    "data_efficiency",
}
ONE = {"train_batch_size": 1}


def accounted(config, outcome):
    """Every key that was written has one verdict, or a problem of its own or of the section it is in."""
    told = [verdict.path for verdict in outcome.verdicts]
    assert len(told) == len(set(told))
    troubled = {problem.path for problem in outcome.problems}
    for path in leaves(config):
        parents = {path.rsplit(".", count)[0] for count in range(path.count(".") + 1)}
        assert parents & (troubled | set(told)), path


def comparable(translation):
    """A translation in the terms of `meaning`."""
    host = {
        kind: (placement.partitioned, float(dict(placement.fractions).get(Tier.HOST, 0)))
        for kind in ("params", "grads", "optim")
        for placement in [getattr(translation.plan, kind)]
    }
    scale = translation.precision.loss_scale
    return {
        **host,
        "precision": str(translation.precision.params).removeprefix("torch."),
        "fixed_scale": scale if isinstance(scale, float) else 0.0,
        "clip": translation.max_grad_norm,
    }


@pytest.mark.parametrize("file", FILES, ids=[file["id"] for file in FILES])
def test_a_real_file_becomes_the_plan_its_author_meant_or_is_refused_for_a_named_feature(file):
    config, verdict = file["config"], file["verdict"]
    before = copy.deepcopy(config)
    outcome = examine(config, trainer(config))
    accounted(config, outcome)
    assert config == before
    if "refused" in verdict:
        assert outcome.translation is None
        assert verdict["refused"] in OUTSIDE
        assert any(verdict["refused"] in str(problem) for problem in outcome.problems)
        return
    translation = outcome.translation
    assert translation is not None, [*map(str, outcome.problems), outcome.open]
    assert translation.plan == PLANS[verdict["plan"]]
    assert translation.precision == replace(translation.precision, params=verdict["precision"])
    assert getattr(translation.optimizer, "name", None) == verdict.get("optimizer")
    assert getattr(translation.scheduler, "name", None) == verdict.get("scheduler")
    assert translation.max_grad_norm == (0.5 if verdict["clip"] == "auto" else verdict["clip"] or None)
    assert translation.compile == verdict.get("compile", False)
    assert str(translation.autocast).removeprefix("torch.") == verdict.get("autocast", "None")
    for name, value in (get(config, "optimizer.params") or {}).items():
        if translation.optimizer and name in translation.optimizer.arguments and value != "auto":
            assert translation.optimizer.arguments[name] == (tuple(value) if isinstance(value, list) else value)


def test_all_real_files_are_there():
    assert len(FILES) == len({file["id"] for file in FILES}) == 71


# `--hypothesis-profile=thorough` makes 10,000 of them.
@settings(deadline=None, max_examples=20 * settings.default.max_examples)
@given(mutations())
def test_a_mutated_file_keeps_its_meaning_or_is_refused_with_the_path(mutation):
    config, typos = mutation
    known = trainer(config)
    before = copy.deepcopy(config)
    outcome = examine(config, known)
    assert repr(config) == repr(before)
    accounted(config, outcome)
    report(config, known)
    troubled = {problem.path for problem in outcome.problems}
    assert all(problem.what for problem in outcome.problems)
    assert all(get(config, path) is None or _covered(path, troubled) for path in typos)
    for path in leaves(config):
        assert path.rpartition(".")[2] in KNOWN or _covered(path, troubled), path
    if outcome.translation is None:
        assert outcome.problems or outcome.open
        with pytest.raises(ConfigError) as caught:
            translate(config, known)
        assert all(problem.path in str(caught.value) for problem in outcome.problems)
        return
    assert comparable(outcome.translation) == meaning(config, known)
    _check_sizes(config, outcome.translation)
    for verdict in outcome.verdicts:
        assert of_kind(verdict.path, verdict.value) or verdict.value is None, verdict


FREE = {
    *("monitor_config", "comms_config", "autotuning.arg_mappings", "autotuning.model_info"),
    *("data_efficiency.data_routing", "data_efficiency.data_sampling"),
}
"""Sections of names of the user's own, of names that DeepSpeed passes over, or of keys of a feature that is refused."""


def _covered(path, troubled):
    """Refused, in what is refused as a whole (params of a refused type), or in what is free."""
    parents = {path.rsplit(".", count)[0] for count in range(path.count(".") + 1)}
    whole = {f"{name.removesuffix('.type')}.params" for name in troubled if name.endswith(".type")}
    return bool(parents & (troubled | whole | FREE))


def _check_sizes(config, translation):
    assert translation.train_batch == translation.micro_batch * translation.accumulation >= 1
    for name, size in (
        ("train_batch_size", translation.train_batch),
        ("train_micro_batch_size_per_gpu", translation.micro_batch),
        ("gradient_accumulation_steps", translation.accumulation),
    ):
        assert config.get(name) in (None, "auto") or float(config[name]) == size


@pytest.mark.parametrize("value", [*WHOLE_NUMBERS, np.int64(8), np.float32(16)], ids=repr)
def test_a_whole_number_may_be_written_as_json_yaml_or_python_write_it(value):
    config = {**ONE, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": value}}
    assert translate(
        {**config, "zero_optimization": config["zero_optimization"] | {"max_live_parameters": 10**10}}
    ).prefetch_bytes == 4 * int(float(value))


Z = "zero_optimization"


def z(section):
    return {Z: section}


OFFLOAD, OPTIMIZER, SCHEDULER = f"{Z}.offload_optimizer", "optimizer.params", "scheduler.params"

WRONG = [
    (z({"stage": 2, "reduce_bucket_size": 0}), f"{Z}.reduce_bucket_size", "at least 1"),
    (z({"stage": 2, "reduce_bucket_size": -1}), f"{Z}.reduce_bucket_size", "at least 1"),
    (z({"stage": 2, "reduce_bucket_size": 0.5}), f"{Z}.reduce_bucket_size", "0.5"),
    (z({"reduce_bucket_size": "many"}), f"{Z}.reduce_bucket_size", '"many"'),
    (z({"stage": 4}), f"{Z}.stage", "from 0 to 3"),
    (z({"stage": True}), f"{Z}.stage", "not true"),
    (z({"overlap_comm": "yes"}), f"{Z}.overlap_comm", "true or false"),
    (z({"overlap_com": True}), f"{Z}.overlap_com", "did you mean overlap_comm?"),
    (z({"offload_optimizer": {"devise": "cpu"}}), f"{OFFLOAD}.devise", "device"),
    ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "did you mean zero_optimization?"),
    ({"stage": 3}, "stage", "it belongs at zero_optimization.stage"),
    (z({"gradient_clipping": 1}), f"{Z}.gradient_clipping", "it belongs at gradient_clipping"),
    (z({"stage": 3, "offload_param": {"device": "nvme"}}), f"{Z}.offload_param.device", "nearest: cpu"),
    (z({"stage": 0, "offload_optimizer": {"device": "cpu"}}), f"{OFFLOAD}.device", "stage 2"),
    (z({"stage": 2, "cpu_offload": False, "offload_optimizer": {"device": "cpu"}}), f"{OFFLOAD}.device", "keep one"),
    (z({"zero_hpz_partition_size": 8}), f"{Z}.zero_hpz_partition_size", "nearest"),
    (z({"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}), f"{Z}.stage3_prefetch_bucket_size", "the same"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "choose one"),
    ({"fp16": {"enabled": 1}}, "fp16.enabled", "write true"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled", "without quotes"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale", "dynamic"),
    ({"fp16": {"enabled": True, "min_loss_scale": 2**20}}, "fp16.min_loss_scale", "above the scale"),
    ({"fp16": True}, "fp16", "section"),
    ({"gradient_clipping": -1}, "gradient_clipping", "at least 0"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping", "NaN"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "nearest: mean"),
    ({"fp32_allreduce": True, "data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "choose"),
    ({"steps_per_print": "auto"}, "steps_per_print", '"auto"'),
    ({"optimizer": {"params": {}}}, "optimizer.type", "missing"),
    ({"optimizer": {"type": "Adan"}}, "optimizer.type", "did you mean"),
    ({"optimizer": {"type": "DeepSpeedCPUAdagrad"}}, "optimizer.type", "did you mean Adagrad?"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "nearest: AdamW"),
    ({"optimizer": {"type": "Adafactor"}}, "optimizer.type", "whole matrices"),
    ({"optimizer": {"type": "Adam", "params": {"beta": [0.9, 0.99]}}}, "optimizer.params.beta", "did you mean betas?"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas", "two numbers"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, f"{OPTIMIZER}.max_grad_norm", "clipping"),
    ({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, f"{OPTIMIZER}.momentun", "did you mean momentum?"),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params", "momentum"),
    ({"optimizer": {"type": "SGD", "params": {"momentum": True}}}, "optimizer.params.momentum", "a number"),
    ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type", "did you mean WarmupLR?"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params.total_num_steps", "missing"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, f"{SCHEDULER}.warmup_type", "linear"),
    ({"scheduler": {"type": "ReduceLROnPlateau"}}, "scheduler.type", "metric"),
    ({"scheduler": {"type": "StepLR", "params": {"gama": 0.1}}}, "scheduler.params.gama", "did you mean gamma?"),
    ({"wandb": {"enabled": True}}, "wandb.enabled", "nearest"),
    ({"tensorboard": {"enabled": False, "outputpath": "x"}}, "tensorboard.outputpath", "did you mean output_path?"),
    ({"pipeline": {"stages": 4}}, "pipeline.stages", "pipeline parallelism"),
    ({"hidden-size": 64}, "hidden-size", "GPT-NeoX"),
]  # fmt: skip


@pytest.mark.parametrize("value", [10**5000, -(10**5000), "9" * 5000, object(), b"4", {1, 2}, [[[]]]], ids=range(7))
def test_a_value_that_is_no_json_is_refused_like_any_other(value):
    with pytest.raises(ConfigError, match="train_batch_size: expected an integer of at least 1, not "):
        translate({"train_batch_size": value})


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2)], ids=["tensor", "array"])
@pytest.mark.parametrize("path", ["train_batch_size", "wandb.enabled", "zero_optimization.stage"])
def test_several_numbers_are_no_number_and_no_switch(path, value):
    config = {}
    put(config, path, value)
    with pytest.raises(ConfigError, match=rf"{path}: expected .*, not .*1\., *1\."):
        translate(config)


@pytest.mark.parametrize("config", [{"train_batch_size": "\ud800"}, {"fp16": {"\udfff": 1}}], ids=["value", "key"])
def test_half_of_a_character_is_refused_in_words_that_can_be_printed(config):
    with pytest.raises(ConfigError, match="half of a surrogate pair") as error:
        translate(config)
    assert str(error.value).isascii()


@pytest.mark.parametrize(("config", "path", "said"), WRONG, ids=[f"{path}-{n}" for n, (_, path, _) in enumerate(WRONG)])
def test_what_is_wrong_unknown_or_unsupported_is_refused_with_its_path_and_the_way_out(config, path, said):
    with pytest.raises(ConfigError) as error:
        translate({**ONE, **config})
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith(f"  {path}: ")
    assert said in line


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        translate({"zero_optimization": {"stage": 7, "overlap": 1}, "fp16": {"enabled": "auto"}, "x": 1})
    for path in ("zero_optimization.stage", "zero_optimization.overlap", "fp16.enabled", "x", "train_micro_batch"):
        assert f"\n  {path}" in str(error.value)


TEXTS = [
    ('{\n "a": 1,\n}', "line 2: JSON allows no comma"),
    ('{"fp16": {},\n\n "fp16": {}}', "line 3: fp16 is given twice, first on line 1"),
    ('{"bf16": {"enabled": true,\n"enabled": false}}', "line 2: bf16.enabled is given twice"),
    ('{\n // why\n "a": 1}', "line 2: JSON has no comments"),
    ('{"a": 1 # why\n}', "line 1: JSON has no comments"),
    ('{"a":\nNaN}', "line 2: NaN is no JSON number"),
    ('{"a": -Infinity}', "-Infinity is no JSON number"),
    ('{"a": 1e999}', "too large"),
    ('{"a": True}', "JSON writes true"),
    ('{"a": 1\n "b": 2}', 'line 2: a "," or "}" is missing'),
    ('{"a": [1, 2,]}', "JSON allows no comma"),
    ("{'a': 1}", "a key is a string"),
    ('{"a" 1}', 'a ":" is missing'),
    ('{"a": 1', "at the end"),
    ('{"a": ', "the text ends"),
    ('{"a": "x', "unterminated"),
    ('{"a": 01}', "expected a value"),
    ('{"a":\n"\\ud800"}', "line 2: '\\ud800' holds half of a surrogate pair"),
    ('{"a\\udfff": 1}', "line 1: 'a\\udfff' holds half of a surrogate pair"),
    ('{"a": 1} {"b": 2}', "after the closing"),
    ('{"a":' * 100 + "1" + "}" * 100, "nested more than"),
    ("[]", "no file"),
    ("/no/such/ds_config.json", "no file"),
    ("\0", "cannot be read"),
]


@pytest.mark.parametrize(("text", "said"), TEXTS, ids=[f"{n}" for n, _ in enumerate(TEXTS)])
def test_text_that_is_no_strict_json_is_refused_with_the_line(text, said):
    with pytest.raises(ConfigError) as error:
        translate(text)
    assert said in str(error.value)
    assert said in report(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_strict_json_is_read_as_the_standard_library_reads_it(values, indent, ascii_only):
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    assert read(text).values == json.loads(text)


def strictly(text):
    """What the standard library reads where no key comes twice and all numbers are finite; None where it does not."""

    def number(said):
        if not math.isfinite(float(said)):
            raise ValueError(said)
        return float(said)

    def mapping(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError(pairs)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=mapping, parse_constant=number, parse_float=number)
    except ValueError:
        return None


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from([*'{}[]",:01.-+ \n\\/#', '"a":', '"b":', "1e999", "true", "null", "NaN"]), max_size=12))
def test_any_text_is_read_as_the_standard_library_reads_it_or_refused_with_a_line(parts):
    text = "{" + "".join(parts) + "}"
    values = strictly(text)
    if values is None:
        with pytest.raises(ConfigError, match=r"line \d+: "):
            read(text)
    else:
        assert read(text).values == values


def test_a_file_a_string_and_base64_say_the_same_as_a_dict(tmp_path):
    config = {**ONE, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    text = json.dumps(config, indent=1)
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert {str(translate(each)) for each in (config, text, path, str(path), encoded)} == {str(translate(config))}
    path.write_text(text.replace('"stage"', '"stagee"'))
    with pytest.raises(ConfigError, match=r"zero_optimization.stagee \(line 4\): unknown key; did you mean stage\?"):
        translate(path)


def test_the_report_tells_every_key_under_its_verdict():
    config = {
        **ONE,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": True},
        "zero_quantized": 1,
    }
    text = report(config)
    parts = dict(zip(("top", "refused", "adapted", "honoured", "ignored"), text.split("\n\n"), strict=True))
    assert "cannot be used" in parts["top"]
    assert "OFFLOAD_3" in parts["top"]
    assert "zero_quantized" in parts["refused"]
    assert "zero_optimization.offload_param.device" in parts["adapted"]
    assert "zero_optimization.stage = 3" in parts["honoured"]
    assert "zero_optimization.overlap_comm = true" in parts["ignored"]
    assert all(len(line) <= 110 for line in text.splitlines())


def test_every_key_has_one_row_with_a_reason():
    rows = list(manual())
    assert len({path for path, *_ in rows}) == len(rows) > 150
    assert all(word and text for _, _, word, text in rows)
