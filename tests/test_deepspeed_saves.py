"""Promise: an engine's checkpoints have DeepSpeed's shape, fit any number of ranks, and are never half there."""

import pytest
import torch

import onefold
import onefold.deepspeed as deepspeed
from checks import same
from deepspeed_loops import FP16, MICRO, STEPS, WARM, Net, settings, start
from deepspeed_steps import ADAM, ONE, engine_of, steps, weights
from onefold.errors import CheckpointError, WeightsError

SAVED = settings(3, **WARM, **FP16)


def save_in_the_middle(rank, num_ranks, directory):
    """Train, save in the middle; returns the losses after it."""
    run = start(deepspeed, SAVED, 0, num_ranks)
    steps(run, 0, 3)
    run.engine.save_checkpoint(directory, client_state={"epoch": 2, "mask": torch.arange(3)})
    steps(run, 3, STEPS)
    return run.seen


def go_on(rank, num_ranks, directory):
    torch.manual_seed(9)
    run = start(deepspeed, settings(1, **WARM, **FP16), 0, num_ranks)
    path, client_state = run.engine.load_checkpoint(directory)
    counts = [run.engine.global_steps, run.engine.global_samples, run.engine.skipped_steps]
    steps(run, 3, STEPS)
    return path, client_state, counts, run.seen


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 1), (1, 2)])
def test_a_run_goes_on_from_its_checkpoint_at_any_number_of_ranks_and_stage(ranks, tmp_path, saving, loading):
    want = ranks(saving).run(save_in_the_middle, str(tmp_path))[0]
    assert (tmp_path / "latest").read_text() == "global_step3"
    path, client_state, counts, seen = ranks(loading).run(go_on, str(tmp_path))[0]
    assert path == str(tmp_path / "global_step3")
    assert (client_state["epoch"], client_state["mask"].tolist()) == (2, [0, 1, 2])
    assert counts == [3, 3 * MICRO * saving, 0]
    assert seen["rates"] == want["rates"][3:]
    assert seen["scales"] == want["scales"][3:]
    assert seen["losses"] == pytest.approx(want["losses"][3:], rel=2e-3)


def save_alone(rank, num_ranks, config, path):
    """What scripts do: all ranks gather, rank 0 alone reads the state and writes it."""
    run = start(deepspeed, config, 0, num_ranks)
    steps(run, 0, 2)
    with onefold.gathered(list(run.engine.module.parameters())):
        if rank == 0:
            torch.save(run.engine.module.state_dict(), path)
    steps(run, 2, 3)
    return run.seen["losses"]


@pytest.mark.parametrize("stage", [2, 3])
def test_rank_0_alone_may_save_what_all_ranks_have_gathered(ranks, tmp_path, stage):
    offload = {"offload_optimizer": {"device": "cpu"}}
    losses = ranks(2).run(save_alone, settings(stage, offload), str(tmp_path / "weights.pt"))[0]
    run = start(deepspeed, settings(stage), 0, 1)
    run.engine.module.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert run.loss(2).item() == pytest.approx(losses[2], rel=1e-5)


def trained(config=None):
    run = start(deepspeed, settings(2, **WARM) if config is None else config, 0, 1)
    steps(run, 0, 2)
    return run


@pytest.mark.parametrize("stage", [2, 3])
def test_parts_of_a_checkpoint_may_be_left_out(tmp_path, stage):
    run = trained(settings(stage, **WARM))
    run.engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
    assert not (tmp_path / "latest").exists()
    want = weights(run.engine)

    fresh = start(deepspeed, settings(stage, **WARM), 0, 1).engine
    fresh.load_checkpoint(tmp_path, "7", load_module_only=True)
    assert (fresh.global_steps, fresh.lr_scheduler.last_batch_iteration, fresh.optimizer.num_updates) == (0, -1, 0)
    same(weights(fresh), want, 0)

    fresh = start(deepspeed, settings(stage, **WARM), 0, 1).engine
    fresh.load_checkpoint(tmp_path, 7, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (fresh.global_steps, fresh.lr_scheduler.last_batch_iteration, fresh.optimizer.num_updates) == (2, -1, 0)
    same(weights(fresh), want, 0)


def test_frozen_weights_may_be_left_out_and_not_asked_for(tmp_path):
    def half_frozen():
        torch.manual_seed(1)
        model = Net()
        model.embed.requires_grad_(False)
        return engine_of(settings(3, **ADAM), model)

    engine = half_frozen()
    engine.backward(engine(torch.ones(1, engine.module.embed.in_features)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    fresh = half_frozen()
    with pytest.raises(CheckpointError, match="2 of its parameters are not in the checkpoint"):
        fresh.load_checkpoint(tmp_path)
    fresh.load_checkpoint(tmp_path, load_module_strict=False)
    same(weights(fresh), weights(engine), 0)
    assert (fresh.global_steps, fresh.optimizer.num_updates) == (1, 1)


def test_a_save_that_fails_leaves_latest_and_what_it_names(tmp_path):
    run = trained()
    run.engine.save_checkpoint(tmp_path)
    steps(run, 2, 3)
    with pytest.raises(CheckpointError, match="client_state"):
        run.engine.save_checkpoint(tmp_path, client_state={"it": object()})
    assert (tmp_path / "latest").read_text() == "global_step2"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"global_step3 is saved, but .*latest cannot be written"):
        run.engine.save_checkpoint(tmp_path)
    assert start(deepspeed, settings(0, **WARM), 0, 1).engine.load_checkpoint(tmp_path, "global_step3")[1] == {}


@pytest.mark.parametrize("tag", ["latest", "a/b", "..", "zero_to_fp32.py", ".hidden", ""])
def test_a_tag_that_is_no_name_of_a_directory_is_refused(tmp_path, tag):
    with pytest.raises(CheckpointError, match="give a name for a directory"):
        engine_of({**ONE, **ADAM}).save_checkpoint(tmp_path, tag)


@pytest.mark.parametrize(("written", "told"), [(b"../x", "give a name for a directory"), (b"\xff", "cannot be read")])
def test_a_file_latest_that_names_nothing_is_refused(tmp_path, written, told):
    (tmp_path / "latest").write_bytes(written)
    with pytest.raises(CheckpointError, match=told):
        engine_of({**ONE, **ADAM}).load_checkpoint(tmp_path)


def save_apart(rank, num_ranks, directory):
    with pytest.raises(CheckpointError, match=f"the tag is 'rank{rank}' on rank {rank} and 'rank{1 - rank}' on"):
        engine_of({"train_batch_size": 2, **ADAM}).save_checkpoint(directory, f"rank{rank}")


def test_ranks_that_name_different_tags_are_refused(ranks, tmp_path):
    ranks(2).run(save_apart, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_load_is_told(tmp_path, caplog):
    engine = engine_of({**ONE, **ADAM})
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "has no file latest, so nothing was loaded" in caplog.text
    engine.save_checkpoint(tmp_path, "there")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*; in .* there are: there"):
        engine.load_checkpoint(tmp_path, "not-there")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"was written by DeepSpeed. Import it once(?s:.*)import-deepspeed"):
        engine.load_checkpoint(tmp_path, "theirs")


def export_16bit(rank, num_ranks, directory, is_asked):
    gather = {"stage3_gather_16bit_weights_on_model_save": is_asked}
    model = Net()
    model.embed.requires_grad_(False)
    engine = engine_of(settings(3, gather, bf16={"enabled": True}), model)
    done = engine.save_16bit_model(directory), engine.save_16bit_model(directory, "few.bin", True)
    whole = engine._zero3_consolidated_16bit_state_dict()
    return done, whole, {name: value.bfloat16() for name, value in weights(engine).items()}


def test_16_bit_weights_are_one_file_where_they_are_asked_for(ranks, tmp_path):
    done, whole, want = ranks(2).run(export_16bit, str(tmp_path), True)[0]
    assert done == (True, True)
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    same(written, want, 0)
    same(whole, want, 0)
    few = torch.load(tmp_path / "few.bin", weights_only=True)
    assert {name for name in written if name not in few} == {"embed.weight", "embed.bias"}


def test_16_bit_weights_that_are_not_asked_for_or_cannot_be_written_are_told_of(tmp_path, caplog):
    assert export_16bit(0, 1, str(tmp_path), False)[0] == (False, False)
    assert "set stage3_gather_16bit_weights_on_model_save, or use onefold.export" in caplog.text
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="could not be written"):
        engine_of(ONE).save_16bit_model(str(tmp_path / "file"))


def test_the_models_state_goes_out_and_in():
    model = Net()
    model.embed.requires_grad_(False)
    engine = engine_of(settings(0), model)
    few = engine.module_state_dict(exclude_frozen_parameters=True)
    assert {name.split(".")[0] for name in few} == {"blocks", "head"}
    zeros = {name: torch.zeros_like(value) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": zeros})
    same(weights(engine), zeros, 0)
    engine.destroy()
