"""samples/before.txt and after.txt: what the model writes after the openings of held-out documents."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from nsa_train.data.tokenizer import Tokenizer
from nsa_train.files import written_whole
from nsa_train.model.decoder import Decoder
from nsa_train.model.generate import generate

SAMPLE_TOKENS = 160
SYNTHETIC_TOKENS = 8
"""Random ids cannot be read, and a deep model draws each in many small launches."""
TEMPERATURE = 0.8
SEED = 0
SYNTHETIC_NOTE = "--- synthetic data: random ids, for throughput alone ---"
CUT_NOTE = "--- ends here: the model's logits are not finite ---\n"


def write_samples(
    path: Path | None, model: Decoder, tokenizer: Tokenizer, prompts: Sequence[Tensor], *, is_synthetic: bool = False
) -> None:
    """Write each prompt and its seeded continuation, drawn through cached decode, to `path`; None: draw alone.

    `is_synthetic`: the prompts are random ids, which the file says.
    """
    num_tokens = SYNTHETIC_TOKENS if is_synthetic else SAMPLE_TOKENS
    drawn = generate(model, prompts, tokenizer=tokenizer, num_tokens=num_tokens, temperature=TEMPERATURE, seed=SEED)
    texts = [
        f"--- prompt ---\n{tokenizer.decode(prompt)}\n"
        f"--- continuation (temperature {TEMPERATURE}, seed {SEED}) ---\n{tokenizer.decode(found.ids)}\n{CUT_NOTE if found.is_cut else ''}"
        for prompt, found in zip(prompts, drawn, strict=True)
    ]
    if path is None:
        return
    path.parent.mkdir(exist_ok=True)
    head = f"{SYNTHETIC_NOTE}\n\n" if is_synthetic else ""
    with written_whole(path) as aside:
        aside.write_text(head + "\n".join(texts), encoding="utf-8")
