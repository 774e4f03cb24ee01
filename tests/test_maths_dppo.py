"""The maths of dppo_continuous.py against closed forms, brute force and torch.distributions.

All in float64. Averages over samples must lie within 4 standard errors.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from makers import perturb
from torch.distributions import Normal
from torch.testing import assert_close

import dppo_continuous as dppo
import ppo_continuous as ppo
from dppo_continuous import (
    Agent,
    Args,
    act,
    clip_coefs,
    compute_targets,
    cosine_schedule,
    policy_loss,
    policy_step,
    sample_chain,
    step_log_prob,
    step_mean,
    update,
)

OBS_DIM = 7
K = 4
# noise added at each level, and standard deviation of each denoising step, for K = 8
BETAS = [0.042, 0.116, 0.192, 0.278, 0.384, 0.526, 0.740, 0.999]
STDS = [0.0, 0.179, 0.305, 0.417, 0.528, 0.654, 0.811, 0.981]


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_args(**changes):
    values = dict(num_envs=6, num_steps=5, num_minibatches=1, update_epochs=1, hidden_size=16)
    values |= dict(diffusion_steps=K, gamma=0.9, normalize_reward=False, clip_coef_first=0.2)
    return Args(**(values | changes))


def make_agent(args, action_dim=2):
    """An agent away from its start: every parameter is moved."""
    envs = SimpleNamespace(
        obs_dim=OBS_DIM, actor_dim=5, critic_start=2, action_dim=action_dim, spaces={}
    )
    agent = Agent(envs, args).double()
    perturb(agent, 0.3)
    return agent


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gradients(loss, parameters):
    return torch.autograd.grad(loss, [*parameters], allow_unused=True, materialize_grads=True)


def make_batch(args, action_dim=2, batch_size=40, scale=0.0, output_scale=1.0):
    """An agent that may have changed since the rollout, and a batch of the agent before."""
    agent = make_agent(args, action_dim)
    with torch.no_grad():
        for parameter in agent.policy.noise_network[-1].parameters():
            parameter *= output_scale
    obs = torch.randn(batch_size, OBS_DIM)
    with torch.no_grad():
        noise = agent.policy.noise(batch_size, seeded())
        chain, log_prob = sample_chain(agent.policy, obs, noise, args)
        value = agent.value(obs)
    batch = {
        "obs": obs,
        "chain": chain,
        "log_prob": log_prob,
        "value": value,
        "target": value + torch.randn(batch_size),
        "advantage": torch.randn(batch_size),
        "step": torch.arange(batch_size) % args.diffusion_steps,
    }
    perturb(agent, scale)
    return agent, batch


# === The noise schedule and the chain ===
def test_schedule_has_the_known_numbers():
    share = cosine_schedule(8)
    assert share[0] == 1
    assert_close(1 - share[1:] / share[:-1], torch.tensor(BETAS), atol=6e-4, rtol=0)
    policy = make_agent(make_args(diffusion_steps=8)).policy
    assert_close(policy.std[:, 0].flip(0), torch.tensor(STDS), atol=6e-4, rtol=0)


@pytest.mark.parametrize("num_steps", [1, 2, 8, 20])
def test_a_perfect_network_finds_the_action(num_steps):
    """If the network knows the noise, every x has the distribution of noised actions."""
    args = make_args(diffusion_steps=num_steps, min_sampling_std=1e-9)
    policy = make_agent(args).policy
    action = torch.tensor([0.3, -0.8])

    def noise_in(obs, x, step):
        share = policy.share[step]
        return (x - share.sqrt() * action) / (1 - share).sqrt()

    policy.forward = noise_in
    batch_size = 20_000
    noise = torch.randn(batch_size, num_steps + 1, 2, generator=seeded())
    chain, _ = sample_chain(policy, torch.zeros(batch_size, OBS_DIM), noise, args)
    assert_close(chain[:, -1], action.expand(batch_size, 2), atol=1e-6, rtol=0)
    share = cosine_schedule(num_steps).flip(0)
    for step in range(1, num_steps):
        x = chain[:, step]
        std = (1 - share[step]).sqrt()
        # the first share is not exactly 0, so pure noise is off by its root
        start_error = share[0].sqrt()
        error = (4 * std / math.sqrt(batch_size) + start_error).item()
        assert_close(x.mean(dim=0), share[step].sqrt() * action, atol=error, rtol=0)
        assert_close(x.std(dim=0), std.expand(2), atol=error, rtol=0)


def brute_force_mean(policy, obs, x, level, num_steps):
    """DDPM as in its paper: betas, then the posterior's two coefficients."""
    share = cosine_schedule(num_steps)
    beta = 1 - share[1:] / share[:-1]
    alpha_bar = torch.cumprod(1 - beta, dim=0)
    before = alpha_bar[level - 1] if level > 0 else torch.tensor(1.0)
    noise = policy(obs, x, num_steps - 1 - level)
    clean = x / alpha_bar[level].sqrt() - (1 / alpha_bar[level] - 1).sqrt() * noise
    clean = clean.clip(-1, 1)
    clean_coefficient = beta[level] * before.sqrt() / (1 - alpha_bar[level])
    x_coefficient = (1 - before) * (1 - beta[level]).sqrt() / (1 - alpha_bar[level])
    variance = beta[level] * (1 - before) / (1 - alpha_bar[level])
    return clean_coefficient * clean + x_coefficient * x, variance.sqrt()


def test_chain_and_its_log_prob_by_brute_force():
    args = make_args(min_sampling_std=0.2, min_log_prob_std=0.3)
    policy = make_agent(args).policy
    obs = torch.randn(30, OBS_DIM)
    noise = policy.noise(30, seeded())
    chain, log_prob = sample_chain(policy, obs, noise, args)
    assert chain.shape == (30, K + 1, 2)
    assert log_prob.shape == (30, K)
    x = noise[:, 0]
    total = torch.zeros(30)
    for level in reversed(range(K)):
        step = K - 1 - level
        assert_close(chain[:, step], x)
        mean, std = brute_force_mean(policy, obs, x, level, K)
        x = mean + std.clamp(min=0.2) * noise[:, step + 1]
        density = Normal(mean, std.clamp(min=0.3)).log_prob(x)
        total += density.sum(dim=1)
    assert_close(chain[:, -1], x)
    assert_close(2 * log_prob.sum(dim=1), total)  # the mean over two dimensions


@pytest.mark.parametrize("init_std", [0.3, 1.0])
def test_an_untrained_policy_denoises_a_gaussian(init_std):
    """Without the network, x of many fine steps has the distribution of noised Normal actions."""
    args = make_args(diffusion_steps=200, init_std=init_std, min_sampling_std=1e-9)
    policy = make_agent(args).policy
    torch.nn.init.zeros_(policy.noise_network[-1].weight)
    torch.nn.init.zeros_(policy.noise_network[-1].bias)
    batch_size = 5000
    noise = torch.randn(batch_size, 201, 2, generator=seeded())
    chain, _ = sample_chain(policy, torch.zeros(batch_size, OBS_DIM), noise, args)
    std = chain[:, -1].std()
    if init_std < 0.5:  # nothing is clamped: four standard errors, and what 200 steps leave
        assert abs(std - init_std) < 4 * init_std / math.sqrt(4 * batch_size) + 0.01
    assert 0 < std < init_std + 0.02
    assert (chain[:, -1].abs() <= 1 + 1e-6).all()


def test_log_prob_is_bounded():
    far = step_log_prob(torch.tensor([[9.0, 0.0]]), torch.zeros(1, 2), torch.tensor(0.1))
    middle = Normal(0.0, 0.1).log_prob(torch.tensor(0.0))
    assert_close(far, (-5 + middle)[None] / 2)
    sharp = step_log_prob(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor(1e-3))
    assert_close(sharp, torch.tensor([2.0]))


def test_one_step_for_all_rows_or_one_each():
    args = make_args()
    policy = make_agent(args).policy
    obs = torch.randn(6, OBS_DIM)
    x = torch.randn(6, 2)
    step = torch.tensor([0, 1, 2, 3, 1, 0])
    together = step_mean(policy, obs, x, step)
    for i in range(6):
        alone = step_mean(policy, obs[i : i + 1], x[i : i + 1], int(step[i]))
        assert_close(together[i : i + 1], alone)


def test_noise_is_cut_at_three_but_not_at_the_start():
    policy = make_agent(make_args()).policy
    noise = policy.noise(20_000, seeded())
    assert noise[:, 0].abs().max() > 3
    assert noise[:, 1:].abs().max() == 3
    assert torch.equal(noise, policy.noise(20_000, seeded()))


def test_samplers():
    args = make_args()
    agent = make_agent(args)
    obs = torch.randn(500, OBS_DIM)
    noise = agent.policy.noise(500, seeded())
    chain, _ = sample_chain(agent.policy, obs, noise, args)
    assert torch.equal(act(agent, obs, "sde", args, seeded()), chain[:, -1])
    x = noise[:, 0]
    for step in range(K):
        x = step_mean(agent.policy, obs, x, step)
    assert_close(act(agent, obs, "mean", args, seeded()), x)


# === The loss ===
def test_one_denoising_step_is_ppo():
    """K = 1: a Gaussian with the floor as standard deviation, and PPO's objective."""
    args = make_args(diffusion_steps=1, value_coef=0.7)
    # a single step multiplies the network's output by 32 before it clamps the action
    agent, batch = make_batch(args, action_dim=1, scale=2e-4, output_scale=0.01)
    loss, metrics = policy_loss(agent, batch, args)
    mean = step_mean(agent.policy, batch["obs"], batch["chain"][:, 0], 0)
    log_std = torch.tensor([0.1]).log()
    new_log_prob = ppo.log_prob(batch["chain"][:, 1], mean, log_std)
    ratio = (new_log_prob - batch["log_prob"][:, 0]).exp()
    gain = ppo.objective(ratio, batch["advantage"], args.clip_coef, "ppo").mean()
    fit = (agent.value(batch["obs"]) - batch["target"]).square().mean()
    expected = -gain + 0.7 * fit
    assert_close(loss, expected)
    assert_close(gradients(loss, agent.parameters()), gradients(expected, agent.parameters()))
    assert 0 < metrics["policy/clipped"] < 1  # some pairs, not all


def test_loss_by_hand():
    args = make_args(gamma_denoise=0.8, clip_coef=0.05, clip_coef_first=0.01, value_coef=0.3)
    agent, batch = make_batch(args, scale=0.03)
    loss, metrics = policy_loss(agent, batch, args)
    total = 0
    num_clipped = 0
    for i in range(40):
        step = i % K
        obs = batch["obs"][i : i + 1]
        mean, std = brute_force_mean(
            agent.policy, obs, batch["chain"][i : i + 1, step], K - 1 - step, K
        )
        next_x = batch["chain"][i : i + 1, step + 1]
        log_prob = Normal(mean, std.clamp(min=0.1)).log_prob(next_x).clamp(-5, 2).mean()
        ratio = (log_prob - batch["log_prob"][i, step]).exp()
        eps = 0.01 + 0.04 * (math.exp(3 * step / (K - 1)) - 1) / (math.exp(3) - 1)
        advantage = batch["advantage"][i] * 0.8 ** (K - 1 - step)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)
        error = agent.value(obs)[0] - batch["target"][i]
        total = total + (-gain + 0.3 * error**2) / 40
        num_clipped += float(abs(ratio - 1) > eps)
    assert_close(loss, total)
    assert_close(metrics["policy/clipped"], torch.tensor(num_clipped / 40))
    assert_close(gradients(loss, agent.parameters()), gradients(total, agent.parameters()))
    assert 0.1 < num_clipped / 40 < 0.9
    assert not any(metric.requires_grad for metric in metrics.values())


def test_loss_of_the_old_policy():
    """Ratio 1 and the gradient of the score function, with advantages discounted by the step."""
    args = make_args(gamma_denoise=0.7, value_coef=0.0)
    agent, batch = make_batch(args)
    loss, metrics = policy_loss(agent, batch, args)
    discount = torch.tensor([0.7**3, 0.7**2, 0.7, 1.0]).repeat(10)
    assert_close(loss, -(discount * batch["advantage"]).mean())
    assert_close(metrics["policy/kl"], torch.tensor(0.0))
    assert metrics["policy/clipped"] == 0
    row = torch.arange(40)
    mean = step_mean(agent.policy, batch["obs"], batch["chain"][row, batch["step"]], batch["step"])
    std = agent.policy.std[batch["step"]].clamp(min=0.1)
    next_x = batch["chain"][row, batch["step"] + 1]
    score = Normal(mean, std).log_prob(next_x).clamp(-5, 2).mean(dim=1)
    expected = -(discount * batch["advantage"] * score).mean()
    assert_close(gradients(loss, agent.parameters()), gradients(expected, agent.parameters()))


def test_clip_coefs():
    step = torch.arange(8)
    flat = make_args(diffusion_steps=8)
    assert_close(clip_coefs(step, flat), torch.full((8,), 0.2))
    official = make_args(diffusion_steps=8, clip_coef=0.01, clip_coef_first=0.001)
    eps = clip_coefs(step, official)
    assert_close(eps[0], torch.tensor(0.001))
    assert_close(eps[7], torch.tensor(0.01))
    assert (eps.diff().diff() > 0).all()  # it grows faster and faster
    alone = make_args(diffusion_steps=1)
    assert_close(clip_coefs(torch.tensor([0]), alone), torch.tensor([0.2]))


# === One iteration ===
def rollout_data(args, agent):
    obs = torch.randn(args.num_steps, args.num_envs, OBS_DIM)
    steps = []
    for t in range(args.num_steps):
        noise = agent.policy.noise(args.num_envs, seeded(t))
        with torch.no_grad():
            steps.append(policy_step(agent, args, {"obs": obs[t], "noise": noise}))
    data = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    shape = (args.num_steps, args.num_envs)
    data["reward"] = torch.randn(shape)
    data["terminated"] = torch.zeros(shape, dtype=torch.bool)
    data["truncated"] = torch.zeros(shape, dtype=torch.bool)
    data["broken"] = torch.zeros(shape, dtype=torch.bool)
    data["next_obs"] = torch.randn(*shape, OBS_DIM)
    return data


def test_an_epoch_sees_every_pair_once(monkeypatch):
    args = make_args(num_minibatches=6, update_epochs=2)
    agent = make_agent(args)
    data = rollout_data(args, agent)
    data["broken"][2, 3] = True
    flat = compute_targets(agent, data, args, None)
    seen = []
    loss = dppo.policy_loss

    def spy(agent, batch, args):
        for target, step in zip(batch["target"].tolist(), batch["step"].tolist(), strict=True):
            seen.append((target, step))
        return loss(agent, batch, args)

    monkeypatch.setattr(dppo, "policy_loss", spy)
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-3))
    update(agent, optimizer, flat, args, seeded())
    num_pairs = 30 * K
    everything = []
    for target in flat["target"].tolist():
        everything += [(target, step) for step in range(K)]
    assert len(seen) == 2 * num_pairs
    assert sorted(seen[:num_pairs]) == sorted(everything)
    assert sorted(seen[num_pairs:]) == sorted(everything)
    assert len(set(flat["target"].tolist())) == 29  # a whole step stands in for the broken one
