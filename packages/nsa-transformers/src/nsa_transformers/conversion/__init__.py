"""Conversion of dense checkpoints of Llama, Qwen2, Qwen3 and Mistral to NSA, tensor by tensor."""

from nsa_transformers.conversion.options import ConversionOptions
from nsa_transformers.conversion.planning import Conversion, plan_conversion
from nsa_transformers.conversion.writing import Converted, write_converted

__all__ = ["Conversion", "ConversionOptions", "Converted", "plan_conversion", "write_converted"]
