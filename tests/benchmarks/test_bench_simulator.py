"""The simulator against our own training: what cannot be seen is found at two ranks, three and four are predicted."""

from benchmarks import own_training
from ddp_course import launch
from ddp_course.measuring.simulate import Layer, Profile
from ddp_course.measuring.theory import Costs

MIB = 2**20


def even_profile(layers, forward, backward, nbytes):
    return Profile(tuple(Layer(f"layer {k}", forward, backward, nbytes) for k in range(layers)), 5e-4)


def made_up_rows(profiles, costs, unseen):
    """Step times as the simulator itself would have them."""
    settings = [
        (m, k, K, cap) for m in profiles for k in own_training.IMPLEMENTATIONS for K in (2, 3, 4) for cap in (0.25, 1)
    ]
    rows = [dict(zip(("model", "implementation", "K", "bucket_cap_mb"), setting, strict=True)) for setting in settings]
    times = [own_training.predict(row, profiles, costs[row["implementation"]], 2, unseen) for row in rows]
    return [row | {"measured_ms": 1e3 * seconds} for row, seconds in zip(rows, times, strict=True)]


def test_what_cannot_be_seen_is_found_at_two_ranks_and_carried_to_four():
    profiles = {"deep": even_profile(16, 4e-3, 8e-3, MIB / 8), "wide": even_profile(4, 1e-3, 2e-3, MIB)}
    costs = dict.fromkeys(own_training.IMPLEMENTATIONS, Costs(1e-4, 4e-8))
    truth = own_training.Unseen(1.5, 0.3, 2e-3)
    rows = made_up_rows(profiles, costs, truth)
    result = own_training.predict_rows(rows, profiles, costs, 2)
    assert result["held_out_error"]["largest"] < 0.02
    spoilt = [row if row["K"] == 2 else row | {"measured_ms": 1.0} for row in rows]
    again = own_training.predict_rows(spoilt, profiles, costs, 2)
    assert again["calibration"] == result["calibration"] and again["held_out_error"]["median"] > 10
    blind = own_training.predict_rows(rows, profiles, costs, cores=8)  # control: as if each rank had a core of its own
    assert blind["held_out_error"]["largest"] > 0.1


def test_training_is_timed_in_every_setting():
    seconds = launch(own_training.time_setting, "synthetic", "stage 5", 1.0, world_size=2, device="cpu")
    assert all(len(rank) == own_training.STEPS and min(rank) > 0 for rank in seconds)
