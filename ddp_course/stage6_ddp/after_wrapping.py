"""Is it still the model that was wrapped?

The reducer listens to the parameters that a model had when it was wrapped. Others get gradients
too, which nobody averages: after `load_state_dict(…, assign=True)`, `layer.weight = Parameter(…)`,
`parametrize`, an adapter in place of a layer, or when a frozen parameter is to be trained after
all. So every forward pass with gradients looks whether the model has the same parameters. That
takes a third of a microsecond for each layer: it compares the contents of the layers' dicts in C.
"""

import weakref
from itertools import chain
from operator import attrgetter, is_, methodcaller

from ..torch_private import uncompiled

contents = methodcaller("values")
trains = attrgetter("requires_grad")
WHAT_TO_DO = (
    "change and load a model before it is wrapped, or wrap it anew; load_state_dict() without"
    " assign=True, and parameter.copy_(…), write new values into the same parameter"
)


class Inventory:
    """The parameters of `module` when it was wrapped; `averaged`, {name: parameter}, are those
    whose gradients are averaged. `names` of others are ignored. Frozen ones are refused unless
    some `may_be_unused`.
    """

    def __init__(self, module, averaged, ignored, may_be_unused):
        self.module = module
        self.averaged = averaged
        self.ignored = ignored
        self.may_be_unused = may_be_unused
        # torch.utils.swap_tensors exchanges what is inside a parameter, which nothing here would
        # see. It refuses a parameter to which there is a weak reference.
        self.not_swapped = [weakref.ref(parameter) for parameter in averaged.values()]
        self.note()

    def note(self):
        """Keep what each layer has, and which parameters are trained."""
        self.dicts = []
        for layer in self.module.modules():
            self.dicts += [layer._parameters, layer._modules]
        self.held = self.now_held()
        self.parameters = list(self.module.parameters())
        self.trained = list(map(trains, self.parameters))

    def now_held(self):
        """The parameters and layers that each layer has now."""
        return [*chain.from_iterable(map(contents, self.dicts))]

    @uncompiled
    def check(self):
        """Raise RuntimeError, with the name of a parameter, if gradients would not be averaged."""
        held = self.now_held()
        same = len(held) == len(self.held) and all(map(is_, held, self.held))
        if same and list(map(trains, self.parameters)) == self.trained:
            return
        difference = self.difference()
        if difference:
            raise RuntimeError(f"{difference}: {WHAT_TO_DO}")
        self.note()

    def difference(self):
        """The words for a parameter that is another one than before; None if there is none."""
        present = dict(self.module.named_parameters(remove_duplicate=False))
        known = set(self.averaged.values())
        for name, parameter in present.items():
            if parameter.requires_grad and parameter not in known and name not in self.ignored:
                return (
                    f"parameter {name} was another one, frozen, or not there when the model was"
                    " wrapped, so nobody would average its gradient"
                )
        missing = known.difference(present.values())
        frozen = {parameter for parameter in known if not parameter.requires_grad}
        refused = set() if frozen == known or self.may_be_unused else frozen
        for name, parameter in self.averaged.items():
            if parameter in missing:
                return f"parameter {name} is no longer in the model that was wrapped"
            if parameter in refused:
                return (
                    f"parameter {name} was frozen after the model was wrapped, and the other"
                    " gradients would wait for its own; find_unused_parameters=True allows that"
                )
        return None
