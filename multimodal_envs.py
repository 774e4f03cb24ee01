"""Two ManiSkill tasks with two equally good solutions: the multimodal tasks of the TruDi paper.

    python trudi_maniskill.py --env-module multimodal_envs --env-id StackCube-Train-v1
    python trudi_maniskill.py --evaluate runs/FOLDER --eval-env-id StackCube-Test-v1 \\
        --eval-episodes 200

StackCube: put the red cube on the blue one, or the blue cube on the red one. PushT: turn a T by
half a turn, clockwise or counterclockwise. The Train tasks start at random. The Test tasks always
start in the same, symmetric state, so that only the policy decides which way to go.

`info["mode"]` names the way that was taken, -1 where none was. Scripts that find it report how
evenly the successes are spread over the ways. docs/multimodal.md lists where the paper is silent.
"""

import math

import numpy as np
import sapien
import torch
from mani_skill.envs.tasks.tabletop.push_t import PushTEnv
from mani_skill.envs.tasks.tabletop.stack_cube import StackCubeEnv
from mani_skill.envs.utils import randomization
from mani_skill.utils import common
from mani_skill.utils.building import actors
from mani_skill.utils.registration import register_env
from mani_skill.utils.scene_builder.table import TableSceneBuilder
from mani_skill.utils.structs import Pose

HALF_CUBE = 0.02
CUBE = 0.04


# === 1. StackCube ===
def stacking_reward(top, bottom, is_grasped, is_stacked, is_success, gripper_opening, tcp):
    """Five stages of putting the cube `top` on the cube `bottom`, at most 8. -> (B,)"""
    reach = 2 * (1 - torch.tanh(5 * torch.linalg.norm(tcp - top.pose.p, dim=1)))
    above_bottom = bottom.pose.p + torch.tensor([0, 0, CUBE], device=tcp.device)
    place = 1 - torch.tanh(5 * torch.linalg.norm(above_bottom - top.pose.p, dim=1))
    let_go = torch.where(is_grasped, gripper_opening, 1.0)
    speed = torch.linalg.norm(top.linear_velocity, dim=1)
    turning = torch.linalg.norm(top.angular_velocity, dim=1)
    stand_still = 1 - torch.tanh(10 * speed + turning)
    reward = torch.where(is_grasped, 4 + place, reach)
    reward = torch.where(is_stacked, 6 + (let_go + stand_still) / 2, reward)
    return torch.where(is_success, 8.0, reward)


@register_env("StackCube-Train-v1", max_episode_steps=100)
class StackCubeTrain(StackCubeEnv):
    """Both cubes start anywhere on the table. The better of the two orders is rewarded."""

    def _load_scene(self, options):
        self.cube_half_size = common.to_tensor([HALF_CUBE] * 3, device=self.device)
        self.table_scene = TableSceneBuilder(self, self.robot_init_qpos_noise)
        self.table_scene.build()
        self.cubeA = self.build_cube("red", [1, 0, 0, 1], y=-0.1)
        self.cubeB = self.build_cube("blue", [0, 0, 1, 1], y=0.1)

    def build_cube(self, name, color, y):
        pose = sapien.Pose([0, y, HALF_CUBE])
        return actors.build_cube(self.scene, HALF_CUBE, color, name, initial_pose=pose)

    def _initialize_episode(self, env_idx, options):
        with torch.device(self.device):
            self.table_scene.initialize(env_idx)
            bounds = [[-0.1, -0.4], [0.1, 0.4]]
            sampler = randomization.UniformPlacementSampler(
                bounds, batch_size=len(env_idx), device=self.device
            )
            for cube in (self.cubeA, self.cubeB):
                position = torch.full((len(env_idx), 3), HALF_CUBE)
                position[:, :2] = sampler.sample(math.sqrt(2) * HALF_CUBE + 0.001, 100)
                rotation = randomization.random_quaternions(
                    len(env_idx), lock_x=True, lock_y=True, lock_z=False
                )
                cube.set_pose(Pose.create_from_pq(position, rotation))

    def order_of(self, top, bottom):
        """-> is `top` grasped, is it on `bottom`, is it also still and let go, each (B,)"""
        offset = top.pose.p - bottom.pose.p
        is_above = torch.linalg.norm(offset[:, :2], dim=1) <= math.sqrt(2) * HALF_CUBE + 0.005
        is_stacked = is_above & ((offset[:, 2] - CUBE).abs() <= 0.005)
        is_grasped = self.agent.is_grasping(top)
        is_still = top.is_static(lin_thresh=1e-2, ang_thresh=0.5)
        return is_grasped, is_stacked, is_stacked & is_still & ~is_grasped

    def evaluate(self):
        red_grasped, red_on_blue, red_success = self.order_of(self.cubeA, self.cubeB)
        blue_grasped, blue_on_red, blue_success = self.order_of(self.cubeB, self.cubeA)
        height = self.cubeB.pose.p[:, 2] - self.cubeA.pose.p[:, 2]
        mode = torch.full_like(height, -1, dtype=torch.int64)
        mode[height > HALF_CUBE] = 0  # blue on red
        mode[height < -HALF_CUBE] = 1  # red on blue
        return {
            "is_red_grasped": red_grasped,
            "is_red_on_blue": red_on_blue,
            "is_red_success": red_success,
            "is_blue_grasped": blue_grasped,
            "is_blue_on_red": blue_on_red,
            "is_blue_success": blue_success,
            "success": red_success | blue_success,
            "mode": mode,
        }

    def compute_dense_reward(self, obs, action, info):
        """The larger of two rewards that differ in the names of the cubes only."""
        tcp = self.agent.tcp.pose.p
        fingers = self.agent.robot.get_qpos()[:, -2:].sum(dim=1)
        opening = fingers / (2 * self.agent.robot.get_qlimits()[0, -1, 1].to(self.device))
        red, blue = self.cubeA, self.cubeB
        states = [info[f"is_red_{name}"] for name in ("grasped", "on_blue", "success")]
        red_on_blue = stacking_reward(red, blue, *states, opening, tcp)
        states = [info[f"is_blue_{name}"] for name in ("grasped", "on_red", "success")]
        blue_on_red = stacking_reward(blue, red, *states, opening, tcp)
        return torch.maximum(red_on_blue, blue_on_red)


@register_env("StackCube-Test-v1", max_episode_steps=100)
class StackCubeTest(StackCubeTrain):
    """Always the same start: red far to one side, blue far to the other."""

    def __init__(self, *args, robot_init_qpos_noise=0.0, **kwargs):
        super().__init__(*args, robot_init_qpos_noise=robot_init_qpos_noise, **kwargs)

    def _initialize_episode(self, env_idx, options):
        with torch.device(self.device):
            self.table_scene.initialize(env_idx)
            for cube, y in ((self.cubeA, -0.35), (self.cubeB, 0.35)):
                position = torch.tensor([0, y, HALF_CUBE]).repeat(len(env_idx), 1)
                cube.set_pose(Pose.create_from_pq(position))


# === 2. PushT ===
def half_turns(angle):
    """The angle in [-pi, pi)"""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def rotation_of(quaternion):
    """Rotation about the vertical axis of quaternions (B, 4). -> (B,)"""
    return 2 * torch.atan2(quaternion[:, 3], quaternion[:, 0])


def quaternion_of(angle):
    zero = torch.zeros_like(angle)
    return torch.stack([(angle / 2).cos(), zero, zero, (angle / 2).sin()], dim=1)


@register_env("PushT-Train-v1", max_episode_steps=200)
class PushTTrain(PushTEnv):
    """Block and goal lie anywhere in the workspace, with any rotation."""

    low = (-0.3, -0.3)
    high = (0.1, 0.2)
    block_height = 0.021

    def _load_scene(self, options):
        super()._load_scene(options)
        self.world_to_goal_trans = torch.eye(3, device=self.device).repeat(self.num_envs, 1, 1)
        self.last_rotation = torch.zeros(self.num_envs, device=self.device)
        self.turned = torch.zeros(self.num_envs, device=self.device)

    def draw_places(self, count):
        """Positions (B, 2) and rotations (B,)"""
        low = torch.tensor(self.low)
        position = low + (torch.tensor(self.high) - low) * torch.rand(count, 2)
        return position, 2 * math.pi * torch.rand(count)

    def _initialize_episode(self, env_idx, options):
        with torch.device(self.device):
            self.table_scene.initialize(env_idx)
            self.put(self.goal_tee, 1e-3, *self.draw_places(len(env_idx)))
            self.put(self.tee, self.block_height, *self.draw_places(len(env_idx)))
            self.start_episode(env_idx)

    def put(self, tee, height, position, rotation):
        heights = torch.full_like(rotation, height)[:, None]
        position = torch.cat([position, heights], dim=1)
        tee.set_pose(Pose.create_from_pq(position, quaternion_of(rotation)))

    def start_episode(self, env_idx):
        """What the overlap with the goal and the classification of the way need."""
        rotation = rotation_of(self.goal_tee.pose.q[env_idx])
        goal_to_world = torch.zeros(len(env_idx), 3, 3)
        goal_to_world[:, 0, 0] = rotation.cos()
        goal_to_world[:, 0, 1] = -rotation.sin()
        goal_to_world[:, 1, 0] = rotation.sin()
        goal_to_world[:, 1, 1] = rotation.cos()
        goal_to_world[:, :2, 2] = self.goal_tee.pose.p[env_idx, :2]
        goal_to_world[:, 2, 2] = 1
        self.world_to_goal_trans[env_idx] = torch.linalg.inv(goal_to_world)
        self.last_rotation[env_idx] = rotation_of(self.tee.pose.q[env_idx])
        self.turned[env_idx] = 0
        beside_the_table = torch.tensor([self.ee_starting_pos2D.tolist()]).repeat(len(env_idx), 1)
        self.ee_goal_pos.set_pose(Pose.create_from_pq(beside_the_table))

    def evaluate(self):
        rotation = rotation_of(self.tee.pose.q)
        # turns are added up: after half a turn either way the block lies in the same place
        self.turned += half_turns(rotation - self.last_rotation)
        self.last_rotation = rotation
        mode = torch.full_like(self.turned, -1, dtype=torch.int64)
        mode[self.turned > math.pi / 2] = 0  # counterclockwise
        mode[self.turned < -math.pi / 2] = 1  # clockwise
        success = self.pseudo_render_intersection() >= self.intersection_thresh
        return {"success": success, "mode": mode, "turned": self.turned.clone()}

    def _get_obs_extra(self, info):
        obs = {"tcp_pose": self.agent.tcp.pose.raw_pose}
        if self.obs_mode_struct.use_state:
            obs["goal_pose"] = self.goal_tee.pose.raw_pose
            obs["obj_pose"] = self.tee.pose.raw_pose
        return obs

    def compute_dense_reward(self, obs, action, info):
        block = self.tee.pose
        goal = self.goal_tee.pose
        cosine = (rotation_of(block.q) - rotation_of(goal.q)).cos()
        turn = ((cosine + 1) / 2).square() / 2
        distance = torch.linalg.norm(block.p[:, :2] - goal.p[:, :2], dim=1)
        place = (1 - torch.tanh(5 * distance)).square() / 2
        tcp_distance = torch.linalg.norm(block.p - self.agent.tcp.pose.p, dim=1)
        guidance = (1 - torch.tanh(5 * tcp_distance)).sqrt() / 20
        return torch.where(info["success"], 3.0, turn + place + guidance)


@register_env("PushT-Test-v1", max_episode_steps=200)
class PushTTest(PushTTrain):
    """The goal in the middle of the workspace, the block on it, turned by half a turn."""

    def __init__(self, *args, robot_init_qpos_noise=0.0, **kwargs):
        super().__init__(*args, robot_init_qpos_noise=robot_init_qpos_noise, **kwargs)

    def _initialize_episode(self, env_idx, options):
        with torch.device(self.device):
            self.table_scene.initialize(env_idx)
            middle = torch.tensor(np.add(self.low, self.high) / 2, dtype=torch.float32)
            middle = middle.repeat(len(env_idx), 1)
            rotation = torch.zeros(len(env_idx))
            self.put(self.goal_tee, 1e-3, middle, rotation)
            self.put(self.tee, self.block_height, middle, rotation + math.pi)
            self.start_episode(env_idx)
