# %% [markdown]
# Answers to exercise 1 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 1.1 right: zero_grad at the end
def train_step(model, optimizer, inputs, targets):
    for parameter in model.parameters():
        parameter.grad = None
    loss = torch.nn.CrossEntropyLoss()(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)

# %% 1.1 right: update by hand
def train_step(model, optimizer, inputs, targets):
    value = cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient
    optimizer.step()
    return value.detach().item()

# %% 1.1 wrong: no zero_grad | gradients pile up from step to step: is there a zero_grad()?
#- optimizer.zero_grad()

# %% 1.1 wrong: no step | the weights have not changed: is there a backward() and then a step(), and no zero_grad() between them?
#-     optimizer.step()

# %% 1.1 wrong: zero_grad after backward | the weights have not changed: is there a backward() and then a step(), and no zero_grad() between them?
#-     optimizer.zero_grad()
#-     loss = cross_entropy(model(inputs), targets)
#-     loss.backward()
#+     loss = cross_entropy(model(inputs), targets)
#+     loss.backward()
#+     optimizer.zero_grad()

# %% 1.1 told: step before backward | step() comes after backward()
def train_step(model, optimizer, inputs, targets):
    loss = cross_entropy(model(inputs), targets)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    return loss.item()

# %% 1.1 wrong: returns a tensor | the loss is a tensor; return loss.item(), a plain number
#- loss.item()
#+ loss

# %% 1.1 told: returns nothing | is there a `return`?
#-     return loss.item()

# %% 1.1 wrong: loss after the update | the loss is another one: return the mean loss before the update
#- return loss.item()
#+ return cross_entropy(model(inputs), targets).item()

# %% 1.1 wrong: summed loss | the steps are too large: the loss is the mean over the samples, not their sum
#- cross_entropy(model(inputs), targets)
#+ cross_entropy(model(inputs), targets, reduction="sum")

# %% 1.1 wrong: the update is a step late | the update is one step late: backward() comes before step()
def train_step(model, optimizer, inputs, targets):
    optimizer.step()
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.item()

# %% 1.1 told: rounded | was expected
#- loss.item()
#+ round(loss.item(), 3)

# %% 1.1 told: rounded, as text | a plain float was expected
#- loss.item()
#+ f"{loss.item():.4f}"

# %% 1.1 wrong: softmax first | cross_entropy takes the model's own outputs: no softmax before it
#- cross_entropy(model(inputs), targets)
#+ cross_entropy(model(inputs).softmax(1), targets)

# %% 1.1 wrong: rounded to four places | return the loss as it is: nothing is rounded
#- loss.item()
#+ round(loss.item(), 4)

# %% 1.1 told: lazy, the course's own loop | your code calls stage1_single.train
def train_step(model, optimizer, inputs, targets):
    from ddp_course import stage1_single

    (loss,) = stage1_single.train(model, [(inputs, targets)], lr=optimizer.param_groups[0]["lr"])
    return loss

# %% 1.1 told: lazy, the weights moved by hand | the weights change without the optimizer: it makes the update, by its step()
#- optimizer.step()
#+ for parameter in model.parameters():
#+         parameter.data -= optimizer.param_groups[0]["lr"] * parameter.grad

# %% 1.1 told: lazy, an optimizer of its own | the weights change without the optimizer: it makes the update, by its step()
#- optimizer.step()
#+ torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"]).step()

# %% 1.2 wrong: divided by samples | the loss is a mean over samples already: divide it by the number of micro-batches
#- / len(micro_batches)
#+ / len(targets)

# %% 1.2 wrong: cleared each time, undivided | only the last micro-batch counts, and undivided: zero_grad() belongs before the first one
#- loss = cross_entropy(model(inputs), targets) / len(micro_batches)
#+ loss = cross_entropy(model(inputs), targets)
#- loss.backward()
#+ optimizer.zero_grad()
#+         loss.backward()
#- return total
#+ return total / len(micro_batches)

# %% 1.2 right: whole batch in the mean
def accumulate(model, optimizer, micro_batches):
    optimizer.zero_grad()
    samples = sum(len(targets) for _, targets in micro_batches)
    summed = 0
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets, reduction="sum")
        (loss / samples).backward()
        summed += loss.item()
    optimizer.step()
    return summed / samples

# %% 1.2 right: divide the gradients
def accumulate(model, optimizer, micro_batches):
    optimizer.zero_grad()
    losses = []
    for inputs, targets in micro_batches:
        losses.append(cross_entropy(model(inputs), targets))
        losses[-1].backward()
    for parameter in model.parameters():
        parameter.grad /= len(losses)
    optimizer.step()
    return (sum(losses) / len(losses)).item()

# %% 1.2 wrong: no division | the gradients add up to too much: divide each loss by the number of micro-batches
#- cross_entropy(model(inputs), targets) / len(micro_batches)
#+ cross_entropy(model(inputs), targets)

# %% 1.2 wrong: update in the loop | there is an update after every micro-batch; all together give one update
#-     optimizer.step()
#+         optimizer.step()

# %% 1.2 wrong: zero_grad in the loop | only the last micro-batch counts: zero_grad() belongs before the first one, not before each
#- loss.backward()
#+ optimizer.zero_grad()
#+         loss.backward()

# %% 1.2 wrong: never cleared | gradients pile up from call to call: is there a zero_grad()?
#-     optimizer.zero_grad()

# %% 1.2 wrong: divided by samples too | the gradients are divided twice: the loss is a mean over samples already
#- / len(micro_batches)
#+ / len(micro_batches) / len(targets)

# %% 1.2 wrong: sum of the losses | return the mean over all samples
#-         total += loss.item()
#+         total += loss.item() * len(micro_batches)

# %% 1.2 wrong: last one left out | the last micro-batch is left out
#- in micro_batches:
#+ in micro_batches[:-1]:

# %% 1.2 wrong: loss is a tensor | the loss is a tensor; return a plain number
#- total += loss.item()
#+ total += loss

# %% 1.2 wrong: no update | no updates: each call makes one, at its end
#-     optimizer.step()

# %% 1.2 wrong: loss of the last one | that is the loss of the last micro-batch: return the mean over all of them
#- return total
#+ return loss.item() * len(micro_batches)

# %% 1.2 wrong: loss divided twice | the mean of the losses is divided by the number of micro-batches once more
#- return total
#+ return total / len(micro_batches)

# %% 1.2 wrong: first one left out | the first micro-batch is left out
#- in micro_batches:
#+ in micro_batches[1:]:

# %% 1.2 told: lazy, one batch of all | there is room for the 6 of one micro-batch, so take one after the other
def accumulate(model, optimizer, micro_batches):
    optimizer.zero_grad()
    inputs = torch.cat([inputs for inputs, _ in micro_batches])
    targets = torch.cat([targets for _, targets in micro_batches])
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()

# %% 1.2 told: lazy, one backward pass for all | graphs are kept at the same time, and memory has room for the activations of one micro-batch: go backward after each forward pass, which frees them
def accumulate(model, optimizer, micro_batches):
    optimizer.zero_grad()
    losses = [cross_entropy(model(inputs), targets) for inputs, targets in micro_batches]
    loss = sum(losses) / len(losses)
    loss.backward()
    optimizer.step()
    return loss.item()

# %% 1.2 told: lazy, all outputs joined | graphs are kept at the same time, and memory has room for the activations of one micro-batch: go backward after each forward pass, which frees them
def accumulate(model, optimizer, micro_batches):
    optimizer.zero_grad()
    outputs = torch.cat([model(inputs) for inputs, _ in micro_batches])
    loss = cross_entropy(outputs, torch.cat([targets for _, targets in micro_batches]))
    loss.backward()
    optimizer.step()
    return loss.item()

# %% 1.2 told: all forward, then all backward | go backward after each forward pass, which frees them
def accumulate(model, optimizer, micro_batches):
    optimizer.zero_grad()
    losses = [cross_entropy(model(inputs), targets) for inputs, targets in micro_batches]
    for loss in losses:
        (loss / len(losses)).backward()
    optimizer.step()
    return (sum(losses) / len(losses)).item()

# %% 1.3 right: a loop
def gradient_bytes(model):
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            total += parameter.nbytes
    return total

# %% 1.3 right: from real gradients
def gradient_bytes(model):
    return sum(torch.zeros_like(p).untyped_storage().nbytes() for p in model.parameters() if p.requires_grad)

# %% 1.3 wrong: numbers | those are numbers, not bytes: each takes element_size() bytes
#- p.numel() * p.element_size()
#+ p.numel()

# %% 1.3 wrong: lazy, four bytes | not every parameter is float32: ask for element_size()
#- p.element_size()
#+ 4

# %% 1.3 wrong: the first parameter's size for all | not all parameters are of one dtype: ask each for its element_size()
def gradient_bytes(model):
    size = next(model.parameters()).element_size()
    return sum(p.numel() * size for p in model.parameters() if p.requires_grad)

# %% 1.3 wrong: frozen too | frozen parameters (requires_grad=False) have no gradient
#-  if p.requires_grad

# %% 1.3 wrong: buffers too | buffers have no gradient
def gradient_bytes(model):
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return trained + sum(b.nbytes for b in model.buffers())

# %% 1.3 wrong: number of tensors | that is the number of tensors
#- sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
#+ len([p for p in model.parameters() if p.requires_grad])

# %% 1.3 wrong: megabytes | those are units of 2^20 bytes: the bytes themselves were asked for
#-  if p.requires_grad)
#+  if p.requires_grad) / 2**20

# %% 1.3 wrong: layer by layer | a parameter that two layers share is counted in both: model.parameters() gives each once
def gradient_bytes(model):
    total = 0
    for layer in model.modules():
        for p in layer.parameters(recurse=False):
            if p.requires_grad:
                total += p.numel() * p.element_size()
    return total

# %% 1.3 wrong: lazy, gradients that are there | before a backward pass there are no gradients yet: each will be as large as its parameter
#- for p in model.parameters() if p.requires_grad
#+ for p in model.parameters() if p.grad is not None

# %% 1.3 wrong: rows | that is len(p), the rows of a matrix: numel() counts all numbers
#- p.numel()
#+ len(p)

# %% 1.3 wrong: all of the state_dict | neither frozen parameters nor buffers have a gradient
def gradient_bytes(model):
    return sum(tensor.nbytes for tensor in model.state_dict().values())

# %% 1.3 wrong: parameters of each module | a parameter is counted in every module around it: model.parameters() gives each once
def gradient_bytes(model):
    return sum(p.nbytes for module in model.modules() for p in module.parameters() if p.requires_grad)

# %% 1.3 wrong: bits | those are bits: a byte has eight
#- p.element_size()
#+ p.element_size() * 8

# %% 1.3 wrong: sys.getsizeof | getsizeof tells the size of Python's object, not of the numbers in the tensor
#- sum(p.numel() * p.element_size() for
#+ sum(p.__sizeof__() + 16 for

# %% 1.3 wrong: no biases | parameters in one row, such as biases, have a gradient too
#-  if p.requires_grad
#+  if p.requires_grad and p.dim() > 1
