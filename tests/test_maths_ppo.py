"""The maths of ppo_continuous.py against closed forms, brute force and torch.distributions.

All in float64, except where float32 is itself the question. Averages over samples must lie within 4 standard errors.
What stands in shared blocks (TD(lambda), normalisers) is tested once more in test_maths.py.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

import ppo_continuous as ppo
from ppo_continuous import (
    Agent,
    Args,
    act,
    adapted,
    compute_targets,
    gaussian_kl,
    log_prob,
    objective,
    policy_loss,
    update,
    value_loss,
)

close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_args(**changes):
    sizes = dict(num_envs=6, num_steps=5, num_minibatches=1, update_epochs=1, hidden_size=16)
    values = dict(gamma=0.9, entropy_coef=0.02, learning_rate=1e-3, desired_kl=0.01, schedule="auto")
    values |= dict(normalise_reward=False)
    return Args(**sizes | values | changes)


def make_agent(args, A=2, obs_dim=7, actor_dim=5, critic_start=2, scale=0.3):
    """An agent away from its start: every parameter is moved."""
    envs = SimpleNamespace(obs=np.zeros((args.num_envs, obs_dim)), critic_start=critic_start)
    envs.action_dim, envs.actor_dim = A, actor_dim
    agent = Agent(envs, args)
    perturb(agent, scale)
    return agent


@torch.no_grad()
def perturb(module, scale):
    for p in module.parameters():
        p += scale * torch.randn_like(p)


def gradients(loss, parameters):
    return torch.autograd.grad(loss, [*parameters], allow_unused=True, materialize_grads=True)


def nothing(phase):
    """Takes the time of no phase."""


def assert_mean(samples, expected=0.0):
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error, (samples.mean(), expected, error)


# --- 1. the Gaussian


def test_log_prob_against_distributions():
    action, mean, log_std = torch.randn(50, 3), torch.randn(50, 3), torch.tensor([-2.0, 0.1, 1.5])
    close(log_prob(action, mean, log_std), Normal(mean, log_std.exp()).log_prob(action).sum(-1))


def test_kl_against_distributions():
    mean, other_mean, log_std, other = torch.randn(50, 3), torch.randn(50, 3), torch.randn(3), torch.randn(3)
    kl = gaussian_kl(mean, log_std, other_mean, other)
    old, new = Normal(mean, log_std.exp()), Normal(other_mean, other.exp())
    close(kl, kl_divergence(old, new).sum(-1))
    assert ((kl - kl_divergence(new, old).sum(-1)).abs() > 1e-3).all()  # it has a side
    close(gaussian_kl(mean, log_std, mean, log_std), torch.zeros(50))
    action = old.sample((20_000,))[:, 0]
    log_ratio = log_prob(action, mean[0], log_std) - log_prob(action, other_mean[0], other)
    assert_mean(log_ratio, kl[0])


def test_kl_in_float32():
    """Never negative for small changes, and finite for large ones."""
    torch.set_default_dtype(torch.float32)
    mean, log_std = torch.randn(10_000, 6), torch.randn(6)
    for change in (0.0, 1e-7, 1e-5, 1e-3):
        other = mean + change * torch.randn_like(mean), log_std + change * torch.randn_like(log_std)
        kl = gaussian_kl(mean, log_std, *other)
        exact = gaussian_kl(mean.double(), log_std.double(), *(x.double() for x in other))
        assert (kl >= 0).all() and (kl - exact).abs().max() < 1e-5
    for old, new, shift in itertools.product((-20.0, -5.0, 0.0, 20.0), (-20.0, -5.0, 0.0, 20.0), (0.0, 3.0)):
        kl = gaussian_kl(torch.zeros(1, 1), torch.tensor([old]), torch.tensor([[shift]]), torch.tensor([new]))[0]
        exact = new - old + (math.exp(2 * old) + shift**2) / (2 * math.exp(2 * new)) - 0.5
        assert kl.item() == pytest.approx(exact, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("init_std", [1.0, 0.4])
def test_standard_deviation_is_the_same_in_all_states(init_std):
    """Over what the policy does, not how it is stored."""
    args = make_args(init_std=init_std)
    envs = SimpleNamespace(obs=np.zeros((6, 7)), critic_start=2, action_dim=2, actor_dim=5)
    policy = Agent(envs, args).policy
    close(policy.log_std.exp(), torch.full((2,), init_std))
    agent, obs = make_agent(args), torch.randn(100, 7)
    for current in (SimpleNamespace(policy=policy), agent):
        mean, sample = (act(current, obs, s, args, torch.Generator().manual_seed(5)) for s in ("mean", "sample"))
        z = (sample - mean) / current.policy.log_std.exp()
        close(z, torch.randn(100, 2, generator=torch.Generator().manual_seed(5)))
        close(mean, current.policy(obs))


def test_networks_by_hand():
    """Three hidden layers with ELU, orthogonal weights and zero biases; the policy starts near mean zero."""
    envs = SimpleNamespace(obs=np.zeros((6, 7)), critic_start=2, action_dim=2, actor_dim=5)
    fresh, agent, obs = Agent(envs, make_args()), make_agent(make_args()), torch.randn(9, 7)
    for net, fresh_net, gain in ((agent.policy.mean, fresh.policy.mean, 0.01), (agent.critic, fresh.critic, 1.0)):
        linear, start = ([m for m in n if isinstance(m, torch.nn.Linear)] for n in (net, fresh_net))
        z = x = obs[:, :5] if net is agent.policy.mean else obs[:, 2:]
        for layer in linear[:-1]:
            z = F.elu(z @ layer.weight.T + layer.bias)
        close(net(x), linear[-1](z))
        assert [layer.out_features for layer in linear[:-1]] == [16, 16, 16]
        for layer, scale in zip(start, [math.sqrt(2)] * 3 + [gain], strict=True):
            w = layer.weight if layer.in_features >= layer.out_features else layer.weight.T
            close(w @ w.T, scale**2 * torch.eye(len(w)))
            assert (layer.bias == 0).all()
    assert fresh.policy(torch.randn(100, 7)).abs().max() < 0.1


def test_actor_and_critic_see_their_own_columns():
    agent, obs = make_agent(make_args(), actor_dim=4, critic_start=4), torch.randn(5, 7)
    for column in range(7):
        changed = obs.clone()
        changed[:, column] += 1
        actor, value = agent.policy(obs) != agent.policy(changed), agent.value(obs) != agent.value(changed)
        assert actor.all() if column < 4 else not actor.any()
        assert value.all() if column >= 4 else not value.any()
    close(agent.value(obs.view(5, 1, 7)), agent.value(obs).view(5, 1))


# --- 2. the two objectives

EPS = 0.2
RATIOS = torch.tensor([0.1, 0.5, 0.79, 0.81, 0.95, 1.0, 1.05, 1.19, 1.21, 2.0, 10.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([-3.0, -0.4, 0.7, 2.0], dtype=torch.float64)


def grid():
    ratio, advantage = (x.flatten() for x in torch.meshgrid(RATIOS, ADVANTAGES, indexing="ij"))
    return ratio.requires_grad_(), advantage


def test_ppo_against_its_definition():
    ratio, advantage = grid()
    gain = objective(ratio, advantage, EPS, "ppo")
    worst = [max(-a * r, -a * min(max(r, 1 - EPS), 1 + EPS)) for r, a in zip(ratio.tolist(), advantage, strict=True)]
    close(-gain.detach(), torch.stack(worst))
    far = (advantage > 0) & (ratio > 1 + EPS) | (advantage < 0) & (ratio < 1 - EPS)  # further than it pays
    slope = gradients(gain.sum(), [ratio])[0]
    close(slope, torch.where(far, 0.0, advantage))
    assert far.sum() == 12


@pytest.mark.parametrize("eps", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("advantage", ADVANTAGES.tolist())
def test_spo_is_largest_at_its_edge(advantage, eps):
    best, a = 1 + eps * math.copysign(1, advantage), torch.tensor(advantage)
    ratio = torch.linspace(best - 1, best + 1, 2001)
    assert objective(ratio, a, eps, "spo").argmax() == 1000  # the middle of the grid
    ratio = torch.tensor([best, best - 0.1, best + 0.1], requires_grad=True)
    slope = gradients(objective(ratio, a, eps, "spo").sum(), [ratio])[0]
    close(slope, torch.tensor([0.0, 0.1, -0.1]) * abs(advantage) / eps)  # a parabola of curvature |A| / eps


@pytest.mark.parametrize("kind", ["ppo", "spo"])
def test_objectives_at_the_old_policy(kind):
    ratio, advantage = torch.ones(4, requires_grad=True), ADVANTAGES
    gain = objective(ratio, advantage, EPS, kind)
    close(gain.detach(), advantage)
    close(gradients(gain.sum(), [ratio])[0], advantage)


# --- 3. the value loss


def test_value_loss_against_its_definition():
    value, old, target = torch.randn(3, 500).requires_grad_().unbind()
    loss = value_loss(value, old, target, EPS)
    for v, o, r, found in zip(*(x.tolist() for x in (value, old, target, loss)), strict=True):
        near = min(max(v, o - EPS), o + EPS)
        assert found == pytest.approx(max((v - r) ** 2, (near - r) ** 2), abs=1e-12)
    slope = gradients(loss.sum(), [value])[0]
    stuck = ((value - old).abs() > EPS) & ((old + EPS * (value - old).sign() - target).abs() > (value - target).abs())
    close(slope, torch.where(stuck, 0.0, 2 * (value - target)))
    assert 20 < stuck.sum() < 480


def test_value_loss_without_clipping():
    value, old, target = torch.randn(3, 100)
    close(value_loss(value, old, target, math.inf), (value - target).square())


# --- 4. the adaptive step size


@pytest.mark.parametrize("desired", [0.01, 0.03])
@pytest.mark.parametrize("rate", [1e-5, 1.2e-5, 1e-3, 9e-3, 1e-2])
def test_adapted_step_size(rate, desired):
    """rsl_rl's rule, as it stands there."""
    for share in (0.0, 0.1, 0.499, 0.5, 0.501, 1.0, 1.999, 2.0, 2.001, 100.0):
        kl, expected = share * desired, rate
        if kl > 2 * desired:
            expected = max(1e-5, rate / 1.5)
        elif kl < desired / 2:
            expected = min(1e-2, rate * 1.5)
        close(adapted(torch.tensor(rate), torch.tensor(kl), desired), torch.tensor(expected))


# --- 5. advantages and targets


def rollout_data(args, agent):
    """Next observations are those of the next step, except where an episode ended or a step was dropped."""
    T, E = args.num_steps, args.num_envs
    event = torch.randint(6, (T, E))  # 0 terminated, 1 truncated, 2 dropped: truncated, not valid, no reward
    obs = torch.randn(T + 1, E, 7)
    data = dict(obs=obs[:-1], action=torch.randn(T, E, 2), mean=agent.policy(obs[:-1].flatten(0, 1)).detach())
    data |= dict(reward=torch.where(event == 2, 0.0, torch.randn(T, E)), terminated=event == 0)
    data |= dict(truncated=(event == 1) | (event == 2), valid=event != 2, mean=data["mean"].view(T, E, 2))
    return data | dict(next_obs=torch.where((event < 3)[..., None], torch.randn(T, E, 7), obs[1:]))


def brute_force_advantages(reward, value, next_value, terminated, cut, gamma, gae_lambda):
    """Sums of TD errors with weights (gamma lambda)^l up to the cut, in numpy."""
    advantages = np.zeros(reward.shape)
    delta = (reward + gamma * torch.where(terminated, 0.0, next_value) - value).numpy()
    for t, i in np.ndindex(*reward.shape):
        last = next((s for s in range(t, len(reward)) if cut[s, i]), len(reward) - 1)
        advantages[t, i] = sum((gamma * gae_lambda) ** (s - t) * delta[s, i] for s in range(t, last + 1))
    return torch.tensor(advantages)


def discounted_returns(reward, ended, gamma):
    returns = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        start = max((s + 1 for s in range(t) if ended[s, i]), default=0)
        returns[t, i] = sum(gamma ** (t - s) * float(reward[s, i]) for s in range(start, t + 1))
    return returns


def normalised(advantage, valid):
    kept = advantage[valid]
    return (advantage - kept.mean()) / kept.std(correction=0)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 0.95, 1.0])
def test_advantages_against_brute_force(gae_lambda, normalise):
    """Ends, dropped steps and the end of the rollout; a time-out bootstraps from the true final observation."""
    args = make_args(num_envs=30, gae_lambda=gae_lambda, normalise_reward=normalise, return_scale=2.0)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    before = {k: v.clone() for k, v in data.items()}
    flat = compute_targets(agent, data, args, None)
    ended, reward, valid = data["terminated"] | data["truncated"], data["reward"], data["valid"]
    if normalise:
        reward = reward * 2.0 / math.sqrt((discounted_returns(reward, ended, args.gamma) ** 2).mean())
    cut = ended | torch.cat([~valid[1:], torch.ones(1, 30, dtype=torch.bool)])
    value, next_value = (agent.value(data[k]).detach() for k in ("obs", "next_obs"))
    raw = brute_force_advantages(reward, value, next_value, data["terminated"], cut, args.gamma, gae_lambda)
    close(flat["value"], value.flatten())
    close(flat["target"], (raw + value).flatten())
    close(flat["advantage"], normalised(raw, valid).flatten(), rtol=1e-6, atol=1e-6)
    kept = flat["advantage"][flat["valid"]]
    assert abs(kept.mean()) < 1e-12 and abs(kept.std(correction=0) - 1) < 1e-6 and 0 < (~valid).sum()
    assert abs(flat["advantage"].mean()) > 1e-4  # of the dropped steps too it would be another
    close(data, before, rtol=0, atol=0)
    for name in ("obs", "action", "mean", "valid"):
        close(flat[name], data[name].flatten(0, 1), rtol=0, atol=0)
    assert list(flat) == "obs action advantage target value mean valid".split()  # as update() takes them apart
    assert not any(v.requires_grad for v in flat.values())


def test_targets_of_single_steps():
    """One env, three steps by hand: terminated, truncated, end of the rollout."""
    args = make_args(num_envs=1, num_steps=3, gae_lambda=0.95)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    off = torch.zeros(3, 1, dtype=torch.bool)
    data |= dict(terminated=off.clone(), truncated=off.clone(), valid=~off)
    data["terminated"][0], data["truncated"][1] = True, True
    reward, next_value = data["reward"], agent.value(data["next_obs"]).detach()
    target = compute_targets(agent, data, args, None)["target"]
    close(target, torch.stack([reward[0], reward[1] + 0.9 * next_value[1], reward[2] + 0.9 * next_value[2]])[:, 0])


@pytest.mark.parametrize("normalise", [False, True])
def test_dropped_step_influences_no_other(normalise):
    args = make_args(num_envs=3, normalise_reward=normalise)
    agent = make_agent(args)
    data = rollout_data(args, agent)

    def targets(data):  # by a copy: it keeps statistics of the rewards
        flat = compute_targets(copy.deepcopy(agent), data, args, None)
        return torch.stack([flat["target"], flat["advantage"]], 1).view(5, 3, 2)

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

    first, normaliser, rng = torch.randn(3, 7), ppo.Normaliser(7), torch.Generator().manual_seed(3)
    data, last = ppo.rollout(agent, Envs(), first, args, torch.Generator().manual_seed(3), nothing)
    obs = first
    for t, (action, following, reward, terminated, truncated, final_obs, valid) in enumerate(steps):
        normaliser.update(obs)
        mean = agent.policy(normaliser(obs)).detach()
        wanted = dict(obs=normaliser(obs), action=action, mean=mean, next_obs=normaliser(final_obs))
        wanted |= dict(reward=reward, terminated=terminated, truncated=truncated, valid=valid)
        close({k: v[t] for k, v in data.items()}, wanted)
        close(action, mean + agent.policy.log_std.exp().detach() * agent.policy.noise(3, rng))  # not squashed
        obs = following
    assert len(steps) == 4 and (last == obs).all()


# --- 6. the loss


def old_and_new(B=40, scale=0.05, **changes):
    """Agent after a change, a batch of the policy before it, its log standard deviation, and weights."""
    args = make_args(**changes)
    agent, obs = make_agent(args), torch.randn(B, 7)
    mean, value, log_std = (x.detach().clone() for x in (agent.policy(obs), agent.value(obs), agent.policy.log_std))
    action = mean + log_std.exp() * torch.randn(B, 2)
    batch = obs, action, torch.randn(B), value + torch.randn(B), value, mean
    perturb(agent, scale)
    return args, agent, batch, log_std, torch.rand(B).softmax(0)


def by_hand(args, agent, batch, old_log_std, weight):
    """Loss and metrics by torch.distributions."""
    obs, action, advantage, target, old_value, old_mean = batch
    old, new = Normal(old_mean, old_log_std.exp()), Normal(agent.policy(obs), agent.policy.log_std.exp())
    ratio, eps = (new.log_prob(action) - old.log_prob(action)).sum(-1).exp(), args.clip_coef
    if args.objective == "ppo":
        cost = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - eps, 1 + eps))
    else:
        cost = -(ratio * advantage - advantage.abs() / (2 * eps) * (ratio - 1) ** 2)
    value = agent.value(obs)
    fit = (value - target) ** 2
    if args.clip_value:
        fit = torch.maximum(fit, (old_value + (value - old_value).clamp(-eps, eps) - target) ** 2)
    outside, entropy = (ratio < 1 - eps) | (ratio > 1 + eps), new.entropy().sum(-1)
    rows = [cost, fit, kl_divergence(old, new).sum(-1), outside, entropy, new.stddev.mean(-1)]
    loss = weight @ (cost + args.value_coef * fit - args.entropy_coef * entropy)
    return loss, torch.stack([weight @ row.double() for row in rows]).detach()


@pytest.mark.parametrize("clip_value", [True, False])
@pytest.mark.parametrize("kind", ["ppo", "spo"])
def test_policy_loss_by_hand(kind, clip_value):
    changes = dict(objective=kind, clip_value=clip_value, value_coef=0.7, entropy_coef=0.3, clip_coef=0.15)
    args, agent, batch, old_log_std, weight = old_and_new(**changes)
    loss, metrics = policy_loss(agent, batch, old_log_std, weight, args)
    expected, expected_metrics = by_hand(args, agent, batch, old_log_std, weight)
    close(loss, expected)
    close(metrics, expected_metrics)
    close(gradients(loss, agent.parameters()), gradients(expected, agent.parameters()))
    assert 0.1 < metrics[3] < 0.9 and not metrics.requires_grad


@pytest.mark.parametrize("kind", ["ppo", "spo"])
def test_policy_loss_of_the_old_policy(kind):
    """Ratio 1, KL 0, nothing clipped; the gradient is that of the score function."""
    args, agent, batch, old_log_std, weight = old_and_new(scale=0.0, objective=kind, value_coef=0.0, entropy_coef=0.0)
    loss, metrics = policy_loss(agent, batch, old_log_std, weight, args)
    obs, action, advantage, target, value, _ = batch
    close(loss, -(weight @ advantage))
    close(metrics[1:4], torch.stack([weight @ (value - target) ** 2, torch.tensor(0.0), torch.tensor(0.0)]))
    score = Normal(agent.policy(obs), agent.policy.log_std.exp()).log_prob(action).sum(-1)
    close(gradients(loss, agent.parameters()), gradients(-(weight * advantage) @ score, agent.parameters()))


def test_entropy_bonus_widens_the_policy():
    """Its gradient by each log standard deviation is minus the coefficient, and it touches nothing else."""
    args, agent, batch, old_log_std, weight = old_and_new(entropy_coef=0.3)
    with_bonus = policy_loss(agent, batch, old_log_std, weight, args)[0]
    args.entropy_coef = 0.0
    difference = with_bonus - policy_loss(agent, batch, old_log_std, weight, args)[0]
    close(difference, -0.3 * Normal(0.0, agent.policy.log_std.exp()).entropy().sum())
    for (name, _), g in zip(agent.named_parameters(), gradients(difference, agent.parameters()), strict=True):
        close(g, torch.full_like(g, -0.3 if name == "policy.log_std" else 0.0))


@pytest.mark.parametrize("kind", ["ppo", "spo"])
def test_steps_without_weight(kind):
    args, agent, batch, old_log_std, _ = old_and_new(objective=kind)
    keep = torch.arange(40) % 3 > 0
    weight = keep / keep.sum()
    kept = policy_loss(agent, [x[keep] for x in batch], old_log_std, weight[keep], args)
    for x in batch:
        x[~keep] = 3.0
    whole = policy_loss(agent, batch, old_log_std, weight, args)
    close(whole, kept)
    close(gradients(whole[0], agent.parameters()), gradients(kept[0], agent.parameters()))


# --- 7. the update


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


def batch_of(args, agent):
    """A rollout's data as update() gets it, with dropped steps."""
    data = rollout_data(args, agent)
    data["action"] = data["mean"] + agent.policy.log_std.detach().exp() * data["action"]
    return compute_targets(agent, data, args, None)


def run(agent, optimisers, data, args, progress=0.0):
    return update(agent, optimisers, data, args, torch.Generator().manual_seed(0), nothing, progress)


SCHEDULES = [("ppo", "adaptive"), ("ppo", "linear"), ("ppo", "fixed"), ("ppo", "auto")]
SCHEDULES += [("spo", "adaptive"), ("spo", "linear"), ("spo", "fixed"), ("spo", "auto")]


@pytest.mark.parametrize("epochs", [1, 6])
@pytest.mark.parametrize("kind, schedule", SCHEDULES)
def test_update_by_hand(kind, schedule, epochs):
    """Epochs of one minibatch: gradient, clipping, step size by KL or by progress, and Adam, all written out."""
    args = make_args(update_epochs=epochs, objective=kind, schedule=schedule, learning_rate=8e-3, max_grad_norm=0.5)
    agent = make_agent(args)
    data, twin, rate = batch_of(args, agent), copy.deepcopy(agent), 8e-3
    metrics = run(agent, agent.optimisers(args), data, args, progress=0.25)

    *batch, valid = (data[k] for k in "obs action advantage target value mean valid".split())
    adam, old_log_std, rows, rates = Adam(twin.parameters()), twin.policy.log_std.detach().clone(), [], []
    assert 15 < valid.sum() < 30
    for _ in range(epochs):
        loss, row = by_hand(args, twin, [x[valid] for x in batch], old_log_std, torch.ones(30)[valid] / valid.sum())
        gradient = gradients(loss, twin.parameters())
        norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
        if schedule == "adaptive" or (schedule, kind) == ("auto", "ppo"):
            rate = max(rate / 1.5, 1e-5) if row[2] > 0.02 else min(rate * 1.5, 1e-2) if row[2] < 0.005 else rate
        rates.append(0.75 * rate if schedule == "linear" else rate)
        adam.step([g * min(1.0, 0.5 / (norm.item() + 1e-6)) for g in gradient], rates[-1])
        rows.append(torch.cat([row, norm[None]]))
    close(dict(agent.named_parameters()), dict(twin.named_parameters()), rtol=1e-7, atol=1e-9)
    names = "losses/policy losses/value policy/kl policy/clipped policy/entropy policy/std losses/grad_norm".split()
    close({k: metrics[k] for k in names}, dict(zip(names, torch.stack(rows).mean(0), strict=True)))
    close(metrics["policy/learning_rate"], torch.tensor(rates[-1]))
    assert rows[0][2] == 0 and rows[0][6] > 0.5  # the first KL is that of a policy to itself; the clip was in use
    if epochs > 1 and schedule == "adaptive":
        assert rates[0] == 1e-2 and min(rates) < 8e-3  # it grew up to its limit, and shrank


@pytest.mark.parametrize("kind, schedule", SCHEDULES)
def test_step_size_over_iterations(kind, schedule):
    """What the next iteration starts with: adaptive goes on, linear follows the progress, fixed stays."""
    args = make_args(objective=kind, schedule=schedule, learning_rate=1e-4)
    agent = make_agent(args)
    optimisers, data, rates = agent.optimisers(args), batch_of(args, agent), []
    for progress in (0.0, 0.5, 0.9):  # KL is 0 at the only minibatch of each
        data["mean"] = agent.policy(data["obs"]).detach()
        rates.append(run(agent, optimisers, data, args, progress)["policy/learning_rate"].item())
    rule = dict(ppo="adaptive", spo="fixed")[kind] if schedule == "auto" else schedule
    factors = dict(adaptive=[1.5, 1.5**2, 1.5**3], linear=[1.0, 0.5, 0.1], fixed=[1.0, 1.0, 1.0])[rule]
    assert rates == pytest.approx([1e-4 * f for f in factors])


@pytest.mark.parametrize("start", [1e-5, 1e-2])
def test_adaptive_step_size_finds_the_desired_kl(start):
    """From both ends of its range, in float32, over iterations of many minibatches."""
    torch.set_default_dtype(torch.float32)
    args = make_args(num_envs=64, num_steps=8, num_minibatches=4, update_epochs=5, learning_rate=start)
    agent, kls = make_agent(args), []
    optimisers = agent.optimisers(args)
    for _ in range(8):
        kls.append(run(agent, optimisers, batch_of(args, agent), args)["policy/kl"].item())
    assert 0.003 < np.mean(kls[-4:]) < 0.03


def test_update_uses_every_step_once_per_epoch(monkeypatch):
    args, seen = make_args(update_epochs=3, num_minibatches=5), []
    agent = make_agent(args)
    data, old_log_std = batch_of(args, agent), agent.policy.log_std.detach().clone()

    def spy(agent, batch, log_std, weight, args):
        seen.append(batch[0])
        close(log_std, old_log_std, rtol=0, atol=0)  # of the rollout, in all epochs
        assert abs(weight.sum() - 1) < 1e-12
        return policy_loss(agent, batch, log_std, weight, args)

    monkeypatch.setattr(ppo, "policy_loss", spy)
    run(agent, agent.optimisers(args), data, args)
    orders = [(torch.cat(seen[i : i + 5])[:, None] == data["obs"]).all(-1).nonzero()[:, 1] for i in (0, 5, 10)]
    assert all(order.sort().values.tolist() == list(range(30)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3  # a fresh shuffle for each


def test_update_ignores_dropped_steps():
    args, results = make_args(update_epochs=2, num_minibatches=3), []
    agent = make_agent(args)
    data = batch_of(args, agent)
    garbage = {k: v.clone() for k, v in data.items()}
    for name in ("obs", "action", "advantage", "target", "value", "mean"):
        garbage[name][~data["valid"]] = 3.0
    empty = dict(data, valid=data["valid"] & (torch.arange(30) < 2))  # minibatches without a single valid step
    for batch in (data, garbage, empty):
        trained = copy.deepcopy(agent)
        run(trained, trained.optimisers(args), batch, args)
        results.append(trained)
    close(dict(results[0].named_parameters()), dict(results[1].named_parameters()))
    assert all(p.isfinite().all() for p in results[2].parameters())


def test_explained_variance():
    """One for values that are right, zero for a constant, whatever it is."""
    args = make_args()
    agent = make_agent(args)
    data = batch_of(args, agent)
    for value, expected in ((data["target"], 1.0), (torch.full((30,), 7.0), 0.0), (data["target"] / 2, 0.75)):
        metrics = run(agent, agent.optimisers(args), dict(data, value=value), args)
        assert metrics["losses/explained_variance"].item() == pytest.approx(expected, abs=1e-12)
    close(metrics["losses/target"], data["target"].mean())
