"""Recorded choices: saved without loss, and mapped to cases of other shapes."""

import base64
import json
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa_bench.attention.plan import make_plan
from nsa_bench.cases import Case, Recorded, Selection, head_shape, parse_geometry, parse_selections
from nsa_bench.cli import run_command
from nsa_bench.errors import OptionError
from nsa_bench.inputs import free_overlap, make_block_indices, make_tensors, positions_of
from nsa_bench.options import AttentionOptions
from nsa_bench.recorded import Recording, mapped_choice, pointing_queries, read_recording, recording_to_json
from nsa_core import BlockGeometry, compressed_attention, select_blocks
from nsa_core.reference import naive

CPU = torch.device("cpu")
GEOMETRY = parse_geometry("4/2/8/6/16")


def case_of(seq_len: int, groups: int = 2, geometry: BlockGeometry = GEOMETRY, lengths: tuple[int, ...] | None = None) -> Case:
    shape = head_shape(4 * groups, groups, 64, 8)
    return Case(shape=shape, seq_len=seq_len, geometry=geometry, dtype=torch.float32, lengths=lengths)


def recording_of(seq_len: int = 400, tracks: int = 4) -> Recording:
    """Choices of which 80 % persist."""
    case = Case(shape=head_shape(tracks, tracks, 8, 8), seq_len=seq_len, geometry=GEOMETRY, selection=Selection.TRAINED_LIKE)
    return Recording(block_indices=make_block_indices(case, CPU)[0].transpose(0, 1), geometry=GEOMETRY)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recording_of()


@pytest.fixture
def file(recording: Recording, tmp_path: Path) -> str:
    path = tmp_path / "choices.json"
    path.write_text(json.dumps({"layers": [], "recorded": recording_to_json(recording)}))
    return str(path)


def test_a_file_keeps_every_choice(recording: Recording, file: str) -> None:
    found = read_recording(file)
    assert torch.equal(found.block_indices, recording.block_indices)
    assert found.geometry == GEOMETRY


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
def test_a_case_of_the_recorded_shape_has_the_recorded_choices(recording: Recording, groups: int) -> None:
    found = mapped_choice(case_of(400, groups), recording, CPU)
    expected = [recording.block_indices[group * 4 // groups] for group in range(groups)]
    assert torch.equal(found, torch.stack(expected, 1).int())


@pytest.mark.parametrize("lengths", [(1, 0, 3, 96, 400), (333, 167), (500,)])
@pytest.mark.parametrize("geometry", [GEOMETRY, BlockGeometry(4, 2, 4, 9, window_size=8), BlockGeometry(4, 2, 16, 4, 0, 1, 8)])
def test_choices_for_other_shapes_are_valid(recording: Recording, geometry: BlockGeometry, lengths: tuple[int, ...]) -> None:
    case = case_of(500, 3, geometry, lengths)
    rows: Tensor = mapped_choice(case, recording, CPU)
    for t, row in zip(positions_of(case, CPU).tolist(), rows.tolist(), strict=True):
        for chosen in row:
            blocks = [block for block in chosen if block >= 0]
            own = t // geometry.selection_block_size
            assert blocks == sorted(set(blocks))
            assert len(blocks) == min(geometry.num_selected_blocks, own + 1)
            assert naive.forced_blocks(t, geometry) <= set(blocks)
            assert max(blocks) == own


def test_beyond_the_recorded_tokens_neighbours_stay_neighbours(recording: Recording) -> None:
    case = case_of(2000)
    recorded = free_overlap(recording.block_indices.transpose(0, 1), torch.arange(400), GEOMETRY)
    found = free_overlap(mapped_choice(case, recording, CPU), torch.arange(2000), GEOMETRY)
    assert recorded is not None and found is not None
    assert abs(found - recorded) < 0.1


def test_a_distance_keeps_its_share_of_the_past() -> None:
    # own block 9 and, of the 10 candidates, block 4: half of the past behind it
    indices = torch.full((1, 80, 6), -1, dtype=torch.int32)
    indices[:, :, :4] = torch.tensor([0, 4, 8, 9])
    case = case_of(80, 1, BlockGeometry(4, 2, 4, 4, 1, 2, 8))
    [chosen] = mapped_choice(case, Recording(block_indices=indices, geometry=GEOMETRY), CPU)[79].tolist()
    assert chosen == [0, 9, 18, 19]


@torch.no_grad()
def test_queries_point_at_their_blocks(recording: Recording) -> None:
    case = case_of(400)
    chosen = mapped_choice(case, recording, CPU)
    k_cmp = torch.randn(1, case.num_blocks, 2, 64, generator=torch.Generator().manual_seed(0))
    q = pointing_queries(case, chosen, k_cmp[0]).unsqueeze(0)
    lse = compressed_attention(q, k_cmp, k_cmp, geometry=GEOMETRY).lse
    found = select_blocks(q, k_cmp, lse, geometry=GEOMETRY)[0]
    had_to = torch.arange(400) >= 6 * 8
    same = (found[had_to].unsqueeze(-1) == chosen[had_to].unsqueeze(-2)).any(-1).float().mean()
    assert same > 0.98


def test_the_inputs_of_a_case_follow_its_recording(recording: Recording, file: str) -> None:
    import attrs

    case = attrs.evolve(case_of(500, lengths=(100, 400)), selection=Recorded(file))
    assert torch.equal(make_block_indices(case, CPU)[0], mapped_choice(case, recording, CPU))
    inputs = make_tensors(case, CPU)
    options = {"geometry": GEOMETRY, "cu_seqlens": inputs.cu_seqlens}
    with torch.no_grad():
        lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **options).lse
        chosen = select_blocks(inputs.q, inputs.k_cmp, lse, **options)[0]
    assert (chosen == mapped_choice(case, recording, CPU)).all(-1).float().mean() > 0.9


def test_a_recording_is_never_replaced_by_results(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(file).read_bytes()
    words = ["--device", "cpu", "--shapes", "4/2/16/8", "--lengths", "48", "--selection", f"recorded:{file}", "--json", file]
    assert run_command(["attention", *words]) == 2
    assert "is the recording (it would be lost)" in " ".join(capsys.readouterr().err.split())
    assert Path(file).read_bytes() == before


def test_two_recordings_of_one_file_name_are_refused() -> None:
    with pytest.raises(OptionError, match="two recordings with one file name"):
        parse_selections("recorded:a/c.json,recorded:b/c.json")
    assert len(parse_selections("recorded:a/c.json,recorded:a/c.json")) == 1


def test_selections_are_named_on_the_command_line(file: str) -> None:
    assert parse_selections(f"random,recorded:{file},random") == (Selection.RANDOM, Recorded(file))
    with pytest.raises(OptionError, match="--selection has 'recorded' .*random, trained-like, recorded:FILE.*; use random"):
        parse_selections("random,recorded")
    plan = make_plan(AttentionOptions(selection=f"recorded:{file}", lengths="256", shapes="S", device="cpu"))
    [job] = plan.jobs
    assert (job.case.selection.value, str(job.case.selection)) == ("recorded:choices.json",) * 2


@pytest.mark.parametrize("content", [None, "{", "{}", '{"recorded": {"shape": [1, 2, 3], "block_indices": "eJw=", "geometry": {}}}'])
def test_a_file_without_choices_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match="holds no recorded choices .*; name a JSON file of nsa-bench choices"):
        make_plan(AttentionOptions(selection=f"recorded:{path}"))


def test_a_file_that_holds_more_than_it_says_or_never_ends_is_refused(file: str, tmp_path: Path) -> None:
    table = json.loads(Path(file).read_text())
    bomb = base64.b64encode(zlib.compress(bytes(2**20))).decode()
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"recorded": table["recorded"] | {"block_indices": bomb}}))
    with pytest.raises(OptionError, match="holds no recorded choices"):
        read_recording(str(path))
    path.write_text(json.dumps({"recorded": table["recorded"] | {"shape": [1, 1, float("inf")]}}))
    with pytest.raises(OptionError, match=r"holds no recorded choices \(OverflowError"):
        read_recording(str(path))
    with pytest.raises(OptionError, match=r"holds no recorded choices \(no regular file\)"):
        read_recording("/dev/zero")
