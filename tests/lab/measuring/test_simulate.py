"""The simulator: events and schedules by hand, rings of two libraries, command and figures."""

import csv
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import predictions, published
from benchmarks.libraries import Simulation
from ddp_course.lab.measuring import facts
from ddp_course.lab.measuring.simulate import Layer, Network, Profile, resnets, simulate
from ddp_course.lab.measuring.simulate.step import knee, on_hosts
from ddp_course.lab.measuring.theory import Costs

MIB = 2**20
LINK = Network(Costs(1e-4, 1e-8))
HOSTS_OF_2 = Network(Costs(0, 1.0), Costs(0, 1.0), per_host=2)


def even_profile(layers=6, forward=1e-3, backward=2e-3, nbytes=MIB, update=5e-4):
    return Profile(
        tuple(Layer(f"layer {k}", forward, backward, nbytes) for k in range(layers)), update
    )


profiles = st.builds(
    lambda rows, update: Profile(tuple(Layer(f"l{k}", *row) for k, row in enumerate(rows)), update),
    st.lists(
        st.tuples(st.floats(0, 5e-3), st.floats(0, 5e-3), st.sampled_from([1e3, 3e4, 1e6, 5e6])),
        min_size=1,
        max_size=8,
    ),
    st.floats(0, 1e-3),
)
link_costs = st.builds(Costs, st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-8))


@pytest.mark.parametrize(
    ("network", "ranks", "seconds"),
    [
        # Two senders share the receiver's link: 3 s each, one after the other; the latency occupies
        # nothing.
        (
            Network(Costs(0.5, 1.0)),
            [[("recv", 1), ("recv", 2)], [("send", 0, 3)], [("send", 0, 3)]],
            6.5,
        ),
        # Both directions are used at once.
        (Network(Costs(0, 1.0)), [[("send", 1, 4), ("recv", 1)], [("recv", 0), ("send", 0, 4)]], 4),
        # A sender waits for its receiver, and no matter how late that is.
        (Network(Costs(0, 1.0)), [[("send", 1, 4)], [("pause", 10), ("recv", 0)]], 14),
        # Ranks of one host share its link, but not the local links.
        (HOSTS_OF_2, [[("send", peer, 3), ("recv", peer)] for peer in (2, 3, 0, 1)], 6),
        (HOSTS_OF_2, [[("send", peer, 3), ("recv", peer)] for peer in (1, 0, 3, 2)], 3),
    ],
)
def test_messages_take_turns_on_links(network, ranks, seconds):
    assert play_events(network, ranks) == pytest.approx(seconds)


def test_a_handshake_takes_a_latency():
    ranks = [[("send", 1, 4)], [("recv", 0)]]
    assert play_events(Network(Costs(2, 1.0)), ranks, handshake=True) == pytest.approx(2 + 4 + 2)


def play_events(network, ranks, handshake=False):
    """Play ranks that begin all their messages at once, but for what comes after a pause."""
    simulation = Simulation(network, handshake)
    begin = {"send": simulation.send, "recv": simulation.receive}

    def process(rank, events):
        if events[0][0] == "pause":
            yield simulation.clock.timeout(events.pop(0)[1])
        yield simulation.clock.all_of([begin[kind](rank, *rest) for kind, *rest in events])

    return simulation.play(process(rank, events) for rank, events in enumerate(ranks))


def test_a_deadlock_is_reported_with_its_ranks():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait"):
        play_events(LINK, [[("send", 1, 1)], [("send", 0, 1)]])


def test_schedule_worked_out_by_hand():
    """Two layers of 1 MB, two ranks, 10 MB/s, no latency: an all-reduce of 1 MB takes 0.1 s."""
    network = Network(Costs(0, 1e-7))
    shallow = Profile((Layer("first", 0.01, 0.03, 1e6), Layer("last", 0.02, 0.05, 1e6)), 0.005)
    step = simulate(shallow, 2, network, bucket_cap_mb=0.5)
    # forward 0.03, last layer ready at 0.08, first at 0.11; buckets 0.08-0.18 and 0.18-0.28; update
    # 0.005
    assert step.step_s == pytest.approx(0.285)
    assert step.compute_s == pytest.approx(0.115)
    assert step.exposed_s == pytest.approx(0.17)
    edges = [
        (s.name, round(s.start, 6), round(s.end, 6)) for s in step.spans if s.lane == "network"
    ]
    assert edges == [("communication", 0.08, 0.18), ("communication", 0.18, 0.28)]
    whole = simulate(shallow, 2, network, bucket_cap_mb=math.inf)
    assert whole.step_s == pytest.approx(0.11 + 0.2 + 0.005)


def test_interference_worked_out_by_hand():
    network = Network(Costs(0, 1e-7))
    shallow = Profile((Layer("first", 0.0, 0.15, 1e6), Layer("last", 0.0, 0.05, 1e6)))
    # bucket 0 travels 0.05-0.15; at half speed 0.05 of the 0.15 is done by then: backward ends at
    # 0.25
    assert simulate(
        shallow, 2, network, bucket_cap_mb=0.5, interference=1.0
    ).step_s == pytest.approx(0.25 + 0.1)
    # a bucket that ends before the backward pass slows down only a part of it
    long = Profile((Layer("first", 0.0, 0.35, 0), Layer("last", 0.0, 0.05, 1e6)))
    assert simulate(long, 2, network, interference=1.0).step_s == pytest.approx(0.4 + 0.05)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (4, 2), (3, 3)])
def test_a_ring_on_hosts_takes_the_seconds_of_its_messages(hosts, per_host):
    network = Network(Costs(2e-5, 1e-9), Costs(2e-6, 1e-10), per_host)
    for nbytes in (1e3, 1e5, 1e7):
        simulation = Simulation(network)
        ranks = [
            ring(simulation, rank, hosts * per_host, nbytes) for rank in range(hosts * per_host)
        ]
        expected = simulation.play(ranks)
        assert on_hosts("ring", nbytes, hosts * per_host, network) == pytest.approx(
            expected, rel=1e-9
        )


def ring(simulation, rank, world_size, nbytes):
    """Reduce-scatter, then allgather, one chunk of K a step."""
    for _ in range(2 * (world_size - 1)):
        sent = simulation.send(rank, (rank + 1) % world_size, nbytes / world_size)
        yield sent & simulation.receive(rank, (rank - 1) % world_size)


@settings(max_examples=40, deadline=None)
@given(profiles, link_costs, st.integers(1, 64), st.sampled_from([0.01, 1.0, 25.0]))
def test_step_lies_between_compute_and_compute_plus_communication(profile, link, world_size, cap):
    step = simulate(profile, world_size, Network(link), bucket_cap_mb=cap)
    assert (
        step.compute_s * (1 - 1e-12)
        <= step.step_s
        <= (step.compute_s + step.communication_s) * (1 + 1e-9)
    )
    assert sum(step.buckets) == pytest.approx(profile.gradient_bytes)
    network = [span for span in step.spans if span.lane == "network"]
    assert all(a.end <= b.start + 1e-12 for a, b in pairwise(network))


def test_efficiency_falls_with_devices_and_the_knee_is_where_it_passes_90_percent():
    network = Network(Costs(3e-6, 1e-10))
    steps = [simulate(even_profile(), 2**k, network, bucket_cap_mb=1) for k in range(11)]
    efficiencies = [step.efficiency for step in steps]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] == pytest.approx(1)
    at = knee(steps)
    position = [step.world_size for step in steps].index(at)
    assert efficiencies[position] >= 0.9 > efficiencies[position + 1] > 0.5
    assert knee(steps[position + 1 :]) is None


def test_resnets_have_their_published_sizes():
    sizes = {}
    for name in resnets.SHAPES:
        sizes[name] = sum(size for size, _ in resnets.layers(name))
    published_sizes = {
        "resnet50": 25557032,
        "resnet101": 44549160,
        "resnext50": 25028904,
        "resnext101": 88791336,
    }
    assert sizes == published_sizes
    assert sum(work for _, work in resnets.layers("resnet50")) == pytest.approx(4.09e9, rel=1e-3)
    assert resnets.profile("resnet50", 0.1).compute_s == pytest.approx(0.1)


def test_gloo_and_nccl_are_different_algorithms():
    """As a control, each library's times are missed by far with the other's algorithm.

    It is fitted in the same way.
    """
    for library, other, bound in (("gloo", "nccl", 0.10), ("nccl", "gloo", 0.05)):
        table = [
            row | {"library": library, "ms": row[f"{other}_ms"]}
            for row in facts.rows("allreduce_on_shaped_links")
        ]
        numbers = predictions.fit_shaped_links([row for row in table if row["K"] == 4])
        errors = [published.shaped_link_ms(row, numbers) / row["ms"] - 1 for row in table]
        assert max(map(abs, errors)) > bound, library


def test_facts_are_shipped_whole_with_their_sources():
    for name, source in facts.SOURCES.items():
        path = Path(facts.__file__).parent / f"{name}.csv"
        with path.open() as file:
            assert len(facts.rows(name)) == sum(1 for _ in csv.reader(file)) - 1
        assert len(source) > 50
    with pytest.raises(ValueError, match='no table "moon"'):
        facts.rows("moon")


def test_bad_input_in_python_says_what_is_wrong():
    model = even_profile()
    for call, words in [
        (lambda: simulate(model, 0, LINK), "world size is 0"),
        (
            lambda: simulate(model, 12, Network(Costs(0, 1), None, 4), "halving_doubling"),
            "no formula",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
