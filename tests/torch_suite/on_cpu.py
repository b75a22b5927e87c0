"""PyTorch's own tests of DistributedDataParallel, rewritten in memory to run on the CPU.

They run with gloo. The tests are methods of `DistributedTest._DistTestBase` in
`torch/testing/_internal/distributed/distributed_test.py`, a file that the wheel brings along.
Nearly all of them ask for GPUs, and hardly one needs them. So the file is parsed, `OnCPU` changes
what stands in the way, and the rest is executed as it is, with the class under test as
`DistributedDataParallel`. torch itself stays as it is, but for `SyncBatchNorm`, which has no
kernels for the CPU.
"""

import ast
import importlib.util
import inspect
import os
import re
import sys
import types

NAME = "torch.testing._internal.distributed.distributed_test"
CPU = ast.Constant("cpu")
SKIPS = re.compile(r"skip|require_")
GPU_NAMES = re.compile(r"rank|device|cuda")
OF_THE_REDUCER_IN_CPP = re.compile(
    r"ddp_logging_data|verify_ddp_error_logged|_get_local_used_map|variable_usage_tensor|_ddp_graph_static|device\.index"
)
# The test takes a picture of 1000 x 1000 through 256 channels, a hundred times.
SMALLER = {"test_ddp_uneven_inputs": {1000: 30}}


class OnCPU(ast.NodeTransformer):
    """Turn a test for GPUs into one for the CPU.

    - `torch.nn.parallel.DistributedDataParallel` becomes the module's global name: the class under
      test.
    - Decorators that skip go; which tests run is said in tests.txt. So do device_ids= and
      output_device=.
    - Tensors and modules go to the CPU instead of a GPU; streams, and what else `torch.cuda` is
      told, go.
    - Assertions about the logger and the reducer in C++ go, and those about the number of a device.
    """

    def __init__(self):
        self.test = ""  # This function is being rewritten.

    def visit_FunctionDef(self, node):
        outer = self.test
        if re.match(r"_?(test|run|prepare)_", node.name):
            self.test = node.name
        node.decorator_list = [
            one for one in node.decorator_list if not SKIPS.search(ast.unparse(one))
        ]
        self.generic_visit(node)
        self.test = outer
        return node

    def visit_Expr(self, node):
        text = ast.unparse(node)
        asserts = re.match(r"self\.assert|verify_ddp_error", text)
        about_cpp = asserts and OF_THE_REDUCER_IN_CPP.search(text)
        if isinstance(node.value, ast.Call) and (about_cpp or text.startswith("torch.cuda.")):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Assign(self, node):
        if OF_THE_REDUCER_IN_CPP.search(ast.unparse(node)):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called == "torch.cuda.Stream":
            return ast.copy_location(ast.Constant(None), node)
        if called.endswith("DistributedDataParallel"):
            node.keywords = [
                one for one in node.keywords if one.arg not in ("device_ids", "output_device")
            ]
        for keyword in node.keywords:
            if keyword.arg == "device" and not ast.unparse(keyword.value).endswith(".device"):
                keyword.value = CPU
        if called == "torch.cuda.stream":
            node.func = ast.Name("nullcontext", ast.Load())
            node.args = []
        elif called.endswith(".cuda"):
            node.func.attr = "cpu"
            node.args = []
            node.keywords = []
        elif called.endswith(".to") and len(node.args) == 1:
            target = ast.unparse(node.args[0])
            if GPU_NAMES.search(target) and not target.endswith(".device"):
                node.args = [CPU]
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "DistributedDataParallel":
            return ast.copy_location(ast.Name("DistributedDataParallel", node.ctx), node)
        return node

    def visit_Constant(self, node):
        smaller = SMALLER.get(self.test, {})
        if node.value == "cuda":
            return ast.copy_location(CPU, node)
        if type(node.value) is int and node.value in smaller:
            return ast.copy_location(ast.Constant(smaller[node.value]), node)
        return node


def load_tests(ddp, world_size):
    """Return the rewritten module, and the class with its tests of the class `ddp`."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size))
    import torch

    path = importlib.util.find_spec(NAME).origin
    with open(path, encoding="utf-8") as file:
        tree = ast.fix_missing_locations(OnCPU().visit(ast.parse(file.read())))
    module = sys.modules[NAME] = types.ModuleType(NAME)
    module.__file__ = path
    exec(compile(tree, path, "exec"), module.__dict__)
    module.DistributedDataParallel = ddp
    module.init_multigpu_helper = lambda count, backend: {rank: [rank] for rank in range(count)}
    module.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    module.GradScaler = lambda: torch.amp.GradScaler("cpu")

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        pass

    return module, Suite


class Nothing:
    """Stands for a stream or an event: two features of torch's class ask for one on the CPU too."""

    def __init__(self, *args, **kwargs): ...

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def teach_sync_batchnorm(ddp):
    """Give `torch.nn.SyncBatchNorm` the kernels that it lacks on the CPU; keep what this returns.

    Neither torch's class nor ours would wrap it on the CPU, so this check goes too.
    """
    import torch

    from ddp_course.stage6_ddp import before_training

    torch.accelerator.current_stream = Nothing
    torch.Event = Nothing
    if hasattr(ddp, "_passing_sync_batchnorm_handle"):
        ddp._passing_sync_batchnorm_handle = lambda self, module: None
    before_training.refuse_modules = lambda *_: None
    library = torch.library.Library("aten", "IMPL")
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{kernel.__name__}", kernel, "CPU")
    source = inspect.cleandoc("\n" + inspect.getsource(torch.nn.SyncBatchNorm.forward)).replace(
        '"cuda"', '"cpu"'
    )
    names = {}
    exec(source, sys.modules[torch.nn.SyncBatchNorm.__module__].__dict__, names)
    torch.nn.SyncBatchNorm.forward = names["forward"]
    return library


# The five kernels, with the arguments of those for GPUs:
# aten/src/ATen/native/native_functions.yaml, batch_norm_*


def stats(x, eps):
    """Return mean and 1/std of each channel."""
    x = x.float()
    return x.mean(all_but_channels(x)), (x.var(all_but_channels(x), unbiased=False) + eps).rsqrt()


def gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """Return mean and 1/std over all ranks, and move the running averages."""
    weight = (counts / counts.sum()).unsqueeze(1)
    count = counts.sum()
    whole = (mean * weight).sum(0)
    variance = ((invstd**-2 - eps + (mean - whole) ** 2) * weight).sum(0)
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)
    return whole, (variance + eps).rsqrt()


def elemt(x, weight, bias, mean, invstd, eps):
    """Normalise, scale, shift."""
    y = (x.float() - per_channel(mean, x)) * per_channel(invstd, x)
    if weight is not None:
        y = y * per_channel(weight.float(), x) + per_channel(bias.float(), x)
    return y.to(x.dtype).contiguous(memory_format=layout(x))


def backward_reduce(gradient, x, mean, invstd, weight, *_):
    """Return the two sums that the ranks add up, and the gradients of weight and bias."""
    gradient = gradient.float()
    axes = all_but_channels(x)
    total = gradient.sum(axes)
    product = (gradient * (x.float() - per_channel(mean, x))).sum(axes)
    dtype = x.dtype if weight is None else weight.dtype
    return total, product, (product * invstd).to(dtype), total.to(dtype)


def backward_elemt(gradient, x, mean, invstd, weight, total, product, counts):
    """Return the gradient of the input."""
    count = counts.sum()
    scale = invstd if weight is None else invstd * weight.float()
    y = gradient.float() - per_channel(total / count, x)
    y = y - (x.float() - per_channel(mean, x)) * per_channel(invstd**2 * product / count, x)
    return (y * per_channel(scale, x)).to(x.dtype).contiguous(memory_format=layout(x))


def per_channel(values, x):
    return values.view([1, -1] + [1] * (x.dim() - 2))


def all_but_channels(x):
    return [axis for axis in range(x.dim()) if axis != 1]


def layout(x):
    """Return the memory format in which `x` lies."""
    import torch

    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = formats.get(x.dim())
    if channels_last and x.is_contiguous(memory_format=channels_last):
        return channels_last
    return torch.contiguous_format
