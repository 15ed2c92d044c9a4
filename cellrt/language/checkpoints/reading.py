"""Reading of checkpoints: find the architecture, the files beside the weights, and check that all of it fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from cellrt import DefinitionError
from cellrt.language.checkpoint import Checkpoint
from cellrt.language.checkpoints.bert import bert
from cellrt.language.checkpoints.config import Config, Values, read_bytes, read_json
from cellrt.language.checkpoints.found import Found, Maker
from cellrt.language.checkpoints.gguf_file import read_gguf
from cellrt.language.checkpoints.gguf_models import of_gguf
from cellrt.language.checkpoints.gguf_tokenizer import tokenizer_of
from cellrt.language.checkpoints.gpt2 import gpt2
from cellrt.language.checkpoints.llama import llama
from cellrt.language.checkpoints.mamba2 import mamba2
from cellrt.language.checkpoints.mistral import mistral
from cellrt.language.checkpoints.qwen import qwen2, qwen3
from cellrt.language.checkpoints.t5 import t5
from cellrt.language.checkpoints.weights import Weights, read_folder

ARCHITECTURES: Mapping[str, Callable[[Config, Weights], Found]] = MappingProxyType(
    {
        "LlamaForCausalLM": llama,
        "MistralForCausalLM": mistral,
        "Qwen2ForCausalLM": qwen2,
        "Qwen3ForCausalLM": qwen3,
        "GPT2LMHeadModel": gpt2,
        "T5ForConditionalGeneration": t5,
        "Mamba2ForCausalLM": mamba2,
    }
)
GGUF_ENDS = "eos", "eot"
GGUF_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
ENCODERS = "BertModel", "BertForMaskedLM", "BertForPreTraining"
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.int8
MOST_TOKENIZER_BYTES, MOST_TEXT_BYTES = 1 << 28, 1 << 24


def read_checkpoint(
    path: str | os.PathLike[str], *, name: str | None = None, dtype: torch.dtype | None = None, progress: bool = True
) -> Checkpoint:
    """Return the description of a checkpoint: a folder of Hugging Face, or a GGUF file of Llama's form (llama, qwen2,
    qwen3).

    A folder has config.json and model.safetensors, or several files with model.safetensors.index.json; and it may have
    tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja. The names, shapes and types
    of all weights are checked here; they are read when the first model is made. Nothing that is in a file is executed,
    and no file of pickles is read. While a model is served the files must stay as they are.

    A GGUF file's tokenizer becomes a tokenizer.json, if it is one of byte pairs. Tensors in blocks of few bits need the
    package gguf (``pip install '.[lm]'``) and become ``dtype``.

    Args:
        path: the folder or file.
        name: the checkpoint's name; None: the name of the folder or file.
        dtype: in which it computes: float32 (None), bfloat16 or float16. With int8 it computes in float32, and the
            weights of linear layers are int8, rounded with a factor for each output.
        progress: whether to show the progress where reading takes long.

    Raise DefinitionError, naming the file and the fault, for a part that is missing, not supported, misshapen,
    superfluous, cut off or larger than any model's.
    """
    wanted = torch.float32 if dtype is None else dtype
    if wanted not in DTYPES:
        raise DefinitionError(f"read_checkpoint: expected a dtype of {', '.join(map(str, DTYPES))}, got {dtype}")
    place = Path(path)
    if not place.exists():
        raise DefinitionError(f"{place}: expected a folder with config.json and weights, or a GGUF file")
    own_name = place.resolve().name if place.is_dir() else place.stem
    read = _in_folder if place.is_dir() else _in_file
    return read(place, own_name if name is None else name, wanted, progress)


def _in_folder(folder: Path, name: str, dtype: torch.dtype, progress: bool) -> Checkpoint:
    config = Config(str(folder / "config.json"), read_json(folder / "config.json"))
    weights = read_folder(folder)
    architecture, found = _found_in(folder, config, weights)
    generation = _optional(folder / "generation_config.json")
    told = Config(str(folder / "generation_config.json"), generation)
    _check_generation(told)
    ends = told.tokens("eos_token_id") or config.tokens("eos_token_id")
    start = config.token("decoder_start_token_id" if found.kind == "encoder-decoder" else "bos_token_id")
    texts = _optional(folder / "tokenizer_config.json", MOST_TEXT_BYTES)
    return Checkpoint(
        name=name,
        kind=found.kind,
        architecture=architecture,
        vocabulary=found.vocabulary,
        context=found.context,
        end_tokens=ends,
        start_token=start,
        make=Maker(name, found, dtype, tuple(ends), progress),
        tokenizer=_tokenizer_in(folder),
        chat_template=_template_in(folder, texts),
        special_tokens=_special_tokens(texts),
        generation=generation,
        num_bytes=found.plan.num_bytes(dtype),
    )


def _in_file(path: Path, name: str, dtype: torch.dtype, progress: bool) -> Checkpoint:
    file = read_gguf(path)
    found = of_gguf(str(path), file)
    fields = Config(str(path), file.fields)
    ends = dict.fromkeys(one for key in GGUF_ENDS for one in fields.tokens(f"tokenizer.ggml.{key}_token_id"))
    tokens = file.fields.get("tokenizer.ggml.tokens", [])
    special = {f"{key}_token": fields.token(f"tokenizer.ggml.{theirs}_token_id") for key, theirs in GGUF_TOKENS.items()}
    return Checkpoint(
        name=name,
        kind=found.kind,
        architecture=fields.text("general.architecture"),
        vocabulary=found.vocabulary,
        context=found.context,
        end_tokens=tuple(ends),
        start_token=special["bos_token"],
        make=Maker(name, found, dtype, tuple(ends), progress),
        tokenizer=tokenizer_of(str(path), file.fields, found.vocabulary),
        chat_template=fields.text("tokenizer.chat_template") if "tokenizer.chat_template" in fields else None,
        special_tokens={key: tokens[one] for key, one in special.items() if one is not None and one < len(tokens)},
        generation={},
        num_bytes=found.plan.num_bytes(dtype),
    )


def _found_in(folder: Path, config: Config, weights: Weights) -> tuple[str, Found]:
    listed = config.values.get("architectures")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        raise DefinitionError(f"{config.where}, architectures: expected the name of one, got {listed!r:.80}")
    name = listed[0]
    if name in ENCODERS:
        return name, bert(config, weights, folder)
    if name not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, *ENCODERS))
        raise DefinitionError(f"{config.where}, architectures: expected one of {known}; got {name!r:.80}")
    return name, ARCHITECTURES[name](config, weights)


def _check_generation(told: Config) -> None:
    """Raise DefinitionError for what says of each answer that it cannot be made."""
    told.flag("do_sample")
    told.count("top_k", 0, least=-1, most=1 << 31)
    for name, most in {"top_p": 1.0, "repetition_penalty": 1e12}.items():
        told.number(name, 1.0, most=most)
    for name, most in {"temperature": 1e12, "min_p": 1.0}.items():
        if told.values.get(name) != 0:
            told.number(name, 1.0, most=most)


def _optional(path: Path, most: int = 1 << 20) -> Values:
    return read_json(path, most) if path.exists() else {}


def _tokenizer_in(folder: Path) -> bytes | None:
    path = folder / "tokenizer.json"
    return read_bytes(path, MOST_TOKENIZER_BYTES) if path.exists() else None


def _template_in(folder: Path, texts: Values) -> str | None:
    """Return the template of chat_template.jinja, else that of tokenizer_config.json, of several the default one."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bytes(path, MOST_TEXT_BYTES).decode()
        except UnicodeDecodeError as error:
            raise DefinitionError(f"{path}: expected UTF-8: {error}") from error
    given = texts.get("chat_template")
    if isinstance(given, list):
        by_name = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = by_name.get("default")
    return given if isinstance(given, str) else None


def _special_tokens(texts: Values) -> dict[str, str]:
    """Return the special tokens of tokenizer_config.json, which are texts or objects with a content."""
    found = {}
    for key, value in texts.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
