"""Speech detection in streams: the trained network of the package silero-vad, as two cells and an unfolder.

A frame is 512 new samples at 16 kHz (32 ms) behind the last 64 of the frame before. Its spectrum goes through four
convolutions, which need no state and are batched over all frames there are; an LSTM and one output unit turn them into
the probability of speech, frame by frame.

The weights (MIT) are read with ``onnx`` from the installed package's file. The package itself is never imported: it
would bring along much that is not needed.
"""

from __future__ import annotations

import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from cellrt import DefinitionError, Graph, RequestError, Unfolder, cell, unfold
from cellrt.cells import LSTMCell
from cellrt.demo.g2p import package_folder

TO_INSTALL = "--no-deps silero-vad==6.2.3"
SAMPLE_RATE = 16_000
"""Samples a second."""
FRAME = 512
"""New samples of a frame."""
CONTEXT = 64
"""Samples of the frame before that a frame starts with."""
FRAMES_PER_S = SAMPLE_RATE / FRAME
WINDOW, HOP, HIDDEN = 256, 128, 128
STRIDES = (1, 2, 2, 1)
"""The strides of the four convolutions; each has a kernel of 3 and a padding of 1."""


class SpeechState(NamedTuple):
    """The outputs of a frame: the LSTM's ``h`` and ``c`` ``[rows, 128]``, and the probability of ``speech``
    ``[rows]``.
    """

    h: Tensor
    c: Tensor
    speech: Tensor


class FrameEncoder(nn.Module):
    """``samples`` ``[rows, 576]`` -> features ``[rows, 128]``: the magnitudes of four short spectra, then four
    convolutions with a rectifier each.

    There are so few positions (4, 4, 2 and 1) that each convolution is one matrix over all of them, half as long to
    compute as a convolution.
    """

    window: Tensor

    def __init__(self, convolutions: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(WINDOW))
        layers: list[nn.Module] = []
        positions = 1 + (CONTEXT + FRAME + CONTEXT - WINDOW) // HOP
        for (weight, bias), stride in zip(convolutions, STRIDES, strict=True):
            linear = _as_linear(weight, bias, stride, positions)
            positions = linear.out_features // weight.shape[0]
            layers += [linear, nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the features of each frame, whatever the frames around it."""
        pieces = pad(samples, (0, CONTEXT), mode="reflect").unfold(1, WINDOW, HOP)
        features: Tensor = self.layers(torch.fft.rfft(pieces * self.window).abs().flatten(1))
        return features


def _as_linear(weight: Tensor, bias: Tensor, stride: int, positions: int) -> nn.Linear:
    """Return the convolution ``weight`` ``[out, in, 3]`` over that many positions as one layer, position by position:
    what it makes of each unit vector are its columns.
    """
    size = positions * weight.shape[1]
    units = torch.eye(size).view(size, positions, weight.shape[1]).transpose(1, 2)
    columns = conv1d(units, weight, stride=stride, padding=1).transpose(1, 2)
    linear = nn.Linear(size, columns.shape[1] * columns.shape[2])
    linear.weight = nn.Parameter(columns.flatten(1).T.contiguous())
    linear.bias = nn.Parameter(bias.repeat(columns.shape[1]))
    return linear


class SpeechCell(LSTMCell):
    """An LSTM step on features ``x`` ``[rows, 128]``, and the probability of speech that it ends with."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias)
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> SpeechState:  # type: ignore[override]
        """Run one frame of every row."""
        return self._with_speech(*super().forward(x, h, c))

    def steps(self, batch_sizes: Sequence[int], *, x: Tensor, h: Tensor, c: Tensor) -> SpeechState:  # type: ignore[override]
        """Run successive frames, packed."""
        return self._with_speech(*super().steps(batch_sizes, x=x, h=h, c=c))

    def _with_speech(self, h: Tensor, c: Tensor) -> SpeechState:
        return SpeechState(h, c, torch.sigmoid(self.output(h.relu())[:, 0]))


def weights_path() -> Path:
    """Return the file of the network. Raise DefinitionError if the package silero-vad is not installed."""
    path = package_folder("silero_vad", TO_INSTALL) / "data" / "silero_vad_16k_sequence.onnx"
    if not path.exists():
        raise DefinitionError(f"{path} is missing: pip install --force-reinstall {TO_INSTALL}")
    return path


def read_weights() -> dict[str, Tensor]:
    """Return the trained weights by their names in the file.

    Raise DefinitionError if silero-vad or onnx is not installed.
    """
    path = weights_path()
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise DefinitionError("reading silero-vad's weights needs onnx: pip install onnx") from error
    initializers = onnx.load(path).graph.initializer
    return {item.name: torch.from_numpy(numpy_helper.to_array(item).copy()) for item in initializers}


def make_modules(weights: Mapping[str, Tensor] | None = None) -> tuple[FrameEncoder, SpeechCell]:
    """Return the encoder and the recurrent part with the trained weights (default: those of the installed package)."""
    weights = weights or read_weights()
    encoder = FrameEncoder([(weights[f"encoder.{k}.weight"], weights[f"encoder.{k}.bias"]) for k in range(4)])
    w_ih, w_hh, biases = (weights[f"onnx::LSTM_{number}"][0] for number in (209, 210, 211))
    speech = SpeechCell(HIDDEN, HIDDEN)
    speech.load_state_dict(
        {
            "weight_ih": _in_torch_order(w_ih),
            "weight_hh": _in_torch_order(w_hh),
            "bias_ih": _in_torch_order(biases[: 4 * HIDDEN]),
            "bias_hh": _in_torch_order(biases[4 * HIDDEN :]),
            "output.weight": weights["output.weight"][:, :, 0],
            "output.bias": weights["output.bias"],
        }
    )
    return encoder, speech


def _in_torch_order(gates: Tensor) -> Tensor:
    """Return gates in torch's order i, f, g, o; ONNX has i, o, f, g."""
    i, o, f, g = gates.chunk(4)
    return torch.cat([i, f, g, o])


def make_vad(weights: Mapping[str, Tensor] | None = None, *, max_batch: int = 256) -> Unfolder:
    """Return the model ``"vad"``: a request is ``frames_of`` a recording, float32 ``[frames, 576]``; its result
    ``speech`` ``[frames]``.

    The LSTM's state is kept in the session of the request if it has one, so that the next request goes on where this
    one ends.

    Raise DefinitionError if silero-vad or onnx is not installed.
    """
    encoder_module, speech_module = make_modules(weights)
    encoder = cell(encoder_module, {"samples": (CONTEXT + FRAME,)}, name="encoder", max_batch=max_batch)
    state = {"x": (HIDDEN,), "h": (HIDDEN,), "c": (HIDDEN,)}
    speech = cell(speech_module, state, name="speech", max_batch=max_batch)

    @unfold("vad", example=torch.zeros(2, CONTEXT + FRAME))
    def vad(graph: Graph, frames: Tensor) -> object:
        if frames.ndim != 2 or frames.shape[1] != CONTEXT + FRAME:
            raise RequestError(f"vad: expected frames [n, {CONTEXT + FRAME}], got shape {list(frames.shape)}")
        features = graph.chain(encoder, samples=frames)
        return {"speech": graph.chain(speech, keep=True, x=features.output).speech}

    return vad


def frames_of(audio: Tensor, before: Tensor | None = None) -> Tensor:
    """Cut ``audio`` ``[samples]`` into frames ``[frames, 576]``; the last is filled up with silence.

    ``before``: what came before it in the stream, at least 64 samples; default silence.
    """
    start = torch.zeros(CONTEXT) if before is None else before[-CONTEXT:]
    audio = pad(audio, (0, -len(audio) % FRAME))
    return torch.cat([start, audio]).unfold(0, CONTEXT + FRAME, FRAME)


def read_wave(path: str | Path) -> Tensor:
    """Return a 16-bit mono WAV file at 8 or 16 kHz as samples ``[n]`` in -1 to 1 at 16 kHz.

    Twice the samples are the same spectrum with nothing above. Raise RequestError for another kind of file.
    """
    with wave.open(str(path), "rb") as file:
        rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
        data = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    if width != 2 or channels != 1 or rate not in (SAMPLE_RATE // 2, SAMPLE_RATE):
        raise RequestError(
            f"{path}: expected 16 bits, one channel, 8 or 16 kHz; got {8 * width} bits, {channels} channels, {rate} Hz"
        )
    samples = torch.from_numpy(data.astype(np.float32) / 32768)
    return samples if rate == SAMPLE_RATE else 2 * torch.fft.irfft(torch.fft.rfft(samples), 2 * len(samples))


def synthesise(seconds: float, seed: int = 0) -> Tensor:
    """Make something like speech between pauses, for want of a recording, ``[samples]`` at 16 kHz: a voice's
    pulses through three resonances, syllable by syllable, over faint noise.
    """
    generator = np.random.default_rng(seed)
    num_samples = int(seconds * SAMPLE_RATE)
    audio = generator.normal(0, 0.002, num_samples)
    at = int(generator.uniform(0.1, 0.6) * SAMPLE_RATE)
    while at < num_samples:
        for _ in range(generator.integers(3, 9)):
            syllable = _syllable(generator)
            end = min(at + len(syllable), num_samples)
            audio[at:end] += syllable[: end - at]
            at = min(at + int(len(syllable) * generator.uniform(0.9, 1.3)), num_samples)
        at += int(generator.uniform(0.3, 1.2) * SAMPLE_RATE)
    return torch.from_numpy(audio.astype(np.float32))


def _syllable(generator: np.random.Generator) -> NDArray[np.float64]:
    """Return a vowel of 120 to 260 ms: harmonics of a gliding pitch, each as loud as the resonances near it make it."""
    time = np.arange(int(generator.uniform(0.12, 0.26) * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = generator.uniform(90, 220) * (1 + generator.uniform(-0.2, 0.2) * time / time[-1])
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    resonances = (generator.uniform(300, 800), generator.uniform(900, 2200), generator.uniform(2300, 3200))
    sound = np.zeros_like(time)
    for harmonic in range(1, 25):
        frequency = harmonic * pitch.mean()
        loudness = sum(1 / (1 + ((frequency - resonance) / 90) ** 2) for resonance in resonances)
        sound += loudness / harmonic**0.5 * np.sin(harmonic * phase)
    return np.asarray(0.15 * sound * np.hanning(len(time)) ** 0.25)
