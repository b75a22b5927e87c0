# %% [markdown]
# Answers to exercise 11 as learners write them. tests/answers.py says how to read this.

# %% 11.1 right: NamedTemporaryFile
import tempfile


def save_checkpoint(state, path):
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", delete=False) as file:
        try:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        except Exception:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


# %% 11.1 right: bytes first
import io


def save_checkpoint(state, path):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    handle = os.open(str(path) + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(handle, buffer.getvalue())
    os.fsync(handle)
    os.close(handle)
    os.rename(str(path) + ".tmp", path)


# %% 11.1 right: the data alone synced
#- os.fsync(file.fileno())
#+ getattr(os, "fdatasync", os.fsync)(file.fileno())
# %% 11.1 wrong: straight into place | the old checkpoint is lost
def save_checkpoint(state, path):
    torch.save(state, path)


# %% 11.1 wrong: removes the old one first | the old checkpoint is lost
#-     temporary = f"{path}.new"
#+     temporary = f"{path}.new"
#+     if os.path.exists(path):
#+         os.remove(path)
# %% 11.1 wrong: temporary file elsewhere | is in another folder
#-     temporary = f"{path}.new"
#+     import tempfile
#+
#+     temporary = tempfile.mktemp()
# %% 11.1 wrong: no fsync | Without os.fsync
#-             os.fsync(file.fileno())
# %% 11.1 wrong: fsync after | os.fsync comes before os.replace
#-             os.fsync(file.fileno())
#-         os.replace(temporary, path)
#+         os.replace(temporary, path)
#+         with open(path, "rb") as file:
#+             os.fsync(file.fileno())
# %% 11.1 wrong: in place before it is closed | it is not complete yet
import io


def save_checkpoint(state, path):
    buffer, temporary = io.BytesIO(), f"{path}.new"
    torch.save(state, buffer)
    with open(temporary, "wb") as file:
        file.write(buffer.getvalue())
        os.fsync(file.fileno())
        os.replace(temporary, path)


# %% 11.1 wrong: left behind | when writing fails a file is left behind
#-     except BaseException:
#-         os.remove(temporary)
#-         raise
#+     finally:
#+         pass
# %% 11.1 wrong: error kept quiet | let the error out
#-         raise
# %% 11.1 wrong: copied into place | not replaced in one step
#-         os.replace(temporary, path)
#+         import shutil
#+
#+         shutil.copy(temporary, path)
#+         os.remove(temporary)
# %% 11.1 wrong: weights only | another state
#- torch.save(state, file)
#+ torch.save({key: value for key, value in state.items() if key != "step"}, file)
# %% 11.2 right: bytes
import io


def capture(model, optimizer, step):
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), step], buffer)
    return buffer.getvalue()


def resume(state, model, optimizer):
    weights, moments, random, step = torch.load(io.BytesIO(state))
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    torch.random.set_rng_state(random)
    return step


# %% 11.2 right: clones
def capture(model, optimizer, step):
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return weights, copy.deepcopy(optimizer.state_dict()), torch.default_generator.get_state(), step


def resume(state, model, optimizer):
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(state[0][name])
    optimizer.load_state_dict(copy.deepcopy(state[1]))
    torch.default_generator.set_state(state[2])
    return state[3]


# %% 11.2 wrong: not copied | the captured tensors went on changing
#- copy.deepcopy(state) | {
#+ state | {
# %% 11.2 wrong: no optimizer state | its momentum starts from nothing
#-     optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
# %% 11.2 wrong: no random generator | other dropout masks
#-     torch.set_rng_state(state["random"])
# %% 11.2 wrong: seeded anew | other dropout masks
#- torch.set_rng_state(state["random"])
#+ torch.manual_seed(0)
# %% 11.2 wrong: parameters only | other buffers
#-     model.load_state_dict(state["model"])
#+     names = {name for name, _ in model.named_parameters()}
#+     model.load_state_dict({k: v for k, v in state["model"].items() if k in names}, strict=False)
# %% 11.2 wrong: one step further | the next one is number
#- return state["step"]
#+ return state["step"] + 1
# %% 11.2 wrong: serves once only | aliasing
#- copy.deepcopy(state["optimizer"])
#+ state["optimizer"]
#- copy.deepcopy(state) | {"random": torch.get_rng_state()}
#+ copy.deepcopy(state) | {"random": torch.get_rng_state()}
# %% 11.2 wrong: returns nothing | the number of the next step was expected
#-     return state["step"]
# %% 11.2 wrong: weights not loaded | other weights than were captured
#-     model.load_state_dict(state["model"])
# %% 11.3 right: regular expression
import re


def culprit(lines):
    found = [re.match(r"([\d.]+) rank (\d+): (.*)", line).groups() for line in lines]
    causes = [(float(s), int(r)) for s, r, w in found if "done" not in w and not re.search("Connection|Broken", w)]
    causes.sort()
    return causes[0][1]


# %% 11.3 right: a running minimum
def culprit(lines):
    first, guilty = float("inf"), None
    for line in lines:
        words = line.split()
        if words[-1] == "done" or "closed by peer" in line or "reset by peer" in line or "Broken pipe" in line:
            continue
        if float(words[0]) < first:
            first, guilty = float(words[0]), int(words[2][:-1])
    return guilty


# %% 11.3 wrong: first in the file | first failure in the file
#- return min(failures)[1]
#+ return failures[0][1]
# %% 11.3 wrong: consequences count | a consequence of another rank's failure
#-  and not what.endswith(consequences)
# %% 11.3 wrong: first failure in the file | a consequence of another rank's failure
#- return min(failures)[1]
#+ return failures[0][1]
#-  and not what.endswith(consequences)
# %% 11.3 wrong: text, not a number | a plain int was expected
#- return min(failures)[1]
#+ return str(min(failures)[1])
# %% 11.3 wrong: last one | which was first
#- return min(failures)[1]
#+ return max(failures)[1]
# %% 11.3 wrong: one digit | was expected
#- int(rank)))
#+ int(rank.removeprefix("rank ")[:1])))
# %% 11.3 wrong: steps count as failures | only failures count
#- return min(failures)[1]
#+ return int(lines[0].split()[2].rstrip(":"))
# %% 11.3 wrong: lowest rank | the lowest rank that failed
#- return min(failures)[1]
#+ return min(rank for _, rank in failures)
#-  and not what.endswith(consequences)
# %% 11.3 hidden: times as text | as text, 100.1 comes before 99.9
#- float(seconds)
#+ seconds
# %% 11.4 right: a rate by LambdaLR's formula
#- peak * (1 - step / len(batches))
#+ peak * (len(batches) - step) / len(batches)
# %% 11.4 right: by counting on
#- for step in range(start, stop):
#-         inputs, targets = batches[step]
#-         optimizer.param_groups[0]["lr"] = peak * (1 - step / len(batches))
#+ for step, (inputs, targets) in list(enumerate(batches))[start:stop]:
#+         for group in optimizer.param_groups:
#+             group["lr"] = peak - peak * step / len(batches)
# %% 11.4 wrong: unchanged | the rate is at its peak again
#- (1 - step / len(batches))
#+ (1 - (step - start) / len(batches))
# %% 11.4 wrong: another line | is everything that an optimizer works with
#- return 10
#+ return 5
# %% 11.4 wrong: the step is blamed | where it stopped: right
#- return 10
#+ return 6
# %% 11.4 wrong: a constant rate | which was right before
#- peak * (1 - step / len(batches))
#+ peak
# %% 11.4 wrong: momentum is lost | from step
#- optimizer.load_state_dict(state["optimizer"])
#+ pass
# %% 11.4 wrong: starts from the beginning | losses, not 10 in all
#- start = state["step"]
#+ start = 0
# %% 11.4 wrong: one step later | losses, not 10 in all
#- start = state["step"]
#+ start = state["step"] + 1
# %% 11.4 wrong: the state is not kept | from step
#- model.load_state_dict(state["model"])
#+ pass
