"""Arithmetic word problems, from templates whose numbers come out whole."""

from __future__ import annotations

from random import Random

from drafter.training import banks

_PROBLEMS = (
    "{name} has {a} {goods}. {other} gives {name} {b} more, and then {name} loses {c}. How many {goods} does {name} have now?",
    "A {shop} sells {goods} for ${p} each. If {name} buys {n} of them and pays with a ${bill} bill, how much change does {name} get?",
    "{name} packs {goods} into {containers}. Each holds {n}. How many {containers} are needed for {an} {goods}?",
    "There are {a} {goods} in the first box and {b} in the second. {name} moves {c} from the first box to the second. "
    "How many {goods} are in each box now?",
    "{name} reads {n} pages every day for {m} days. The book has {big} pages. How many pages are left?",
    "A train travels {speed} kilometres per hour for {n} hours, then {speed2} kilometres per hour for {m} hours. "
    "How far does it travel in total?",
    "{name} earns ${p} an hour and works {n} hours on {weekday} and {m} hours on {weekday2}. How much does {name} earn in total?",
    "A farmer has {n} fields with {m} rows of plants in each. Every row has {k} plants. How many plants are there altogether?",
    "{name} and {other} share {even} {goods} equally. {name} gives {k} of them to a friend. How many does {name} have left?",
    "A {shop} had {big} {goods} on {weekday} morning. It sold {a} before noon and {b} after noon. How many {goods} were left?",
    "{name} saves ${a} every week. After {n} weeks {name} spends ${k} on a present. How much money is left?",
    "A recipe needs {n} cups of flour for {m} cakes. How many cups of flour does {name} need for {m2} cakes?",
    "{name} is {age} years old. {other} is {k} years older. How old will {other} be in {n} years?",
    "A bus starts with {a} passengers. At the first stop {k} get off and {n} get on. At the second stop {m} get off. "
    "How many passengers are on the bus?",
    "{name} buys {n} {goods} at ${p} each and {m} {goods2} at ${q} each. How much does {name} pay in total?",
    "A water tank holds {big} litres. It loses {k} litres every hour. How many litres are left after {n} hours?",
    "{name} wants to collect {big} {goods}. So far there are {a}, and {name} finds {k} more every day. "
    "How many {goods} will {name} have after {n} days?",
    "A class of {even} students is divided into groups of {two}. Each group gets {k} {goods}. How many {goods} are needed?",
    "{name} walks {k} kilometres to work and the same way back, {n} days a week. How many kilometres does {name} walk in {m} weeks?",
    "There are {n} shelves in a {shop}. Each shelf holds {k} {goods}. If {m} {goods} are broken, how many are fine?",
    "{name} made {an} {goods} and put them into {n} equal {containers}. How many {goods} are in each?",
    "A ticket costs ${p} for adults and ${q} for children. How much do {n} adults and {m} children pay together?",
    "{name} has twice as many {goods} as {other}. {other} has {k} {goods}. How many do they have together?",
    "{name} has {k} times as many {goods} as {other}, who has {n}. If {name} gives away {m}, how many does {name} have left?",
    "A machine makes {k} {goods} in one minute. How many does it make in {n} minutes, and how many in an hour?",
    "In {month} the {shop} sold {a} {goods}. In the next month it sold {b} more than that. How many {goods} did it sell in both months?",
    "{name} runs {k} laps a day. Each lap is {hundreds} metres. How many metres does {name} run in {n} days?",
    "A rectangular garden is {k} metres long and {n} metres wide. What is its area, and how long is the fence around it?",
    "{name} had ${big}. {name} bought a {product} for ${a} and {n} {goods} for ${p} each. How much money does {name} have now?",
    "{name} starts a trip at {hour} o'clock and drives for {n} hours, then rests for {m} hours. At what time does the rest end?",
    "Half of the {even} {goods} in the {shop} are red and {k} are blue. The others are yellow. How many are yellow?",
    "{name} pours {even} litres of juice into bottles of {two} litres. {name} sells each bottle for ${p}. How much money does {name} get?",
)

_ASKS = (
    "",
    "",
    "",
    " Show your work.",
    " Explain step by step.",
    " Please solve this step by step.",
    " Give the final answer at the end.",
)


def word_problem(rng: Random) -> str:
    """One word problem."""
    name, other = rng.sample(banks.FIRST_NAMES, 2)
    goods, goods2 = rng.sample(banks.GOODS, 2)
    weekday, weekday2 = rng.sample(banks.WEEKDAYS, 2)
    n, m = rng.randint(2, 9), rng.randint(2, 9)
    k, c = rng.randint(3, 15), rng.randint(2, 12)
    p, q = rng.randint(2, 12), rng.randint(2, 12)
    text = rng.choice(_PROBLEMS).format(
        name=name,
        other=other,
        goods=goods,
        goods2=goods2,
        weekday=weekday,
        weekday2=weekday2,
        containers=rng.choice(banks.CONTAINERS),
        shop=rng.choice(banks.SHOPS),
        product=rng.choice(banks.PRODUCTS),
        month=rng.choice(banks.MONTHS),
        a=rng.randint(20, 90),
        b=rng.randint(13, 60),
        big=rng.randint(200, 400),
        bill=rng.choice((120, 150, 200)),
        speed=rng.randint(4, 12) * 10,
        speed2=rng.randint(4, 12) * 10,
        even=2 * rng.randint(16, 40),
        an=n * rng.randint(4, 15),
        age=rng.randint(7, 40),
        hundreds=100 * rng.randint(2, 9),
        hour=rng.randint(6, 11),
        two=2,
        m2=2 * m,
        n=n,
        m=m,
        k=k,
        c=c,
        p=p,
        q=q,
    )
    return text + rng.choice(_ASKS)
