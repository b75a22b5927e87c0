"""Reducers for models in which a pass does not compute each gradient exactly once.

find_unused_parameters    each pass and each rank may leave other parameters without a gradient
static_graph              a gradient may come in no part or in several, but in as many in every
                          pass
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
    """Finds the unused parameters after every forward pass, and keeps its first buckets."""

    reason = UNUSED_ALTHOUGH_SEARCHED
    keeps_buckets = True

    def __init__(self, parameters, *args, **kwargs):
        super().__init__(parameters, *args, **kwargs)
        # This has 1 for each parameter that this rank has used since the last synchronised pass,
        # else 0.
        self.used = [0] * len(parameters)
        # This says how many ranks used each parameter, by the last bitmap.
        self.users = [0] * len(parameters)

    def unused_behind(self, outputs):
        """Return the indices of the parameters that are not in the graph behind `outputs`."""
        tensors = tensors_in(outputs)
        used = used_by(tensors) if tensors else set(self.parameters)
        return [index for index, parameter in enumerate(self.parameters) if parameter not in used]

    def listen_to(self, outputs, begin):
        """Listen by an entrance, so that outputs which the loss does not use get gradients, too."""
        return behind_entrance(outputs, begin)

    def gradient_ready(self, index):
        """Note that the parameter was used, also in a `no_sync` pass, and reduce its gradient."""
        if self.parameters[index].grad is not None:
            self.used[index] = 1
        super().gradient_ready(index)

    def completed_by(self, index):
        """Return the parameter, and with the first gradient of a pass all unused ones."""
        return [*self.current.take_unused(), index]

    def all_sent(self):
        """Send the bitmap after the last bucket."""
        self.counting = count_users(self.used, self.parameters[0].device, self.group)

    def untouched(self):
        """Return the parameters that are 0 in the sum of the bitmaps."""
        self.users = self.counting()
        self.used = [0] * len(self.parameters)
        return unused_by_all(self.parameters, self.users)

    def shadow(self):
        """Shadow a backward pass, and repeat the last bitmap, as torch does.

        So a parameter that was used remains in use.
        """
        super().shadow()
        self.users = count_users(self.users, self.parameters[0].device, self.group)()


class StaticGraph(Reducer):
    """Counts the parts of each gradient in the first pass, and expects as many in later ones.

    The gradients of the first pass are reduced at its end.
    """

    reason = CHANGED

    def __init__(self, parameters, *args, **kwargs):
        super().__init__(parameters, *args, **kwargs)
        # Each gradient came in so many parts in the first pass.
        self.counts = [0] * len(parameters)
        self.counted = False  # whether the first pass has ended
        # These are the parameters that no rank used in the first pass; None until the ranks know
        # them.
        self.never_used = None

    def listen_to(self, outputs, begin):
        """Listen by an entrance in the first pass, so that unused outputs get gradients, too."""
        if not self.counted:
            return behind_entrance(outputs, begin)
        return super().listen_to(outputs, begin)

    def start_pass(self):
        """Begin a pass: the first reduces all gradients at its end, later ones expect all parts."""
        super().start_pass()
        if not self.counted:
            after_backward(self.reduce_all)
            return
        self.remaining = list(self.counts)  # the number of parts of each gradient that are to come
        self.current.unused = [index for index, count in enumerate(self.counts) if count == 0]

    def completed_by(self, index):
        """Yield the parameter, when this was the last part of its gradient.

        The first pass yields nothing. Raises RuntimeError if the graph has changed since then.
        """
        if not self.counted:
            # By this `check_finished` sees that the pass has begun.
            self.current.ready[index] = True
            self.counts[index] += 1
            return
        yield from self.current.take_unused()
        if not self.remaining[index]:
            raise RuntimeError(used_anew(self.names[index]))
        self.remaining[index] -= 1
        if not self.remaining[index]:
            yield index

    def reduce_all(self):
        """Reduce all gradients at the end of the first pass, in however many parts they came."""
        # The pass may have led to no parameter of this model.
        if not self.current:
            return
        self.counted = True
        # `mark_ready` fills this again, and would refuse an index that is there already.
        self.current.ready = {}
        self.counting = count_users(self.counts, self.parameters[0].device, self.group)
        for index in range(len(self.parameters)):
            self.mark_ready(index)

    def untouched(self):
        """Return the parameters that no rank used in the first pass; the ranks are asked once."""
        if self.never_used is None:
            self.never_used = unused_by_all(self.parameters, self.counting())
            # The next pass shows in which order gradients become ready.
            self.order = []
        return self.never_used


def unused_by_all(parameters, users):
    """Return the parameters that have no users, as the bitmap says."""
    return {parameter for parameter, count in zip(parameters, users, strict=True) if count == 0}
