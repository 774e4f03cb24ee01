"""The maths of reppo_continuous.py against closed forms, brute force and torch.distributions.

All in float64, except where float32 is itself the question. Averages over samples must lie within 4 standard errors.
What stands in shared blocks (critic, HL-Gauss, TD(lambda), normalisers) is tested once, in test_maths.py.
"""

import copy
import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, TanhTransform, TransformedDistribution, kl_divergence

import reppo_continuous as reppo
from reppo_continuous import (
    Agent,
    Args,
    act,
    actor_loss,
    compute_targets,
    dual_loss,
    gaussian_kl,
    sample_action,
    update,
)

MODES = ["split", "penalty", "none"]
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_args(**changes):
    sizes = dict(num_envs=6, num_steps=5, num_minibatches=1, update_epochs=1, hidden_size=16, policy_delay=1)
    values = dict(gamma=0.9, vmin=-10.0, vmax=10.0, alpha_init=0.3, lambda_init=0.7, normalise_reward=False)
    steps = dict(learning_rate=3e-4, actor_learning_rate=2e-3, anneal=0.0, kl_bound=0.1, max_grad_norm=0.5)
    return Args(**sizes | values | steps | changes)


def make_agent(args, A=2, obs_dim=7, actor_dim=5, critic_start=2, scale=0.3):
    """An agent away from its start: every parameter is moved, and Q far from constant."""
    envs = SimpleNamespace(obs=np.zeros((args.num_envs, obs_dim)), num_envs=args.num_envs, critic_start=critic_start)
    envs.action_dim, envs.actor_dim = A, actor_dim
    agent = Agent(envs, args)
    torch.nn.init.zeros_(agent.critic.head[-1].bias)
    perturb(agent.policy, scale)
    perturb(agent.critic, scale)
    return agent


@torch.no_grad()
def perturb(module, scale):
    for p in module.parameters():
        p += scale * torch.randn_like(p)


def known(obs):
    """A policy that is told its mean and log standard deviation: they are the observation."""
    return obs


def normal(gaussian):
    mean, log_std = gaussian.chunk(2, -1)
    return Normal(mean, log_std.exp())


def squashed(gaussian):
    return TransformedDistribution(normal(gaussian), TanhTransform())


def gradients(loss, parameters):
    """Of each parameter; zeros where the loss does not depend on it."""
    return torch.autograd.grad(loss, [*parameters], allow_unused=True, materialize_grads=True)


def nothing(phase):
    """Takes the time of no phase."""


def assert_mean(samples, expected=0.0):
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error, (samples.mean(), expected, error)


# --- 1. the policy: a Gaussian, squashed by tanh


def quadrature_entropy(mean, std):
    """-integral of p log p over the actions of one dimension, on a grid of their atanh."""
    x = torch.linspace(mean - 14 * std, mean + 14 * std, 20_001)
    log_p = Normal(mean, std).log_prob(x) + 2 * (torch.logaddexp(x, -x) - math.log(2))  # density over 1 - tanh^2
    return -torch.trapezoid(Normal(mean, std).log_prob(x).exp() * log_p, x).item()


@pytest.mark.parametrize("mean, log_std", [(0.0, 0.0), (0.7, -1.0), (-2.0, 0.5), (0.3, -4.0), (4.0, 1.0)])
def test_entropy_by_quadrature(mean, log_std):
    """The average of the entropy over the noise, by quadrature as well, is the entropy of the action."""
    z = torch.linspace(-12, 12, 10_001)
    _, entropy, gaussian = sample_action(known, torch.tensor([[mean, log_std]]).expand(len(z), 2), z[:, None])
    expected = quadrature_entropy(mean, math.exp(log_std))
    assert abs(torch.trapezoid(Normal(0.0, 1.0).log_prob(z).exp() * entropy, z) - expected) < 1e-8
    assert expected < math.log(2)  # that of the uniform distribution on [-1, 1], the largest there is
    close(gaussian[0], torch.tensor([mean, log_std]))


def test_sample_against_distributions():
    """Sample by sample: minus the log-density, with its Gaussian part replaced by the mean of that part."""
    agent, obs, noise = make_agent(make_args(), A=3, scale=0.1), torch.randn(20_000, 7), torch.randn(20_000, 3)
    with torch.no_grad():
        action, entropy, gaussian = sample_action(agent.policy, obs, noise)
        close(gaussian, agent.policy(obs), rtol=0, atol=0)
    before = normal(gaussian)
    x = before.mean + before.stddev * noise
    close(action, x.tanh())
    log_prob = squashed(gaussian).log_prob(action).sum(-1)
    close(entropy, (before.entropy() + before.log_prob(x)).sum(-1) - log_prob)
    assert_mean(entropy + log_prob)
    assert entropy.std() > 0.1 and gaussian.std(0).min() > 0.05  # states differ, and so do their entropies


def test_untrained_policy_is_standard_normal():
    envs = SimpleNamespace(obs=np.zeros((6, 7)), critic_start=2, action_dim=4, actor_dim=5)
    agent, noise = Agent(envs, make_args()), torch.randn(5000, 4)
    action, entropy, gaussian = sample_action(agent.policy, 5 * torch.randn(5000, 7), noise)
    assert (gaussian == 0).all()
    close(action, noise.tanh())
    assert_mean(entropy.detach() / 4, quadrature_entropy(0.0, 1.0))
    close(torch.stack([agent.log_alpha, agent.log_lambda]).exp(), torch.tensor([0.3, 0.7]))


def test_extreme_samples_stay_finite():
    """In float32 1 - tanh^2 is zero from x = 9 on; its logarithm is about -2 |x|."""
    torch.set_default_dtype(torch.float32)
    gaussian = torch.tensor([[x, -3.0] for x in (-1e4, -50.0, 0.0, 50.0, 1e4)], requires_grad=True)
    action, entropy, _ = sample_action(known, gaussian, torch.zeros(5, 1))
    x = gaussian[:, 0].detach()
    expected = -3 + 0.5 * math.log(2 * math.pi * math.e) - 2 * (x.abs() - math.log(2)) * (x != 0)
    close(entropy.detach(), expected)
    close(action[:, 0].detach(), x.sign())
    close(gradients(entropy.sum(), [gaussian])[0][:, 0], -2 * x.sign())


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_by_finite_differences(output):
    """Action and entropy are reparameterised: both follow mean and standard deviation at fixed noise."""
    policy, obs, noise = make_agent(make_args()).policy, torch.randn(10, 7), torch.randn(10, 2)
    parameters, mixture = [*policy.parameters()], torch.randn(10, 2)
    direction = [torch.randn_like(p) for p in parameters]

    def value_at(shift):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += shift * d
        sample = sample_action(policy, obs, noise)[output]
        return (sample * (mixture if output == 0 else mixture[:, 0])).sum()

    slope = sum((g * d).sum() for g, d in zip(gradients(value_at(0), parameters), direction, strict=True))
    step = 1e-6
    close((value_at(step) - value_at(-2 * step)) / (2 * step), slope, rtol=1e-6, atol=1e-7)
    of_noise = torch.autograd.functional.jacobian(
        lambda z: sample_action(known, torch.zeros(1, 2), z)[0], noise[:1, :1]
    )
    close(of_noise.flatten(), 1 - noise[0, :1].tanh().square())  # d tanh(x)


def test_network_by_hand():
    """The paper's: Linear, GELU, two residual blocks z + GELU(Linear(LayerNorm(z))), LayerNorm, Linear."""
    policy, obs = make_agent(make_args()).policy, torch.randn(9, 7)
    z = F.gelu(policy.first(obs[:, :5]))
    for norm, linear in policy.blocks:
        z = z + F.gelu(linear(F.layer_norm(z, (16,), norm.weight, norm.bias)))
    norm, linear = policy.out
    close(policy(obs), linear(F.layer_norm(z, (16,), norm.weight, norm.bias)))
    assert len(policy.blocks) == 2


def test_actor_and_critic_see_their_own_columns():
    args = make_args(eval_best_of=3)
    agent, obs = make_agent(args, actor_dim=4, critic_start=4), torch.randn(5, 7)
    action, noise = torch.rand(5, 2), torch.randn(5, 2)

    def outputs(obs):
        """What each of the two makes of obs."""
        kl = gaussian_kl(agent.policy, obs, torch.zeros(5, 4))[:, None]
        mean = act(agent, obs, "mean", args, torch.Generator().manual_seed(0))
        actor = [*sample_action(agent.policy, obs, noise)[::2], kl, mean]
        return torch.cat(actor, 1), agent.critic.value(agent.critic.features(obs, action))

    for column in range(7):
        changed = obs.clone()
        changed[:, column] += 1
        (actor, value), (other_actor, other_value) = outputs(obs), outputs(changed)
        assert (actor != other_actor).all() if column < 4 else (actor == other_actor).all()
        assert (value != other_value).all() if column >= 4 else (value == other_value).all()


def test_samplers():
    args = make_args(eval_best_of=4)
    agent, obs = make_agent(args), torch.randn(50, 7)
    rng = torch.Generator().manual_seed(1)
    close(act(agent, obs, "mean", args, rng), normal(agent.policy(obs)).mean.tanh())

    def samples(K):
        """K of each observation, as act() draws them."""
        noise = agent.policy.noise(50 * K, torch.Generator().manual_seed(2))
        return sample_action(agent.policy, obs.repeat_interleave(K, 0), noise)[0].view(50, K, 2)

    close(act(agent, obs, "sample", args, torch.Generator().manual_seed(2)), samples(1)[:, 0])
    best = act(agent, obs, "best-of-k", args, torch.Generator().manual_seed(2))
    q = torch.stack([agent.critic.value(agent.critic.features(obs, a)) for a in samples(4).unbind(1)], 1)
    close(agent.critic.value(agent.critic.features(obs, best)), q.max(1).values)
    assert (best[:, None] == samples(4)).all(-1).any(1).all()


# --- 2. KL of the old to the new policy


def test_kl_against_distributions():
    old, new = torch.randn(2, 500, 6)
    kl = gaussian_kl(known, new, old)
    close(kl, kl_divergence(normal(old), normal(new)).sum(-1))
    assert ((kl - kl_divergence(normal(new), normal(old)).sum(-1)).abs() > 1e-3).float().mean() > 0.9  # it has a side
    assert (kl > 0).all() and gaussian_kl(known, old, old).abs().max() < 1e-15
    wide, narrow = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -1.0]])
    close(gaussian_kl(known, narrow, wide), torch.tensor([0.5 * (math.e**2 - 1) - 1]))  # old is the wide one


def test_kl_by_monte_carlo_after_the_tanh():
    """Of the actions, which the tanh squashed: it is the same."""
    old, new = torch.tensor([[0.3, -0.5, -0.2, -1.0]]), torch.tensor([[0.1, -0.3, -0.6, -0.7]])
    action = squashed(old.expand(20_000, 4)).sample()
    log_ratio = (squashed(old).log_prob(action) - squashed(new).log_prob(action)).sum(-1)
    kl = gaussian_kl(known, new, old)[0]
    assert_mean(log_ratio, kl)
    assert kl > 8 * log_ratio.std() / math.sqrt(20_000)  # the comparison can tell it from zero


@pytest.mark.parametrize("change", [0.0, 1e-7, 1e-5, 1e-3])
def test_kl_of_small_changes_is_not_negative_in_float32(change):
    torch.set_default_dtype(torch.float32)
    old = torch.randn(20_000, 8)
    new = (old + change * torch.randn_like(old)).requires_grad_()
    kl = gaussian_kl(known, new, old)
    exact = kl_divergence(normal(old.double()), normal(new.detach().double())).sum(-1)
    assert (kl >= 0).all() and (kl - exact).abs().max() < 1e-5
    assert gradients(kl.sum(), [new])[0].isfinite().all()


def test_kl_of_extreme_policies_is_finite_in_float32():
    log_stds = [-20.0, -10.0, 0.0, 10.0, 20.0]
    pairs = [(0.0, a, m, b) for a, b, m in itertools.product(log_stds, log_stds, (0.0, 3.0))]
    rows = torch.tensor(pairs, dtype=torch.float32)
    old, new = rows[:, :2], rows[:, 2:].clone().requires_grad_()
    kl = gaussian_kl(known, new, old)
    close(kl.double(), kl_divergence(normal(old.double()), normal(new.double())).sum(-1), rtol=1e-4, atol=1e-6)
    assert kl.isfinite().all() and gradients(kl.sum(), [new])[0].isfinite().all()


# --- 3. split objective


def old_and_new(B=30, scale=0.05, inside="some", **changes):
    """Agent after a change of its policy, the policy before it at B states, some of them inside the bound."""
    args = make_args(**changes)
    agent, obs = make_agent(args), torch.randn(B, 7)
    old = agent.policy(obs).detach()
    perturb(agent.policy, scale)
    kl = gaussian_kl(agent.policy, obs, old).detach()
    limits = dict(some=kl.quantile(0.5), all=2 * kl.max(), none=kl.min() / 2)
    return dataclasses.replace(args, kl_bound=limits[inside].item()), agent, obs, old


def state_loss(agent, args, obs, old, noise):
    """Eq. (19), (20) of one state: loss, KL, entropy and whether it is inside."""
    new = normal(agent.policy(obs[None]))
    kl, x = kl_divergence(normal(old[None]), new).sum(), new.mean + new.stddev * noise
    entropy = (new.entropy() + TanhTransform().log_abs_det_jacobian(x, x.tanh())).sum()
    h = -agent.critic.value(agent.critic.features(obs[None], x.tanh()))[0] - agent.log_alpha.exp().item() * entropy
    pull, inside = agent.log_lambda.exp().item() * kl, kl.item() <= args.kl_bound
    return dict(split=h if inside else pull, penalty=h + pull, none=h)[args.trust_region], kl, entropy, inside


@pytest.mark.parametrize("share", ["some", "all", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_actor_loss_state_by_state(mode, share):
    """Each state's gradient, alone: of the branch that counts, and of no other."""
    args, agent, obs, old = old_and_new(B=12, inside=share, trust_region=mode)
    noise, parameters = torch.randn(12, 2), [*agent.policy.parameters()]
    states = [state_loss(agent, args, *row) for row in zip(obs, old, noise, strict=True)]
    assert sum(inside for *_, inside in states) == dict(some=6, all=12, none=0)[share]
    for i, (expected, kl, entropy, inside) in enumerate(states):
        weight = F.one_hot(torch.tensor(i), 12) * 0.8
        loss, kls, entropies, improving = actor_loss(agent, obs, old, noise, weight, args)
        close(loss, 0.8 * expected)
        close(gradients(loss, parameters), gradients(0.8 * expected, parameters))
        close(torch.stack([kls[i], entropies[i]]), torch.stack([kl, entropy]))
        close(improving, weight * float(inside or mode != "split"))
    weight = torch.rand(12).softmax(0)
    loss, _, _, improving = actor_loss(agent, obs, old, noise, weight, args)
    close(loss, sum(w * state[0] for w, state in zip(weight, states, strict=True)))
    close(improving, weight * torch.tensor([float(state[3] or mode != "split") for state in states]))


def test_a_state_at_the_bound_is_inside():
    args, agent, obs, old = old_and_new(B=10)
    noise, kl = torch.randn(10, 2), gaussian_kl(agent.policy, obs, old).detach()
    for i, row in enumerate(zip(obs, old, noise, strict=True)):
        at, below = kl[i].item(), math.nextafter(kl[i].item(), 0.0)
        weight = F.one_hot(torch.tensor(i), 10).double()
        for bound, inside in ((at, 1.0), (below, 0.0)):
            now = dataclasses.replace(args, kl_bound=bound)
            loss, kls, _, improving = actor_loss(agent, obs, old, noise, weight, now)
            assert kls[i] == at and improving[i] == inside
            wide = dataclasses.replace(args, kl_bound=math.inf if inside else 0.0)
            close(loss, state_loss(agent, wide, *row)[0])


@pytest.mark.parametrize("mode", MODES)
def test_actor_gradient_by_finite_differences(mode):
    """Nothing on the way through action, entropy, critic and KL is cut off from the gradient."""
    args, agent, obs, old = old_and_new(trust_region=mode)
    noise, weight, parameters = torch.randn(30, 2), torch.full((30,), 1 / 30), [*agent.policy.parameters()]
    direction = [torch.randn_like(p) for p in parameters]

    def loss_at(shift):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += shift * d
        return actor_loss(agent, obs, old, noise, weight, args)[0]

    slope = sum((g * d).sum() for g, d in zip(gradients(loss_at(0), parameters), direction, strict=True))
    step = 1e-6  # small enough that no state changes sides
    close((loss_at(step) - loss_at(-2 * step)) / (2 * step), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_states_without_weight(mode):
    args, agent, obs, old = old_and_new(trust_region=mode)
    noise, keep = torch.randn(30, 2), torch.arange(30) % 3 > 0
    weight, parameters = keep / keep.sum(), [*agent.policy.parameters()]
    kept = actor_loss(agent, obs[keep], old[keep], noise[keep], weight[keep], args)
    obs[~keep], old[~keep] = 100.0, 5.0
    loss, kl, entropy, improving = actor_loss(agent, obs, old, noise, weight, args)
    close(loss, kept[0])
    close(gradients(loss, parameters), gradients(kept[0], parameters))
    close(improving.sum(), kept[3].sum())
    duals = [agent.log_alpha, agent.log_lambda]
    of_all, of_kept = dual_loss(agent, entropy, kl, weight, args), dual_loss(agent, *kept[2:0:-1], weight[keep], args)
    close(gradients(of_all, duals), gradients(of_kept, duals))


# --- 4. duals


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_duals_move_the_right_way(sign, optimiser):
    """alpha grows (sign 1) while the entropy is below -0.5 per dimension, lambda while the KL is above its bound."""
    args = make_args()
    agent, weight = make_agent(args, A=3), torch.rand(10).softmax(0)
    duals = [agent.log_alpha, agent.log_lambda]
    entropy, kl = -1.5 - sign * torch.rand(10), 0.1 * (1 + sign * torch.rand(10))
    before, gaps = torch.stack(duals).detach().exp(), torch.stack([weight @ entropy + 1.5, 0.1 - weight @ kl])
    close(torch.stack(gradients(dual_loss(agent, entropy, kl, weight, args), duals)), before * gaps)
    stepper = optimiser(duals, 1e-3)
    dual_loss(agent, entropy, kl, weight, args).backward()
    stepper.step()
    assert (torch.sign(torch.stack(duals).exp() - before) == sign).all()


@pytest.mark.parametrize("mode", MODES)
def test_duals_and_actor_leave_each_other_alone(mode):
    args, agent, obs, old = old_and_new(trust_region=mode)
    weight = torch.full((30,), 1 / 30)
    loss, kl, entropy, improving = actor_loss(agent, obs, old, torch.randn(30, 2), weight, args)
    dual = dual_loss(agent, entropy, kl, weight, args)
    duals, networks = [agent.log_alpha, agent.log_lambda], [*agent.policy.parameters(), *agent.critic.parameters()]
    assert torch.autograd.grad(dual, networks, allow_unused=True, retain_graph=True) == (None,) * len(networks)
    assert torch.autograd.grad(loss, duals, allow_unused=True) == (None, None)
    by_alpha, by_lambda = torch.autograd.grad(dual, duals)
    assert by_alpha != 0 and (by_lambda != 0) == (mode != "none"), "without a trust region lambda would grow for ever"
    assert not improving.requires_grad


# --- 5. soft TD(lambda) targets


def brute_force_targets(reward, value, terminated, cut, gamma, td_lambda):
    """Weighted n-step returns of each step up to its cut, in numpy."""
    targets = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        last = next(s for s in range(t, len(reward)) if cut[s, i])
        returns = []
        for s in range(t, last + 1):
            rewards = sum(gamma ** (j - t) * float(reward[j, i]) for j in range(t, s + 1))
            returns.append(rewards + gamma ** (s + 1 - t) * (0.0 if terminated[s, i] else float(value[s, i])))
        weights = [(1 - td_lambda) * td_lambda**n for n in range(last - t)] + [td_lambda ** (last - t)]
        targets[t, i] = np.dot(weights, returns)
    return torch.tensor(targets)


def discounted_returns(reward, ended, gamma):
    returns = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        start = max((s + 1 for s in range(t) if ended[s, i]), default=0)
        returns[t, i] = sum(gamma ** (t - s) * float(reward[s, i]) for s in range(start, t + 1))
    return returns


def rollout_data(args, agent):
    T, E, A = args.num_steps, args.num_envs, 2
    data = {k: torch.randn(T, E, *shape) for k, shape in dict(obs=(7,), next_obs=(7,), action=(A,), reward=()).items()}
    event = torch.randint(6, (T, E))
    data |= dict(terminated=event == 0, truncated=(event == 1) | (event == 2), valid=event != 2)
    data["reward"][event == 2] = 0  # as VecEnv reports a non-finite step: truncated, not valid, no reward
    gaussian = agent.policy(data["obs"].flatten(0, 1)).detach().view(T, E, 2 * A)
    names = "obs action gaussian reward terminated truncated valid next_obs".split()
    return {k: (data | dict(gaussian=gaussian))[k] for k in names}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
def test_soft_targets_against_brute_force(monkeypatch, normalise, td_lambda):
    """Known actions and entropies: the bonus, final observations, ends and dropped steps must come out right."""
    args = make_args(num_envs=30, num_minibatches=3, normalise_reward=normalise, return_scale=4.0, td_lambda=td_lambda)
    agent, noises = make_agent(args), []
    data = rollout_data(args, agent)
    before = {k: v.clone() for k, v in data.items()}

    def known_sample(policy, obs, noise):
        assert policy is agent.policy and noise.shape == (len(obs), 2)
        noises.append(noise)
        return obs[:, 1:3].tanh(), obs.sum(-1), None

    monkeypatch.setattr(reppo, "sample_action", known_sample)
    flat = compute_targets(agent, data, args, torch.Generator().manual_seed(0))
    x = data["next_obs"].flatten(0, 1)
    with torch.no_grad():
        features = agent.critic.features(x, x[:, 1:3].tanh())
        value = agent.critic.value(features).view(5, 30)
    terminated, cut, reward = data["terminated"], data["terminated"] | data["truncated"], data["reward"]
    if normalise:
        reward = reward * 4.0 / math.sqrt((discounted_returns(reward, cut, args.gamma) ** 2).mean())
    soft = torch.where(terminated, reward, reward + args.gamma * args.alpha_init * data["next_obs"].sum(-1))
    cut = cut | torch.cat([~data["valid"][1:], torch.ones(1, 30, dtype=torch.bool)])
    close(flat["target"], brute_force_targets(soft, value, terminated, cut, args.gamma, td_lambda).flatten())
    close(flat["target"].view(5, 30)[terminated], reward[terminated])
    close(flat["next_features"], features)
    for name in ("obs", "action", "gaussian", "valid"):
        close(flat[name], data[name].flatten(0, 1), rtol=0, atol=0)
    close(data, before, rtol=0, atol=0)
    noise = torch.cat(noises)
    assert len(noise) == 150 and len(noise.unique()) == 300  # a fresh one for each state
    assert_mean(noise.flatten())
    assert_mean(noise.flatten().square(), 1.0)
    assert not any(v.requires_grad for v in flat.values())


@pytest.mark.parametrize("normalise", [False, True])
def test_dropped_step_influences_no_other(normalise):
    args = make_args(num_envs=3, num_minibatches=3, normalise_reward=normalise)
    agent = make_agent(args)
    data = rollout_data(args, agent)

    def targets(data):  # by a copy: it keeps statistics of the rewards
        flat = compute_targets(copy.deepcopy(agent), data, args, torch.Generator().manual_seed(0))
        return torch.cat([flat["target"][:, None], flat["next_features"]], 1).view(5, 3, -1)

    for t, i in np.ndindex(5, 3):
        one = torch.zeros(5, 3, dtype=torch.bool)
        one[t, i] = True
        dropped = data | dict(valid=~one, truncated=one, terminated=torch.zeros_like(one))
        dropped["reward"] = torch.where(one, 0.0, data["reward"])
        other = dict(dropped, next_obs=torch.where(one[..., None], torch.randn(7), data["next_obs"]))
        if not normalise:  # VecEnv promises a zero reward; the scale of all rewards is the only way it could matter
            other["reward"] = torch.where(one, 1000.0, data["reward"])
        before, after = targets(dropped), targets(other)
        assert (before[~one] == after[~one]).all()
        assert (before[one] != after[one]).all()


def test_rollout_stores_what_the_policy_saw_and_did():
    args = make_args(num_envs=3, num_steps=4)
    agent, steps = make_agent(args), []

    class Envs:
        """Each step and env ends or does not, is valid or not, at random."""

        def step(self, action):
            obs, ends = torch.randn(3, 7), torch.rand(2, 3) < 0.4
            final_obs = torch.where(ends.any(0)[:, None], 5 * torch.randn(3, 7), obs)
            self.valid = torch.rand(3) < 0.5
            steps.append((action, obs, torch.randn(3), *ends, final_obs, self.valid))
            return steps[-1][1:-1]

    first, normaliser, rng = torch.randn(3, 7), reppo.Normaliser(7), torch.Generator().manual_seed(3)
    data, last = reppo.rollout(agent, Envs(), first, args, torch.Generator().manual_seed(3), nothing)
    obs = first
    for t, (action, following, reward, terminated, truncated, final_obs, valid) in enumerate(steps):
        normaliser.update(obs)
        gaussian = agent.policy(normaliser(obs)).detach()
        before = normal(gaussian)
        wanted = dict(obs=normaliser(obs), action=action, gaussian=gaussian, next_obs=normaliser(final_obs))
        wanted |= dict(reward=reward, terminated=terminated, truncated=truncated, valid=valid)
        close({k: v[t] for k, v in data.items()}, wanted)
        close(action, (before.mean + before.stddev * agent.policy.noise(3, rng)).tanh())
        obs = following
    assert len(steps) == 4 and (last == obs).all()


# --- 6. the update


class Adam:
    """Written out, of a list of parameters."""

    def __init__(self, parameters):
        self.parameters, self.t = [*parameters], 0
        self.m, self.v = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))

    @torch.no_grad()
    def step(self, gradients, learning_rate):
        self.t += 1
        for p, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g * g)
            p -= learning_rate * (m / (1 - 0.9**self.t)) / ((v / (1 - 0.999**self.t)).sqrt() + 1e-8)


def clipped(gradients, limit):
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    return [g * min(1.0, limit / (norm.item() + 1e-6)) for g in gradients], norm


def batch_of(args, agent):
    """A rollout's data as update() gets it, with dropped steps."""
    return compute_targets(agent, rollout_data(args, agent), args, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", MODES)
def test_update_by_hand(mode):
    """Four epochs of one minibatch: a step of the critic, then one of policy and duals, which sees the new critic."""
    args = make_args(update_epochs=4, trust_region=mode, kl_bound=1e-3, max_grad_norm=0.3, learning_rate=5e-3)
    agent = make_agent(args)
    data, twin = batch_of(args, agent), copy.deepcopy(agent)
    noise = torch.tensor([0.8, -0.4])  # the same for all states, so that their order does not matter
    agent.policy.noise = lambda batch, rng: noise.expand(batch, 2)
    metrics = update(agent, agent.optimisers(args), data, args, torch.Generator().manual_seed(0), nothing, 0.25)

    valid, policy, critic, rows = data["valid"], twin.policy, twin.critic, []
    assert 15 < valid.sum() < 30
    obs, old, action, target, next_features = (
        data[k][valid] for k in ("obs", "gaussian", "action", "target", "next_features")
    )
    duals, critic_adam = [twin.log_alpha, twin.log_lambda], Adam(critic.parameters())
    actor_adam = Adam([*policy.parameters(), *duals])
    for _ in range(4):
        features = critic.features(obs, action)
        fit = F.cross_entropy(critic.head(features), reppo.hl_gauss(target, critic.edges, critic.sigma))
        aux = F.mse_loss(critic.predictor(features), next_features)
        critic_gradient, critic_norm = clipped(gradients(fit + aux, critic.parameters()), 0.3)
        critic_adam.step(critic_gradient, 5e-3)
        states = [state_loss(twin, args, x, gaussian, noise) for x, gaussian in zip(obs, old, strict=True)]
        loss, kl, entropy, inside = (sum(column) / len(states) for column in zip(*states, strict=True))
        policy_gradient, actor_norm = clipped(gradients(loss, policy.parameters()), 0.3)
        with torch.no_grad():  # Eq. (21), (22): the derivative by log alpha, by log lambda
            of_duals = [twin.log_alpha.exp() * (entropy + 0.5 * 2), -twin.log_lambda.exp() * (kl - 1e-3)]
            of_duals[1] *= mode != "none"
        actor_adam.step([*policy_gradient, *of_duals], 2e-3)
        share = torch.tensor(inside if mode == "split" else 1.0)
        rows.append(torch.stack([fit, aux, critic_norm, loss, actor_norm, kl, share, entropy]).detach())
    close(dict(agent.named_parameters()), dict(twin.named_parameters()), rtol=1e-7, atol=1e-9)
    close([p.grad for p in agent.critic.parameters()], critic_gradient)  # of its own loss, and of no other
    names = "losses/critic losses/auxiliary losses/critic_grad_norm losses/actor losses/actor_grad_norm policy/kl"
    names = (names + " policy/inside policy/entropy").split()
    close({k: metrics[k] for k in names}, dict(zip(names, torch.stack(rows).mean(0), strict=True)))
    close(torch.stack([metrics["policy/alpha"], metrics["policy/lambda"]]), torch.stack(duals).exp())
    if mode == "split":
        assert 0 < metrics["policy/inside"] < 1  # both branches were in use
    assert all(row[2] > 0.3 and row[4] > 0.3 for row in rows)  # and both clips


def test_update_uses_every_step_once_per_epoch(monkeypatch):
    args, seen = make_args(update_epochs=3, num_minibatches=5), []
    agent = make_agent(args)
    data, losses = batch_of(args, agent), (reppo.critic_loss, reppo.actor_loss)

    def critic_spy(critic, obs, *rest):
        seen.append(obs)
        return losses[0](critic, obs, *rest)

    def actor_spy(agent, obs, gaussian, noise, weight, args):
        assert obs is seen[-1] and abs(weight.sum() - 1) < 1e-12
        return losses[1](agent, obs, gaussian, noise, weight, args)

    monkeypatch.setattr(reppo, "critic_loss", critic_spy)
    monkeypatch.setattr(reppo, "actor_loss", actor_spy)
    update(agent, agent.optimisers(args), data, args, torch.Generator().manual_seed(0), nothing, 0.0)
    orders = [(torch.cat(seen[i : i + 5])[:, None] == data["obs"]).all(-1).nonzero()[:, 1] for i in (0, 5, 10)]
    assert all(order.sort().values.tolist() == list(range(30)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3  # a fresh shuffle for each


@pytest.mark.parametrize("delay, steps", [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (100, 1)])
def test_policy_delay(delay, steps):
    """One step of policy and duals in so many of the critic; at least one, and the critic does not notice."""
    args = make_args(update_epochs=2, num_minibatches=4, num_envs=8, policy_delay=delay)
    agent = make_agent(args)
    optimisers, data = agent.optimisers(args), batch_of(args, agent)
    update(agent, optimisers, data, args, torch.Generator().manual_seed(0), nothing, 0.0)
    counts = [{int(state["step"]) for state in o.state.values()} for o in optimisers]
    assert counts == [{steps}, {8}]


def test_critic_does_not_depend_on_the_policy_steps():
    results = []
    for delay in (1, 4):
        torch.manual_seed(0)
        args = make_args(num_minibatches=4, num_envs=8, policy_delay=delay)
        agent = make_agent(args)
        data, before = batch_of(args, agent), copy.deepcopy(agent)
        update(agent, agent.optimisers(args), data, args, torch.Generator().manual_seed(0), nothing, 0.0)
        results.append(agent)
        assert all((p != q).any() for p, q in zip(agent.parameters(), before.parameters(), strict=True))
    close(results[0].critic.state_dict(), results[1].critic.state_dict(), rtol=0, atol=0)
    assert results[0].log_alpha != results[1].log_alpha


@pytest.mark.parametrize(
    "anneal, progress, share", [(0.0, 0.9, 1.0), (1.0, 0.0, 1.0), (1.0, 0.25, 0.75), (0.8, 1.0, 0.2)]
)
def test_annealing(anneal, progress, share):
    """Adam's first step is as long as its step size: that of policy and duals shrinks, the critic's does not."""
    args = make_args(anneal=anneal, actor_learning_rate=4e-4, learning_rate=1e-4, max_grad_norm=1e9)
    agent = make_agent(args)
    data, before = batch_of(args, agent), copy.deepcopy(agent)
    update(agent, agent.optimisers(args), data, args, torch.Generator().manual_seed(0), nothing, progress)

    def longest(name):
        after, start = agent.get_parameter(name), before.get_parameter(name)
        return (after - start).abs().max().item()

    for name in ("log_alpha", "log_lambda", "policy.out.1.weight", "policy.first.weight"):
        assert longest(name) == pytest.approx(share * 4e-4, rel=1e-3), name
    assert longest("critic.head.4.weight") == pytest.approx(1e-4, rel=1e-3)


def test_annealing_to_zero_stops_the_policy_only():
    args = make_args(anneal=1.0, update_epochs=3)
    agent = make_agent(args)
    data, before = batch_of(args, agent), copy.deepcopy(agent)
    update(agent, agent.optimisers(args), data, args, torch.Generator().manual_seed(0), nothing, 1.0)
    close(agent.policy.state_dict(), before.policy.state_dict(), rtol=0, atol=0)
    assert agent.log_alpha == before.log_alpha and agent.log_lambda == before.log_lambda
    assert all((p != q).any() for p, q in zip(agent.critic.parameters(), before.critic.parameters(), strict=True))


def test_update_ignores_dropped_steps():
    args, results = make_args(update_epochs=2, num_minibatches=3), []
    agent = make_agent(args)
    data = batch_of(args, agent)
    garbage = {k: v.clone() for k, v in data.items()}
    for name in ("obs", "action", "gaussian", "target", "next_features"):
        garbage[name][~data["valid"]] = 50.0
    empty = dict(data, valid=data["valid"] & (torch.arange(30) < 2))  # minibatches without a single valid step
    for batch in (data, garbage, empty):
        trained = copy.deepcopy(agent)
        update(trained, trained.optimisers(args), batch, args, torch.Generator().manual_seed(0), nothing, 0.0)
        results.append(trained)
    close(dict(results[0].named_parameters()), dict(results[1].named_parameters()))
    assert all(p.isfinite().all() for p in results[2].parameters())


def test_target_metrics():
    args = make_args()
    agent = make_agent(args)
    data = batch_of(args, agent)
    data["target"] = torch.tensor([-10.1, 12.0, 10.0] + [1.0] * 27)
    metrics = update(agent, agent.optimisers(args), data, args, torch.Generator().manual_seed(0), nothing, 0.0)
    assert metrics["losses/clipped_targets"].item() == pytest.approx(2 / 30)
    close(metrics["losses/target"], data["target"].mean())
