"""Words that the prompt generators draw from, all written for this project."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


FIRST_NAMES = _split(
    "Maya; Omar; Lena; Jonas; Priya; Diego; Hana; Felix; Aisha; Tomas; Ruth; Kofi; Ingrid; Wei; Carla; Samir; Nadia; Oscar; "
    "Elif; Marcus; Yuki; Beatriz; Anton; Grace; Ravi; Sofia; Peter; Amina; Lucas; Freya; Daniel; Chloe; Ibrahim; Nora; Viktor; "
    "Leila; Hugo; Mei; Patrick; Zara; Emil; Fatima; Ben; Clara; Mateo; Agnes; Kwame; Julia; Tariq; Iris; Simon; Olga; Pablo; "
    "Miriam; Noah; Sana; Erik; Paula; Dmitri; Lucy; Andre; Keiko; Martin; Rosa; Arjun; Helen; Jamal; Tessa; Bruno; Linh"
)

LAST_NAMES = _split(
    "Okafor; Lindqvist; Moreau; Tanaka; Alvarez; Novak; Haddad; Brennan; Kowalski; Mehta; Fischer; Duarte; Osei; Larsen; Rossi; "
    "Petrov; Chandra; Webb; Ferreira; Nakamura; Hoffmann; Iyer; Campbell; Sato; Mbeki; Jansen; Ortega; Kim; Ivanova; Bauer; "
    "Demir; Whitfield; Costa; Nilsen; Rahman; Varga; Quinn; Castellano; Abebe; Marsh"
)

PLACES = _split(
    "Lisbon; Nairobi; Oslo; Kyoto; Toronto; Lima; Cairo; Dublin; Hanoi; Prague; Accra; Seville; Tallinn; Denver; Montevideo; "
    "Bergen; Jaipur; Krakow; Melbourne; Quito; Antwerp; Porto; Tbilisi; Halifax; Busan; Valencia; Leeds; Ghent; Cusco; Malmo; "
    "Riga; Oaxaca; Hobart; Izmir; Lyon; Salzburg; Portland; Kigali; Bologna; Dunedin"
)

COUNTRIES = _split(
    "Portugal; Kenya; Norway; Japan; Canada; Peru; Egypt; Ireland; Vietnam; the Czech Republic; Ghana; Spain; Estonia; Mexico; "
    "Uruguay; India; Poland; Australia; Ecuador; Belgium; Georgia; South Korea; Morocco; Latvia; Turkey; France; Austria; "
    "Rwanda; Italy; New Zealand; Chile; Finland; Greece; Thailand; Nigeria; Switzerland; Argentina; Denmark; Indonesia; Hungary"
)

SCIENCE = _split(
    "photosynthesis; gravity; plate tectonics; evaporation; the water cycle; DNA; magnetism; black holes; the immune system; "
    "natural selection; sound waves; the greenhouse effect; static electricity; osmosis; volcanoes; tides; rainbows; lightning; "
    "the nervous system; fermentation; friction; the solar system; radioactivity; vaccines; antibiotics; the carbon cycle; "
    "earthquakes; cell division; the periodic table; nuclear fusion; comets; the ozone layer; photons; enzymes; buoyancy; "
    "the food chain; glaciers; hurricanes; chemical bonds; hibernation; pollination; the moon's phases; digestion; inertia; "
    "the human heart; mitochondria; sleep; bacteria; erosion; refraction; dark matter; supernovas; blood types; coral reefs; "
    "migration of birds; fossils; acids and bases; semiconductors; superconductivity; entropy; the Doppler effect; symbiosis"
)

TECHNOLOGY = _split(
    "machine learning; the internet; a compiler; a database index; public-key encryption; cloud computing; a web browser; "
    "an operating system; a solar panel; a wind turbine; a lithium battery; GPS; a neural network; a search engine; recursion; "
    "a linked list; version control; a hash table; an electric motor; a refrigerator; a microwave oven; fibre optics; Wi-Fi; "
    "a touch screen; a blockchain; a firewall; a 3D printer; a jet engine; a heat pump; a telescope; a microscope; an elevator; "
    "a bicycle gear; a digital camera; noise-cancelling headphones; an API; open-source software; a spreadsheet; a password "
    "manager; binary search; sorting algorithms; a virtual machine; a load balancer; unit testing; a barcode; a hearing aid"
)

HISTORY = _split(
    "the Roman Empire; the Industrial Revolution; the Silk Road; the Renaissance; the printing press; the French Revolution; "
    "the Viking Age; ancient Egypt; the Black Death; the Age of Exploration; the Ottoman Empire; the Great Depression; "
    "the Cold War; the Meiji Restoration; the Inca Empire; the Magna Carta; the Enlightenment; the Suez Canal; the Space Race; "
    "the Berlin Wall; the Mali Empire; the Great Fire of London; the Han dynasty; the Hanseatic League; ancient Greece; "
    "the invention of writing; the Mughal Empire; the Crusades; women's suffrage; the civil rights movement; the Gold Rush; "
    "the Library of Alexandria; the Aztec civilization; the Marshall Plan; the Byzantine Empire; the Panama Canal"
)

EVERYDAY = _split(
    "cooking rice; saving money; learning a language; starting a garden; better sleep; public speaking; time management; "
    "running a marathon; baking bread; writing a resume; a job interview; moving house; training a puppy; meditation; "
    "reading more books; drinking more water; recycling at home; planning a trip; fixing a flat tyre; making friends; "
    "working from home; learning the guitar; healthy breakfasts; reducing stress; packing a suitcase; writing a speech; "
    "keeping houseplants; choosing a bicycle; taking better photographs; stretching; remembering names; composting; "
    "budgeting for students; cycling to work; painting a room; growing tomatoes; making coffee; hosting a dinner; knitting; "
    "chess openings; a morning routine; giving feedback; taking notes; cleaning a kitchen; buying a used car; camping"
)

ARTS = _split(
    "poetry; opera; jazz; watercolour painting; the novel; film editing; photography; theatre; architecture; ballet; pottery; "
    "calligraphy; folk music; documentary films; animation; sculpture; fashion design; street art; classical music; the blues; "
    "short stories; stained glass; mosaics; puppetry; hip hop; haiku; science fiction; mystery novels; mythology; fairy tales"
)

ANIMALS = _split(
    "octopuses; elephants; honeybees; penguins; bats; dolphins; owls; wolves; sea turtles; ants; hummingbirds; giraffes; "
    "sharks; frogs; crows; spiders; whales; kangaroos; butterflies; cheetahs; salmon; beavers; camels; flamingos; otters; "
    "chameleons; eagles; hedgehogs; jellyfish; sloths; polar bears; parrots; squirrels; snails; foxes; seahorses"
)

ADJECTIVES = _split(
    "quiet; small; bright; old; narrow; busy; gentle; crowded; wooden; cold; warm; green; distant; steady; rare; simple; heavy; "
    "modern; local; curious; patient; careful; long; early; late; famous; strange; popular; careless; colourful; rough; smooth"
)

JOBS = _split(
    "teacher; nurse; baker; engineer; librarian; farmer; pilot; carpenter; journalist; chemist; tailor; gardener; programmer; "
    "musician; electrician; lawyer; photographer; accountant; translator; plumber; architect; biologist; chef; cyclist; sailor; "
    "painter; historian; mechanic; pharmacist; dentist; geologist; designer; firefighter; editor; beekeeper; watchmaker"
)

AUDIENCES = _split(
    "a child; a beginner; a ten-year-old; a high school student; my grandmother; a busy manager; a new employee; a tourist; "
    "a first-year student; someone in a hurry; a curious neighbour; a group of teachers"
)

GOODS = _split(
    "apples; oranges; pencils; notebooks; marbles; stickers; eggs; cookies; cupcakes; tickets; stamps; books; bottles of water; "
    "candles; postcards; balloons; toy cars; flowers; bags of rice; chairs; mugs; scarves; light bulbs; batteries; seashells; "
    "crayons; sandwiches; muffins; lemons; peaches; plants; T-shirts; hats; keys; magazines; boxes of tea; jars of honey; tiles; "
    "baskets; puzzles; coins; buttons; bracelets; paintbrushes; loaves of bread; pumpkins; cans of soup; mangoes"
)

CONTAINERS = _split("boxes; bags; baskets; shelves; crates; jars; trays; packs; drawers; bins; cartons; rows")

SHOPS = _split(
    "bakery; bookshop; farm stand; toy store; flower shop; school fair; grocery store; market stall; café; hardware store; museum "
    "shop; stationery shop; garden centre; sports shop; pharmacy; fish market"
)

TEAMS = _split(
    "a library; a school; a bakery; a hospital; a museum; a bus company; a small farm; a football club; a print shop; a theatre; "
    "a research station; a bicycle workshop; a radio station; a community garden; a swimming pool; a hotel; a bank; a ferry line; "
    "a publishing house; a furniture maker; a brewery; a weather service; a charity; a software company; a fishing cooperative"
)

MONTHS = _split(
    "January; February; March; April; May; June; July; August; September; October; November; December"
)
WEEKDAYS = _split("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")

DISHES = _split(
    "lentil soup; apple pie; vegetable curry; roast chicken; tomato pasta; fried rice; onion tart; potato salad; mushroom risotto; "
    "fish stew; banana bread; bean chili; pumpkin soup; lamb stew; cheese omelette; rice pudding; spinach pie; chicken noodle soup; "
    "black bean tacos; cucumber salad; plum cake; vegetable lasagne; carrot cake; corn bread"
)

INGREDIENTS = _split(
    "two onions; a cup of rice; three carrots; a tablespoon of olive oil; a clove of garlic; half a teaspoon of salt; a can of tomatoes; "
    "two eggs; a cup of flour; a handful of parsley; one lemon; a litre of water; a spoonful of honey; a pinch of pepper; "
    "200 grams of butter; a cup of milk; four potatoes; a piece of ginger; a cup of lentils; some fresh basil; one red pepper"
)

PRODUCTS = _split(
    "desk lamp; backpack; kettle; wool blanket; garden chair; water bottle; headset; notebook; rain jacket; frying pan; bicycle light; "
    "office chair; alarm clock; travel mug; wooden table; camping stove; umbrella; bookshelf; keyboard; pair of gloves; teapot; tent"
)
