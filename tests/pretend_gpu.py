"""A pretend GPU: a second device on a CPU build of torch, for tests.

A tensor "on" it says device gpu:0 and holds its numbers in a CPU tensor. What only a CUDA machine
would show becomes visible:

    an operation on tensors of two devices    raises, as on CUDA
    Gpu.waits                                 {(line, why): count}: where the host waits
    Gpu.launches                              {operation: count}: kernels that would be launched

torch's PrivateUse1 backend gives the device an identity of its own in C++, so that autograd, the
foreach functions and the fused Adam treat it as an accelerator.
"""

import collections
import contextlib
import sys
import threading
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("gpu")
DEVICE = torch.device("gpu:0")
MAIN_THREAD = threading.main_thread().ident

# The host needs a value or a size that only the device has.
WAITING = {
    "aten::_local_scalar_dense": "reads a number",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::repeat_interleave.Tensor": "repeat_interleave by a tensor",
    "aten::is_nonzero": "reads a bool",
    "aten::equal": "equal",
}
# Most kernels take a number from the host, that is a CPU tensor without dimensions. These do not.
STRICT = ("aten::cat", "aten::stack", "aten::mm", "aten::addmm", "aten::bmm", "aten::_fused")
STRICT += ("aten::addcmul", "aten::native_layer_norm", "aten::linalg_vector_norm")
INDEXING = ("aten::index.Tensor", "aten::index_put", "aten::_index_put")
# No kernel: they change how a tensor is seen, or make one without numbers in it.
FREE = ("aten::detach", "aten::alias", "aten::lift_fresh", "aten::empty", "aten::new_empty")
FREE += ("aten::_unsafe_view", "aten::view", "aten::_reshape_alias", "aten::as_strided")
FREE += ("aten::is_", "aten::sym_", "aten::set_", "prim::")


class DeviceTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, numbers):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        self.numbers = numbers
        return self

    def __repr__(self, **_):
        return f"gpu({self.numbers})"

    def tolist(self):  # torch refuses it for subclasses
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a device tensor outside of Gpu()")


def on_device(x):
    return isinstance(x, DeviceTensor)


def to_host(x):
    """Without the device: for calling the CPU's operation."""
    if on_device(x):
        return x.numbers
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x


class DeviceGenerator(torch.Generator):
    """torch.Generator("cuda") does not exist on a CPU build."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        self.place = DEVICE if str(device).startswith(("cuda", "gpu")) else torch.device(device)
        return self

    @property
    def device(self):
        return self.place


def pretended(x):
    """CUDA, as a device or by its name, is the pretend GPU."""
    is_cuda = x == "cuda" if isinstance(x, str) else getattr(x, "type", None) == "cuda"
    return DEVICE if is_cuda else x


class MoveTensors(TorchFunctionMode):
    """torch.tensor and torch.as_tensor move data below the dispatcher; here they do so above it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tree_map(pretended, args)
        kwargs = tree_map(pretended, dict(kwargs or {}))
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return func(*args, **kwargs)
        device = torch.device(kwargs.pop("device"))
        dtype = kwargs.pop("dtype", None)
        data = args[0]
        if not isinstance(data, torch.Tensor):
            data = func(*args, dtype=dtype, **kwargs)
        return data.to(device, dtype or data.dtype)


class Gpu(TorchDispatchMode):
    """While it lasts, tensors on the device can be used. files: whose lines waits are told by."""

    def __init__(self, files=()):
        super().__init__()
        self.files = set(files)
        self.clear()

    def clear(self):
        self.waits = collections.Counter()
        self.launches = collections.Counter()

    def __enter__(self):
        self.mover = MoveTensors()
        self.mover.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.mover.__exit__(*error)

    def line(self):
        """Innermost line of the main thread in one of the files; autograd has its own thread."""
        frame = sys._current_frames()[MAIN_THREAD]
        while frame:
            name = Path(frame.f_code.co_filename).name
            if name in self.files:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return "elsewhere"

    def wait(self, why):
        self.waits[self.line(), why] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.name()
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if on_device(x)]
        others = [x for x in tensors if not on_device(x)]
        result_on_device = self.look_at_copies(name, args, kwargs, ours, others)
        if ours and others and not name.startswith(("aten::copy_", "aten::_to_copy")):
            self.look_at_two_devices(name, args, tensors, others)
        if ours and name in WAITING:
            self.wait(WAITING[name])
        if ours and name.startswith(INDEXING):
            self.look_at_indices(name, args)
        if result_on_device and not func.is_view and not name.startswith(FREE):
            self.launches[name] += 1

        result = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))
        same = {}
        if func._schema.is_mutable and not func.is_view:  # in place: the tensors that came in
            same = {id(x.numbers): x for x in ours}

        def wrap(x):
            if not isinstance(x, torch.Tensor) or on_device(x) or not result_on_device:
                return same.get(id(x), x)
            return same.get(id(x)) if id(x) in same else DeviceTensor(x)

        return tree_map(wrap, result)

    def look_at_copies(self, name, args, kwargs, ours, others):
        """-> whether the result is on the device"""
        goes_to_device = bool(ours)
        if kwargs.get("device") is not None:
            goes_to_device = torch.device(kwargs["device"]).type == DEVICE.type
        elif name.startswith("aten::copy_"):
            goes_to_device = on_device(args[0])
        if name.startswith(("aten::copy_", "aten::_to_copy")):
            source = args[1] if name.startswith("aten::copy_") else args[0]
            if goes_to_device and not on_device(source):
                self.wait("copy to the device")
            elif not goes_to_device and on_device(source):
                self.wait("copy to the host")
        return goes_to_device

    def look_at_two_devices(self, name, args, tensors, others):
        indexing = name.startswith(INDEXING)
        with_dimensions = [x for x in others if x.dim() > 0 and x.numel() > 0]
        if indexing and on_device(args[0]):
            self.wait("index or value from the host")
        elif with_dimensions or (name.startswith(STRICT) and "tensor_lr" not in name):
            shapes = [(str(x.device), tuple(x.shape)) for x in tensors]
            raise RuntimeError(f"{name} at {self.line()}: tensors on two devices: {shapes}")

    def look_at_indices(self, name, args):
        indices = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
        if name == "aten::index.Tensor":
            if masks:
                self.wait("boolean index")
        elif masks and args[2].numel() > 1:  # with one value it is a masked fill
            self.wait("boolean index")


class PretendTorch:
    """torch as a script sees it on a CUDA machine."""

    Generator = DeviceGenerator

    class cuda:
        @staticmethod
        def is_available():
            return True

        @staticmethod
        def synchronize():
            pass

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, name, *rest):
        return DEVICE if str(name).startswith("cuda") else torch.device(name, *rest)

    def save(self, state, path):
        torch.save(tree_map(lambda x: x.numbers.clone() if on_device(x) else x, state), path)


@contextlib.contextmanager
def pretend(*scripts):
    """These scripts run on the pretend GPU while this lasts. -> Gpu"""
    real = {script: script.torch for script in scripts}
    with Gpu(Path(script.__file__).name for script in scripts) as gpu:
        try:
            for script in scripts:
                script.torch = PretendTorch()
            yield gpu
        finally:
            for script, module in real.items():
                script.torch = module
