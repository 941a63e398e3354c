"""What has to hold for the numbers of RadioDiff: run it with ``pytest`` before a long run.

Each test is one of the requirements that README.md lists.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import diffusion
import milestones
import vae as vaes
from data import DataError, load_maps
from model import Denoiser
from settings import SettingsError, read_settings
from system import Training, rate_at

HERE = Path(__file__).parent
STABLE = [
    "model.loss_weight_max=100",
    "model.width=8",
    "data.cities=4",
    "data.batch_size=4",
    "trainer.check_inputs=true",
    "trainer.nan_loss=stop",
]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def settings(*changes):
    return read_settings(HERE / "config_fixed.yaml", [*STABLE, *changes])


def batch(model, *, size=8):
    torch.manual_seed(0)
    street = torch.ones(size, 1, 8, 8)
    street[:, :, 2:5, 2:5] = 0.0  # a building
    network = Denoiser(model, 3)
    return network, torch.randn(size, 3, 8, 8), torch.randn(size, 2, 32, 32), street


# ------------------------------------------------------------------------------- loss weights
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_weights_are_finite_and_bounded_at_every_time(dtype, eps):
    t = torch.tensor([0.0, 1e-45, 6e-8, 1e-3, 0.5, 0.9999, 1.0]).to(dtype)
    for weight in diffusion.loss_weights(t, eps, most=100.0):
        assert torch.isfinite(weight).all()
        assert weight.min() > 0
        assert weight.max() <= 100


def test_bound_changes_no_weight_within_it():
    t = torch.linspace(0.01, 0.99, 99)
    for bounded, plain in zip(
        diffusion.loss_weights(t, 1e-8, most=100.0), diffusion.loss_weights(t, 1e-8), strict=True
    ):
        assert torch.equal(bounded, plain)


def test_first_weight_needs_its_bound_at_zero_and_the_second_at_one():
    first, second = diffusion.loss_weights(torch.tensor([0.0, 1.0]), 0.0)
    assert torch.isinf(first).tolist() == [True, False]
    assert torch.isinf(second).tolist() == [False, True]


def test_times_are_above_zero_if_the_first_time_step_is_one():
    torch.manual_seed(0)
    model = settings("model.first_timestep=1", "model.timesteps=7").model
    t = diffusion.draw_times(torch.empty(4096, 1), model)
    assert t.min() > 0
    assert t.max() == 1


# ---------------------------------------------------------------------------------- the loss
@pytest.mark.parametrize("first", [0, 1])
def test_loss_and_gradient_are_finite_where_a_weight_has_its_pole(first):
    model = replace(settings().model, timesteps=1, first_timestep=first)  # t = 0, or t = 1
    network, x0, condition, street = batch(model)
    found = diffusion.losses(network, x0, condition, street, model)
    found.total.backward()
    assert torch.isfinite(found.total)
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


def test_without_the_bound_one_sample_at_zero_makes_the_loss_nan():
    model = replace(settings().model, timesteps=1, first_timestep=0, loss_weight_max=None)
    network, x0, condition, street = batch(model)
    found = diffusion.losses(network, x0, condition, street, model)
    assert torch.isnan(found.simple)
    assert found.vlb == 0


def test_both_terms_are_part_of_the_loss():
    model = replace(settings().model, loss_vlb_weight=0.5)
    network, x0, condition, street = batch(model)
    found = diffusion.losses(network, x0, condition, street, model)
    assert found.vlb > 0
    assert torch.equal(found.total, found.simple + found.vlb)


def test_prediction_bound_keeps_the_loss_finite_but_stops_the_gradient():
    model = replace(settings().model, prediction_bound=1e6)
    network, x0, condition, street = batch(model)
    with torch.no_grad():
        network.head_c.bias.fill_(1e25)
        network.head_noise.bias.fill_(1e25)
    found = diffusion.losses(network, x0, condition, street, model)
    found.total.backward()
    assert torch.isfinite(found.total)
    assert max(p.grad.abs().max() for p in network.parameters()) == 0


# ------------------------------------------------------------------------------- input checks
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["latents", "condition", "street"])
def test_every_tensor_is_looked_at(name, bad):
    model = settings().model
    network, *tensors = batch(model)
    tensors[["latents", "condition", "street"].index(name)][5, 0, 1, 1] = bad
    with pytest.raises(diffusion.BadTensor, match=rf"{name}: 1 of .* \(sample 5 of the batch\)"):
        diffusion.losses(network, *tensors, model, check=True)


def test_unbounded_weight_is_named_by_the_check():
    model = replace(settings().model, timesteps=1, first_timestep=0, loss_weight_max=None)
    network, *tensors = batch(model)
    with pytest.raises(diffusion.BadTensor, match="weight_c: 8 of 8"):
        diffusion.losses(network, *tensors, model, check=True)


def test_maps_that_are_not_finite_are_refused_or_left_out(tmp_path, capsys):
    data = settings("data.corrupt_maps=1").data
    with pytest.raises(DataError, match="1 of 4 maps are not finite"):
        load_maps(replace(data, on_bad_map="stop"), 0, tmp_path)
    assert len(load_maps(replace(data, on_bad_map="drop"), 0, tmp_path)) == 3 * 8
    assert "left out" in capsys.readouterr().out


# -------------------------------------------------------------------------------------- latents
def test_latents_have_spread_one_and_decode(tmp_path):
    maps = load_maps(settings().data, 0, tmp_path)
    vae = vaes.fit(maps.radio, 3)
    radio = torch.from_numpy(maps.radio)[:, None]
    vae.set_scale("auto", radio)
    latents = vae.encode(radio)
    assert torch.isfinite(latents).all()
    assert 0.8 < latents.std() < 1.3
    assert (vae.decode(latents) - radio).square().mean() < 0.2 * radio.var()


def test_scale_of_blank_maps_is_not_finite_and_the_check_says_so(tmp_path):
    run = Training(settings("data.blank_maps=4", "model.width=8"), tmp_path)
    with pytest.raises(diffusion.BadTensor, match="latents: "):
        run.losses(next(run.batches()))


# -------------------------------------------------------------------------------- diffusion
def test_noisy_latents_are_the_map_at_zero_and_the_noise_at_one():
    x0, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    x = diffusion.noisy(x0, torch.tensor([0.0, 1.0]), noise)
    assert torch.equal(x[0], x0[0])
    assert torch.equal(x[1], noise[1])


def test_drawing_goes_through_both_ends_of_time():
    model = settings().model
    network, _, condition, _ = batch(model)
    assert torch.isfinite(diffusion.draw_maps(network, condition, (8, 3, 8, 8), 4, seed=0)).all()


# ------------------------------------------------------------------------------------ the run
def test_learning_rate_stays_between_its_ends():
    trainer = settings().trainer
    rates = [rate_at(step, trainer) for step in range(trainer.train_num_steps + 5)]
    assert min(rates) > 0
    assert max(rates) == trainer.lr
    assert rates[-1] == pytest.approx(trainer.min_lr)


def test_few_steps_are_finite_and_learn(tmp_path):
    run = Training(settings("model.width=16"), tmp_path)
    batches, losses = run.batches(), []
    for _ in range(24):
        found = run.losses(next(batches))
        run.optimizer.zero_grad()
        found.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(run.network.parameters(), 0.5)
        assert torch.isfinite(norm)
        for group in run.optimizer.param_groups:
            group["lr"] = 2e-3
        run.optimizer.step()
        losses.append(found.total.item())
    assert np.isfinite(losses).all()
    assert np.mean(losses[-6:]) < 0.9 * np.mean(losses[:6])


def test_milestone_brings_everything_back(tmp_path):
    run = Training(settings(), tmp_path)
    run.losses(next(run.batches())).total.backward()
    run.optimizer.step()
    run.step = 1
    run.save()
    other = Training(settings("seed=9"), tmp_path)
    other.resume(milestones.milestone(tmp_path, 1))
    assert other.step == 1
    for name, part in run.parts.items():
        was, now = part.state_dict(), other.parts[name].state_dict()
        assert repr(was) == repr(now)
    assert not list(tmp_path.rglob("*.partial"))


def test_milestone_of_another_model_is_refused(tmp_path):
    run = Training(settings(), tmp_path)
    run.save()
    other = Training(settings("model.width=16"), tmp_path)
    with pytest.raises(milestones.CheckpointError, match="another model"):
        other.resume(milestones.milestone(tmp_path, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.lr=fast", "trainer.lr is 'fast', a text"),
        ("trainer.lr=-1", "it has to be above 0"),
        ("trainer.lrr=1", "did you mean trainer.lr"),
        ("trainer.nan_loss=hide", "'ignore' or 'zero' or 'stop'"),
        ("data.image_size=30", "2 levels need a multiple of 8"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        settings(change)
