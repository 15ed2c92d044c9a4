"""Speech detection in hundreds of audio streams at once, the state of each in a session.

    pip install --no-deps silero-vad==6.2.3 && pip install onnx
    python examples/speech.py --recordings /usr/share/asterisk/sounds    # Debian's asterisk-core-sounds-en-wav

Each caller sends its audio piece by piece and waits for the answer. Without recordings, something like speech is made.
Three rounds, each with longer pieces: a minute in all.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path

import torch
from rich.progress import track

import cellrt
from models.silero import FRAMES_PER_S, frames_of, make_vad, read_wave, synthesise

show = partial(track, transient=True, disable=not sys.stdout.isatty())


async def call(engine: cellrt.Engine, caller: str, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the probability of speech of each frame, sending one piece after the other."""
    session = engine.session("vad", caller)
    answers = [(await session.infer(piece))["speech"] for piece in pieces]
    session.close()
    return torch.cat(answers)


async def serve(engine: cellrt.Engine, streams: list[torch.Tensor], piece: int) -> list[torch.Tensor]:
    """Serve all streams at once, each as fast as it is answered; print how many people could speak at the same
    time.
    """
    pieces: list[Iterable[torch.Tensor]] = [frames.split(piece) for frames in streams]
    longest = max(range(len(streams)), key=lambda k: len(streams[k]))
    name = f"{piece} x 32 ms a request"
    pieces[longest] = show(streams[longest].split(piece), name)  # it stands for all of them
    wall, cpu = time.perf_counter(), time.process_time()
    speech = await asyncio.gather(*(call(engine, f"caller-{k}", some) for k, some in enumerate(pieces)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    audio = sum(map(len, streams)) / FRAMES_PER_S
    print(f"{name}: {wall:.1f} s, so {audio / wall:.0f} live callers; {audio / cpu:.0f} a busy core", flush=True)
    return speech


def main(recordings: str | None = None, callers: int = 300, quick: bool = False) -> None:
    """Print how many live callers could be served, and when three of the callers speak."""
    callers, seconds = (20, 2.0) if quick else (callers, 8.0)
    paths = sorted(Path(recordings).rglob("*.wav")) if recordings else []
    sounds = (read_wave(path) for path in cycle(paths)) if paths else (synthesise(seconds, k) for k in count())
    streams = [frames_of(sound) for sound in show(islice(sounds, callers), "audio", total=callers)]
    audio = sum(map(len, streams)) / FRAMES_PER_S
    print(
        f"{callers} callers with {audio:.0f} s of audio, one worker thread. Live callers: seconds of audio served\n"
        "in a second of the clock; a busy core: in a second of processor time, all threads together.",
        flush=True,
    )
    with cellrt.Engine(workers=1) as engine:
        engine.register(make_vad())
        for piece in (1, 3, 10):
            speech = asyncio.run(serve(engine, streams, piece))
    for number, probabilities in enumerate(speech[:3]):
        print(f"caller {number}: " + "".join("#" if part.mean() > 0.5 else "." for part in probabilities.split(3)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", help="a folder with WAV files of 16 bits at 8 or 16 kHz")
    parser.add_argument("--callers", type=int, default=300)
    main(**vars(parser.parse_args()))
