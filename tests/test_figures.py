"""docs/figures/samplers.py: the chains of its figure against their known target."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def samplers():
    path = ROOT / "docs/figures/samplers.py"
    spec = importlib.util.spec_from_file_location("samplers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("sampler", ["sde", "ode"])
def test_sde_and_flow_end_in_the_target(sampler, samplers):
    policy = samplers.MixturePolicy(eta=0.5, num_steps=128)
    chains = samplers.sample(policy, sampler, 0.5, 20_000)
    ends = chains[-1]
    weight, left, right = samplers.modes(ends)
    assert abs(weight - 0.65) < 0.025
    assert abs(left / 0.15 - 1) < 0.08 and abs(right / 0.15 - 1) < 0.08
    assert abs(ends[ends > 0].mean() - 0.6) < 0.02
    assert abs(ends[ends < 0].mean() + 0.6) < 0.02
    for k in (32, 64, 96):  # and go through the marginals of the noising process
        means, variance = policy.marginals[k]
        want_mean = (policy.weights * means).sum()
        want_variance = variance + (policy.weights * means**2).sum() - want_mean**2
        assert abs(chains[k].mean() - want_mean) < 0.05
        assert abs(chains[k].var() / want_variance - 1) < 0.08


def test_a_larger_scale_sharpens(samplers):
    policy = samplers.MixturePolicy(eta=0.5, num_steps=64)
    found = []
    for scale in (0.5, 0.75, 1.0):
        found.append(samplers.modes(samplers.sample(policy, "ode", scale, 5000)[-1]))
    widths = [max(modes.left_width, modes.right_width) for modes in found]
    assert (np.diff(widths) < 0).all() and widths[2] < 0.5 * 0.15
    weights = [modes.right_weight for modes in found]
    assert (np.diff(weights) > 0.05).all()  # greedier: the likelier mode gains


def test_paper_settings_widen_the_flow(samplers):
    """What the script says below its figure: the noising does not reach the prior at eta 2.5."""
    policy = samplers.MixturePolicy(eta=2.5, num_steps=8)
    assert 1 < policy.marginals[0].variance < 1.3 and policy.eta**2 == 6.25
    widths = []
    for sampler in samplers.SAMPLERS.values():
        modes = samplers.modes(samplers.sample(policy, *sampler, 5000)[-1])
        widths.append(max(modes.left_width, modes.right_width))
    sde, flow, greedy = widths
    assert greedy < 0.15 < sde < flow


def test_score_is_the_gradient_of_the_log_density(samplers):
    policy = samplers.MixturePolicy(eta=1.0, num_steps=4)
    x = torch.linspace(-2, 2, 9)[:, None].requires_grad_()
    for k in range(5):
        (want,) = torch.autograd.grad(policy.density(x, k).log().sum(), x)
        torch.testing.assert_close(policy.score(x.detach(), k), want, rtol=1e-3, atol=1e-3)


def test_control_gives_the_mean_of_the_reversed_noising(samplers):
    """E[x_{k+1} | x_k] by numerical integration of noising kernel x marginal."""
    policy = samplers.MixturePolicy(eta=1.0, num_steps=8)
    y = torch.linspace(-6, 6, 24_001)[:, None]
    x = torch.tensor([[-1.0], [0.1], [0.8]])
    e = policy.step_sizes[5]
    kernel = torch.exp(-((x - (1 - e) * y[:, 0]) ** 2) / (4 * e))
    joint = policy.density(y, 6) * kernel  # (3, y)
    want = (joint * y[:, 0]).sum(dim=1) / joint.sum(dim=1)
    mean = x + e * (policy.control(torch.tensor(5), x) - x)
    torch.testing.assert_close(mean[:, 0], want, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_samplers_figure(samplers, tmp_path, monkeypatch, capsys):
    settings = (samplers.Setting(eta=0.5, num_steps=16), samplers.Setting(eta=2.5, num_steps=8))
    monkeypatch.setattr(samplers, "SETTINGS", settings)
    samplers.draw(tmp_path / "samplers.png", batch_size=500)
    assert (tmp_path / "samplers.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("\n") == 6
    assert (ROOT / "docs/figures/samplers.png").exists()
