"""What benchmarks put into prompts: a header, a long text, questions.

The text is the user's own, or rules of an invented shop, as many as are needed: what is timed
depends on lengths alone, and how close a splice is depends on the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from kvnotes.errors import PlanError
from kvnotes.prompt import PromptTokenizer
from kvnotes.session import Model

HEADER = (
    "You are the service agent of an online shop. Help the customer with orders, returns and "
    "refunds. Follow the policy below in every reply.\n\n"
)

QUESTIONS = (
    "My parcel has not arrived. What can you do for me?",
    "I want to return two of the three things that I bought. How long do I have?",
    "Can I change the address of an order that is already on its way?",
    "The lamp came with a broken foot. Do I get my money back or another lamp?",
    "I paid with a gift card. Where does the refund go?",
    "Please cancel everything I ordered this morning.",
    "Which papers do you need before you tell me about my order?",
    "My brother wants to know what I have bought. Can you tell him?",
    "I was charged twice. Who do I have to ask?",
    "Is it possible to get a cheaper delivery for the second parcel?",
    "I lost the password of my account, and the old mail address is gone.",
    "The size is wrong. Can I have the next larger one in the same colour?",
    "When will the thing that is sold out be back in your shop?",
    "I would like to speak to a person, not to a machine.",
    "Do you deliver to islands, and what does it cost?",
    "You promised me a discount last week. Why is it not on the bill?",
)

_THINGS = (
    "Books",
    "Lamps",
    "Shoes",
    "Coats",
    "Watches",
    "Kettles",
    "Bicycles",
    "Tables",
    "Phones",
    "Cameras",
)
_CASES = (
    "bought with a gift card",
    "that were opened",
    "from the outlet",
    "delivered to an island",
    "that arrived broken",
    "ordered as a present",
    "paid in three parts",
    "above {number} euros",
)
_RULES = (
    "may be returned within {number} days, if the bill is with them",
    "are refunded to the way of payment that was used, after {number} working days",
    "can be exchanged once, for another size or colour that is in stock",
    "need the word of a supervisor before anything is promised to the customer",
    "are sent again without charge, and the customer keeps what has arrived",
    "are never delivered to another person than the one who has ordered them",
)


@dataclass(frozen=True)
class BenchText:
    """Tokens for prompts.

    Args:
        header: Tokens before the text.
        text: Tokens of the text.
        questions: Tokens of requests behind it.
    """

    header: tuple[int, ...]
    text: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]

    def segment(self, num_tokens: int) -> tuple[int, ...]:
        """Return the first tokens of the text.

        Raises:
            PlanError: It is shorter.
        """
        if num_tokens > len(self.text):
            raise PlanError(
                f"a segment of {num_tokens} tokens is asked for, the text has {len(self.text)}",
                hint="give more or longer texts with --text, or shorter --lengths",
            )
        return self.text[:num_tokens]

    def request(self, index: int, num_tokens: int) -> tuple[int, ...]:
        """Return a request of so many tokens: a question, and text before it if it is short."""
        question = self.questions[index % len(self.questions)]
        return (*self.text, *question)[-num_tokens:] if num_tokens else ()


def bench_text(model: Model, texts: Sequence[str], num_tokens: int) -> BenchText:
    """Return the tokens of texts, or of invented rules where there are none.

    Args:
        model: The model.
        texts: What to take, in order.
        num_tokens: The longest segment that will be asked for.
    """
    encode = model.tokenizer.encode
    return BenchText(
        encode(HEADER),
        encode(long_text(model.tokenizer, texts, num_tokens)),
        tuple(encode(f"\n\nCustomer: {question}\nAgent:") for question in QUESTIONS),
    )


def long_text(tokenizer: PromptTokenizer, texts: Sequence[str], num_tokens: int) -> str:
    """Return texts as one, or invented rules where there are none.

    Args:
        tokenizer: Counts tokens.
        texts: What to take, in order.
        num_tokens: How many tokens of invented rules there have to be.
    """
    if texts:
        return "\n\n".join(texts)
    rules = _rules()
    text = next(rules)
    while len(tokenizer.encode(text)) < num_tokens:
        text += "".join(next(rules) for _ in range(100))
    return text


def _rules() -> Iterator[str]:
    """Yield numbered rules, each another one."""
    kinds = chain.from_iterable(product(_THINGS, _CASES, _RULES) for _ in iter(int, 1))
    for index, (thing, case, rule) in enumerate(kinds, start=1):
        number = 3 + index * 7 % 58
        yield f"{index}. {thing} {case} {rule}.\n".format(number=number)
