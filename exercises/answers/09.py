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

# %% 9.1 wrong: lazy, everything on every rank | each rank computes all of y: the sum is as many times too large
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

# %% 9.1 wrong: lazy, one rank does it all | one rank has everything: share the units out evenly
def my_slices(gate_and_up, down, rank, ranks):
    return (gate_and_up, down) if rank == 0 else (gate_and_up[:0], down[:, :0])

# %% 9.1 wrong: lazy, chunk | `chunk` rounds up, so the last ranks get fewer, or nothing; `tensor_split` shares the rest out
#- tensor_split(ranks)[rank]
#+ chunk(ranks)[rank]

# %% 9.1 wrong: the rest dropped | the units that are left over when H is no multiple of `ranks` are on no rank: share them out
#- torch.arange(len(gate)).tensor_split(ranks)[rank]
#+ torch.arange(len(gate) // ranks * ranks).tensor_split(ranks)[rank]

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

# %% 9.2 wrong: Enter adds up twice | one all-reduce adds the ranks' gradients up; another one makes it as many times as much
#- return ctx.all_reduce(gradient.clone()), None
#+ return ctx.all_reduce(ctx.all_reduce(gradient.clone())), None

# %% 9.2 told: lazy, the course's own, inherited | Enter is the course's own Enter: write it yourself
from ddp_course import stage9_tensor


class Enter(stage9_tensor.Enter):
    pass


class Leave(stage9_tensor.Leave):
    pass

# %% 9.3 right: by strides
def make_mesh(rank, sizes, new_group):
    groups = {}
    stride = 1
    ranks = 1
    for size in sizes.values():
        ranks *= size
    for axis, size in reversed(sizes.items()):
        for first in range(ranks):
            if first // stride % size == 0:
                members = range(first, first + size * stride, stride)
                group = new_group(members)
                if rank in members:
                    groups[axis] = group
        stride *= size
    return groups

# %% 9.3 right: by coordinates, each group once
def make_mesh(rank, sizes, new_group):
    from itertools import product

    places = list(product(*(range(size) for size in sizes.values())))
    made = {}
    groups = {}
    for n, axis in enumerate(sizes):
        for place in places:
            members = tuple(r for r, other in enumerate(places) if other[:n] + other[n + 1 :] == place[:n] + place[n + 1 :])
            if (axis, members) not in made:
                made[axis, members] = new_group(list(members))
        for (of, members), group in made.items():
            if of == axis and rank in members:
                groups[axis] = group
    return groups

# %% 9.3 wrong: lazy, only its own groups | each rank makes only the groups that it is in: all ranks must call new_group for every group
#-             group = new_group(line)
#-             if rank in line:
#-                 groups[axis] = group
#+             if rank in line:
#+                 groups[axis] = new_group(line)

# %% 9.3 wrong: its own groups first | each rank makes its own groups before the others': the order must be the same on all ranks
#- in grid.movedim(position, -1).reshape(-1, size).tolist():
#+ in sorted(grid.movedim(position, -1).reshape(-1, size).tolist(), key=lambda line: rank not in line):

# %% 9.3 wrong: the group made last | this is the group that was made last, not the one that the rank is in
#-             if rank in line:
#-                 groups[axis] = group
#+             groups[axis] = group

# %% 9.3 wrong: the first axis counts single ranks | rank numbers count along the last axis first, here along the first one
#- .view(*sizes.values())
#+ .view(*reversed(sizes.values())).permute(*reversed(range(len(sizes))))

# %% 9.3 wrong: neighbours along every axis | ranks next to each other along every axis: only along the last one they are neighbours
#- grid.movedim(position, -1).reshape(-1, size)
#+ grid.reshape(-1, size)

# %% 9.3 wrong: across all other axes | these are the ranks that differ in other axes: along an axis only the place on it differs
#- .movedim(position, -1).reshape(-1, size).tolist():
#+ .movedim(position, 0).reshape(size, -1).tolist():

# %% 9.3 wrong: lazy, a group of all | all ranks are in this group: a mesh has a group for each line of ranks
#- .movedim(position, -1).reshape(-1, size).tolist():
#+ .reshape(1, -1).tolist():

# %% 9.3 wrong: a group for each of its ranks | each rank makes its line anew, and keeps its own of these groups: in it nobody answers; make each group once
#-         for line in grid.movedim(position, -1).reshape(-1, size).tolist():
#-             group = new_group(line)
#-             if rank in line:
#-                 groups[axis] = group
#+         lines = grid.movedim(position, -1).reshape(-1, size).tolist()
#+         for member in range(grid.numel()):
#+             (line,) = [line for line in lines if member in line]
#+             group = new_group(line)
#+             if rank == member:
#+                 groups[axis] = group

# %% 9.3 wrong: in the other order | these are the right ranks, but not in order
#- new_group(line)
#+ new_group(line[::-1])

# %% 9.3 told: lists of ranks | what new_group returned was expected
#-                 groups[axis] = group
#+                 groups[axis] = line

# %% 9.3 told: no groups of one rank | also for an axis of size 1
#-             if rank in line:
#+             if rank in line and size > 1:

# %% 9.3 told: groups in a list | a dict with a group for each axis
#-     return groups
#+     return list(groups.values())

# %% 9.3 wrong: the grid cut in other rows | the ranks of a line are not neighbours in the grid's own order: put the axis last, then cut
#- .movedim(position, -1).reshape(-1, size).tolist():
#+ .reshape(size, -1).T.tolist():

# %% 9.3 wrong: no more after its own group | a rank stops when it has its own group: it must make the others, too
#-                 groups[axis] = group
#+                 groups[axis] = group
#+                 break

# %% 9.3 told: three axes by name | take their names, their number and their order from `sizes`
#- .view(*sizes.values())
#+ .view(sizes["data"], sizes["pipeline"], sizes["tensor"])

# %% 9.3 wrong: sizes from the last on | the grid has its sizes in the wrong order: the first axis is the slowest, and has the first size
#- .view(*sizes.values())
#+ .view(*list(sizes.values())[::-1])

# %% 9.3 right: a line once for each of its ranks, the last group kept
# All members keep the same group, so each collective has all of its ranks; the other groups stay unused.
def make_mesh(rank, sizes, new_group):
    grid = torch.arange(torch.tensor(list(sizes.values())).prod()).reshape(*sizes.values())
    mesh = {}
    for place, axis in enumerate(sizes):
        for line in grid.movedim(place, -1).reshape(-1, sizes[axis]).tolist():
            for _ in line:
                group = new_group(line)
            if rank in line:
                mesh[axis] = group
    return mesh

# %% 9.3 told: lazy, torch's own mesh | `new_group` makes the groups, and which ones is for you to say
def make_mesh(rank, sizes, new_group):
    from torch.distributed import init_device_mesh

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {axis: mesh.get_group(axis) for axis in sizes}

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

# %% 9.4 wrong: a whole host per layer | T is always the GPUs of a host: a smaller T may be faster, and where nothing else fits a larger one may
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

# %% 9.4 wrong: fast everywhere | another plan is faster: hold each term against the table, with its bytes and its link: activations, 2(T-1)/T `summed` / (D P), are `fast` up to T = per_host; gradients, 2(D-1)/D 4 `parameters` / (T P), are `slow` beyond one host
#- link = job["fast"] if tensor <= job["per_host"] else job["slow"]
#+ link = job["fast"]

# %% 9.4 told: lazy, powers of two | T may be larger than a host, and D, T and P are any divisors
#- if rest or not data:
#+ if rest or not data or tensor & (tensor - 1) or pipeline & (pipeline - 1):

# %% 9.4 wrong: lazy, the most copies that fit | the largest D that fits is not the fastest plan: compare the seconds of all that fit
#- return min(fitting)[1]
#+ return max(plan for _, plan in fitting)

# %% 9.4 wrong: the fewest copies | the first plan that fits, or the one with the fewest copies, is not the fastest: compare the seconds of all that fit
#- return min(fitting)[1]
#+ return min(plan for _, plan in fitting)

# %% 9.4 wrong: changed places | the order is (data, tensor, pipeline): here the last two have changed places
#- return min(fitting)[1]
#+ data, tensor, pipeline = min(fitting)[1]
#+     return data, pipeline, tensor

# %% 9.4 wrong: gradients over fast links | another plan is faster: hold each term against the table, with its bytes and its link: activations, 2(T-1)/T `summed` / (D P), are `fast` up to T = per_host; gradients, 2(D-1)/D 4 `parameters` / (T P), are `slow` beyond one host
#- link = job["fast"] if job["gpus"] <= job["per_host"] else job["slow"]
#+ link = job["fast"]

# %% 9.4 wrong: the whole model's gradients | another plan is faster: hold each term against the table, with its bytes and its link: activations, 2(T-1)/T `summed` / (D P), are `fast` up to T = per_host; gradients, 2(D-1)/D 4 `parameters` / (T P), are `slow` beyond one host
#- * 4 * share / link
#+ * 4 * job["parameters"] / link

# %% 9.4 wrong: gradients of two bytes | another plan is faster: hold each term against the table, with its bytes and its link: activations, 2(T-1)/T `summed` / (D P), are `fast` up to T = per_host; gradients, 2(D-1)/D 4 `parameters` / (T P), are `slow` beyond one host
#- * 4 * share / link
#+ * 2 * share / link

# %% 9.4 wrong: half an all-reduce | another plan is faster: hold each term against the table, with its bytes and its link: activations, 2(T-1)/T `summed` / (D P), are `fast` up to T = per_host; gradients, 2(D-1)/D 4 `parameters` / (T P), are `slow` beyond one host
#- 2 * (tensor - 1) / tensor * job
#+ (tensor - 1) / tensor * job

# %% 9.4 wrong: activations of all stages | another plan is faster: hold each term against the table, with its bytes and its link: activations, 2(T-1)/T `summed` / (D P), are `fast` up to T = per_host; gradients, 2(D-1)/D 4 `parameters` / (T P), are `slow` beyond one host
#- job["summed"] / (data * pipeline)
#+ job["summed"] / data

# %% 9.4 wrong: the most copies, with the fewest ranks to a layer | the largest D that fits is not the fastest plan: compare the seconds of all that fit
#- return min(fitting)[1]
#+ return max((plan for _, plan in fitting), key=lambda plan: plan[0])

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

# %% 9.5 wrong: the first rows of the gradient | every rank has a term of x's gradient: backward of Gather sums the terms over the ranks, by a reduce-scatter
#-         ctx.reduce_scatter = reduce_scatter
#+         ctx.rows = len(x)
#- return ctx.reduce_scatter(gradient), None, None
#+ return gradient[: ctx.rows], None, None

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

# %% 9.5 wrong: lazy, gathered and scattered | twice the bytes: what the reduce-scatter of the sum gives is enough
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

# %% 9.5 told: the names have changed places | a part of it is for allgather
#-         return allgather(x)
#+         return reduce_scatter(x)

# %% 9.5 wrong: a mean of gradients | Scatter's output is a sum, and every term of a sum has its gradient: nothing is divided
#-         return ctx.allgather(gradient), None, None
#+         whole = ctx.allgather(gradient)
#+         return whole * (len(gradient) / len(whole)), None, None

# %% 9.5 wrong: own rows of its own term | that is this rank's own term of the output: Scatter sums the ranks' terms
#- return reduce_scatter(term)
#+ rank = torch.distributed.get_rank(); rows = reduce_scatter(term).shape[0]; return term[rank * rows : (rank + 1) * rows]

# %% 9.5 wrong: the first rows of its own term | that is this rank's own term of the output: Scatter sums the ranks' terms
#- return reduce_scatter(term)
#+ return term[: reduce_scatter(term).shape[0]]

# %% 9.5 wrong: its own gradient repeated | each rank has the gradient of its own part of the sequence: gather the ranks' parts; here one's own is repeated
#- ctx.allgather = allgather
#-         return reduce_scatter(term)
#+ part = reduce_scatter(term)
#+         ctx.ranks = len(term) // len(part)
#+         return part
#- return ctx.allgather(gradient), None, None
#+ return torch.cat([gradient] * ctx.ranks), None, None

# %% 9.6 right: sums stacked, a mask in place of indices
class SplitLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, all_max, all_sum):
        top = all_max(logits.max(dim=-1).values)
        shifted = logits - top.unsqueeze(-1)
        own = torch.arange(first, first + logits.shape[-1]) == targets.unsqueeze(-1)
        exps, of_target = all_sum(torch.stack([shifted.exp().sum(-1), (shifted * own).sum(-1)]))
        counts = (targets >= 0).to(logits.dtype)
        ctx.save_for_backward(shifted, exps, own, counts)
        return ((exps.log() - of_target) * counts).sum() / counts.sum()

    @staticmethod
    def backward(ctx, gradient):
        shifted, exps, own, counts = ctx.saved_tensors
        share = gradient * counts / counts.sum()
        return (shifted.exp() / exps.unsqueeze(-1) - own.to(shifted.dtype)) * share.unsqueeze(-1), None, None, None, None

# %% 9.6 right: the targets' logits in one number
class SplitLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, all_max, all_sum):
        counts = targets != -100
        logits, targets = logits[counts], targets[counts]
        top = all_max(logits.amax(1))
        exps = torch.exp(logits - top[:, None])
        total = all_sum(exps.sum(1))
        of_targets = torch.zeros(1, dtype=logits.dtype)
        gradient = torch.zeros(len(counts), logits.shape[1], dtype=logits.dtype)
        own = exps / total[:, None]
        for row, target in enumerate(targets.tolist()):
            if first <= target < first + logits.shape[1]:
                of_targets += logits[row, target - first]
                own[row, target - first] -= 1
        gradient[counts] = own / len(targets)
        ctx.gradient = gradient
        return (total.log().sum() + top.sum() - all_sum(of_targets)[0]) / len(targets)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient * gradient, None, None, None, None

# %% 9.6 told: no maximum | exponentials of large logits overflow
#-         highest = all_max(logits.amax(1))
#+         highest = torch.zeros_like(logits[:, 0])

# %% 9.6 wrong: each rank's own maximum | each rank subtracts its own largest logit: sums of exponentials fit together only if m is the same on all ranks
#-         highest = all_max(logits.amax(1))
#+         highest = logits.amax(1)

# %% 9.6 told: one maximum for all tokens | or those of small ones are all 0, unless each token's own largest logit
#-         highest = all_max(logits.amax(1))
#+         highest = all_max(logits.amax().expand(len(logits)))

# %% 9.6 wrong: the sum is this rank's | the exponentials are summed over this rank's words alone: add the ranks' sums up
#-         total = all_sum(weights.sum(1))
#+         total = weights.sum(1)

# %% 9.6 wrong: the target's logit of this rank | a rank without the target has 0 for its logit: add the ranks' up
#-         losses = total.log() + highest - all_sum(at_target)
#+         losses = total.log() + highest - at_target

# %% 9.6 wrong: the target outside its columns | targets of other ranks count too, at this rank's first or last column: only the rank that has the word adds its logit
#-         rows = ((columns >= 0) & (columns < logits.shape[1])).nonzero().flatten()
#+         rows = torch.arange(len(logits))
#+         columns = columns.clamp(0, logits.shape[1] - 1)

# %% 9.6 wrong: the one-hot on every rank | the gradient is 1 less in a column of each rank: only the rank that has the target subtracts it
#-         gradient[rows, columns[rows]] -= 1
#+         gradient[torch.arange(len(logits)), columns.clamp(0, logits.shape[1] - 1)] -= 1

# %% 9.6 wrong: a negative index | a target of another rank counts at one of this rank's columns: an index below 0 counts from the end
#-         rows = ((columns >= 0) & (columns < logits.shape[1])).nonzero().flatten()
#+         rows = ((columns >= -logits.shape[1]) & (columns < logits.shape[1])).nonzero().flatten()

# %% 9.6 wrong: m is not added again | m is missing in the loss: what is subtracted from all logits is subtracted from the target's, too
#-         losses = total.log() + highest - all_sum(at_target)
#+         losses = total.log() - all_sum(at_target)

# %% 9.6 wrong: m on every rank | m is added up over the ranks: each token has it once
#-         losses = total.log() + highest - all_sum(at_target)
#+         losses = total.log() - all_sum(at_target - highest)

# %% 9.6 wrong: no one-hot | the gradient is softmax alone: at the target it is 1 less
#-         gradient[rows, columns[rows]] -= 1

# %% 9.6 wrong: softmax of its own words | softmax over this rank's words alone: divide by the sum over all ranks
#-         gradient = weights / total[:, None]
#+         gradient = weights / weights.sum(1, keepdim=True)

# %% 9.6 wrong: a sum | the losses are summed: take their mean over the tokens that count
#-         ctx.save_for_backward(gradient / counts.sum())
#-         return losses[counts].mean()
#+         ctx.save_for_backward(gradient)
#+         return losses[counts].sum()

# %% 9.6 wrong: a sum's gradient | that is the gradient of the sum of losses: the mean's is divided by the number of tokens that count
#-         ctx.save_for_backward(gradient / counts.sum())
#+         ctx.save_for_backward(gradient)

# %% 9.6 wrong: a mean over all tokens | the mean is over all tokens: those with target -100 do not count
#-         ctx.save_for_backward(gradient / counts.sum())
#-         return losses[counts].mean()
#+         ctx.save_for_backward(gradient / len(counts))
#+         return losses[counts].sum() / len(counts)

# %% 9.6 wrong: divided by all tokens in the gradient | the loss is a mean over the tokens that count, and so is its gradient: divide by their number
#-         ctx.save_for_backward(gradient / counts.sum())
#+         ctx.save_for_backward(gradient / len(counts))

# %% 9.6 wrong: all tokens count | tokens with target -100 are in the mean: they have no loss and no gradient
#-         counts = targets != -100
#+         counts = torch.ones_like(targets, dtype=torch.bool)

# %% 9.6 wrong: gradients of tokens that do not count | the gradient of a token with target -100 is 0
#-         gradient[~counts] = 0

# %% 9.6 wrong: a mean over ranks | every rank has the whole loss already: a mean over the ranks is not needed
#-         return losses[counts].mean()
#+         ranks = all_sum(torch.ones(1))
#+         return losses[counts].mean() / ranks[0]

# %% 9.6 wrong: the gradient over ranks | each rank has the gradient of its own columns, and no other has a part of it: nothing is divided by the number of ranks
#-         ctx.save_for_backward(gradient / counts.sum())
#+         ctx.save_for_backward(gradient / counts.sum() / all_sum(torch.ones(1))[0])

# %% 9.6 wrong: the gradient that comes in | backward ignores the gradient that comes in: multiply by it
#-         return gradient * of_logits, None, None, None, None
#+         return of_logits, None, None, None, None

# %% 9.6 wrong: lazy, everything is gathered | that is the whole row of logits, on every rank: three numbers per token are enough
#-         highest = all_max(logits.amax(1))
#+         everything = torch.zeros(len(logits), 11, dtype=logits.dtype)
#+         everything[:, first : first + logits.shape[1]] = logits
#+         highest = all_sum(everything).amax(1)

# %% 9.6 wrong: the logits are overwritten | the logits that come in were changed: somebody else may use them too
#-         weights = (logits - highest[:, None]).exp()
#+         logits -= highest[:, None]
#+         weights = logits.exp()
#-         losses = total.log() + highest - all_sum(at_target)
#+         losses = total.log() - all_sum(at_target)

# %% 9.6 told: a plain index | a target may be in another rank's columns
#-         rows = ((columns >= 0) & (columns < logits.shape[1])).nonzero().flatten()
#+         rows = torch.arange(len(logits))

# %% 9.6 told: only ranks with a target call | also a rank whose columns have no target
#-         losses = total.log() + highest - all_sum(at_target)
#+         losses = total.log() + highest - (all_sum(at_target) if len(rows) else 0)

# %% 9.6 told: autograd of the sums alone | incorrect number of gradients
#-         return gradient * of_logits, None, None, None, None
#+         return gradient * of_logits

# %% 9.6 wrong: a mean over its own targets | the mean is over the tokens whose targets this rank has: every rank has the losses of all tokens
#-         return losses[counts].mean()
#+         return losses[rows].mean() if len(rows) else losses[0] * 0

# %% 9.6 wrong: losses of all ranks | the loss is added up over the ranks: each of them has all of it
#-         return losses[counts].mean()
#+         return all_sum(losses[counts].mean().reshape(1))[0]

# %% 9.6 wrong: no target | the target's logit is missing in the loss
#-         losses = total.log() + highest - all_sum(at_target)
#+         losses = total.log() + highest

# %% 9.6 wrong: gradients of all ranks | every rank has the whole loss: the gradient that comes in is not added up over the ranks
#-         ctx.save_for_backward(gradient / counts.sum())
#+         ctx.save_for_backward(gradient / counts.sum() * all_sum(torch.ones(1))[0])

# %% 9.6 wrong: one more at the target | at the target the gradient is 1 less than softmax, not 1 more
#-         gradient[rows, columns[rows]] -= 1
#+         gradient[rows, columns[rows]] += 1

# %% 9.6 wrong: its own maximum in the exponentials | the exponentials are of logits less this rank's own largest: subtract the one of all ranks
#-         weights = (logits - highest[:, None]).exp()
#+         weights = (logits - logits.amax(1, keepdim=True)).exp()

# %% 9.6 wrong: one column off | the target's column is one off: `first` is the word of column 0
#-         columns = targets - first
#+         columns = targets - first - 1

# %% 9.6 wrong: words for columns | `targets` are words of the whole vocabulary; column 0 is of word `first`, so subtract that
#- columns = targets - first
#+ columns = targets

# %% 9.6 wrong: the other way to the column | `targets` are words of the whole vocabulary; column 0 is of word `first`, so subtract that
#- columns = targets - first
#+ columns = targets + first

# %% 9.6 wrong: the target's logit is added | the target's logit is subtracted, not added
#- highest - all_sum(at_target)
#+ highest + all_sum(at_target)

# %% 9.6 wrong: m is subtracted | m is subtracted once more; it was taken from all logits, so it is added to the logarithm
#- total.log() + highest
#+ total.log() - highest

# %% 9.6 wrong: no logarithm | that is the sum of the exponentials itself; the loss has its logarithm
#- total.log() + highest
#+ total + highest

# %% 9.6 wrong: the exponentials themselves | the gradient has the exponentials; softmax is each of them divided by their sum
#- gradient = weights / total[:, None]
#+ gradient = weights.clone()

# %% 9.6 wrong: divided by the gradient | the gradient that comes in is a factor, no divisor
#- return gradient * of_logits
#+ return of_logits / gradient

# %% 9.6 wrong: a rank's count of tokens | the mean is over all tokens that count, not over those whose targets are on this rank
#- ctx.save_for_backward(gradient / counts.sum())
#+ ctx.save_for_backward(gradient / max(1, len(rows)))

# %% 9.6 wrong: the maximum of all tokens is added | m is each token's own: the largest of its own logits is added again
#- total.log() + highest
#+ total.log() + highest.max()

# %% 9.6 wrong: 1 less in whole columns | the gradient is 1 less in whole columns: each token has one target, so take rows and columns in pairs
#- gradient[rows, columns[rows]] -= 1
#+ gradient[:, columns[rows]] -= 1

# %% 9.6 wrong: a mean, divided again | the loss is divided by the number of tokens twice: a mean has been divided already
#- losses[counts].mean()
#+ losses[counts].mean() / counts.sum()

# %% 9.6 wrong: logarithms of each rank's sum | the logarithm is that of the sum over all ranks: sums add up, their logarithms do not
#- losses = total.log()
#+ losses = all_sum(weights.sum(1).log())

# %% 9.6 wrong: a mean over all tokens in the loss | the mean is over all tokens: those with target -100 do not count
#- losses[counts].mean()
#+ losses[counts].sum() / len(targets)

# %% 9.6 wrong: the target's exponential | the target's logit is subtracted, not its exponential
#- logits[rows, columns[rows]]
#+ weights[rows, columns[rows]]

# %% 9.6 told: sums of whole rows | take the largest, or the sum, of its own columns first
#- all_sum(weights.sum(1))
#+ all_sum(weights).sum(1)

# %% 9.6 told: the largest of whole rows | take the largest, or the sum, of its own columns first
#- all_max(logits.amax(1))
#+ all_max(logits).amax(1)

# %% 9.6 wrong: the sum of losses | that is the sum over the tokens that count; their mean was asked for
#- return losses[counts].mean()
#+ return losses[counts].sum()

# %% 9.6 wrong: a logit from everybody | a rank that does not have the target adds one of its own logits: it should add 0
#-         at_target = torch.zeros_like(highest)
#-         at_target[rows] = logits[rows, columns[rows]]
#-
#+         every = torch.arange(len(columns))
#+         at_target = logits[every, columns.clamp(0, logits.shape[1] - 1)]
#+
# %% 9.7 right: one of the points
def explain_figure():
    return 'Between hosts every block waits four times for a sum of activations on the cable of 15 Mbit/s, and nothing hides it, so this bar is the longest.', "A"

# %% 9.7 right: a list of letters
#- "ABC"
#+ ["A", "B", "C"]

# %% 9.7 told: lazy, a few words | at least twelve different words
#- return text, "ABC"
#+ return "It is 20 % faster so.", "A"

# %% 9.7 told: lazy, one word many times | at least twelve different words
#- return text, "ABC"
#+ return "because " * 20 + "4", "A"

# %% 9.7 told: lazy, all is ticked | 3 points in 24 different words
def explain_figure():
    return 'Between hosts every block waits four times for a sum of activations on the cable of 15 Mbit/s, and nothing hides it, so this bar is the longest.', "ABC"

# %% 9.7 told: no number | name a number of the figure
#- return text, "ABC"
#+ return "".join(sign for sign in text if not sign.isdigit()), "ABC"

# %% 9.7 told: no letters | a pair was expected
#- return text, "ABC"
#+ return text

# %% 9.7 told: nothing ticked | tick at least one letter
#- return text, "ABC"
#+ return text, ""

# %% 9.7 told: another letter | 'X' is none of A, B and C
#- return text, "ABC"
#+ return text, "AX"
