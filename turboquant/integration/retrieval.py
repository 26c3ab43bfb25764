"""Facts hidden in a long text, and questions about them: what an answer needs must come out of the cache.

Every fact gives a number to a place.  Half of the questions name the place itself; the others name one that is said to
have another's number (two hops).  As many places again, with names that differ in one word, have numbers that nobody
asks for.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

KINDS = (
    "amber",
    "broad",
    "copper",
    "distant",
    "early",
    "flooded",
    "grey",
    "hidden",
    "ivory",
    "jagged",
    "keen",
    "lower",
)
PLACES = (
    "harbour",
    "mill",
    "orchard",
    "quarry",
    "tower",
    "valley",
    "wharf",
    "yard",
    "bridge",
    "chapel",
    "depot",
    "farm",
)
ANSWER_TOKENS = 10  # five digits, a space, and what a model may say before them


@dataclass(frozen=True)
class Question:
    """prompt: token ids; answer: digits; hops: facts that lead to it."""

    prompt: list[int]
    answer: str
    hops: int


@dataclass(frozen=True)
class Quiz:
    """Token ids of a text with facts, and questions that all start with it."""

    text: list[int]
    questions: list[Question]


def make_quiz(tokenizer: Any, filler: Sequence[int], length: int, count: int, seed: int) -> Quiz:
    """`count` questions of each kind on one text; every prompt and its answer take `length` tokens at most.

    filler: token ids, the first of which (a BOS where the model wants one) stays the first.
    """
    rng = random.Random(seed)
    names = [f"{kind} {place}" for kind, place in rng.sample(list(product(KINDS, PLACES)), 3 * count)]
    numbers = [str(number) for number in rng.sample(range(10000, 100000), 2 * count)]
    asked, referring, others = names[:count], names[count : 2 * count], names[2 * count :]
    facts = [f"The number of the {name} is {n}." for name, n in zip(asked + others, numbers, strict=True)]
    facts += [f"The {a} has the same number as the {b}." for a, b in zip(referring, asked, strict=True)]
    rng.shuffle(facts)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    hidden = [encode(f"\n{fact}\n") for fact in facts]
    endings = [encode(f"\n\nQuestion: What is the number of the {name}?\nAnswer: It is") for name in asked + referring]
    room = length - ANSWER_TOKENS - max(map(len, endings)) - sum(map(len, hidden))
    if room < len(facts) or room > len(filler):
        raise ValueError(f"length={length} leaves {room} tokens for text between {len(facts)} facts of {len(filler)}")
    text, step = list[int](), room // len(facts)
    for place, fact in enumerate(hidden):
        text += [*filler[place * step : (place + 1) * step], *fact]
    answers = [(answer, hops) for hops in (1, 2) for answer in numbers[:count]]
    return Quiz(text, [Question([*text, *end], *answer) for end, answer in zip(endings, answers, strict=True)])


def is_right(question: Question, said: str) -> bool:
    """Whether the first number of what a model said is the answer."""
    number = re.search(r"\d+", said)
    return number is not None and number.group() == question.answer


def score(questions: Sequence[Question], said: Sequence[str], native: Sequence[str]) -> dict[str, float]:
    """Shares of right answers by kind of question, of a cache and of the native one; of answers that are the same."""
    found = {"questions": len(questions), "same_answers": share(a == b for a, b in zip(said, native, strict=True))}
    for hops, name in ((1, "retrieved"), (2, "retrieved_two_hops")):
        for suffix, answers in (("", said), ("_native", native)):
            pairs = zip(questions, answers, strict=True)
            found[name + suffix] = share(is_right(question, text) for question, text in pairs if question.hops == hops)
    return found


def share(flags: Any) -> float:
    known = list(flags)
    return sum(known) / len(known)
