"""Sentences of our own with the part of speech of every word, written by hand; no rule was made after them.

V verb, X auxiliary (every form of be), N noun, J adjective, A adverb, F function word, O other.
"""

from __future__ import annotations

LETTERS = {
    "V": "verb",
    "X": "auxiliary",
    "N": "noun",
    "J": "adjective",
    "A": "adverb",
    "F": "function",
    "O": "other",
}
SENTENCES = """
The/F girl/N is/X carrying/V a/F small/J baby/N ./O
A/F man/N has/X eaten/V the/F last/J slice/N of/F bread/N ./O
She/F has/V two/O dogs/N and/F a/F cat/N ./O
How/F do/X I/F learn/V to/F play/V the/F guitar/N ?/O
What/F does/X this/F word/N mean/V ?/O
We/F did/V the/F dishes/N after/F dinner/N ./O
They/F didn/X '/O t/A find/V the/F key/N ./O
The/F police/N arrested/V three/O men/N in/F London/N on/F Monday/N ./O
Oil/N prices/N fell/V sharply/A this/F week/N ./O
Shares/N of/F the/F company/N rose/V after/F the/F report/N ./O
He/F can/X '/O t/A swim/V ,/O but/F he/F loves/V the/F sea/N ./O
I/F would/X never/A watch/V this/F film/N again/A ./O
The/F plot/N makes/V no/F sense/N ./O
It/F '/O s/X a/F charming/J story/N about/F friendship/N ./O
The/F actors/N seem/V bored/J ./O
Two/O women/N are/X sitting/V on/F a/F bench/N ./O
A/F black/J dog/N runs/V through/F the/F snow/N ./O
Someone/N is/X slicing/V an/F onion/N with/F a/F sharp/J knife/N ./O
A/F child/N plays/V with/F a/F red/J ball/N in/F the/F garden/N ./O
The/F cat/N was/X chased/V by/F the/F dog/N ./O
Should/X I/F buy/V a/F new/J laptop/N or/F repair/V my/F old/J one/N ?/O
Why/F do/X people/N believe/V in/F ghosts/N ?/O
Which/F bank/N gives/V the/F best/J rate/N for/F students/N ?/O
How/F can/X we/F reduce/V noise/N in/F the/F office/N ?/O
Where/F did/X the/F Romans/N build/V their/F first/J road/N ?/O
Is/X it/F safe/J to/F drink/V this/F water/N ?/O
Have/X you/F ever/A visited/V Norway/N ?/O
The/F minister/N will/X meet/V the/F president/N tomorrow/N ./O
Scientists/N have/X discovered/V a/F new/J species/N of/F frog/N ./O
The/F river/N flooded/V the/F village/N last/J night/N ./O
My/F neighbour/N '/O s/F car/N needs/V a/F new/J engine/N ./O
He/F opened/V the/F door/N and/F walked/V into/F the/F room/N ./O
The/F teacher/N explained/V the/F rule/N twice/A ./O
They/F want/V to/F sell/V their/F house/N ./O
She/F must/X have/X forgotten/V her/F umbrella/N ./O
The/F train/N arrives/V at/F noon/N ./O
Nobody/N knows/V the/F answer/N ./O
Please/O send/V me/F the/F address/N of/F the/F hotel/N ./O
The/F soup/N tastes/V awful/J ./O
This/F camera/N takes/V beautiful/J pictures/N at/F night/N ./O
The/F government/N plans/V to/F raise/V taxes/N next/J year/N ./O
Prices/N may/X rise/V again/A in/F spring/N ./O
I/F think/V the/F director/N wasted/V a/F good/J cast/N ./O
We/F had/V lunch/N near/F the/F station/N ./O
He/F had/X already/A left/V when/F we/F arrived/V ./O
The/F bird/N sings/V in/F the/F tree/N ./O
A/F woman/N is/X cutting/V paper/N with/F scissors/N ./O
The/F boys/N threw/V stones/N into/F the/F lake/N ./O
You/F don/X '/O t/A have/X to/F pay/V for/F parking/N ./O
Does/X coffee/N help/V against/F headaches/N ?/O
The/F court/N rejected/V the/F appeal/N ./O
Her/F brother/N became/V a/F doctor/N ./O
The/F wind/N broke/V several/J branches/N ./O
The/F museum/N opens/V its/F doors/N in/F May/N ./O
A/F fire/N destroyed/V the/F factory/N in/F Milan/N ./O
The/F two/O leaders/N discussed/V trade/N and/F climate/N ./O
It/F was/X raining/V ,/O so/F we/F stayed/V at/F home/N ./O
Their/F jokes/N are/X rarely/A funny/J ./O
The/F nurse/N gave/V him/F some/F medicine/N ./O
There/F are/X many/J ways/N to/F cook/V rice/N ./O
""".strip().splitlines()


def gold() -> list[tuple[list[str], list[str]]]:
    """Words and parts of each sentence."""
    found = []
    for line in SENTENCES:
        pairs = [item.rsplit("/", 1) for item in line.split()]
        found.append(([word for word, _ in pairs], [LETTERS[letter] for _, letter in pairs]))
    return found
