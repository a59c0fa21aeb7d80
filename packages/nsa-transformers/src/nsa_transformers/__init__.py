"""Native Sparse Attention in Hugging Face Transformers: after this import, the Auto classes load `nsa_core` checkpoints."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nsa_transformers.__about__ import __version__
from nsa_transformers.cache import NSAModelCache
from nsa_transformers.configuration import NSAModelConfig
from nsa_transformers.modeling import NSAForCausalLM, NSAModel

__all__ = ["NSAForCausalLM", "NSAModel", "NSAModelCache", "NSAModelConfig", "__version__"]

AutoConfig.register(NSAModelConfig.model_type, NSAModelConfig)
AutoModel.register(NSAModelConfig, NSAModel)
AutoModelForCausalLM.register(NSAModelConfig, NSAForCausalLM)
# with label smoothing, Trainer shifts labels only for the classes named here
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NSAModelConfig.model_type] = NSAForCausalLM.__name__
