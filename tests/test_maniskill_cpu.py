"""simulators/maniskill_cpu.py against ManiSkill's own single-environment CPU simulation.

Equal means equal to the bit.
"""

import os
import subprocess
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

missing = "ManiSkill is missing: pip install -r requirements-maniskill.txt"
pytest.importorskip("mani_skill", reason=missing)
import sapien  # noqa: E402
from mani_skill.agents.robots import Panda  # noqa: E402

from simulators import maniskill_cpu  # noqa: E402

ROOT = Path(__file__).parents[1]
OBJECTS = {  # task -> attribute of the object that is moved
    "PickCube": "cube",
    "StackCube": "cubeA",
    "PokeCube": "peg",
    "PullCube": "obj",
    "PushCube": "obj",
    "RollBall": "ball",
    "LiftPegUpright": "peg",
    "PlaceSphere": "obj",
    "PlugCharger": "charger",
    "PushT": "tee",
    "PegInsertionSide": "peg",
    "PullCubeTool": "l_shape_tool",
    "TwoRobotPickCube": "cube",
    "TwoRobotStackCube": "cubeA",
}
SOME_TASKS = ["PickCube", "StackCube", "PushT", "PegInsertionSide", "TwoRobotPickCube"]
EXTENDED = [pytest.mark.slow, pytest.mark.extended]
OTHER_TASKS = [pytest.param(task, marks=EXTENDED) for task in OBJECTS if task not in SOME_TASKS]
STEPS = 120  # of the first episode
MORE_STEPS = 20  # of the next one
# PhysX remembers contacts across resets, in ManiSkill's own simulation too
NEW_SCENES = {"reconfigure": True}


@pytest.fixture(autouse=True, scope="module")
def backend():
    maniskill_cpu.install()


def reward_mode(task):
    return "sparse" if task == "PlugCharger" else "normalized_dense"


def make(task, num_envs=3, **kwargs):
    return maniskill_cpu.make(f"{task}-v1", num_envs, reward_mode=reward_mode(task), **kwargs)


def make_official(task, max_episode_steps):
    env = gym.make(
        f"{task}-v1",
        sim_backend="physx_cpu",
        max_episode_steps=max_episode_steps,
        reward_mode=reward_mode(task),
        control_mode="pd_joint_delta_pos",
        enhanced_determinism=True,  # resets draw from the env's own stream
        reconfiguration_freq=0,  # and build no new scene
        **maniskill_cpu.STATE_ONLY,
    )
    return maniskill_cpu.flatten_actions(env)


def noise(steps, *shape, seed=0):
    """Random actions, each held for 10 steps, to get somewhere."""
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randn(-(-steps // 10), *shape, generator=generator).clamp(-1, 1)
    return actions.repeat_interleave(10, dim=0)[:steps]


def agent_and_object(env, task):
    task_env = env.unwrapped
    agent = getattr(task_env, "left_agent", task_env.agent)
    return agent, getattr(task_env, OBJECTS[task])


class Hand:
    """Actions that move the hand of a single env, in the joint coordinates of its controller."""

    def __init__(self, env, agent):
        self.robot = agent.robot
        self.model = agent.robot.create_pinocchio_model()
        self.tip = agent.robot.links.index(agent.tcp)
        self.is_arm = np.arange(agent.robot.max_dof) < 7
        self.action_dim = env.action_space.shape[-1]
        self.grip = 1.0  # open

    def act(self, delta):
        action = torch.zeros(self.action_dim)
        action[:7] = torch.as_tensor(delta).clamp(-1, 1)
        action[7:8] = self.grip
        return action

    def joints_for(self, position, quaternion):
        """Inverse kinematics from here or nearby, within the joint limits."""
        goal = self.robot.pose.sp.inv() * sapien.Pose(position, quaternion)
        rng = np.random.default_rng(0)
        low, high = self.robot.qlimits[0].double().numpy().T
        for _ in range(50):
            start = self.robot.qpos[0].double().numpy()
            start = start + rng.uniform(-0.3, 0.3, self.robot.max_dof) * self.is_arm
            joints, found, _ = self.model.compute_inverse_kinematics(
                self.tip, goal, start, self.is_arm.astype(int), max_iterations=300
            )
            within_limits = (low <= joints) & (joints <= high)
            if found and within_limits[:7].all():
                break
        return joints

    def go(self, position, quaternion, steps, tolerance=0.008):
        joints = self.joints_for(position, quaternion)
        for _ in range(steps):
            error = torch.tensor(joints[:7]) - self.robot.qpos[0, :7]
            if error.abs().max() < tolerance:
                break
            yield self.act(25 * error)

    def wait(self, steps):
        return repeat(self.act(torch.zeros(7)), steps)


def manipulate(env, task):
    """Grasp the object, lift it, carry it, put it down, let go; PushT: push it about."""
    agent, manipulated = agent_and_object(env, task)
    hand = Hand(env, agent)
    start = manipulated.pose.sp.p
    hand_pose = agent.tcp.pose.sp
    if task == "PushT":
        for x, y in ((-0.12, 0), (0.12, 0), (0.12, 0.12), (-0.1, 0)):
            yield from hand.go(start + [x, y, 0.02 - start[2]], hand_pose.q, 25)
        return
    start[2] = max(start[2], 0.012)
    closing = closing_direction(task, manipulated, hand_pose)
    grasp = Panda.build_grasp_pose(np.array([0, 0, -1.0]), closing, start).q
    yield from hand.go(start + [0, 0, 0.08], grasp, 40)
    yield from hand.go(start, grasp, 25)
    hand.grip = -1.0
    yield from hand.wait(6)
    for move in ([0, 0, 0.12], [0.05, 0.08, 0.12], [0.05, 0.08, 0.03]):
        yield from hand.go(start + move, grasp, 20, 0.01)
    hand.grip = 1.0
    yield from hand.wait(8)


def closing_direction(task, manipulated, hand_pose):
    """The horizontal axis of the object along which the fingers turn least to close."""
    object_axes = manipulated.pose.sp.to_transformation_matrix()[:3, :3].T
    closing = hand_pose.to_transformation_matrix()[:3, 1]
    is_long = OBJECTS[task] in ("peg", "charger", "l_shape_tool")  # along x: not to grasp so
    best = None
    for i, axis in enumerate(object_axes):
        if abs(axis[2]) >= 0.3 or (is_long and i == 0):
            continue
        axis = axis * np.sign(axis @ closing)
        if best is None or axis @ closing > best @ closing:
            best = axis
    if best is None:
        best = closing
    best = best * [1, 1, 0]
    return best / np.linalg.norm(best)


def fingers(env, task):
    """Forces between fingers and object, in both orders, and whether it is grasped: (E, 13)"""
    scene = env.unwrapped.scene
    agent, manipulated = agent_and_object(env, task)
    forces = []
    if task == "PushT":  # it has a stick, no fingers
        for link in agent.robot.links:
            if link._bodies[0].collision_shapes:
                forces.append(scene.get_pairwise_contact_forces(link, manipulated))
        return torch.cat(forces, 1)
    both_fingers = (agent.finger1_link, agent.finger2_link)
    for finger in both_fingers:
        forces.append(scene.get_pairwise_contact_forces(finger, manipulated))
    for finger in both_fingers:
        forces.append(scene.get_pairwise_contact_forces(manipulated, finger))
    return torch.cat([*forces, agent.is_grasping(manipulated)[:, None]], 1)


def observe(env, task, obs, reward=None, terminated=None, truncated=None, info=None):
    """All that a step shows, as rows of one float64 tensor per name"""
    shown = {"obs": obs, "fingers": fingers(env, task)}
    if reward is not None:
        shown |= {"reward": reward, "terminated": terminated, "truncated": truncated}
    for name, value in (info or {}).items():
        if torch.is_tensor(value) and value.ndim > 0:  # PullCubeTool has means over envs
            shown[name] = value
    rows = {}
    for name, value in shown.items():
        rows[name] = torch.as_tensor(value).double().reshape(len(obs), -1).clone()
    return rows


def official_episodes(env, task, seed, actions):
    """One episode of STEPS in a single env and the beginning of the next one.

    -> what it shows, the actions it takes
    """
    shown = [observe(env, task, env.reset(seed=seed, options=NEW_SCENES)[0])]
    taken = []

    def play(actions):
        for action in actions:
            taken.append(action)
            shown.append(observe(env, task, *env.step(action[None])))

    stand_still = repeat(torch.zeros(env.action_space.shape[-1]))
    play(islice(chain(actions, stand_still), STEPS))
    shown.append(observe(env, task, env.reset()[0]))
    play(noise(MORE_STEPS, len(taken[0]), seed=seed))
    return shown, torch.stack(taken)


@pytest.mark.slow
@pytest.mark.parametrize("task", SOME_TASKS + OTHER_TASKS)
def test_equals_the_official_simulation(task):
    """Env 0 moves at random, env 1 grasps, past the time limit; no state is copied over."""
    official = make_official(task, max_episode_steps=STEPS)
    random_actions = noise(STEPS, official.action_space.shape[-1])
    shown_0, taken_0 = official_episodes(official, task, 5, random_actions)
    shown_1, taken_1 = official_episodes(official, task, 6, manipulate(official, task))
    official.close()
    shown = []
    for row_0, row_1 in zip(shown_0, shown_1, strict=True):
        names = [name for name in row_0 if name != "terminated"]
        shown.append({name: torch.cat([row_0[name], row_1[name]]) for name in names})

    envs = make(task, 2, ignore_terminations=True, max_episode_steps=STEPS)
    unseen = iter(shown)

    def check(*step):
        ours = observe(envs, task, *step)
        for name, theirs in next(unseen).items():
            difference = (ours[name] - theirs).abs().max()
            assert torch.equal(ours[name], theirs), (name, difference)

    check(envs.reset(seed=[5, 6], options=NEW_SCENES)[0])
    for t, action in enumerate(torch.stack([taken_0, taken_1], 1), start=1):
        obs, reward, terminated, truncated, info = envs.step(action)
        assert obs.dtype == reward.dtype == torch.float32
        if t == STEPS:  # autoreset
            final_obs = info["final_observation"]
            check(final_obs, reward, terminated, truncated, info["final_info"])
            check(obs)
        else:
            check(obs, reward, terminated, truncated, info)
    assert next(unseen, None) is None
    envs.close()
    forces = torch.stack([row["fingers"][1] for row in shown])
    if task == "PushT":
        assert (forces.norm(dim=1) > 0.5).sum() >= 5, "nothing was pushed"
    else:
        assert forces[:, -1].sum() >= 5, "nothing was grasped"


def reset_some(envs, which):
    return envs.reset(options={"env_idx": torch.tensor(which)})[0]


def rollout(envs, actions, reset_at=(), which=None):
    """-> obs, reward, state of all steps; environments `which` are reset before `reset_at`"""
    shown = []
    for t, action in enumerate(actions):
        if t in reset_at:
            reset_some(envs, which)
        obs, reward, *_ = envs.step(action)
        shown.append(torch.cat([obs, reward[:, None], envs.unwrapped.get_state()], 1).clone())
    return torch.stack(shown)


def task_tensors(envs):
    """Such as the first joint angles, which TwoRobotPickCube rewards keeping to"""
    tensors = {}
    for name, value in vars(envs.unwrapped).items():
        if torch.is_tensor(value) and value.shape[:1] == (envs.num_envs,):
            tensors[name] = value.clone()
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("task", ["StackCube", "TwoRobotPickCube", "RollBall", "PegInsertionSide"])
def test_a_partial_reset_touches_only_its_own_rows(task):
    envs = make(task)
    actions = noise(40, *envs.action_space.shape)
    envs.reset(seed=1, options=NEW_SCENES)
    whole = rollout(envs, actions)
    envs.reset(seed=1, options=NEW_SCENES)
    rollout(envs, actions[:20])
    systems = envs.unwrapped.scene.px.systems
    packs_before = [system.pack() for system in systems]
    state_before = envs.unwrapped.get_state().clone()
    tensors_before = task_tensors(envs)
    reset_some(envs, [1])
    packs_after = [system.pack() for system in systems]
    state_after = envs.unwrapped.get_state()
    equal_packs = [a == b for a, b in zip(packs_before, packs_after, strict=True)]
    assert equal_packs == [True, False, True]
    assert (state_before == state_after).all(1).tolist() == [True, False, True]
    for name, after in task_tensors(envs).items():
        assert torch.equal(tensors_before[name][[0, 2]], after[[0, 2]])
    envs.reset(seed=1, options=NEW_SCENES)
    parted = rollout(envs, actions, reset_at={20, 23}, which=[1])
    assert torch.equal(parted[:, [0, 2]], whole[:, [0, 2]]), "other environments went on otherwise"
    assert not torch.equal(parted[20, 1], whole[20, 1])
    envs.close()


def test_a_partial_reset_leaves_the_goals_of_others_alone():
    """PlugCharger computes the goals of all environments whenever one of them starts."""
    envs = make("PlugCharger")
    envs.reset(seed=1)
    envs.unwrapped.goal_pose.raw_pose += 1  # so that a goal that is computed again is seen
    before = envs.unwrapped.goal_pose.raw_pose.clone()
    reset_some(envs, [1])
    after = envs.unwrapped.goal_pose.raw_pose
    assert (before == after).all(1).tolist() == [True, False, True]
    envs.close()


@pytest.mark.slow
def test_seeds_reproduce_and_envs_differ():
    envs = make("StackCube", max_episode_steps=8)
    actions = noise(30, *envs.action_space.shape)
    runs = []
    for seed, global_seed in ((3, 0), (3, 1), (4, 0)):
        first, _ = envs.reset(seed=seed, options=NEW_SCENES)
        torch.manual_seed(global_seed)
        later = rollout(envs, actions)[..., : first.shape[1]]
        runs.append(torch.cat([first[None], later]))
    assert torch.equal(runs[0], runs[1]), "same seed, other trajectory"
    # first observations of episodes
    starts = torch.cat([runs[0][::8].flatten(0, 1), runs[2][::8].flatten(0, 1)])
    assert len(starts.unique(dim=0)) == len(starts) == 24, "two episodes started alike"
    generator = torch.manual_seed(123).get_state()
    envs.reset()
    assert torch.equal(generator, torch.get_rng_state()), "a reset drew from the global generator"
    envs.close()


def test_every_environment_has_its_own_stream():
    """The k-th episode of an environment starts in the same way, whatever the others do."""
    envs = make("PickCube")

    def starts(which, times):
        """Robot and cube draw from different generators."""
        rows = []
        for _ in range(times):
            obs = reset_some(envs, which)
            rows.append(torch.cat([obs[which], envs.unwrapped.cube.pose.p[which]], 1))
        return torch.stack(rows)

    envs.reset(seed=[1, 2, 3])
    together = starts([0, 1, 2], 3)
    envs.reset(seed=[1, 2, 3])
    apart = {i: starts([i], 3)[:, 0] for i in (2, 0, 1)}
    assert torch.equal(torch.stack([apart[0], apart[1], apart[2]], 1), together)
    for part in (together[..., :7], together[..., -3:-1]):
        assert len(part.flatten(0, 1).unique(dim=0)) == 9, "two episodes started alike"
    envs.close()


def test_every_environment_has_a_floor():
    envs = make("PickCube")
    envs.reset(seed=0)
    cube = envs.unwrapped.cube
    scene = envs.unwrapped.scene
    cube.set_pose(sapien.Pose([2.0, 0, -0.8]))  # beside the table, 0.1 above the floor
    scene._gpu_apply_all()
    scene._gpu_fetch_all()
    for action in torch.zeros(20, *envs.action_space.shape):
        envs.step(action)
    assert torch.allclose(cube.pose.p[:, 2], torch.tensor(0.02 - 0.9196), atol=1e-3)
    envs.close()


def test_a_single_joint_has_a_row_per_environment():
    """MS-CartpoleBalance-v1 rewards the angle of its hinge."""
    envs = make("PickCube")
    envs.reset(seed=0)
    for action in noise(5, *envs.action_space.shape):
        envs.step(action)
    robot = envs.unwrapped.agent.robot
    for i, joint in enumerate(robot.active_joints):
        assert torch.equal(joint.qpos, robot.qpos[:, i])
        assert torch.equal(joint.qvel, robot.qvel[:, i])
    assert len(robot.qpos[:, 0].unique()) == 3
    envs.close()


def test_final_observation():
    """What an env without autoreset shows at that step, not the next episode's first one."""
    envs = make("PushCube", max_episode_steps=12)
    actions = noise(12, *envs.action_space.shape)

    def last_step(auto_reset):
        envs.auto_reset = auto_reset
        envs.reset(seed=9, options=NEW_SCENES)
        for action in actions:
            step = envs.step(action)
        return step

    first, _, _, truncated, info = last_step(auto_reset=True)
    final = info["final_observation"]
    episode = info["final_info"]["episode"]
    assert info["_final_observation"].all()
    assert info["_final_info"].all()
    assert truncated.all()
    assert set(episode) >= {"success_once", "return", "episode_len"}
    assert (episode["episode_len"] == 12).all()
    expected = last_step(auto_reset=False)[0]
    assert torch.equal(final, expected)
    assert (final != first).any(1).all()
    envs.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_does_not_grow():
    """20,000 env steps with many resets. 10 MB are 500 bytes per step: a kept observation or
    contact list takes more, while the allocator's own ups and downs stay within 2 or 3 MB."""
    # 2 substeps instead of 5, for speed
    envs = make("PickCube", 16, max_episode_steps=20, sim_config={"sim_freq": 40})
    used = []
    envs.reset(seed=0)
    for t, action in enumerate(noise(1400, 16, 8)):
        envs.step(action)
        if t in (149, 1399):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            used.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert used[1] - used[0] < 10e6
    envs.close()


@pytest.mark.slow
def test_works_without_a_vulkan_driver():
    code = """if True:
        from simulators import maniskill_cpu
        envs = maniskill_cpu.make('PushT-v1', 2)
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        assert not maniskill_cpu.has_render_device()
        print('ran')
    """
    hidden = {
        "VK_ICD_FILENAMES": "/nowhere.json",
        "VK_DRIVER_FILES": "/nowhere.json",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | hidden,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "ran" in run.stdout, run.stderr


def test_rendering_is_stubbed_only_without_a_device(monkeypatch):
    class Material:  # in the place of SAPIEN's, which may be stubbed already
        works = True

        def __init__(self):
            if not self.works:
                raise RuntimeError("failed to find a rendering device")

    class Texture:
        pass

    for module in (sapien.render, sapien.pysapien.render):
        monkeypatch.setattr(module, "RenderMaterial", Material)
        monkeypatch.setattr(module, "RenderTexture2D", Texture)
    maniskill_cpu.install()
    assert maniskill_cpu.has_render_device()
    assert sapien.render.RenderMaterial is Material
    Material.works = False
    maniskill_cpu.install()
    assert not maniskill_cpu.has_render_device()
    assert sapien.render.RenderMaterial is maniskill_cpu.NoMaterial


def test_install_twice_is_install_once():
    def replaced():
        return (
            maniskill_cpu.sapien_env.parse_sim_and_render_backend,
            maniskill_cpu.sapien_env.BaseEnv._setup_scene,
            maniskill_cpu.WhiteTableSceneBuilder.build,
        )

    before = replaced()
    maniskill_cpu.install()
    assert before == replaced()


def test_refuses_to_render():
    with pytest.raises(ValueError, match="cannot render"):
        make("PickCube", render_backend="cpu")


def assert_same(ours, theirs):
    """Tensors, or dicts of them"""
    if isinstance(ours, dict):
        assert ours.keys() - {"reconfigure"} == theirs.keys() - {"reconfigure"}
        for name in theirs:
            assert_same(ours[name], theirs[name])
    else:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, ignore_terminations", [("TwoRobotPickCube", False), ("PushCube", True)]
)
def test_other_versions_are_refused_and_the_fallback_is_alike(
    task, ignore_terminations, monkeypatch, capsys
):
    settings = dict(num_envs=2, ignore_terminations=ignore_terminations, max_episode_steps=9)
    batched = make(task, **settings)
    monkeypatch.setattr(maniskill_cpu, "version", lambda name: "3.9")
    sentence = "mani_skill 3.0.1 and sapien 3.0.3, but mani_skill 3.9 and sapien 3.9"
    with pytest.raises(RuntimeError, match=sentence):
        maniskill_cpu.install()
    capsys.readouterr()
    separate = make(task, **settings)
    assert capsys.readouterr().out.count("needs mani_skill 3.0.1") == 1
    assert isinstance(separate.unwrapped, maniskill_cpu.SeparateEnvs)
    assert not isinstance(batched.unwrapped, gym.Wrapper)
    assert batched.max_episode_steps == separate.max_episode_steps == 9
    assert batched.action_space == separate.action_space
    assert batched.single_action_space == separate.single_action_space
    assert batched.observation_space == separate.observation_space
    assert batched.single_observation_space == separate.single_observation_space

    def compare(function):
        for ours, theirs in zip(function(batched), function(separate), strict=True):
            assert_same(ours, theirs)

    def compare_steps(actions):
        for action in actions:
            compare(lambda envs, action=action: envs.step(action.clone()))

    actions = noise(25, *batched.action_space.shape)
    for seed in (3, [8, 9]):
        compare(lambda envs, seed=seed: envs.reset(seed=seed))
        compare_steps(actions[:4])
        compare(lambda envs: envs.reset(options={"env_idx": torch.tensor([1])}))
        # across the time limit, at which the two environments do not arrive together
        compare_steps(actions)
    batched.close()
    separate.close()


def test_actions_must_be_finite():
    envs = make("PickCube", 2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="finite"):
        envs.step(torch.tensor([[0.0], [torch.nan]]).expand(2, 8))
    envs.close()


def test_speed_comparison_runs(capsys):
    maniskill_cpu.compare_speed("PickCube-v1", 2, 1, rounds=1, steps=2)
    assert "times as many" in capsys.readouterr().out
