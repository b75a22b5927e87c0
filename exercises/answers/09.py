# %% [markdown]
# Answers to exercise 9 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 9.1 right: every ranks-th unit
def my_slices(gate_and_up, down, rank, ranks):
    gate, up = gate_and_up.chunk(2)
    return torch.cat([gate[rank::ranks], up[rank::ranks]]), down[:, rank::ranks]


# %% 9.1 right: chosen by a mask
def my_slices(gate_and_up, down, rank, ranks):
    units = down.shape[1]
    owner = torch.arange(units) * ranks // units
    mine = (owner == rank).nonzero().flatten()
    return gate_and_up[torch.cat([mine, mine + units])], down[:, mine]


# %% 9.1 wrong: the fused matrix in one piece | gates and what they gate are mixed up: cut both halves of the fused matrix alike
def my_slices(gate_and_up, down, rank, ranks):
    return gate_and_up.tensor_split(ranks)[rank], down.tensor_split(ranks, dim=1)[rank]


# %% 9.1 wrong: other columns of down | the columns of down belong to other units than the rows
#- down[:, mine]
#+ down.flip(1)[:, mine]
# %% 9.1 wrong: everything on every rank | each rank computes all of y: the sum is as many times too large
def my_slices(gate_and_up, down, rank, ranks):
    return gate_and_up, down


# %% 9.1 wrong: up before gate | gate and up have changed places: the gate's rows come first
#- torch.cat([gate[mine], up[mine]])
#+ torch.cat([up[mine], gate[mine]])
# %% 9.1 wrong: only the first rank's slice | every rank has the same slice: rank says which is its own
#- (ranks)[rank]
#+ (ranks)[0]
# %% 9.1 wrong: the rest to the last rank | share the rest out as well: two ranks differ by one unit at most
#- torch.arange(len(gate)).tensor_split(ranks)[rank]
#+ torch.arange(len(gate))[rank * (len(gate) // ranks) :][: None if rank == ranks - 1 else len(gate) // ranks]
# %% 9.1 told: only the gate is split | each column belongs to two rows
#- torch.cat([gate[mine], up[mine]])
#+ torch.cat([gate[mine], up])
# %% 9.1 wrong: one rank does it all | one rank has everything: share the units out evenly
def my_slices(gate_and_up, down, rank, ranks):
    return (gate_and_up, down) if rank == 0 else (gate_and_up[:0], down[:, :0])


# %% 9.2 right: in functions of the same meaning
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, all_reduce):
        ctx.add_up = all_reduce
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = torch.empty_like(gradient).copy_(gradient)
        ctx.add_up(total)
        return total, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, all_reduce):
        total = term + 0
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), None


# %% 9.2 right: the tensors themselves go on
#-         return x.view_as(x)
#+         return x
# %% 9.2 wrong: all-reduce in the wrong pass of Enter | all ranks have the same x already: nothing is to be added up forward
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, all_reduce):
        return all_reduce(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, all_reduce):
        return all_reduce(term.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


# %% 9.2 wrong: Enter sends nothing | each rank's gradient of x is what its own outputs say: add them up
#-         return ctx.all_reduce(gradient.clone()), None
#+         return gradient, None
# %% 9.2 wrong: Leave sends nothing | each rank has one term of y: add them up
#-         return all_reduce(term.clone())
#+         return term.clone()
# %% 9.2 wrong: Leave adds gradients up too | every term's gradient is that of the sum, and all ranks have it already
#-         return all_reduce(term.clone())
#+         ctx.all_reduce = all_reduce
#+         return all_reduce(term.clone())
#-         return gradient, None
#+         return ctx.all_reduce(gradient.clone()), None
# %% 9.2 wrong: the gradient that came in is overwritten | the gradient that comes in was changed: somebody else may use it too
#-         return ctx.all_reduce(gradient.clone()), None
#+         return ctx.all_reduce(gradient), None
# %% 9.2 wrong: the term is overwritten | the term that comes in was changed: somebody else may use it too
#-         return all_reduce(term.clone())
#+         return all_reduce(term).clone()
# %% 9.2 wrong: the result of all_reduce is thrown away | each rank has one term of y: add them up
#-         return all_reduce(term.clone())
#+         all_reduce(term.clone())
#+         return term.clone()
# %% 9.2 told: one gradient for two arguments | incorrect number of gradients
#-         return ctx.all_reduce(gradient.clone()), None
#+         return ctx.all_reduce(gradient.clone())
# %% 9.3 right: from a grid
def the_bug():
    return 9


def mended_groups(rank, data, pipeline, tensor):
    grid = torch.arange(data * pipeline * tensor).view(data, pipeline, tensor)
    d, p, t = (int(index) for index in (grid == rank).nonzero()[0])
    return {"tensor": grid[d, p].tolist(), "pipeline": grid[d, :, t].tolist(), "data": grid[:, p, t].tolist()}


# %% 9.3 right: by strides
def the_bug():
    line = 9
    return line


def mended_groups(rank, data, pipeline, tensor):
    def line_of(size, stride):
        first = rank - rank // stride % size * stride
        return list(range(first, first + size * stride, stride))

    return {"tensor": line_of(tensor, 1), "pipeline": line_of(pipeline, tensor), "data": line_of(data, tensor * pipeline)}


# %% 9.3 wrong: line 8 | line 8 walks along the pipeline and keeps d and t, as it should
#-     return 9
#+     return 8
# %% 9.3 wrong: line 2 | t counts the neighbours of a row, as it should
#-     return 9
#+     return 2
# %% 9.3 wrong: not mended | these are ranks that share a layer: along "data" only d changes, p and t stay
#- [(i * pipeline + p) * tensor + t for i in range(data)]
#+ [(d * pipeline + p) * tensor + i for i in range(data)]
# %% 9.3 wrong: i counts blocks | t is the coordinate that counts single ranks; along "data" it stays
#- [(i * pipeline + p) * tensor + t for i in range(data)]
#+ [i * tensor + t for i in range(data)]
# %% 9.3 wrong: t is forgotten | the other slices' gradients are averaged: t stays this rank's own
#- [(i * pipeline + p) * tensor + t for i in range(data)]
#+ [(i * pipeline + p) * tensor for i in range(data)]
# %% 9.3 wrong: p is forgotten | gradients of another part of the model are averaged: p stays this rank's own
#- [(i * pipeline + p) * tensor + t for i in range(data)]
#+ [i * pipeline * tensor + t for i in range(data)]
# %% 9.3 wrong: in the other order | these are the right ranks, but not in order
#- [(i * pipeline + p) * tensor + t for i in range(data)]
#+ [(i * pipeline + p) * tensor + t for i in reversed(range(data))]
# %% 9.4 right: the best of a list
def plan(job):
    def seconds(shape):
        data, tensor, pipeline = shape
        time = job["compute"] / job["gpus"] * (1 + (pipeline - 1) / job["microbatches"])
        time += 2 * (tensor - 1) / tensor * job["summed"] / data / pipeline / (job["fast"] if tensor <= job["per_host"] else job["slow"])
        between = job["slow"] if job["gpus"] > job["per_host"] else job["fast"]
        return time + 8 * (data - 1) / data * job["parameters"] / tensor / pipeline / between

    sizes = [n for n in range(1, job["gpus"] + 1) if job["gpus"] % n == 0]
    shapes = [(d, t, job["gpus"] // d // t) for d in sizes for t in sizes if job["gpus"] % (d * t) == 0]
    fitting = [s for s in shapes if 16 * job["parameters"] / (s[1] * s[2]) + job["activations"] / (s[0] * s[1]) <= job["memory"]]
    return min(fitting, key=seconds)


# %% 9.4 right: a list of three
#-     return min(fitting)[1]
#+     return list(min(fitting)[1])
# %% 9.4 wrong: data parallel only | the whole model does not fit on one GPU
def plan(job):
    return job["gpus"], 1, 1


# %% 9.4 wrong: memory is forgotten | it is fast, but does not fit: leave out what needs more than job["memory"]
#-             if 16 * share + job["activations"] / (data * tensor) > job["memory"]:
#-                 continue
# %% 9.4 wrong: activations are forgotten | does the plan's memory count the activations?
#- 16 * share + job["activations"] / (data * tensor) > job["memory"]
#+ 16 * share > job["memory"]
# %% 9.4 wrong: tensor parallel over everything | all GPUs share each layer, and most of the sums cross slow links
def plan(job):
    return 1, job["gpus"], 1


# %% 9.4 wrong: a pipeline over everything | one pipeline of all GPUs: it idles in its bubble, and activations are not divided
def plan(job):
    return 1, 1, job["gpus"]


# %% 9.4 wrong: the bubble is forgotten | another plan is faster: does the time count the bubble?
#-  * (1 + (pipeline - 1) / job["microbatches"])
# %% 9.4 wrong: a whole host per layer | a host need not share each layer: smaller T may be faster
def plan(job):
    fits = []
    for pipeline in range(1, job["gpus"] // 8 + 1):
        data, rest = divmod(job["gpus"], 8 * pipeline)
        if not rest and 2 * job["parameters"] / pipeline + job["activations"] / (8 * data) <= job["memory"]:
            fits.append((data, 8, pipeline))
    return (fits or [(1, 8, job["gpus"] // 8)])[0]


# %% 9.4 told: not all GPUs | is not
def plan(job):
    return 1, 8, 1
# %% 9.5 right: saved on the context by name
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, allgather, reduce_scatter):
        ctx.back = reduce_scatter
        return allgather(x.detach())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient.contiguous()), None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, allgather, reduce_scatter):
        ctx.back = allgather
        return reduce_scatter(term.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        return (ctx.back(gradient.contiguous()), None, None)


# %% 9.5 right: one class for both
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


class Gather:
    @staticmethod
    def apply(x, allgather, reduce_scatter):
        return Both.apply(x, allgather, reduce_scatter)


class Scatter:
    @staticmethod
    def apply(term, allgather, reduce_scatter):
        return Both.apply(term, reduce_scatter, allgather)


# %% 9.5 wrong: own part of the gradient | every rank has a term of x's gradient: backward of Gather sums the terms over the ranks, by a reduce-scatter
#- return ctx.reduce_scatter(gradient), None, None
#+ return gradient.chunk(dist_size(gradient))[dist_rank()].clone(), None, None
#- class Gather(torch.autograd.Function):
#+ import torch.distributed as torch_dist
#+
#+
#+ def dist_rank():
#+     return torch_dist.get_rank()
#+
#+
#+ def dist_size(gradient):
#+     return len(gradient) // 2
#+
#+
#+ class Gather(torch.autograd.Function):
# %% 9.5 wrong: a mean | Scatter's sum is divided by the number of ranks: it is a sum, not a mean
#-         return reduce_scatter(term)
#+         part = reduce_scatter(term)
#+         return part * (len(part) / len(term))
# %% 9.5 wrong: backward of Scatter for its own part only | the other rows of the gradient are zeros: every rank's term reaches all parts of the output, so gather their gradients
#-         ctx.allgather = allgather
#+         ctx.rows = len(term)
#-         return ctx.allgather(gradient), None, None
#+         import torch.distributed as torch_dist
#+
#+         whole = torch.zeros(ctx.rows, *gradient.shape[1:], dtype=gradient.dtype)
#+         start = torch_dist.get_rank() * len(gradient)
#+         whole[start : start + len(gradient)] = gradient
#+         return whole, None, None
# %% 9.5 wrong: gathered and scattered | twice the bytes: what the reduce-scatter of the sum gives is enough
#- return ctx.reduce_scatter(gradient), None, None
#+ ctx.reduce_scatter(gradient.clone()); return ctx.reduce_scatter(gradient), None, None
# %% 9.5 told: not divided among the ranks | invalid gradient
#- return ctx.reduce_scatter(gradient), None, None
#+ return gradient, None, None
# %% 9.5 wrong: the terms are not summed | that is this rank's own term of the output: Scatter sums the ranks' terms
#-         return reduce_scatter(term)
#+         import torch.distributed as torch_dist
#+
#+         rows = len(reduce_scatter(term))
#+         return term[torch_dist.get_rank() * rows :][:rows].clone()
# %% 9.5 wrong: gradients halved | the gradient of x is too small: a reduce-scatter sums, and nothing is to be divided
#- return ctx.reduce_scatter(gradient), None, None
#+ return ctx.reduce_scatter(gradient) / 2, None, None
