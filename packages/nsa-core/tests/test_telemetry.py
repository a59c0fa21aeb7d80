"""Telemetry: known gates and choices give known figures, and nothing is computed without a reader."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry, LayerTelemetry, NSAConfig, blocks, telemetry
from nsa_core.backends.base import Queries
from nsa_core.config import BRANCHES
from nsa_core.reference.rows import positions_of
from nsa_core.telemetry import ReadCounter, count_reads

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate="softmax", gate_hidden_size=8)


def gate_figures(gates, has_compressed=None, branches=BRANCHES):
    """Figures of gates given as one triple per token, one head."""
    gates = torch.tensor(gates).view(1, -1, 1, 3)
    seen = torch.ones(gates.shape[:2], dtype=torch.bool) if has_compressed is None else torch.tensor([has_compressed])
    layer_telemetry = LayerTelemetry()
    layer_telemetry.record_gates(gates, seen, branches)
    return layer_telemetry.summary()


def selection_figures(block_indices, positions, geometry=SMALL):
    layer_telemetry = LayerTelemetry()
    layer_telemetry.record_selection(torch.tensor(block_indices, dtype=torch.int32), torch.tensor(positions), geometry)
    return layer_telemetry.summary()


def approx(value):
    return pytest.approx(value, abs=1e-6)


def test_equal_gates_have_the_entropy_of_their_number_and_equal_shares():
    figures = gate_figures([[0.5, 0.5, 0.5]])

    assert figures["gate_entropy_mean"] == figures["gate_entropy_min"] == approx(math.log(3))
    assert figures["gate_max_gate"] == approx(1 / 3)
    assert [figures[f"gate_share_{branch}"] for branch in BRANCHES] == [approx(1 / 3)] * 3
    assert figures["gate_collapse_frac"] == 0


def test_shares_are_gates_over_their_sum():
    figures = gate_figures([[0.2, 0.6, 0.8]])

    shares = [0.125, 0.375, 0.5]
    assert [figures[f"gate_share_{branch}"] for branch in BRANCHES] == [approx(share) for share in shares]
    assert figures["gate_max_gate"] == approx(0.5)
    assert figures["gate_entropy_mean"] == approx(-sum(share * math.log(share) for share in shares))


def test_mean_and_spread_are_those_of_the_gates_themselves():
    figures = gate_figures([[0.2, 0.6, 0.8], [0.4, 0.6, 0.2]])

    assert [figures[f"gate_mean_{branch}"] for branch in BRANCHES] == [approx(0.3), approx(0.6), approx(0.5)]
    assert [figures[f"gate_std_{branch}"] for branch in BRANCHES] == [approx(0.1), approx(0), approx(0.3)]


def test_the_smallest_entropy_stands_beside_the_mean():
    figures = gate_figures([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])

    assert figures["gate_entropy_min"] == approx(0)
    assert figures["gate_entropy_mean"] == approx(math.log(3) / 2)
    assert figures["gate_max_gate"] == approx((1 / 3 + 1) / 2)


@pytest.mark.parametrize(
    ("gates", "collapsed"),
    [([1.0, 0.0, 0.0], 1), ([0.0, 0.0, 0.3], 1), ([0.99, 0.005, 0.005], 1), ([0.96, 0.02, 0.02], 0), ([0.5, 0.5, 0.0], 0)],
)
def test_a_gate_has_collapsed_when_its_entropy_is_below_a_tenth(gates, collapsed):
    assert gate_figures([gates])["gate_collapse_frac"] == collapsed
    assert gate_figures([gates, [0.5, 0.5, 0.5]])["gate_collapse_frac"] == collapsed / 2


def test_every_head_counts_by_itself():
    layer_telemetry = LayerTelemetry()
    gates = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]]).view(1, 1, 2, 3)
    layer_telemetry.record_gates(gates, torch.ones(1, 1, dtype=torch.bool), BRANCHES)

    # over the mean of the heads nothing would have collapsed
    assert layer_telemetry.summary()["gate_collapse_frac"] == 1
    assert layer_telemetry.summary()["gate_share_cmp"] == 0.5


def test_tokens_that_see_no_compressed_block_are_left_out():
    figures = gate_figures([[0.0, 1.0, 0.0], [0.5, 0.5, 0.5]], has_compressed=[False, True])

    assert figures["gate_entropy_min"] == approx(math.log(3))
    assert figures["gate_mean_slc"] == 0.5
    assert figures["gate_collapse_frac"] == 0


def test_only_branches_that_exist_have_figures():
    figures = gate_figures([[0.7, 0.2, 0.6]], branches=("slc", "win"))

    assert figures["gate_share_slc"] == approx(0.25)
    assert figures["gate_share_win"] == approx(0.75)
    assert figures["gate_entropy_mean"] == approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert not [name for name in figures if name.endswith("_cmp")]


def test_gates_that_are_all_zero_give_finite_figures():
    assert all(math.isfinite(figure) for figure in gate_figures([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]).values())


def test_without_a_token_that_sees_a_block_the_gate_figures_are_nan_and_nothing_fails():
    figures = gate_figures([[0.5, 0.5, 0.5]], has_compressed=[False])

    assert all(math.isnan(figures[name]) for name in ("gate_entropy_mean", "gate_entropy_min", "gate_max_gate", "gate_std_win"))


def test_a_branchs_contribution_is_its_mean_size():
    layer_telemetry = LayerTelemetry()
    layer_telemetry.record_branch("win", torch.tensor([[[[1.0, -3.0]], [[50.0, 50.0]]]]), torch.tensor([[0, -1]]))

    assert layer_telemetry.summary() == {"contribution_win": 2.0}


def test_k_statistics_count_the_chosen_blocks_of_every_query_and_group():
    # l' = 4, n = 3: positions 3, 4, 8, 12 have 1, 2, 3, 4 candidates
    chosen = [[[0, -1, -1]] * 2, [[0, 1, -1]] * 2, [[0, 1, 2]] * 2, [[0, 1, 3], [0, 2, 3]]]
    figures = selection_figures([chosen], [[3, 4, 8, 12]])

    assert figures["rows"] == 8
    assert figures["k_mean"] == (1 + 2 + 3 + 3) / 4
    assert figures["k_max"] == 3
    assert figures["pct_at_max"] == 50


def test_the_free_share_leaves_out_initial_and_local_blocks():
    # one initial, one local: of 1, 2, 3, 3 blocks 0, 0, 1, 1 are free
    chosen = [[[0, -1, -1]], [[0, 1, -1]], [[0, 1, 2]], [[0, 1, 3]]]
    assert selection_figures([chosen], [[3, 4, 8, 12]])["free_block_share_mean"] == approx((1 / 3 + 1 / 3) / 4)


def test_blocks_that_are_both_initial_and_local_are_forced_once():
    geometry = BlockGeometry(4, 2, 4, 6, 2, 2, 5)

    # own = 2: blocks 0, 1 are initial, 1, 2 local; none is free
    assert selection_figures([[[[0, 1, 2, -1, -1, -1]]]], [[9]], geometry)["free_block_share_mean"] == 0
    # own = 4: of 0, 1, 2, 3, 4 only block 2 is free
    assert selection_figures([[[[0, 1, 2, 3, 4, -1]]]], [[17]], geometry)["free_block_share_mean"] == approx(1 / 5)


def test_overlap_is_the_share_of_blocks_that_the_query_before_chose_as_well():
    # the second shares 2 of its 3 blocks with the first, the third 1 of 3 with the second
    chosen = [[[0, 2, 5]], [[0, 4, 5]], [[1, 3, 5]]]

    assert selection_figures([chosen], [[20, 21, 22]])["overlap_with_previous_query"] == approx((2 / 3 + 1 / 3) / 2)


def test_overlap_ignores_slots_that_hold_none():
    assert selection_figures([[[[0, -1, -1]], [[0, -1, -1]]]], [[1, 2]])["overlap_with_previous_query"] == 1
    assert selection_figures([[[[0, -1, -1]], [[0, 1, -1]]]], [[3, 4]])["overlap_with_previous_query"] == 0.5


@pytest.mark.parametrize("positions", [[7, 0, 1], [7, 7, 8], [3, 9, 10], [-1, 0, 1]])
def test_overlap_stays_inside_a_sequence(positions):
    # the first two rows share nothing and are no neighbours, the last two share all
    figures = selection_figures([[[[1, -1, -1]], [[0, -1, -1]], [[0, -1, -1]]]], [positions])

    assert figures["overlap_with_previous_query"] == 1


def test_without_neighbours_there_is_no_overlap_figure():
    assert math.isnan(selection_figures([[[[0, -1, -1]], [[-1, -1, -1]]]], [[0, -1]])["overlap_with_previous_query"])


def test_rows_that_hold_no_query_are_left_out():
    # the row at -1 chose nothing
    chosen = [[[0, 1, 2]], [[-1, -1, -1]]]
    figures = selection_figures([chosen], [[8, -1]])

    assert figures["rows"] == 1
    assert figures["k_mean"] == 3
    assert figures["pct_at_max"] == 100
    assert figures["free_block_share_mean"] == approx(1 / 3)


def test_without_a_query_the_figures_are_empty_and_nothing_fails():
    figures = selection_figures([[[[-1, -1, -1]]]], [[-1]])

    assert figures["rows"] == figures["k_max"] == figures["reads_pred"] == figures["reads_act_total"] == 0
    assert math.isnan(figures["k_mean"])


def reads_of_query(t, chosen, geometry):
    size = geometry.selection_block_size
    selected = sum(s // size in chosen for s in range(t + 1))
    window = sum(t - geometry.window_size < s for s in range(t + 1))
    return blocks.num_visible_blocks(t, geometry) + selected + window


@given(data=st.data())
def test_actual_reads_are_the_tokens_of_the_blocks_that_were_listed(geometries, data):
    geometry = data.draw(geometries())
    width = data.draw(st.integers(1, 4))
    positions = data.draw(st.lists(st.integers(-1, 50), min_size=1, max_size=5))
    listed = [
        [data.draw(st.sets(st.integers(0, t // geometry.selection_block_size), max_size=width)) if t >= 0 else set() for _ in range(2)]
        for t in positions
    ]
    indices = [[sorted(blocks) + [-1] * (width - len(blocks)) for blocks in groups] for groups in listed]

    reads = count_reads(torch.tensor([indices], dtype=torch.int32), torch.tensor([positions]), geometry)

    queries = [(t, groups) for t, groups in zip(positions, listed, strict=True) if t >= 0]
    assert reads.actual.tolist() == [[sum(reads_of_query(t, groups[g], geometry) for t, groups in queries) for g in range(2)]]
    assert reads.predicted.tolist() == [sum(blocks.predicted_reads(t + 1, geometry) for t, _ in queries)]
    assert reads.actual.dtype == reads.predicted.dtype == torch.int64


def test_a_read_counter_keeps_the_last_pass():
    counter = ReadCounter()
    assert counter.reads is None

    for t in (5, 9):
        counter.record_selection(torch.tensor([[[[0, t // 4, -1]]]], dtype=torch.int32), torch.tensor([[t]]), SMALL)

    # position 9: 4 of 4 and 2 of block 2's tokens, 4 blocks, 5 of window
    assert counter.reads.actual.tolist() == [[6 + 4 + 5]]


def test_a_layers_summary_has_every_figure_of_the_heartbeat(random_layer, random_input):
    layer = random_layer(CONFIG)
    layer.telemetry = LayerTelemetry()
    layer(random_input(2, 23, 8))

    figures = layer.telemetry.summary()

    per_branch = [f"{figure}_{branch}" for figure in ("gate_share", "gate_mean", "gate_std", "contribution") for branch in BRANCHES]
    names = ["gate_entropy_mean", "gate_entropy_min", "gate_max_gate", "gate_collapse_frac", *per_branch]
    names += ["rows", "k_mean", "k_max", "pct_at_max", "free_block_share_mean", "overlap_with_previous_query"]
    names += ["reads_pred", "reads_act_total"]
    assert sorted(figures) == sorted(names)
    assert all(isinstance(figure, float) and math.isfinite(figure) for figure in figures.values())
    assert layer.telemetry.routes == {"cmp": "sdpa", "select": "sdpa", "slc": "sdpa", "win": "sdpa"}


def test_a_layers_reads_are_those_predicted_over_sequences_and_groups(random_layer, random_input):
    layer = random_layer(CONFIG)
    layer.telemetry = LayerTelemetry()
    layer(random_input(3, 23, 8))

    figures = layer.telemetry.summary()

    # 3 sequences, 2 KV heads
    assert figures["reads_pred"] == figures["reads_act_total"] == 3 * 2 * blocks.predicted_reads_of_step(0, 23, SMALL)
    assert figures["rows"] == 3 * 23 * 2
    assert figures["k_mean"] == approx(sum(blocks.num_chosen_blocks(t, SMALL) for t in range(23)) / 23)


def test_packed_figures_are_those_of_the_sequences(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(1, 12, 8)
    layer.telemetry = LayerTelemetry()
    layer(x, cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32))

    figures = layer.telemetry.summary()

    assert figures["reads_pred"] == 2 * sum(blocks.predicted_reads_of_step(0, length, SMALL) for length in (5, 7))
    assert figures["reads_act_total"] == figures["reads_pred"]


def test_the_last_token_of_a_sequence_counts(random_layer, random_input):
    # of l = 4 tokens only the last sees a block
    layer = random_layer(CONFIG)
    layer.telemetry = LayerTelemetry()
    layer(random_input(1, 4, 8))

    assert math.isfinite(layer.telemetry.summary()["gate_entropy_mean"])


def test_rows_beyond_query_count_enter_no_gate_or_selection_figure(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 12, 8)
    figures = []
    for rows in (x[:, :7], torch.cat([x[:, :7], 100 * x[:, 7:]], 1)):
        layer.telemetry = LayerTelemetry()
        layer(rows, query_count=torch.tensor([7, 7], dtype=torch.int32))
        figures.append(layer.telemetry.summary())

    alone, padded = ({name: value for name, value in one.items() if not name.startswith("contribution")} for one in figures)
    assert padded == pytest.approx(alone, rel=1e-9)


def test_attaching_telemetry_changes_no_output(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 23, 8)
    without = layer(x)
    layer.telemetry = LayerTelemetry()

    assert torch.equal(layer(x), without)


def test_telemetry_keeps_no_graph(random_layer, random_input):
    layer = random_layer(CONFIG)
    layer.telemetry = LayerTelemetry()
    layer(random_input(2, 23, 8))

    assert not any(figure.requires_grad for figure in layer.telemetry.figures.values())


def test_nothing_is_computed_unless_telemetry_is_attached(random_layer, random_input, monkeypatch):
    layer, x = random_layer(CONFIG), random_input(1, 9, 8)

    def refuse(*args, **kwargs):
        raise AssertionError("telemetry ran")

    for name in ("record_gates", "record_branch", "record_selection", "record_route"):
        monkeypatch.setattr(LayerTelemetry, name, refuse)
    monkeypatch.setattr(telemetry, "count_reads", refuse)

    layer(x)
    layer(x, cache=layer.new_cache(1, 9, count_reads=False))
    layer.telemetry = LayerTelemetry()
    with pytest.raises(AssertionError, match="telemetry ran"):
        layer(x)


def test_telemetry_of_a_branchs_absence_has_no_figures_of_it(random_layer, random_input):
    config = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate_hidden_size=8, branches=("cmp", "win"))
    layer = random_layer(config)
    layer.telemetry = LayerTelemetry()
    layer(random_input(1, 23, 8))

    assert layer.telemetry.routes == {"cmp": "sdpa", "win": "sdpa"}
    figures = layer.telemetry.summary()
    assert not {"k_mean", "gate_share_slc", "contribution_slc", "reads_pred"} & set(figures)
    assert {"gate_share_cmp", "contribution_win"} <= set(figures)


def test_a_query_alone_has_the_position_and_the_reads_that_it_has_among_others():
    generator = torch.Generator().manual_seed(0)
    start, q = torch.tensor([0, 3, 40], dtype=torch.int32), torch.zeros(3, 2, 4, 6)
    indices = torch.randint(-1, 6, (3, 2, 2, 3), generator=generator, dtype=torch.int32)
    for count in (None, torch.tensor([2, 0, 1], dtype=torch.int32)):
        both = positions_of(Queries(q, 2, None, start, count))
        alone = [
            positions_of(Queries(q[:, :1], 1, None, start + row, None if count is None else (count - row).clamp(0, 1))) for row in range(2)
        ]
        assert torch.equal(torch.cat(alone, 1), both)
        reads = [count_reads(indices[:, row : row + 1], alone[row], SMALL) for row in range(2)]
        for together, first, second in zip(count_reads(indices, both, SMALL), *reads, strict=True):
            assert torch.equal(together, first + second)
            assert first.any()
