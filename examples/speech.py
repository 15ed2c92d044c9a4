"""Who is speaking? Speech detection in hundreds of audio streams at once, the state of each in a session.

    pip install --no-deps silero-vad==6.2.3 && pip install onnx
    python examples/speech.py --recordings /usr/share/asterisk/sounds    # Debian's asterisk-core-sounds-en-wav

Each caller sends its audio piece by piece and waits for the answer. Without recordings, something like speech is made.
"""

import argparse
import asyncio
import time
from itertools import cycle, islice
from pathlib import Path

import torch

import cellrt
from cellrt.demo.silero import FRAMES_PER_S, frames_of, make_vad, read_wave, synthesise


async def call(engine: cellrt.Engine, caller: str, frames: torch.Tensor, piece: int) -> torch.Tensor:
    """The probability of speech of each frame, sending `piece` frames of 32 ms at a time."""
    session = engine.session("vad", caller)
    answers = [(await session.infer(some))["speech"] for some in frames.split(piece)]
    session.close()
    return torch.cat(answers)


async def serve(engine: cellrt.Engine, streams: list[torch.Tensor], piece: int) -> list[torch.Tensor]:
    """All streams at once, as fast as they are answered; prints how many could speak at the same time."""
    wall, cpu = time.perf_counter(), time.process_time()
    speech = await asyncio.gather(*(call(engine, f"caller-{k}", frames, piece) for k, frames in enumerate(streams)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    seconds = sum(map(len, streams)) / FRAMES_PER_S
    print(
        f"{len(streams)} streams, {seconds:.0f} s of audio, {piece} frames ({1000 * piece / FRAMES_PER_S:.0f} ms) a "
        f"request: {wall:.1f} s; {seconds / wall:.0f} streams in real time here, {seconds / cpu:.0f} a core"
    )
    return speech


def main(recordings: str | None = None, callers: int = 300, quick: bool = False) -> None:
    """Prints when three of the callers speak, and how many real-time streams a core carries."""
    callers, seconds = (20, 2.0) if quick else (callers, 8.0)
    paths = sorted(Path(recordings).rglob("*.wav")) if recordings else []
    sounds = [read_wave(path) for path in islice(cycle(paths), callers)] or [
        synthesise(seconds, k) for k in range(callers)
    ]
    streams = [frames_of(sound) for sound in sounds]
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
