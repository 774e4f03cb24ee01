"""Comfort for a run that a person watches; a script that was copied alone does without it.

Display           the progress line, curve.png, Ctrl-C and SIGTERM, Weights & Biases
unused, lock      a run's folder belongs to one process
check_*           refuse what would fail later, or in a way that is hard to understand
describe_machine  versions and commit for args.json
free_cores        how many cores nobody uses
close_ids         what the user may have meant by an unknown environment id
bench             where the time of an iteration goes
"""

import contextlib
import csv
import difflib
import fcntl
import importlib.metadata
import inspect
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

PACKAGES = ("torch", "numpy", "gymnasium", "envpool", "mujoco", "mani-skill", "sapien")
PACKAGES += ("playground", "mujoco-mjx", "jax", "humanoid_bench", "dm-control")
PACKAGES += ("isaaclab", "mjlab", "warp-lang")


class Display:
    """What a person sees of a run while it trains."""

    def __init__(self, run_dir, args, progress, total_timesteps):
        drop_rows_after(run_dir / "metrics.csv", progress["step"])
        self.run_dir = run_dir
        self.args = args
        self.total = total_timesteps
        self.newest = {"charts/episode_return": "-", "eval/return": "-"}
        self.nonfinite = progress["nonfinite"]  # non-finite steps up to the last row
        self.stop_signal = 0  # number of the signal that asks the run to end
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
                signal.signal(number, self.receive)
        sys.excepthook = self.explain
        self.say(f"settings other than the defaults for a GPU: {changed_settings(args)}")
        self.wandb = None
        if args.track:
            self.wandb = start_tracking(run_dir, args)

    def receive(self, number, frame):
        self.stop_signal = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once
        name = signal.Signals(number).name
        saved = f"the last checkpoint is {self.run_dir}/checkpoint.pt"
        sentence = f"\n{name}: stopping after this iteration; {saved}\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(sys.stderr.fileno(), sentence.encode())  # print must not be called here

    def explain(self, kind, error, traceback):
        """What is printed for an error that ends the run; under torchrun often a lost process."""
        saved = f"the last checkpoint is {self.run_dir}/checkpoint.pt"
        if is_lost_worker(error):
            print(f"error: {error}; {saved}", file=sys.stderr)
            return
        sys.__excepthook__(kind, error, traceback)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            print("error: a process of this run failed or is gone", file=sys.stderr)
        print(saved, file=sys.stderr)

    def say(self, line, stays=True):
        """Print a line. Where nobody can read it any more, as after `| head -1`, the run ends."""
        try:
            print_line(line, stays)
        except OSError:
            be_quiet()
            self.stop_signal = self.stop_signal or signal.SIGPIPE

    def after_checkpoint(self, evaluated, stopping):
        if evaluated:
            self.draw()
        if stopping:
            self.stop()

    def stop(self):
        """After the checkpoint is saved: say how to go on and end."""
        name = signal.Signals(self.stop_signal).name
        self.say(f"\nstopped by {name}; go on with --resume {self.run_dir}")
        raise SystemExit(128 + self.stop_signal)

    def show(self, row, text):
        """A row of metrics.csv, and what the algorithm adds to the progress line."""
        known = {name: value for name, value in row.items() if not math.isnan(value)}
        evaluated = "eval/return" in known
        for name in self.newest:
            if name in known:
                self.newest[name] = f"{known[name]:.1f}"
        self.say(progress_line(row, self.newest, text, self.total), stays=evaluated)
        if self.wandb:
            self.wandb.log(known, step=row["global_step"])
        if evaluated:
            self.warn_about_range(row)
        self.warn_about_nonfinite(row)

    def warn_about_range(self, row):
        share = row.get("losses/clipped_targets", 0.0)
        if share > 0.05:
            bounds = f"[{self.args.vmin:g}, {self.args.vmax:g}]"
            self.say(f"warning: {share:.0%} of the targets are clipped to {bounds}: widen it")

    def warn_about_nonfinite(self, row):
        new = row["charts/nonfinite"] - self.nonfinite
        self.nonfinite = row["charts/nonfinite"]
        share = new / (self.args.num_envs * self.args.num_steps)
        if share > 0.01:
            self.say(f"warning: {share:.0%} of this iteration's steps were non-finite")

    def draw(self):
        """Renew curve.png. A picture that fails does not end a run."""
        try:
            title = f"{self.args.env_id}, {self.run_dir.name}"
            draw_curve(self.run_dir / "metrics.csv", title)
        except Exception as error:  # a full disk, or matplotlib
            self.say(f"warning: curve.png could not be drawn: {error}")


def is_lost_worker(error):
    """Of simulators/workers.py, which is not imported for that."""
    workers = sys.modules.get("simulators.workers")
    return workers is not None and isinstance(error, workers.WorkerLost)


def print_help(args_class, defaults, docstring):
    """Every setting with its comment and its default on this machine, in the groups of Args."""
    shown = [line for line in docstring.splitlines() if line.startswith("    python")]
    comments = []
    previous = ""
    for line in inspect.getsource(args_class).splitlines():
        field = re.match(r"    (\w+): (.+?) = ", line)
        comment = re.search(r"(?:^    |  )# (.+)", line)
        if comment and not field and previous == "":
            shown.append(f"\n{comment[1]}:")
        elif comment:
            comments.append(comment[1])
        if field:
            default = getattr(defaults, field[1])
            shown.append(describe_setting(field[1], field[2], " ".join(comments), default))
            comments = []
        previous = line.strip()
    try:
        print("\n".join(shown), flush=True)
    except BrokenPipeError:
        be_quiet()
    raise SystemExit(0)


def describe_setting(name, kind, explanation, default):
    flag = "--" + name.replace("_", "-")
    if kind == "bool":
        flag += f", --no-{flag[2:]}"
    elif kind.startswith("Literal"):
        flag += " " + "|".join(re.findall(r'"(.*?)"', kind))
    else:
        flag += f" {kind.upper()}"
    shown = "''" if default == "" else default
    text = f"{explanation} (default: {shown})"
    indent = " " * 34
    wrapped = textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent)
    if len(flag) > 30:
        return f"  {flag}\n{wrapped}"
    return f"  {flag:<32}{wrapped.lstrip()}"


def be_quiet():
    """Nobody reads what this process prints any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unused(path):
    """A new folder: PATH, or PATH-2 and so on where another run began in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path
    number = 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = path.with_name(f"{path.name}-{number}")


def lock(file):
    """Until the file is closed or the process dies, no other process gets the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"another run is writing to {Path(file.name).parent}")
    except OSError as error:  # some network file systems
        print(f"warning: {file.name} cannot be locked ({error.strerror}); start no second run here")


def refuse(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def check_numbers(args, limits):
    """Finite, and within their limits; what has none must be positive."""
    for name, value in asdict(args).items():
        if type(value) not in (int, float):
            continue
        low, high = limits.get(name, (None, math.inf))
        too_small = value <= 0 if low is None else value < low
        if too_small or value > high or not math.isfinite(value):
            allowed = "positive" if low is None else f"at least {low:g}"
            if high < math.inf:
                allowed += f" and at most {high:g}"
            refuse(f"{name} must be {allowed}, not {value}")
    # weights, gradients and Adam's two moments of about ten square layers, and the rollout
    needed = 160 * args.hidden_size**2 + 1_000 * args.num_envs * args.num_steps
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        sizes = "hidden_size, num_envs and num_steps"
        refuse(f"{sizes} need {needed >> 30} GB, and this machine has {memory >> 30}")


def check_environment(env_id, kwargs):
    """One step of a Gymnasium environment: what a wrong one does later is harder to understand."""
    import gymnasium

    env = gymnasium.make(env_id, **kwargs)
    space = env.observation_space
    parts = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {"state": space}
    for part in parts.values():
        if not isinstance(part, gymnasium.spaces.Box):
            raise TypeError(f"it has {type(part).__name__} observations, not Box or a Dict of them")
    env.reset(seed=0)
    try:
        obs, _, _, _, _ = env.step(env.action_space.sample())
    except ValueError as error:
        names = "obs, reward, terminated, truncated, info"
        raise TypeError(f"its step must return {names} ({error})") from error
    obs = obs if isinstance(obs, dict) else {"state": obs}
    expected = {name: part.shape for name, part in parts.items()}
    found = {name: np.shape(obs[name]) for name in expected if name in obs}
    if found != expected:
        raise TypeError(f"its step returns observations of shape {found}, not {expected}")
    env.close()


def drop_rows_after(path, step):
    """Before a run goes on: later rows come again, and a kill may have torn the last one."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    kept = [line for line in whole[1:] if int(line.split(",")[0]) <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join([*whole[:1], *kept]))
    os.replace(temporary, path)


def progress_line(row, newest, text, total):
    step = row["global_step"]
    speed = row["charts/sps"]
    minutes_left = (total - step) / speed / 60
    return (
        f"{step:,}/{total:,}  return {newest['charts/episode_return']}"
        f"  eval {newest['eval/return']}  {text}"
        f"  {speed:,.0f} steps/s  {minutes_left:.1f} min left"
    )


def print_line(line, stays):
    """On a terminal a line that renews itself; elsewhere only the lines that stay."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        line = line if stays else line[:width]
        print(f"\r{line}\033[K", end="\n" if stays else "", flush=True)
    elif stays:
        print(line, flush=True)


def changed_settings(args):
    defaults = asdict(type(args)())
    changed = []
    for name, value in asdict(args).items():
        if value != defaults[name]:
            changed.append(f"{name} {value}")
    return ", ".join(changed) or "none"


def import_wandb():
    try:
        import wandb
    except ImportError:
        refuse("--track needs wandb, which is missing: pip install wandb")
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not offline and not wandb.login(prompt=False, verify=False):
        refuse("--track needs a login: run `wandb login`, or set WANDB_MODE=offline")
    return wandb


def start_tracking(run_dir, args):
    """A run that is resumed goes on as the same wandb run: its id is the folder's name."""
    wandb = import_wandb()
    settings = dict(name=run_dir.name, config=asdict(args), dir=str(run_dir))
    return wandb.init(id=re.sub(r"[^\w.-]", "_", run_dir.name), resume="allow", **settings)


def draw_curve(metrics_path, title):
    """Returns of training and evaluation over steps, as curve.png beside metrics.csv."""
    from matplotlib.figure import Figure

    with metrics_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in {"charts/episode_return": "-", "eval/return": "o-"}.items():
        known = [row for row in rows if row[name]]
        steps = [int(row["global_step"]) for row in known]
        values = [float(row[name]) for row in known]
        axes.plot(steps, values, style, markersize=4, label=name)
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    axes.legend(frameon=False)
    figure.savefig(metrics_path.with_name("curve.png"), dpi=110)


def describe_machine(args):
    """Versions and commit, for args.json; refuses --track without wandb before a run begins."""
    if args.track:
        import_wandb()
    about = {"python": sys.version.split()[0], "git": None}
    folder = str(Path(__file__).resolve().parents[1])
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or not a clone
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)
        about["git"] = output.strip()
    for package in PACKAGES:
        try:
            about[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return about


def free_cores(seconds=0.3, path="/proc/stat"):
    """Cores that this process may use and that were idle while it looked on."""
    if not hasattr(os, "sched_getaffinity") or not os.path.exists(path):
        return os.cpu_count()
    before = core_times(path)
    time.sleep(seconds)
    free = 0.0
    for core, (idle, total) in core_times(path).items():
        idle_before, total_before = before[core]
        free += (idle - idle_before) / max(total - total_before, 1)
    return round(free)


def core_times(path):
    """Core -> idle and total time since the start of the machine, in ticks of 10 ms"""
    times = {}
    for core, *ticks in re.findall(r"^cpu(\d+)((?: \d+)+)", Path(path).read_text(), re.M):
        if int(core) in os.sched_getaffinity(0):
            ticks = [int(number) for number in ticks[0].split()]
            times[int(core)] = (ticks[3] + ticks[4], sum(ticks))  # idle, or waiting for a disk
    return times


def close_ids(env_id, backend="", known=()):
    """The end of a sentence about an environment that a backend could not make.

    What else could have been meant; nothing where the backend knows the id, or says so by itself.
    """
    import gymnasium

    if backend in ("isaaclab", "mjlab"):
        return ""
    hint = ""
    ids = {"gymnasium": set(gymnasium.registry), "envpool": set()}
    try:
        import envpool

        ids["envpool"] = set(envpool.list_all_envs())
    except ImportError:
        hint = " (EnvPool is missing: pip install envpool==1.2.5)"
    if env_id.split(":")[-1] in ids.get(backend, ()):
        return ""
    if backend == "gymnasium" and env_id in ids["envpool"]:
        return "; EnvPool has a task of this name: --backend envpool"
    others = {*known, *ids["gymnasium"], *ids["envpool"]} - {env_id}
    close = ", ".join(difflib.get_close_matches(env_id, others, 4)) or "none"
    return f"{hint}; the closest known ids: {close}"


class Graph:
    """A step whose kernels are recorded once as a CUDA graph and then launched all together.

    step(..., batch): the tensors of batch, a dict, are copied to a fixed place before each launch.
    What comes before it must stay the same object; its tensors may change their values. The result
    is a dict of tensors.
    """

    WARM_UP = 3  # calls that run as usual: they allocate what the recording must find

    def __init__(self, step):
        self.step = step
        self.num_calls = 0

    def __call__(self, *inputs):
        *fixed, batch = inputs
        self.num_calls += 1
        if self.num_calls <= self.WARM_UP:
            return self.warm_up(fixed, batch)
        if self.num_calls == self.WARM_UP + 1:
            self.batch = {name: values.clone() for name, values in batch.items()}
            self.record(fixed)
        for name, values in batch.items():
            self.batch[name].copy_(values)
        self.replay()
        return {name: values.clone() for name, values in self.result.items()}

    def warm_up(self, fixed, batch):
        """On a stream of its own, as recording wants it."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self.step(*fixed, batch)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def record(self, fixed):
        import torch

        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.step(*fixed, self.batch)

    def replay(self):
        self.graph.replay()


def warn_about_gpu(devices="/proc/driver/nvidia/gpus"):
    """A GPU that torch cannot use would otherwise be left idle without a word."""
    import torch

    if os.path.isdir(devices) and not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        print(
            f"warning: this machine has an NVIDIA GPU that torch {torch.__version__}, built for "
            f"{built}, cannot use: training on the CPU; docs/gpu.md has the versions that fit",
            file=sys.stderr,
        )


def bench(script, agent, envs, optimizers, args, generator):
    """Steps per second of a script, and where the time of an iteration goes. Writes nothing."""
    obs = envs.reset()
    seconds = {"rollout": [], "targets": [], "update": []}
    for _ in range(3 + args.bench):
        start = now(args)
        data, obs = script.rollout(agent, envs, obs, args, generator)
        rollout_end = now(args)
        data = script.compute_targets(agent, data, args, generator)
        targets_end = now(args)
        script.update(agent, *optimizers, data, args, generator)
        update_end = now(args)
        seconds["rollout"].append(rollout_end - start)
        seconds["targets"].append(targets_end - rollout_end)
        seconds["update"].append(update_end - targets_end)
    means = {}
    for phase, history in seconds.items():
        means[phase] = sum(history[3:]) / args.bench  # the first three warm up
    total = sum(means.values())
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    print(f"{num_processes * args.num_envs * args.num_steps / total:.0f} steps/s")
    for phase, mean in means.items():
        print(f"  {phase:<10}{1000 * mean:>9.1f} ms{mean / total:>8.1%}")


def now(args):
    if args.device == "cuda":
        import torch

        torch.cuda.synchronize()  # a GPU works on while Python is ahead
    return time.perf_counter()
