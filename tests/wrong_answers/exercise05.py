# %% [markdown]
# Answers to exercise 5 as learners write them. tests/answers.py says how to read this.

# %% 5.1 right: sizes kept
def assign_buckets(parameters, cap_bytes):
    open_buckets, sizes, result = {}, {}, []
    for parameter in parameters[::-1]:
        kind = parameter.dtype
        open_buckets.setdefault(kind, []).append(parameter)
        sizes[kind] = sizes.get(kind, 0) + parameter.nbytes
        if sizes[kind] >= cap_bytes:
            result.append(open_buckets.pop(kind))
            sizes[kind] = 0
    result.extend(open_buckets.values())
    return result


# %% 5.1 right: a dtype at a time, merged by the position of the last member
def assign_buckets(parameters, cap_bytes):
    closed, rest = [], []
    position = {id(p): i for i, p in enumerate(reversed(parameters))}
    for kind in dict.fromkeys(p.dtype for p in reversed(parameters)):
        bucket = []
        for p in [p for p in reversed(parameters) if p.dtype == kind]:
            bucket.append(p)
            if sum(q.nbytes for q in bucket) >= cap_bytes:
                closed.append(bucket)
                bucket = []
        if bucket:
            rest.append(bucket)
    return sorted(closed, key=lambda bucket: position[id(bucket[-1])]) + rest


# %% 5.1 wrong: forward order | backward finishes the last parameters first
#- reversed(parameters)
#+ parameters
# %% 5.1 wrong: ignores the cap | the cap is ignored
#- >= cap_bytes
#+ >= float("inf")
# %% 5.1 wrong: one bucket a parameter | every parameter has a bucket of its own
#- return closed + list(filling.values())
#+ return [[p] for p in reversed(parameters)]
# %% 5.1 wrong: numbers for bytes | counted in bytes
#- q.numel() * q.element_size()
#+ q.numel()
# %% 5.1 wrong: cap never exceeded | with the parameter that fills it
def assign_buckets(parameters, cap_bytes):
    filling, closed = {}, []
    for p in reversed(parameters):
        bucket = filling.setdefault(p.dtype, [])
        if bucket and sum(q.nbytes for q in bucket) + p.nbytes > cap_bytes:
            closed.append(filling.pop(p.dtype))
            bucket = filling.setdefault(p.dtype, [])
        bucket.append(p)
    return closed + list(filling.values())


# %% 5.1 wrong: last bucket lost | is the last bucket, which never fills, kept
#- return closed + list(filling.values())
#+ return closed
# %% 5.1 wrong: dtypes mixed | a bucket holds two dtypes
#- filling.setdefault(p.dtype, [])
#+ filling.setdefault("all", [])
#- filling.pop(p.dtype)
#+ filling.pop("all")
# %% 5.1 wrong: greater, not equal | with the parameter that fills it
#- >= cap_bytes
#+ > cap_bytes
# %% 5.1 wrong: buckets in reverse | not in the order in which they fill
#- return closed + list(filling.values())
#+ return list(filling.values()) + closed[::-1]
# %% 5.1 wrong: package's own | your code calls stage5_bucketed.assign_buckets
def assign_buckets(parameters, cap_bytes):
    from ddp_course import stage5_bucketed

    return stage5_bucketed.assign_buckets(parameters, cap_bytes / 2**20)


# %% 5.1 hidden: knows two dtypes | KeyError
#- filling, closed = {}, []
#+ filling, closed = {torch.float32: [], torch.float64: []}, []
#- filling.setdefault(p.dtype, [])
#+ filling[p.dtype]
#-             closed.append(filling.pop(p.dtype))
#+             closed.append(bucket)
#+             filling[p.dtype] = []
#- return closed + list(filling.values())
#+ return closed + [bucket for bucket in filling.values() if bucket]
# %% 5.2 right: a function of its own
def tell_when_ready(parameters, ready):
    def hook(parameter):
        ready(parameter)

    for parameter in filter(lambda p: p.requires_grad, parameters):
        parameter.register_post_accumulate_grad_hook(hook)


# %% 5.2 right: the accumulator's hook
def tell_when_ready(parameters, ready):
    keep = []
    for parameter in parameters:
        if parameter.requires_grad:
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(lambda *_, parameter=parameter: ready(parameter))
            keep.append(accumulator)
    ready.accumulators = keep


# %% 5.2 wrong: hook before accumulation | has no gradient yet
#- parameter.register_post_accumulate_grad_hook(ready)
#+ parameter.register_hook(lambda gradient, parameter=parameter: ready(parameter))
# %% 5.2 wrong: late binding | always gets the same parameter
#- parameter.register_post_accumulate_grad_hook(ready)
#+ parameter.register_post_accumulate_grad_hook(lambda _: ready(parameter))
# %% 5.2 wrong: gradient handed over | hand it the parameter, not its gradient
#- parameter.register_post_accumulate_grad_hook(ready)
#+ parameter.register_hook(ready)
# %% 5.2 wrong: frozen not expected | RuntimeError
#-         if parameter.requires_grad:
#-             parameter.register
#+         parameter.register
# %% 5.2 wrong: once only | a hook stays for all passes
#-             parameter.register_post_accumulate_grad_hook(ready)
#+             handles = []
#+             hook = lambda p, handles=handles: [handles[0].remove(), ready(p)] and None
#+             handles.append(parameter.register_post_accumulate_grad_hook(hook))
# %% 5.2 wrong: called at once | give the hook a function
#- register_post_accumulate_grad_hook(ready)
#+ register_post_accumulate_grad_hook(ready(parameter) or ready)
# %% 5.2 wrong: matrices only | are trainable
#- if parameter.requires_grad:
#+ if parameter.requires_grad and parameter.dim() > 1:
# %% 5.2 wrong: no hook | ready was never called
#-             parameter.register_post_accumulate_grad_hook(ready)
#+             pass
# %% 5.3 right: divide afterwards
def average_in_background(flats, all_reduce, executor, world_size):
    running = [executor.submit(all_reduce, flat) for flat in flats]
    for flat, future in zip(flats, running):
        future.result()
        flat.mul_(1 / world_size)


# %% 5.3 right: divide in the thread
def average_in_background(flats, all_reduce, executor, world_size):
    def job(flat):
        all_reduce(flat)
        flat.div_(world_size)

    list(executor.map(job, flats))


# %% 5.3 wrong: never waits | wait for all of them
#-     for future in futures:
#-         future.result()
#+     return futures
# %% 5.3 wrong: waits after each | submit all, then wait for all
def average_in_background(flats, all_reduce, executor, world_size):
    for flat in flats:
        flat /= world_size
        executor.submit(all_reduce, flat).result()


# %% 5.3 wrong: no division | is there a division by K
#-         flat /= world_size
# %% 5.3 wrong: not in place | wrong
#-         flat /= world_size
#+         flat = flat / world_size
# %% 5.3 wrong: waits for the last only, errors lost | an error in the communication thread is lost
#-     for future in futures:
#-         future.result()
#+     from concurrent.futures import wait
#+
#+     wait(futures)
# %% 5.3 wrong: in the training thread | submit it to the executor
#- futures.append(executor.submit(all_reduce, flat))
#+ all_reduce(flat)
# %% 5.3 wrong: last bucket first | all ranks must take them by index
#- for flat in flats:
#+ for flat in reversed(flats):
# %% 5.3 wrong: K is 4 | it was divided by 4
#- flat /= world_size
#+ flat /= 4
# %% 5.3 wrong: first bucket not waited for | returned after
#- for future in futures:
#+ for future in futures[:1]:
