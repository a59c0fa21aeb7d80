"""Recall of earlier content of a sequence: a pass key, pairs of keys and values, a copied span.

Each sequence is computed by itself, and a mode applies to all its tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from nsa_train.data.packing import IGNORED
from nsa_train.data.retrieval import Retrieval
from nsa_train.evaluation.options import Figure, Mode, TaskName
from nsa_train.evaluation.subject import Subject

FILLER = b"The river runs past the mill. A cat sleeps on the warm wall. Two boats wait for the tide. The baker opens at six. "
KEY = b"The pass key is %d. Keep the pass key %d in mind. "
QUESTION = b"What is the pass key? The pass key is"
ANSWER = b" %d"
LEAST_KEY, MOST_KEY = 1000, 10_000
"""Pass keys have four digits."""
COPIED = 4
"""A sequence is this many times as long as its copied span."""


class Asked(NamedTuple):
    """A sequence whose end asks for an answer."""

    ids: Tensor
    """int64 `(T,)`: the haystack, then the question."""
    answer: Tensor
    """int64 `(A,)`, the right one."""


def passkey(subject: Subject) -> Iterator[Figure]:
    """Yield the share of pass keys that the model answers in every token, by length, depth and mode."""
    depths, samples = subject.options.depths, subject.options.samples
    for length in subject.lengths_from(least_passkey(subject)):
        for depth in (index / max(depths - 1, 1) for index in range(depths)):
            names = [f"passkey {length} {depth} {sample}" for sample in range(samples)]
            asked = [passkey_of(subject, length, depth, name) for name in names]
            for mode in subject.modes:
                right = sum(_is_answered(subject, one, mode, name) for one, name in zip(asked, names, strict=True))
                yield Figure(TaskName.PASSKEY, mode, "right", right / samples, samples, length=length, depth=depth)


def _is_answered(subject: Subject, asked: Asked, mode: Mode, name: str) -> bool:
    """Return True if the likeliest tokens after the question, each fed back in turn, are the answer."""
    caches = subject.decoder.new_caches(1, len(asked.ids) + len(asked.answer))
    given, found = asked.ids, list[Tensor]()
    with subject.in_mode(mode, name):
        while len(found) < len(asked.answer):
            given = subject.logits(given, caches, last=1).argmax(-1)
            found.append(given)
    return torch.equal(torch.cat(found).cpu(), asked.answer)


def passkey_of(subject: Subject, length: int, depth: float, name: str) -> Asked:
    """Return a sequence of `length` tokens, question and answer included, with the pass key at `depth`, 0 to 1, of the haystack."""
    random = subject.random(name)
    if not subject.reads_ids:
        return _in_text(subject, length, depth, random)
    task = _task(subject, length, pairs=1)
    task = evolve(task, length=length - task.pair_ids + task.tail)
    slot = round(depth * (task.slots - 1))
    row = torch.from_numpy(subject.plain_ids[task.draw(random, [slot]).input_ids[: length - task.pair_ids]])
    key, value = row[slot * task.pair_ids :][: task.pair_ids].split(task.tokens)
    return Asked(torch.cat([row, key]), value)


def _in_text(subject: Subject, length: int, depth: float, random: np.random.Generator) -> Asked:
    number = int(random.integers(LEAST_KEY, MOST_KEY))
    key, question, answer, filler = (
        subject.opened.tokenizer.encode(text).long() for text in (KEY % (number, number), QUESTION, ANSWER % number, FILLER)
    )
    room = length - len(key) - len(question) - len(answer)
    text = filler.repeat(-(-room // len(filler)))[:room]
    at = round(depth * room)
    return Asked(torch.cat([text[:at], key, text[at:], question]), answer)


def least_passkey(subject: Subject) -> int:
    """Return the tokens of the shortest sequence that holds a pass key, its question and its answer."""
    if subject.reads_ids:
        return 2 * _task(subject, 0, pairs=1).pair_ids
    tokenizer, numbers = subject.opened.tokenizer, range(LEAST_KEY, MOST_KEY)
    # texts with different numbers have different numbers of tokens; each text is followed by a separator
    keys, answers = (tokenizer.encode_batch(texts) for texts in ([KEY % (n, n) for n in numbers], [ANSWER % n for n in numbers]))
    longest = max(len(key) + len(answer) - 2 for key, answer in zip(keys, answers, strict=True))
    return longest + len(tokenizer.encode(QUESTION)) + 1


def mqar(subject: Subject) -> Iterator[Figure]:
    """Yield the share of pairs whose value the model knows in every token, by length and mode; a sequence asks for all of its pairs.

    `guessed` is the share of right answers of a model that only draws among the values that no question has used yet.
    """
    samples = subject.options.samples
    for length in subject.lengths_from(least_mqar(subject)):
        task = _task(subject, length, pairs=subject.alphabet.pairs)
        right = dict.fromkeys(subject.modes, 0)
        for sample in range(samples):
            name = f"mqar {length} {sample}"
            row = task.draw(subject.random(name))
            ids = torch.from_numpy(subject.plain_ids[row.input_ids])
            labels = row.labels[-task.tail :]
            asked = np.flatnonzero(labels != IGNORED)
            expected = torch.from_numpy(subject.plain_ids[labels[asked]])
            for mode in right:
                with subject.in_mode(mode, name):
                    found = subject.logits(ids, last=task.tail)[asked].argmax(-1).cpu()
                right[mode] += int((found == expected).view(-1, task.tokens).all(1).sum())
        count = samples * task.queries
        for mode, number in right.items():
            yield Figure(TaskName.MQAR, mode, "right", number / count, count, length=length)
        guessed = sum(1 / left for left in range(1, task.pairs + 1)) / task.pairs
        yield Figure(TaskName.MQAR, None, "guessed", guessed, count, length=length)


def _task(subject: Subject, length: int, *, pairs: int) -> Retrieval:
    """Return the recall of `pairs` pairs, all asked for, in rows of `length` ids."""
    alphabet = subject.alphabet
    return Retrieval(length=length, pairs=pairs, queries=pairs, symbols=alphabet.symbols, tokens=alphabet.tokens)


def least_mqar(subject: Subject) -> int:
    """Return the tokens of the shortest sequence that holds all pairs and asks for them."""
    task = _task(subject, 0, pairs=subject.alphabet.pairs)
    return task.tail + task.pairs * task.pair_ids


def copy(subject: Subject) -> Iterator[Figure]:
    """Yield loss and right answers on the first and the second occurrence of a span of random ids, by length and mode.

    The span takes a quarter of a sequence, and is at its beginning and at its end; random ids are between.
    """
    samples = subject.options.samples
    for length in subject.lengths_from(least_copy(subject)):
        span = length // COPIED
        for mode in subject.modes:
            sums = np.zeros(4)
            for sample in range(samples):
                name = f"copy {length} {sample}"
                ids = _copied(subject, length, subject.random(name))
                with subject.in_mode(mode, name):
                    logits = subject.logits(ids, last=length)
                sums += [*_loss_and_right(logits[: span - 1], ids[1:span]), *_loss_and_right(logits[-span:-1], ids[1:span])]
            count = samples * (span - 1)
            for measure, value in zip(("first loss", "first right", "loss", "right"), sums.tolist(), strict=True):
                yield Figure(TaskName.COPY, mode, measure, value / count, count, length=length)


def least_copy(subject: Subject) -> int:
    """Return the number of tokens of the shortest sequence of copy. Its span has 2 tokens: one is given, one is to be predicted."""
    return 2 * COPIED


def _copied(subject: Subject, length: int, random: np.random.Generator) -> Tensor:
    known = subject.plain_ids[: 3 * subject.alphabet.symbols] if subject.reads_ids else subject.plain_ids
    ids = random.choice(known, length)
    span = length // COPIED
    ids[-span:] = ids[:span]
    return torch.from_numpy(ids)


def _loss_and_right(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the summed loss in nats and the number of right answers of `logits` `(S, V)`."""
    labels = labels.to(logits.device)
    loss = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
    return float(loss), float((logits.argmax(-1) == labels).sum())
