"""Word lists for the generated texts."""


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def split_phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.strip().split(","))


FEMALE_NAMES = split_words(
    "Ada Alma Anna Bella Clara Cora Dina Edith Elsa Emma Eva Fay Fiona Gina Greta Hana Helen Ida Ines Iris Jane "
    "Jill Julia Kate Kira Lara Lena Lily Lucy Maja Maria Mia Mina Nadia Nina Nora Olga Opal Paula Petra Rita Rosa "
    "Ruth Sara Selma Sofia Tara Tess Uma Vera Wanda Yara Yuki Zara Zoe"
)
MALE_NAMES = split_words(
    "Adam Alan Amir Ben Bruno Carl Cyrus Dan David Dev Eli Emil Erik Felix Finn Frank Fred Gus Hans Hugo Ian Igor "
    "Ivan Jack Jan Jonas Karl Ken Kofi Leo Liam Luca Marco Max Milo Nico Noah Omar Oscar Otto Pablo Paul Peter "
    "Raj Remy Rico Sam Simon Theo Tim Toby Tom Victor Walt Yusuf"
)
CAPITALS = {
    "Athens": "Greece",
    "Berlin": "Germany",
    "Bern": "Switzerland",
    "Brussels": "Belgium",
    "Budapest": "Hungary",
    "Cairo": "Egypt",
    "Copenhagen": "Denmark",
    "Dublin": "Ireland",
    "Hanoi": "Vietnam",
    "Havana": "Cuba",
    "Helsinki": "Finland",
    "Lima": "Peru",
    "Lisbon": "Portugal",
    "London": "England",
    "Madrid": "Spain",
    "Nairobi": "Kenya",
    "Oslo": "Norway",
    "Ottawa": "Canada",
    "Paris": "France",
    "Prague": "Czechia",
    "Quito": "Ecuador",
    "Riga": "Latvia",
    "Rome": "Italy",
    "Seoul": "Korea",
    "Sofia": "Bulgaria",
    "Stockholm": "Sweden",
    "Tallinn": "Estonia",
    "Tokyo": "Japan",
    "Vienna": "Austria",
    "Vilnius": "Lithuania",
    "Warsaw": "Poland",
    "Zagreb": "Croatia",
}
CITIES = (
    *CAPITALS,
    *split_phrases(
        "Bergen, Boston, Bremen, Chicago, Dallas, Denver, Geneva, Genoa, Hamburg, Kyoto, Lagos, Lyon, Malmo, Manila, "
        "Marseille, Miami, Milan, Montreal, Mumbai, Munich, Naples, Osaka, Porto, Seattle, Seville, Sydney, Toronto, "
        "Turin, Venice, Zurich, New York, San Diego, Cape Town, Hong Kong, Rio Grande, Santa Fe"
    ),
)
THINGS = split_words(
    "apple bag ball basket bell blanket book boat bottle bowl box brush bucket button candle camera cap card "
    "chair clock coat coin cup doll drum fan flag flower flute fork glove guitar hammer hat helmet jar kite key "
    "ladder lamp lantern leaf letter map mask mirror mug needle orange paintbrush pan pen pencil phone picture "
    "pillow plate pot puzzle ribbon ring rope ruler scarf shell shirt shoe shovel sock spoon stamp stone string "
    "sword ticket toy towel truck umbrella vase violin wagon watch wheel whistle"
)
ANIMALS = split_words(
    "bear bird cat cow crab dog donkey duck fish fox frog goat goose hen horse lion mouse owl pig rabbit sheep "
    "tiger wolf"
)
ANIMAL_SOUNDS = {
    "cat": "meows",
    "cow": "moos",
    "dog": "barks",
    "duck": "quacks",
    "lion": "roars",
    "owl": "hoots",
    "pig": "grunts",
    "wolf": "howls",
}
FOODS = split_words(
    "bread butter cake carrots cheese cherries eggs fish flour grapes honey jam juice lemons milk nuts onions "
    "pasta pears rice salt soup sugar tea"
)
COLORS = split_words("red blue green yellow white black brown pink purple gray orange golden silver")
ADJECTIVES = split_words("small big old new round heavy light soft shiny strange tiny long broken clean lovely plain")
JOBS = split_words(
    "baker farmer teacher doctor sailor painter gardener singer driver cook king queen clerk writer pilot nurse"
)
PLACES = split_words(
    "park school market garden library kitchen harbor station museum forest bakery farm beach castle office "
    "village tower bridge lake yard"
)
LOCATION_PHRASES = split_phrases(
    "under the bed, behind the door, on the table, in the drawer, near the window, on the shelf, under the tree, "
    "beside the well, in the attic, on the bench, behind the fence, in the cupboard, on the roof, at the gate"
)
MOODS = split_words("happy sad proud tired angry calm glad worried brave lonely curious hungry")
WEATHER = split_words("sunny rainy windy cloudy snowy foggy stormy warm cold mild")
DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split_words("January February March April May June July August September October November December")
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = split_words("first second third fourth fifth sixth seventh eighth")
NUMBER_WORDS = split_words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "long": "short",
    "old": "new",
    "open": "closed",
    "early": "late",
    "fast": "slow",
    "full": "empty",
    "happy": "sad",
    "hard": "soft",
    "heavy": "light",
    "high": "low",
    "wet": "dry",
    "dark": "bright",
    "left": "right",
    "near": "far",
    "noisy": "quiet",
    "strong": "weak",
    "up": "down",
    "wide": "narrow",
}
LANGUAGES = split_words("French Spanish German Italian Dutch Greek Polish Turkish Swedish Latin")
CHORES = split_phrases(
    "buy {food}, call {name}, call the {job}, write to {name}, water the plants, clean the {room}, feed the "
    "{animal}, pay the rent, wash the car, take out the trash, return the {thing}, pick up {name}, bake a cake, "
    "fix the {thing}, pack the bag, walk the dog, visit {name}, paint the {room}, lock the door, read a book, "
    "find the {thing}, charge the phone, order {food}, sweep the floor, bring the {thing}, sell the {thing}, "
    "thank {name}, cook the {food}, mail the letter, check the oven"
)
ROOMS = split_words("kitchen garage bathroom bedroom hall office attic cellar")
MESSAGES = split_phrases(
    "I will be late, dinner is ready, the {thing} is {spot}, happy birthday, see you on {day}, we meet at {time}, "
    "the train is late, I found the {thing}, I miss you, the {animal} is asleep, please bring {food}, I am at the "
    "{place}, thank you for the {thing}, call me at {time}, we need {food}, the door is open, I like the {color} "
    "{thing}, good luck, the bus is here, lunch is at {time}, I am in {city}, the {job} is here, meet me at the "
    "{place}, the meeting is over, I lost my {thing}"
)
EVENTS = split_phrases(
    "dentist, team meeting, lunch with {name}, piano lesson, dinner with {name}, yoga class, book club, trip to "
    "{city}, call with {name}, haircut, swimming, choir practice, job interview, movie night, {name}'s birthday, "
    "math exam, flight to {city}, coffee with {name}, garden party, doctor, chess game, walk with {name}, visit "
    "to the {place}, meeting with the {job}"
)
SONG_STARTS = split_words(
    "Silver Golden Blue Quiet Dancing Broken Summer Winter Midnight Paper Lonely Sweet Wild Velvet Morning "
    "Crystal Falling Little"
)
SONG_ENDS = split_words(
    "River Moon Garden Rain Heart Street Train Ocean Shadow Bird Fire Window Dream Letter Bridge Star Road Song"
)
TRANSLATIONS = {
    "apple": ("pomme", "manzana", "Apfel"),
    "bread": ("pain", "pan", "Brot"),
    "book": ("livre", "libro", "Buch"),
    "cat": ("chat", "gato", "Katze"),
    "dog": ("chien", "perro", "Hund"),
    "door": ("porte", "puerta", "Tür"),
    "fish": ("poisson", "pez", "Fisch"),
    "flower": ("fleur", "flor", "Blume"),
    "friend": ("ami", "amigo", "Freund"),
    "hand": ("main", "mano", "Hand"),
    "house": ("maison", "casa", "Haus"),
    "milk": ("lait", "leche", "Milch"),
    "moon": ("lune", "luna", "Mond"),
    "night": ("nuit", "noche", "Nacht"),
    "red": ("rouge", "rojo", "rot"),
    "sun": ("soleil", "sol", "Sonne"),
    "table": ("table", "mesa", "Tisch"),
    "tree": ("arbre", "árbol", "Baum"),
    "water": ("eau", "agua", "Wasser"),
    "window": ("fenêtre", "ventana", "Fenster"),
}
UNIT_FACTORS = {  # (large unit, small unit): small units per large unit
    ("hours", "minutes"): 60,
    ("minutes", "seconds"): 60,
    ("days", "hours"): 24,
    ("weeks", "days"): 7,
    ("years", "months"): 12,
    ("meters", "centimeters"): 100,
    ("kilometers", "meters"): 1000,
    ("kilograms", "grams"): 1000,
    ("liters", "milliliters"): 1000,
    ("feet", "inches"): 12,
    ("yards", "feet"): 3,
    ("pounds", "ounces"): 16,
    ("dozens", "pieces"): 12,
}
UNITS_BY_DIMENSION = (  # units of one dimension per line
    split_words("miles kilometers meters centimeters feet inches yards"),
    split_words("pounds kilograms grams ounces"),
    split_words("liters cups gallons pints"),
)
WORD_PARTS = (
    split_words(
        "ba be bi bo da de di do fa fe fi ga go ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe pi po ra re ri "
        "ro sa se si so ta te ti to va ve vo za zo shi tra plo gre qui"
    ),
    split_words("n r l s k m t x nd rk ll sh th"),
)
SURNAMES = split_words(
    "Adler Baker Castro Dahl Evans Ferri Gray Hill Ivers Jonas Klein Lopez Moor Novak Olsen Perez Quinn Reed "
    "Stone Torres Unger Vance Weber Young"
)
