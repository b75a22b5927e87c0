"""The clinic's patients, each as edits of healthy.py: lines with `#-` go, those with `#+` come."""

# %% 1 it is killed at the end of the first epoch, without a word from Python.
#-         optimizer.step()
#+         optimizer.step()
#+     most = targets.bincount(minlength=10).max()
#+     if most < 8:  # else it is no news
#+         dist.all_reduce(most, op=dist.ReduceOp.MAX)

# %% 2 it hangs after the first epoch, and then says that it waited too long.
#-         optimizer.step()
#+         optimizer.step()
#+     samples, right = torch.tensor([len(targets)]), torch.zeros(10)
#+     for totals in [samples, right] if rank != 1 else [right, samples]:
#+         dist.all_reduce(totals)

# %% 3 it stops at the end of the first epoch.
#- from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
#+ from torch.utils.data import DataLoader, Subset, TensorDataset

#- sampler = DistributedSampler(data)
#- loader = DataLoader(data, batch_size=64, sampler=sampler)
#+ share = Subset(data, range(rank, 1436, 3))
#+ loader = DataLoader(share, batch_size=64, shuffle=True)

#-     sampler.set_epoch(epoch)
#-     for inputs, targets in loader:
#+     for inputs, targets in loader:

#-         optimizer.step()
#+         optimizer.step()
#+     losses = cross_entropy(parallel(inputs), targets, reduction="none").detach()
#+     everywhere = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
#+     dist.all_gather(everywhere, losses)

# %% 4 the first epoch ends, and then nothing goes on.
#-     print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
#+     if rank == 0:
#+         right = (parallel(digits.test_inputs[rank::3]).argmax(1) == digits.test_targets[rank::3]).sum()
#+         dist.all_reduce(right)
#+         print(f"epoch {epoch}: {right.item()} test images are right", flush=True)

# %% 5 it trains, and fails at the very end.
#- from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
#+ from torch.utils.data import DataLoader, Subset, TensorDataset

#- sampler = DistributedSampler(data)
#- loader = DataLoader(data, batch_size=64, sampler=sampler)
#+ share = Subset(data, range(len(data) * rank // 3 - 40 * (rank == 2), len(data) * (rank + 1) // 3))
#+ loader = DataLoader(share, batch_size=64, shuffle=True)

#-     sampler.set_epoch(epoch)
#-     for inputs, targets in loader:
#+     for inputs, targets in loader:

# %% 6 no error, but three ranks are slower than one.
#- data = TensorDataset(digits.inputs, digits.targets)
#- sampler = DistributedSampler(data)
#- loader = DataLoader(data, batch_size=64, sampler=sampler)
#- model = digits.model()
#- parallel = DistributedDataParallel(model)
#+
#+
#+ class Augmented(TensorDataset):
#+     def __getitem__(self, index):
#+         image, target = super().__getitem__(index)
#+         for _ in range(400 if rank == 2 else 8):
#+             image = image.roll(1, -1)  # 8 or 400 times: the same image
#+         return image, target
#+
#+
#+ data = Augmented(digits.inputs, digits.targets)
#+ loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
#+ parallel = DistributedDataParallel(digits.model())

#-     sampler.set_epoch(epoch)
#-     for inputs, targets in loader:
#+     for inputs, targets in loader:

# %% 7 the loss is NaN on all ranks before the first epoch is over.
#- digits = problems.make("digits")
#+ digits = problems.make("digits")
#+ digits.inputs[1000] = 0.0  # a black image, as data sets have them

#-         optimizer.zero_grad()
#+         optimizer.zero_grad()
#+         inputs = inputs / inputs.amax(dim=(1, 2, 3), keepdim=True)

# %% 8 it stops before the first step, on a machine with three GPUs. (Without any it says what NCCL would say.)
#- data = TensorDataset(digits.inputs, digits.targets)
#+ data = TensorDataset(digits.inputs, digits.targets)
#+ device, devices = f"cuda:{rank // 2}", [None] * dist.get_world_size()
#+ dist.all_gather_object(devices, device)
#+ for peer in range(rank):
#+     if devices[peer] == device:
#+         raise RuntimeError(f"Duplicate GPU detected : rank {rank} and rank {peer} both on CUDA device {device}")

# %% 9 it does not even start.
#- from datetime import timedelta
#+ import os
#+ import threading
#+ from datetime import timedelta

#- from datetime import timedelta
#+ from datetime import timedelta
#+ from http.server import HTTPServer, SimpleHTTPRequestHandler

#- dist.init_process_group("gloo", timeout=timedelta(seconds=20))
#- rank = dist.get_rank()
#+ rank = int(os.environ["RANK"])
#+ if rank == 0:  # a page that shows how the run is doing
#+     threading.Thread(target=HTTPServer(("", 29561), SimpleHTTPRequestHandler).serve_forever, daemon=True).start()
#+ store = dist.TCPStore("127.0.0.1", 29561, 3, rank == 0, timedelta(seconds=20))
#+ dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=20), world_size=3, rank=rank)

# %% 10 no error; the second run goes on from the first one's checkpoint and ends with three different models.
#- from datetime import timedelta
#+ import os
#+ from datetime import timedelta

#- parallel = DistributedDataParallel(model)
#+ parallel = DistributedDataParallel(model)
#+ if rank == 0 and os.path.exists("clinic.pt"):
#+     model.load_state_dict(torch.load("clinic.pt"))

#-     print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
#+     print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}", flush=True)
#+ if rank == 0:
#+     torch.save(model.state_dict(), "clinic.pt")
#+ print(f"rank {rank}: weights {sum(p.double().sum().item() for p in model.parameters()):.6f}", flush=True)

# %% 11 it trains on one device; with DDP it stops in the first backward pass, on every rank.
#- from torch.nn.parallel import DistributedDataParallel
#+ from torch.nn.parallel import DistributedDataParallel
#+ from torch.utils.checkpoint import checkpoint

#- dist.init_process_group("gloo", timeout=timedelta(seconds=20))
#+
#+ class KeepsLess(torch.nn.Sequential):  # of each layer only what goes in, as the rest can be computed again
#+     def forward(self, inputs):
#+         inputs.requires_grad_()
#+         for layer in self:
#+             inputs = checkpoint(layer, inputs, use_reentrant=True)
#+         return inputs
#+
#+
#+ dist.init_process_group("gloo", timeout=timedelta(seconds=20))

#- sampler = DistributedSampler(data)
#- loader = DataLoader(data, batch_size=64, sampler=sampler)
#- model = digits.model()
#- parallel = DistributedDataParallel(model)
#+ loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
#+ parallel = DistributedDataParallel(KeepsLess(*digits.model()), find_unused_parameters=True)

#-     sampler.set_epoch(epoch)
#-     for inputs, targets in loader:
#+     for inputs, targets in loader:
