"""The maths of trudi_continuous.py against closed forms, brute force and torch.distributions.

All in float64, except where float32 is itself the question. Averages over samples must lie within 4 standard errors.
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
from torch.distributions import Normal, kl_divergence

import trudi_continuous as trudi
from trudi_continuous import (
    Agent,
    Args,
    Critic,
    DiffusionPolicy,
    Normaliser,
    actor_loss,
    compute_targets,
    critic_loss,
    dual_loss,
    hl_gauss,
    sample_chain,
    step_sizes,
    td_lambda_targets,
    trajectory_kl,
)

RANGES = [(0.0, 150.0), (-10.0, 10.0), (-250.0, 250.0)]
MODES = ["split", "penalty", "none"]
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_args(**changes):
    sizes = dict(num_envs=6, num_steps=5, num_minibatches=1, update_epochs=1, hidden_size=16, diffusion_steps=4)
    values = dict(gamma=0.9, vmin=-10.0, vmax=10.0, alpha_init=0.3, lambda_init=0.7, normalise_reward=False)
    return Args(**sizes | values | changes)


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


def chain_noise(policy, B):
    return torch.randn(policy.num_steps + 1, B, policy.action_dim)


def path_of(policy, latents, controls, noise):
    """x_0..x_N (N+1, B, A), the last one by the definition of a denoising step, and the step sizes (N, 1, 1)."""
    e = torch.tensor(step_sizes(policy.num_steps))[:, None, None]
    x, u = latents.transpose(0, 1), controls.transpose(0, 1)
    return torch.cat([policy.eta * noise[:1], denoising(policy, x, u, e).mean + (2 * e).sqrt() * noise[1:]]), e


def denoising(policy, x, u, e):
    return Normal(x + e * (u - x / policy.eta**2), (2 * e).sqrt())


def noising(policy, y, e):
    return Normal(y - e * y / policy.eta**2, (2 * e).sqrt())


def sampled(policy, obs, noise):
    """Eq. (12) at the sampled path, by torch.distributions -> run, bound"""
    action, _, _, latents, controls = sample_chain(policy, obs, noise)
    path, e = path_of(policy, latents, controls, noise)
    x, y, u = path[:-1], path[1:], controls.transpose(0, 1)
    log_ratio = noising(policy, y, e).log_prob(x) - denoising(policy, x, u, e).log_prob(y)
    log_jacobian = -2 * torch.logaddexp(path[-1], -path[-1]) + 2 * math.log(2)
    run = -log_ratio.sum((0, 2)) - log_jacobian.sum(-1)
    return run, -run - Normal(0.0, policy.eta).log_prob(path[0]).sum(-1)


def ode_action(policy, obs, x, c):
    """The ODE's action from x at the prior, by the evaluation's own function."""
    agent, args = SimpleNamespace(policy=copy.copy(policy), critic=None), SimpleNamespace(eval_score_scale=c)
    agent.policy.noise = lambda batch, rng: x[None] / policy.eta
    return trudi.act(agent, obs, "ode", args, None)


def assert_mean(samples, expected=0.0):
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error, (samples.mean(), expected, error)


# --- 1. schedule


def test_step_sizes():
    assert [round(e, 4) for e in step_sizes(8)] == [0.1250, 0.1197, 0.1059, 0.0856, 0.0618, 0.0381, 0.0181, 0.0048]
    for N in (1, 2, 5, 16, 100):
        t = 1 - np.arange(N) / N
        cosine = (1 + np.cos(np.pi * (1.008 - t) / 1.008)) / 2  # cos^2 by the double angle
        np.testing.assert_allclose(step_sizes(N), (0.999 * cosine + 0.001) / N, rtol=1e-12)


# --- 2., 3. entropy bound: chains with a linear control are Gaussian, so that everything is known


class LinearPolicy:
    """u = a_k x + b_k in each of A independent dimensions."""

    def __init__(self, a, b, eta=2.5, action_dim=1):
        self.coefficients = torch.stack([torch.as_tensor(a), torch.as_tensor(b)], 1)
        self.num_steps, self.eta, self.action_dim = len(self.coefficients), eta, action_dim
        self.sizes = torch.tensor(step_sizes(self.num_steps), dtype=torch.float64)

    def embed(self, obs):
        return self.coefficients, None

    def control(self, embedded, weight_x, x):
        return embedded[0] * x + embedded[1]

    def sample(self, B):
        return sample_chain(self, torch.zeros(B, 1), chain_noise(self, B))

    def marginals(self):
        """Mean and variance of x_0..x_N, and the gain of each step."""
        mean, var, gains = [0.0], [self.eta**2], []
        for (a, b), e in zip(self.coefficients.tolist(), step_sizes(self.num_steps), strict=True):
            gains.append(1 + e * (a - self.eta**-2))
            mean.append(gains[-1] * mean[-1] + e * b)
            var.append(gains[-1] ** 2 * var[-1] + 2 * e)
        return mean, var, gains

    def entropy_and_gap(self):
        """Entropy of the action, and what the bound loses: KL(chain given x_N || noising chain), per dimension."""
        (mean, var, gains), gap = self.marginals(), 0.0
        for k, e in enumerate(step_sizes(self.num_steps)):  # both are Markov from y = x_{k+1} to x = x_k
            slope, noise_slope = gains[k] * var[k] / var[k + 1], 1 - e / self.eta**2
            left = var[k] - slope**2 * var[k + 1]
            square = (mean[k] - noise_slope * mean[k + 1]) ** 2 + (slope - noise_slope) ** 2 * var[k + 1]
            gap += (left + square) / (4 * e) - 0.5 - 0.5 * math.log(left / (2 * e))
        z = np.linspace(-12, 12, 20_001)
        x, density = mean[-1] + math.sqrt(var[-1]) * z, np.exp(-(z**2) / 2)
        log_jacobian = np.average(-2 * np.logaddexp(x, -x) + 2 * math.log(2), weights=density)  # log(1 - tanh^2)
        return 0.5 * math.log(2 * math.pi * math.e * var[-1]) + log_jacobian, gap


def untrained(N=8, **kwargs):
    return LinearPolicy(np.zeros(N), np.zeros(N), **kwargs)


def reversal(N, eta, variance, **kwargs):
    """The control that reverses the noising of Normal(0, variance) in the mean of each step."""
    v, a = variance, []
    for e in reversed(step_sizes(N)):
        shrink = 1 - e / eta**2
        before = shrink**2 * v + 2 * e
        a.append(shrink * (v / before - 1) / e)
        v = before
    return LinearPolicy(np.array(a[::-1]), np.zeros(N), eta, **kwargs)


ARBITRARY = [
    LinearPolicy(torch.linspace(0.5, -3, 8).double(), torch.linspace(-1, 2, 8).double()),
    LinearPolicy(torch.full((5,), -2.0).double(), torch.full((5,), 0.5).double(), eta=1.0, action_dim=3),
    reversal(64, 0.3, 1.0, action_dim=2),
]
LINEAR = ["strong", "small prior", "reversal"]


@pytest.mark.parametrize("A", [1, 6])
def test_untrained_policy(A):
    entropy, gap = untrained().entropy_and_gap()
    log_prior = -0.5 * math.log(2 * math.pi * math.e * 2.5**2)
    expected = torch.tensor([-log_prior - entropy + gap, log_prior, entropy - gap])
    close(expected, torch.tensor([2.857, -2.335, -0.521]), rtol=0, atol=5e-4)  # to three decimals
    torch.set_default_dtype(torch.float32)
    policy, B = DiffusionPolicy(4, 3, A, 16, 8, 2.5), 100_000 // A
    with torch.no_grad():
        _, run, bound, _, controls = sample_chain(policy, torch.randn(B, 4), chain_noise(policy, B))
    assert (controls == 0).all()
    assert_mean(run / A, expected[0])
    assert_mean(bound / A, expected[2])
    close((-bound - run) / A, expected[1].float().expand(B), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ARBITRARY, ids=LINEAR)
def test_bound_in_closed_form(policy):
    (entropy, gap), (mean, var, _), A = policy.entropy_and_gap(), policy.marginals(), policy.action_dim
    action, _, bound, _, _ = policy.sample(20_000)
    x = action.atanh().flatten()
    assert_mean(x, mean[-1])
    assert_mean((x - mean[-1]).square(), var[-1])
    assert gap > 0
    assert_mean(bound / A, entropy - gap)
    assert bound.mean() / A < entropy + 4 * bound.std() / A / math.sqrt(len(bound))


def test_bound_becomes_tight_for_the_exact_reversal():
    """A prior that noising reaches (eta 0.3) and many steps: the bound's gap vanishes like 1/N."""
    gaps = {N: reversal(N, 0.3, 1.0).entropy_and_gap()[1] for N in (32, 64, 128, 256)}
    ratios = [gaps[N] / gaps[2 * N] for N in (32, 64, 128)]
    assert abs(ratios[2] - 2) < abs(ratios[1] - 2) < abs(ratios[0] - 2)
    policy = reversal(256, 0.3, 1.0)
    bound = policy.sample(10_000)[2]
    assert_mean(bound, policy.entropy_and_gap()[0] - gaps[256])
    loose = LinearPolicy(policy.coefficients[:, 0], torch.full((256,), 1.0), 0.3)  # another control loses more
    assert loose.entropy_and_gap()[1] > gaps[256]
    assert_mean(loose.sample(10_000)[2], loose.entropy_and_gap()[0] - loose.entropy_and_gap()[1])


@pytest.mark.parametrize("eta", [2.5, 0.8])
def test_log_ratio_against_distributions(eta):
    """Sample by sample: the mean of the log-ratio given each step's start, by quadrature."""
    agent = make_agent(make_args(eta=eta, diffusion_steps=5), A=3)
    policy, obs = agent.policy, torch.randn(40, 7)
    noise = chain_noise(policy, 40)
    action, run, bound, latents, controls = sample_chain(policy, obs, noise)
    path, e = path_of(policy, latents, controls, noise)
    x, u = path[:-1], controls.transpose(0, 1)
    close(latents.transpose(0, 1), x)
    close(action, path[-1].tanh())
    for k in range(5):  # the stored controls are the policy's at the stored latents
        close(controls[:, k], plain_control(policy, obs, latents[:, k], k))

    def log_ratio(y):
        return noising(policy, y, e).log_prob(x) - denoising(policy, x, u, e).log_prob(y)

    log_jacobian = torch.distributions.TanhTransform().log_abs_det_jacobian(path[-1], action).sum(-1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)  # exact: the log-ratio is quadratic in y
    step = denoising(policy, x, u, e)
    mean = sum(w * log_ratio(step.mean + step.stddev * z) for z, w in zip(nodes, weights, strict=True)) / weights.sum()
    close(run, -mean.sum((0, 2)) - log_jacobian)
    close(bound, -run + 3 * Normal(0.0, eta).entropy())


@pytest.mark.parametrize("policy", ARBITRARY + [untrained()], ids=[*LINEAR, "untrained"])
def test_agrees_with_the_sampled_bound(policy):
    """In expectation, value and gradient. The mean's gradient has less noise; its value has more, since the sampled
    terms cancel the noise of the Jacobian: of a tight bound, log-density of the action is all that is left of them."""
    B, results = 10_000, []
    noise, each = chain_noise(policy, B), policy.coefficients[:, :, None, None].repeat(1, 1, B, 1).requires_grad_()
    rows = copy.copy(policy)
    rows.coefficients = each  # coefficients of its own for each sample, so that each has a gradient of its own
    for estimate in (lambda *x: sample_chain(*x)[1:3], sampled):
        run, bound = estimate(rows, torch.zeros(B, 1), noise)
        gradient = torch.autograd.grad(bound.sum(), each)[0].flatten(0, 1)[..., 0]  # (2N, B)
        results.append((run.detach(), bound.detach(), gradient.sum(0), gradient.var(-1).sum()))
    for mean, other in list(zip(*results, strict=True))[:3]:
        assert_mean(mean - other)
    (*_, mean_value, _, mean_noise), (*_, sampled_value, _, sampled_noise) = results
    assert mean_noise < sampled_noise
    assert mean_value.var() > sampled_value.var()


def test_agrees_with_the_sampled_bound_for_a_network():
    policy = make_agent(make_args(diffusion_steps=8), scale=0.2).policy
    obs, noise = torch.randn(1, 7).repeat(5000, 1).requires_grad_(), chain_noise(policy, 5000)
    bounds = sample_chain(policy, obs, noise)[2], sampled(policy, obs, noise)[1]
    assert_mean((bounds[0] - bounds[1]).detach())
    mean, other = (torch.autograd.grad(bound.sum(), obs)[0] for bound in bounds)  # one state, many samples
    assert mean.var(0).sum() < other.var(0).sum()


# --- 4. trajectory KL


def old_and_new(K=1, B=30, scale=0.05, inside="some", **changes):
    """Agent after a change of its policy, K chains per state of the policy before it, some states inside the bound."""
    args = make_args(**changes)
    agent, obs = make_agent(args), torch.randn(B, 7)
    chains = [sample_chain(agent.policy, obs, chain_noise(agent.policy, B))[3:] for _ in range(K)]
    latents, controls = (torch.stack(x, 1).detach() for x in zip(*chains, strict=True))
    assert trajectory_kl(agent.policy, obs, latents, controls).max() < 1e-20  # zero for the same policy
    perturb(agent.policy, scale)
    kl = trajectory_kl(agent.policy, obs, latents, controls).detach()
    limits = dict(some=kl.quantile(0.5), all=2 * kl.max(), none=kl.min() / 2)
    return dataclasses.replace(args, kl_bound=limits[inside].item()), agent, obs, latents, controls


def test_kl_against_step_by_step():
    _, agent, obs, latents, controls = old_and_new(K=3)
    kl = trajectory_kl(agent.policy, obs, latents, controls)
    expected = torch.zeros(30)
    for j, (k, e) in itertools.product(range(3), enumerate(step_sizes(4))):
        x, u = latents[:, j, k], plain_control(agent.policy, obs, latents[:, j, k], k)
        old, new = (denoising(agent.policy, x, u, torch.tensor(e)) for u in (controls[:, j, k], u))
        expected += kl_divergence(old, new).sum(-1) / 3
    close(kl, expected)
    close(kl, sum(trajectory_kl(agent.policy, obs, latents[:, j, None], controls[:, j, None]) for j in range(3)) / 3)
    assert (kl > 0).all()


def test_kl_against_monte_carlo():
    agent = make_agent(make_args(diffusion_steps=8))
    policy, obs, noise = agent.policy, torch.randn(1, 7).expand(20_000, 7), chain_noise(agent.policy, 20_000)
    with torch.no_grad():
        _, _, _, latents, controls = sample_chain(policy, obs, noise)
        path, e = path_of(policy, latents, controls, noise)
        perturb(policy, 0.05)
        kl = trajectory_kl(policy, obs, latents[:, None], controls[:, None])
        new = torch.stack([plain_control(policy, obs, x, k) for k, x in enumerate(path[:-1])])
    old_log_prob = denoising(policy, path[:-1], controls.transpose(0, 1), e).log_prob(path[1:])
    log_ratio = (old_log_prob - denoising(policy, path[:-1], new, e).log_prob(path[1:])).sum((0, 2))
    assert_mean(log_ratio - kl)
    assert (log_ratio < 0).any() and (kl >= 0).all() and kl.var() < log_ratio.var()
    assert kl.mean() > 4 * log_ratio.std() / math.sqrt(20_000)  # the comparison above can tell it from zero


# --- 5. TD(lambda) targets


def brute_force_targets(reward, value, terminated, cut, gamma, td_lambda):
    """Weighted n-step returns of each step up to its cut, in numpy."""
    reward, value, terminated, cut = (np.asarray(x) for x in (reward, value, terminated, cut))
    targets = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        last = next(s for s in range(t, len(reward)) if cut[s, i])
        returns = []
        for s in range(t, last + 1):
            rewards = sum(gamma ** (j - t) * reward[j, i] for j in range(t, s + 1))
            returns.append(rewards + gamma ** (s + 1 - t) * (0.0 if terminated[s, i] else value[s, i]))
        weights = [(1 - td_lambda) * td_lambda**n for n in range(last - t)] + [td_lambda ** (last - t)]
        targets[t, i] = np.dot(weights, returns)
    return torch.tensor(targets)


@pytest.mark.parametrize("td_lambda", [0.0, 0.5, 0.95, 1.0])
def test_td_lambda_for_every_pattern_of_ends(td_lambda):
    events = torch.tensor(list(itertools.product(range(3), repeat=4))).T  # (4, 81): goes on, terminated, truncated
    terminated, cut = events == 1, events > 0
    cut[-1] = True
    reward, value = torch.randn(4, 81), 10 * torch.randn(4, 81)
    targets = td_lambda_targets(reward, value, terminated, cut, 0.9, td_lambda)
    close(targets, brute_force_targets(reward, value, terminated, cut, 0.9, td_lambda))
    close(targets[terminated], reward[terminated])
    close(targets[cut & ~terminated], (reward + 0.9 * value)[cut & ~terminated])


def rollout_data(args, agent):
    T, E, N, A = args.num_steps, args.num_envs, args.diffusion_steps, 2
    shapes = dict(obs=(7,), next_obs=(7,), action=(A,), reward=())
    data = {k: torch.randn(T, E, *shape) for k, shape in shapes.items()}
    event = torch.randint(6, (T, E))
    data |= dict(terminated=event == 0, truncated=(event == 1) | (event == 2), valid=event != 2)
    data["reward"][event == 2] = 0  # as VecEnv reports a non-finite step: truncated, not valid, no reward
    _, _, _, latents, controls = sample_chain(agent.policy, data["obs"].flatten(0, 1), chain_noise(agent.policy, T * E))
    return data | dict(latents=latents.detach().view(T, E, N, A), controls=controls.detach().view(T, E, N, A))


def discounted_returns(reward, ended, gamma):
    returns = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        start = max((s + 1 for s in range(t) if ended[s, i]), default=0)
        returns[t, i] = sum(gamma ** (t - s) * float(reward[s, i]) for s in range(start, t + 1))
    return returns


@pytest.mark.parametrize("normalise", [False, True])
def test_soft_targets_against_brute_force(monkeypatch, normalise):
    """Known actions and bounds instead of a chain: entropy bonus, ends and dropped steps must come out right."""
    args = make_args(num_envs=30, num_minibatches=3, normalise_reward=normalise, return_scale=4.0)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    known = data["next_obs"].sum(-1)

    def known_chain(policy, obs, noise):
        return obs[:, 1:3].tanh(), None, obs.sum(-1), None, None

    monkeypatch.setattr(trudi, "sample_chain", known_chain)
    flat = compute_targets(agent, data, args, torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = agent.critic.features(data["next_obs"].flatten(0, 1), data["next_obs"].flatten(0, 1)[:, 1:3].tanh())
        value = agent.critic.value(features).view(5, 30)
    terminated, cut, reward = data["terminated"], data["terminated"] | data["truncated"], data["reward"]
    if normalise:
        reward = reward * 4.0 / math.sqrt((discounted_returns(reward, cut, args.gamma) ** 2).mean())
    soft = torch.where(terminated, reward, reward + args.gamma * args.alpha_init * known)
    cut = cut | torch.cat([~data["valid"][1:], torch.ones(1, 30, dtype=torch.bool)])
    expected = brute_force_targets(soft, value, terminated, cut, args.gamma, args.td_lambda)
    close(flat["target"], expected.flatten())
    close(flat["next_features"], features)
    assert not any(v.requires_grad for v in flat.values())


@pytest.mark.parametrize("normalise", [False, True])
def test_dropped_step_influences_no_other(normalise):
    args = make_args(num_envs=3, num_minibatches=3, normalise_reward=normalise)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    data |= dict(terminated=torch.zeros(5, 3, dtype=torch.bool), truncated=torch.zeros(5, 3, dtype=torch.bool))

    def targets(data):
        agent.discounted_return.zero_()
        agent.return_moment.zero_()
        flat = compute_targets(agent, data, args, torch.Generator().manual_seed(0))
        return torch.cat([flat["target"][:, None], flat["next_features"]], 1).view(5, 3, -1)

    for t, i in np.ndindex(5, 3):
        one = torch.zeros(5, 3, dtype=torch.bool)
        one[t, i] = True
        dropped = data | dict(valid=~one, truncated=one, reward=torch.where(one, 0.0, data["reward"]))
        other = dict(dropped, next_obs=torch.where(one[..., None], torch.randn(7), data["next_obs"]))
        if not normalise:  # VecEnv promises a zero reward; the scale of all rewards is the only way it could matter
            other["reward"] = torch.where(one, 1000.0, data["reward"])
        before, after = targets(dropped), targets(other)
        assert (before[~one] == after[~one]).all()
        assert (before[one] != after[one]).all()


def test_more_kl_samples_are_chains_of_the_same_policy():
    args = make_args(kl_samples=3)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    flat = compute_targets(agent, data, args, torch.Generator().manual_seed(0))
    close(flat["latents"][:, 0], data["latents"].flatten(0, 1))  # the first is the rollout's own
    assert flat["latents"].shape == flat["controls"].shape == (30, 3, 4, 2)
    assert trajectory_kl(agent.policy, flat["obs"], flat["latents"], flat["controls"]).max() < 1e-20
    x = flat["latents"][:, :, 0]
    assert (x[:, 0] != x[:, 1]).all() and (x[:, 1] != x[:, 2]).all()


# --- 6. critic


def make_critic(vmin, vmax, hidden=16):
    return Critic(2, 7, 2, hidden, 151, vmin, vmax, 0.75)


@pytest.mark.parametrize("vmin, vmax", RANGES)
def test_hl_gauss(vmin, vmax):
    critic, width = make_critic(vmin, vmax), (vmax - vmin) / 150
    assert critic.centres[0] == vmin and critic.centres[-1] == vmax and abs(critic.sigma - 0.75 * width) < 1e-12
    target = torch.linspace(vmin, vmax, 1001)
    mass = hl_gauss(target, critic.edges, critic.sigma)
    close(mass.sum(-1), torch.ones(1001))
    cdf = Normal(target[:, None], critic.sigma).cdf(critic.edges)
    close(mass, cdf.diff(dim=-1) / (cdf[:, -1:] - cdf[:, :1]), rtol=1e-6, atol=1e-12)
    far = (target - vmin).minimum(vmax - target) > 8 * critic.sigma  # no mass is lost at the ends
    rounding = sum(math.exp(-2 * (math.pi * 0.75 * j) ** 2) / j for j in (1, 2)) * width / math.pi  # Fourier series
    error = (mass @ critic.centres - target)[far].abs()
    assert rounding / 2 < error.max() < rounding + 1e-10 * width
    for beyond, end in ((vmax + 1e6, vmax), (vmin - 1e6, vmin)):
        close(*(hl_gauss(torch.tensor([x]), critic.edges, critic.sigma) for x in (beyond, end)))


@pytest.mark.parametrize("vmin, vmax", [*RANGES, (-150.0, 150.0)])
def test_critic_starts_at_zero(vmin, vmax):
    torch.set_default_dtype(torch.float32)
    critic = make_critic(vmin, vmax, hidden=128)
    q = critic.value(critic.features(3 * torch.randn(500, 7), torch.rand(500, 2) * 2 - 1))
    assert q.abs().max() < (vmax - vmin) / 150  # less than a bin


def test_critic_loss():
    critic = make_agent(make_args()).critic
    obs, action, target, next_features = torch.randn(9, 7), torch.rand(9, 2), 8 * torch.randn(9), torch.randn(9, 16)
    weight = torch.rand(9).softmax(0)
    loss, fit, aux = critic_loss(critic, obs, action, target, next_features, weight, 0.5)
    features = critic.features(obs, action)
    logits = critic.head(features)
    mass = hl_gauss(target, critic.edges, critic.sigma)
    close(fit, sum(w * F.cross_entropy(x[None], p[None]) for w, x, p in zip(weight, logits, mass, strict=True)))
    errors = [F.mse_loss(x, y) for x, y in zip(critic.predictor(features), next_features, strict=True)]
    close(aux, weight @ torch.stack(errors))
    close(loss, fit + 0.5 * aux)
    bias = torch.autograd.grad(loss, critic.head[-1].bias)[0]  # softmax - target
    close(bias, weight @ (logits.softmax(-1) - mass))
    close(critic.value(features), logits.softmax(-1) @ torch.linspace(-10, 10, 151))


def test_critic_loss_ignores_rows_without_weight():
    critic, weight = make_agent(make_args()).critic, torch.tensor([0.0, 0.4, 0.6])
    data = torch.randn(3, 7), torch.rand(3, 2), torch.randn(3), torch.randn(3, 16)
    whole = critic_loss(critic, *data, weight, 1.0)
    close(whole, critic_loss(critic, *(x[1:] for x in data), weight[1:], 1.0))


# --- 7. duals


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_duals_move_the_right_way(sign, optimiser):
    args = make_args()
    agent, weight = make_agent(args), torch.full((10,), 0.1)
    duals = [agent.log_alpha, agent.log_lambda]
    before = torch.stack(duals).detach().exp()
    run = args.entropy_target * agent.policy.action_dim + sign * torch.rand(10)
    kl = args.kl_bound * (1 + sign * torch.rand(10))
    gradient = torch.autograd.grad(dual_loss(agent, run, weight, kl, weight, args), duals)
    close(torch.stack(gradient), before * -torch.stack([run.mean() - 8.0, kl.mean() - 0.1]))
    stepper = optimiser(duals, 1e-3)
    dual_loss(agent, run, weight, kl, weight, args).backward()
    stepper.step()
    assert (torch.sign(torch.stack(duals).exp() - before) == sign).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_duals_and_actor_leave_each_other_alone(sparse, mode):
    args, agent, obs, latents, controls = old_and_new(trust_region=mode)
    weight, noise = torch.full((30,), 1 / 30), chain_noise(agent.policy, 30)
    loss, kl, run, _, inside = actor_loss(agent, obs, latents, controls, noise, weight, args, sparse)
    dual = dual_loss(agent, run, inside, kl, weight, args)
    duals, networks = [agent.log_alpha, agent.log_lambda], [*agent.policy.parameters(), *agent.critic.parameters()]
    assert torch.autograd.grad(dual, networks, allow_unused=True, retain_graph=True) == (None,) * len(networks)
    assert torch.autograd.grad(loss, duals, allow_unused=True) == (None, None)
    by_alpha, by_lambda = torch.autograd.grad(dual, duals)
    assert by_alpha != 0 and (by_lambda != 0) == (mode != "none"), "without a trust region lambda would grow for ever"


# --- 8. split objective


def by_hand(args, agent, obs, latents, controls, noise, weight):
    """Eq. (19), (20) state by state: only the branch that counts is computed at all."""
    total = torch.zeros(())
    for i, w in enumerate(weight.tolist()):
        kl = trajectory_kl(agent.policy, obs[[i]], latents[[i]], controls[[i]])[0]
        inside = kl.item() <= args.kl_bound
        if inside or args.trust_region != "split":
            action, _, bound, _, _ = sample_chain(agent.policy, obs[[i]], noise[:, [i]])
            q = agent.critic.value(agent.critic.features(obs[[i]], action))[0]
            total = total + w * (-q - args.alpha_init * bound[0])
        if args.trust_region == "penalty" or (args.trust_region == "split" and not inside):
            total = total + w * args.lambda_init * kl
    return total


def gradients(loss, policy):
    """Of each parameter; zeros where the loss does not depend on it."""
    return torch.autograd.grad(loss, [*policy.parameters()], allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("share", ["some", "all", "none"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("K", [1, 2])
def test_actor_loss_dense_sparse_and_by_hand(share, mode, K):
    args, agent, obs, latents, controls = old_and_new(K, inside=share, trust_region=mode)
    kl = trajectory_kl(agent.policy, obs, latents, controls).detach()
    assert (kl <= args.kl_bound).sum() == dict(some=15, all=30, none=0)[share]
    noise, weight = chain_noise(agent.policy, 30), torch.rand(30).softmax(0)
    batch = agent, obs, latents, controls, noise, weight, args
    dense, sparse = actor_loss(*batch, sparse=False), actor_loss(*batch, sparse=True)
    expected = by_hand(args, *batch[:-1])
    wanted = gradients(expected, agent.policy)
    for loss, c, run, entropy, inside_weight in (dense, sparse):
        close(loss, expected)
        close(c, kl)
        close(gradients(loss, agent.policy), wanted)
        counted = weight.sum() if mode != "split" else weight[kl <= args.kl_bound].sum()
        close(inside_weight.sum(), counted)
        for metric, reference in ((run, dense[2]), (entropy, dense[3])):
            close((metric * inside_weight).sum(), (reference * dense[4]).sum())
    close(*(dual_loss(agent, x[2], x[4], x[1], weight, args) for x in (dense, sparse)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_actor_gradient_by_finite_differences(mode, sparse):
    """Nothing on the way through chain, bound, critic and KL is cut off from the gradient."""
    args, agent, obs, latents, controls = old_and_new(trust_region=mode)
    noise, weight, parameters = chain_noise(agent.policy, 30), torch.full((30,), 1 / 30), [*agent.policy.parameters()]
    direction = [torch.randn_like(p) for p in parameters]

    def loss_at(shift):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += shift * d
        return actor_loss(agent, obs, latents, controls, noise, weight, args, sparse)[0]

    slope = sum((g * d).sum() for g, d in zip(gradients(loss_at(0), agent.policy), direction, strict=True))
    step = 1e-6  # small enough that no state changes sides
    close((loss_at(step) - loss_at(-2 * step)) / (2 * step), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_rows_without_weight_and_critic_parameters(mode, sparse):
    args, agent, obs, latents, controls = old_and_new(trust_region=mode)
    noise, keep = chain_noise(agent.policy, 30), torch.arange(30) % 3 > 0
    weight = keep / keep.sum()
    loss, *_ = actor_loss(agent, obs, latents, controls, noise, weight, args, sparse)
    kept = actor_loss(agent, obs[keep], latents[keep], controls[keep], noise[:, keep], weight[keep], args, sparse)[0]
    close(loss, kept)
    close(gradients(loss, agent.policy), gradients(kept, agent.policy))
    loss, *_ = actor_loss(agent, obs, latents, controls, noise, weight, args, sparse)
    loss.backward(inputs=[*agent.policy.parameters()])
    assert all(p.grad is None for p in agent.critic.parameters())
    assert any((p.grad != 0).any() for p in agent.policy.parameters())


# --- 9. probability-flow ODE


def ode_variance(policy, c):
    """The ODE of a linear control is linear: its gain on one x_0 tells its variance."""
    x = torch.tensor([[0.1], [-0.2]])
    gain = ode_action(policy, torch.zeros(2, 1), x, c).atanh() / x
    close(gain[0], gain[1])
    return gain[0].item() ** 2 * policy.eta**2


@pytest.mark.parametrize("variance", [1.0, 0.3, 0.04])
def test_ode_keeps_or_sharpens_the_marginal(variance):
    """Exact linear scores: at c = 0.5 ODE and SDE reach the same variance as steps get small, at c = 1 less."""
    policies = [reversal(N, 0.3, variance) for N in (512, 1024, 2048)]
    for marginal in ([ode_variance(p, 0.5) for p in policies], [p.marginals()[1][-1] for p in policies]):
        coarse, fine = 2 * marginal[1] - marginal[0], 2 * marginal[2] - marginal[1]  # Richardson: errors of 1/N^2
        unreached = abs(variance / 0.3**2 - 1) * math.exp(-2 * sum(step_sizes(2048)) / 0.3**2)  # of noising's end
        assert abs(fine - variance) < abs(fine - coarse) + unreached * variance
    samples = policies[0].sample(2000)[0].atanh().flatten()
    assert_mean(samples.square(), policies[0].marginals()[1][-1])
    ordered = [ode_variance(policies[0], c) for c in (0.5, 0.75, 1.0)]
    assert ordered == sorted(ordered, reverse=True) and ordered[2] < samples.var()


def test_ode_step_by_hand():
    policy, obs, x = make_agent(make_args()).policy, torch.randn(6, 7), torch.randn(6, 2)
    for c in (0.5, 1.0, 1.7):
        z = x
        for k, e in enumerate(step_sizes(4)):
            score = plain_control(policy, obs, z, k) / 2 - z / policy.eta**2
            z = z + e * (z / policy.eta**2 + 2 * c * score)  # Eq. (23): noising's drift reversed, 2c times the score
        close(ode_action(policy, obs, x, c), z.tanh())


# --- 10. networks


def plain_control(policy, obs, x, k):
    """The network without any splitting of its first layer."""
    angles = k * 10_000 ** (-torch.arange(16) / 16)
    time = policy.time_mlp(torch.cat([angles.sin(), angles.cos()])).expand(len(x), 32)
    z = F.gelu(policy.first(torch.cat([obs[:, : policy.actor_dim], x, time], 1)))
    for norm, linear in policy.blocks:
        z = z + F.gelu(linear(norm(z)))
    return policy.out(z)


def test_control_against_plain_network():
    policy, obs, x = make_agent(make_args()).policy, torch.randn(9, 7), torch.randn(9, 2)
    embedded, weight_x = policy.embed(obs)
    outputs = [policy.control(embedded[k], weight_x, x) for k in range(4)]
    close(outputs, [plain_control(policy, obs, x, k) for k in range(4)])
    assert all((a != b).all() for a, b in itertools.pairwise(outputs))  # each step is told apart


def test_normaliser_streams():
    normaliser, data = Normaliser(3), 5 + torch.randn(1000, 3) * torch.tensor([0.1, 1.0, 30.0])
    c = normaliser.count.clone()  # it starts as c observations of mean 0 and variance 1
    for part in data.split([1, 2, 64, 7, 500, 1, 425]):
        normaliser.update(part)
    mean = data.sum(0) / (1000 + c)
    close(normaliser.count, 1000 + c)
    close(normaliser.mean, mean)
    close(normaliser.var, (data.square().sum(0) + c) / (1000 + c) - mean.square())
    assert c <= 1e-3  # and they do not matter
    before = {k: v.clone() for k, v in normaliser.state_dict().items()}
    output = normaliser(data)
    close(output, ((data - normaliser.mean) / normaliser.var.sqrt()).clamp(-10, 10), rtol=1e-5, atol=1e-5)
    close(normaliser.state_dict(), before, rtol=0, atol=0)
    assert normaliser(1e9 * torch.ones(1, 3)).max() == 10


def test_actor_and_critic_see_their_own_columns():
    agent, obs = make_agent(make_args(), actor_dim=4, critic_start=4), torch.randn(5, 7)
    noise, x = chain_noise(agent.policy, 5), torch.randn(5, 2)
    critic = agent.critic

    def outputs(obs):
        """What each of the two makes of obs."""
        chain = sample_chain(agent.policy, obs, noise)
        kl = trajectory_kl(agent.policy, obs, torch.ones(5, 1, 4, 2), torch.zeros(5, 1, 4, 2))
        actor = [chain[0], chain[2][:, None], kl[:, None], ode_action(agent.policy, obs, x, 1.0)]
        return torch.cat(actor, 1), critic.value(critic.features(obs, x))

    for column in range(7):
        changed = obs.clone()
        changed[:, column] += 1
        (actor, value), (other_actor, other_value) = outputs(obs), outputs(changed)
        assert (actor != other_actor).all() if column < 4 else (actor == other_actor).all()
        assert (value != other_value).all() if column >= 4 else (value == other_value).all()


# --- 11. reward scale


@pytest.mark.parametrize("constant", [True, False])
def test_reward_scale(constant):
    agent, gamma = make_agent(make_args(num_envs=6)), 0.9
    reward = torch.full((40, 6), 3.0) if constant else torch.randn(40, 6)
    ended = torch.rand(40, 6) < 0.1
    returns = discounted_returns(reward, ended, gamma)
    for start, end in ((0, 7), (7, 8), (8, 40)):  # three rollouts; each scale counts all returns so far
        scaled = trudi.scale_rewards(agent, reward[start:end], ended[start:end], gamma, 30.0)
        scale = 30.0 / np.sqrt((returns[:end] ** 2).mean())
        close(scaled, reward[start:end] * scale)
    never = torch.zeros(5, 6, dtype=torch.bool)
    zero = trudi.scale_rewards(make_agent(make_args()), torch.zeros(5, 6), never, gamma, 30.0)
    assert (zero == 0).all()
