"""Choose attribute items that a small model answers rightly for both values.

An attribute item states a fact early in a prompt (`country: France`), follows it with neutral text, and asks
for something that depends on the fact ("Which city is the capital?"). An edit of the fact can only be judged
on items that the model gets right under a clean prefill of either value, so this script keeps those alone.

How items are chosen, in this order:

1. Candidate pairs of values are listed for every relation, in a fixed order; even ones form the choosing half.
2. Every wording (a question and a form of the answer) is scored on the choosing half. Each relation gets the
   wording with the largest share of pairs right for both values (ties: the larger median of the smaller
   margin). A relation below `MIN_SHARE` is dropped.
3. With the wordings frozen, all candidates are scored; those right for both values by `MIN_MARGIN` nats are
   kept, in order, up to `MAX_ITEMS` a relation. The first twelve capitals with both margins of at least `SUITE_MARGIN` nats form
   the suite `capitals12`.

The model is run by plain transformers: the whole prompt is rendered by the chat template and prefilled, and a
choice is scored by the summed log-probability of its tokens after the generation prompt. Nothing of kvnotes
is imported, so the choice of items cannot depend on the library that is measured with them.

    python bench/select_attribute_items.py --model FOLDER                                  # write the items
    python bench/select_attribute_items.py --model FOLDER --check FILE                     # score frozen items
    python bench/select_attribute_items.py --model FOLDER --scenario examples/retail.yaml  # score its decisions
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

DEFAULT_OUTPUT = Path(__file__).parents[1] / "kvnotes" / "bench" / "items" / "attribute_dev.yaml"
MIN_SHARE = 0.6
MIN_MARGIN = 0.25
MAX_ITEMS = 16
SUITE = "capitals12"
SUITE_SIZE = 12
SUITE_MARGIN = 1.0

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Wording:
    """A question, and the form in which its answer is scored."""

    question: str
    answer_form: str


@dataclass(frozen=True, slots=True)
class Relation:
    """A field, the answer each of its values implies, and the wordings to try."""

    name: str
    field: str
    answers: Mapping[str, str]
    questions: Sequence[str]
    answer_forms: Sequence[str]

    def wordings(self) -> list[Wording]:
        """Every question with every form of the answer."""
        return [
            Wording(question, form) for question in self.questions for form in self.answer_forms
        ]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair of values of one relation, and the template that carries it."""

    relation: Relation
    old: str
    new: str
    template: str
    is_choosing: bool

    @property
    def item_id(self) -> str:
        """Readable and unique within the file."""
        return (
            "-".join([self.relation.name, self.old, self.new, self.template])
            .lower()
            .replace(" ", "_")
        )


@dataclass(frozen=True, slots=True)
class Margins:
    """By how many nats the right choice leads, for the old and for the new value."""

    old: float
    new: float

    @property
    def smaller(self) -> float:
        """The weaker of the two; above zero when the model is right for both values."""
        return min(self.old, self.new)


def relation(
    name: str, field: str, answers: str, questions: Sequence[str], answer_forms: Sequence[str]
) -> Relation:
    """Read `answers` from "value=answer, value=answer"."""
    pairs = dict(pair.strip().split("=") for pair in answers.split(","))
    return Relation(name, field, pairs, questions, answer_forms)


RELATIONS = (
    relation(
        "capital",
        "country",
        "France=Paris, Japan=Tokyo, Italy=Rome, Egypt=Cairo, Germany=Berlin, China=Beijing, Spain=Madrid, "
        "Russia=Moscow, Greece=Athens, Peru=Lima, Ireland=Dublin, Poland=Warsaw, Norway=Oslo, Portugal=Lisbon, "
        "Kenya=Nairobi, Austria=Vienna, Cuba=Havana, Sweden=Stockholm, Hungary=Budapest, South Korea=Seoul",
        (
            "What is the capital of the country?",
            "Which city is the capital of the country in the record?",
            "Name the capital city of the country in the record. Answer with one word.",
        ),
        ("{}", "The capital of the country is {}."),
    ),
    relation(
        "currency",
        "country",
        "Japan=yen, France=euro, India=rupee, Russia=ruble, Mexico=peso, China=yuan, Sweden=krona, Poland=zloty, "
        "Thailand=baht, Turkey=lira, Switzerland=franc, Brazil=real, Israel=shekel, Germany=euro",
        (
            "What is the currency of the country?",
            "Which money is used in the country in the record?",
            "Name the currency of the country in the record. Answer with one word.",
        ),
        ("{}", "The currency of the country is the {}."),
    ),
    relation(
        "language",
        "country",
        "France=French, Japan=Japanese, Germany=German, Italy=Italian, Russia=Russian, Greece=Greek, Spain=Spanish, "
        "China=Chinese, Portugal=Portuguese, Poland=Polish, Turkey=Turkish, Sweden=Swedish, Egypt=Arabic, "
        "Mexico=Spanish, Norway=Norwegian, Vietnam=Vietnamese",
        (
            "Which language is spoken in the country?",
            "In which language should we write to the customer?",
            "Name the main language of the country in the record. Answer with one word.",
        ),
        ("{}", "The language spoken in the country is {}."),
    ),
    relation(
        "country",
        "city",
        "Paris=France, Tokyo=Japan, Rome=Italy, Cairo=Egypt, Berlin=Germany, Beijing=China, Madrid=Spain, "
        "Moscow=Russia, Athens=Greece, Lima=Peru, Dublin=Ireland, Warsaw=Poland, Oslo=Norway, Lisbon=Portugal",
        (
            "In which country is the city?",
            "Which country does the city in the record belong to?",
            "Name the country of the city in the record. Answer with one word.",
        ),
        ("{}", "The city is in {}."),
    ),
    relation(
        "continent",
        "country",
        "France=Europe, Japan=Asia, Kenya=Africa, Germany=Europe, China=Asia, Egypt=Africa, Italy=Europe, "
        "India=Asia, Nigeria=Africa, Sweden=Europe, Vietnam=Asia, Ghana=Africa",
        (
            "On which continent is the country?",
            "Which continent does the country in the record belong to?",
            "Name the continent of the country in the record. Answer with one word.",
        ),
        ("{}", "The country is in {}."),
    ),
    relation(
        "class",
        "animal",
        "dog=mammal, eagle=bird, salmon=fish, ant=insect, snake=reptile, horse=mammal, owl=bird, shark=fish, "
        "bee=insect, lizard=reptile, whale=mammal, sparrow=bird, trout=fish, butterfly=insect, crocodile=reptile",
        (
            "Is the animal a mammal, a bird, a fish, an insect or a reptile?",
            "What kind of animal is it?",
            "To which class does the animal in the record belong? Answer with one word.",
        ),
        ("{}", "The animal is of the class: {}."),
    ),
    relation(
        "young",
        "animal",
        "dog=puppy, cat=kitten, cow=calf, sheep=lamb, horse=foal, duck=duckling, bear=cub, pig=piglet, goose=gosling",
        (
            "What is the young of the animal called?",
            "What do we call a baby of the animal in the record?",
            "Name the young of the animal in the record. Answer with one word.",
        ),
        ("{}", "The young is called a {}."),
    ),
    relation(
        "season",
        "month",
        "January=winter, July=summer, April=spring, October=autumn, December=winter, August=summer, May=spring, "
        "November=autumn, February=winter, June=summer, March=spring, September=autumn",
        (
            "In which season is the month?",
            "Which season of the year is it in the month in the record?",
            "Is the month in winter, spring, summer or autumn? Answer with one word.",
        ),
        ("{}", "The season is {}."),
    ),
    relation(
        "workplace",
        "job",
        "teacher=school, nurse=hospital, farmer=farm, chef=restaurant, judge=court, librarian=library, "
        "professor=university, priest=church, pharmacist=pharmacy, cashier=store, doctor=hospital, banker=bank",
        (
            "Where does a person with this job work?",
            "In which place does the person in the record work?",
            "Name the place of work that belongs to the job in the record. Answer with one word.",
        ),
        ("{}", "The person works at a {}."),
    ),
    relation(
        "color",
        "food",
        "banana=yellow, strawberry=red, cucumber=green, carrot=orange, blueberry=blue, eggplant=purple, "
        "lemon=yellow, tomato=red, spinach=green, milk=white, chocolate=brown, cherry=red, lettuce=green, salt=white",
        (
            "What is the color of the food?",
            "Which color does the food in the record have?",
            "Name the color of the food in the record. Answer with one word.",
        ),
        ("{}", "The color of the food is {}."),
    ),
)

# The text after the field is ours and says nothing about any relation.
TEMPLATES: Mapping[str, Messages] = {
    "desk": [
        {
            "role": "system",
            "content": (
                "You work at an information desk.\nRECORD\n{slot}\n\nNOTES\n"
                "The desk opens at nine and closes at five. Visitors take a number and wait until it is called. "
                "Keep each answer short, and speak clearly. A form that is not signed goes back to the visitor. "
                "Lost items are kept in the box under the counter for two weeks. The printer is slow after lunch, so "
                "print long papers early. Please leave the counter tidy for the next person.\n"
            ),
        },
    ],
    "handbook": [
        {
            "role": "system",
            "content": (
                "You answer questions about one record.\nRECORD\nfile: 7731\n{slot}\nchecked: yes\n\nHANDBOOK\n"
                "1. Every record has one owner. The owner reads it once a week and signs the page.\n"
                "2. A record is never thrown away. When it is no longer needed it moves to the long shelf.\n"
                "3. Corrections are written on a new line. The old line stays readable, so that anyone can see what "
                "has changed and who has changed it.\n"
                "4. Numbers are written in full, and words are not shortened.\n"
                "5. If a page is damaged, copy it by hand, compare both pages twice, and keep them together.\n"
                "6. Nobody takes a record home. Reading rooms are open until late, and the lamps may stay on.\n"
                "7. Questions are answered from the record. If the record is silent, say that you do not know.\n"
            ),
        },
    ],
    "briefing": [
        {"role": "system", "content": "You help a colleague with a record.\nRECORD\n{slot}\n"},
        {
            "role": "user",
            "content": (
                "Before we begin, here is how our meetings go. We meet in the small room beside the stairs. The first "
                "to arrive opens the window and puts the chairs in a circle. One of us takes minutes, and the task "
                "moves on by one seat each time. We start with the points left open at the last meeting. Each point "
                "gets ten minutes. When the time is over we decide, or we move the point to the next meeting. Papers "
                "that are longer than two pages are sent round on the day before, so that there is time to read "
                "them. Telephones stay outside. At the end we read the decisions aloud, and each of us says what to "
                "do next and by when. The minutes are posted on the board the next morning."
            ),
        },
        {
            "role": "assistant",
            "content": "Thank you. I have read the record and the notes about the meetings.",
        },
    ],
    "journal": [
        {
            "role": "system",
            "content": (
                "You keep the journal of a small workshop.\nRECORD\n{slot}\n\nJOURNAL\n"
                "First entry. The long bench was sanded and oiled. It needs two days to dry, and until then nothing "
                "may be put on it. The vice at the far end is loose again and was tightened with a washer.\n"
                "Second entry. A box of screws arrived, but half of them were too short. They were put back into the "
                "box, and a letter was written to the supplier. The drill bits were sorted by size, and the broken "
                "ones were taken out.\n"
                "Third entry. The roof over the door lets in water when the wind is strong. A sheet was nailed over "
                "the gap, which should hold until the ladder is back. The floor was swept twice.\n"
                "Fourth entry. The saw was sharpened. The first cut was clean, the second one was not, because the "
                "board had a knot. Wear the gloves, keep the guard down, and never reach across the blade. The dust "
                "bag is full after about forty cuts and should be emptied outside.\n"
                "Fifth entry. The supplier answered and will send the right screws within a week. The letter was put "
                "into the folder on the shelf. The lamp over the bench flickers, so a new one was written on the "
                "list, below the tape and the glue.\n"
                "Sixth entry. The bench is dry. The tools went back to their hooks, and the drawings were pinned to "
                "the wall. The next job starts when the wood has come.\n"
            ),
        },
    ],
}


def candidates(relation: Relation) -> list[Candidate]:
    """Pair each value with the next one and with the third after it, where the answers differ."""
    values = list(relation.answers)
    pairs = [
        (value, values[(index + step) % len(values)])
        for step in (1, 3)
        for index, value in enumerate(values)
    ]
    differing = [(old, new) for old, new in pairs if relation.answers[old] != relation.answers[new]]
    templates = list(TEMPLATES)
    # Half the index picks the template, so that both halves see every template.
    return [
        Candidate(relation, old, new, templates[index // 2 % len(templates)], index % 2 == 0)
        for index, (old, new) in enumerate(differing)
    ]


def item_of(candidate: Candidate, wording: Wording) -> dict[str, Any]:
    """The item as it stands in the file."""
    relation = candidate.relation
    slot = f"{relation.field}: {{{{{relation.field}}}}}"
    old, new = (
        wording.answer_form.format(relation.answers[value])
        for value in (candidate.old, candidate.new)
    )
    if wording.answer_form == "{}":
        old, new = old[0].upper() + old[1:], new[0].upper() + new[1:]
    return {
        "id": candidate.item_id,
        "relation": relation.name,
        "fields": {relation.field: candidate.old},
        "edit": {relation.field: candidate.new},
        "messages": [
            {"role": message["role"], "content": message["content"].replace("{slot}", slot)}
            for message in TEMPLATES[candidate.template]
        ],
        "question": wording.question,
        "choices": [old, new],
        "answers": {"old": old, "new": new},
    }


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{{field}}`; an unknown field is an error."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """A relation with the wording chosen for it, or none, and the share right for both values."""

    relation: Relation
    wording: Wording | None
    choosing_share: float


def choose_wording(model: CleanModel, relation: Relation) -> Verdict:
    """Score every wording on the choosing half and take the best."""
    half = [candidate for candidate in candidates(relation) if candidate.is_choosing]
    wordings = relation.wordings()
    measured = [
        model.margins_of_wordings([item_of(candidate, wording) for wording in wordings])
        for candidate in half
    ]
    best: tuple[float, float, Wording] | None = None
    for index, wording in enumerate(wordings):
        smaller = [margins[index].smaller for margins in measured]
        share = sum(margin > 0 for margin in smaller) / len(smaller)
        median = statistics.median(smaller)
        report(
            f"{relation.name}: {share:.2f} median {median:+.2f} | {wording.question} | {wording.answer_form}"
        )
        if best is None or (share, median) > best[:2]:
            best = (share, median, wording)
    assert best is not None, "every relation has a wording"
    share, _, wording = best
    return Verdict(relation, wording if share >= MIN_SHARE else None, share)


def select(model: CleanModel) -> tuple[list[dict[str, Any]], list[str]]:
    """Items to keep, and the lines that say how they were chosen."""
    items: list[dict[str, Any]] = []
    lines: list[str] = []
    for relation in RELATIONS:
        verdict = choose_wording(model, relation)
        if verdict.wording is None:
            lines.append(
                f"{relation.name}: dropped, best wording right for both on {verdict.choosing_share:.2f}"
            )
            continue
        scored = [
            (candidate, item_of(candidate, verdict.wording)) for candidate in candidates(relation)
        ]
        measured = [(candidate, item, model.margins(item)) for candidate, item in scored]
        right = [entry for entry in measured if entry[2].smaller > 0]
        clear = [entry for entry in right if entry[2].smaller >= MIN_MARGIN]
        kept = clear[:MAX_ITEMS]
        if relation.name == "capital":
            kept = mark_suite(clear)
        held_out = [
            margins.smaller > 0 for candidate, _, margins in measured if not candidate.is_choosing
        ]
        lines.append(
            f"{relation.name}: {len(right)} of {len(measured)} candidates right for both "
            f"(choosing half {verdict.choosing_share:.2f}, other half {sum(held_out) / len(held_out):.2f}), "
            f"{len(clear)} clearly; {len(kept)} kept, smallest margin "
            f"{min(margins.smaller for _, _, margins in kept):.2f} nats"
        )
        items += [item for _, item, _ in kept]
    return items, lines


Measured = tuple[Candidate, dict[str, Any], Margins]


def mark_suite(right: Sequence[Measured]) -> list[Measured]:
    """Mark the suite among the capitals, and keep it with the first others up to `MAX_ITEMS`."""
    clear = [entry for entry in right if entry[2].smaller >= SUITE_MARGIN][:SUITE_SIZE]
    if len(clear) < SUITE_SIZE:
        raise SystemExit(
            f"only {len(clear)} capitals have margins of {SUITE_MARGIN} nats; hint: add candidates"
        )
    suite = {entry[1]["id"] for entry in clear}
    for _, item, _ in clear:
        rest = {key: item.pop(key) for key in list(item) if key not in ("id", "relation")}
        item.update(suite=SUITE, **rest)
    others = [entry for entry in right if entry[1]["id"] not in suite][: MAX_ITEMS - SUITE_SIZE]
    return [entry for entry in right if entry in clear or entry in others]


class _Dumper(yaml.SafeDumper):
    """Long text as literal blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def write_items(path: Path, items: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> None:
    """Write the frozen file: how it came about, then the items."""
    header = [
        "Attribute items for development. Frozen: written by bench/select_attribute_items.py, not by hand.",
        "Each is right under a clean prefill for BOTH values, on SmolLM2-135M-Instruct in float32. Wordings were",
        "chosen on half of the candidate pairs (the even ones), by the share right for both values; then frozen.",
        "Both halves use the same values in other pairs, so the other half is no test of unseen values.",
        f"A relation whose best wording is below {MIN_SHARE} was dropped. Kept: the first {MAX_ITEMS} of a relation with",
        f"both margins of at least {MIN_MARGIN} nats, so that rounding does not change which answer is right.",
        f"Suite {SUITE}: the first {SUITE_SIZE} capitals with both margins of at least {SUITE_MARGIN} nats.",
        "Command: python bench/select_attribute_items.py --model FOLDER",
        *lines,
    ]
    body = yaml.dump(
        {"version": 1, "items": list(items)}, Dumper=_Dumper, sort_keys=False, width=120
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"# {line}\n" for line in header) + body, encoding="utf-8")


def check_items(model: CleanModel, path: Path) -> int:
    """Print the margins of every frozen item; return how many are wrong for a value."""
    wrong = 0
    for item in yaml.safe_load(path.read_text(encoding="utf-8"))["items"]:
        margins = model.margins(item)
        wrong += margins.smaller <= 0
        print(f"{item['id']}\t{margins.old:+.2f}\t{margins.new:+.2f}")
    return wrong


def decisions(model: CleanModel, path: Path) -> Iterator[str]:
    """Play a scenario by clean prefills and score each decision for every value its fields take.

    A decided question stays in the history until it is deleted, its choices never enter it. Replies are the
    greedy ones under the values that hold at that turn. A preamble is not part of the prompt.
    """
    scenario = yaml.safe_load(path.read_text(encoding="utf-8"))
    values = {field: str(value) for field, value in scenario["fields"].items()}
    taken = {field: [value] for field, value in values.items()}
    for turn in scenario["turns"]:
        for field, value in turn.get("edit", {}).items():
            taken[field] += [value] if value not in taken[field] else []
    history = [dict(message) for message in scenario["messages"]]

    def render(current: Mapping[str, str]) -> Messages:
        contents = (
            fill(segment_text(scenario["segments"][message["segment"]], path.parent), current)
            if "segment" in message
            else fill(message["content"], current)
            for message in history
        )
        return [
            {"role": m["role"], "content": content}
            for m, content in zip(history, contents, strict=True)
        ]

    for number, turn in enumerate(scenario["turns"], start=1):
        values |= {field: str(value) for field, value in turn.get("edit", {}).items()}
        history = [
            message
            for message in history
            if "delete" not in turn or message.get("id") != turn["delete"]
        ]
        history += [
            {"role": role, "content": turn[role], "id": turn.get("id")}
            for role in ("user", "tool")
            if role in turn
        ]
        if "decide" in turn:
            for field, options in taken.items():
                for value in options if len(options) > 1 else ():
                    scores = model.scores(render({**values, field: value}), turn["decide"])
                    ranked = sorted(zip(scores, turn["decide"], strict=True), reverse=True)
                    ahead = ranked[0][0] - ranked[1][0]
                    yield f"turn {number}: {field}={value}: {ranked[0][1]} leads by {ahead:.2f} nats"
        if "generate" in turn:
            text = model.reply(render(values), turn["generate"]["max_new_tokens"])
            history.append({"role": "assistant", "content": text})
            yield f"turn {number}: reply: {text!r}"
    yield f"{len(model.prompt_ids(render(values)))} tokens at the end"


def segment_text(segment: str | Mapping[str, Any], folder: Path) -> str:
    """The text of a segment, given in the scenario or in a file beside it."""
    if isinstance(segment, str):
        return (folder / segment).read_text(encoding="utf-8")
    if "text" in segment:
        return str(segment["text"])
    return (folder / str(segment["file"])).read_text(encoding="utf-8")


def report(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="model folder, for AutoModelForCausalLM"
    )
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="score the items of this file instead"
    )
    parser.add_argument(
        "--scenario", type=Path, metavar="FILE", help="score the decisions of a scenario instead"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = CleanModel(arguments.model)
    if arguments.scenario:
        for line in decisions(model, arguments.scenario):
            print(line)
        return 0
    if arguments.check:
        return 1 if check_items(model, arguments.check) else 0
    items, lines = select(model)
    write_items(arguments.output, items, lines)
    report(f"{len(items)} items in {arguments.output}\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
