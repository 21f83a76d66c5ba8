"""Promise: an element-wise torch.optim class runs on flat slices as on whole parameters; any other is refused."""

from itertools import pairwise

import pytest
import torch
from torch.optim import Optimizer

from onefold.errors import OptimizerError
from onefold.optim.elementwise import TorchRule, tried

NUM_STEPS = 10


class Plain(Optimizer):
    """Gradient descent whose direction is a hook for the classes below: what a third party might write."""

    def __init__(self, params, lr=0.01, **more):
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.direction(p, p.grad, group), alpha=-group["lr"])

    def direction(self, p, grad, group):
        return grad


class Rebinds(Plain):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad.sign()


class NestedState(Plain):
    def direction(self, p, grad, group):
        state = self.state[p]
        state["moments"] = [0.5 * moment + grad for moment in state.get("moments", [0.0, 0.0])]
        state["count"] = state.get("count", 0) + 1
        state["mask"] = grad > 0
        state["table"] = torch.ones(256, dtype=torch.uint8)
        return (state["moments"][0] + state["moments"][1]) / state["count"]


class ReplacesItsState(Plain):
    def direction(self, p, grad, group):
        self.state[p] = {"step": self.state[p].get("step", 0) + 1}
        return grad / self.state[p]["step"]


class StateFromConstructor(Plain):
    def __init__(self, params, lr=0.01, start=3.0):
        super().__init__(params, lr, start=start)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.full_like(p, start)

    def direction(self, p, grad, group):
        return grad / self.state[p]["sum"].add_(grad.abs())


class Rounds(Plain):
    """Differs by the last bits between slices, as vectorized kernels do that end a run with scalar code."""

    def direction(self, p, grad, group):
        return grad * (1 + 2.0**-22 * (p.numel() % 2))


class Lamb(Plain):
    def direction(self, p, grad, group):
        update = grad / (grad.abs() + 1e-6) + 0.01 * p
        return update * (p.norm() / update.norm()).clamp(0, 10)


class LARS(Plain):
    def direction(self, p, grad, group):
        return grad * (p.norm() / (grad.norm() + 1e-9)) if p.dim() > 1 else grad


class ClipsEachParameter(Plain):
    def direction(self, p, grad, group):
        return grad * min(1.0, 100.0 / (grad.norm().item() + 1e-6))


class CautiousMask(Plain):
    def direction(self, p, grad, group):
        mask = (grad * p > 0).to(grad.dtype)
        return grad * mask / mask.mean().clamp_min(1e-3)


class CentersConvolutions(Plain):
    def direction(self, p, grad, group):
        return grad - grad.mean(dim=(1, 2, 3), keepdim=True) if p.dim() == 4 else grad


class QuantizesLarge(Plain):
    def direction(self, p, grad, group):
        if p.numel() < 4096:
            return grad
        scale = grad.abs().max() / 127
        return (grad / scale).round() * scale


class ScalesByLength(Plain):
    def direction(self, p, grad, group):
        return grad / len(p)


class CountsInTheGroup(Plain):
    def direction(self, p, grad, group):
        group["count"] = group.get("count", 0) + 1
        return grad / group["count"]


class KeepsTheGradient(Plain):
    def direction(self, p, grad, group):
        last = self.state[p].get("last", grad)
        self.state[p]["last"] = grad
        return grad + last


class Noisy(Plain):
    def direction(self, p, grad, group):
        return grad + torch.randn_like(grad)


class WantsAClosure(Plain):
    def step(self, closure=None):
        assert closure is not None, "this optimizer evaluates the loss twice"


class Only1D(Plain):
    def direction(self, p, grad, group):
        return grad if p.dim() == 1 else grad[0, 0, 0, 0, 0]


class StateOnTheSide(Plain):
    def direction(self, p, grad, group):
        side = self.state["everywhere"]
        side["count"] = side.get("count", 0) + 1
        return grad / side["count"]


class OddState(Plain):
    def direction(self, p, grad, group):
        self.state[p]["rows"] = grad[::2].clone()
        return grad


ELEMENTWISE = [
    # class, arguments, bytes of state an element over fp32 masters
    (torch.optim.Adamax, {}, 8),
    (torch.optim.NAdam, {"decoupled_weight_decay": True}, 8),
    (torch.optim.RAdam, {"weight_decay": 0.1}, 8),
    (torch.optim.RMSprop, {}, 4),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 12),
    (torch.optim.Rprop, {}, 8),
    (torch.optim.ASGD, {"t0": 3.0}, 4),
    (torch.optim.Adadelta, {}, 8),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, 4),
    (torch.optim.AdamW, {"amsgrad": True}, 12),
    (torch.optim.SGD, {}, 0),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 4),
    (Rebinds, {}, 0),
    (ReplacesItsState, {}, 0),
    (NestedState, {}, 9),
    (StateFromConstructor, {"start": 2.0}, 4),
]
REFUSED = [
    # class, arguments, what the message says
    (torch.optim.LBFGS, {}, "LBFGS cannot .* closure .*onefold.AdamW"),
    (torch.optim.SparseAdam, {}, "SparseAdam cannot .*does not support dense gradients.*onefold.Adam,"),
    (torch.optim.Muon, {}, "Muon cannot .*1-D parameters .*only supports 2D.*onefold.AdamW"),
    (torch.optim.Adafactor, {}, "Adafactor cannot .*depends on other elements.*onefold.Lion"),
    (torch.optim.Adam, {"differentiable": True}, "Adam cannot .*a step .*failed"),
    (Lamb, {}, "Lamb cannot .*depends on other elements"),
    (Lamb, {"lr": 0.0}, "Lamb cannot .*depends on other elements"),
    (LARS, {}, r"LARS cannot .*shape \(6, 4\).*depends on other elements.*onefold.SGD"),
    (ClipsEachParameter, {}, "depends on other elements"),
    (CautiousMask, {}, "depends on other elements"),
    (CentersConvolutions, {}, r"shape \(2, 3, 2, 2\).*depends on other elements"),
    (QuantizesLarge, {}, r"shape \(64, 130\).*depends on other elements"),
    (ScalesByLength, {}, "depends on other elements"),
    (CountsInTheGroup, {}, r"on state kept outside state\[parameter\]"),
    (StateOnTheSide, {}, r"on state kept outside state\[parameter\]"),
    (KeepsTheGradient, {}, "ends with other weights"),
    (Noisy, {}, "depends on .* random numbers"),
    (WantsAClosure, {}, "AssertionError: this optimizer evaluates the loss twice"),
    (Only1D, {}, r"a step on a dense parameter of shape \(6, 4\) failed \(IndexError"),
    (OddState, {}, r"its state\['rows'\] has \(12, 20\) elements for \(24, 40\)"),
]


def names(value):
    return getattr(value, "__name__", None) or (str(value) if isinstance(value, dict) else None)


def draw(numel):
    generator = torch.Generator().manual_seed(numel)
    grads = [torch.randn(numel, generator=generator) * 10.0 ** (step % 3 - 1) for step in range(NUM_STEPS)]
    return torch.randn(numel, generator=generator), grads


def train_whole(cls, kwargs, group, shape):
    """The weights after the class itself trained one parameter, its learning rate halved at every third step."""
    weights, grads = draw(torch.Size(shape).numel())
    param = torch.nn.Parameter(weights.view(shape))
    optimizer = cls([{"params": [param], **group}], **kwargs)
    for step, grad in enumerate(grads):
        optimizer.param_groups[0]["lr"] *= 0.5 if step % 3 == 0 else 1.0
        param.grad = grad.view(shape)
        optimizer.step()
    return param.detach().flatten()


@torch.no_grad()
def train_slices(cls, kwargs, group, ends):
    """The same through `TorchRule`, in slices between `ends`, all gradients through one buffer."""
    rule = TorchRule(cls, kwargs)
    master, grads = draw(ends[-1])
    buffer, hyper = torch.empty_like(master), {**rule.defaults(), **group, "initial_lr": 1.0, "name": "decay"}
    slices = [(slice(*pair), rule.new_state()) for pair in pairwise(ends)]
    for step, grad in enumerate(grads):
        hyper["lr"] *= 0.5 if step % 3 == 0 else 1.0
        buffer.copy_(grad)
        for where, state in slices:
            rule.update_slice(master[where], buffer[where], state, hyper)
    return master


@pytest.mark.parametrize(("cls", "kwargs", "itemsize"), ELEMENTWISE, ids=names)
def test_an_elementwise_class_is_accepted_and_its_state_counted(cls, kwargs, itemsize):
    rule = tried(cls, kwargs)
    assert rule.state_itemsize(torch.float32) == itemsize
    assert rule.name == f"Elementwise({cls.__name__})"


@pytest.mark.parametrize(
    ("cls", "itemsize"), [(torch.optim.Adamax, 16), (torch.optim.SGD, 0), (NestedState, 17)], ids=names
)
def test_state_of_double_masters_is_counted_as_it_is(cls, itemsize):
    assert tried(cls, {}).state_itemsize(torch.float64) == itemsize


@pytest.mark.parametrize("group", [{}, {"lr": 0.05, "weight_decay": 0.2}], ids=str)
@pytest.mark.parametrize(("cls", "kwargs"), [row[:2] for row in ELEMENTWISE], ids=names)
def test_slices_train_as_the_whole_parameter_does(cls, kwargs, group):
    if "weight_decay" in group and "weight_decay" not in TorchRule(cls, kwargs).defaults():
        group = {"lr": group["lr"]}
    whole = train_whole(cls, kwargs, group, (7, 11))
    assert torch.equal(train_slices(cls, kwargs, group, (0, 77)), whole)
    assert torch.equal(train_slices(cls, kwargs, group, (0, 3, 3, 40, 76, 77)), whole)
    assert not torch.equal(whole, draw(77)[0])


@pytest.mark.parametrize(("cls", "kwargs", "said"), REFUSED, ids=names)
def test_any_other_class_is_refused_with_reason_and_way_out(cls, kwargs, said):
    with pytest.raises(OptimizerError, match=said) as refused:
        tried(cls, kwargs)
    assert "layouts that keep parameters whole do not exist yet" in str(refused.value)


def test_rounding_is_told_apart_from_dependence():
    tried(Rounds, {})


def test_a_fused_kernel_is_accepted_exact_or_not():
    assert tried(torch.optim.Adam, {"fused": True}).state_itemsize(torch.float32) == 8


@pytest.mark.parametrize(
    ("cls", "kwargs", "said"),
    [
        (torch.optim.RMSprop, {"lr": -1.0}, r"RMSprop\(lr=-1.0\) cannot be built: ValueError: Invalid learning rate"),
        (torch.optim.RMSprop, {"momentun": 0.9}, r"RMSprop\(momentun=0.9\) cannot be built: TypeError.*momentun"),
        (torch.optim.SGD, {"lr": 1e38}, r"SGD\(lr=1e\+38\): weights are no longer finite"),
        (Optimizer, {}, "Optimizer.* cannot be built"),
        (torch.nn.Linear, {}, "expected a subclass of torch.optim.Optimizer, not .*Linear"),
        ("AdamW", {}, "expected a subclass of torch.optim.Optimizer, not 'AdamW'"),
    ],
    ids=names,
)
def test_wrong_arguments_are_not_blamed_on_the_class(cls, kwargs, said):
    with pytest.raises(OptimizerError, match=said) as refused:
        tried(cls, kwargs)
    assert "flat shards" not in str(refused.value)


@pytest.mark.parametrize("cls", [torch.optim.Adamax, Noisy, Lamb], ids=names)
def test_probing_gives_the_same_answer_and_leaves_random_state_alone(cls):
    def answer():
        try:
            return tried(cls, {}).state_itemsize(torch.float32)
        except OptimizerError as refused:
            return str(refused)

    answers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        answers.append(answer())
        assert torch.equal(torch.get_rng_state(), before)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("cls", [torch.optim.Adamax, ReplacesItsState], ids=names)
def test_the_callers_state_dict_is_the_one_kept(cls):
    rule = TorchRule(cls)
    state = rule.new_state()
    with torch.no_grad():
        for _ in range(3):
            rule.update_slice(torch.ones(5), torch.ones(5), state, rule.defaults())
    assert state["step"] == 3


def test_an_empty_slice_is_no_case():
    rule = TorchRule(torch.optim.Adamax)
    state = rule.new_state()
    rule.update_slice(torch.empty(0), torch.empty(0), state, rule.defaults())
    assert state == {}
