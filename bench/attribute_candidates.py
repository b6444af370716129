"""Candidates for attribute items: relations with their answers, wordings and templates.

Owns data alone; `select_attribute_items.py` scores them and freezes those that a model
answers rightly for both values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
