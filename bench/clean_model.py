"""A model run by plain transformers, and the margins of its answers.

Nothing of kvnotes is imported, so what is chosen with it cannot depend on the library that
is measured with the choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attribute_candidates import Messages
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True, slots=True)
class Margins:
    """By how many nats the right choice leads, for the old and for the new value."""

    old: float
    new: float

    @property
    def smaller(self) -> float:
        """The weaker of the two; above zero when the model is right for both values."""
        return min(self.old, self.new)


class CleanModel:
    """A model that only knows the whole prompt: no cache is kept between calls."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The rendered messages with the generation prompt."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.token_ids(text)

    def token_ids(self, text: str) -> list[int]:
        """Tokens of text that needs no rendering."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def scores(self, messages: Messages, choices: Sequence[str]) -> list[float]:
        """Summed log-probability of each choice, in nats.

        One right-padded batch; under a causal mask the padding is seen by nothing that is read.
        """
        prompt = self.prompt_ids(messages)
        rows = [self.token_ids(choice) for choice in choices]
        longest = max(map(len, rows))
        batch = torch.tensor([prompt + row + row[-1:] * (longest - len(row)) for row in rows])
        logits = self.model(input_ids=batch, logits_to_keep=longest + 1, use_cache=False).logits
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        return [
            sum(log_probs[i, j, token].item() for j, token in enumerate(row))
            for i, row in enumerate(rows)
        ]

    @torch.inference_mode()
    def tree_scores(
        self, messages: Messages, questions: Sequence[tuple[str, Sequence[str]]]
    ) -> list[list[float]]:
        """The scores of the choices of several questions about one context, in one forward.

        The context is computed once, and every branch sees only its own ancestors:

            context | question 1 | choice | choice | question 2 | choice | choice | ...

        Equal to `scores` to rounding, and several times faster; used to compare wordings only.
        """
        prompts = [
            self.prompt_ids([*messages, {"role": "user", "content": text}]) for text, _ in questions
        ]
        shared = num_shared(prompts)
        assert all(len(prompt) > shared for prompt in prompts), (
            "questions differ in what follows the context"
        )
        token_ids, positions = prompts[0][:shared], list(range(shared))
        # The question and the choice that own each token; 0 is the trunk above them.
        question_of, choice_of = [0] * shared, [0] * shared
        reads: list[list[list[tuple[int, int]]]] = []
        for question, (prompt, (_, choices)) in enumerate(
            zip(prompts, questions, strict=True), start=1
        ):
            token_ids += prompt[shared:]
            positions += range(shared, len(prompt))
            question_of += [question] * (len(prompt) - shared)
            choice_of += [0] * (len(prompt) - shared)
            last = len(token_ids) - 1
            reads.append([])
            for choice, text in enumerate(choices, start=1):
                row, start = self.token_ids(text), len(token_ids)
                token_ids += row
                positions += range(len(prompt), len(prompt) + len(row))
                question_of += [question] * len(row)
                choice_of += [choice] * len(row)
                reads[-1].append(
                    list(zip([last, *range(start, len(token_ids) - 1)], row, strict=True))
                )
        owner, leaf = torch.tensor(question_of), torch.tensor(choice_of)
        seen = (owner == 0) | (owner == owner[:, None])
        seen &= (leaf == 0) | (leaf == leaf[:, None])
        mask = torch.zeros(seen.shape).masked_fill(~seen.tril(), torch.finfo(torch.float32).min)
        logits = self.model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask[None, None],
            use_cache=False,
        ).logits[0]
        # Only the rows that are read: a softmax over the vocabulary for each.
        return [
            [
                sum(torch.log_softmax(logits[i].float(), -1)[token].item() for i, token in pairs)
                for pairs in choices
            ]
            for choices in reads
        ]

    @torch.inference_mode()
    def reply(self, messages: Messages, max_new_tokens: int) -> str:
        """The greedy reply, without its end token."""
        prompt = torch.tensor([self.prompt_ids(messages)])
        output = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=self.tokenizer.eos_token_id,
        )
        return str(self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))

    def margins(self, item: Mapping[str, Any]) -> Margins:
        """Lead of the right choice over the best other one, for both values of the item's field."""
        return Margins(
            *(
                lead(
                    item,
                    which,
                    self.scores(
                        [*context, {"role": "user", "content": item["question"]}], item["choices"]
                    ),
                )
                for which, context in contexts(item)
            )
        )

    def margins_of_wordings(self, items: Sequence[Mapping[str, Any]]) -> list[Margins]:
        """`margins` of items that differ in their wording alone."""
        questions = [(item["question"], item["choices"]) for item in items]
        scores = {
            which: self.tree_scores(context, questions) for which, context in contexts(items[0])
        }
        return [
            Margins(*(lead(item, which, scores[which][index]) for which in ("old", "new")))
            for index, item in enumerate(items)
        ]


def num_shared(rows: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all rows have in common."""
    columns = enumerate(zip(*rows, strict=False))
    return next((index for index, column in columns if len(set(column)) > 1), min(map(len, rows)))


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{{field}}`; an unknown field is an error."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)


def contexts(item: Mapping[str, Any]) -> Iterator[tuple[str, Messages]]:
    """The messages before the question, with the old value and with the new one."""
    for which, values in (("old", item["fields"]), ("new", {**item["fields"], **item["edit"]})):
        yield (
            which,
            [
                {**message, "content": fill(message["content"], values)}
                for message in item["messages"]
            ],
        )


def lead(item: Mapping[str, Any], which: str, scores: Sequence[float]) -> float:
    """By how much the right choice leads the best other one."""
    named: dict[str, float] = dict(zip(item["choices"], scores, strict=True))
    right = named.pop(item["answers"][which])
    return right - max(named.values())
