"""Pictures of the page that `minbert serve` has at /, for the docs: docs/images/page-*.png.

python -m bench.page_pictures runs/quickstart/model
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from bench.browser import browser, prefer, screen
from bench.serve import serving
from minbert.delivery.search import SearchIndex, SentenceEncoder

OUT = Path(__file__).parent.parent / "docs" / "images"
LARGEST = 200_000  # bytes of a picture
LINES = """The cake was wonderful and the staff were kind.
Lovely place, and the best lemon cake in town!
We waited forty minutes, and then they forgot our order.
Nobody came to our table for half an hour.
The coffee is fine, nothing special.
An ordinary cup of coffee at an ordinary price.
It opens at eight and closes at six.
My favourite corner to read in the whole city."""
SENTENCES = (
    "Where can I sit and read for an hour?",
    "Which bakery has good cake?",
    "How long is the queue at lunch?",
    "Is there a quiet place to work?",
    "When does the library close?",
    "The service was slow today.",
)


@dataclass(frozen=True)
class Picture:
    name: str
    state: dict[str, str]
    ready: str
    """What must be there before it is taken."""
    width: int = 1160
    height: int = 0
    """0: as high as the page."""
    dark: bool = False
    phone: bool = False


PICTURES = (
    Picture("light", {"tab": "text", "text": "A charming little film, slow at times but full of warmth."}, ".shaded"),
    Picture(
        "dark",
        {"tab": "pair", "a": "How do I get ink out of a shirt?", "b": "What removes pen stains from cotton?"},
        ".shaded",
        dark=True,
    ),
    Picture("lines", {"tab": "lines", "lines": LINES, "find": "a quiet spot for a book"}, ".matches"),
    Picture(
        "phone",
        {"tab": "text", "text": "We waited an hour for cold soup, and nobody said sorry."},
        ".shaded",
        width=360,
        phone=True,
    ),
    Picture("model", {"tab": "model"}, ".interval, .card"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        SearchIndex.build(Path(place) / "index", SENTENCES, SentenceEncoder.load(given.model))
        index = str(Path(place) / "index")
        with serving(given.model, "fp32", "--index", index) as (port, *_), browser() as driver:
            for picture in (PICTURES[0], *PICTURES):  # twice: a server's first answer takes longest
                screen(driver, picture.width, picture.height or 900, phone=picture.phone)
                prefer(driver, prefers_color_scheme="dark" if picture.dark else "light")
                driver.get("about:blank")
                driver.get(f"http://127.0.0.1:{port}/#{urlencode(picture.state)}")
                wanted = picture.ready
                WebDriverWait(driver, 20).until(lambda page, wanted=wanted: page.find_elements(By.CSS_SELECTOR, wanted))
                time.sleep(0.8)  # until nothing moves any more
                height = driver.execute_script(
                    "return Math.ceil(document.body.getBoundingClientRect().bottom + scrollY)"
                )
                screen(driver, picture.width, picture.height or height, phone=picture.phone)
                time.sleep(0.3)
                path = given.out / f"page-{picture.name}.png"
                taken = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
                taken.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
                size = path.stat().st_size
                print(f"{path} {size:,} bytes")
                if size > LARGEST:
                    raise SystemExit(f"{path}: {size:,} bytes; expected at most {LARGEST:,}")


if __name__ == "__main__":
    main()
