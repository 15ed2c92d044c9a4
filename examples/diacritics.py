"""Arabic is written without most vowels; a BiLSTM tagger puts them back. Its weights:

pip install --no-deps arabic-diacritizer==1.0.0
"""

import sys
import time

import cellrt
from models.diacritizer import letter_ids, make_diacritizer, with_marks, without_marks

TEXTS = (
    "بسم الله الرحمن الرحيم",
    "السلام عليكم ورحمة الله وبركاته",
    "ذهب الولد إلى المدرسة في الصباح",
    "اللغة العربية من أقدم اللغات في العالم",
    "كتب الطالب الدرس ثم عاد إلى البيت",
    "العلم نور والجهل ظلام",
    "قرأت كتابا جديدا عن تاريخ العلوم عند العرب.",
    "من جد وجد، ومن زرع حصد",
)


def main(quick: bool = False) -> None:
    """Print each text as soon as it is done, then how fast a few hundred are served."""
    texts = [without_marks(text) for text in TEXTS]
    with cellrt.Engine(workers=1) as engine:
        engine.register(make_diacritizer())
        futures = engine.submit_many("diacritizer", [letter_ids(text) for text in texts])
        for text, future in zip(texts, futures, strict=True):
            print(with_marks(text, future.result()["logits"]))

        many = (texts if quick else texts * 25)[:200]
        start = time.perf_counter()
        for future in engine.submit_many("diacritizer", [letter_ids(text) for text in many]):
            future.result()
        seconds = time.perf_counter() - start
    print(f"{len(many)} texts, {sum(map(len, many))} letters in {seconds:.2f} s: {len(many) / seconds:.0f} texts/s")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
