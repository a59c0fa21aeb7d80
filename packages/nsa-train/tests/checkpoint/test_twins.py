"""Dense twins: of the model's shape, and refused otherwise, in one line."""

from pathlib import Path

import pytest

from nsa_train.checkpoint.models import OpenedModel, require_twin
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.errors import ConfigError
from nsa_train.model.decoder import build_model

DENSE = "model.attention=dense"


@pytest.fixture
def opened(tiny_config):
    """A function from overrides of the tiny recipe to a model with random weights."""

    def build(*overrides):
        config = tiny_config(*overrides)
        return OpenedModel(build_model(config), ByteTokenizer(), config.train.seq_len, Path("some"), None, config)

    return build


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        ([DENSE, "model.dim=48"], "it has width 48, the model 32"),
        ([DENSE, "model.n_layers=3"], "it has layers 3, the model 2"),
        ([DENSE, "model.vocab_size=1300"], "it has vocabulary 1,300, the model 258"),
        ([DENSE, "model.n_heads=4"], "it has heads 4, the model 2"),
        ([DENSE, "model.n_kv_heads=2"], "it has KV heads 2, the model 1"),
        ([DENSE, "model.head_dim_qk=8"], "it has head_dim_qk 8, the model 16"),
        ([DENSE, "model.head_dim_v=8"], "it has head_dim_v 8, the model 16"),
        ([DENSE, "train.seq_len=16"], "it is meant for 16 tokens, the longest text has 32"),
        (["model.layers=['nsa', 'dense']"], "it has 1 NSA layers"),
        (["model.dim=48"], "it has width 48, the model 32; it has 2 NSA layers"),
    ],
)
def test_a_twin_of_another_shape_is_refused_with_every_reason_in_one_line(opened, overrides, reasons):
    with pytest.raises(ConfigError) as refused:
        require_twin(opened(*overrides), opened(), num_tokens=32, reads_alike=True)
    assert str(refused.value) == (
        f"--twin='some' is no dense twin of the model ({reasons}); name the model of the same recipe with model.attention='dense', "
        "or leave --twin out"
    )


def test_a_twin_of_the_models_shape_may_have_another_mlp(opened):
    require_twin(opened(DENSE, "model.intermediate_size=256"), opened(), num_tokens=32, reads_alike=True)
    require_twin(opened(DENSE), opened("model.layers=['nsa', 'dense']", "nsa.kv=shared"), num_tokens=32, reads_alike=True)


def test_a_twin_whose_ids_mean_other_text_is_refused(opened):
    with pytest.raises(ConfigError, match=r"it has another tokenizer, whose ids mean other text\)"):
        require_twin(opened(DENSE), opened(), num_tokens=32, reads_alike=False)
