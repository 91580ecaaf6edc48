"""Questions and short requests, from templates."""

from __future__ import annotations

from random import Random

from drafter.training import banks

_ABOUT = {
    "science": banks.SCIENCE,
    "technology": banks.TECHNOLOGY,
    "history": banks.HISTORY,
    "everyday": banks.EVERYDAY,
    "arts": banks.ARTS,
    "animals": banks.ANIMALS,
    "countries": banks.COUNTRIES,
}

_QUESTIONS: dict[str, tuple[str, ...]] = {
    "science": (
        "What is {x}?",
        "How does {x} work?",
        "Can you explain {x} in simple terms?",
        "Why is {x} important?",
        "What are three interesting facts about {x}?",
        "Who first studied {x}, and when?",
        "What would happen without {x}?",
        "How do scientists measure {x}?",
        "What are common misconceptions about {x}?",
        "What is the difference between {x} and {y}?",
        "How is {x} related to {y}?",
        "Give me a one-paragraph explanation of {x}.",
        "What is an everyday example of {x}?",
        "Explain {x} to {audience}.",
    ),
    "technology": (
        "What is {x}?",
        "How does {x} work?",
        "What are the main parts of {x}?",
        "What are the advantages and disadvantages of {x}?",
        "When would you use {x}?",
        "Who invented {x}?",
        "Explain {x} to {audience}.",
        "Is {x} still useful today?",
        "What should I know before using {x}?",
        "How has {x} changed over the years?",
        "What is the difference between {x} and {y}?",
    ),
    "history": (
        "What was {x}?",
        "Why did {x} matter?",
        "When did {x} begin?",
        "What were the main causes of {x}?",
        "What were the consequences of {x}?",
        "Tell me about {x}.",
        "Who were important people in {x}?",
        "How did {x} change daily life?",
        "Give me a short timeline of {x}.",
        "What can we learn from {x}?",
    ),
    "everyday": (
        "What are some tips for {x}?",
        "How do I get started with {x}?",
        "What are five mistakes to avoid when {x}?",
        "What do I need for {x}?",
        "How long does it take to get good at {x}?",
        "Give me a checklist for {x}.",
        "What is the best way of {x}?",
        "Can you write a step-by-step guide for {x}?",
        "Why do people struggle with {x}?",
        "How can I make {x} easier?",
    ),
    "arts": (
        "What makes {x} different from {y}?",
        "What is the history of {x}?",
        "How can I learn to appreciate {x}?",
        "Who are famous names in {x}?",
        "What are the basic elements of {x}?",
        "Why do people love {x}?",
        "How did {x} develop over time?",
        "Recommend a way to begin with {x}.",
    ),
    "animals": (
        "What do {x} eat?",
        "Where do {x} live?",
        "How do {x} communicate?",
        "How long do {x} live?",
        "What are the natural enemies of {x}?",
        "How do {x} raise their young?",
        "Why are {x} important for nature?",
        "What is unusual about {x}?",
        "How are {x} different from {y}?",
        "Do {x} sleep?",
    ),
    "countries": (
        "What is the capital of {x}?",
        "What is the weather like in {x} in {month}?",
        "What languages do people speak in {x}?",
        "What foods is {x} known for?",
        "What should a visitor see in {x}?",
        "What is the history of {x} in a few sentences?",
        "Which countries border {x}?",
        "What is the population of {x}?",
        "What are the main industries of {x}?",
        "Plan a {n}-day trip through {x}.",
        "How is life in {x} different from life in {y}?",
    ),
}

_OTHER = (
    "What does a {job} do all day?",
    "How do I become a {job}?",
    "What skills does a good {job} need?",
    "Write a short story about a {job} and a {adjective} dog.",
    "Write a poem about a {adjective} morning in {place}.",
    "Write a thank-you note from a {job} to a neighbour.",
    "Give me {n} ideas for a birthday present for a {job}.",
    "What is the synonym of the word {adjective}?",
    "Use the word {adjective} in {n} sentences.",
    "How do I make {dish}?",
    "What can I cook with {ingredient} and {ingredient2}?",
    "What is a good side dish for {dish}?",
    "Suggest a name for a {shop} in {place}.",
    "Write an advertisement for a {product}.",
    "How do I take care of a {product}?",
    "What should I ask before buying a {product}?",
    "Describe {place} in {n} sentences.",
    "Write a dialogue between a {job} and a {job2}.",
    "What is {a} plus {b}?",
    "What is {a} times {n}?",
    "Is {a} a prime number?",
    "How many minutes are there in {n} hours?",
    "Convert {a} kilometres to miles.",
    "What is {n}0 percent of {b}?",
    "List {n} words that rhyme with {adjective}.",
    "Write a tweet about {everyday}.",
    "Write an email asking a {job} for advice about {everyday}.",
    "What are the steps of {everyday}?",
    "Write a Python function that counts the {goods} in a list.",
    "Write a Python program that adds {a} and {b}.",
    "Make a list of {n} {goods} brands for a game.",
    "Tell me a joke about {animals}.",
    "What should I pack for a week in {place} in {month}?",
)


def question(rng: Random) -> str:
    """One question or short request."""
    if rng.random() < 0.3:
        return rng.choice(_OTHER).format(**_values(rng))
    kind = rng.choice(tuple(_QUESTIONS))
    x, y = rng.sample(_ABOUT[kind], 2)
    return rng.choice(_QUESTIONS[kind]).format(x=x, y=y, **_values(rng))


def _values(rng: Random) -> dict[str, str]:
    job, job2 = rng.sample(banks.JOBS, 2)
    ingredient, ingredient2 = rng.sample(banks.INGREDIENTS, 2)
    return {
        "audience": rng.choice(banks.AUDIENCES),
        "month": rng.choice(banks.MONTHS),
        "n": str(rng.randint(2, 9)),
        "job": job,
        "job2": job2,
        "adjective": rng.choice(banks.ADJECTIVES),
        "place": rng.choice(banks.PLACES),
        "dish": rng.choice(banks.DISHES),
        "ingredient": ingredient,
        "ingredient2": ingredient2,
        "shop": rng.choice(banks.SHOPS),
        "product": rng.choice(banks.PRODUCTS),
        "a": str(rng.randint(11, 480)),
        "b": str(rng.randint(11, 480)),
        "everyday": rng.choice(banks.EVERYDAY),
        "goods": rng.choice(banks.GOODS),
        "animals": rng.choice(banks.ANIMALS),
    }
