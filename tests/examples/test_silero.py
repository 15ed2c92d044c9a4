"""The served probabilities of speech are onnxruntime's, frame by frame, on recordings where there are some."""

from __future__ import annotations

import importlib.util
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import cellrt
from cellrt.errors import RequestError
from models import silero

RECORDINGS = Path("/usr/share/asterisk/sounds")
"""Where the Debian package asterisk-core-sounds-en-wav puts 568 recordings of a voice."""

for _package, _install in (("silero_vad", silero.TO_INSTALL), ("onnx", "onnx"), ("onnxruntime", "onnxruntime")):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"needs {_package}: pip install {_install}", allow_module_level=True)


class Oracle:
    """The network itself, run by onnxruntime one frame after the other."""

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._network = onnxruntime.InferenceSession(silero.weights_path(), options)

    def __call__(self, frames: torch.Tensor) -> np.ndarray:
        h = c = np.zeros((1, 1, silero.HIDDEN), np.float32)
        speech = []
        for frame in frames.numpy():
            probability, h, c = self._network.run(["speech_probs", "hn", "cn"], {"input": frame[None], "h": h, "c": c})
            speech.append(probability[0])
        return np.array(speech)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def streams() -> list[torch.Tensor]:
    """Frames of twelve sounds: every fiftieth recording, or what stands in for them."""
    paths = sorted(RECORDINGS.rglob("*.wav"))[::50]
    sounds = [silero.read_wave(path) for path in paths] or [silero.synthesise(1 + seed, seed) for seed in range(12)]
    return [silero.frames_of(sound) for sound in sounds]


@pytest.fixture(scope="module")
def engine() -> Iterator[cellrt.Engine]:
    with cellrt.Engine() as engine:
        engine.register(silero.make_vad())
        yield engine


def test_whole_streams_are_as_onnxruntime_says(
    engine: cellrt.Engine, oracle: Oracle, streams: list[torch.Tensor]
) -> None:
    served = [future.result(timeout=60)["speech"] for future in engine.submit_many("vad", streams)]
    for frames, speech in zip(streams, served, strict=True):
        np.testing.assert_allclose(speech, oracle(frames), atol=1e-4)
    spoken = float((torch.cat(served) > 0.5).float().mean())
    assert 0.2 < spoken < 0.98  # there is both speech and silence


def test_the_encoder_is_the_convolutions_of_the_file() -> None:
    weights = silero.read_weights()
    encoder, _ = silero.make_modules(weights)
    samples = torch.randn(3, silero.CONTEXT + silero.FRAME, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(samples[:, None], (0, silero.CONTEXT), mode="reflect")
    real, imaginary = torch.conv1d(padded, weights["stft.forward_basis_buffer"], stride=silero.HOP).chunk(2, 1)
    x = (real.square() + imaginary.square()).sqrt()
    for k, stride in enumerate(silero.STRIDES):
        x = torch.conv1d(x, weights[f"encoder.{k}.weight"], weights[f"encoder.{k}.bias"], stride, 1).relu()
    torch.testing.assert_close(encoder(samples), x[:, :, 0], atol=1e-4, rtol=1e-4)


def test_frames_start_with_the_end_of_what_came_before() -> None:
    audio = torch.arange(1.0, 1201.0)
    frames = silero.frames_of(audio)
    assert frames.shape == (3, 576)
    assert frames[0, :64].count_nonzero() == 0
    assert frames[1].tolist() == list(range(449, 1025))
    assert frames[2, -336:].count_nonzero() == 0
    pieces = torch.cat([silero.frames_of(audio[:512]), silero.frames_of(audio[512:], before=audio[:512])])
    assert pieces.equal(frames)


@pytest.mark.parametrize("rate", [8000, 16000])
def test_a_recording_is_read_at_16_khz(tmp_path: Path, rate: int) -> None:
    time = np.arange(rate) / rate
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((16384 * np.sin(2 * np.pi * 440 * time)).astype(np.int16).tobytes())
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(silero.read_wave(tmp_path / "tone.wav"), expected, atol=1e-3)


def test_another_kind_of_recording_is_refused(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "stereo.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(44100)
        file.writeframes(bytes(400))
    with pytest.raises(RequestError, match="2 channels, 44100 Hz"):
        silero.read_wave(tmp_path / "stereo.wav")


def test_frames_of_another_size_are_refused(engine: cellrt.Engine) -> None:
    with pytest.raises(RequestError, match=r"expected frames \[n, 576\], got shape \[2, 512\]"):
        engine.submit("vad", torch.zeros(2, 512))


def test_sessions_of_concurrent_streams_go_on_where_they_were(
    engine: cellrt.Engine, oracle: Oracle, streams: list[torch.Tensor]
) -> None:
    """Pieces of many sizes of all streams, in turns: as if each stream had come alone and whole."""
    sizes = (1, 3, 2, 7, 1, 16)
    sessions = [engine.session("vad", f"caller-{k}") for k in range(len(streams))]
    ends = np.cumsum([sizes[k % len(sizes)] for k in range(200)])
    answers = [
        [session.submit(piece) for piece in torch.tensor_split(frames, ends[ends < len(frames)].tolist())]
        for session, frames in zip(sessions, streams, strict=True)
    ]
    for frames, futures, session in zip(streams, answers, sessions, strict=True):
        speech = torch.cat([future.result(timeout=60)["speech"] for future in futures])
        np.testing.assert_allclose(speech, oracle(frames), atol=1e-4)
        session.close()


def test_a_session_moves_to_another_engine(engine: cellrt.Engine, oracle: Oracle, streams: list[torch.Tensor]) -> None:
    frames = max(streams, key=len)
    session = engine.session("vad")
    begun = session.submit(frames[:20]).result(timeout=60)["speech"]
    with cellrt.Engine() as other:
        other.register(silero.make_vad())
        rest = other.session("vad", state=session.export()).submit(frames[20:]).result(timeout=60)["speech"]
    np.testing.assert_allclose(torch.cat([begun, rest]), oracle(frames), atol=1e-4)
    session.reset()
    again = session.submit(frames[:20]).result(timeout=60)["speech"]
    np.testing.assert_allclose(again, begun, atol=1e-6)  # rounding: the first may have been cut into other tasks
