"""Promise: examples/lm, run as a person runs it, trains the same model whatever the plan and the number of ranks,
leaves its curve and metrics, and explains itself when asked and when misused."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forks import Forks, launched
from plans import NAMED_PLANS

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "lm" / "train.py"
TINY = (
    *("--device", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--global-batch", "8"),
    *("--steps", "5", "--micro-batch", "2", "--eval-batches", "2", "--sample-tokens", "8", "--log-every", "2"),
)
"""Small enough for seconds. On 2 ranks each runs 2 micro-batches a step, so gradients accumulate."""
BYTES_A_PARAMETER = {"fp32": 16, "bf16": 14, "fp16": 16}


@pytest.fixture(scope="module")
def forks():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COLUMNS": "120", "NO_COLOR": "1"}.items():
            patch.setenv(name, value)
        process = Forks("matplotlib.pyplot", "pydantic", "rich", "typer")
    yield process
    process.close()


@pytest.fixture(scope="module")
def run(forks):
    """`run(num_ranks, *args)` runs the example, as `python train.py` on one rank, as torchrun does on more."""

    def start(num_ranks, *args):
        return forks.run(SCRIPT, *args, cwd=ROOT, ranks=launched(num_ranks) if num_ranks > 1 else ({},))

    return start


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """`trained(num_ranks, *args)` trains once for each set of arguments: (metrics, printed text, output folder)."""
    runs = {}

    def train(num_ranks, *args):
        key = (num_ranks, args)
        if key not in runs:
            out = tmp_path_factory.mktemp("lm")
            done = run(num_ranks, *TINY, *args, "--out", out)
            assert done.returncode == 0, done.stderr
            runs[key] = json.loads((out / "metrics.json").read_text()), done.stdout, out
        return runs[key]

    return train


def test_torchrun_starts_it(trained, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, str(SCRIPT), *TINY, "--plan", "zero_3", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert losses(json.loads((tmp_path / "metrics.json").read_text())) == losses(trained(2, "--plan", "zero_3")[0])


def losses(metrics):
    return [step["loss"] for step in metrics["steps"]]


@pytest.mark.parametrize("plan", ["zero_1", "zero_2", "zero_3"])
def test_every_plan_trains_the_same_model(trained, plan):
    want, got = trained(2, "--plan", "zero_0")[0], trained(2, "--plan", plan)[0]
    assert losses(got) == losses(want)
    assert got["held_out_loss"] == want["held_out_loss"]
    assert got["sample"] == want["sample"]


OFFLOADS = [("offload",), ("offload", "--fraction", "0.5"), ("offload", "--fraction", "auto")]


@pytest.mark.parametrize("plan", OFFLOADS, ids=" ".join)
def test_offloading_changes_only_rounding(trained, plan):
    # The compiled host kernel rounds square roots differently from torch.
    want, got = trained(2, "--plan", "zero_0")[0], trained(2, "--plan", *plan)[0]
    assert losses(got) == pytest.approx(losses(want), abs=1e-4)
    assert got["held_out_loss"] == pytest.approx(want["held_out_loss"], abs=1e-4)
    assert got["memory_bytes_a_rank"]["predicted"] == got["memory_bytes_a_rank"]["measured"]


def test_a_fraction_is_kept_on_the_device(trained):
    whole, half = (trained(2, "--plan", *plan)[0]["memory_bytes_a_rank"]["measured"] for plan in OFFLOADS[:2])
    assert half["optim"].keys() == {"device", "host"}
    assert 0 < half["optim"]["host"] < whole["optim"]["host"]


def test_delayed_updates_are_late_after_the_exact_ones(trained):
    exact = trained(2, "--plan", "offload")[0]
    late, printed, _ = trained(2, "--plan", "offload", "--delayed", "--delay-after", "2")
    assert losses(late)[:3] == losses(exact)[:3]
    assert losses(late)[3] != losses(exact)[3]
    assert losses(late) == pytest.approx(losses(exact), abs=0.2)
    assert "offload, fp32, 2 ranks (delayed)" in printed


def test_the_number_of_ranks_changes_only_rounding(trained):
    one, two = trained(1, "--plan", "zero_3")[0], trained(2, "--plan", "zero_3")[0]
    assert (one["num_ranks"], two["num_ranks"]) == (1, 2)
    assert losses(one) == pytest.approx(losses(two), abs=1e-4)
    assert one["held_out_loss"] == pytest.approx(two["held_out_loss"], abs=1e-4)


def test_checkpointing_activations_changes_nothing(trained):
    want, got = trained(2, "--plan", "zero_3")[0], trained(2, "--plan", "zero_3", "--checkpoint-activations")[0]
    assert losses(got) == losses(want)


def test_it_learns(trained):
    metrics = trained(2, "--plan", "zero_3")[0]
    first, *_, last = losses(metrics)
    assert first == pytest.approx(math.log(256), abs=0.2)
    assert last < first - 0.2


@pytest.mark.parametrize("precision", BYTES_A_PARAMETER)
def test_every_precision_trains_and_holds_what_it_says(trained, precision):
    metrics = trained(2, "--plan", "zero_3", *(("--precision", precision) if precision != "fp32" else ()))[0]
    assert losses(metrics) == pytest.approx(losses(trained(2, "--plan", "zero_3")[0]), abs=0.1)
    measured = sum(sum(tiers.values()) for tiers in metrics["memory_bytes_a_rank"]["measured"].values())
    # A rank also holds the padding of its shards, a few percent in a model this small.
    assert measured / metrics["num_parameters"] == pytest.approx(BYTES_A_PARAMETER[precision] / 2, rel=0.05)


@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_2", "zero_3"])
def test_the_memory_table_predicts_what_is_held(trained, plan):
    metrics, printed, _ = trained(2, "--plan", plan)
    memory = metrics["memory_bytes_a_rank"]
    assert memory["predicted"] == memory["measured"]
    for kind in ("params", "grads", "optim"):
        assert f"{memory['measured'][kind]['device']:,}" in printed
    for word in ("parameters", "gradients", "optimizer state", "predicted bytes", "measured bytes"):
        assert word in printed


def test_progress_is_printed_once_and_in_lines_without_a_terminal(trained):
    printed = trained(2, "--plan", "zero_3")[1]
    shown = [line.split()[1] for line in printed.splitlines() if line.startswith("step ")]
    assert shown == ["1/5", "2/5", "4/5", "5/5"]


def test_what_the_host_does_is_shown_where_it_holds_something(trained):
    metrics, printed, _ = trained(2, "--plan", "offload")
    shown = r"^step .* MiB a rank\n +host \d+ MiB  device busy \d+%, host busy \d+%, waiting \d+%$"
    assert len(re.findall(shown, printed, re.MULTILINE)) == 4
    held = sum(tiers.get("host", 0) for tiers in metrics["memory_bytes_a_rank"]["measured"].values())
    assert {step["host_bytes"] for step in metrics["steps"]} == {held}
    assert all(step["host_busy"] >= 0 and 0 <= step["host_wait"] <= 1 for step in metrics["steps"])
    assert sum(step["host_busy"] for step in metrics["steps"]) > 0  # one by one: an update may end in the next step

    metrics, printed, _ = trained(2, "--plan", "zero_3")
    assert "host" not in printed
    assert {step[name] for step in metrics["steps"] for name in ("host_bytes", "host_busy", "host_wait")} == {0}


def test_the_curve_is_a_picture(trained):
    image = pytest.importorskip("matplotlib.image")
    pixels = torch.tensor(image.imread(trained(2, "--plan", "zero_3")[2] / "loss.png"))
    height, width, _ = pixels.shape
    assert min(height, width) > 300
    red, _, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    assert ((blue - red) > 0.5).sum() > 200, "the blue line of the training loss"
    assert ((red - blue) > 0.5).sum() > 10, "the orange point of the held-out loss"


def test_the_metrics_tell_the_run(trained):
    metrics, _, out = trained(2, "--plan", "zero_3")
    assert [step["step"] for step in metrics["steps"]] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(value) for step in metrics["steps"] for value in step.values())
    assert metrics["config"]["plan"] == "zero_3"
    assert metrics["config"]["global_batch"] == 8
    assert (out / "sample.txt").read_text(encoding="utf-8").startswith(metrics["config"]["prompt"])


def test_help_explains_every_plan(run):
    done = run(1, "--help")
    assert done.returncode == 0
    for word in (*NAMED_PLANS, "torchrun", "not built yet", "--micro-batch", "--config", "--checkpoint-activations"):
        assert word in done.stdout
    for word in ("--fraction NUMBER|auto", "--delayed", "--delay-after", "device busy", "host busy", "waiting"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--plan", "zero_9"), ["zero_9", *NAMED_PLANS]),
        (("--plan", "infinity"), ["disk", "OFFLOAD_3 is the nearest plan that runs"]),
        (("--width", 33), ["--width", "--heads", "33"]),
        (("--global-batch", 9, "--micro-batch", 2), ["9", "--micro-batch 2"]),
        (("--fraction", "1.5"), ["--fraction", "'1.5'", "from 0 to 1", "auto"]),
        (("--fraction", "half"), ["--fraction", "'half'", "from 0 to 1", "auto"]),
        (("--plan", "zero_3", "--delayed"), ["delayed", "OFFLOAD", "no update can be late"]),
        (("--delayed", "--delay-after", "-1"), ["--delay-after", "greater than or equal to 0"]),
    ],
    ids=[
        *("no such plan", "tier not built", "heads", "micro-batch", "fraction too large", "no fraction"),
        *("nothing to delay", "negative delay"),
    ],
)
def test_a_mistake_is_named(run, args, words, tmp_path):
    done = run(1, *TINY, *args, "--out", tmp_path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_before_training(run, tmp_path):
    (tmp_path / "file").touch()
    done = run(1, *TINY, "--out", tmp_path / "file" / "out")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--out" in done.stderr
    assert "step" not in done.stdout


def test_flags_win_over_the_config_file(trained, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('plan = "zero_0"\nsteps = 3\nlog-every = 1\nseed = 7\n')
    metrics = trained(1, "--config", config, "--plan", "zero_2")[0]
    assert metrics["config"]["plan"] == "zero_2"
    assert metrics["config"]["steps"] == 5  # TINY's flag
    assert metrics["config"]["log_every"] == 2
    assert metrics["config"]["seed"] == 7  # from the file


def test_an_unknown_name_in_the_config_file_is_named(run, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("widht = 3\n")
    done = run(1, *TINY, "--config", config, "--out", tmp_path / "out")
    assert done.returncode != 0
    assert "widht" in done.stderr


@pytest.mark.parametrize(
    ("line", "want"), [("fraction = 0.25", 0.25), ("fraction = 1", 1), ('fraction = "auto"', "auto")]
)
def test_the_config_file_takes_a_fraction(trained, tmp_path, line, want):
    config = tmp_path / "run.toml"
    config.write_text(f"{line}\n")
    assert trained(1, "--config", config, "--plan", "offload")[0]["config"]["fraction"] == want


@pytest.mark.parametrize("line", ["fraction = true", "fraction = nan", "fraction = [0.5]"])
def test_a_bad_fraction_in_the_config_file_is_named(run, tmp_path, line):
    config = tmp_path / "run.toml"
    config.write_text(f"{line}\n")
    done = run(1, *TINY, "--config", config, "--out", tmp_path / "out")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "from 0 to 1" in done.stderr


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_the_global_batch_out(num_ranks, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import data

    tokens = torch.arange(5000).to(torch.uint8)
    inputs, targets = data.global_batch(tokens, 8, 16, "train", 0, 3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(torch.cat([data.rank_slice(inputs, rank, num_ranks) for rank in range(num_ranks)]), inputs)
    for other in (("train", 0, 4), ("train", 1, 3), ("held out", 0, 3)):
        assert not torch.equal(data.global_batch(tokens, 8, 16, *other)[0], inputs)
