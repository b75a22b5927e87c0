"""Reducers for models in which a pass does not compute each gradient exactly once.

find_unused_parameters    each pass and each rank may leave other parameters without a gradient
static_graph              a gradient may come in no part or in several, but in the same number in
                          every pass
"""

from manyranks.torch_inside import after_backward, tensors_in

from .reducer import Reducer
from .unused import (
    CHANGED,
    UNUSED_ALTHOUGH_SEARCHED,
    behind_entrance,
    count_users,
    used_anew,
    used_by,
)


class FindUnused(Reducer):
    """Finds the unused parameters after every forward pass.

    The order may change, so buckets stay as they are.
    """

    reason = UNUSED_ALTHOUGH_SEARCHED
    keeps_buckets = True

    def __init__(self, parameters, *args, **kwargs):
        super().__init__(parameters, *args, **kwargs)
        # 1 for each parameter that this rank has used since the last synchronised pass, else 0.
        self.used = [0] * len(parameters)
        # How many ranks used each parameter, by the last bitmap.
        self.users = [0] * len(parameters)

    def unused_behind(self, outputs):
        """The parameters that are not in the graph behind `outputs`."""
        tensors = tensors_in(outputs)
        used = used_by(tensors) if tensors else set(self.parameters)
        return [index for index, parameter in enumerate(self.parameters) if parameter not in used]

    def listen_to(self, outputs, begin):
        """By an entrance, so that outputs which the loss does not use get gradients too."""
        return behind_entrance(outputs, begin)

    def gradient_ready(self, index):
        """As in every reducer.

        Also note the use, in a `no_sync` pass too: its gradient will be averaged later.
        """
        if self.parameters[index].grad is not None:
            self.used[index] = 1
        super().gradient_ready(index)

    def completed_by(self, index):
        """With the first gradient of a pass all unused parameters too."""
        return [*self.current.take_unused(), index]

    def all_sent(self):
        """Send the bitmap after the last bucket."""
        self.counting = count_users(self.used, self.parameters[0].device, self.group)

    def untouched(self):
        """The parameters that are 0 in the sum of the bitmaps."""
        self.users = self.counting()
        self.used = [0] * len(self.parameters)
        return unused_by_all(self.parameters, self.users)

    def shadow(self):
        """As in every reducer.

        Also repeat the last bitmap, as torch does: a parameter that was used remains in use.
        """
        super().shadow()
        self.users = count_users(self.users, self.parameters[0].device, self.group)()


class StaticGraph(Reducer):
    """Counts the parts of each gradient in the first pass, and reduces at its end.

    Later passes expect the same.
    """

    reason = CHANGED

    def __init__(self, parameters, *args, **kwargs):
        super().__init__(parameters, *args, **kwargs)
        # How many parts of each gradient came in the first pass.
        self.counts = [0] * len(parameters)
        self.counted = False  # True from the end of the first pass on.
        # The set of parameters that no rank used in the first pass; None until the ranks know it.
        self.never_used = None

    def listen_to(self, outputs, begin):
        """In the first pass by an entrance, so that unused outputs get gradients too."""
        if not self.counted:
            return behind_entrance(outputs, begin)
        return super().listen_to(outputs, begin)

    def start_pass(self):
        """In the first pass, arrange that all gradients are reduced once, at its end.

        In later ones all parts of all gradients are expected.
        """
        super().start_pass()
        if not self.counted:
            after_backward(self.reduce_all)
            return
        self.remaining = list(self.counts)  # So many parts of each gradient are still to come.
        self.current.unused = [index for index, count in enumerate(self.counts) if count == 0]

    def completed_by(self, index):
        """Yield nothing in the first pass.

        Later the parameter, when this was the last part of its gradient. Raises RuntimeError if the
        graph has changed since the first pass.
        """
        if not self.counted:
            self.current.ready[index] = True  # `check_finished` shall see that the pass has begun.
            self.counts[index] += 1
            return
        yield from self.current.take_unused()
        if not self.remaining[index]:
            raise RuntimeError(used_anew(self.names[index]))
        self.remaining[index] -= 1
        if not self.remaining[index]:
            yield index

    def reduce_all(self):
        """At the end of the first pass, reduce all gradients, in however many parts they came."""
        if not self.current:  # It led to no parameter of this model.
            return
        self.counted = True
        self.current.ready = {}  # `mark_ready` fills it again, and refuses what is there already.
        self.counting = count_users(self.counts, self.parameters[0].device, self.group)
        for index in range(len(self.parameters)):
            self.mark_ready(index)

    def untouched(self):
        """The parameters that no rank used in the first pass; the ranks are asked once."""
        if self.never_used is None:
            self.never_used = unused_by_all(self.parameters, self.counting())
            self.order = []  # The next pass shows in which order gradients become ready.
        return self.never_used


def unused_by_all(parameters, users):
    """The parameters of which the bitmap says that they have no users."""
    return {parameter for parameter, count in zip(parameters, users, strict=True) if count == 0}
