"""`train.selection_teacher`: the choice of blocks is taught by the attention of another, frozen model."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from nsa_core import compressed_attention, select_blocks
from nsa_core.selection_loss import SelectionLoss
from nsa_train.checkpoint.teacher import Teacher, open_teacher
from nsa_train.cli import run_command
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.errors import ConfigError
from nsa_train.model.decoder import build_model
from nsa_train.preflight.judge import run_preflight
from nsa_train.settings.recipe import load_config

WEIGHT = "train.selection_loss=0.5"
LENGTHS = (30, 50)
BOUNDS = torch.tensor([0, 30, 80], dtype=torch.int32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory, tiny_recipe):
    """Return the directory of a dense model with 4 heads of 8 channels."""
    out = tmp_path_factory.mktemp("teachers") / "dense"
    sets = ["model.attention=dense", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim_qk=8", "model.head_dim_v=8"]
    words = [word for override in (*sets, "train.steps=2", "train.samples=false") for word in ("--set", override)]
    assert run_command(["run", str(tiny_recipe), "--out", str(out), *words]) == 0
    return out


def mass_of(decoder, ids, size, groups):
    """Return the mass (total, groups, blocks) of each layer's attention, in float64, a sequence and a head at a time."""
    inputs = []
    hooks = [
        block.attention.register_forward_pre_hook(lambda module, given, named: inputs.append((module, given[0])), with_kwargs=True)
        for block in decoder.blocks
    ]
    masses = [torch.zeros(ids.shape[1], groups, -(-max(LENGTHS) // size), dtype=torch.float64) for _ in decoder.blocks]
    start = 0
    for length in LENGTHS:
        inputs.clear()
        decoder.hidden(decoder.embedding(ids[:, start : start + length]))
        for mass, (module, x) in zip(masses, inputs, strict=True):
            q, k = (rows.double() for rows in module.queries_keys(x))
            heads, shared = q.shape[2], q.shape[2] // k.shape[2]
            for t in range(length):
                for head in range(heads):
                    weights = (k[0, : t + 1, head // shared] @ q[0, t, head] * q.shape[-1] ** -0.5).softmax(0)
                    for token, weight in enumerate(weights.tolist()):
                        mass[start + t, head * groups // heads, token // size] += weight * groups / heads
        start += length
    for hook in hooks:
        hook.remove()
    return masses


@pytest.mark.parametrize("kind", ["dense", "nsa"])
@torch.no_grad()
def test_the_target_of_each_layer_is_the_mass_of_the_teachers_attention(tiny_config, tiny_run, dense_run, kind) -> None:
    config = tiny_config(
        WEIGHT, f"train.selection_teacher={dense_run if kind == 'dense' else tiny_run.root}", "model.layers=['dense','nsa']"
    )
    student, teacher = build_model(config), Teacher(config, CPU)
    ids = torch.randint(0, 256, (1, 80), generator=torch.Generator().manual_seed(0))
    student.sample_queries(3)

    teacher.set_targets(student, ids, BOUNDS, 50)

    [taught] = student.selection_losses
    expected = mass_of(teacher.decoder, ids, size=4, groups=1)[1][taught.rows(80, CPU)]
    assert taught.target.shape == (256, 1, 13)
    assert torch.allclose(taught.target.double(), expected, atol=1e-6)


def test_gradients_reach_what_ranks_blocks_and_nothing_of_the_teacher(tiny_config, dense_run) -> None:
    config = tiny_config(WEIGHT, f"train.selection_teacher={dense_run}")
    student, teacher = build_model(config).train(), Teacher(config, CPU)
    before = {name: weight.clone() for name, weight in teacher.decoder.state_dict().items()}
    ids = torch.randint(0, 256, (1, 80))
    student.sample_queries(0)
    teacher.set_targets(student, ids, BOUNDS, 50)
    student(ids, cu_seqlens=BOUNDS, max_seqlen=50)
    student.selection_losses[1].value.backward()

    reached = {name for name, weight in student.blocks[1].named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {"attention.q_proj.weight", "attention.k_proj.cmp.weight"} <= reached
    # phi's last layer starts at zero: its first layers are reached from the second step on
    assert any(name.startswith("attention.compress_k.") for name in reached)
    assert all(
        name.startswith(("attention_norm.", "attention.q_proj.", "attention.k_proj.cmp.", "attention.compress_k.")) for name in reached
    )
    assert all(weight.grad is None and not weight.requires_grad for weight in teacher.decoder.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in teacher.decoder.state_dict().items())


class Chosen(SelectionLoss):
    """Keeps the choice of a pass, `(1, S, G, n)`, instead of a loss."""

    def take(self, q, k_cmp, k, *, geometry, **_):
        lse = compressed_attention(q, k_cmp, k_cmp, geometry=geometry).lse
        self.target = select_blocks(q, k_cmp, lse, geometry=geometry)
        return q.sum()


def recall(student, teacher, ids) -> float:
    """Return how often a row with a choice has, among its chosen blocks, the free one with most of the teacher's mass. One layer, one group."""
    [layer] = student.sparse_layers
    layer.selection_loss = SelectionLoss(num_samples=ids.numel())
    teacher.set_targets(student, ids, None, None)
    mass, layer.selection_loss = layer.selection_loss.target[:, 0], Chosen()
    student(ids)
    chosen = layer.selection_loss.target[0, :, 0]
    geometry, block = layer.config.geometry, torch.arange(mass.shape[1])
    own = torch.arange(ids.numel()) // geometry.selection_block_size
    free = (block >= geometry.num_initial_blocks) & (block <= own.unsqueeze(1) - geometry.num_local_blocks)
    best = mass.masked_fill(~free, -1).argmax(1)
    has_choice = own >= geometry.num_selected_blocks
    return float((chosen == best.unsqueeze(1)).any(1)[has_choice].float().mean())


def recall_after_training(config, teacher, *, is_taught: bool, weight: float = 1.0) -> float:
    """Return the recall on other ids after 100 steps on rows of 80 random ids of 16, with the teacher's embedding."""
    torch.manual_seed(1)
    student = build_model(config).train()
    student.selection_weight = weight
    student.embedding.load_state_dict(teacher.decoder.embedding.state_dict())
    [layer] = student.sparse_layers
    optimizer = torch.optim.Adam([weight for weight in layer.parameters() if weight.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    for step in range(100):
        ids = torch.randint(0, 16, (1, 80), generator=generator)
        student.sample_queries(step)
        if is_taught:
            teacher.set_targets(student, ids, None, None)
        optimizer.zero_grad()
        (student(ids, labels=ids.roll(-1)) / 80).backward()
        optimizer.step()
    return recall(student, teacher, torch.randint(0, 16, (1, 80), generator=generator))


def test_a_taught_choice_finds_the_blocks_that_the_teacher_reads(tiny_config, tmp_path, tiny_recipe) -> None:
    # a teacher that reads earlier places of the same id
    sets = ["model.n_layers=1", "nsa.rope_theta=1e6"]
    out = tmp_path / "teacher"
    words = [word for override in [*sets, "model.attention=dense", "train.steps=2", "train.samples=false"] for word in ("--set", override)]
    assert run_command(["run", str(tiny_recipe), "--out", str(out), *words]) == 0
    config = tiny_config(*sets, WEIGHT, f"train.selection_teacher={out}")
    teacher = Teacher(config, CPU)
    attention = teacher.decoder.blocks[0].attention
    attention.q_proj.weight.copy_(4 * attention.k_proj.weight.repeat(2, 1))

    taught = recall_after_training(config, teacher, is_taught=True)
    alone = recall_after_training(config, teacher, is_taught=False)
    without = recall_after_training(config, teacher, is_taught=False, weight=0.0)

    assert taught > alone + 0.2
    assert taught > without + 0.2


@pytest.mark.parametrize(
    "overrides",
    [pytest.param([], marks=pytest.mark.slow), ["train.activation_checkpointing=full", "train.accumulate=2"], ["train.precision=bf16"]],
)
def test_a_taught_run_goes_on_exactly_and_saves_no_teacher(tmp_path, tiny_recipe, dense_run, overrides) -> None:
    sets = [WEIGHT, f"train.selection_teacher={dense_run}", "train.save_every=2", "train.samples=false", *overrides]

    def run(name, *words):
        given = [word for override in sets for word in ("--set", override)]
        return run_command(["run", str(tiny_recipe), "--out", str(tmp_path / name), *given, *words])

    assert run("straight") == 0
    shutil.copytree(tmp_path / "straight", tmp_path / "other")
    shutil.copytree(tmp_path / "straight", tmp_path / "untaught")
    assert run("other", "--resume", "2") == 0
    # the model's own dense form instead of the teacher's gives other weights
    sets[1] = "train.log_every=1"
    assert run("untaught", "--resume", "2") == 0
    straight, other, untaught = (
        tmp_path / name / "checkpoints" / "step-5" / "model.safetensors" for name in ("straight", "other", "untaught")
    )
    assert straight.read_bytes() == other.read_bytes() != untaught.read_bytes()
    assert load_file(straight).keys() == build_model(load_config(str(tiny_recipe), [])).state_dict().keys()


def test_a_resumed_run_may_name_another_teacher(tmp_path, tiny_recipe, tiny_run, dense_run) -> None:
    def words(teacher, *more):
        sets = (WEIGHT, f"train.selection_teacher={teacher}", "train.samples=false", *more)
        return ["run", str(tiny_recipe), "--out", str(tmp_path / "run"), *[word for override in sets for word in ("--set", override)]]

    assert run_command(words(dense_run, "train.steps=3")) == 0
    assert run_command([*words(tiny_run.root), "--resume"]) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_layers=3"], "has 2 layers, the model has 3 (layer i teaches layer i); use a teacher of 3 layers"),
        (["model.vocab_size=320"], "has a vocabulary of 258 ids, the model has 320 (both read the same tokens)"),
        (
            ["model.n_heads=6", "model.n_kv_heads=3"],
            "has 4 heads in layer 0, which do not divide among model.n_kv_heads=3 groups (each group has its own mass)",
        ),
        (["model.attention=dense"], "has nothing to teach (no layer of this model chooses blocks)"),
        (["train.selection_teacher=nowhere"], "train.selection_teacher='nowhere' holds no checkpoint "),
        (["train.selection_teacher=3"], "train.selection_teacher=3 is not a non-empty string; use 'runs/dense'"),
        (["train.selection_loss=0"], "teaches nothing with train.selection_loss=0 (its weight); use --set train.selection_loss=0.1"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, tiny_recipe, dense_run, capsys, overrides, message
) -> None:
    sets = [WEIGHT, f"train.selection_teacher={dense_run}", *overrides]
    words = [word for override in sets for word in ("--set", override)]
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run_command(["preflight", str(tiny_recipe), *words]) == 2


def test_a_teacher_without_selected_keys_is_refused(tmp_path, tiny_recipe, tiny_config) -> None:
    out = tmp_path / "teacher"
    sets = ["nsa.branches=['cmp','win']", "train.steps=2", "train.samples=false"]
    assert run_command(["run", str(tiny_recipe), "--out", str(out), *[word for one in sets for word in ("--set", one)]]) == 0
    with pytest.raises(ConfigError, match=r"has no selected keys in layer 0 .*; use a dense teacher"):
        Teacher(tiny_config(WEIGHT, f"train.selection_teacher={out}"), CPU)


def test_a_teacher_with_another_tokenizer_is_refused(tiny_config, dense_run, monkeypatch) -> None:
    class Shifted(ByteTokenizer):
        def encode(self, text):
            return super().encode(text) ^ 1

    monkeypatch.setattr("nsa_train.checkpoint.models.build_tokenizer", lambda data: Shifted())
    with pytest.raises(ConfigError, match=r"has another tokenizer than data\.tokenizer='byte' \(its ids mean other text\)"):
        open_teacher(tiny_config(WEIGHT, f"train.selection_teacher={dense_run}"))


def test_a_hugging_face_folder_teaches_like_the_run_that_it_was_exported_from(tmp_path, tiny_config, dense_run) -> None:
    pytest.importorskip("nsa_transformers")
    assert run_command(["ckpt", "export", str(dense_run), str(tmp_path / "folder"), "--format", "hf"]) == 0
    ids = torch.randint(0, 256, (1, 80), generator=torch.Generator().manual_seed(0))
    targets = []
    for path in (dense_run, tmp_path / "folder"):
        config = tiny_config(WEIGHT, f"train.selection_teacher={path}")
        torch.manual_seed(0)
        student, teacher = build_model(config), Teacher(config, CPU)
        # opening a teacher does not use the run's generators
        targets.append((torch.rand(()),))
        student.sample_queries(0)
        teacher.set_targets(student, ids, BOUNDS, 50)
        targets[-1] += tuple(auxiliary.target for auxiliary in student.selection_losses)
        outlined = open_teacher(config, with_weights=False).decoder
        assert {name: weight.shape for name, weight in outlined.state_dict().items()} == {
            name: weight.shape for name, weight in teacher.decoder.state_dict().items()
        }
        assert all(weight.is_meta for weight in outlined.parameters())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*targets, strict=True))


def test_preflight_counts_the_teachers_weights_as_memory_and_not_as_the_models(tmp_path, tiny_config, dense_run) -> None:
    plain, taught = (run_preflight(tiny_config(WEIGHT, *more), tmp_path / "run") for more in ([], [f"train.selection_teacher={dense_run}"]))
    teacher = open_teacher(tiny_config(WEIGHT, f"train.selection_teacher={dense_run}"), with_weights=False).decoder
    parameters = sum(weight.numel() for weight in teacher.parameters())
    assert taught.memory_gib - plain.memory_gib == pytest.approx(4 * parameters / 2**30)
    assert f"train.selection_teacher: {dense_run}/checkpoints/step-2, {parameters:,} parameters on every process" in taught.passed
    assert plain.passed[0] == taught.passed[0]
    assert not [line for line in taught.warned if "selection_teacher" in line]


def test_preflight_says_which_checkpoints_of_a_teacher_it_passed_over(tmp_path, tiny_config, dense_run) -> None:
    shutil.copytree(dense_run, tmp_path / "teacher", symlinks=True)
    (tmp_path / "teacher" / "checkpoints" / "latest").unlink()
    found = run_preflight(tiny_config(WEIGHT, f"train.selection_teacher={tmp_path / 'teacher'}"), tmp_path / "run")
    assert [line for line in found.warned if line.startswith("train.selection_teacher: ") and "step-2 is taken" in line]


def test_preflight_warns_of_a_teacher_of_shorter_texts(tmp_path, tiny_config, dense_run) -> None:
    found = run_preflight(tiny_config(WEIGHT, f"train.selection_teacher={dense_run}", "train.seq_len=64"), tmp_path / "run")
    assert any("is meant for 32 tokens, and rows have train.seq_len=64" in line for line in found.warned)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch 2.13 imports its own deprecated parts
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # and looks at what it warns of
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_a_compiled_or_recomputed_student_is_taught_alike(tiny_config, dense_run, recomputed) -> None:
    plain, changed = (
        tiny_config(WEIGHT, f"train.selection_teacher={dense_run}", f"train.activation_checkpointing={kind}")
        for kind in ("none", recomputed)
    )
    teacher, gradients = Teacher(plain, CPU), []
    torch._dynamo.reset()
    for config in (plain, changed):
        torch.manual_seed(0)
        student = build_model(config).train()
        if config is changed:
            # a recomputed layer keeps its loss, a side effect that breaks its graph
            student.compile_parts(backend="aot_eager", fullgraph=recomputed == "none")
        # each pass has its own target
        for number in range(3):
            student.zero_grad()
            student.sample_queries(number)
            ids = torch.randint(0, 256, (1, 80), generator=torch.Generator().manual_seed(number))
            teacher.set_targets(student, ids, BOUNDS, 50)
            student(ids, labels=ids.roll(-1), cu_seqlens=BOUNDS, max_seqlen=50).backward()
        gradients.append({name: weight.grad for name, weight in student.named_parameters() if weight.grad is not None})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-4), name
