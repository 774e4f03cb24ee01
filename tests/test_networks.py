"""Networks, normalizer and reward scale of trudi_continuous.py, in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from makers import (
    ACTION_DIM,
    OBS_DIM,
    chain_noise,
    discounted_returns,
    make_agent,
    make_args,
    ode_action,
    plain_control,
)
from torch import nn
from torch.testing import assert_close

from trudi_continuous import (
    DiffusionPolicy,
    Normalizer,
    entropy_bound,
    sample_chain,
    scale_rewards,
    trajectory_kl,
)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# === Policy and critic ===
def test_control_against_plain_network():
    """The sum of three layers is one layer of the concatenated input."""
    policy = make_agent(make_args()).policy
    obs = torch.randn(9, OBS_DIM)
    x = torch.randn(9, ACTION_DIM)
    embedded = policy.embed(obs)
    controls = []
    for k in range(policy.num_steps):
        controls.append(policy.control_scales[k] * policy.control(embedded[k], x))
        assert_close(controls[k], plain_control(policy, obs, x, k))
    for one, next_one in itertools.pairwise(controls):
        assert (one != next_one).all()  # the network tells the steps apart


def test_controls_of_steps_have_the_same_gradients():
    policy = make_agent(make_args()).policy
    embedded = policy.embed(torch.randn(9, OBS_DIM))
    x = torch.randn(9, ACTION_DIM)
    parameters = list(policy.parameters())
    by_one = sum(policy.control(embedded[k], x).cos() for k in range(policy.num_steps))
    steps = policy.controls_of_steps()
    by_steps = sum(steps[k](embedded[k], x).cos() for k in range(policy.num_steps))
    assert_close(by_one, by_steps)
    expected = torch.autograd.grad(by_one.sum(), parameters, retain_graph=True)
    for gradient, want in zip(
        torch.autograd.grad(by_steps.sum(), parameters), expected, strict=True
    ):
        assert_close(gradient, want)
    with torch.no_grad():
        assert policy.controls_of_steps() == [policy.control] * policy.num_steps


@pytest.mark.parametrize("actor_dim, action_dim", [(5, 2), (60, 17), (1, 1)])
def test_first_layers_start_like_one_linear_layer(actor_dim, action_dim):
    """All weights and the bias are uniform, as in nn.Linear of the whole input."""
    hidden = 2000
    args = make_args(hidden_size=hidden)
    policy = DiffusionPolicy(actor_dim + 3, actor_dim, action_dim, args)
    whole = nn.Linear(actor_dim + action_dim + 32, hidden)
    bound = 1 / math.sqrt(actor_dim + action_dim + 32)
    layers = (policy.obs_layer, policy.control.x_layer, policy.time_layer)
    assert sum(layer.weight.numel() for layer in layers) == whole.weight.numel()
    assert policy.obs_layer.bias.shape == whole.bias.shape
    assert policy.control.x_layer.bias is None
    assert policy.time_layer.bias is None
    drawn = [whole.weight, whole.bias, policy.obs_layer.bias]
    drawn += [layer.weight for layer in layers]
    for values in drawn:
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded in one of a thousand cases
        shares = (values.detach().flatten().sort().values / bound + 1) / 2
        assert shares[0] >= 0
        assert shares[-1] <= 1
        expected = (torch.arange(len(shares)) + 0.5) / len(shares)
        assert (shares - expected).abs().max() < 1.95 / math.sqrt(len(shares))


def test_actor_and_critic_see_their_own_columns():
    agent = make_agent(make_args(), actor_dim=4, critic_start=4)
    policy = agent.policy
    noise = chain_noise(policy, 5)
    x = torch.randn(5, ACTION_DIM)
    latents = torch.ones(5, 1, 4, ACTION_DIM)
    controls = torch.zeros(5, 1, 4, ACTION_DIM)

    def of_actor(obs):
        chain = sample_chain(policy, policy.embed(obs), noise)
        kl = trajectory_kl(policy, policy.embed(obs), latents, controls)
        columns = [chain.action, entropy_bound(policy, chain)[:, None], kl[:, None]]
        columns.append(ode_action(policy, obs, x, 1.0))
        return torch.cat(columns, dim=1)

    def of_critic(obs):
        return agent.critic.value(agent.critic.features(obs, x))

    obs = torch.randn(5, OBS_DIM)
    for column in range(OBS_DIM):
        changed = obs.clone()
        changed[:, column] += 1
        actor_differs = of_actor(obs) != of_actor(changed)
        critic_differs = of_critic(obs) != of_critic(changed)
        if column < 4:
            assert actor_differs.all()
            assert not critic_differs.any()
        else:
            assert not actor_differs.any()
            assert critic_differs.all()


# === Normalizer ===
def test_normalizer_streams():
    normalizer = Normalizer(3)
    data = 5 + torch.randn(1000, 3) * torch.tensor([0.1, 1.0, 30.0])
    prior_count = normalizer.count.clone()  # so many observations of mean 0 and variance 1
    assert prior_count <= 1e-3  # they do not matter
    for part in data.split([1, 2, 64, 7, 500, 1, 425]):
        normalizer.update(part)
    count = 1000 + prior_count
    mean = data.sum(dim=0) / count
    second_moment = (data.square().sum(dim=0) + prior_count) / count
    assert_close(normalizer.count, count)
    assert_close(normalizer.mean, mean)
    assert_close(normalizer.var, second_moment - mean.square())

    before = {name: values.clone() for name, values in normalizer.state_dict().items()}
    output = normalizer(data)
    expected = ((data - normalizer.mean) / normalizer.var.sqrt()).clamp(-10, 10)
    assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert_close(dict(normalizer.state_dict()), before, rtol=0, atol=0)  # it is only read
    assert normalizer(1e9 * torch.ones(1, 3)).max() == 10


# === Reward scale ===
@pytest.mark.parametrize("constant", [True, False])
def test_reward_scale(constant):
    args = make_args(return_scale=30.0)
    agent = make_agent(args)
    reward = torch.full((40, 6), 3.0) if constant else torch.randn(40, 6)
    terminated = torch.rand(40, 6) < 0.1
    returns = discounted_returns(reward, terminated, args.gamma)
    for start, end in ((0, 7), (7, 8), (8, 40)):  # three rollouts
        scaled = scale_rewards(agent, reward[start:end], terminated[start:end], args)
        scale = 30.0 / np.sqrt((returns[:end] ** 2).mean())  # of all returns so far
        assert_close(scaled, reward[start:end] * scale)


def test_reward_scale_without_rewards():
    args = make_args(return_scale=30.0)
    never = torch.zeros(5, 6, dtype=torch.bool)
    scaled = scale_rewards(make_agent(args), torch.zeros(5, 6), never, args)
    assert (scaled == 0).all()
