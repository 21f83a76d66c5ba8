"""Promise: DeepSpeed's engine on Onefold answers, accumulates and refuses as its users expect.

That its numbers are DeepSpeed's is held by test_deepspeed_parity.py.
"""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import onefold.deepspeed as deepspeed
from checks import same
from deepspeed_loops import FP16, MICRO, STEPS, Net, Run, settings, start
from deepspeed_steps import ADAM, ONE, engine_of, steps, weights
from onefold.errors import EngineError, OptimizerError

# --- what it answers

SIZES = {"train_batch_size": 24, "gradient_accumulation_steps": 3}
CPU = {"offload_optimizer": {"device": "cpu"}}
ANSWERS = [
    (SIZES, {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3}),
    (SIZES, {"get_batch_info": (24, 8, 3)}),
    ({}, {"zero_optimization_stage": 0, "zero_optimization": False, "gradient_clipping": 1.0}),
    ({}, {"get_global_grad_norm": None, "was_step_applied": False, "managed_gradient_accumulation": True}),
    ({"zero_optimization": {"stage": 1}}, {"zero_optimization_stage": 1, "zero_optimization": True}),
    ({"zero_optimization": {"stage": 1}}, {"zero_optimization_partition_gradients": False}),
    ({"zero_optimization": {"stage": 2}}, {"zero_optimization_partition_gradients": True}),
    ({"zero_optimization": {"stage": 2}}, {"zero_optimization_partition_weights": False, "zero_cpu_offload": False}),
    ({"zero_optimization": {"stage": 3}}, {"zero_optimization_partition_weights": True}),
    ({"zero_optimization": {"stage": 3}}, {"zero_gather_16bit_weights_on_model_save": False}),
    (
        {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}},
        {"zero_gather_16bit_weights_on_model_save": True},
    ),
    ({"zero_optimization": {"stage": 2, **CPU}}, {"zero_cpu_offload": True, "zero_use_cpu_optimizer": True}),
    ({"gradient_clipping": 0}, {"gradient_clipping": 0.0}),
    ({}, {"fp16_enabled": False, "bfloat16_enabled": False, "dynamic_loss_scale": False, "loss_scale": 0.0}),
    ({"bf16": {"enabled": True}}, {"bfloat16_enabled": True, "get_data_types": (torch.bfloat16, torch.bfloat16)}),
    (
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        {"get_data_types": (torch.bfloat16, torch.float32)},
    ),
    ({"fp16": {"enabled": True}}, {"fp16_enabled": True, "dynamic_loss_scale": True, "initial_dynamic_scale": 65536.0}),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, {"loss_scale": 128.0, "dynamic_loss_scale": False}),
    ({"fp16": {"enabled": True, "auto_cast": True}}, {"fp16_auto_cast": True}),
    ({"torch_autocast": {"enabled": True}}, {"torch_autocast_enabled": True, "torch_autocast_dtype": torch.bfloat16}),
    (ADAM, {"optimizer_name": "adam", "get_lr": [0.1], "get_mom": [(0.5, 0.6)]}),
    ({}, {"optimizer_name": None, "scheduler_name": None, "get_lr": [], "get_mom": []}),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.7}}},
        {"get_mom": [0.7], "optimizer_name": "SGD", "optimizer_params": {"lr": 0.1, "momentum": 0.7}},
    ),
    ({"dataloader_drop_last": True, "steps_per_print": 7}, {"dataloader_drop_last": True, "steps_per_print": 7}),
    ({"prescale_gradients": True}, {"postscale_gradients": False, "gradient_predivide_factor": 1.0}),
]


@pytest.mark.parametrize(("config", "answers"), ANSWERS, ids=range(len(ANSWERS)))
def test_the_engine_answers_from_its_configuration(config, answers):
    engine = engine_of({**({} if "train_batch_size" in config else ONE), **config})
    assert {name: getattr(engine, name)() for name in answers} == answers


def test_the_loss_scale_is_told_by_every_name_that_scripts_read():
    engine = engine_of({**ONE, **ADAM, **FP16})
    assert (engine.optimizer.cur_scale, engine.optimizer.loss_scale) == (256.0, 256.0)
    assert engine.optimizer.dynamic_loss_scale
    assert not engine.optimizer.overflow
    scale = {"init_scale": 256.0, "scale_window": 100, "min_scale": 1.0, "delayed_shift": 1}
    assert engine.dynamic_loss_scale_args() == {**scale, "consecutive_hysteresis": False}


def test_what_the_engine_has_not_is_looked_up_in_the_model():
    model = Net()
    engine = engine_of(ONE, model)
    assert engine.module is model
    assert engine.embed is model.embed
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.train() is engine
    assert not engine.eval().module.training
    assert (engine.device.type, engine.global_rank, engine.world_size, engine.dp_world_size) == ("cpu", 0, 1, 1)


MISSING = [
    ("offload_states", "is of DeepSpeed's engine and was not carried over: state rests where"),
    ("coalesce_grad_reduction", r"`with engine.no_sync\(\):`"),
    ("tput_timer", "nothing is timed"),
    ("zero_reduce_bucket_size", "engine.config holds the configuration"),
    ("get_sequence_parallel_group", "data parallelism only"),
    ("flatten", "a detail of DeepSpeed's"),
    ("heda", "neither the engine nor its model has an attribute 'heda'"),
]


@pytest.mark.parametrize(("name", "told"), MISSING, ids=[name for name, _ in MISSING])
def test_a_name_that_is_missing_says_whose_it_is_and_what_to_do(name, told):
    with pytest.raises(AttributeError, match=told):
        getattr(engine_of(ONE), name)


# --- the loop


def test_misuse_of_the_loop_is_an_error_that_says_what_to_do():
    bare, engine = engine_of(ONE), engine_of({**ONE, **ADAM})
    for name in ("backward", "scale", "step"):
        with pytest.raises(EngineError, match=f"engine.{name} needs an optimizer"):
            getattr(bare, name)(*(() if name == "step" else (torch.ones(()),)))
    for loss in (torch.ones(()), torch.ones(2, requires_grad=True), 3.0):
        with pytest.raises(EngineError, match="takes a loss, a tensor of one number with a gradient, not"):
            engine.backward(loss)
    with engine.no_sync():
        with pytest.raises(EngineError, match="leave it before the last micro-batch"):
            engine.step()
        with pytest.raises(EngineError, match="inside of engine"), engine.no_sync():
            pass
    with pytest.raises(EngineError, match="a step of 3 samples is no multiple of 2"):
        engine_of({"train_batch_size": 2}).set_train_batch_size(3)
    with pytest.raises(EngineError, match=r"every engine.step\(\) is a boundary"):
        engine_of({**ONE, "managed_gradient_accumulation": False}).set_gradient_accumulation_boundary(True)
    with pytest.raises(EngineError, match="leave out schedule="):
        engine.compile(schedule=[])
    with pytest.raises(EngineError, match="custom_load_fn is not called"):
        engine.load_checkpoint("nowhere", custom_load_fn=print)
    with pytest.raises(EngineError, match='weights under "module"'):
        engine.load_module_state_dict(engine.module.state_dict())
    with pytest.raises(OptimizerError, match=r"call engine.backward\(loss\)"):
        engine.optimizer.backward(engine(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_may_be_put_where_it_is_and_is_neither_cast_nor_moved(stage):
    run = start(deepspeed, settings(stage), 0, 1)
    want = weights(run.engine)
    for put in (run.engine.to(run.engine.device), run.engine.cpu(), run.engine.float(), run.engine.to(torch.float32)):
        assert put is run.engine
    for cast in (run.engine.half, run.engine.bfloat16, lambda: run.engine.to("meta")):
        with pytest.raises(EngineError, match=r"an engine computes in torch\.float32 on cpu, and is neither"):
            cast()
    same(weights(run.engine), want, 0)
    steps(run, 0, 1)


@pytest.mark.parametrize("stage", [0, 3])
def test_no_sync_works_at_every_stage(stage):
    def losses(is_inside):
        run = start(deepspeed, settings(stage, gradient_accumulation_steps=2), 0, 1)
        for step in range(STEPS):
            if is_inside:
                with run.engine.no_sync():
                    run.engine.backward(run.loss(2 * step))
            else:
                run.engine.backward(run.loss(2 * step))
            run.engine.set_gradient_accumulation_boundary(True)
            run.engine.backward(run.loss(2 * step + 1))
            run.step()
        return run.seen["losses"]

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


class Both(Net):
    """Returns its loss beside what it was made from, as models of Hugging Face do."""

    def forward(self, x, y):
        out = super().forward(x)
        return {"loss": nn.functional.mse_loss(out.float(), y), "outputs": (out, out)}


@pytest.mark.parametrize("config", [settings(2), settings(3, **FP16)], ids=["fp32", "fp16"])
def test_a_plain_backward_divides_once_whatever_else_the_model_returns(config):
    def trained(is_plain):
        torch.manual_seed(0)
        engine = engine_of({**config, "gradient_accumulation_steps": 2}, Both())
        run = Run(engine, 0, 1)
        for micro_step in range(4):
            loss = engine(*run.batch(micro_step))["loss"]
            loss.backward() if is_plain else engine.backward(loss)
            engine.step()
        return weights(engine)

    same(trained(True), trained(False), 0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_that_comes_through_another_engine_is_divided_once(stage):
    config = settings(stage, gradient_accumulation_steps=2)

    def norm(is_engine):
        run = start(deepspeed, config, 0, 1)
        judge = nn.Linear(MICRO, 1)
        nn.init.constant_(judge.weight, 0.5)
        judge = engine_of(config, judge) if is_engine else judge
        for micro_step in range(2):
            run.engine.backward(judge(run.engine(run.batch(micro_step)[0])).sum())
            run.step()
        return run.engine.get_global_grad_norm()

    assert norm(True) == pytest.approx(norm(False), rel=1e-6)


def test_a_plain_backward_of_another_thread_is_divided_by_itself():
    config = settings(0, gradient_accumulation_steps=2)

    def norms(is_inside):
        """Of one engine that is stepped with a plain backward: inside of another one's backward, or after it."""
        first, second = start(deepspeed, config, 0, 1), start(deepspeed, config, 0, 1)
        for micro_step in range(2):
            loss, other = first.loss(micro_step), second.loss(micro_step)
            aside = threading.Thread(target=other.backward)

            def run(_, aside=aside):
                aside.start()
                aside.join()

            if is_inside:
                loss.register_hook(run)
            first.engine.backward(loss)
            if not is_inside:
                run(None)
            first.step()
            second.step()
        return first.engine.get_global_grad_norm(), second.engine.get_global_grad_norm()

    assert norms(True) == norms(False)


def test_an_engine_whose_model_keeps_what_it_returned_is_freed_with_it():
    run = start(deepspeed, settings(3, gradient_accumulation_steps=2), 0, 1)
    run.engine.module.kept = run.loss(0)
    run.engine.backward(run.engine.module.kept)
    seen = [weakref.ref(each) for each in (run.engine, run.engine.module, run.engine.optimizer)]
    del run
    gc.collect()
    assert [each() for each in seen] == [None, None, None]


@pytest.mark.parametrize(("stage", "told"), [(1, "is forgotten"), (2, "stays")])
def test_clearing_gradients_in_the_middle_of_a_step_is_told_of_once(caplog, stage, told):
    run = start(deepspeed, settings(stage, gradient_accumulation_steps=2), 0, 1)
    run.engine.zero_grad()
    run.engine.backward(run.loss(0))
    run.step()
    assert caplog.messages == []
    for _ in range(2):
        run.engine.zero_grad()
    assert len(caplog.messages) == 1
    assert f"a step of 2 micro-batches: what the first 1 added up {told}, as with DeepSpeed" in caplog.messages[0]


class Peeking(nn.Module):
    """Remembers in what it computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        out = self.linear(x)
        self.seen = out.dtype
        return out


def test_autocast_is_around_the_forward_alone():
    engine = engine_of({**ONE, **ADAM, "torch_autocast": {"enabled": True}}, Peeking())
    engine.backward(engine(torch.ones(1, 2)).float().sum())
    assert engine.module.seen == torch.bfloat16
    assert engine.module.linear.weight.dtype == torch.float32
    assert engine.module.linear(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch looks at it
def test_compile_compiles_every_block_and_changes_no_number():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    plain, run = start(deepspeed, settings(3), 0, 1), start(deepspeed, settings(3), 0, 1)
    assert not run.engine.is_compiled
    run.engine.compile(backend=backend)
    run.engine.compile(backend=backend)
    steps(run, 0, 2)
    steps(plain, 0, 2)
    assert run.engine.is_compiled
    assert len(compiled) >= 1
    assert run.seen["losses"] == plain.seen["losses"]
