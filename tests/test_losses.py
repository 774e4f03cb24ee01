"""What trudi_continuous.py learns from: targets, broken steps, critic, split objective, duals.

Against brute force and torch's own functions, in float64 except where float32 is the question.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from makers import (
    ACTION_DIM,
    BATCH,
    HIDDEN,
    OBS_DIM,
    chain_noise,
    changed_policy,
    discounted_returns,
    make_agent,
    make_args,
)
from torch.distributions import Normal
from torch.testing import assert_close

import trudi_continuous as trudi
from trudi_continuous import (
    Chain,
    Critic,
    actor_loss,
    compute_targets,
    critic_loss,
    dual_loss,
    entropy_bound,
    hl_gauss,
    sample_chain,
    sparse_actor_loss,
    td_lambda_targets,
    trajectory_kl,
)

VALUE_RANGES = [(0.0, 150.0), (-10.0, 10.0), (-250.0, 250.0)]
T = 5  # rollout steps of make_args
every_mode = pytest.mark.parametrize("mode", ["split", "none"])
every_loss = pytest.mark.parametrize("policy_loss", [actor_loss, sparse_actor_loss])


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def seeded():
    return torch.Generator().manual_seed(0)


# === TD(lambda) targets ===
def brute_force_targets(reward, next_value, terminated, cut, gamma, td_lambda):
    """Weighted n-step returns of each step up to the cut of its trace."""
    targets = torch.zeros(reward.shape)
    for start, i in np.ndindex(*reward.shape):
        n_step_returns = []
        rewards_so_far = 0.0
        for t in range(start, len(reward)):
            rewards_so_far += gamma ** (t - start) * reward[t, i].item()
            future = 0.0 if terminated[t, i] else next_value[t, i].item()
            n_step_returns.append(rewards_so_far + gamma ** (t - start + 1) * future)
            if cut[t, i]:
                break
        weights = [(1 - td_lambda) * td_lambda**n for n in range(len(n_step_returns))]
        weights[-1] = td_lambda ** (len(n_step_returns) - 1)
        targets[start, i] = np.dot(weights, n_step_returns)
    return targets


@pytest.mark.parametrize("td_lambda", [0.0, 0.5, 0.95, 1.0])
def test_td_lambda_for_every_pattern_of_ends(td_lambda):
    patterns = torch.tensor(list(itertools.product([False, True], repeat=8)))
    terminated = patterns[:, :4].T  # (4 steps, 256)
    truncated = patterns[:, 4:].T
    cut = terminated | truncated
    cut[-1] = True
    reward = torch.randn(4, 256)
    next_value = 10 * torch.randn(4, 256)
    targets = td_lambda_targets(reward, next_value, terminated, truncated, 0.9, td_lambda)
    expected = brute_force_targets(reward, next_value, terminated, cut, 0.9, td_lambda)
    assert_close(targets, expected)
    assert_close(targets[terminated], reward[terminated])
    bootstrapped = cut & ~terminated
    assert_close(targets[bootstrapped], (reward + 0.9 * next_value)[bootstrapped])


def make_rollout(args, agent):
    """Random data as rollout returns it, with ends and broken steps."""
    shape = (args.num_steps, args.num_envs)
    event = torch.randint(6, shape)
    broken = event == 2
    obs = torch.randn(*shape, OBS_DIM)
    num_rows = shape[0] * shape[1]
    with torch.no_grad():
        embedded = agent.policy.embed(obs.flatten(0, 1))
        chain = sample_chain(agent.policy, embedded, chain_noise(agent.policy, num_rows))
    return {
        "obs": obs,
        "action": chain.action.view(*shape, -1),
        "latents": chain.latents.view(*shape, args.diffusion_steps, -1),
        "controls": chain.controls.view(*shape, args.diffusion_steps, -1),
        "reward": torch.where(broken, 0.0, torch.randn(shape)),  # as VecEnv reports it
        "terminated": event == 0,
        "truncated": (event == 1) | broken,
        "broken": broken,
        "next_obs": torch.randn(*shape, OBS_DIM),
    }


@pytest.mark.parametrize("normalize", [False, True])
def test_soft_targets_against_brute_force(monkeypatch, normalize):
    """Known actions and bounds instead of a chain: bonus, ends and broken steps must be right."""
    args = make_args(num_envs=30, normalize_reward=normalize, return_scale=4.0)
    agent = make_agent(args)
    data = make_rollout(args, agent)

    def known_chain(policy, obs, noise):
        return Chain(obs[:, 1:3].tanh(), obs, None, None)

    monkeypatch.setattr(agent.policy, "embed", lambda obs: obs)
    monkeypatch.setattr(trudi, "sample_chain", known_chain)
    monkeypatch.setattr(trudi, "entropy_bound", lambda policy, chain: chain.last.sum(dim=-1))
    flat = compute_targets(agent, data, args, seeded())
    next_obs = data["next_obs"].flatten(0, 1)
    with torch.no_grad():
        features = agent.critic.features(next_obs, next_obs[:, 1:3].tanh())
        next_value = agent.critic.value(features).view(T, 30)
    next_bound = next_obs.sum(dim=-1).view(T, 30)

    reward = data["reward"]
    terminated = data["terminated"]
    cut = terminated | data["truncated"]
    if normalize:
        returns = discounted_returns(reward, terminated, args.gamma)
        reward = reward * 4.0 / math.sqrt((returns**2).mean())
    bonus = args.gamma * args.alpha_init * next_bound
    soft_reward = torch.where(terminated, reward, reward + bonus)
    before_broken = data["broken"][1:] & ~cut[:-1]
    assert before_broken.any()
    cut[:-1] |= data["broken"][1:]
    cut[-1] = True
    expected = brute_force_targets(
        soft_reward, next_value, terminated, cut, args.gamma, args.td_lambda
    )
    whole = ~data["broken"].flatten()
    assert_close(flat["target"][whole], expected.flatten()[whole])
    assert_close(flat["next_features"][whole], features[whole])
    one_step = (soft_reward + args.gamma * next_value)[:-1][before_broken]
    assert_close(flat["target"].view(T, 30)[:-1][before_broken], one_step)  # no trace runs on
    assert not any(values.requires_grad for values in flat.values())


def test_values_beyond_time_outs_fit_the_scale():
    """Short episodes that only time out are worth 1 / (1 - gamma) rewards, not those of one."""
    args = make_args(return_scale=30.0)
    agent = make_agent(args)
    data = make_rollout(args, agent)
    data["reward"].fill_(2.0)
    data["terminated"].fill_(False)
    data["truncated"].fill_(True)
    data["broken"].fill_(False)
    args.normalize_reward = True
    args.td_lambda = 0.0
    agent.log_alpha.data.fill_(-math.inf)  # no bonus
    for _ in range(200):
        with_value = compute_targets(agent, data, args, seeded())["target"]
    args.normalize_reward = False
    data["reward"].fill_(0.0)
    value_alone = compute_targets(agent, data, args, seeded())["target"]
    scaled_reward = with_value - value_alone
    assert_close(scaled_reward / (1 - args.gamma), torch.full((30,), 30.0), rtol=0.01, atol=0)


def test_more_kl_samples_are_chains_of_the_same_policy():
    args = make_args(kl_samples=3)
    agent = make_agent(args)
    data = make_rollout(args, agent)
    flat = compute_targets(agent, data, args, seeded())
    whole = ~data["broken"].flatten()
    own_latents = data["latents"].flatten(0, 1)
    assert_close(flat["latents"][whole, 0], own_latents[whole])  # the first is the rollout's own
    assert flat["latents"].shape == (30, 3, 4, ACTION_DIM)
    assert flat["controls"].shape == (30, 3, 4, ACTION_DIM)
    embedded = agent.policy.embed(flat["obs"])
    kl = trajectory_kl(agent.policy, embedded, flat["latents"], flat["controls"])
    assert kl.max() < 1e-20
    starts = flat["latents"][:, :, 0]
    assert (starts[:, 0] != starts[:, 1]).all()
    assert (starts[:, 1] != starts[:, 2]).all()


# === Broken steps ===
@pytest.mark.parametrize("kl_samples", [1, 2])
def test_a_whole_row_stands_in_for_a_broken_one(kl_samples):
    args = make_args(kl_samples=kl_samples)
    agent = make_agent(args)
    data = make_rollout(args, agent)
    data["broken"][0, 0] = True  # the first row, too
    data["truncated"][0, 0] = True
    flat = compute_targets(agent, data, args, seeded())
    broken = data["broken"].flatten()
    obs = data["obs"].flatten(0, 1)
    source_rows = []  # of each row of the result
    for row in flat["obs"]:
        matches = (obs == row).all(dim=1).nonzero()[:, 0]
        assert len(matches) == 1
        source_rows.append(matches.item())
    assert not broken[source_rows].any()
    for row in range(len(obs)):
        assert source_rows[row] == row or broken[row]
    for name in ("action", "latents", "controls"):
        values = data[name].flatten(0, 1)
        first_chain = flat[name] if name == "action" else flat[name][:, 0]
        assert torch.equal(first_chain, values[source_rows]), name
    for name, values in flat.items():  # the row of one step, with all that belongs to it
        assert torch.equal(values, values[source_rows]), name


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kl_samples", [1, 2])
def test_broken_step_influences_nothing(normalize, kl_samples):
    args = make_args(num_envs=3, normalize_reward=normalize, kl_samples=kl_samples)
    agent = make_agent(args)
    never = torch.zeros(T, 3, dtype=torch.bool)
    data = make_rollout(args, agent)
    data |= dict(terminated=never, truncated=never, broken=never)

    def targets_of(data):
        agent.discounted_return.zero_()
        agent.squared_return_sum.zero_()
        agent.return_count.zero_()
        return compute_targets(agent, data, args, seeded())

    for t, i in np.ndindex(T, 3):
        one = never.clone()
        one[t, i] = True
        reward = data["reward"].clone()
        reward[t, i] = 0
        other_data = {name: values.clone() for name, values in data.items()}
        for name in ("obs", "action", "latents", "controls", "next_obs"):
            other_data[name][t, i] = torch.randn(data[name][t, i].shape)
        other_data["reward"] = reward.clone()
        if not normalize:  # VecEnv promises a reward of 0, which the scale of all rewards sees
            other_data["reward"][t, i] = 1000.0
        marks = dict(broken=one, truncated=one)
        before = targets_of(data | dict(reward=reward) | marks)
        after = targets_of(other_data | marks)
        for name in before:
            assert torch.equal(before[name], after[name]), name

        # a step that is not marked as broken has an influence: on its own row and the one before
        before = targets_of(data | dict(reward=reward))
        after = targets_of(other_data)
        for name in before:
            changed = (before[name] != after[name]).view(T, 3, -1).any(dim=-1)
            assert changed[t, i], name
            if name == "target" and t > 0:
                assert changed[t - 1, i]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("all_broken", [False, True])
def test_all_or_no_steps_broken(all_broken, normalize):
    args = make_args(normalize_reward=normalize, kl_samples=2)
    agent = make_agent(args)
    data = make_rollout(args, agent)
    if all_broken:
        data["broken"] = torch.ones(T, 6, dtype=torch.bool)
        data["terminated"] = ~data["broken"]
        data["truncated"] = data["broken"]
        data["reward"] = torch.zeros(T, 6)
    else:
        data["broken"] = torch.zeros(T, 6, dtype=torch.bool)
    flat = compute_targets(agent, data, args, seeded())
    for name, values in flat.items():
        assert len(values) == T * 6
        assert values.isfinite().all(), name
    if not all_broken:  # every row is in its place
        assert torch.equal(flat["obs"], data["obs"].flatten(0, 1))
        assert torch.equal(flat["action"], data["action"].flatten(0, 1))

    actor_parameters = [*agent.policy.parameters(), agent.log_alpha, agent.log_lambda]
    actor_optimizer = torch.optim.Adam(actor_parameters)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters())
    metrics = trudi.update(agent, actor_optimizer, critic_optimizer, flat, args, seeded())
    assert torch.stack(list(metrics.values())).isfinite().all()
    assert all(parameter.isfinite().all() for parameter in agent.parameters())


# === Critic ===
def make_critic(vmin, vmax, hidden=HIDDEN):
    args = make_args(vmin=vmin, vmax=vmax, hidden_size=hidden)
    assert args.num_bins == 151
    assert args.hl_sigma == 0.75
    return Critic(critic_start=2, obs_dim=OBS_DIM, action_dim=ACTION_DIM, args=args)


@pytest.mark.parametrize("vmin, vmax", VALUE_RANGES)
def test_hl_gauss(vmin, vmax):
    critic = make_critic(vmin, vmax)
    width = (vmax - vmin) / 150
    assert critic.centers[0] == vmin
    assert critic.centers[-1] == vmax
    assert abs(critic.sigma - 0.75 * width) < 1e-12
    target = torch.linspace(vmin, vmax, 1001)
    mass = hl_gauss(target, critic.edges, critic.sigma)
    assert_close(mass.sum(dim=-1), torch.ones(1001))
    cdf = Normal(target[:, None], critic.sigma).cdf(critic.edges)
    expected = cdf.diff(dim=-1) / (cdf[:, -1:] - cdf[:, :1])
    assert_close(mass, expected, rtol=1e-6, atol=1e-12)

    # away from the ends no mass is lost, and the mean is right but for the bins' rounding, which
    # is known as a Fourier series
    distance_to_end = torch.minimum(target - vmin, vmax - target)
    error = (mass @ critic.centers - target)[distance_to_end > 8 * critic.sigma].abs()
    terms = [math.exp(-2 * (math.pi * 0.75 * j) ** 2) / j for j in (1, 2)]
    rounding = sum(terms) * width / math.pi
    assert rounding / 2 < error.max() < rounding + 1e-10 * width

    ends = torch.tensor([vmin, vmax])
    beyond = torch.tensor([vmin - 1e6, vmax + 1e6])
    mass_at_ends = hl_gauss(ends, critic.edges, critic.sigma)
    assert_close(hl_gauss(beyond, critic.edges, critic.sigma), mass_at_ends)


def read_back(target, args):
    """The value of a critic that fits its target exactly."""
    critic = Critic(critic_start=2, obs_dim=OBS_DIM, action_dim=ACTION_DIM, args=args)
    return (hl_gauss(torch.tensor([target]), critic.edges, critic.sigma) @ critic.centers).item()


def test_range_begins_below_the_smallest_value():
    """At the end of its range HL-Gauss is biased: with vmin = 0 worthless states look good."""
    at_the_edge = trudi.Args(vmin=0.0, num_bins=151)
    assert read_back(0.0, at_the_edge) == pytest.approx(0.37, abs=0.01)
    assert read_back(0.5, at_the_edge) == pytest.approx(0.66, abs=0.01)
    for target in (-10.0, 0.0, 0.5, 1.0):
        assert read_back(target, trudi.Args()) == pytest.approx(target, abs=1e-4)


@pytest.mark.parametrize("vmin, vmax", [*VALUE_RANGES, (-150.0, 150.0)])
def test_critic_starts_at_zero(vmin, vmax):
    torch.set_default_dtype(torch.float32)
    critic = make_critic(vmin, vmax, hidden=128)
    obs = 3 * torch.randn(500, OBS_DIM)
    action = torch.rand(500, ACTION_DIM) * 2 - 1
    q = critic.value(critic.features(obs, action))
    bin_width = (vmax - vmin) / 150
    assert q.abs().max() < bin_width


def test_critic_loss():
    args = make_args(aux_coef=0.5)
    critic = make_agent(args).critic
    batch = {
        "obs": torch.randn(9, OBS_DIM),
        "action": torch.rand(9, ACTION_DIM),
        "target": 8 * torch.randn(9),
        "next_features": torch.randn(9, HIDDEN),
    }
    loss, metrics = critic_loss(critic, batch, args)
    features = critic.features(batch["obs"], batch["action"])
    logits = critic.head(features)
    target_probs = hl_gauss(batch["target"], critic.edges, critic.sigma)
    fits = []
    errors = []
    for row in range(9):
        fits.append(F.cross_entropy(logits[[row]], target_probs[[row]]))
        prediction = critic.predictor(features[[row]])
        errors.append(F.mse_loss(prediction, batch["next_features"][[row]]))
    fit = sum(fits) / 9
    auxiliary = sum(errors) / 9
    assert_close(loss, fit + 0.5 * auxiliary)
    expected_metrics = {"losses/critic": fit.detach(), "losses/auxiliary": auxiliary.detach()}
    assert_close(metrics, expected_metrics)
    assert not any(value.requires_grad for value in metrics.values())
    bias_gradient = torch.autograd.grad(loss, critic.head[-1][-1].bias)[0]
    assert_close(bias_gradient, (logits.softmax(dim=-1) - target_probs).mean(dim=0))
    bin_values = torch.linspace(-10, 10, 151)
    assert_close(critic.value(features), logits.softmax(dim=-1) @ bin_values)


# === Split objective ===
def loss_by_hand(case, noise):
    """Eq. (19), (20) state by state; the entropy bound is the mean over all states.

    -> loss, metrics
    """
    args = case.args
    agent = case.agent
    total = torch.zeros(())
    num_inside = 0
    entropy_bounds = []
    for i in range(BATCH):
        state = {name: values[[i]] for name, values in case.batch.items()}
        embedded = agent.policy.embed(state["obs"])
        kl = trajectory_kl(agent.policy, embedded, state["latents"], state["controls"])[0]
        chain = sample_chain(agent.policy, embedded, noise[:, [i]])
        bound = entropy_bound(agent.policy, chain)[0]
        entropy_bounds.append(bound.item())
        if args.trust_region == "none" or kl <= args.kl_bound:
            num_inside += 1
            q = agent.critic.value(agent.critic.features(state["obs"], chain.action))[0]
            total = total - q - args.alpha_init * bound
        else:
            total = total + args.lambda_init * kl
    metrics = {
        "policy/kl": case.kl.mean(),
        "policy/inside": torch.tensor(num_inside / BATCH, dtype=torch.float32),
        "policy/entropy_bound": torch.tensor(sum(entropy_bounds) / BATCH),
    }
    return total / BATCH, metrics


def gradients(loss, policy):
    """Of each parameter; zeros where the loss does not depend on it."""
    parameters = list(policy.parameters())
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("inside", ["some", "all", "none"])
@every_mode
@pytest.mark.parametrize("kl_samples", [1, 2])
def test_actor_loss_dense_sparse_and_by_hand(inside, mode, kl_samples):
    case = changed_policy(inside, trust_region=mode, kl_samples=kl_samples)
    num_inside = {"some": BATCH // 2, "all": BATCH, "none": 0}
    assert (case.kl <= case.args.kl_bound).sum() == num_inside[inside]
    noise = case.noise()
    expected, expected_metrics = loss_by_hand(case, noise)
    expected_gradients = gradients(expected, case.agent.policy)
    assert any((gradient != 0).any() for gradient in expected_gradients)
    for policy_loss in (actor_loss, sparse_actor_loss):
        loss, metrics = policy_loss(case.agent, case.batch, noise, case.args)
        assert_close(loss, expected)
        assert_close(gradients(loss, case.agent.policy), expected_gradients)
        assert_close(metrics, expected_metrics)
        assert not any(value.requires_grad for value in metrics.values())
        dual = dual_loss(case.agent, metrics, case.args)
        assert_close(dual, dual_loss(case.agent, expected_metrics, case.args))


@every_mode
@every_loss
def test_actor_gradient_by_finite_differences(mode, policy_loss):
    """Nothing on the way through chain, bound, critic and KL is cut off from the gradient."""
    case = changed_policy(trust_region=mode)
    noise = case.noise()
    parameters = list(case.agent.policy.parameters())
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def loss_after(shift):
        """The loss after a shift of all parameters, which stay there."""
        with torch.no_grad():
            for parameter, toward in zip(parameters, direction, strict=True):
                parameter += shift * toward
        return policy_loss(case.agent, case.batch, noise, case.args)[0]

    gradient = gradients(loss_after(0), case.agent.policy)
    slopes = [(g * d).sum() for g, d in zip(gradient, direction, strict=True)]
    step = 1e-6  # so small that no state changes sides
    loss_above = loss_after(step)
    loss_below = loss_after(-2 * step)
    difference = (loss_above - loss_below) / (2 * step)
    assert_close(difference, sum(slopes), rtol=1e-5, atol=1e-7)


@every_mode
@every_loss
def test_actor_loss_leaves_the_critic_alone(mode, policy_loss):
    """As update takes its gradient."""
    case = changed_policy(trust_region=mode)
    loss, _ = policy_loss(case.agent, case.batch, case.noise(), case.args)
    loss.backward(inputs=list(case.agent.policy.parameters()))
    assert all(parameter.grad is None for parameter in case.agent.critic.parameters())
    assert any((parameter.grad != 0).any() for parameter in case.agent.policy.parameters())


# === Duals ===
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_duals_move_the_right_way(sign, optimizer):
    args = make_args()
    agent = make_agent(args)
    duals = [agent.log_alpha, agent.log_lambda]
    before = torch.stack(duals).detach().exp()
    target = args.entropy_target * ACTION_DIM
    metrics = {
        "policy/inside": torch.tensor(0.25),
        "policy/entropy_bound": target - sign * torch.rand(()),
        "policy/kl": args.kl_bound * (1 + sign * torch.rand(())),
    }
    missing_entropy = 2 * -1.665 - metrics["policy/entropy_bound"]
    excess_kl = metrics["policy/kl"] - 0.1
    gradient = torch.autograd.grad(dual_loss(agent, metrics, args), duals)
    assert_close(torch.stack(gradient), -before * torch.stack([missing_entropy, excess_kl]))
    stepper = optimizer(duals, 1e-3)
    dual_loss(agent, metrics, args).backward()
    stepper.step()
    assert (torch.sign(torch.stack(duals).exp() - before) == sign).all()


@every_mode
@every_loss
def test_duals_and_actor_leave_each_other_alone(mode, policy_loss):
    case = changed_policy(trust_region=mode)
    agent = case.agent
    loss, metrics = policy_loss(agent, case.batch, case.noise(), case.args)
    dual = dual_loss(agent, metrics, case.args)
    duals = [agent.log_alpha, agent.log_lambda]
    networks = [*agent.policy.parameters(), *agent.critic.parameters()]
    of_networks = torch.autograd.grad(dual, networks, allow_unused=True, retain_graph=True)
    assert of_networks == (None,) * len(networks)
    assert torch.autograd.grad(loss, duals, allow_unused=True) == (None, None)
    by_alpha, by_lambda = torch.autograd.grad(
        dual, duals, allow_unused=True, materialize_grads=True
    )
    assert by_alpha != 0
    # without a trust region lambda would grow for ever
    assert (by_lambda != 0) == (mode == "split")


@every_loss
def test_alpha_counts_the_states_outside(policy_loss):
    """Where no state is inside, alpha still knows the entropy of the policy."""
    case = changed_policy(inside="none")
    noise = case.noise()
    _, metrics = policy_loss(case.agent, case.batch, noise, case.args)
    assert metrics["policy/inside"] == 0
    chain = sample_chain(case.agent.policy, case.agent.policy.embed(case.batch["obs"]), noise)
    spare_entropy = (
        entropy_bound(case.agent.policy, chain).mean() - case.args.entropy_target * ACTION_DIM
    )
    dual = dual_loss(case.agent, metrics, case.args)
    gradient = torch.autograd.grad(dual, case.agent.log_alpha)[0]
    assert_close(gradient, case.args.alpha_init * spare_entropy.detach())
