"""From files to packed batches: sources -> tokenizer -> lanes -> packing -> pipeline."""

from nsa_train.data.dataset import Dataset, open_dataset
from nsa_train.data.needs import needs_of
from nsa_train.data.packing import Batch
from nsa_train.data.probe import DataFindings, probe
from nsa_train.data.state import merge_states
from nsa_train.data.stream import TrainingStream, open_training_stream, open_validation
from nsa_train.data.tokenizer import build_tokenizer, num_ids_of

__all__ = [
    "Batch",
    "DataFindings",
    "Dataset",
    "TrainingStream",
    "build_tokenizer",
    "merge_states",
    "needs_of",
    "num_ids_of",
    "open_dataset",
    "open_training_stream",
    "open_validation",
    "probe",
]
