"""The models of the recipes give what their modules give alone, in plain torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cellrt
from examples import wake_word as client
from models import audio_encoder, linear_state, transducer, wake_word

NEEDS_SERVER = pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="needs the extra serve")


@pytest.fixture
def weights(tmp_path: Path) -> tuple[wake_word.WakeWord, Path]:
    torch.manual_seed(0)
    module, path = wake_word.WakeWord(), tmp_path / "wake_word.pt"
    torch.save(module.state_dict(), path)
    return module, path


def test_pieces_of_a_stream_are_answered_as_the_whole(weights: tuple[wake_word.WakeWord, Path]) -> None:
    module, path = weights
    frames = torch.randn(4, 25, wake_word.FEATURES)
    with cellrt.Engine(1) as engine, torch.inference_mode():
        engine.register(wake_word.make_model(path))
        listeners = [engine.session("wake_word") for _ in frames]
        for begin, end in ((0, 3), (3, 20), (20, 25)):
            futures = [listener.submit(each[begin:end]) for listener, each in zip(listeners, frames)]
            for each, future in zip(frames, futures):
                torch.testing.assert_close(future.result(60)["output"], module(each)[begin:end], rtol=0, atol=1e-5)


@NEEDS_SERVER
@pytest.mark.slow
def test_a_client_hears_of_a_file_s_weights(weights: tuple[wake_word.WakeWord, Path]) -> None:
    from tests.serve.helpers import Server

    module, path = weights
    frames = torch.randn(20, wake_word.FEATURES)
    arguments = ["--port", "0", "--device", "cpu:1", f"{wake_word.__file__}:served"]
    with Server(arguments, {wake_word.WEIGHTS: str(path)}) as server, torch.inference_mode():
        heard = [each for answer in client.listen(server.url, frames.split(6)) for each in answer]
        torch.testing.assert_close(torch.tensor(heard), module(frames)[:, 0], rtol=0, atol=1e-5)


@torch.inference_mode()
def written_alone(module: linear_state.Step, prompt: list[int], most: int) -> list[int]:
    state = torch.zeros(1, linear_state.LAYERS, linear_state.HEADS, linear_state.SIZE, linear_state.SIZE)
    for token in prompt:
        step = module(torch.tensor([token]), state)
        state = step["state"]
    made = [int(step["token"])]
    while len(made) < most and made[-1] != linear_state.END:
        step = module(step["token"], step["state"])
        made.append(int(step["token"]))
    return made


def test_a_linear_state_model_reads_a_prompt_and_goes_on() -> None:
    module, model = linear_state.make_model(max_tokens=12)
    prompts = [[5, 9, 3], [8, 1, 4, 4, 2, 7], [1]]
    with cellrt.Engine(1) as engine:
        engine.register(model)
        futures = engine.submit_many("linear", [torch.tensor(prompt) for prompt in prompts])
        for prompt, future in zip(prompts, futures):
            assert future.result(60)["token"].tolist() == written_alone(module, prompt, 12)


@torch.inference_mode()
def heard_alone(search: transducer.Search, frames: Tensor) -> list[int]:
    h, letters = torch.zeros(1, transducer.HIDDEN), []
    for frame in frames:
        for _ in range(transducer.MOST_LETTERS):
            letter = search.joiner(torch.tanh(frame[None] + h)).argmax(1)
            if int(letter) == transducer.BLANK:
                break
            letters.append(int(letter))
            h = search.predictor(search.embedding(letter), h)
    return letters


def test_a_transducer_and_ctc_hear_what_a_plain_search_hears() -> None:
    encoder, search, head, models = transducer.make_models()
    torch.manual_seed(1)
    sounds = [torch.randn(frames, transducer.FEATURES) for frames in (12, 30, 7, 1)]
    with cellrt.Engine(1) as engine:
        for model in models:
            engine.register(model)
        futures = [(engine.submit("transducer", sound), engine.submit("ctc", sound)) for sound in sounds]
        for sound, (searched, best) in zip(sounds, futures):
            heard = encoder(sound)[0].detach()
            assert transducer.spoken(searched.result(60)["letter"]) == heard_alone(search, heard)
            assert transducer.collapsed(best.result(60)["letter"]) == transducer.collapsed(head(heard).argmax(1))
    lengths = [len(heard_alone(search, encoder(sound)[0].detach())) for sound in sounds]
    assert 0 < sum(lengths) < transducer.MOST_LETTERS * sum(map(len, sounds))  # letters and blanks


def test_ctc_s_letters_collapse_before_blanks_go() -> None:
    assert transducer.collapsed(torch.tensor([0, 3, 3, 0, 3, 5, 5, 0, 0])) == [3, 3, 5]


@torch.inference_mode()
def encoded_alone(stem: audio_encoder.Stem, encoder: audio_encoder.Encoder, frames: Tensor) -> Tensor:
    x = stem(frames)
    for layer in encoder.layers:
        heads = layer.qkv(layer.norm(x)).view(-1, 3, audio_encoder.HEADS, audio_encoder.SIZE).permute(1, 2, 0, 3)
        read = F.scaled_dot_product_attention(*heads[:, None])[0]
        x = x + layer.out(read.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.mlp_norm(x))
    return x


def test_convolutions_over_windows_are_those_over_the_recording() -> None:
    stem, encoder, model = audio_encoder.make_model()
    sounds = [torch.randn(frames, audio_encoder.MELS) for frames in (30, 7, 1, 2)]
    with cellrt.Engine(1) as engine:
        engine.register(model)
        for sound, result in zip(sounds, engine.submit_many("audio", sounds).results()):
            torch.testing.assert_close(result["heard"], encoded_alone(stem, encoder, sound), rtol=0, atol=1e-5)
