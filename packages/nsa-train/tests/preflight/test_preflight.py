"""Preflight judges every rule and writes nothing."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve

from nsa_core import (
    BackendRegistry,
    BranchRequest,
    Capability,
    LayerTelemetry,
    Layout,
    NativeSparseAttention,
    Operation,
    default_registry,
    explain_routing,
)
from nsa_core.backends.base import Reason
from nsa_train.checkpoint import CheckpointWriter
from nsa_train.cli import run_command
from nsa_train.errors import ConfigError
from nsa_train.host.machine import Machine, described_machine
from nsa_train.host.routing import routing_decisions, uses_of_sample
from nsa_train.model.decoder import count_parameters
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.judge import run_preflight
from nsa_train.preflight.memory import estimate_memory
from nsa_train.settings.recipe import load_config


def test_a_good_run_gets_its_data(tiny_config, tmp_path: Path) -> None:
    findings = run_preflight(tiny_config(), tmp_path / "new" / "deep")
    assert findings.failed == []
    findings.require()
    assert any(line.startswith("data: train has 1 documents") for line in findings.passed)
    assert not (tmp_path / "new").exists()


def test_a_failed_rule_stops_the_run_with_all_of_them(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = run_preflight(tiny_config("data.path=absent.txt", "nsa.backends.slc=nosuch"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        findings.require()
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("below", [".", "run"])
def test_an_out_directory_that_is_a_link_to_nothing_is_refused(tiny_config, tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to("gone")
    [failure] = run_preflight(tiny_config(), tmp_path / "link" / below).failed
    assert failure.endswith(
        f"cannot be written ({tmp_path / 'link'} is a link to 'gone', which is not there); make that, or name another directory"
    )


def test_an_out_directory_below_a_file_is_refused(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [failure] = run_preflight(tiny_config(), tmp_path / "file" / "out").failed
    assert "cannot be written" in failure
    [failure] = run_preflight(tiny_config(), tmp_path / "file").failed
    assert "cannot be written" in failure


def test_the_dense_twin_needs_no_routes(tiny_config, tmp_path: Path) -> None:
    findings = run_preflight(tiny_config("model.attention=dense"), tmp_path)
    assert not any(line.startswith("route") for line in findings.passed)


def test_a_split_that_fills_no_row_is_named(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 200)
    findings = run_preflight(tiny_config(f"data.path={tmp_path}/short.txt"), tmp_path / "out")
    assert findings.failed == [
        "train.seq_len=32 is longer than the val split (21 tokens; it must fill one row); use 21 or less, or more text"
    ]


def test_a_backend_that_is_not_installed_is_named_with_those_that_are(tiny_config, tmp_path: Path) -> None:
    [failure] = run_preflight(tiny_config("nsa.backends.slc=nosuch"), tmp_path / "out").failed
    assert failure.startswith("nsa.backends.slc='nosuch' is not installed (there is ")
    assert "sdpa" in failure
    assert failure.endswith("); use 'auto'")


def test_a_backend_that_cannot_serve_is_named_with_its_own_reasons(tiny_config, tmp_path: Path, monkeypatch) -> None:
    class OnlyOnGPUs:
        name, operation, capability = "gpu", Operation.SLC, Capability(device_types=("cuda",), max_head_dim=8)

        def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
            return self.capability.reasons_against(request)

        def preference(self, request: BranchRequest) -> int:
            return 1

        def __call__(self, *operands, geometry, scale):
            raise AssertionError("routing alone calls no backend")

    registry = BackendRegistry((*default_registry().backends, OnlyOnGPUs()))
    monkeypatch.setattr("nsa_train.host.routing.explain_routing", functools.partial(explain_routing, registry=registry))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    [failure] = run_preflight(tiny_config("nsa.backends.slc=gpu"), tmp_path / "out").failed
    assert failure == (
        "nsa.backends.slc='gpu' cannot serve this run (gpu: incapable: device cpu (needs cuda), "
        "incapable: head dimension 16 (at most 8)); use 'auto'"
    )


class Third:
    """A third-party backend of one operation, with a reason against chosen requests."""

    name = "third"

    def __init__(self, operation: Operation, refuse: Callable[[BranchRequest], Reason | None]) -> None:
        self.operation, self.capability, self.refuse = operation, Capability(), refuse

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        found = self.refuse(request)
        return () if found is None else (found,)

    def preference(self, request: BranchRequest) -> int:
        return -1

    def __call__(self, *operands, geometry, scale):
        raise AssertionError("routing alone calls no backend")


@pytest.fixture
def third_party(monkeypatch) -> Callable[..., None]:
    """A function that installs a third party's backend of some operations beside the reference, which has no `nsa`."""

    def install(refuse: Callable[[BranchRequest], Reason | None], *operations: Operation) -> None:
        built_in = [backend for backend in default_registry().backends if backend.name == "sdpa"]
        registry = BackendRegistry((*built_in, *(Third(operation, refuse) for operation in operations)))
        monkeypatch.setattr("nsa_train.host.routing.explain_routing", functools.partial(explain_routing, registry=registry))
        monkeypatch.setattr("nsa_train.host.routing.default_registry", lambda: registry)

    return install


@pytest.mark.parametrize("operation", [operation for operation in Operation if operation is not Operation.CHOOSE])
def test_a_named_backend_that_cannot_serve_fails_for_every_operation(tiny_config, tmp_path: Path, third_party, operation) -> None:
    third_party(lambda _: Reason.incapable("too warm"), *Operation)
    [failure] = run_preflight(tiny_config(f"nsa.backends.{operation}=third"), tmp_path / "out").failed
    use = "the samples of this run" if operation in (Operation.APPEND, Operation.ROTATE) else "this run"
    assert failure == f"nsa.backends.{operation}='third' cannot serve {use} (third: incapable: too warm); use 'auto'"


def test_a_backend_named_for_what_other_backends_ask_for_is_a_warning(tiny_config, tmp_path: Path, third_party) -> None:
    third_party(lambda _: Reason.incapable("too warm"), *Operation)
    findings = run_preflight(tiny_config("nsa.backends.choose=third"), tmp_path / "out")
    assert findings.failed == []
    [warning] = [line for line in findings.warned if line.startswith("route")]
    assert warning == "route: nsa.backends.choose='third' is not used (other backends ask for it, a layer does not)"


@pytest.mark.parametrize("operation", Operation)
def test_a_name_that_no_plug_in_has_fails_for_every_operation(tiny_config, tmp_path: Path, third_party, operation) -> None:
    third_party(lambda _: None)
    there = "none" if operation is Operation.NSA else "sdpa"
    for branches in ("['cmp','slc','win']", "['cmp']"):
        config = tiny_config(f"nsa.backends.{operation}=nosuch", f"nsa.branches={branches}")
        [failure] = run_preflight(config, tmp_path / "out").failed
        assert failure == f"nsa.backends.{operation}='nosuch' is not installed (there is {there}); use 'auto'"


def test_a_backend_that_cannot_serve_the_samples_of_a_run_fails(tiny_config, tmp_path: Path, third_party) -> None:
    third_party(lambda request: Reason.incapable("no cache") if request.layout is Layout.CACHED else None, *Operation)
    for operation in ("slc", "nsa", "append", "rotate"):
        [failure] = run_preflight(tiny_config(f"nsa.backends.{operation}=third"), tmp_path / "out").failed
        assert failure == f"nsa.backends.{operation}='third' cannot serve the samples of this run (third: incapable: no cache); use 'auto'"


@pytest.mark.parametrize("operation", ["nsa", "append", "rotate"])
def test_the_requests_of_samples_are_those_that_a_cached_step_makes(tiny_config, operation: str) -> None:
    config = tiny_config("model.head_dim_v=12", "train.precision=fp32")
    [prompt, token] = uses_of_sample(config)(Operation(operation))["a sample"]
    seen: list[BranchRequest] = []
    backends = [backend for backend in default_registry().backends if backend.name == "sdpa"]
    registry = BackendRegistry(tuple(backends))
    registry.observers.append(lambda asked_for, facts, backend: seen.append(facts))
    layer = NativeSparseAttention(config.nsa_config(), registry=registry)
    cache = layer.new_cache(1, 2 * config.train.seq_len)
    layer(torch.zeros(1, 16, 32), cache=cache)
    layer(torch.zeros(1, 1, 32), cache=cache)
    first, *_, last = (facts for facts in seen if facts.operation == operation)
    assert evolve(first, num_queries=prompt.num_queries, num_keys=prompt.num_keys) == prompt
    assert evolve(last, num_keys=token.num_keys) == token


WITHOUT_CMP = ("nsa.branches=['slc','win']", "nsa.kv=shared", "nsa.compressor=mean", "nsa.backends.nsa=third")


def test_without_the_compressed_output_a_fused_backend_serves_training_evaluation_and_samples(
    tiny_config, tmp_path: Path, third_party
) -> None:
    third_party(lambda request: Reason.incapable("gradients") if request.needs_grad else None, *Operation)
    config = tiny_config(*WITHOUT_CMP)
    [failure] = run_preflight(config, tmp_path / "out").failed
    assert failure == "nsa.backends.nsa='third' cannot serve this run (third: incapable: gradients); use 'auto'"

    third_party(lambda _: Reason.policy("slow here"), *Operation)
    findings = run_preflight(config, tmp_path / "out")
    assert findings.failed == []
    [decision] = routing_decisions(config, torch.device("cpu"))["nsa"]
    assert (decision.chosen, decision.request.needs_grad) == ("third", True)
    assert [line for line in findings.warned if line.startswith("route")] == [
        "route: nsa -> third, because nsa.backends.nsa names it, against policy: slow here"
    ]

    third_party(lambda request: Reason.incapable("no cache") if request.layout is Layout.CACHED else None, *Operation)
    [failure] = run_preflight(config, tmp_path / "out").failed
    assert failure == "nsa.backends.nsa='third' cannot serve the samples of this run (third: incapable: no cache); use 'auto'"
    # values of another width are not fused
    findings = run_preflight(tiny_config(*WITHOUT_CMP, "model.head_dim_v=12"), tmp_path / "out")
    assert findings.failed == []
    assert [line for line in findings.warned if line.startswith("route")] == [
        "route: nsa.backends.nsa='third' is not used (nsa.branches=['slc', 'win'] runs no nsa)"
    ]


def test_policy_against_a_named_backend_is_a_warning(tiny_config, tmp_path: Path, third_party) -> None:
    third_party(lambda _: Reason.policy("slow here"), *Operation)
    findings = run_preflight(tiny_config("nsa.backends.slc=third"), tmp_path / "out")
    assert findings.failed == []
    assert "route: slc -> third" in findings.passed
    [warning] = [line for line in findings.warned if line.startswith("route")]
    assert warning == "route: slc -> third, because nsa.backends.slc names it, against policy: slow here"


def test_a_backend_named_for_what_is_not_run_is_a_warning(tiny_config, tmp_path: Path, third_party) -> None:
    third_party(lambda _: Reason.incapable("too warm"), *Operation)
    findings = run_preflight(tiny_config("nsa.backends={slc='third',nsa='third'}", "nsa.branches=['win']"), tmp_path / "out")
    assert findings.failed == []
    assert [line for line in findings.warned if line.startswith("route")] == [
        f"route: nsa.backends.{name}='third' is not used (nsa.branches=['win'] runs no {name})" for name in ("slc", "nsa")
    ]


@pytest.mark.parametrize(
    ("branches", "operations"),
    [("['slc']", ["cmp", "select", "slc"]), ("['cmp','win']", ["cmp", "win"]), ("['slc','win']", ["cmp", "select", "slc", "win"])],
)
def test_every_operation_that_a_step_runs_is_routed(tiny_config, tmp_path: Path, branches: str, operations: list[str]) -> None:
    config = tiny_config(f"nsa.branches={branches}", "model.head_dim_v=12")
    routed = routing_decisions(config, torch.device("cpu"))
    assert list(routed) == operations
    layer = NativeSparseAttention(config.nsa_config())
    layer.telemetry = LayerTelemetry()
    layer(torch.zeros(1, 32, 32))
    assert sorted(layer.telemetry.routes) == sorted(operations)
    # without the branch its lse is still needed, for which its keys stand in as values
    [decision] = routed["cmp"]
    assert decision.request.head_dim_v == (12 if "cmp" in config.nsa.branches else 16)


def _failures(config, out: Path, **options) -> list[str]:
    return run_preflight(config, out, **options).failed


H200 = described_machine("h200")


def test_a_long_run_is_saved_as_it_goes(tiny_config, tmp_path: Path) -> None:
    """A run of the earlier system wasted 35,000 steps: checkpoints were never written."""
    out = tmp_path / "out"
    assert _failures(tiny_config("train.steps=4999", "train.save_every=0"), out) == []
    [failure] = _failures(tiny_config("train.steps=5000", "train.save_every=0"), out)
    assert failure.startswith("train.save_every=0 with train.steps=5000 (a run of 5000 steps or more saves as it goes)")
    assert failure.endswith("use --set train.save_every=500")
    assert _failures(tiny_config("train.steps=5000", "train.save_every=2500", "train.keep_last=2"), out) == []


def test_a_first_checkpoint_in_the_second_half_is_warned_of_and_no_failure(tiny_config, tmp_path: Path) -> None:
    def warned(save_every: int) -> bool:
        findings = run_preflight(tiny_config("train.steps=5000", f"train.save_every={save_every}"), tmp_path / "out")
        assert findings.failed == []
        return any("before the run is half over" in line for line in findings.warned)

    assert [save_every for save_every in (2500, 2501, 4999, 5000, 9000) if warned(save_every)] == [2501, 4999, 5000, 9000]


def test_a_long_gpu_run_computes_in_bf16(tiny_config, tmp_path: Path) -> None:
    long = ("train.steps=5000", "train.save_every=500")
    for precision in ("fp32", "fp16"):
        [failure] = _failures(tiny_config(*long, f"train.precision={precision}"), tmp_path / "out", machine=H200)
        assert "a long GPU run computes in bf16" in failure
        assert failure.endswith("use --set train.precision=bf16")
        assert _failures(tiny_config(*long, f"train.precision={precision}"), tmp_path / "out") == []
    assert _failures(tiny_config(*long, "train.precision=bf16"), tmp_path / "out", machine=H200) == []


def test_a_long_gpu_run_without_checkpoints_fails_both_rules(tiny_config, tmp_path: Path) -> None:
    failures = _failures(tiny_config("train.steps=9000", "train.save_every=0"), tmp_path / "out", machine=H200)
    assert [failure.split("=")[0] for failure in failures] == ["train.save_every", "train.precision"]


def test_a_toy_in_a_long_run_is_warned_of_and_no_failure(tiny_config, tmp_path: Path) -> None:
    findings = run_preflight(tiny_config("train.steps=5000", "train.save_every=500"), tmp_path / "out")
    assert findings.failed == []
    assert any("is a toy" in line for line in findings.warned)


def test_no_run_lies_inside_another(tiny_config, tmp_path: Path) -> None:
    for name in ("config.toml", "heartbeat_rank0.jsonl"):
        (tmp_path / name).touch()
    [failure] = _failures(tiny_config(), tmp_path / "deep" / "again")
    assert "is inside the run" in failure


def test_resuming_wants_a_run_and_no_order_to_halt(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    [failure] = _failures(tiny_config(), tmp_path)
    assert "is not empty" in failure
    assert "--resume" in failure
    assert _failures(tiny_config(), tmp_path, resuming=True) == []
    (tmp_path / "config.toml").rename(tmp_path / "notes.txt")
    [failure] = _failures(tiny_config(), tmp_path, resuming=True)
    assert "holds no run to resume" in failure
    assert "use --resume auto" in failure
    [failure] = _failures(tiny_config(), tmp_path / "absent", resuming=True)
    assert "does not exist: no run to resume" in failure
    (tmp_path / "notes.txt").rename(tmp_path / "config.toml")
    (tmp_path / ".HALT").touch()
    [failure] = _failures(tiny_config(), tmp_path, resuming=True)
    assert "still holds .HALT" in failure
    assert f"rm '{tmp_path}/.HALT'" in failure


@pytest.mark.parametrize("resuming", [False, True])
def test_the_directory_of_a_running_run_is_refused(tiny_config, tmp_path: Path, resuming: bool) -> None:
    (tmp_path / "config.toml").touch()
    with CheckpointWriter(tmp_path / "checkpoints"):
        [failure] = _failures(tiny_config(), tmp_path, resuming=resuming)
        assert failure.startswith(f"{tmp_path}/checkpoints belongs to another process that still runs")
        # a check affects neither the owner nor other checks
        assert _failures(tiny_config(), tmp_path, resuming=resuming) == [failure]
    assert _failures(tiny_config(), tmp_path, resuming=True) == []


def test_rows_divide_among_processes(tiny_config, tmp_path: Path) -> None:
    two = ("train.strategy=ddp", "train.nproc_per_node=2")
    machine = described_machine("h200", num_gpus=2)
    assert _failures(tiny_config(*two, "train.batch_size=4"), tmp_path / "out", machine=machine) == []
    with pytest.raises(ConfigError, match=r"train\.batch_size=3 .* use --set train\.batch_size=2 or 4"):
        tiny_config(*two, "train.batch_size=3")


def test_without_a_number_there_is_a_process_per_gpu(tiny_config, tmp_path: Path) -> None:
    config = tiny_config("train.strategy=ddp", "train.batch_size=6")
    [failure] = _failures(config, tmp_path / "out", machine=described_machine("h200", num_gpus=4))
    assert failure == "train.batch_size=6 does not divide among 4 processes (each takes as many rows); use --set train.batch_size=4 or 8"
    assert _failures(config, tmp_path / "out", machine=described_machine("h200", num_gpus=2)) == []


def test_more_processes_than_gpus_are_refused(tiny_config, tmp_path: Path) -> None:
    config = tiny_config("train.strategy=ddp", "train.nproc_per_node=2", "train.batch_size=2")
    [failure] = _failures(config, tmp_path / "out", machine=H200)
    assert "train.nproc_per_node=2 is more than the 1 GPU(s) of this machine" in failure


def test_a_gpu_that_is_missing_is_described(tiny_config, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = run_preflight(tiny_config("train.device=cuda"), tmp_path / "out")
    [failure] = findings.failed
    assert "finds no CUDA GPU here (it needs 1 of compute capability 8.0 or newer with about" in failure
    assert "--set train.device=cpu" in failure
    assert any(line.startswith("device: 1 CUDA GPU(s) of compute capability 8.0 or newer") for line in findings.needs)
    assert any(line.startswith("route: cmp -> ") for line in findings.passed)
    assert _failures(tiny_config("train.device=cuda"), tmp_path / "out", machine=H200) == []


def test_a_recipe_for_gpus_is_not_judged_for_a_cpu(tiny_config, tmp_path: Path) -> None:
    [failure] = _failures(tiny_config("train.device=cuda"), tmp_path / "out", machine=described_machine("cpu"))
    assert "is not what machine 'cpu' has" in failure


def test_bf16_wants_a_gpu_that_has_it(tiny_config, tmp_path: Path) -> None:
    old = Machine(device_type="cuda", name="Tesla V100", compute_capability=(7, 0), memory_gib=16, num_gpus=1)
    [failure] = _failures(tiny_config("train.precision=bf16"), tmp_path / "out", machine=old)
    assert "compute capability 7.0 (bf16 needs 8.0); use --set train.precision=fp16" in failure


def test_routes_are_judged_for_a_machine_that_is_not_here(tiny_config, tmp_path: Path, monkeypatch) -> None:
    """On SM 8.9 policy stands against a kernel; on SM 9.0 it serves."""

    class Hopper:
        name, operation, capability = "hopper", Operation.WIN, Capability(device_types=("cuda",), min_compute_capability=(9, 0))

        def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
            return self.capability.reasons_against(request)

        def preference(self, request: BranchRequest) -> int:
            return 10

        def __call__(self, *operands, geometry, scale):
            raise AssertionError("routing alone calls no backend")

    # what plug-ins are installed differs from machine to machine
    built_in = [backend for backend in default_registry().backends if backend.name == "sdpa"]
    registry = BackendRegistry((*built_in, Hopper()))
    monkeypatch.setattr("nsa_train.host.routing.explain_routing", functools.partial(explain_routing, registry=registry))
    on = {name: run_preflight(tiny_config(), tmp_path / "out", machine=described_machine(name)) for name in ("h200", "l40s")}
    assert "route: win -> hopper" in on["h200"].passed
    assert "route: win -> sdpa" in on["l40s"].passed
    assert any("compute capability 8.9 (needs 9.0 or newer)" in line for line in on["l40s"].warned)
    [failure] = _failures(tiny_config("nsa.backends.win=hopper"), tmp_path / "out", machine=described_machine("l40s"))
    assert "nsa.backends.win='hopper' cannot serve this run" in failure


def test_checkpoints_that_do_not_fit_are_refused(tiny_config, tmp_path: Path, set_free_disk: Callable[[int], None]) -> None:
    config = tiny_config("train.steps=100", "train.save_every=10")
    size = 12 * count_parameters(config).nsa
    set_free_disk(11 * size)
    assert _failures(config, tmp_path / "out") == []
    set_free_disk(11 * size - 1)
    [failure] = _failures(config, tmp_path / "out")
    assert failure.startswith("disk: 11 checkpoints of ")
    assert "use --set train.keep_last=9" in failure
    assert _failures(tiny_config("train.steps=100", "train.save_every=10", "train.keep_last=9"), tmp_path / "out") == []


def test_a_run_that_does_not_fit_in_memory_is_refused_with_a_mend(tmp_path: Path) -> None:
    config = load_config("125m", ["train.batch_size=64", "train.loss_chunk=0"])
    [failure] = _failures(config, tmp_path / "out", machine=H200)
    assert failure.startswith("memory: about ")
    assert "does not fit in the 139.8 GiB of NVIDIA H200" in failure
    assert failure.endswith("use --set train.loss_chunk=4096")
    [failure] = _failures(load_config("125m", ["train.batch_size=256"]), tmp_path / "out", machine=H200)
    assert failure.endswith("use --set train.batch_size=64 --set train.accumulate=4")
    assert _failures(load_config("125m"), tmp_path / "out", machine=H200) == []


def test_a_run_that_may_not_fit_in_memory_is_warned_of_with_a_mend(tmp_path: Path) -> None:
    config = load_config("125m", ["train.device=cpu"])
    needed = estimate_memory(config, count_parameters(config).nsa, 1).total_gib

    def found(share: float) -> tuple[list[str], list[str]]:
        machine = Machine(device_type="cpu", name="cpu", memory_gib=needed / share)
        findings = run_preflight(config, tmp_path / "out", machine=machine)
        return findings.failed, [line for line in findings.warned if line.startswith("memory: ")]

    assert found(0.89) == ([], [])
    failed, [warning] = found(0.91)
    assert failed == []
    assert "may not fit in the 44.3 GiB free here; use --set train.loss_chunk=4096" in warning
    [failure], warned = found(1.01)
    assert "does not fit in" in failure
    assert warned == []


def test_fsdp_shares_the_states() -> None:
    one, two = (estimate_memory(load_config("125m", ["train.strategy=fsdp"]), 10**8, count) for count in (1, 2))
    assert two.states_gib == pytest.approx(one.states_gib / 2)
    assert two.activations_gib == pytest.approx(one.activations_gib / 2)


def test_warnings_are_no_failures(tiny_config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = run_preflight(tiny_config("train.eval_every=100"), tmp_path / "out")
    assert findings.failed == []
    assert any("only the start and the end are evaluated" in line for line in findings.warned)
    assert any(line.startswith("warn ") for line in findings.lines())


def test_data_that_cannot_be_reached_are_named(tiny_config, tmp_path: Path) -> None:
    [failure] = _failures(tiny_config("data.path=absent.txt"), tmp_path / "out")
    assert "absent.txt" in failure


def test_a_machine_is_described_by_name() -> None:
    assert (H200.compute_capability, H200.num_gpus, H200.is_here) == ((9, 0), 1, False)
    with pytest.raises(ConfigError, match=r"--machine='h20O' .* did you mean h20"):
        described_machine("h20O")
    with pytest.raises(ConfigError, match="use one of cpu, a100"):
        described_machine("zzz")


def test_the_command_judges_a_machine_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sets = ["--set", "data.source=synthetic", "--set", "data.tokenizer=byte", "--set", "data.on_bad_record=fail"]
    assert run_command(["preflight", "a100", *sets, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert [line.split("=")[0] for line in printed.err.splitlines()] == ["FAIL  train.device"]
    assert "needs device: 1 CUDA GPU(s) of compute capability 8.0 or newer with about" in printed.out
    assert run_command(["preflight", "a100", *sets, "--machine", "a100", "--out", str(tmp_path / "out")]) == 0
    assert "NVIDIA A100 80GB (described, not here)" in capsys.readouterr().out
    assert run_command(["preflight", "a100", *sets, "--machine", "nosuch"]) == 2


@pytest.mark.parametrize(
    ("words", "failures"),
    [
        (["demo", "--set", "train.lr=-1", "--set", "train.steps=0"], ["train.steps=0 is not", "train.lr=-1 is not"]),
        (["demo", "--set", "train.stepz=1"], ["train.stepz is unknown"]),
        (["demo", "--set", "nsa.selection_block_size=50"], ["nsa.selection_block_size=50 is not a multiple of"]),
        (["demo", "--set", "nonsense"], ["--set 'nonsense' is not of the form"]),
        (["demo", "--machine", "abacus"], ["--machine='abacus' is not a machine"]),
        (["demo", "--nnodes", "0"], ["--nnodes='0' is neither a number of hosts"]),
        (["nosuch"], ["RECIPE='nosuch' is neither a shipped recipe"]),
    ],
    ids=" ".join,
)
def test_every_line_of_a_failure_begins_with_fail(capsys: pytest.CaptureFixture[str], words: list[str], failures: list[str]) -> None:
    assert run_command(["preflight", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(failures)
    for line, failure in zip(sorted(lines), sorted(failures), strict=True):
        assert line.startswith(f"FAIL  {failure}")


def test_a_finding_of_several_lines_is_marked_on_each() -> None:
    assert [*Preflight(passed=["one\ntwo"], failed=["three\nfour", "five"]).lines()] == [
        *("ok    one", "ok    two", "FAIL  three", "FAIL  four", "FAIL  five"),
    ]
