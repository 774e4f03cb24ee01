"""The maths of ppo_continuous.py against closed forms, brute force and torch.distributions.

All in float64, except where float32 is the question. Averages over samples must lie within 4
standard errors. What stands in shared blocks (TD(lambda), normalizer) is tested elsewhere, too.
"""

import copy
import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import run_helpers
import torch
import torch.nn.functional as F
from makers import discounted_returns, perturb
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import ppo_continuous as ppo
from ppo_continuous import (
    Agent,
    Args,
    Normalizer,
    act,
    adapt_learning_rate,
    anneal,
    compute_targets,
    gaussian_kl,
    log_prob,
    normalize_advantage,
    objective,
    policy_loss,
    rollout,
    update,
    value_loss,
)

OBS_DIM = 7
ACTION_DIM = 2
HIDDEN = 16
BATCH = 30  # steps of make_args: 6 environments, 5 steps
EPS = 0.2
LOSS_METRICS = ["losses/policy", "losses/value", "policy/kl"]
LOSS_METRICS += ["policy/clipped", "policy/entropy", "policy/std"]
every_objective = pytest.mark.parametrize("kind", ["ppo", "spo"])
every_schedule = pytest.mark.parametrize("schedule", ["adaptive", "linear", "fixed", "auto"])


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_args(**changes):
    values = dict(num_envs=6, num_steps=5, num_minibatches=1, update_epochs=1)
    values |= dict(hidden_size=HIDDEN, gamma=0.9, entropy_coef=0.02, normalize_reward=False)
    return Args(**(values | changes))


def fresh_agent(args, actor_dim=5, critic_start=2):
    envs = SimpleNamespace(
        num_envs=args.num_envs,
        obs_dim=OBS_DIM,
        actor_dim=actor_dim,
        critic_start=critic_start,
        action_dim=ACTION_DIM,
        spaces={},
    )
    return Agent(envs, args)


def make_agent(args, actor_dim=5, critic_start=2):
    """An agent away from its start: every parameter is moved."""
    agent = fresh_agent(args, actor_dim, critic_start)
    perturb(agent, 0.3)
    return agent


def make_optimizer(agent, args):
    """As in main."""
    return torch.optim.Adam(agent.parameters(), torch.tensor(args.learning_rate), fused=True)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gradients(loss, parameters):
    return torch.autograd.grad(loss, [*parameters], allow_unused=True, materialize_grads=True)


def assert_mean(samples, expected=0.0):
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error, (samples.mean(), expected, error)


# === The Gaussian ===
def test_log_prob_against_distributions():
    action = torch.randn(50, 3)
    mean = torch.randn(50, 3)
    log_std = torch.tensor([-2.0, 0.1, 1.5])
    expected = Normal(mean, log_std.exp()).log_prob(action).sum(dim=-1)
    assert_close(log_prob(action, mean, log_std), expected)
    assert_close(log_prob(action, mean, log_std.expand(50, 3)), expected)  # as the batch has it


def test_kl_against_distributions():
    mean = torch.randn(50, 3)
    log_std = torch.randn(3)
    new_mean = torch.randn(50, 3)
    new_log_std = torch.randn(3)
    old = Normal(mean, log_std.exp())
    new = Normal(new_mean, new_log_std.exp())
    kl = gaussian_kl(mean, log_std, new_mean, new_log_std)
    assert_close(kl, kl_divergence(old, new).sum(dim=-1))
    reverse_kl = kl_divergence(new, old).sum(dim=-1)
    assert ((kl - reverse_kl).abs() > 1e-3).all()  # it has a direction
    assert_close(gaussian_kl(mean, log_std, mean, log_std), torch.zeros(50))
    assert_close(gaussian_kl(mean, log_std.expand(50, 3), new_mean, new_log_std), kl)
    action = old.sample((20_000,))[:, 0]
    old_log_prob = log_prob(action, mean[0], log_std)
    assert_mean(old_log_prob - log_prob(action, new_mean[0], new_log_std), kl[0])


def test_small_kl_in_float32():
    """Never negative."""
    torch.set_default_dtype(torch.float32)
    mean = torch.randn(10_000, 6)
    log_std = torch.randn(6)
    for change in (0.0, 1e-7, 1e-5, 1e-3):
        new_mean = mean + change * torch.randn_like(mean)
        new_log_std = log_std + change * torch.randn_like(log_std)
        kl = gaussian_kl(mean, log_std, new_mean, new_log_std)
        exact = gaussian_kl(
            mean.double(), log_std.double(), new_mean.double(), new_log_std.double()
        )
        assert (kl >= 0).all()
        assert (kl - exact).abs().max() < 1e-5


def test_large_kl_in_float32():
    """Finite and right."""
    torch.set_default_dtype(torch.float32)
    log_stds = (-20.0, -5.0, 0.0, 20.0)
    for old, new, shift in itertools.product(log_stds, log_stds, (0.0, 3.0)):
        old_log_std = torch.tensor([old])
        new_log_std = torch.tensor([new])
        new_mean = torch.tensor([[shift]])
        kl = gaussian_kl(torch.zeros(1, 1), old_log_std, new_mean, new_log_std)[0]
        exact = new - old + (math.exp(2 * old) + shift**2) / (2 * math.exp(2 * new)) - 0.5
        assert kl.item() == pytest.approx(exact, rel=1e-4, abs=1e-6)


# === Networks ===
@pytest.mark.parametrize("init_std", [1.0, 0.4])
def test_standard_deviation_is_the_same_in_all_states(init_std):
    """By what the policy does, not by how it is stored."""
    args = make_args(init_std=init_std)
    fresh = fresh_agent(args)
    assert_close(fresh.policy.log_std.exp(), torch.full((ACTION_DIM,), init_std))
    obs = torch.randn(100, OBS_DIM)
    for agent in (fresh, make_agent(args)):
        mean = act(agent, obs, "mean", args, seeded(5))
        sample = act(agent, obs, "sample", args, seeded(5))
        z = (sample - mean) / agent.policy.log_std.exp()
        assert_close(z, torch.randn(100, ACTION_DIM, generator=seeded(5)))
        assert_close(mean, agent.policy(obs))


def linear_layers(network):
    return [layer for layer in network if isinstance(layer, torch.nn.Linear)]


def test_networks_by_hand():
    """Three hidden layers with ELU."""
    agent = make_agent(make_args())
    obs = torch.randn(9, OBS_DIM)
    outputs = {agent.policy.mean: agent.policy(obs), agent.critic: agent.value(obs)[:, None]}
    inputs = {agent.policy.mean: obs[:, :5], agent.critic: obs[:, 2:]}
    for network, output in outputs.items():
        *hidden_layers, last_layer = linear_layers(network)
        z = inputs[network]
        for layer in hidden_layers:
            z = F.elu(z @ layer.weight.T + layer.bias)
        assert_close(output, last_layer(z))
        assert [layer.out_features for layer in hidden_layers] == [HIDDEN] * 3


def test_networks_at_the_start():
    """Orthogonal weights and zero biases; the policy starts near mean zero."""
    agent = fresh_agent(make_args())
    for network, last_gain in ((agent.policy.mean, 0.01), (agent.critic, 1.0)):
        gains = [math.sqrt(2)] * 3 + [last_gain]
        for layer, gain in zip(linear_layers(network), gains, strict=True):
            weight = layer.weight
            if layer.in_features < layer.out_features:
                weight = weight.T
            assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)))
            assert (layer.bias == 0).all()
    assert agent.policy(torch.randn(100, OBS_DIM)).abs().max() < 0.1


def test_actor_and_critic_see_their_own_columns():
    agent = make_agent(make_args(), actor_dim=4, critic_start=4)
    obs = torch.randn(5, OBS_DIM)
    for column in range(OBS_DIM):
        changed = obs.clone()
        changed[:, column] += 1
        mean_changes = agent.policy(obs) != agent.policy(changed)
        value_changes = agent.value(obs) != agent.value(changed)
        if column < 4:
            assert mean_changes.all() and not value_changes.any()
        else:
            assert value_changes.all() and not mean_changes.any()
    assert_close(agent.value(obs.view(5, 1, OBS_DIM)), agent.value(obs).view(5, 1))


# === The two objectives ===
RATIOS = [0.1, 0.5, 0.79, 0.81, 0.95, 1.0, 1.05, 1.19, 1.21, 2.0, 10.0]
ADVANTAGES = [-3.0, -0.4, 0.7, 2.0]


def test_ppo_against_its_definition():
    pairs = torch.tensor([*itertools.product(RATIOS, ADVANTAGES)])
    ratio = pairs[:, 0].clone().requires_grad_()
    advantage = pairs[:, 1]
    gain = objective(ratio, advantage, EPS, "ppo")
    expected = []
    for r, a in itertools.product(RATIOS, ADVANTAGES):
        clipped = min(max(r, 1 - EPS), 1 + EPS)
        expected.append(max(-a * r, -a * clipped))
    assert_close(-gain.detach(), torch.tensor(expected))
    too_likely = (advantage > 0) & (ratio > 1 + EPS)
    too_unlikely = (advantage < 0) & (ratio < 1 - EPS)
    further_than_it_pays = too_likely | too_unlikely
    slope = gradients(gain.sum(), [ratio])[0]
    assert_close(slope, torch.where(further_than_it_pays, 0.0, advantage))
    assert further_than_it_pays.sum() == 12


@pytest.mark.parametrize("eps", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_spo_is_largest_at_its_edge(advantage, eps):
    best = 1 + eps * math.copysign(1, advantage)
    ratio = torch.linspace(best - 1, best + 1, 2001)
    gain = objective(ratio, torch.tensor(advantage), eps, "spo")
    assert gain.argmax() == 1000  # the middle of the grid
    ratio = torch.tensor([best, best - 0.1, best + 0.1], requires_grad=True)
    gain = objective(ratio, torch.tensor(advantage), eps, "spo")
    slope = gradients(gain.sum(), [ratio])[0]
    curvature = abs(advantage) / eps  # of a parabola
    assert_close(slope, torch.tensor([0.0, 0.1, -0.1]) * curvature)


@every_objective
def test_objectives_at_the_old_policy(kind):
    advantage = torch.tensor(ADVANTAGES)
    ratio = torch.ones(4, requires_grad=True)
    gain = objective(ratio, advantage, EPS, kind)
    assert_close(gain.detach(), advantage)
    assert_close(gradients(gain.sum(), [ratio])[0], advantage)


# === The value loss ===
def test_value_loss_against_its_definition():
    value = torch.randn(500, requires_grad=True)
    old_value = torch.randn(500)
    target = torch.randn(500)
    loss = value_loss(value, old_value, target, EPS)
    for i in range(500):
        v = value[i].item()
        near = min(max(v, old_value[i].item() - EPS), old_value[i].item() + EPS)
        error = (v - target[i].item()) ** 2
        near_error = (near - target[i].item()) ** 2
        assert loss[i].item() == pytest.approx(max(error, near_error), abs=1e-12)
    slope = gradients(loss.sum(), [value])[0]
    value = value.detach()
    edge = old_value + EPS * (value - old_value).sign()
    edge_is_worse = (edge - target).abs() > (value - target).abs()
    stuck = ((value - old_value).abs() > EPS) & edge_is_worse
    assert_close(slope, torch.where(stuck, 0.0, 2 * (value - target)))
    assert 20 < stuck.sum() < 480


def test_value_loss_without_clipping():
    value, old_value, target = torch.randn(3, 100)
    assert_close(value_loss(value, old_value, target, math.inf), (value - target).square())


# === The adaptive learning rate ===
def rsl_rl_rule(learning_rate, kl, desired_kl):
    """As it stands there."""
    if kl > 2 * desired_kl:
        return max(1e-5, learning_rate / 1.5)
    if kl < desired_kl / 2:
        return min(1e-2, learning_rate * 1.5)
    return learning_rate


@pytest.mark.parametrize("desired_kl", [0.01, 0.03])
@pytest.mark.parametrize("rate", [1e-5, 1.2e-5, 1e-3, 9e-3, 1e-2])
def test_adapted_learning_rate(rate, desired_kl):
    for share in (0.0, 0.1, 0.499, 0.5, 0.501, 1.0, 1.999, 2.0, 2.001, 100.0):
        kl = share * desired_kl
        learning_rate = torch.tensor(rate)
        optimizer = torch.optim.Adam([torch.zeros(1)], learning_rate)
        adapt_learning_rate(optimizer, torch.tensor(kl), desired_kl)
        assert_close(learning_rate, torch.tensor(rsl_rl_rule(rate, kl, desired_kl)))


# === Advantages and targets ===
def rollout_data(args, agent, with_broken=True):
    """What rollout returns, with random ends.

    Next observations are those of the next step, except where an episode ended or broke.
    """
    T = args.num_steps
    E = args.num_envs
    event = torch.randint(6, (T, E))
    terminated = event == 0
    broken = (event == 2) & with_broken
    truncated = (event == 1) | broken
    obs = torch.randn(T + 1, E, OBS_DIM)
    final_obs = torch.randn(T, E, OBS_DIM)
    ended = (terminated | truncated)[..., None]
    mean = agent.policy(obs[:-1].flatten(0, 1)).detach().view(T, E, ACTION_DIM)
    log_std = agent.policy.log_std.detach().expand_as(mean).clone()
    return {
        "obs": obs[:-1],
        "action": mean + log_std.exp() * torch.randn_like(mean),
        "mean": mean,
        "log_std": log_std,
        "reward": torch.where(broken, 0.0, torch.randn(T, E)),
        "terminated": terminated,
        "truncated": truncated,
        "broken": broken,
        "next_obs": torch.where(ended, final_obs, obs[1:]),
    }


def brute_force_advantages(delta, cut, decay):
    """Sums of TD errors (T, E) with weights decay^l up to the cut."""
    T = len(delta)
    advantages = torch.zeros(delta.shape)
    for start, i in np.ndindex(*delta.shape):
        for t in range(start, T):
            advantages[start, i] += decay ** (t - start) * delta[t, i]
            if cut[t, i]:
                break
    return advantages


def standardized(values, chosen):
    """By mean and standard deviation of the chosen ones."""
    return (values - values[chosen].mean()) / values[chosen].std(correction=0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 0.95, 1.0])
def test_advantages_against_brute_force(gae_lambda, normalize):
    """Ends, broken steps and the end of the rollout; a time-out bootstraps from the true end."""
    args = make_args(num_envs=30, gae_lambda=gae_lambda)
    args.normalize_reward = normalize
    args.return_scale = 2.0
    agent = make_agent(args)
    data = rollout_data(args, agent)
    before = {name: values.clone() for name, values in data.items()}
    flat = compute_targets(agent, data, args, None)
    assert_close(data, before, rtol=0, atol=0)

    reward = data["reward"]
    terminated = data["terminated"]
    broken = data["broken"]
    ended = terminated | data["truncated"]
    if normalize:
        returns = discounted_returns(reward, terminated, args.gamma)
        reward = reward * 2.0 / math.sqrt((returns**2).mean())
    breaks_next = torch.cat([broken[1:], torch.ones(1, 30, dtype=torch.bool)])
    value = agent.value(data["obs"]).detach()
    next_value = agent.value(data["next_obs"]).detach()
    delta = reward + args.gamma * torch.where(terminated, 0.0, next_value) - value
    raw = brute_force_advantages(delta, ended | breaks_next, args.gamma * gae_lambda)
    advantage = standardized(raw, ~broken)
    whole = ~broken.flatten()
    assert 0 < broken.sum() < 75
    assert_close(flat["value"][whole], value[~broken])
    assert_close(flat["target"][whole], (raw + value)[~broken])
    assert_close(flat["advantage"][whole], advantage[~broken], rtol=1e-6, atol=1e-6)
    assert abs(flat["advantage"][whole].mean()) < 1e-12
    assert abs(flat["advantage"][whole].std(correction=0) - 1) < 1e-6
    of_all_steps = standardized(raw, torch.ones_like(broken))
    assert (advantage - of_all_steps).abs().max() > 1e-4  # broken steps would have changed it
    for name in ("obs", "action", "mean", "log_std"):
        assert_close(flat[name][whole], data[name][~broken], rtol=0, atol=0)
    names = {"obs", "action", "mean", "log_std", "value", "target", "advantage"}
    assert set(flat) == names
    assert not any(values.requires_grad for values in flat.values())


def test_targets_of_single_steps():
    """One environment, three steps by hand: terminated, truncated, end of the rollout."""
    args = make_args(num_envs=1, num_steps=3)
    agent = make_agent(args)
    data = rollout_data(args, agent, with_broken=False)
    data["terminated"] = torch.tensor([[True], [False], [False]])
    data["truncated"] = torch.tensor([[False], [True], [False]])
    reward = data["reward"][:, 0]
    next_value = agent.value(data["next_obs"]).detach()[:, 0]
    target = compute_targets(agent, data, args, None)["target"]
    assert_close(target[0], reward[0])
    assert_close(target[1], reward[1] + 0.9 * next_value[1])
    assert_close(target[2], reward[2] + 0.9 * next_value[2])


# === Broken steps ===
def with_garbage(data, chosen, reward):
    """The data with other contents in the chosen steps, (T, E)"""
    changed = dict(data)
    for name in ("obs", "action", "mean", "log_std", "next_obs"):
        garbage = 3 * torch.randn_like(data[name])
        changed[name] = torch.where(chosen[..., None], garbage, data[name])
    changed["reward"] = torch.where(chosen, reward, data["reward"])
    return changed


@pytest.mark.parametrize("normalize", [False, True])
def test_broken_step_influences_no_other(normalize):
    """It is in no minibatch, no trace runs into it, and advantages are normalized without it."""
    args = make_args(num_envs=3, normalize_reward=normalize)
    agent = make_agent(args)
    data = rollout_data(args, agent, with_broken=False)
    # VecEnv promises a reward of zero; the scale of all rewards is the only way it could matter
    reward = 0.0 if normalize else 1000.0
    for t, i in np.ndindex(5, 3):
        one = torch.zeros(5, 3, dtype=torch.bool)
        one[t, i] = True
        data["broken"] = one
        data["truncated"] = one
        data["terminated"] = torch.zeros_like(one)
        data["reward"] = torch.where(one, 0.0, data["reward"])
        garbage = with_garbage(data, one, reward)
        # by copies of the agent: it keeps statistics of the rewards
        flat = compute_targets(copy.deepcopy(agent), data, args, None)
        flat_garbage = compute_targets(copy.deepcopy(agent), garbage, args, None)
        assert_close(flat, flat_garbage, rtol=0, atol=0)
        # the same contents of a step that is not broken do matter
        garbage["broken"] = torch.zeros_like(one)
        flat_garbage = compute_targets(copy.deepcopy(agent), garbage, args, None)
        position = 3 * t + i
        for name in ("obs", "target", "advantage"):
            assert (flat[name][position] != flat_garbage[name][position]).all()


def test_broken_rows_are_replaced_by_a_whole_one():
    args = make_args()
    agent = make_agent(args)
    data = rollout_data(args, agent)
    data["broken"][0, 0] = True  # the stand-in is not simply the first row
    flat = compute_targets(agent, data, args, None)
    broken = data["broken"].flatten()
    first_whole = (~broken).nonzero()[0, 0]
    assert 1 < broken.sum() < 15
    for values in flat.values():
        for row in broken.nonzero()[:, 0]:
            assert_close(values[row], values[first_whole], rtol=0, atol=0)


def test_advantage_of_broken_steps():
    """They count neither for the mean nor for the variance, and become zero."""
    advantage = torch.randn(5, 6)
    broken = torch.rand(5, 6) < 0.3
    normalized = normalize_advantage(advantage, broken)
    assert_close(normalized[~broken], standardized(advantage, ~broken)[~broken], rtol=1e-6, atol=0)
    assert (normalized[broken] == 0).all()
    far_off = torch.where(broken, 1e6, advantage)
    assert_close(normalize_advantage(far_off, broken), normalized)
    assert (normalize_advantage(advantage, torch.ones_like(broken)) == 0).all()


def test_update_after_broken_steps():
    """What broken steps hold does not matter, and few whole steps are no danger."""
    args = make_args(update_epochs=2, num_minibatches=3)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    hardly_whole = dict(data, broken=torch.arange(BATCH).view(5, 6) > 1)
    all_broken = dict(data, broken=torch.ones(5, 6, dtype=torch.bool))
    trained = []
    for case in (data, with_garbage(data, data["broken"], 1000.0), hardly_whole, all_broken):
        twin = copy.deepcopy(agent)
        flat = compute_targets(twin, case, args, None)
        update(twin, make_optimizer(twin, args), flat, args, seeded())
        trained.append(dict(twin.named_parameters()))
    assert_close(trained[0], trained[1])
    for parameters in trained:
        assert all(parameter.isfinite().all() for parameter in parameters.values())


# === The rollout ===
class RandomEnvs:
    """Each step ends or does not, breaks or does not, at random."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.steps = []

    def step(self, action):
        obs = torch.randn(self.num_envs, OBS_DIM)
        terminated, truncated = torch.rand(2, self.num_envs) < 0.4
        ended = (terminated | truncated)[:, None]
        final_obs = torch.where(ended, 5 * torch.randn_like(obs), obs)
        reward = torch.randn(self.num_envs)
        self.broken = torch.rand(self.num_envs) < 0.5
        self.steps.append(
            {
                "action": action,
                "next": obs,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "final_obs": final_obs,
                "broken": self.broken,
            }
        )
        return obs, reward, terminated, truncated, final_obs


def test_rollout_stores_what_the_policy_saw_and_did():
    args = make_args(num_envs=3, num_steps=4)
    agent = make_agent(args)
    envs = RandomEnvs(3)
    obs = torch.randn(3, OBS_DIM)
    data, last_obs = rollout(agent, envs, obs, args, seeded(3))
    normalizer = Normalizer(OBS_DIM)
    generator = seeded(3)
    log_std = agent.policy.log_std.detach()
    for t, step in enumerate(envs.steps):
        normalizer.update(obs)
        mean = agent.policy(normalizer(obs)).detach()
        expected = {
            "obs": normalizer(obs),
            "action": step["action"],
            "mean": mean,
            "log_std": log_std.expand(3, ACTION_DIM),
            "reward": step["reward"],
            "terminated": step["terminated"],
            "truncated": step["truncated"],
            "broken": step["broken"],
            "next_obs": normalizer(step["final_obs"]),
        }
        assert_close({name: values[t] for name, values in data.items()}, expected)
        noise = agent.policy.noise(3, generator)
        assert_close(step["action"], mean + log_std.exp() * noise)  # not squashed
        obs = step["next"]
    assert len(envs.steps) == 4
    assert (last_obs == obs).all()


# === The loss ===
class ChangedPolicy(NamedTuple):
    """An agent that has changed since the rollout, and a batch of the agent before."""

    args: Args
    agent: Agent
    batch: dict


def changed_policy(scale=0.05, **changes):
    args = make_args(**changes)
    agent = make_agent(args)
    obs = torch.randn(40, OBS_DIM)
    with torch.no_grad():
        mean = agent.policy(obs)
        value = agent.value(obs)
        log_std = agent.policy.log_std.expand_as(mean).clone()
    batch = {
        "obs": obs,
        "action": mean + log_std.exp() * torch.randn_like(mean),
        "mean": mean,
        "log_std": log_std,
        "value": value,
        "target": value + torch.randn(40),
        "advantage": torch.randn(40),
    }
    perturb(agent, scale)
    return ChangedPolicy(args, agent, batch)


def loss_by_hand(args, agent, batch):
    """Loss and metrics by torch.distributions."""
    eps = args.clip_coef
    advantage = batch["advantage"]
    old = Normal(batch["mean"], batch["log_std"].exp())
    new = Normal(agent.policy(batch["obs"]), agent.policy.log_std.exp())
    log_ratio = new.log_prob(batch["action"]) - old.log_prob(batch["action"])
    ratio = log_ratio.sum(dim=-1).exp()
    if args.objective == "ppo":
        cost = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - eps, 1 + eps))
    else:
        cost = -(ratio * advantage - advantage.abs() / (2 * eps) * (ratio - 1) ** 2)
    value = agent.value(batch["obs"])
    fit = (value - batch["target"]) ** 2
    if args.clip_value:
        near_value = batch["value"] + (value - batch["value"]).clamp(-eps, eps)
        fit = torch.maximum(fit, (near_value - batch["target"]) ** 2)
    entropy = new.entropy().sum(dim=-1)
    outside = (ratio < 1 - eps) | (ratio > 1 + eps)
    loss = (cost + args.value_coef * fit - args.entropy_coef * entropy).mean()
    return loss, {
        "losses/policy": cost.mean().detach(),
        "losses/value": fit.mean().detach(),
        "policy/kl": kl_divergence(old, new).sum(dim=-1).mean().detach(),
        "policy/clipped": outside.double().mean(),
        "policy/entropy": entropy.mean().detach(),
        "policy/std": new.stddev.mean().detach(),
    }


@pytest.mark.parametrize("clip_value", [True, False])
@every_objective
def test_policy_loss_by_hand(kind, clip_value):
    coefficients = dict(value_coef=0.7, entropy_coef=0.3, clip_coef=0.15)
    args, agent, batch = changed_policy(objective=kind, clip_value=clip_value, **coefficients)
    loss, metrics = policy_loss(agent, batch, args)
    expected, expected_metrics = loss_by_hand(args, agent, batch)
    assert_close(loss, expected)
    assert_close(metrics, expected_metrics)
    assert list(metrics) == LOSS_METRICS
    assert_close(gradients(loss, agent.parameters()), gradients(expected, agent.parameters()))
    assert 0.1 < metrics["policy/clipped"] < 0.9
    assert not any(metric.requires_grad for metric in metrics.values())


@every_objective
def test_policy_loss_of_the_old_policy(kind):
    """Ratio 1, KL 0, nothing clipped; the gradient is that of the score function."""
    coefficients = dict(value_coef=0.0, entropy_coef=0.0)
    args, agent, batch = changed_policy(scale=0.0, objective=kind, **coefficients)
    loss, metrics = policy_loss(agent, batch, args)
    assert_close(loss, -batch["advantage"].mean())
    assert_close(metrics["losses/value"], (batch["value"] - batch["target"]).square().mean())
    assert_close(metrics["policy/kl"], torch.tensor(0.0))
    assert_close(metrics["policy/clipped"], torch.tensor(0.0))
    new = Normal(agent.policy(batch["obs"]), agent.policy.log_std.exp())
    score = new.log_prob(batch["action"]).sum(dim=-1)
    expected = -(batch["advantage"] * score).mean()
    assert_close(gradients(loss, agent.parameters()), gradients(expected, agent.parameters()))


def test_entropy_bonus_widens_the_policy():
    """Its gradient by each log standard deviation is minus the coefficient, elsewhere zero."""
    args, agent, batch = changed_policy(entropy_coef=0.3)
    with_bonus, _ = policy_loss(agent, batch, args)
    args.entropy_coef = 0.0
    without_bonus, _ = policy_loss(agent, batch, args)
    difference = with_bonus - without_bonus
    assert_close(difference, -0.3 * Normal(0.0, agent.policy.log_std.exp()).entropy().sum())
    slopes = gradients(difference, agent.parameters())
    for (name, _), slope in zip(agent.named_parameters(), slopes, strict=True):
        expected = -0.3 if name == "policy.log_std" else 0.0
        assert_close(slope, torch.full_like(slope, expected))


# === The update ===
class Adam:
    """Written out, of a list of parameters."""

    def __init__(self, parameters):
        self.parameters = [*parameters]
        self.num_steps = 0
        self.first_moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.second_moments = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, gradient, learning_rate):
        self.num_steps += 1
        moments = zip(self.first_moments, self.second_moments, strict=True)
        for parameter, g, (m, v) in zip(self.parameters, gradient, moments, strict=True):
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g * g)
            mean = m / (1 - 0.9**self.num_steps)
            scale = (v / (1 - 0.999**self.num_steps)).sqrt() + 1e-8
            parameter -= learning_rate * mean / scale


def update_data(args, agent, with_broken=True):
    """A rollout's data as update gets it."""
    return compute_targets(agent, rollout_data(args, agent, with_broken), args, None)


def rule_of(kind, schedule):
    """What auto means."""
    if schedule != "auto":
        return schedule
    return {"ppo": "adaptive", "spo": "fixed"}[kind]


@pytest.mark.parametrize("epochs", [1, 6])
@every_objective
@every_schedule
def test_update_by_hand(kind, schedule, epochs):
    """Epochs of one minibatch: gradient, clipping, learning rate and Adam, all written out."""
    rate = 8e-3
    args = make_args(update_epochs=epochs, objective=kind, schedule=schedule)
    args.learning_rate = rate
    args.max_grad_norm = 0.5
    agent = make_agent(args)
    data = update_data(args, agent)
    twin = copy.deepcopy(agent)
    optimizer = make_optimizer(agent, args)
    anneal(optimizer, 0.25, args)
    metrics = update(agent, optimizer, data, args, seeded())

    adam = Adam(twin.parameters())
    rule = rule_of(kind, schedule)
    if rule == "linear":
        rate = 0.75 * rate
    history = []
    rates = []
    for _ in range(epochs):
        loss, row = loss_by_hand(args, twin, data)
        gradient = gradients(loss, twin.parameters())
        norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
        if rule == "adaptive":
            rate = rsl_rl_rule(rate, row["policy/kl"], 0.01)
        rates.append(rate)
        adam.step([g * min(1.0, 0.5 / (norm.item() + 1e-6)) for g in gradient], rate)
        history.append({**row, "losses/grad_norm": norm})
    parameters = dict(agent.named_parameters())
    assert_close(parameters, dict(twin.named_parameters()), rtol=1e-7, atol=1e-9)
    for name in [*LOSS_METRICS, "losses/grad_norm"]:
        assert_close(metrics[name], torch.stack([row[name] for row in history]).mean())
    assert_close(metrics["policy/learning_rate"], torch.tensor(rates[-1]))
    assert history[0]["policy/kl"] == 0  # of a policy to itself
    assert history[0]["losses/grad_norm"] > 0.5  # the clipping was in use
    if epochs > 1 and schedule == "adaptive":
        assert rates[0] == 1e-2 and min(rates) < 8e-3  # it grew up to its limit, and shrank


@every_objective
@every_schedule
def test_learning_rate_over_iterations(kind, schedule):
    """Adaptive goes on where it was, linear follows the share that is done, fixed stays."""
    args = make_args(objective=kind, schedule=schedule, learning_rate=1e-4)
    agent = make_agent(args)
    optimizer = make_optimizer(agent, args)
    data = update_data(args, agent)
    rates = []
    for share_done in (0.0, 0.5, 0.9):
        with torch.no_grad():  # the KL is 0 at the only minibatch of each
            data["mean"] = agent.policy(data["obs"])
            data["log_std"] = agent.policy.log_std.expand_as(data["mean"]).clone()
        anneal(optimizer, share_done, args)
        metrics = update(agent, optimizer, data, args, seeded())
        rates.append(metrics["policy/learning_rate"].item())
    factors = {
        "adaptive": [1.5, 1.5**2, 1.5**3],
        "linear": [1.0, 0.5, 0.1],
        "fixed": [1.0, 1.0, 1.0],
    }
    expected = [1e-4 * factor for factor in factors[rule_of(kind, schedule)]]
    assert rates == pytest.approx(expected)


def test_linear_schedule_of_a_run(tmp_path):
    """The share that is done reaches the optimizer."""
    torch.set_default_dtype(torch.float32)
    flags = ["--schedule", "linear", "--learning-rate", 1e-3]
    run_helpers.train(tmp_path / "run", *flags, iterations=4, script=ppo)
    rates = [float(row["policy/learning_rate"]) for row in run_helpers.rows(tmp_path / "run")]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize("start", [1e-5, 1e-2])
def test_adaptive_learning_rate_finds_the_desired_kl(start):
    """From both ends of its range, in float32, over iterations of many minibatches."""
    torch.set_default_dtype(torch.float32)
    args = make_args(num_envs=64, num_steps=8, num_minibatches=4, update_epochs=5)
    args.learning_rate = start
    agent = make_agent(args)
    optimizer = make_optimizer(agent, args)
    kls = []
    for _ in range(8):
        metrics = update(agent, optimizer, update_data(args, agent), args, seeded())
        kls.append(metrics["policy/kl"].item())
    assert 0.003 < np.mean(kls[-4:]) < 0.03


def test_update_uses_every_step_once_per_epoch(monkeypatch):
    args = make_args(update_epochs=3, num_minibatches=5)
    agent = make_agent(args)
    data = update_data(args, agent, with_broken=False)
    old_log_std = agent.policy.log_std.detach().clone()
    seen = []

    def spy(agent, batch, args):
        seen.append(batch["obs"])
        # of the rollout, in all epochs
        assert_close(batch["log_std"], old_log_std.expand(6, ACTION_DIM), rtol=0, atol=0)
        return policy_loss(agent, batch, args)

    monkeypatch.setattr(ppo, "policy_loss", spy)
    update(agent, make_optimizer(agent, args), data, args, seeded())
    assert [len(obs) for obs in seen] == [6] * 15
    orders = []
    for epoch in range(3):
        obs = torch.cat(seen[5 * epoch : 5 * epoch + 5])
        rows = (obs[:, None] == data["obs"]).all(dim=-1).nonzero()[:, 1]
        assert sorted(rows.tolist()) == list(range(BATCH))
        orders.append(tuple(rows.tolist()))
    assert len(set(orders)) == 3  # a fresh shuffle for each


def test_explained_variance():
    """One for values that are right, zero for a constant, whatever it is."""
    args = make_args()
    agent = make_agent(args)
    data = update_data(args, agent)
    target = data["target"]
    for value, expected in ((target, 1.0), (torch.full((BATCH,), 7.0), 0.0), (target / 2, 0.75)):
        batch = dict(data, value=value)
        metrics = update(agent, make_optimizer(agent, args), batch, args, seeded())
        assert metrics["losses/explained_variance"].item() == pytest.approx(expected, abs=1e-12)
        assert_close(metrics["losses/target"], target.mean())
