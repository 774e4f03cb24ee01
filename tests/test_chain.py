"""The denoising chain: schedule, entropy bound, trajectory KL and probability-flow ODE.

Against closed forms, brute force and torch.distributions, in float64 except where float32 is the
question. Averages over samples must lie within 4 standard errors.
"""

import copy
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from makers import (
    ACTION_DIM,
    BATCH,
    OBS_DIM,
    chain_noise,
    changed_policy,
    denoising_step,
    make_agent,
    make_args,
    ode_action,
    perturb,
    plain_control,
)
from torch.distributions import Normal, TanhTransform, kl_divergence
from torch.testing import assert_close

from trudi_continuous import (
    DiffusionPolicy,
    act,
    cosine_schedule,
    entropy_bound,
    geometric_schedule,
    sample_chain,
    trajectory_kl,
)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_mean(samples, expected=0.0):
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error, (samples.mean(), expected, error)


# === Schedule ===
def test_cosine_schedule():
    rounded = [round(e, 4) for e in cosine_schedule(8)]
    assert rounded == [0.1250, 0.1197, 0.1059, 0.0856, 0.0618, 0.0381, 0.0181, 0.0048]
    for N in (1, 2, 5, 16, 100):
        remaining = 1 - np.arange(N) / N
        squared_cosine = (1 + np.cos(np.pi * (1.008 - remaining) / 1.008)) / 2  # by double angle
        np.testing.assert_allclose(cosine_schedule(N), (0.999 * squared_cosine + 0.001) / N)


def test_geometric_schedule():
    assert geometric_schedule(4, 0.25 / 8) == pytest.approx([1 / 4, 1 / 8, 1 / 16, 1 / 32])
    for N in (2, 5, 16):
        step_sizes = np.array(geometric_schedule(N, 0.002))
        assert step_sizes[0] == 1 / N
        assert step_sizes[-1] == pytest.approx(0.002)
        fractions = step_sizes[1:] / step_sizes[:-1]
        np.testing.assert_allclose(fractions, fractions[0])
    assert geometric_schedule(1, 0.002) == [1.0]  # a single step cannot shrink


@pytest.mark.parametrize("N, std", [(4, 0.27), (8, 0.098)])
def test_noise_of_the_last_step(N, std):
    """No policy is sharper than its last step: the reason for the geometric schedule."""
    assert math.sqrt(2 * cosine_schedule(N)[-1]) == pytest.approx(std, rel=0.05)
    assert math.sqrt(2 * geometric_schedule(N, 0.002)[-1]) == pytest.approx(0.063, rel=0.05)


# === Entropy bound ===
class Marginals(NamedTuple):
    """Of a chain whose points are Gaussian."""

    means: list  # of x_0 to x_N
    variances: list  # of x_0 to x_N
    factors: list  # x_{k+1} = factor_k * x_k + offset and noise


class LinearPolicy:
    """u = slope_k * x + offset_k in each of A independent dimensions.

    All points of such a chain are Gaussian, so that everything about it is known.
    """

    def __init__(self, slopes, offsets, eta=2.5, action_dim=1):
        columns = [torch.as_tensor(slopes), torch.as_tensor(offsets)]
        self.coefficients = torch.stack(columns, dim=1).double()  # (N, 2)
        self.num_steps = len(self.coefficients)
        self.eta = eta
        self.action_dim = action_dim
        self.schedule = cosine_schedule(self.num_steps)
        self.step_sizes = torch.tensor(self.schedule, dtype=torch.float64)
        scales = [eta] + [math.sqrt(2 * e) for e in self.schedule]
        self.noise_scales = torch.tensor(scales, dtype=torch.float64)
        self.control_scales = torch.ones(self.num_steps)

    def embed(self, obs):
        return self.coefficients

    def control(self, embedded, x):
        slope, offset = embedded
        return slope * x + offset

    def controls_of_steps(self):
        return [self.control] * self.num_steps

    def sample(self, batch_size):
        return sample_chain(self, self.coefficients, chain_noise(self, batch_size))

    def bound(self, batch_size):
        return entropy_bound(self, self.sample(batch_size))

    def marginals(self):
        means = [0.0]
        variances = [self.eta**2]
        factors = []
        for (slope, offset), e in zip(self.coefficients.tolist(), self.schedule, strict=True):
            factor = 1 + e * (slope - 1 / self.eta**2)
            factors.append(factor)
            means.append(factor * means[-1] + e * offset)
            variances.append(factor**2 * variances[-1] + 2 * e)
        return Marginals(means, variances, factors)

    def entropy(self):
        """Entropy of the action per dimension, the Jacobian of tanh by quadrature."""
        mean = self.marginals().means[-1]
        variance = self.marginals().variances[-1]
        z = np.linspace(-12, 12, 20_001)
        x = mean + math.sqrt(variance) * z
        log_jacobian = -2 * np.logaddexp(x, -x) + 2 * math.log(2)  # log(1 - tanh(x)^2)
        mean_log_jacobian = np.average(log_jacobian, weights=np.exp(-(z**2) / 2))
        return 0.5 * math.log(2 * math.pi * math.e * variance) + mean_log_jacobian

    def gap(self):
        """What the bound loses per dimension: KL(chain given x_N || noising chain).

        Both are Markov chains of Gaussian steps from x_{k+1} to x_k.
        """
        marginals = self.marginals()
        means = marginals.means
        variances = marginals.variances
        gap = 0.0
        for k, e in enumerate(self.schedule):
            slope = marginals.factors[k] * variances[k] / variances[k + 1]
            noising_slope = 1 - e / self.eta**2
            variance_left = variances[k] - slope**2 * variances[k + 1]
            mean_distance = (means[k] - noising_slope * means[k + 1]) ** 2
            mean_distance += (slope - noising_slope) ** 2 * variances[k + 1]
            gap += (variance_left + mean_distance) / (4 * e) - 0.5
            gap -= 0.5 * math.log(variance_left / (2 * e))
        return gap


def untrained(N=8):
    return LinearPolicy(np.zeros(N), np.zeros(N))


def reversal(N, eta, variance, action_dim=1):
    """The control that reverses the noising of Normal(0, variance) in the mean of each step."""
    slopes = []
    for e in reversed(cosine_schedule(N)):
        shrink = 1 - e / eta**2
        noisier = shrink**2 * variance + 2 * e
        slopes.append(shrink * (variance / noisier - 1) / e)
        variance = noisier
    slopes.reverse()
    return LinearPolicy(np.array(slopes), np.zeros(N), eta, action_dim)


def sharpest(schedule, width):
    """The chain of a Gaussian Q, -x^2 / (2 width^2): Adam on its slopes. -> std, entropy bound"""
    e = torch.tensor(schedule)
    slopes = torch.zeros(len(e), requires_grad=True)
    optimizer = torch.optim.Adam([slopes], lr=0.02)
    for _ in range(4000):
        variance = torch.ones(())  # of the prior, eta = 1
        bound = 0.5 * math.log(2 * math.pi * math.e) + (e - e**2 / 2).sum()
        for k in range(len(e)):
            u = slopes[k] * e[0] / e[k]  # times x
            mismatch = (1 - e[k]) * u - (2 - e[k])
            bound = bound - e[k] / 4 * mismatch**2 * variance
            variance = (1 + e[k] * (u - 1)) ** 2 * variance + 2 * e[k]
        loss = variance / (2 * width**2) - bound
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return variance.detach().sqrt(), bound.detach()


def test_geometric_schedule_allows_sharper_policies():
    """With the same last step as the fourth power of the cosine, at a larger entropy bound."""
    cosine = [(e * 4 - 0.001) / 0.999 for e in cosine_schedule(4)]  # squared cosines
    fourth = [(0.999 * squared**2 + 0.001) / 4 for squared in cosine]
    std, bound = sharpest(geometric_schedule(4, fourth[-1]), width=0.05)
    fourth_std, fourth_bound = sharpest(fourth, width=0.05)
    assert std < 0.95 * fourth_std
    assert bound > fourth_bound + 1


LINEAR_POLICIES = {
    "strong": LinearPolicy(np.linspace(0.5, -3, 8), np.linspace(-1, 2, 8)),
    "small prior": LinearPolicy(np.full(5, -2.0), np.full(5, 0.5), eta=1.0, action_dim=3),
    "reversal": reversal(64, 0.3, 1.0, action_dim=2),
    "untrained": untrained(),
}
TRAINED = ["strong", "small prior", "reversal"]


class Path(NamedTuple):
    """All N steps of a sampled chain, (N, B, A) each."""

    x: torch.Tensor  # before the step
    y: torch.Tensor  # after the step, by the definition of a denoising step
    u: torch.Tensor  # the control at x
    e: torch.Tensor  # (N, 1, 1), the step sizes


def path_of(policy, chain, noise):
    e = torch.tensor(cosine_schedule(policy.num_steps))[:, None, None]
    x = chain.latents.transpose(0, 1)
    u = chain.controls.transpose(0, 1)
    y = denoising_step(policy, x, u, e).mean + (2 * e).sqrt() * noise[1:]
    return Path(x, y, u, e)


def log_ratio(policy, path, y):
    """log of noising(x | y) / denoising(y | x), (N, B, A)"""
    noising_step = Normal(y - path.e * y / policy.eta**2, (2 * path.e).sqrt())
    forward = denoising_step(policy, path.x, path.u, path.e)
    return noising_step.log_prob(path.x) - forward.log_prob(y)


def sampled_estimate(policy, chain, noise):
    """Eq. (12) at the sampled path, by torch.distributions -> entropy bound"""
    path = path_of(policy, chain, noise)
    last = path.y[-1]
    log_jacobian = -2 * torch.logaddexp(last, -last) + 2 * math.log(2)
    log_prior = Normal(0.0, policy.eta).log_prob(path.x[0]).sum(dim=-1)
    return log_ratio(policy, path, path.y).sum(dim=(0, 2)) + log_jacobian.sum(dim=-1) - log_prior


@pytest.mark.parametrize("action_dim", [1, 6])
def test_untrained_policy(action_dim):
    policy = untrained()
    prior_entropy = 0.5 * math.log(2 * math.pi * math.e * 2.5**2)
    bound = policy.entropy() - policy.gap()
    assert prior_entropy - bound == pytest.approx(2.857, abs=5e-4)  # to three decimals
    assert prior_entropy == pytest.approx(2.335, abs=5e-4)
    assert bound == pytest.approx(-0.521, abs=5e-4)

    torch.set_default_dtype(torch.float32)
    batch_size = 100_000 // action_dim
    args = make_args(diffusion_steps=8, eta=2.5)
    policy = DiffusionPolicy(obs_dim=4, actor_dim=3, action_dim=action_dim, args=args)
    with torch.no_grad():
        embedded = policy.embed(torch.randn(batch_size, 4))
        chain = sample_chain(policy, embedded, chain_noise(policy, batch_size))
    assert (chain.controls == 0).all()
    assert_mean(entropy_bound(policy, chain) / action_dim, bound)


@pytest.mark.parametrize("name", TRAINED)
def test_bound_in_closed_form(name):
    policy = LINEAR_POLICIES[name]
    mean = policy.marginals().means[-1]
    variance = policy.marginals().variances[-1]
    chain = policy.sample(20_000)
    last = chain.action.atanh().flatten()
    assert_mean(last, mean)
    assert_mean((last - mean).square(), variance)
    bound = entropy_bound(policy, chain) / policy.action_dim
    assert policy.gap() > 0
    assert_mean(bound, policy.entropy() - policy.gap())
    assert bound.mean() < policy.entropy() + 4 * bound.std() / math.sqrt(len(bound))


def test_bound_becomes_tight_for_the_exact_reversal():
    """A prior that noising reaches (eta 0.3) and many steps: the gap vanishes like 1 / N."""
    gaps = {N: reversal(N, 0.3, 1.0).gap() for N in (32, 64, 128, 256)}
    errors = [abs(gaps[N] / gaps[2 * N] - 2) for N in (32, 64, 128)]
    assert errors[2] < errors[1] < errors[0]
    policy = reversal(256, 0.3, 1.0)
    assert_mean(policy.bound(10_000), policy.entropy() - gaps[256])
    other = LinearPolicy(policy.coefficients[:, 0], torch.full((256,), 1.0), 0.3)
    assert other.gap() > gaps[256]  # another control loses more
    assert_mean(other.bound(10_000), other.entropy() - other.gap())


@pytest.mark.parametrize("eta", [2.5, 0.8])
def test_log_ratio_against_distributions(eta):
    """Sample by sample: the mean of the log-ratio given the start of each step, by quadrature."""
    policy = make_agent(make_args(eta=eta, diffusion_steps=5), action_dim=3).policy
    obs = torch.randn(40, OBS_DIM)
    noise = chain_noise(policy, 40)
    chain = sample_chain(policy, policy.embed(obs), noise)
    path = path_of(policy, chain, noise)
    assert_close(path.x[0], eta * noise[0])
    assert_close(path.x[1:], path.y[:-1])
    assert_close(chain.action, path.y[-1].tanh())
    for k in range(5):  # the stored controls are the policy's at the stored latents
        assert_close(chain.controls[:, k], plain_control(policy, obs, chain.latents[:, k], k))

    nodes, weights = np.polynomial.hermite_e.hermegauss(3)  # exact: the log-ratio is quadratic in y
    step = denoising_step(policy, path.x, path.u, path.e)
    mean_log_ratio = torch.zeros_like(path.x)
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        mean_log_ratio += weight * log_ratio(policy, path, step.mean + step.stddev * node)
    log_jacobian = TanhTransform().log_abs_det_jacobian(path.y[-1], chain.action).sum(dim=-1)
    prior_entropy = 3 * Normal(0.0, eta).entropy()
    expected = prior_entropy + mean_log_ratio.sum(dim=(0, 2)) + log_jacobian
    assert_close(entropy_bound(policy, chain), expected)


@pytest.mark.parametrize("name", LINEAR_POLICIES)
def test_agrees_with_the_sampled_bound(name):
    """In expectation, value and gradient.

    The gradient of the mean has less noise than that of the sample. Its value has more: the sampled
    terms cancel the noise of the Jacobian, and of a tight bound only the log-density is left.
    """
    batch_size = 10_000
    policy = copy.copy(LINEAR_POLICIES[name])
    # each sample has coefficients of its own, and so a gradient of its own
    coefficients = policy.coefficients[:, :, None, None].repeat(1, 1, batch_size, 1)
    policy.coefficients = coefficients.requires_grad_()  # (N, 2, B, 1)
    noise = chain_noise(policy, batch_size)
    chain = sample_chain(policy, policy.coefficients, noise)
    bound = entropy_bound(policy, chain)
    sampled_bound = sampled_estimate(policy, chain, noise)

    def gradient_of(values):
        gradient = torch.autograd.grad(values.sum(), policy.coefficients, retain_graph=True)[0]
        return gradient.flatten(0, 1)[..., 0]  # (2N, B)

    gradient = gradient_of(bound)
    sampled_gradient = gradient_of(sampled_bound)
    assert_mean((bound - sampled_bound).detach())
    assert_mean((gradient - sampled_gradient).sum(dim=0))
    assert gradient.var(dim=-1).sum() < sampled_gradient.var(dim=-1).sum()
    assert bound.var() > sampled_bound.var()


def test_agrees_with_the_sampled_bound_for_a_network():
    """One state, many samples."""
    policy = make_agent(make_args(diffusion_steps=8), scale=0.2).policy
    obs = torch.randn(1, OBS_DIM).repeat(5000, 1).requires_grad_()
    noise = chain_noise(policy, 5000)
    chain = sample_chain(policy, policy.embed(obs), noise)
    bound = entropy_bound(policy, chain)
    sampled_bound = sampled_estimate(policy, chain, noise)
    assert_mean((bound - sampled_bound).detach())
    gradient = torch.autograd.grad(bound.sum(), obs, retain_graph=True)[0]
    sampled_gradient = torch.autograd.grad(sampled_bound.sum(), obs)[0]
    assert gradient.var(dim=0).sum() < sampled_gradient.var(dim=0).sum()


# === Trajectory KL ===
def test_kl_step_by_step():
    case = changed_policy(kl_samples=3)
    policy = case.agent.policy
    obs = case.batch["obs"]
    latents = case.batch["latents"]
    controls = case.batch["controls"]
    expected = torch.zeros(BATCH)
    mean_of_chains = torch.zeros(BATCH)
    embedded = policy.embed(obs)
    for j in range(3):
        for k, e in enumerate(cosine_schedule(4)):
            x = latents[:, j, k]
            old = denoising_step(policy, x, controls[:, j, k], torch.tensor(e))
            new = denoising_step(policy, x, plain_control(policy, obs, x, k), torch.tensor(e))
            expected += kl_divergence(old, new).sum(dim=-1) / 3
        mean_of_chains += trajectory_kl(policy, embedded, latents[:, [j]], controls[:, [j]]) / 3
    assert_close(case.kl, expected)
    assert_close(case.kl, mean_of_chains)
    assert (case.kl > 0).all()


@torch.no_grad()
def test_kl_against_monte_carlo():
    """The mean log-ratio of the path's probabilities under the old and the new policy."""
    batch_size = 20_000
    policy = make_agent(make_args(diffusion_steps=8)).policy
    obs = torch.randn(1, OBS_DIM).expand(batch_size, OBS_DIM)
    noise = chain_noise(policy, batch_size)
    chain = sample_chain(policy, policy.embed(obs), noise)
    path = path_of(policy, chain, noise)
    perturb(policy, 0.05)
    embedded = policy.embed(obs)
    kl = trajectory_kl(policy, embedded, chain.latents[:, None], chain.controls[:, None])
    new_u = torch.stack([plain_control(policy, obs, x, k) for k, x in enumerate(path.x)])
    old_log_prob = denoising_step(policy, path.x, path.u, path.e).log_prob(path.y)
    new_log_prob = denoising_step(policy, path.x, new_u, path.e).log_prob(path.y)
    sampled_kl = (old_log_prob - new_log_prob).sum(dim=(0, 2))
    assert_mean(sampled_kl - kl)
    assert (sampled_kl < 0).any()
    assert (kl >= 0).all()
    assert kl.var() < sampled_kl.var()
    # the comparison can tell the KL from zero
    assert kl.mean() > 4 * sampled_kl.std() / math.sqrt(batch_size)


# === Probability-flow ODE ===
def ode_variance(policy, score_scale):
    """The ODE of a linear control is linear: its gain on one start tells its variance."""
    start = torch.tensor([[0.1], [-0.2]])
    gain = ode_action(policy, torch.zeros(2, 1), start, score_scale).atanh() / start
    assert_close(gain[0], gain[1])
    return gain[0].item() ** 2 * policy.eta**2


@pytest.mark.parametrize("variance", [1.0, 0.3, 0.04])
def test_ode_keeps_or_sharpens_the_marginal(variance):
    """Exact linear scores: as steps get small, ODE and SDE reach the same variance at score scale
    0.5, and the ODE a smaller one at 1."""
    eta = 0.3
    policies = [reversal(N, eta, variance) for N in (512, 1024, 2048)]
    ode_variances = [ode_variance(policy, 0.5) for policy in policies]
    sde_variances = [policy.marginals().variances[-1] for policy in policies]
    # what is left of the data where noising ends
    total_step = sum(cosine_schedule(2048))
    unreached = abs(variance / eta**2 - 1) * math.exp(-2 * total_step / eta**2)
    for reached in (ode_variances, sde_variances):
        coarse = 2 * reached[1] - reached[0]  # Richardson: errors of 1 / N^2
        fine = 2 * reached[2] - reached[1]
        assert abs(fine - variance) < abs(fine - coarse) + unreached * variance
    samples = policies[0].sample(2000).action.atanh().flatten()
    assert_mean(samples.square(), sde_variances[0])
    by_score_scale = [ode_variance(policies[0], c) for c in (0.5, 0.75, 1.0)]
    assert by_score_scale == sorted(by_score_scale, reverse=True)
    assert by_score_scale[2] < samples.var()


def test_ode_step_by_hand():
    """Eq. (23): the drift of noising reversed, and 2c times the score"""
    policy = make_agent(make_args()).policy
    obs = torch.randn(6, OBS_DIM)
    start = torch.randn(6, ACTION_DIM)
    for c in (0.5, 1.0, 1.7):
        x = start
        for k, e in enumerate(cosine_schedule(4)):
            score = plain_control(policy, obs, x, k) / 2 - x / policy.eta**2
            x = x + e * (x / policy.eta**2 + 2 * c * score)
        assert_close(ode_action(policy, obs, start, c), x.tanh())


def test_the_ode_keeps_its_start_for_an_episode():
    agent = make_agent(make_args())
    obs = torch.randn(1, OBS_DIM).expand(6, -1)  # six environments in the same state
    generator = torch.Generator().manual_seed(3)
    actions = {}
    for eval_start in ("episode", "step"):
        args = make_args(eval_start=eval_start)
        actions[eval_start] = [act(agent, obs, "ode", args, generator) for _ in range(2)]
    first, second = actions["episode"]
    assert_close(first, second)
    assert len(first.unique(dim=0)) == 6, "each environment has a start of its own"
    first, second = actions["step"]
    assert (first != second).any(dim=1).all()
