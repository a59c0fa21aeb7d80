"""Whether the choice of blocks repeats: the run's own weights on the same tokens, twice."""

import torch
from torch import Tensor

from nsa_core import BlockGeometry
from nsa_core.telemetry import LayerTelemetry
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.errors import TrainError
from nsa_train.host.routing import refused_backends, uses_of_sample
from nsa_train.model.decoder import Decoder
from nsa_train.smoke.records import Records, Verdict

MOST_TOKENS = 512
SEED = 0


class ChosenBlocks(LayerTelemetry):
    """Keeps the chosen blocks of the last pass."""

    def __init__(self) -> None:
        """Start without any."""
        super().__init__()
        self.block_indices: Tensor | None = None

    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Keep the chosen blocks `(B, S, G, n)`."""
        self.block_indices = block_indices


def selection_verdict(records: Records, rule: str) -> Verdict:
    """Return the verdict of `rule`: whether the newest checkpoint of the run chooses the same blocks twice for the same tokens."""
    try:
        checkpoint = open_checkpoint(records.paths.root)
        if refused := refused_backends(checkpoint.config, uses_of_sample(checkpoint.config), advice="judge it where it can"):
            return Verdict(rule=rule, is_passed=None, found=f"not judged: {next(iter(refused.values()))}")
        model = load_model(checkpoint)
    except TrainError as error:
        return Verdict(rule=rule, is_passed=False, found=str(error))
    generator = torch.Generator().manual_seed(SEED)
    length = min(checkpoint.config.train.seq_len, MOST_TOKENS)
    ids = torch.randint(0, len(model.embedding.weight), (2, length), generator=generator)
    first, second = chosen_blocks(model, ids), chosen_blocks(model, ids)
    if not first:
        return Verdict(rule=rule, is_passed=None, found="no layer has the selected branch")
    differing = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return Verdict(rule=rule, is_passed=not differing, found=f"{len(first) - differing} of {len(first)} layers chose the same blocks twice")


@torch.no_grad()
def chosen_blocks(model: Decoder, ids: Tensor) -> list[Tensor]:
    """Return the blocks that each layer with a selected branch chooses for `ids` `(B, S)`."""
    layers, watched = model.sparse_layers, []
    for layer in layers:
        layer.telemetry = ChosenBlocks()
        watched.append(layer.telemetry)
    model(ids)
    for layer in layers:
        layer.telemetry = None
    return [one.block_indices for one in watched if one.block_indices is not None]
