"""samples/before.txt and after.txt: what the model writes after the openings of held-out documents."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from nsa_train.data.sources import Document
from nsa_train.data.tokenizer import Tokenizer
from nsa_train.model.decoder import Decoder
from nsa_train.model.generate import generate

NUM_SAMPLES = 3
PROMPT_BYTES = 32
SAMPLE_TOKENS = 160
TEMPERATURE = 0.8
SEED = 0


def prompts_of(documents: Sequence[Document], tokenizer: Tokenizer) -> list[Tensor]:
    """Return the ids of the openings of the first few `documents`."""
    return [tokenizer.encode(document.text[:PROMPT_BYTES]) for document in documents[:NUM_SAMPLES]]


def write_samples(path: Path, model: Decoder, tokenizer: Tokenizer, prompts: Sequence[Tensor]) -> None:
    """Write each prompt and its seeded continuation, drawn through cached decode, to `path`."""
    drawn = generate(model, prompts, tokenizer=tokenizer, num_tokens=SAMPLE_TOKENS, temperature=TEMPERATURE, seed=SEED)
    texts = [
        f"--- prompt ---\n{tokenizer.decode(prompt)}\n"
        f"--- continuation (temperature {TEMPERATURE}, seed {SEED}) ---\n{tokenizer.decode(ids)}\n"
        for prompt, ids in zip(prompts, drawn, strict=True)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8")
