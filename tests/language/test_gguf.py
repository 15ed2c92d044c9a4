"""GGUF files of Llama's form: what is in them is what ``transformers`` has, and what is wrong in them is named."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import cellrt
from cellrt.errors import DefinitionError
from cellrt.language.checkpoints import read_checkpoint
from cellrt.language.checkpoints.gguf_file import read_gguf
from tests.cells.smollm import smollm
from tests.language.small_models import MODELS, saved
from tests.language.test_architectures import PROMPTS, STEPS, answers, check_tokens

ARCHITECTURES = {"Llama": "llama", "Llama 3": "llama", "Qwen 2": "qwen2", "Qwen 3": "qwen3"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOKENS = ["<s>", "</s>", "a", "b", "c", "Ġ", "ab", "abc", "Ġa"]
TEXTS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": True}
MERGES = ["a b", "ab c", "Ġ a"]


def text(value):
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def field(value):
    """A value as GGUF has it: its kind, then itself."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
    of = field(value[0])[:4]
    return struct.pack("<I", 9) + of + struct.pack("<Q", len(value)) + b"".join(field(one)[4:] for one in value)


def gguf(fields, tensors, num_fields=None):
    """The bytes of a file; tensors are pairs of a type and an array, or arrays of float32."""
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields) if num_fields is None else num_fields)
    content += b"".join(text(name) + field(value) for name, value in fields.items())
    data = b""
    for name, given in tensors.items():
        kind, array = given if isinstance(given, tuple) else (0, given)
        shape = array.shape[::-1]
        content += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += array.tobytes() + bytes(-len(array.tobytes()) % 32)
    return content + bytes(-len(content) % 32) + data


def in_neighbours(weight, heads):
    """Rows of a projection as llama.cpp has them: neighbours are a rotary pair."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def of_model(name, model):
    """Fields and tensors of a model of ``transformers``."""
    kind, sizes = ARCHITECTURES[name], MODELS[name][1]
    fields = {
        "general.architecture": kind,
        f"{kind}.context_length": 128,
        f"{kind}.embedding_length": 24,
        f"{kind}.feed_forward_length": 50,
        f"{kind}.block_count": 2,
        f"{kind}.attention.head_count": 4,
        f"{kind}.attention.head_count_kv": 2,
        f"{kind}.attention.key_length": sizes.get("head_dim", 6),
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{kind}.rope.freq_base": float(sizes.get("rope_parameters", {}).get("rope_theta", 10_000.0)),
        "tokenizer.ggml.eos_token_id": 2,
    }
    tensors = {}
    for theirs, weight in model.state_dict().items():
        renamed, heads = theirs, {"q": 4, "k": 2}.get(theirs.rpartition("_proj.")[0][-1:])
        for long, short in NAMES.items():
            renamed = renamed.replace(long, short)
        if kind == "llama" and heads is not None:
            weight = in_neighbours(weight, heads)
        if renamed != "output.weight" or not sizes.get("tie_word_embeddings"):
            tensors[renamed] = weight.numpy()
    if name == "Llama 3":
        plain = 1 / 500.0 ** (torch.arange(0, 6, 2) / 6)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).numpy()
    if name == "Qwen 2":
        scaled = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
        fields |= {f"qwen2.rope.scaling.{key}": value for key, value in scaled.items()}
    return fields, tensors


@pytest.fixture(scope="module")
def engine():
    with cellrt.Engine(page_bytes=1 << 22, workers=1) as engine:
        yield engine


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_a_model_says_what_it_says_in_transformers(name, engine, tmp_path):
    reference = saved(name, tmp_path)
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf(*of_model(name, reference)))
    checkpoint = read_checkpoint(path)
    assert (checkpoint.name, checkpoint.end_tokens, checkpoint.context) == ("small", (2,), 128)
    requests = [{"prompt": torch.tensor(prompt), "max_tokens": STEPS} for prompt in PROMPTS]
    for prompt, made in zip(PROMPTS, answers(engine, checkpoint, name, requests)):
        read = prompt + made["token"][:-1].tolist()
        check_tokens(made, reference(torch.tensor([read])).logits[0, len(prompt) - 1 :], 2, torch.float32)


def plain_fields():
    """Those of a model of one layer whose weights are ``plain_tensors``."""
    counts = {"context_length": 32, "embedding_length": 32, "feed_forward_length": 32, "block_count": 1}
    fields = {"general.architecture": "qwen3", **{f"qwen3.{key}": value for key, value in counts.items()}}
    return {**fields, "qwen3.attention.head_count": 2, "qwen3.attention.layer_norm_rms_epsilon": 1e-6}


def plain_tensors():
    linear = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd.weight": (9, 32), "output_norm.weight": (32,)}
    shapes |= {f"blk.0.{name}.weight": (32, 32) for name in linear}
    shapes |= {f"blk.0.{name}.weight": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}.weight": (16,) for name in ("attn_q_norm", "attn_k_norm")}
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def test_blocks_of_few_bits_become_numbers(tmp_path):
    package = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    tensors, path = plain_tensors(), tmp_path / "q8.gguf"
    kind = package.GGMLQuantizationType.Q8_0
    blocks = package.quantize(tensors["blk.0.ffn_up.weight"], kind)
    content = gguf(plain_fields(), tensors | {"blk.0.ffn_up.weight": (int(kind), blocks)})
    described = text("blk.0.ffn_up.weight") + struct.pack("<IQQ", 2, *blocks.shape[::-1])
    assert described in content
    path.write_bytes(content.replace(described, described[:-16] + struct.pack("<QQ", 32, 32)))
    module = read_checkpoint(path).make("lm").cells[0].module
    found = module.model.layers[0].mlp.up.weight.numpy()
    np.testing.assert_array_equal(found, package.dequantize(blocks, kind))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_blocks_that_were_read_leave_nothing_of_the_file_in_memory(tmp_path):
    package = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    kind, path, rows = package.GGMLQuantizationType.Q8_0, tmp_path / "large.gguf", 4096
    blocks = package.quantize(np.random.default_rng(0).standard_normal((rows, 1024), np.float32), kind)
    content = gguf({}, {"weight": (int(kind), blocks)})
    described = text("weight") + struct.pack("<IQQ", 2, *blocks.shape[::-1])
    path.write_bytes(content.replace(described, described[:-16] + struct.pack("<QQ", 1024, rows)))
    file = read_gguf(path)
    made = file.tensors["weight"].read()
    np.testing.assert_array_equal(made.numpy(), package.dequantize(blocks, kind))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    resident = next(line for line in lines[at:] if line.startswith("Rss:"))
    assert 1024 * int(resident.split()[1]) < blocks.nbytes / 10


@pytest.mark.parametrize("kind", [1, 30])
def test_halves_become_numbers(kind, tmp_path):
    tensors, path = plain_tensors(), tmp_path / "half.gguf"
    halves = torch.from_numpy(tensors["blk.0.ffn_up.weight"]).to(torch.float16 if kind == 1 else torch.bfloat16)
    path.write_bytes(gguf(plain_fields(), tensors | {"blk.0.ffn_up.weight": (kind, halves.view(torch.int16).numpy())}))
    module = read_checkpoint(path).make("lm").cells[0].module
    assert torch.equal(module.model.layers[0].mlp.up.weight, halves.float())


def test_the_tokenizer_cuts_as_the_file_says(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install tokenizers")
    path = tmp_path / "small.gguf"
    lists = {"tokens": TOKENS, "merges": MERGES, "token_type": [3, 3, 1, 1, 1, 1, 1, 1, 1], "bos_token_id": 0}
    fields = plain_fields() | TEXTS | {f"tokenizer.ggml.{key}": value for key, value in lists.items()}
    path.write_bytes(gguf(fields | {"tokenizer.chat_template": "{{ messages }}"}, plain_tensors()))
    checkpoint = read_checkpoint(path)
    made = tokenizers.Tokenizer.from_buffer(checkpoint.tokenizer)
    assert made.encode("abc a</s>").tokens == ["<s>", "abc", "Ġa", "</s>"]
    assert made.decode([7, 8]) == "abc a"
    assert checkpoint.special_tokens == {"bos_token": "<s>"}
    assert checkpoint.chat_template == "{{ messages }}"
    fields["tokenizer.ggml.pre"] = "unheard-of"
    path.write_bytes(gguf(fields, plain_tensors()))
    assert read_checkpoint(path).tokenizer is None


ONE, NO_TEXTS = np.ones(1, np.float32), {"tokenizer.ggml.tokens": [1]}
SPOILT = {
    "nothing": (lambda: b"", "no whole GGUF"),
    "another file": (lambda: b"PK\x03\x04" + bytes(100), "begins with"),
    "a file that is cut off": (lambda: gguf(plain_fields(), plain_tensors())[:-40], "no whole GGUF"),
    "fields that are cut off": (lambda: gguf(plain_fields(), {})[:100], "no whole GGUF"),
    "as many fields as stars": (lambda: gguf(plain_fields(), plain_tensors(), 1 << 62), "fields"),
    "a long text": (lambda: gguf({}, {}, 1)[:24] + struct.pack("<Q", 1 << 60), "a text of"),
    "a long list": (lambda: gguf({}, {}, 1)[:24] + text("a") + struct.pack("<IIQ", 9, 0, 1 << 60), "take more than"),
    "a list of lists": (lambda: gguf({}, {}, 1)[:24] + text("a") + struct.pack("<IIQ", 9, 9, 3), "list of the kind 9"),
    "an unknown kind": (lambda: gguf({}, {}, 1)[:24] + text("a") + struct.pack("<I", 99), "unknown kind 99"),
    "another architecture": (lambda: gguf({"general.architecture": "mamba"}, {}), "general.architecture"),
    "a missing number": (lambda: gguf({"general.architecture": "llama"}, {}), "head_count"),
    "more layers than weights": (lambda: gguf(plain_fields() | {"qwen3.block_count": 10**6}, plain_tensors()), "block"),
    "a missing weight": (lambda: gguf(plain_fields() | {"qwen3.block_count": 2}, plain_tensors()), "blk.1."),
    "a weight too many": (
        lambda: gguf(plain_fields(), plain_tensors() | {"blk.0.x": np.ones(1, np.float32)}),
        "blk.0.x",
    ),
    "numbers for texts": (
        lambda: gguf(plain_fields() | TEXTS | {"tokenizer.ggml.tokens": [1]}, plain_tensors()),
        "texts",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_wrong_in_a_file_is_named(case, tmp_path):
    made, said = SPOILT[case]
    (tmp_path / "spoilt.gguf").write_bytes(made())
    with pytest.raises(DefinitionError) as raised:
        read_checkpoint(tmp_path / "spoilt.gguf")
    assert said in str(raised.value) and "spoilt.gguf" in str(raised.value)


def test_tokenizers_are_json():
    from cellrt.language.checkpoints.gguf_tokenizer import CUTS, tokenizer_of

    lists = {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": MERGES}
    for cut in CUTS:
        made = tokenizer_of("x", TEXTS | lists | {"tokenizer.ggml.pre": cut}, 9)
        assert len(json.loads(made)["model"]["vocab"]) == 9


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm_is_cut_as_in_transformers_and_knows_the_capital_of_france():
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install tokenizers")
    path = smollm()
    import transformers

    checkpoint = read_checkpoint(path)
    cut = tokenizers.Tokenizer.from_buffer(checkpoint.tokenizer)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for line in ["The capital of France is", " 1234 don't\n\n  world é漢字 I'll", "<|im_start|>user\nHi!<|im_end|>\n"]:
        assert cut.encode(line).ids == reference(line)["input_ids"]
    asked = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    with cellrt.Engine(page_bytes=1 << 26, workers=1) as large:
        large.register(checkpoint.make("smollm", max_tokens=20))
        made = large.submit("smollm", cut.encode(asked).ids).result(timeout=120)["token"].tolist()
    assert cut.decode(made) == "The capital of France is Paris."
