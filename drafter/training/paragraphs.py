"""Pasted paragraphs with a request to work on them.

A paragraph is written by one of the genres below: a few sentences around the same made-up people, place and
figures, so that an answer can only come from the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from drafter.training import banks

_COPYING = (
    "Repeat the following text exactly:",
    "Copy this paragraph word for word:",
    "Quote the text below in full:",
    "Please write out the following paragraph again without changes:",
    "Return the following text as it is:",
)

_WORKING = (
    "Summarize the following paragraph in one sentence:",
    "Summarize this text:",
    "Rewrite the following paragraph in simpler words:",
    "Correct the spelling and grammar of this text:",
    "Proofread the following paragraph and return the corrected version:",
    "List the key facts from this paragraph:",
    "Make this paragraph more formal:",
    "Make this paragraph shorter:",
    "Rewrite this text in a friendly tone:",
    "Turn the following paragraph into bullet points:",
    "Which people and places are named in this text?",
    "What is the main idea of this paragraph?",
    "Improve the following paragraph:",
    "Paraphrase this paragraph:",
    "Give this paragraph a title and repeat the text below it:",
    "Rewrite the paragraph in the past tense:",
    "Explain what this text says:",
    "Extract all numbers from the following text and say what they mean:",
    "Edit this for clarity:",
    "Write a short headline for this text, then quote its first sentence:",
)

_AFTER = (
    "Summarize the text above.",
    "Rewrite the paragraph above in simpler words.",
    "Repeat the paragraph above.",
    "Correct any mistakes in the paragraph above.",
    "What does the text above say? Answer with a quote.",
    "List the main points of the paragraph above.",
    "Please improve the paragraph above.",
)


def paragraph(rng: Random) -> str:
    """A request and a pasted paragraph of three to seven sentences."""
    text = passage(rng, rng.randint(3, 5))
    return _ask(rng, text)


def long_paragraph(rng: Random) -> str:
    """The same with one to three longer paragraphs; for training, the shipped set has short ones."""
    texts = [passage(rng, rng.randint(4, 8)) for _ in range(rng.randint(1, 3))]
    return _ask(rng, "\n\n".join(texts))


def _ask(rng: Random, text: str) -> str:
    kind = rng.random()
    if kind < 0.2:
        return f"{text}\n\n{rng.choice(_AFTER)}"
    request = rng.choice(_COPYING if kind < 0.35 else _WORKING)
    return f"{request}\n\n{text}" if rng.random() < 0.8 else f'{request} "{text}"'


def passage(rng: Random, num_sentences: int) -> str:
    """Sentences of one genre, in their natural order; the first is always there."""
    first, *rest = rng.choice(_GENRES)(rng)
    chosen = sorted(rng.sample(range(len(rest)), min(num_sentences - 1, len(rest))))
    return " ".join([first, *(rest[i] for i in chosen)])


def _person(rng: Random) -> str:
    return f"{rng.choice(banks.FIRST_NAMES)} {rng.choice(banks.LAST_NAMES)}"


def _news(rng: Random) -> list[str]:
    place, month, weekday = rng.choice(banks.PLACES), rng.choice(banks.MONTHS), rng.choice(banks.WEEKDAYS)
    team, person, other = rng.choice(banks.TEAMS), _person(rng), _person(rng)
    cost, count = rng.randint(2, 90) * 10, rng.randint(12, 900)
    return [
        f"{team[:1].upper()}{team[1:]} in {place} will close for {rng.randint(2, 9)} weeks in {month} while its roof is repaired.",
        f"The work costs about {cost},000 euros and is paid for by the city and {count} private donors.",
        f"{person}, who has managed the place since {rng.randint(1988, 2019)}, said the old roof had leaked every winter.",
        f"Staff will move to a {rng.choice(banks.ADJECTIVES)} building near the station until the work is done.",
        f'"We looked for a cheaper way and did not find one," {person.split()[0]} told reporters on {weekday}.',
        f"{other}, a {rng.choice(banks.JOBS)} who lives next door, expects noise but is glad that something happens at last.",
        f"Visitors can leave their comments at the town hall before {rng.randint(2, 28)} {month}.",
        f"A party with music and {rng.choice(banks.DISHES)} is planned for the day the doors open again.",
    ]


def _email(rng: Random) -> list[str]:
    sender, receiver = rng.choice(banks.FIRST_NAMES), rng.choice(banks.FIRST_NAMES)
    weekday, other_day = rng.sample(banks.WEEKDAYS, 2)
    goods, product = rng.choice(banks.GOODS), rng.choice(banks.PRODUCTS)
    return [
        f"Hi {receiver}, thank you for sending the {goods} so quickly.",
        f"We counted them on {weekday} and found {rng.randint(20, 300)} instead of {rng.randint(301, 400)}.",
        f"The {product} that we ordered on {rng.randint(1, 28)} {rng.choice(banks.MONTHS)} has not arrived yet.",
        f"Could you check with the warehouse in {rng.choice(banks.PLACES)} and call me before {other_day}?",
        f"Our customers have been asking about it, and {_person(rng)} from the {rng.choice(banks.SHOPS)} is getting impatient.",
        f"If the delay is longer than {rng.randint(2, 9)} days, we would like to cancel that part of the order.",
        f"The invoice number is {rng.randint(10000, 99999)} and the total was ${rng.randint(80, 900)}.",
        f"Best wishes, {sender}.",
    ]


def _science(rng: Random) -> list[str]:
    place, person = rng.choice(banks.PLACES), _person(rng)
    animals, years = rng.choice(banks.ANIMALS), rng.randint(3, 18)
    share = rng.randint(11, 78)
    return [
        f"Researchers from {place} have followed a group of {animals} for {years} years.",
        f"They found that {share} percent of the animals came back to the same place every {rng.choice(banks.MONTHS)}.",
        f"The team, led by {person}, marked {rng.randint(40, 600)} animals with small tags that weigh {rng.randint(2, 30)} grams.",
        "Each tag sends its position once a day, so the scientists could draw a map of every journey.",
        f"The longest journey measured {rng.randint(120, 4000)} kilometres and took {rng.randint(9, 80)} days.",
        f"Warm years brought the {animals} back about {rng.randint(4, 20)} days earlier than cold ones.",
        f"{person.split()[0]} warns that new roads near {rng.choice(banks.PLACES)} could cut the route in two.",
        f"The study will go on until {rng.randint(2027, 2035)} if the money can be found.",
    ]


def _recipe(rng: Random) -> list[str]:
    dish = rng.choice(banks.DISHES)
    items = rng.sample(banks.INGREDIENTS, 4)
    return [
        f"For the {dish} you need {items[0]}, {items[1]} and {items[2]}.",
        f"Heat the oven to {rng.randint(16, 23) * 10} degrees and leave a heavy pot on a {rng.choice(('low', 'medium', 'high'))} flame.",
        f"Cook {items[0]} slowly for {rng.randint(5, 20)} minutes, then add {items[1]} and stir well.",
        f"After another {rng.randint(4, 15)} minutes, add {items[3]} and turn the heat down.",
        "Do not cover the pot completely, because the steam has to get out.",
        f"Let everything rest for {rng.randint(5, 30)} minutes before you serve it to {rng.randint(2, 8)} people.",
        f"My aunt {rng.choice(banks.FIRST_NAMES)} from {rng.choice(banks.PLACES)} always added a little sugar at the end.",
        "What is left tastes even better on the next day.",
    ]


def _biography(rng: Random) -> list[str]:
    person, place, job = _person(rng), rng.choice(banks.PLACES), rng.choice(banks.JOBS)
    born = rng.randint(1860, 1975)
    first = person.split()[0]
    return [
        f"{person} was born in {place} in {born}, the youngest of {rng.randint(2, 7)} children.",
        f"Both parents worked in {rng.choice(banks.TEAMS)}, and {first} spent the afternoons among {rng.choice(banks.GOODS)}.",
        f"At the age of {rng.randint(15, 24)}, {first} moved to {rng.choice(banks.PLACES)} to become a {job}.",
        f"The first years were hard, and for {rng.randint(2, 9)} months there was no work at all.",
        f"In {born + rng.randint(26, 40)} {first} opened a {rng.choice(banks.SHOPS)} together with {_person(rng)}.",
        f"Friends describe {first} as a {rng.choice(banks.ADJECTIVES)} person who loved {rng.choice(banks.ARTS)} and long walks.",
        f"A street in {place} has carried the family's name since {born + rng.randint(60, 80)}.",
        f"The letters that {first} wrote to {rng.choice(banks.FIRST_NAMES)} are kept in {rng.choice(banks.TEAMS)}.",
    ]


def _minutes(rng: Random) -> list[str]:
    people = rng.sample(banks.FIRST_NAMES, 4)
    weekday, later = rng.sample(banks.WEEKDAYS, 2)
    return [
        f"The meeting on {weekday} started at {rng.randint(8, 11)}:{rng.choice(('00', '15', '30'))} with {people[0]}, {people[1]} and {people[2]}.",
        f"{people[0]} reported that the new {rng.choice(banks.PRODUCTS)} is {rng.randint(2, 9)} weeks late.",
        f"{people[1]} asked for {rng.randint(2, 30)} more {rng.choice(banks.GOODS)} and a better budget.",
        f"It was decided to spend no more than ${rng.randint(3, 90)}00 before {rng.choice(banks.MONTHS)}.",
        f"{people[2]} will write to the supplier in {rng.choice(banks.PLACES)} and ask for a new date.",
        f"{people[3]} could not come and sent a note about the {rng.choice(banks.ADJECTIVES)} office.",
        f"Nobody objected to moving the next meeting to {later}.",
        f"The plan for {rng.choice(banks.EVERYDAY)} was put off until everyone has read it.",
    ]


def _product(rng: Random) -> list[str]:
    product, place = rng.choice(banks.PRODUCTS), rng.choice(banks.PLACES)
    return [
        f"I bought this {product} {rng.randint(2, 11)} months ago in a {rng.choice(banks.SHOPS)} in {place}.",
        f"It cost ${rng.randint(12, 240)}, which seemed a lot for something so {rng.choice(banks.ADJECTIVES)}.",
        f"For the first {rng.randint(2, 9)} weeks everything worked, and I used it every {rng.choice(banks.WEEKDAYS)}.",
        "Then one of the screws came loose and a part of the cover broke off.",
        f"I wrote to the company, and {rng.choice(banks.FIRST_NAMES)} from the support team answered within {rng.randint(2, 48)} hours.",
        "They sent a new part without asking for money, and it took me ten minutes to put it in.",
        f"My brother, who is a {rng.choice(banks.JOBS)}, has the same model and never had any trouble.",
        f"All in all I would give it {rng.randint(2, 5)} stars out of 5.",
    ]


def _travel(rng: Random) -> list[str]:
    place, other = rng.sample(banks.PLACES, 2)
    return [
        f"We reached {place} by train on a {rng.choice(banks.ADJECTIVES)} {rng.choice(banks.WEEKDAYS)} in {rng.choice(banks.MONTHS)}.",
        f"The hotel was {rng.randint(2, 25)} minutes from the harbour and had only {rng.randint(5, 40)} rooms.",
        f"On the first evening we ate {rng.choice(banks.DISHES)} in a small place that {rng.choice(banks.FIRST_NAMES)} had told us about.",
        f"The museum of {rng.choice(banks.ARTS)} was closed, so we walked along the river for {rng.randint(2, 6)} hours.",
        f"A {rng.choice(banks.JOBS)} on the bridge sold {rng.choice(banks.GOODS)} for {rng.randint(2, 15)} euros each.",
        f"The bus to {other} leaves every {rng.randint(15, 90)} minutes and is nearly always full.",
        "It rained on every day but one, and still nobody wanted to go home.",
        f"Next year we want to come back and stay for {rng.randint(5, 20)} days.",
    ]


def _notice(rng: Random) -> list[str]:
    weekday, later = rng.sample(banks.WEEKDAYS, 2)
    return [
        f"Dear residents, the water will be turned off on {weekday} from {rng.randint(7, 11)} a.m. to {rng.randint(1, 5)} p.m.",
        f"Workers have to replace {rng.randint(20, 300)} metres of pipe under {rng.choice(banks.LAST_NAMES)} Street.",
        "Please fill a few bottles in advance and do not use the washing machine.",
        f"Cars must not be parked in front of the {rng.choice(banks.SHOPS)} before {later}.",
        f"If the weather is bad, the work will be moved by {rng.randint(2, 6)} days.",
        f"Drinking water is handed out at {rng.choice(banks.TEAMS)} free of charge.",
        f"For questions call {_person(rng)} at {rng.randint(200, 999)}-{rng.randint(1000, 9999)}.",
        "We apologise for the trouble and thank you for your patience.",
    ]


_GENRES: tuple[Callable[[Random], list[str]], ...] = (
    _news,
    _email,
    _science,
    _recipe,
    _biography,
    _minutes,
    _product,
    _travel,
    _notice,
)
