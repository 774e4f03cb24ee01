"""The maths of reppo_continuous.py against closed forms, brute force and torch.distributions.

All in float64, except where float32 is itself the question. Averages over samples must lie within
4 standard errors. What stands in blocks that it shares with trudi_continuous.py (critic, HL-Gauss,
TD(lambda), normalizer) is tested once, in test_maths.py.
"""

import copy
import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, TanhTransform, TransformedDistribution, kl_divergence

import reppo_continuous as reppo
from reppo_continuous import (
    Agent,
    Args,
    Normalizer,
    Sample,
    act,
    actor_loss,
    check_args,
    compute_targets,
    dual_loss,
    gaussian_kl,
    hl_gauss,
    rollout,
    sample_action,
    update,
)

MODES = ["split", "none"]
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_args(**changes):
    settings = dict(
        num_envs=6,
        num_steps=5,
        num_minibatches=1,
        update_epochs=1,
        hidden_size=16,
        policy_delay=1,
        gamma=0.9,
        vmin=-10.0,
        vmax=10.0,
        alpha_init=0.3,
        lambda_init=0.7,
        normalize_reward=False,
        learning_rate=3e-4,
        actor_learning_rate=2e-3,
        anneal=0.0,
        kl_bound=0.1,
        max_grad_norm=0.5,
    )
    return Args(**settings | changes)


def make_agent(args, A=2, obs_dim=7, actor_dim=5, critic_start=2, scale=0.3):
    """An agent away from its start: every parameter is moved, and Q far from constant."""
    dims = dict(obs_dim=obs_dim, action_dim=A, actor_dim=actor_dim, critic_start=critic_start)
    agent = Agent(SimpleNamespace(spaces={}, **dims), args)
    torch.nn.init.zeros_(agent.critic.head[-1][-1].bias)
    perturb(agent.policy, scale)
    perturb(agent.critic, scale)
    return agent


@torch.no_grad()
def perturb(module, scale):
    for parameter in module.parameters():
        parameter += scale * torch.randn_like(parameter)


def make_optimizers(agent, args):
    """Of policy and duals, and of the critic, as main makes them."""
    actor_parameters = [*agent.policy.parameters(), agent.log_alpha, agent.log_lambda]
    actor_optimizer = torch.optim.Adam(actor_parameters, args.actor_learning_rate)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate)
    return actor_optimizer, critic_optimizer


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def run_update(agent, data, args):
    return update(agent, *make_optimizers(agent, args), data, args, seeded())


def known(obs):
    """A policy that is told its mean and log standard deviation: they are the observation."""
    return obs.chunk(2, dim=-1)


def known_kl(new, old):
    """gaussian_kl of two policies by their means and log standard deviations, (B, 2 A) each."""
    return gaussian_kl(known, new, *known(old))


def normal(mean, log_std):
    return Normal(mean, log_std.exp())


def squashed(mean, log_std):
    return TransformedDistribution(normal(mean, log_std), TanhTransform())


def gradients(loss, parameters):
    """Of each parameter; zeros where the loss does not depend on it."""
    parameters = list(parameters)
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def assert_mean(samples, expected=0.0):
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error, (samples.mean(), expected, error)


def slopes(value_of, parameters, step=1e-6):
    """The slope along a random direction: by the gradient, and by central differences."""
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def value_at(shift):
        with torch.no_grad():
            for parameter, change in zip(parameters, direction, strict=True):
                parameter += shift * change
        value = value_of()
        with torch.no_grad():
            for parameter, change in zip(parameters, direction, strict=True):
                parameter -= shift * change
        return value

    gradient = gradients(value_of(), parameters)
    pairs = zip(gradient, direction, strict=True)
    by_gradient = sum((slope * change).sum() for slope, change in pairs)
    by_differences = (value_at(step) - value_at(-step)) / (2 * step)
    return by_gradient, by_differences


# --- 1. the policy: a Gaussian, squashed by tanh


def quadrature_entropy(mean, std):
    """-integral of p log p over the actions of one dimension, on a grid of their atanh."""
    x = torch.linspace(mean - 14 * std, mean + 14 * std, 20_001)
    log_p_x = Normal(mean, std).log_prob(x)
    log_p_action = log_p_x + 2 * (torch.logaddexp(x, -x) - math.log(2))  # over 1 - tanh(x)^2
    return -torch.trapezoid(log_p_x.exp() * log_p_action, x).item()


@pytest.mark.parametrize(
    "mean, log_std", [(0.0, 0.0), (0.7, -1.0), (-2.0, 0.5), (0.3, -4.0), (4.0, 1.0)]
)
def test_entropy_by_quadrature(mean, log_std):
    """The average of the entropy over the noise, by quadrature as well, is that of the action."""
    z = torch.linspace(-12, 12, 10_001)
    sample = sample_action(known, torch.tensor([[mean, log_std]]).expand(len(z), 2), z[:, None])
    expected = quadrature_entropy(mean, math.exp(log_std))
    average = torch.trapezoid(Normal(0.0, 1.0).log_prob(z).exp() * sample.entropy, z)
    assert abs(average - expected) < 1e-8
    assert expected < math.log(2)  # that of the uniform distribution on [-1, 1], the largest
    close(sample.mean[0], torch.tensor([mean]))
    close(sample.log_std[0], torch.tensor([log_std]))


def test_sample_against_distributions():
    """Minus the log-density, with its Gaussian part replaced by the mean of that part."""
    agent = make_agent(make_args(), A=3, scale=0.1)
    obs = torch.randn(20_000, 7)
    noise = torch.randn(20_000, 3)
    with torch.no_grad():
        sample = sample_action(agent.policy, obs, noise)
        mean, log_std = agent.policy(obs)
    close(sample.mean, mean, rtol=0, atol=0)
    close(sample.log_std, log_std, rtol=0, atol=0)
    before = normal(mean, log_std)
    x = before.mean + before.stddev * noise
    close(sample.action, x.tanh())
    log_prob = squashed(mean, log_std).log_prob(sample.action).sum(-1)
    close(sample.entropy, (before.entropy() + before.log_prob(x)).sum(-1) - log_prob)
    assert_mean(sample.entropy + log_prob)
    assert sample.entropy.std() > 0.1  # states differ, and so do their entropies
    assert torch.cat([mean, log_std], dim=1).std(0).min() > 0.05


def test_untrained_policy_is_standard_normal():
    envs = SimpleNamespace(obs_dim=7, critic_start=2, action_dim=4, actor_dim=5, spaces={})
    agent = Agent(envs, make_args())
    noise = torch.randn(5000, 4)
    sample = sample_action(agent.policy, 5 * torch.randn(5000, 7), noise)
    assert (sample.mean == 0).all()
    assert (sample.log_std == 0).all()
    close(sample.action, noise.tanh())
    assert_mean(sample.entropy.detach() / 4, quadrature_entropy(0.0, 1.0))
    close(torch.stack([agent.log_alpha, agent.log_lambda]).exp(), torch.tensor([0.3, 0.7]))


def test_extreme_samples_stay_finite():
    """In float32 1 - tanh(x)^2 is zero from x = 9 on; its logarithm is about -2 |x|."""
    torch.set_default_dtype(torch.float32)
    rows = [[x, -3.0] for x in (-1e4, -50.0, 0.0, 50.0, 1e4)]
    gaussian = torch.tensor(rows, requires_grad=True)
    sample = sample_action(known, gaussian, torch.zeros(5, 1))
    x = gaussian[:, 0].detach()
    log_jacobian = -2 * (x.abs() - math.log(2)) * (x != 0)
    close(sample.entropy.detach(), -3 + 0.5 * math.log(2 * math.pi * math.e) + log_jacobian)
    close(sample.action[:, 0].detach(), x.sign())
    close(gradients(sample.entropy.sum(), [gaussian])[0][:, 0], -2 * x.sign())


@pytest.mark.parametrize("output", ["action", "entropy"])
def test_gradient_by_finite_differences(output):
    """Both are reparameterized: they follow mean and standard deviation at fixed noise."""
    policy = make_agent(make_args()).policy
    obs = torch.randn(10, 7)
    noise = torch.randn(10, 2)
    mixture = torch.randn(10, 2) if output == "action" else torch.randn(10)

    def value():
        return (getattr(sample_action(policy, obs, noise), output) * mixture).sum()

    by_gradient, by_differences = slopes(value, list(policy.parameters()))
    close(by_differences, by_gradient, rtol=1e-6, atol=1e-7)

    def action_of(noise):
        return sample_action(known, torch.zeros(1, 2), noise).action

    of_noise = torch.autograd.functional.jacobian(action_of, noise[:1, :1])
    close(of_noise.flatten(), 1 - noise[0, :1].tanh().square())  # d tanh(x)


def test_network_by_hand():
    """Linear, GELU, two residual blocks z + GELU(Linear(LayerNorm(z))), LayerNorm, Linear."""
    policy = make_agent(make_args()).policy
    obs = torch.randn(9, 7)
    z = F.gelu(policy.obs_layer(obs[:, :5]))
    for norm, linear in policy.blocks:
        z = z + F.gelu(linear(F.layer_norm(z, (16,), norm.weight, norm.bias)))
    norm, linear = policy.out
    output = linear(F.layer_norm(z, (16,), norm.weight, norm.bias))
    close(torch.cat(policy(obs), dim=1), output)
    assert len(policy.blocks) == 2


def test_actor_and_critic_see_their_own_columns():
    args = make_args(eval_best_of=3)
    agent = make_agent(args, actor_dim=4, critic_start=4)
    obs = torch.randn(5, 7)
    action = torch.rand(5, 2)
    noise = torch.randn(5, 2)

    def actor_outputs(obs):
        sample = sample_action(agent.policy, obs, noise)
        kl = gaussian_kl(agent.policy, obs, torch.zeros(5, 2), torch.zeros(5, 2))[:, None]
        mean_action = act(agent, obs, "mean", args, seeded())
        return torch.cat([sample.action, sample.mean, sample.log_std, kl, mean_action], dim=1)

    def value(obs):
        return agent.critic.value(agent.critic.features(obs, action))

    for column in range(7):
        changed = obs.clone()
        changed[:, column] += 1
        if column < 4:
            assert (actor_outputs(changed) != actor_outputs(obs)).all()
            assert (value(changed) == value(obs)).all()
        else:
            assert (actor_outputs(changed) == actor_outputs(obs)).all()
            assert (value(changed) != value(obs)).all()


def test_samplers():
    args = make_args(eval_best_of=4)
    agent = make_agent(args)
    obs = torch.randn(50, 7)
    close(act(agent, obs, "mean", args, seeded(1)), normal(*agent.policy(obs)).mean.tanh())

    def samples(K):
        """K of each observation, as act draws them."""
        noise = agent.policy.noise(50 * K, seeded(2))
        repeated = obs.repeat_interleave(K, 0)
        return sample_action(agent.policy, repeated, noise).action.view(50, K, 2)

    def value(action):
        return agent.critic.value(agent.critic.features(obs, action))

    close(act(agent, obs, "sample", args, seeded(2)), samples(1)[:, 0])
    best = act(agent, obs, "best-of-k", args, seeded(2))
    q = torch.stack([value(action) for action in samples(4).unbind(1)], 1)
    close(value(best), q.max(1).values)
    assert (best[:, None] == samples(4)).all(-1).any(1).all()


# --- 2. KL of the old to the new policy


def test_kl_against_distributions():
    old, new = torch.randn(2, 500, 6)
    kl = known_kl(new, old)
    close(kl, kl_divergence(normal(*known(old)), normal(*known(new))).sum(-1))
    reverse = kl_divergence(normal(*known(new)), normal(*known(old))).sum(-1)
    assert ((kl - reverse).abs() > 1e-3).float().mean() > 0.9  # it has a side
    assert (kl > 0).all()
    assert known_kl(old, old).abs().max() < 1e-15
    wide = torch.tensor([[0.0, 0.0]])
    narrow = torch.tensor([[0.0, -1.0]])
    expected = 0.5 * (math.e**2 - 1) - 1
    close(known_kl(narrow, wide), torch.tensor([expected]))  # old is the wide one


def test_kl_by_monte_carlo_after_the_tanh():
    """Of the actions, which the tanh squashed: it is the same."""
    old = torch.tensor([[0.3, -0.5, -0.2, -1.0]])
    new = torch.tensor([[0.1, -0.3, -0.6, -0.7]])
    action = squashed(*known(old.expand(20_000, 4))).sample()
    old_log_prob = squashed(*known(old)).log_prob(action)
    new_log_prob = squashed(*known(new)).log_prob(action)
    log_ratio = (old_log_prob - new_log_prob).sum(-1)
    kl = known_kl(new, old)[0]
    assert_mean(log_ratio, kl)
    assert kl > 8 * log_ratio.std() / math.sqrt(20_000)  # the comparison can tell it from zero


@pytest.mark.parametrize("change", [0.0, 1e-7, 1e-5, 1e-3])
def test_kl_of_small_changes_is_not_negative_in_float32(change):
    torch.set_default_dtype(torch.float32)
    old = torch.randn(20_000, 8)
    new = (old + change * torch.randn_like(old)).requires_grad_()
    kl = known_kl(new, old)
    exact_old = normal(*known(old.double()))
    exact_new = normal(*known(new.detach().double()))
    exact = kl_divergence(exact_old, exact_new).sum(-1)
    assert (kl >= 0).all()
    assert (kl - exact).abs().max() < 1e-5
    assert gradients(kl.sum(), [new])[0].isfinite().all()


def test_kl_of_extreme_policies_is_finite_in_float32():
    log_stds = [-20.0, -10.0, 0.0, 10.0, 20.0]
    rows = []
    for old_log_std, new_log_std, new_mean in itertools.product(log_stds, log_stds, (0.0, 3.0)):
        rows.append((0.0, old_log_std, new_mean, new_log_std))
    rows = torch.tensor(rows, dtype=torch.float32)
    old = rows[:, :2]
    new = rows[:, 2:].clone().requires_grad_()
    kl = known_kl(new, old)
    exact = kl_divergence(normal(*known(old.double())), normal(*known(new.double()))).sum(-1)
    close(kl.double(), exact, rtol=1e-4, atol=1e-6)
    assert kl.isfinite().all()
    assert gradients(kl.sum(), [new])[0].isfinite().all()


# --- 3. split objective


def old_and_new(B=30, scale=0.05, inside="some", **changes):
    """A change of the policy. -> args, agent after it, batch with the policy before it

    Of the B states some, all or none are inside the bound.
    """
    args = make_args(**changes)
    agent = make_agent(args)
    obs = torch.randn(B, 7)
    mean, log_std = agent.policy(obs)
    batch = dict(obs=obs, mean=mean.detach(), log_std=log_std.detach())
    perturb(agent.policy, scale)
    kl = gaussian_kl(agent.policy, **renamed(batch)).detach()
    bounds = dict(some=kl.quantile(0.5), all=2 * kl.max(), none=kl.min() / 2)
    return dataclasses.replace(args, kl_bound=bounds[inside].item()), agent, batch


def renamed(batch):
    """What gaussian_kl takes of a batch."""
    return dict(obs=batch["obs"], old_mean=batch["mean"], old_log_std=batch["log_std"])


def rows_of(batch, index):
    return {name: values[index] for name, values in batch.items()}


class State(NamedTuple):
    loss: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    inside: bool


def state_loss(agent, args, batch, i, noise):
    """Eq. (19), (20) of state i by torch.distributions; noise (A,)"""
    obs = batch["obs"][[i]]
    new = normal(*agent.policy(obs))
    old = normal(batch["mean"][[i]], batch["log_std"][[i]])
    kl = kl_divergence(old, new).sum()
    x = new.mean + new.stddev * noise
    log_jacobian = TanhTransform().log_abs_det_jacobian(x, x.tanh())
    entropy = (new.entropy() + log_jacobian).sum()
    q = agent.critic.value(agent.critic.features(obs, x.tanh()))[0]
    inside = args.trust_region == "none" or kl.item() <= args.kl_bound
    if inside:
        loss = -q - agent.log_alpha.exp().item() * entropy
    else:
        loss = agent.log_lambda.exp().item() * kl
    return State(loss, kl, entropy, inside)


@pytest.mark.parametrize("share", ["some", "all", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_actor_loss_state_by_state(mode, share):
    """Each state's gradient, alone: of the branch that counts, and of no other."""
    args, agent, batch = old_and_new(B=12, inside=share, trust_region=mode)
    noise = torch.randn(12, 2)
    parameters = list(agent.policy.parameters())
    states = [state_loss(agent, args, batch, i, noise[i]) for i in range(12)]
    within = gaussian_kl(agent.policy, **renamed(batch)) <= args.kl_bound
    assert within.sum() == dict(some=6, all=12, none=0)[share]
    for i, state in enumerate(states):
        loss, metrics = actor_loss(agent, rows_of(batch, [i]), noise[[i]], args)
        close(loss, state.loss)
        expected_gradient = gradients(state.loss, parameters)
        close(gradients(loss, parameters), expected_gradient)
        close(metrics["policy/kl"], state.kl)
        close(metrics["policy/entropy"], state.entropy)
        assert metrics["policy/inside"] == (within[i] or mode == "none") == state.inside
    index = torch.randint(12, (40,))  # some of them often, some of them never
    states = [state_loss(agent, args, batch, i, noise[i]) for i in index.tolist()]
    loss, metrics = actor_loss(agent, rows_of(batch, index), noise[index], args)
    expected = torch.stack([state.loss for state in states]).mean()
    close(loss, expected)
    close(gradients(loss, parameters), gradients(expected, parameters))
    close(metrics["policy/kl"], torch.stack([state.kl for state in states]).mean())
    close(metrics["policy/entropy"], torch.stack([state.entropy for state in states]).mean())
    share_inside = np.mean([state.inside for state in states])
    assert metrics["policy/inside"].item() == pytest.approx(share_inside)


def test_a_state_at_the_bound_is_inside():
    args, agent, batch = old_and_new(B=10)
    noise = torch.randn(10, 2)
    for i in range(10):
        row = rows_of(batch, [i])
        kl = gaussian_kl(agent.policy, **renamed(row)).item()
        for bound, inside in ((kl, True), (math.nextafter(kl, 0.0), False)):
            now = dataclasses.replace(args, kl_bound=bound)
            loss, metrics = actor_loss(agent, row, noise[[i]], now)
            assert metrics["policy/kl"] == kl
            assert metrics["policy/inside"] == inside
            clear_bound = math.inf if inside else 0.0
            clear = dataclasses.replace(args, kl_bound=clear_bound)
            close(loss, state_loss(agent, clear, batch, i, noise[i]).loss)


@pytest.mark.parametrize("mode", MODES)
def test_actor_gradient_by_finite_differences(mode):
    """Nothing on the way through action, entropy, critic and KL is cut off from the gradient."""
    args, agent, batch = old_and_new(trust_region=mode)
    noise = torch.randn(30, 2)

    def loss():
        return actor_loss(agent, batch, noise, args)[0]

    # the steps are small enough that no state changes sides
    by_gradient, by_differences = slopes(loss, list(agent.policy.parameters()))
    close(by_differences, by_gradient, rtol=1e-5, atol=1e-7)


# --- 4. duals


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_duals_move_the_right_way(sign, optimizer):
    """alpha grows (sign 1) while the entropy is below -0.5 per dimension, lambda while the KL is
    above its bound."""
    args = make_args()
    agent = make_agent(args, A=3)
    duals = [agent.log_alpha, agent.log_lambda]
    entropy = -1.5 - sign * torch.rand(())
    kl = 0.1 * (1 + sign * torch.rand(()))
    metrics = {"policy/entropy": entropy, "policy/kl": kl, "policy/inside": torch.tensor(0.3)}
    before = torch.stack(duals).detach().exp()
    gaps = torch.stack([entropy + 1.5, 0.1 - kl])
    close(torch.stack(gradients(dual_loss(agent, metrics, args), duals)), before * gaps)
    stepper = optimizer(duals, 1e-3)
    dual_loss(agent, metrics, args).backward()
    stepper.step()
    assert (torch.sign(torch.stack(duals).exp() - before) == sign).all()


@pytest.mark.parametrize("mode", MODES)
def test_duals_and_actor_leave_each_other_alone(mode):
    args, agent, batch = old_and_new(trust_region=mode)
    loss, metrics = actor_loss(agent, batch, torch.randn(30, 2), args)
    dual = dual_loss(agent, metrics, args)
    networks = [*agent.policy.parameters(), *agent.critic.parameters()]
    of_networks = torch.autograd.grad(dual, networks, allow_unused=True, retain_graph=True)
    assert of_networks == (None,) * len(networks)
    duals = [agent.log_alpha, agent.log_lambda]
    assert torch.autograd.grad(loss, duals, allow_unused=True) == (None, None)
    by_alpha, by_lambda = gradients(dual, duals)
    assert by_alpha != 0
    assert (by_lambda != 0) == (mode != "none"), "without a trust region lambda would only grow"
    assert not any(value.requires_grad for value in metrics.values())


# --- 5. soft TD(lambda) targets


def brute_force_targets(reward, value, terminated, cut, gamma, td_lambda):
    """Weighted n-step returns of each step up to its cut, in numpy."""
    targets = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        last = next(s for s in range(t, len(reward)) if cut[s, i])
        returns = []
        for s in range(t, last + 1):
            rewards = sum(gamma ** (j - t) * float(reward[j, i]) for j in range(t, s + 1))
            bootstrap = 0.0 if terminated[s, i] else float(value[s, i])
            returns.append(rewards + gamma ** (s + 1 - t) * bootstrap)
        weights = [(1 - td_lambda) * td_lambda**n for n in range(last - t)]
        weights.append(td_lambda ** (last - t))
        targets[t, i] = np.dot(weights, returns)
    return torch.tensor(targets)


def discounted_returns(reward, ended, gamma):
    returns = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        start = max((s + 1 for s in range(t) if ended[s, i]), default=0)
        returns[t, i] = sum(gamma ** (t - s) * float(reward[s, i]) for s in range(start, t + 1))
    return returns


def rollout_data(args, agent):
    """As rollout returns it, with ends of episodes and broken steps at random."""
    T = args.num_steps
    E = args.num_envs
    event = torch.randint(6, (T, E))
    data = {
        "obs": torch.randn(T, E, 7),
        "action": torch.randn(T, E, 2),
        "reward": torch.randn(T, E),
        "terminated": event == 0,
        "truncated": (event == 1) | (event == 2),
        "broken": event == 2,
        "next_obs": torch.randn(T, E, 7),
    }
    data["reward"][event == 2] = 0  # as VecEnv reports a broken step: truncated, no reward
    mean, log_std = agent.policy(data["obs"].flatten(0, 1))
    data["mean"] = mean.detach().view(T, E, 2)
    data["log_std"] = log_std.detach().view(T, E, 2)
    return data


def whole_rows(broken):
    """Which row of T * E is used in the place of each: itself, or the first that is whole."""
    broken = broken.flatten()
    first_whole = broken.tolist().index(False)
    rows = [first_whole if broken[row] else row for row in range(len(broken))]
    return torch.tensor(rows)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
def test_soft_targets_against_brute_force(monkeypatch, normalize, td_lambda):
    """Known actions and entropies: bonus, final observations, ends and broken steps come out."""
    args = make_args(
        num_envs=30,
        num_minibatches=3,
        normalize_reward=normalize,
        return_scale=4.0,
        td_lambda=td_lambda,
    )
    agent = make_agent(args)
    data = rollout_data(args, agent)
    before = {name: values.clone() for name, values in data.items()}
    noises = []

    def known_sample(policy, obs, noise):
        assert policy is agent.policy
        assert noise.shape == (len(obs), 2)
        noises.append(noise)
        return Sample(action=obs[:, 1:3].tanh(), entropy=obs.sum(-1), mean=None, log_std=None)

    monkeypatch.setattr(reppo, "sample_action", known_sample)
    flat = compute_targets(agent, data, args, seeded())
    next_obs = data["next_obs"].flatten(0, 1)
    with torch.no_grad():
        features = agent.critic.features(next_obs, next_obs[:, 1:3].tanh())
        value = agent.critic.value(features).view(5, 30)
    broken = data["broken"]
    terminated = data["terminated"]
    ended = terminated | data["truncated"]
    reward = data["reward"]
    if normalize:
        returns = discounted_returns(reward, terminated, args.gamma)
        reward = reward * 4.0 / math.sqrt((returns**2).mean())
    bonus = args.gamma * args.alpha_init * data["next_obs"].sum(-1)
    soft_reward = torch.where(terminated, reward, reward + bonus)
    last_row = torch.ones(1, 30, dtype=torch.bool)
    cut = ended | torch.cat([broken[1:], last_row])
    target = brute_force_targets(soft_reward, value, terminated, cut, args.gamma, td_lambda)
    rows = whole_rows(broken)
    assert 0 < broken.sum() < 75
    close(flat["target"], target.flatten()[rows])
    close(flat["target"].view(5, 30)[terminated], reward[terminated])
    close(flat["next_features"], features[rows])
    for name in ("obs", "action", "mean", "log_std"):
        close(flat[name], data[name].flatten(0, 1)[rows], rtol=0, atol=0)
    close(data, before, rtol=0, atol=0)
    noise = torch.cat(noises)
    assert len(noise) == 150
    assert len(noise.unique()) == 300  # a fresh one for each state
    assert_mean(noise.flatten())
    assert_mean(noise.flatten().square(), 1.0)
    assert not any(values.requires_grad for values in flat.values())


@pytest.mark.parametrize("normalize", [False, True])
def test_broken_step_influences_no_other(normalize):
    """No trace runs into it, and a whole step stands in for it."""
    args = make_args(num_envs=3, num_minibatches=3, normalize_reward=normalize)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    nowhere = torch.zeros(5, 3, dtype=torch.bool)

    def targets(data):
        """Target and next features, (T, E, ...), by a copy: it keeps statistics of the rewards."""
        flat = compute_targets(copy.deepcopy(agent), data, args, seeded())
        return torch.cat([flat["target"][:, None], flat["next_features"]], 1).view(5, 3, -1)

    for t, i in np.ndindex(5, 3):
        one = nowhere.clone()
        one[t, i] = True
        broken = data | dict(broken=one, truncated=one, terminated=nowhere)
        broken["reward"] = torch.where(one, 0.0, data["reward"])
        other = dict(broken)
        other["next_obs"] = torch.where(one[..., None], torch.randn(7), data["next_obs"])
        if not normalize:  # VecEnv promises a zero reward, or it would count in their scale
            other["reward"] = torch.where(one, 1000.0, data["reward"])
        before = targets(broken)
        after = targets(other)
        assert (before[~one] == after[~one]).all()
        stand_in = before[0, 0] if t + i > 0 else before[0, 1]
        assert (before[one] == stand_in).all()
        assert (after[one] == stand_in).all()
        # without the mark the same step would be trained on, and the trace would run into it
        unmarked_before = targets(broken | dict(broken=nowhere))
        unmarked_after = targets(other | dict(broken=nowhere))
        assert (unmarked_before[one] != unmarked_after[one]).all()
        if t > 0:
            assert unmarked_before[t - 1, i, 0] != unmarked_after[t - 1, i, 0]


def test_rollout_stores_what_the_policy_saw_and_did():
    args = make_args(num_envs=3, num_steps=4)
    agent = make_agent(args)
    steps = []

    class Envs:
        """Each step of each environment ends or does not, is broken or not, at random."""

        def step(self, action):
            obs = torch.randn(3, 7)
            terminated, truncated = torch.rand(2, 3) < 0.4
            ended = terminated | truncated
            step = {
                "action": action,
                "following": obs,
                "reward": torch.randn(3),
                "terminated": terminated,
                "truncated": truncated,
                "final_obs": torch.where(ended[:, None], 5 * torch.randn(3, 7), obs),
                "broken": torch.rand(3) < 0.5,
            }
            steps.append(step)
            self.broken = step["broken"]
            return obs, step["reward"], terminated, truncated, step["final_obs"]

    obs = torch.randn(3, 7)
    normalizer = Normalizer(7)
    generator = seeded(3)
    agent.policy.noise(3, generator)  # before the first step, whose noise may go on from it
    data, last = rollout(agent, Envs(), obs, args, seeded(3))
    for t, step in enumerate(steps):
        normalizer.update(obs)
        mean, log_std = agent.policy(normalizer(obs))
        wanted = {
            "obs": normalizer(obs),
            "action": step["action"],
            "mean": mean.detach(),
            "log_std": log_std.detach(),
            "reward": step["reward"],
            "terminated": step["terminated"],
            "truncated": step["truncated"],
            "broken": step["broken"],
            "next_obs": normalizer(step["final_obs"]),
        }
        close({name: values[t] for name, values in data.items()}, wanted)
        x = mean + log_std.exp() * agent.policy.noise(3, generator)
        close(step["action"], x.detach().tanh())
        obs = step["following"]
    assert len(steps) == 4
    assert (last == obs).all()


# --- 6. the update


class Adam:
    """Written out, of a list of parameters."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.t = 0
        self.m = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.v = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, gradients, learning_rate):
        self.t += 1
        for parameter, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g * g)
            m_hat = m / (1 - 0.9**self.t)
            v_hat = v / (1 - 0.999**self.t)
            parameter -= learning_rate * m_hat / (v_hat.sqrt() + 1e-8)


def clipped(gradients, limit):
    """-> clipped gradients, norm before"""
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    share = min(1.0, limit / (norm.item() + 1e-6))
    return [gradient * share for gradient in gradients], norm


def batch_of(args, agent):
    """A rollout's data as update gets it, with stand-ins for broken steps."""
    return compute_targets(agent, rollout_data(args, agent), args, seeded())


@pytest.mark.parametrize("mode", MODES)
def test_update_by_hand(mode):
    """Four epochs of one minibatch: a critic step, then policy and duals, which see the new critic.

    In the metrics are the means over the epochs.
    """
    args = make_args(
        update_epochs=4,
        trust_region=mode,
        kl_bound=1e-3,
        max_grad_norm=0.3,
        learning_rate=5e-3,
    )
    agent = make_agent(args)
    data = batch_of(args, agent)
    assert 15 < len(data["obs"].unique(dim=0)) < 30  # there are stand-ins
    twin = copy.deepcopy(agent)
    noise = torch.tensor([0.8, -0.4])  # the same for all states, whose order does not matter then
    agent.policy.noise = lambda batch_size, generator: noise.expand(batch_size, 2)
    metrics = run_update(agent, data, args)

    policy = twin.policy
    critic = twin.critic
    critic_adam = Adam(critic.parameters())
    actor_adam = Adam([*policy.parameters(), twin.log_alpha, twin.log_lambda])
    history = []
    for _ in range(4):
        features = critic.features(data["obs"], data["action"])
        target_probs = hl_gauss(data["target"], critic.edges, critic.sigma)
        fit = F.cross_entropy(critic.head(features), target_probs)
        auxiliary = F.mse_loss(critic.predictor(features), data["next_features"])
        critic_gradient = gradients(fit + auxiliary, critic.parameters())
        critic_gradient, critic_norm = clipped(critic_gradient, 0.3)
        critic_adam.step(critic_gradient, 5e-3)

        states = [state_loss(twin, args, data, i, noise) for i in range(30)]
        loss = torch.stack([state.loss for state in states]).mean()
        kl = torch.stack([state.kl for state in states]).mean()
        entropy = torch.stack([state.entropy for state in states]).mean()
        inside = np.mean([state.inside for state in states])
        policy_gradient, actor_norm = clipped(gradients(loss, policy.parameters()), 0.3)
        with torch.no_grad():  # Eq. (21), (22): the derivative by log alpha, by log lambda
            of_alpha = twin.log_alpha.exp() * (entropy + 0.5 * 2)
            of_lambda = -twin.log_lambda.exp() * (kl - 1e-3)
            if mode == "none":
                of_lambda = torch.zeros(())
        actor_adam.step([*policy_gradient, of_alpha, of_lambda], 2e-3)
        history.append(
            {
                "losses/critic": fit.item(),
                "losses/auxiliary": auxiliary.item(),
                "losses/critic_grad_norm": critic_norm.item(),
                "losses/actor": loss.item(),
                "losses/actor_grad_norm": actor_norm.item(),
                "policy/kl": kl.item(),
                "policy/inside": inside,
                "policy/entropy": entropy.item(),
            }
        )
    close(dict(agent.named_parameters()), dict(twin.named_parameters()), rtol=1e-7, atol=1e-9)
    # the critic has the gradient of its own loss, and of no other
    close([parameter.grad for parameter in agent.critic.parameters()], critic_gradient)
    for name in history[0]:
        mean = np.mean([epoch[name] for epoch in history])
        close(metrics[name].double(), torch.tensor(mean))
    close(metrics["policy/alpha"], twin.log_alpha.exp().detach())
    close(metrics["policy/lambda"], twin.log_lambda.exp().detach())
    if mode == "split":
        assert 0 < metrics["policy/inside"] < 1  # both branches were in use
    for epoch in history:  # and both clips
        assert epoch["losses/critic_grad_norm"] > 0.3
        assert epoch["losses/actor_grad_norm"] > 0.3


def test_update_uses_every_step_once_per_epoch(monkeypatch):
    args = make_args(update_epochs=3, num_minibatches=5)
    agent = make_agent(args)
    data = batch_of(args, agent)
    data["target"] = torch.arange(30.0)  # a number for each row
    batches = []

    def critic_spy(critic, batch, args):
        batches.append(batch)
        rows = batch["target"].long()
        close(batch, rows_of(data, rows), rtol=0, atol=0)
        return original_critic_loss(critic, batch, args)

    def actor_spy(agent, batch, noise, args):
        assert batch is batches[-1]
        return original_actor_loss(agent, batch, noise, args)

    original_critic_loss = reppo.critic_loss
    original_actor_loss = reppo.actor_loss
    monkeypatch.setattr(reppo, "critic_loss", critic_spy)
    monkeypatch.setattr(reppo, "actor_loss", actor_spy)
    run_update(agent, data, args)
    orders = []
    for start in (0, 5, 10):
        epoch = batches[start : start + 5]
        orders.append(torch.cat([batch["target"] for batch in epoch]).tolist())
    assert len(batches) == 15
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3  # a fresh shuffle for each


@pytest.mark.parametrize("delay, steps", [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1)])
def test_policy_delay(delay, steps):
    """One step of policy and duals in so many of the critic, which does not notice."""
    args = make_args(update_epochs=2, num_minibatches=4, num_envs=8, policy_delay=delay)
    check_args(args)
    agent = make_agent(args)
    optimizers = make_optimizers(agent, args)
    update(agent, *optimizers, batch_of(args, agent), args, seeded())
    counts = []
    for optimizer in optimizers:
        counts.append({int(state["step"]) for state in optimizer.state.values()})
    assert counts == [{steps}, {8}]


def test_a_delay_without_a_single_policy_step_is_refused(capsys):
    args = make_args(update_epochs=2, num_minibatches=4, num_envs=8, policy_delay=9)
    with pytest.raises(SystemExit):
        check_args(args)
    assert "policy_delay" in capsys.readouterr().err


def test_critic_does_not_depend_on_the_policy_steps():
    trained = []
    for delay in (1, 4):
        torch.manual_seed(0)
        args = make_args(num_minibatches=4, num_envs=8, policy_delay=delay)
        agent = make_agent(args)
        data = batch_of(args, agent)
        before = copy.deepcopy(agent)
        run_update(agent, data, args)
        trained.append(agent)
        for now, then in zip(agent.parameters(), before.parameters(), strict=True):
            assert (now != then).any()
    close(trained[0].critic.state_dict(), trained[1].critic.state_dict(), rtol=0, atol=0)
    assert trained[0].log_alpha != trained[1].log_alpha


def test_learning_rates():
    """Adam's first step is as long as its learning rate: of policy and duals, of the critic."""
    args = make_args(actor_learning_rate=4e-4, learning_rate=1e-4, max_grad_norm=1e9)
    agent = make_agent(args)
    data = batch_of(args, agent)
    before = copy.deepcopy(agent)
    run_update(agent, data, args)

    def longest(name):
        change = agent.get_parameter(name) - before.get_parameter(name)
        return change.abs().max().item()

    for name in ("log_alpha", "log_lambda", "policy.out.1.weight", "policy.obs_layer.weight"):
        assert longest(name) == pytest.approx(4e-4, rel=1e-3), name
    assert longest("critic.head.1.3.weight") == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize(
    "anneal, shares",
    [(0.0, [1, 1, 1, 1]), (1.0, [1, 0.75, 0.5, 0.25]), (0.8, [1, 0.8, 0.6, 0.4])],
)
def test_annealing(monkeypatch, tmp_path, anneal, shares):
    """The policy's learning rate shrinks, those of the duals and the critic do not."""
    torch.set_default_dtype(torch.float32)
    learning_rates = []

    def update_spy(agent, actor_optimizer, critic_optimizer, *rest):
        actor_group, alpha_group, lambda_group = actor_optimizer.param_groups
        (critic_group,) = critic_optimizer.param_groups
        for group, wanted in (
            (actor_group, list(agent.policy.parameters())),
            (alpha_group, [agent.log_alpha]),
            (lambda_group, [agent.log_lambda]),
            (critic_group, list(agent.critic.parameters())),
        ):
            assert list(map(id, group["params"])) == list(map(id, wanted))
        groups = (alpha_group, lambda_group, critic_group)
        learning_rates.append((actor_group["lr"].item(), *(group["lr"] for group in groups)))
        return original_update(agent, actor_optimizer, critic_optimizer, *rest)

    original_update = reppo.update
    monkeypatch.setattr(reppo, "update", update_spy)
    flags = "--env-id Pendulum-v1 --backend gymnasium --device cpu --hidden-size 8 --num-envs 2"
    flags += " --num-steps 4 --num-minibatches 2 --update-epochs 1 --policy-delay 1"
    flags += " --total-timesteps 32 --eval-points 1 --eval-episodes 1"
    flags += " --actor-learning-rate 4e-4 --learning-rate 1e-4"
    flags += " --alpha-learning-rate 2e-3 --lambda-learning-rate 5e-3"
    reppo.main([*flags.split(), "--anneal", str(anneal), "--run-dir", str(tmp_path / "run")])
    actor_rates, alpha_rates, lambda_rates, critic_rates = zip(*learning_rates, strict=True)
    assert alpha_rates == (2e-3,) * 4
    assert lambda_rates == (5e-3,) * 4
    assert critic_rates == (1e-4,) * 4
    assert list(actor_rates) == pytest.approx([4e-4 * share for share in shares])


def test_annealing_to_zero_stops_the_policy_only():
    args = make_args(update_epochs=3)
    agent = make_agent(args)
    data = batch_of(args, agent)
    before = copy.deepcopy(agent)
    actor_optimizer, critic_optimizer = make_optimizers(agent, args)
    actor_optimizer.param_groups[0]["lr"] = 0.0
    update(agent, actor_optimizer, critic_optimizer, data, args, seeded())
    close(agent.policy.state_dict(), before.policy.state_dict(), rtol=0, atol=0)
    assert agent.log_alpha == before.log_alpha
    assert agent.log_lambda == before.log_lambda
    pairs = zip(agent.critic.parameters(), before.critic.parameters(), strict=True)
    assert all((now != then).any() for now, then in pairs)


def test_broken_steps_are_never_trained_on():
    args = make_args(update_epochs=2, num_minibatches=3)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    broken = data["broken"]
    assert 0 < broken.sum() < 15
    garbage = {name: values.clone() for name, values in data.items()}
    for name in ("obs", "action", "mean", "log_std", "next_obs"):
        garbage[name][broken] = 50.0
    almost_all = torch.ones_like(broken)  # broken, but for two steps
    almost_all[2, 1] = False
    almost_all[3, 4] = False
    few = data | dict(broken=almost_all)
    trained = []
    for rollout_of in (data, garbage, few):
        flat = compute_targets(copy.deepcopy(agent), rollout_of, args, seeded())
        assert len(flat["target"]) == 30
        assert "broken" not in flat
        for name in ("obs", "action", "mean", "log_std"):
            whole = rollout_of[name][~rollout_of["broken"]]
            found = (flat[name][:, None] == whole).all(-1)  # (30, whole rows)
            assert found.any(dim=1).all()
            assert found.any(dim=0).all()
        student = copy.deepcopy(agent)
        run_update(student, flat, args)
        trained.append(student)
    close(dict(trained[0].named_parameters()), dict(trained[1].named_parameters()))
    assert all(parameter.isfinite().all() for parameter in trained[2].parameters())


def test_target_metrics():
    args = make_args()
    agent = make_agent(args)
    data = batch_of(args, agent)
    data["target"] = torch.tensor([-10.1, 12.0, 10.0] + [1.0] * 27)
    metrics = run_update(agent, data, args)
    assert metrics["losses/clipped_targets"].item() == pytest.approx(2 / 30)
    close(metrics["losses/target"], data["target"].mean())
