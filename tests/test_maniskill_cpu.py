"""maniskill_cpu.py against ManiSkill's own single-environment CPU simulation: equal means equal to the bit."""

import os
import subprocess
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("mani_skill", reason="ManiSkill is missing: pip install -r requirements-maniskill.txt")
import sapien
from mani_skill.agents.robots import Panda

import maniskill_cpu

OBJECTS = dict(PickCube="cube", StackCube="cubeA", PokeCube="peg", PullCube="obj", PushCube="obj", RollBall="ball")
OBJECTS |= dict(LiftPegUpright="peg", PlaceSphere="obj", PlugCharger="charger", PushT="tee", PegInsertionSide="peg")
OBJECTS |= dict(PullCubeTool="l_shape_tool", TwoRobotPickCube="cube", TwoRobotStackCube="cubeA")
STEPS, MORE = 120, 20  # of the first episode, of the next one
NEW_SCENES = dict(reconfigure=True)  # PhysX remembers contacts across resets, in ManiSkill's own simulation too


@pytest.fixture(autouse=True, scope="module")
def backend():
    maniskill_cpu.install()


def reward_mode(task):
    return "sparse" if task == "PlugCharger" else "normalized_dense"


def make(task, num_envs=3, **kwargs):
    return maniskill_cpu.make(f"{task}-v1", num_envs, reward_mode=reward_mode(task), **kwargs)


def make_official(task, **kwargs):
    kwargs |= maniskill_cpu.STATE_ONLY | dict(reward_mode=reward_mode(task), control_mode="pd_joint_delta_pos")
    kwargs |= dict(enhanced_determinism=True, reconfiguration_freq=0)  # resets from the env's own stream, no new scene
    return maniskill_cpu.flatten_actions(gym.make(f"{task}-v1", sim_backend="physx_cpu", **kwargs))


def noise(steps, *shape, seed=0):  # each action is held for 10 steps, to get somewhere
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(-(-steps // 10), *shape, generator=rng).clamp(-1, 1).repeat_interleave(10, 0)[:steps]


def manipulate(env, task):
    """Actions of a single env: grasp the object, lift it, carry it, put it down, let go; PushT: push it about."""
    u, grip = env.unwrapped, 1.0
    agent, obj = getattr(u, "left_agent", u.agent), getattr(u, OBJECTS[task])
    robot, model = agent.robot, agent.robot.create_pinocchio_model()
    tip, arm = robot.links.index(agent.tcp), np.arange(robot.max_dof) < 7

    def act(delta):
        action = torch.zeros(env.action_space.shape[-1])
        action[:7] = torch.as_tensor(delta).clamp(-1, 1)
        action[7:8] = grip
        return action

    def go(position, quaternion, steps, tolerance=0.008):
        local, rng = robot.pose.sp.inv() * sapien.Pose(position, quaternion), np.random.default_rng(0)
        for _ in range(50):  # inverse kinematics from here or nearby, within the joint limits
            start = robot.qpos[0].double().numpy() + rng.uniform(-0.3, 0.3, robot.max_dof) * arm
            q, found, _ = model.compute_inverse_kinematics(tip, local, start, arm.astype(int), max_iterations=300)
            low, high = robot.qlimits[0].double().numpy().T
            if found and ((low <= q) & (q <= high))[:7].all():
                break
        for _ in range(steps):
            error = torch.tensor(q[:7]) - robot.qpos[0, :7]
            if error.abs().max() < tolerance:
                break
            yield act(25 * error)

    start, hand = obj.pose.sp.p, agent.tcp.pose.sp
    if task == "PushT":
        for x, y in ((-0.12, 0), (0.12, 0), (0.12, 0.12), (-0.1, 0)):
            yield from go(start + [x, y, 0.02 - start[2]], hand.q, 25)
        return
    start[2] = max(start[2], 0.012)
    axes, closing = obj.pose.sp.to_transformation_matrix()[:3, :3].T, hand.to_transformation_matrix()[:3, 1]
    long = OBJECTS[task] in ("peg", "charger", "l_shape_tool")  # along x, so not to be grasped along it
    across = [a * np.sign(a @ closing) for i, a in enumerate(axes) if abs(a[2]) < 0.3 and not (long and i == 0)]
    closing = max(across, key=lambda a: a @ closing, default=closing) * [1, 1, 0]
    q = Panda.build_grasp_pose(np.array([0, 0, -1.0]), closing / np.linalg.norm(closing), start).q
    yield from go(start + [0, 0, 0.08], q, 40)
    yield from go(start, q, 25)
    grip = -1.0
    yield from repeat(act(torch.zeros(7)), 6)
    for move in ([0, 0, 0.12], [0.05, 0.08, 0.12], [0.05, 0.08, 0.03]):
        yield from go(start + move, q, 20, 0.01)
    grip = 1.0
    yield from repeat(act(torch.zeros(7)), 8)


def fingers(env, task):
    """Forces between the fingers and the object, in both orders, and whether it is grasped: (num_envs, 13)"""
    u = env.unwrapped
    agent, obj = getattr(u, "left_agent", u.agent), getattr(u, OBJECTS[task])
    if task == "PushT":  # it has a stick, no fingers
        links = [link for link in agent.robot.links if link._bodies[0].collision_shapes]
        return torch.cat([u.scene.get_pairwise_contact_forces(link, obj) for link in links], 1)
    pairs = [(f, obj) for f in (agent.finger1_link, agent.finger2_link)]
    pairs += [(obj, f) for f, _ in pairs]
    forces = [u.scene.get_pairwise_contact_forces(*pair) for pair in pairs]
    return torch.cat([*forces, agent.is_grasping(obj)[:, None]], 1)


def observe(env, task, obs, reward=None, terminated=None, truncated=None, info=None):
    """All that a step shows, as rows of one float64 tensor per name"""
    info = {k: v for k, v in (info or {}).items() if torch.is_tensor(v) and v.ndim}  # PullCubeTool has means over envs
    shown = dict(obs=obs, reward=reward, terminated=terminated, truncated=truncated, fingers=fingers(env, task)) | info
    shown = {k: torch.as_tensor(v).double().reshape(len(obs), -1) for k, v in shown.items() if v is not None}
    return {k: v.clone() for k, v in shown.items()}


def official_episodes(env, task, seed, actions):
    """What a single env shows and the actions it takes, in one episode of STEPS and the beginning of the next one"""
    shown, taken = [observe(env, task, env.reset(seed=seed, options=NEW_SCENES)[0])], []

    def play(actions):
        for action in actions:
            taken.append(action)
            shown.append(observe(env, task, *env.step(action[None])))

    play(islice(chain(actions, repeat(torch.zeros(env.action_space.shape[-1]))), STEPS))
    shown.append(observe(env, task, env.reset()[0]))
    play(noise(MORE, len(taken[0]), seed=seed))
    return shown, torch.stack(taken)


@pytest.mark.parametrize("task", OBJECTS)
def test_equals_the_official_simulation(task):
    """Env 0 moves at random, env 1 grasps; on past the time limit; no state is copied from one to the other."""
    official = make_official(task, max_episode_steps=STEPS)
    scripts = noise(STEPS, official.action_space.shape[-1]), manipulate(official, task)
    episodes = [official_episodes(official, task, seed, script) for seed, script in enumerate(scripts, 5)]
    official.close()
    shown = zip(*(e[0] for e in episodes), strict=True)
    shown = [{k: torch.cat([x[k] for x in row]) for k in row[0] if k != "terminated"} for row in shown]

    envs, unseen = make(task, 2, ignore_terminations=True, max_episode_steps=STEPS), iter(shown)

    def check(*step):
        ours = observe(envs, task, *step)
        for name, theirs in next(unseen).items():
            assert torch.equal(ours[name], theirs), (name, (ours[name] - theirs).abs().max())

    check(envs.reset(seed=[5, 6], options=NEW_SCENES)[0])
    for t, action in enumerate(torch.stack([e[1] for e in episodes], 1), 1):
        obs, *step, info = envs.step(action)
        assert obs.dtype == step[0].dtype == torch.float32
        if t == STEPS:  # autoreset
            check(info["final_observation"], *step, info["final_info"])
            check(obs)
        else:
            check(obs, *step, info)
    assert next(unseen, None) is None
    envs.close()
    forces = torch.stack([row["fingers"][1] for row in shown])
    if task == "PushT":
        assert (forces.norm(dim=1) > 0.5).sum() >= 5, "nothing was pushed"
    else:
        assert forces[:, -1].sum() >= 5, "nothing was grasped"


def rollout(envs, actions, reset_at=(), which=None):
    """-> obs, reward, state of all steps; environments `which` are reset before the steps `reset_at`"""
    shown = []
    for t, action in enumerate(actions):
        if t in reset_at:
            envs.reset(options=dict(env_idx=torch.tensor(which)))
        obs, reward, *_ = envs.step(action)
        shown.append(torch.cat([obs, reward[:, None], envs.unwrapped.get_state()], 1).clone())
    return torch.stack(shown)


def task_tensors(envs):  # such as the first joint angles, which TwoRobotPickCube rewards keeping to
    tensors = {k: v for k, v in vars(envs.unwrapped).items() if torch.is_tensor(v)}
    return {k: v.clone() for k, v in tensors.items() if v.shape[:1] == (envs.num_envs,)}


@pytest.mark.parametrize("task", ["StackCube", "TwoRobotPickCube", "RollBall", "PegInsertionSide"])
def test_a_partial_reset_touches_only_its_own_rows(task):
    envs = make(task)
    actions = noise(40, *envs.action_space.shape)
    envs.reset(seed=1, options=NEW_SCENES)
    whole = rollout(envs, actions)
    envs.reset(seed=1, options=NEW_SCENES)
    rollout(envs, actions[:20])
    systems = envs.unwrapped.scene.px.systems
    before, state, own = [s.pack() for s in systems], envs.unwrapped.get_state().clone(), task_tensors(envs)
    envs.reset(options=dict(env_idx=torch.tensor([1])))
    after, new_state = [s.pack() for s in systems], envs.unwrapped.get_state()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert (state == new_state).all(1).tolist() == [True, False, True]
    assert all(torch.equal(own[name][[0, 2]], new[[0, 2]]) for name, new in task_tensors(envs).items())
    envs.reset(seed=1, options=NEW_SCENES)
    parted = rollout(envs, actions, {20, 23}, [1])
    assert torch.equal(parted[:, [0, 2]], whole[:, [0, 2]]), "other environments went on differently"
    assert not torch.equal(parted[20, 1], whole[20, 1])
    envs.close()


def test_seeds_reproduce_and_envs_differ():
    envs = make("StackCube", max_episode_steps=8)
    actions, runs = noise(30, *envs.action_space.shape), []
    for seed, global_seed in ((3, 0), (3, 1), (4, 0)):
        first, _ = envs.reset(seed=seed, options=NEW_SCENES)
        torch.manual_seed(global_seed)
        runs.append(torch.cat([first[None], rollout(envs, actions)[..., : first.shape[1]]]))
    assert torch.equal(runs[0], runs[1]), "same seed, other trajectory"
    starts = torch.cat([x[::8].flatten(0, 1) for x in (runs[0], runs[2])])  # first observations of episodes
    assert len(starts.unique(dim=0)) == len(starts) == 24, "two episodes started alike"
    generator = torch.manual_seed(123).get_state()
    envs.reset()
    assert torch.equal(generator, torch.get_rng_state()), "a reset drew from the global generator"
    envs.close()


def test_every_environment_has_its_own_stream():
    """The k-th episode of an environment starts in the same way, whatever the others do."""
    envs = make("PickCube")

    def starts(which, times):  # robot and cube draw from different generators
        resets = (envs.reset(options=dict(env_idx=torch.tensor(which))) for _ in range(times))
        return torch.stack([torch.cat([obs[which], envs.unwrapped.cube.pose.p[which]], 1) for obs, _ in resets])

    envs.reset(seed=[1, 2, 3])
    together = starts([0, 1, 2], 3)
    envs.reset(seed=[1, 2, 3])
    apart = [starts([i], 3)[:, 0] for i in (2, 0, 1)]
    assert torch.equal(torch.stack([apart[1], apart[2], apart[0]], 1), together)
    for part in (together[..., :7], together[..., -3:-1]):
        assert len(part.flatten(0, 1).unique(dim=0)) == 9, "two episodes started alike"
    envs.close()


def test_every_environment_has_a_floor():
    envs = make("PickCube")
    envs.reset(seed=0)
    cube, scene = envs.unwrapped.cube, envs.unwrapped.scene
    cube.set_pose(sapien.Pose([2.0, 0, -0.8]))  # beside the table, 0.1 above the floor
    scene._gpu_apply_all()
    scene._gpu_fetch_all()
    for action in torch.zeros(20, *envs.action_space.shape):
        envs.step(action)
    assert torch.allclose(cube.pose.p[:, 2], torch.tensor(0.02 - 0.9196), atol=1e-3)
    envs.close()


def test_final_observation():
    """It is what an env without autoreset shows at that step, and not the next episode's first observation."""
    envs = make("PushCube", max_episode_steps=12)
    actions = noise(12, *envs.action_space.shape)
    for auto_reset in (True, False):
        envs.auto_reset = auto_reset
        envs.reset(seed=9, options=NEW_SCENES)
        for action in actions:
            obs, reward, terminated, truncated, info = envs.step(action)
        if auto_reset:
            final, first, episode = info["final_observation"], obs, info["final_info"]["episode"]
            assert info["_final_observation"].all() and info["_final_info"].all() and truncated.all()
            assert set(episode) >= {"success_once", "return", "episode_len"} and (episode["episode_len"] == 12).all()
    assert torch.equal(final, obs) and (final != first).any(1).all()
    envs.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from Linux's /proc")
def test_memory_does_not_grow():
    """20,000 env steps with many resets. 10 MB are 500 bytes per step: a kept observation or contact list takes more,
    while the allocator's own ups and downs after the warm-up stay within 2 or 3 MB."""
    envs = make(
        "PickCube", 16, max_episode_steps=20, sim_config=dict(sim_freq=40)
    )  # 2 substeps instead of 5, for speed
    actions, used = noise(1400, 16, 8), []
    envs.reset(seed=0)
    for t, action in enumerate(actions):
        envs.step(action)
        if t in (149, 1399):
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert used[1] - used[0] < 10e6
    envs.close()


def test_works_without_a_vulkan_driver():
    code = "import maniskill_cpu as m; e = m.make('PushT-v1', 2); e.reset(seed=0); e.step(e.action_space.sample()); "
    code += "assert not m.has_render_device(); print('ran')"
    hidden = dict(VK_ICD_FILENAMES="/nowhere.json", VK_DRIVER_FILES="/nowhere.json", OMP_NUM_THREADS="1")
    root = Path(maniskill_cpu.__file__).parent
    command, hidden = [sys.executable, "-c", code], os.environ | hidden
    run = subprocess.run(command, cwd=root, env=hidden, capture_output=True, text=True)
    assert run.returncode == 0 and "ran" in run.stdout, run.stderr


def test_rendering_is_stubbed_only_without_a_device(monkeypatch):
    class Material:  # in the place of SAPIEN's, which may be stubbed already
        works = True

        def __init__(self):
            if not self.works:
                raise RuntimeError("failed to find a rendering device")

    for module in (sapien.render, sapien.pysapien.render):
        monkeypatch.setattr(module, "RenderMaterial", Material)
        monkeypatch.setattr(module, "RenderTexture2D", type("Texture", (), {}))
    maniskill_cpu.install()
    assert maniskill_cpu.has_render_device() and sapien.render.RenderMaterial is Material
    Material.works = False
    maniskill_cpu.install()
    assert not maniskill_cpu.has_render_device() and sapien.render.RenderMaterial is maniskill_cpu.NoMaterial


def test_install_twice_is_install_once():
    env = maniskill_cpu.sapien_env
    before = env.parse_sim_and_render_backend, env.BaseEnv._setup_scene, maniskill_cpu.WhiteTableSceneBuilder.build
    maniskill_cpu.install()
    assert before == (
        env.parse_sim_and_render_backend,
        env.BaseEnv._setup_scene,
        maniskill_cpu.WhiteTableSceneBuilder.build,
    )


def test_refuses_to_render():
    with pytest.raises(ValueError, match="cannot render"):
        make("PickCube", render_backend="cpu")


@pytest.mark.parametrize("task, ignore_terminations", [("TwoRobotPickCube", False), ("PushCube", True)])
def test_other_versions_are_refused_and_the_fallback_is_alike(task, ignore_terminations, monkeypatch, capsys):
    settings = dict(num_envs=2, ignore_terminations=ignore_terminations, max_episode_steps=9)
    both = [make(task, **settings)]
    monkeypatch.setattr(maniskill_cpu, "version", lambda name: "3.9")
    with pytest.raises(RuntimeError, match="mani_skill 3.0.1 and sapien 3.0.3, but mani_skill 3.9 and sapien 3.9"):
        maniskill_cpu.install()
    capsys.readouterr()
    both.append(make(task, **settings))
    assert capsys.readouterr().out.count("needs mani_skill 3.0.1") == 1
    assert isinstance(both[1].unwrapped, maniskill_cpu.SeparateEnvs) and not isinstance(both[0].unwrapped, gym.Wrapper)
    assert both[0].max_episode_steps == both[1].max_episode_steps == 9
    for name in ("action_space", "single_action_space", "observation_space", "single_observation_space"):
        assert getattr(both[0], name) == getattr(both[1], name)

    def same(a, b):
        if isinstance(a, dict):
            assert a.keys() - {"reconfigure"} == b.keys() - {"reconfigure"}
            for k in b:
                same(a[k], b[k])
        else:
            assert a.dtype == b.dtype and torch.equal(a, b)

    def steps(actions):
        for action in actions:
            for a, b in zip(*(envs.step(action.clone()) for envs in both), strict=True):
                same(a, b)

    actions = noise(25, *both[0].action_space.shape)
    for seed in (3, [8, 9]):
        for a, b in zip(*(envs.reset(seed=seed) for envs in both), strict=True):
            same(a, b)
        steps(actions[:4])
        for a, b in zip(*(envs.reset(options=dict(env_idx=torch.tensor([1]))) for envs in both), strict=True):
            same(a, b)
        steps(actions)  # across the time limit, at which the two environments do not arrive together
    for envs in both:
        envs.close()


def test_actions_must_be_finite():
    envs = make("PickCube", 2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="finite"):
        envs.step(torch.tensor([[0.0], [torch.nan]]).expand(2, 8))
    envs.close()


def test_speed_comparison_runs(capsys):
    maniskill_cpu.compare_speed("PickCube-v1", 2, 1, rounds=1, steps=2)
    assert "times as many" in capsys.readouterr().out
