"""multimodal_envs.py: rewards by the paper's formulas, symmetry, and which way was taken."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

missing = "ManiSkill is missing: pip install -r requirements-maniskill.txt"
pytest.importorskip("mani_skill", reason=missing)
from mani_skill.utils.structs import Pose  # noqa: E402
from test_maniskill_cpu import Hand, make, make_official  # noqa: E402

import multimodal_envs  # noqa: E402
from multimodal_envs import PushTTrain, StackCubeTrain, half_turns, rotation_of  # noqa: E402
from simulators import maniskill_cpu  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def backend():
    maniskill_cpu.install()


def body(position, quaternion=None, velocity=None, spin=None):
    """What the rewards ask a cube or a T for"""
    zero = torch.zeros_like(position)
    quaternion = torch.zeros(len(position), 4) if quaternion is None else quaternion
    return SimpleNamespace(
        pose=SimpleNamespace(p=position, q=quaternion),
        linear_velocity=zero if velocity is None else velocity,
        angular_velocity=zero if spin is None else spin,
        is_static=lambda lin_thresh, ang_thresh: still(velocity, spin, lin_thresh, ang_thresh),
    )


def still(velocity, spin, most_speed, most_spin):
    slow = torch.linalg.norm(velocity, dim=1) <= most_speed
    return slow & (torch.linalg.norm(spin, dim=1) <= most_spin)


# === StackCube ===
def stack_task(red, blue, grasped, tcp, fingers):
    """A task in these states; grasped: 0 nothing, 1 the red cube, 2 the blue one"""
    robot = SimpleNamespace(
        get_qpos=lambda: torch.cat([torch.zeros(len(tcp), 7), fingers], dim=1),
        get_qlimits=lambda: torch.tensor([[[0.0, 0.04]]]),
    )
    agent = SimpleNamespace(
        tcp=SimpleNamespace(pose=SimpleNamespace(p=tcp)),
        robot=robot,
        is_grasping=lambda cube: grasped == (1 if cube is red else 2),
    )
    task = SimpleNamespace(cubeA=red, cubeB=blue, agent=agent, device=torch.device("cpu"))
    task.order_of = lambda top, bottom: StackCubeTrain.order_of(task, top, bottom)
    return task


def random_stack_states(count):
    """Cubes apart, one above the other, and exactly stacked; moving and still"""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    low = torch.cat([0.1 * draw(count, 2), torch.full((count, 1), 0.02)], dim=1)
    case = torch.arange(count) % 4
    above = low + torch.tensor([0.0, 0.0, 0.04]) + 0.001 * draw(count, 3)
    apart = torch.cat([0.2 * draw(count, 2), 0.02 + 0.05 * draw(count, 1).abs()], dim=1)
    high = torch.where((case < 2)[:, None], apart, above)
    speeds = [(0.002 * draw(count, 3), 0.1 * draw(count, 3)) for _ in range(2)]
    speeds[0][0][case == 3] += 0.3
    cubes = [body(low, None, *speeds[0]), body(high, None, *speeds[1])]
    grasped = torch.randint(3, (count,), generator=generator)
    tcp = high + 0.05 * draw(count, 3)
    return cubes, grasped, tcp, 0.04 * torch.rand(count, 2, generator=generator)


def reward_by_hand(top, bottom, is_grasped, tcp, opening):
    """One order in one state, in plain numbers. -> reward, success"""
    offset = top["p"] - bottom["p"]
    reward = 2 * (1 - math.tanh(5 * np.linalg.norm(tcp - top["p"])))
    if is_grasped:
        goal = bottom["p"] + [0, 0, 0.04]
        reward = 4 + 1 - math.tanh(5 * np.linalg.norm(goal - top["p"]))
    horizontal = np.hypot(offset[0], offset[1])
    if horizontal <= math.hypot(0.02, 0.02) + 0.005 and abs(offset[2] - 0.04) <= 0.005:
        speed = np.linalg.norm(top["v"])
        spin = np.linalg.norm(top["w"])
        let_go = opening if is_grasped else 1
        reward = 6 + (let_go + 1 - math.tanh(10 * speed + spin)) / 2
        if speed <= 0.01 and spin <= 0.5 and not is_grasped:
            return 8, True
    return reward, False


def row(cube, i):
    return {
        "p": cube.pose.p[i].double().numpy(),
        "v": cube.linear_velocity[i].double().numpy(),
        "w": cube.angular_velocity[i].double().numpy(),
    }


def test_stack_rewards_by_hand():
    count = 200
    (red, blue), grasped, tcp, fingers = random_stack_states(count)
    task = stack_task(red, blue, grasped, tcp, fingers)
    info = StackCubeTrain.evaluate(task)
    reward = StackCubeTrain.compute_dense_reward(task, None, None, info)
    num_successes = 0
    for i in range(count):
        opening = float(fingers[i].sum() / 0.08)
        point = tcp[i].double().numpy()
        one = reward_by_hand(row(red, i), row(blue, i), grasped[i] == 1, point, opening)
        other = reward_by_hand(row(blue, i), row(red, i), grasped[i] == 2, point, opening)
        assert reward[i].item() == pytest.approx(max(one[0], other[0]), abs=1e-5)
        assert bool(info["success"][i]) == (one[1] or other[1])
        num_successes += one[1] or other[1]
    assert 10 < num_successes < count / 2
    assert reward.max() == 8


def test_stack_rewards_are_symmetric():
    """Red for blue: the same rewards to the bit, the other mode."""
    (red, blue), grasped, tcp, fingers = random_stack_states(200)
    task = stack_task(red, blue, grasped, tcp, fingers)
    info = StackCubeTrain.evaluate(task)
    reward = StackCubeTrain.compute_dense_reward(task, None, None, info)
    swapped_grasps = torch.tensor([0, 2, 1])[grasped]
    swapped = stack_task(blue, red, swapped_grasps, tcp, fingers)
    swapped_info = StackCubeTrain.evaluate(swapped)
    assert torch.equal(
        StackCubeTrain.compute_dense_reward(swapped, None, None, swapped_info), reward
    )
    assert torch.equal(swapped_info["success"], info["success"])
    mirrored = torch.tensor([1, 0, -1])[info["mode"]]
    assert torch.equal(swapped_info["mode"], mirrored)
    assert set(info["mode"].tolist()) == {-1, 0, 1} or set(info["mode"].tolist()) == {-1, 0}


def stack(env, top, bottom):
    """Actions that put one cube on the other and let go."""
    task = env.unwrapped
    hand = Hand(env, task.agent)
    down = task.agent.tcp.pose.sp.q
    start = top.pose.sp.p
    goal = bottom.pose.sp.p + [0, 0, 0.042]
    yield from hand.go(start + [0, 0, 0.1], down, 30, tolerance=0.05)
    yield from hand.go(start, down, 20)
    hand.grip = -1.0
    yield from hand.wait(3)
    yield from hand.go(start + [0, 0, 0.12], down, 20, tolerance=0.05)
    yield from hand.go(goal + [0, 0, 0.08], down, 40, tolerance=0.03)
    yield from hand.go(goal, down, 20)
    hand.grip = 1.0
    yield from hand.wait(4)


@pytest.mark.parametrize("mode", [0, 1])
def test_stacking_both_ways(mode):
    """From the start of the test task, by a scripted hand."""
    env = make_official("StackCube-Test", 200)
    obs, _ = env.reset(seed=1)
    task = env.unwrapped
    assert_close(task.cubeA.pose.p[0], torch.tensor([0, -0.35, 0.02]), atol=1e-6, rtol=0)
    assert_close(task.cubeB.pose.p[0], torch.tensor([0, 0.35, 0.02]), atol=1e-6, rtol=0)
    top, bottom = (task.cubeB, task.cubeA) if mode == 0 else (task.cubeA, task.cubeB)
    modes = []
    for action in stack(env, top, bottom):
        _, reward, _, _, info = env.step(action)
        modes.append(int(info["mode"]))
    assert bool(info["success"])
    assert modes[0] == -1
    assert modes[-1] == mode
    assert float(reward) == 1.0


# === PushT ===
def push_task(block, goal, tcp):
    agent = SimpleNamespace(tcp=SimpleNamespace(pose=SimpleNamespace(p=tcp)))
    return SimpleNamespace(tee=block, goal_tee=goal, agent=agent)


def random_push_states(count):
    generator = torch.Generator().manual_seed(0)
    places = []
    for height in (0.021, 0.001):
        position = 0.2 * torch.randn(count, 3, generator=generator)
        position[:, 2] = height
        angle = 4 * math.pi * torch.rand(count, generator=generator) - 2 * math.pi
        places.append((position, angle))
    tcp = places[0][0] + 0.1 * torch.randn(count, 3, generator=generator)
    return places, tcp


def push_reward(places, tcp):
    bodies = [body(p, multimodal_envs.quaternion_of(angle)) for p, angle in places]
    info = {"success": torch.zeros(len(tcp), dtype=torch.bool)}
    return PushTTrain.compute_dense_reward(push_task(*bodies, tcp), None, None, info)


def test_push_rewards_by_hand():
    places, tcp = random_push_states(100)
    reward = push_reward(places, tcp)
    (block, block_angle), (goal, goal_angle) = places
    for i in range(100):
        turn = 0.5 * ((math.cos(block_angle[i] - goal_angle[i]) + 1) / 2) ** 2
        distance = math.dist(block[i, :2], goal[i, :2])
        place = 0.5 * (1 - math.tanh(5 * distance)) ** 2
        guidance = math.sqrt(1 - math.tanh(5 * math.dist(tcp[i], block[i]))) / 20
        assert reward[i].item() == pytest.approx(turn + place + guidance, abs=1e-5)


def test_push_rewards_are_symmetric():
    """A mirror that turns clockwise into counterclockwise"""
    places, tcp = random_push_states(100)
    flip = torch.tensor([1.0, -1.0, 1.0])
    mirrored = [(position * flip, -angle) for position, angle in places]
    assert_close(push_reward(mirrored, tcp * flip), push_reward(places, tcp))


def test_angles():
    angle = torch.linspace(-10, 10, 201)
    assert (half_turns(angle) >= -math.pi).all()
    assert (half_turns(angle) < math.pi).all()
    assert_close(half_turns(angle).cos(), angle.cos(), atol=1e-5, rtol=0)
    quaternion = multimodal_envs.quaternion_of(angle)
    assert_close(rotation_of(quaternion).sin(), angle.sin(), atol=1e-5, rtol=0)
    assert_close(rotation_of(-quaternion).cos(), angle.cos(), atol=1e-5, rtol=0)


def test_turning_both_ways():
    """Environment 0 turns left by half a turn, 1 right, 2 left and back, 3 hardly at all."""
    envs = make("PushT-Test", num_envs=4)
    envs.reset(seed=0)
    task = envs.unwrapped
    start = task.tee.pose.p.clone()
    assert_close(start[:, :2], torch.tensor([-0.1, -0.05]).expand(4, 2), atol=1e-6, rtol=0)
    steps = 40
    for step in range(1, steps + 1):
        share = step / steps
        back_and_forth = math.sin(math.pi * share)
        turns = torch.tensor([share, -share, 0.9 * back_and_forth, 0.3 * share]) * math.pi
        quaternion = multimodal_envs.quaternion_of(math.pi + turns)
        task.tee.set_pose(Pose.create_from_pq(start, quaternion))
        info = task.evaluate()
    assert_close(info["turned"], torch.tensor([1.0, -1.0, 0.0, 0.3]) * math.pi, atol=1e-4, rtol=0)
    assert info["mode"].tolist() == [0, 1, -1, -1]
    assert info["success"].tolist() == [True, True, False, False]
    reward = task.compute_dense_reward(None, None, info)
    assert reward[:2].tolist() == [3, 3]


# === Starts ===
@pytest.mark.parametrize("task", ["StackCube-Test", "PushT-Test"])
def test_test_tasks_start_in_one_state(task):
    envs = make(task, num_envs=3)
    first, _ = envs.reset(seed=0)
    second, _ = envs.reset(seed=5)
    assert torch.equal(first, second)
    assert torch.equal(first[0], first[1])


def test_training_starts_cover_their_ranges():
    envs = make("StackCube-Train", num_envs=32)
    envs.reset(seed=0)
    cubes = [envs.unwrapped.cubeA.pose.p, envs.unwrapped.cubeB.pose.p]
    for position in cubes:
        assert (position[:, 0].abs() <= 0.1).all()
        assert (position[:, 1].abs() <= 0.4).all()
        assert position[:, 1].max() > 0.3
        assert position[:, 1].min() < -0.3
    assert torch.linalg.norm(cubes[0] - cubes[1], dim=1).min() > 0.04
    envs = make("PushT-Train", num_envs=32)
    envs.reset(seed=0)
    for tee in (envs.unwrapped.tee, envs.unwrapped.goal_tee):
        low = tee.pose.p.min(dim=0).values
        high = tee.pose.p.max(dim=0).values
        assert (low[:2] >= torch.tensor([-0.3, -0.3])).all()
        assert (high[:2] <= torch.tensor([0.1, 0.2])).all()
        assert (high[:2] - low[:2] > torch.tensor([0.3, 0.4])).all()


def test_the_goal_is_where_the_overlap_is_whole():
    """A block that lies on a goal of any rotation covers it."""
    envs = make("PushT-Train", num_envs=8)
    envs.reset(seed=3)
    task = envs.unwrapped
    position = task.goal_tee.pose.p.clone()
    position[:, 2] = task.block_height
    task.tee.set_pose(Pose.create_from_pq(position, task.goal_tee.pose.q))
    assert task.evaluate()["success"].all()
    position[:, 0] += 0.03
    task.tee.set_pose(Pose.create_from_pq(position, task.goal_tee.pose.q))
    assert not task.evaluate()["success"].any()
