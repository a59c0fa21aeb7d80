"""lm-eval on an export: by our command with inline documents, and by lm-eval's own through remote code."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from nsa_core.errors import ConfigError, InputError
from nsa_transformers import NSAForCausalLM
from nsa_transformers.evaluate import evaluate, main, read_tasks
from nsa_transformers.tokenizer import byte_tokenizer

TASKS = """
- task: letters
  output_type: multiple_choice
  doc_to_text: "{{question}}"
  doc_to_choice: ["a", "b"]
  doc_to_target: answer
  data:
  - {question: "x", answer: 0}
  - {question: "yy", answer: 1}
- task: text
  output_type: loglikelihood_rolling
  doc_to_text: ""
  doc_to_target: "{{text}}"
  metric_list: [{metric: byte_perplexity}]
  data: [{text: "three bottles"}, {text: "— 東京"}]
- task: continuing
  output_type: generate_until
  doc_to_text: "{{question}}"
  doc_to_target: "b"
  generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
  metric_list: [{metric: exact_match}]
  data: [{question: "a"}, {question: "aaaa"}]
"""
THEIRS = """
task: letters_of_a_file
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["a", "b"]
doc_to_target: answer
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("mixed", vocab_size=258, bos_token_id=256, eos_token_id=256, pad_token_id=257, max_position_embeddings=128)
    model.save_pretrained(folder)
    byte_tokenizer(128).save_pretrained(folder)
    return folder


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.yaml"
    path.write_text(TASKS)
    return path


def _needs_lm_eval():
    return pytest.importorskip("lm_eval", reason="lm-eval is not installed (an extra, nsa-transformers[evaluate])")


def test_a_file_with_inline_documents_is_evaluated_offline(folder, tasks, tiny_model, tmp_path, capsys, monkeypatch):
    _needs_lm_eval()
    monkeypatch.setattr("socket.socket.connect", None)
    assert main([str(folder), "--tasks", str(tasks), "--json", str(tmp_path / "out.json")]) == 0
    table = capsys.readouterr().out
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results) == {"letters", "text", "continuing"}
    assert "byte_perplexity" in table
    # the figure is that of the model's own loss, after the separator
    model = tiny_model("mixed", vocab_size=258, max_position_embeddings=128)
    texts = [text.encode() for text in ("three bottles", "— 東京")]
    with torch.no_grad():
        losses = [(len(text), model(torch.tensor([[256, *text]]), labels=torch.tensor([[256, *text]])).loss) for text in texts]
    mean = sum(count * loss for count, loss in losses) / sum(count for count, _ in losses)
    assert results["text"]["byte_perplexity,none"] == pytest.approx(float(mean.exp()), rel=1e-4)


def test_the_command_of_lm_eval_loads_an_export_by_remote_code(folder, tmp_path):
    _needs_lm_eval()
    rows = [{"question": "x", "answer": 0}, {"question": "yy", "answer": 1}]
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "task.yaml").write_text(THEIRS.replace("FILE", str(tmp_path / "rows.json")))
    words = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True", "--tasks", str(tmp_path / "task.yaml")]
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--device", "cpu", "--batch_size", "2"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "letters_of_a_file" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", "cannot be read"),
        ("- 3", "holds no tasks"),
        ("[]", "holds no tasks"),
        ("{output_type: multiple_choice}", "holds no tasks"),
        ("{task: a, data: [3]}", "task 'a' has data that are no documents"),
        ("{task: a, data: []}", "task 'a' has data that are no documents"),
        ("{task: !!python/object/apply:os.system ['true']}", "cannot be read"),
        ("[{task: a, data: [{q: x}]}, {task: a, data: [{q: y}]}]", "has two tasks named 'a'"),
        ("{task: a, repeats: 1000000000}", r"has repeats=1000000000 \(an integer from 1 to 1000: .*\); leave it out, or use 8"),
        ("{task: a, repeats: true}", "has repeats=True"),
        ("{task: a, repeats: 0}", "has repeats=0"),
    ],
)
def test_a_file_that_holds_no_tasks_is_refused(tmp_path, text, message):
    (tmp_path / "tasks.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tasks(tmp_path / "tasks.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        evaluate(tmp_path, tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "nowhere"], "--device='nowhere' is not to be had here"),
        (["--batch-size", "0"], "--batch-size=0 is below 1"),
        (["--limit", "0"], "--limit=0 is below 1"),
        (["--json", "nowhere/out.json"], "--json='nowhere/out.json' is in no existing directory"),
    ],
)
def test_an_option_that_cannot_be_ends_with_2_before_a_model_is_loaded(folder, tasks, capsys, monkeypatch, words, message):
    monkeypatch.setattr("nsa_transformers.evaluate.AutoModelForCausalLM", None)
    assert main([str(folder), "--tasks", str(tasks), *words]) == 2
    assert message in capsys.readouterr().err


def test_an_error_of_the_model_is_not_blamed_on_the_tasks(folder, tasks, capsys, monkeypatch):
    _needs_lm_eval()

    def refuse(self, *args, **keywords):
        raise InputError("the model refuses this batch")

    monkeypatch.setattr(NSAForCausalLM, "forward", refuse)
    assert main([str(folder), "--tasks", str(tasks)]) == 2
    printed = capsys.readouterr().err
    assert "the model refuses this batch" in printed
    assert "lm-eval refuses" not in printed


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("loglikelihood_rolling", "poetry", "invalid output_type 'poetry'"),
        ("max_gen_toks: 4", "max_gen_toks: 400", r"requested max tokens"),
    ],
)
def test_tasks_that_lm_eval_refuses_end_with_2(folder, tasks, capsys, before, after, message):
    _needs_lm_eval()
    tasks.write_text(tasks.read_text().replace(before, after))
    assert main([str(folder), "--tasks", str(tasks)]) == 2
    printed = capsys.readouterr().err
    assert "lm-eval refuses them (" in printed
    assert message in printed


def test_without_lm_eval_the_message_says_what_to_install(folder, tasks, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main([str(folder), "--tasks", str(tasks)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "an evaluation needs lm-eval, which is not installed (" in line
    assert line.endswith("); use pip install lm-eval")


def test_a_folder_without_a_tokenizer_ends_with_2(folder, tmp_path, tasks, capsys):
    _needs_lm_eval()
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", "model.safetensors"):
        (alone / name).write_bytes((folder / name).read_bytes())
    assert main([str(alone), "--tasks", str(tasks)]) == 2
    assert f"cannot be loaded ({alone} has no tokenizer.json; copy it from the folder that the model came from)" in capsys.readouterr().err


def test_settings_of_generation_that_are_no_table_end_with_2(folder, tmp_path, tasks, capsys):
    _needs_lm_eval()
    copied = shutil.copytree(folder, tmp_path / "copied")
    (copied / "generation_config.json").write_text("[]")
    assert main([str(copied), "--tasks", str(tasks)]) == 2
    assert f"cannot be loaded ({copied / 'generation_config.json'} cannot be read (" in capsys.readouterr().err


def test_a_folder_without_a_model_ends_with_2(tmp_path, tasks, capsys):
    _needs_lm_eval()
    assert main([str(tmp_path / "nowhere"), "--tasks", str(tasks)]) == 2
    assert "nsa_transformers.evaluate: " in capsys.readouterr().err


def test_code_of_another_folder_is_not_offered_to_run(tmp_path, tasks, capsys, monkeypatch):
    _needs_lm_eval()
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    (tmp_path / "config.json").write_text('{"model_type": "foreign", "auto_map": {"AutoConfig": "modeling_foreign.ForeignConfig"}}')
    (tmp_path / "modeling_foreign.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    assert main([str(tmp_path), "--tasks", str(tasks)]) == 2
    assert not (tmp_path / "ran").exists()
    assert "cannot be loaded (its config.json names code of that folder, which is never run); name an export" in capsys.readouterr().err


def test_pickled_weights_of_another_family_are_refused(tmp_path, tasks, capsys):
    _needs_lm_eval()
    config = LlamaConfig(vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    torch.save(LlamaForCausalLM(config).state_dict(), tmp_path / "pytorch_model.bin")
    byte_tokenizer(128).save_pretrained(tmp_path)
    assert main([str(tmp_path), "--tasks", str(tasks), "--limit", "1"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be loaded (" in line
    assert "safetensors" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{{question}}", "{{nothere}}"), "'nothere' is undefined"),
        (("{{question}}", "{{question"), "unexpected end of template"),
        (('["a", "b"]', '""'), "invalid syntax"),
        (('["a", "b"]', "5"), "lm-eval refuses them (TypeError)"),
        (
            ("metric_list: [{metric: exact_match}]", "filter_list: [{name: x, filter: [{function: regex, regex_pattern: '('}]}]"),
            "missing )",
        ),
    ],
)
def test_tasks_that_lm_eval_cannot_use_end_in_a_line(folder, tasks, capsys, change, message):
    _needs_lm_eval()
    tasks.write_text(TASKS.replace(*change))
    assert main([str(folder), "--tasks", str(tasks)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("nsa_transformers.evaluate: --tasks=")
    assert message in said


@pytest.mark.parametrize("text", ["task: [", "task: x\ndata: {}", "!!python/object/apply:os.getcwd []", 'task: "\x00"'])
def test_a_file_that_holds_no_tasks_ends_in_one_line(tmp_path, tasks, capsys, text):
    tasks.write_text(text)
    assert main([str(tmp_path), "--tasks", str(tasks)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search("cannot be read|has data that are no documents", line)


def test_results_are_not_written_over_a_directory(folder, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nsa_transformers.evaluate.evaluate", None)
    assert main([str(folder), "--tasks", str(tasks), "--json", str(tmp_path)]) == 2
    assert "is a directory (a file is written there); use " in capsys.readouterr().err


def test_models_of_other_families_are_whole_and_know_every_id(tasks, tmp_path):
    _needs_lm_eval()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    byte_tokenizer(128).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a tokenizer of 258 ids and a vocabulary of 99"):
        evaluate(tmp_path, tasks)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors, such as model\.layers\.0\.mlp\.up_proj\.weight"):
        evaluate(tmp_path, tasks)
