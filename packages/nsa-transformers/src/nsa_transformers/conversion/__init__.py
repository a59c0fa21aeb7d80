"""Convert dense checkpoints of Llama, Qwen2, Qwen3 and Mistral to NSA, tensor by tensor, and export dense models as such checkpoints."""

from nsa_transformers.conversion.exporting import DenseForm, dense_form
from nsa_transformers.conversion.options import ConversionOptions
from nsa_transformers.conversion.planning import Conversion, plan_conversion
from nsa_transformers.conversion.writing import Converted, write_converted

__all__ = ["Conversion", "ConversionOptions", "Converted", "DenseForm", "dense_form", "plan_conversion", "write_converted"]
