"""Llama's family against ``transformers``, and against equations written out where that is not installed."""

import pytest
import torch
from torch.nn.functional import silu, softmax

from cellrt.cells._weights import Derived
from cellrt.cells.language_models import language_model
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.llama_weights import llama_from_gguf, llama_from_transformers, neighbours_to_halves
from cellrt.cells.paged_attention import LayerPages, Pages
from cellrt.cells.positions import Llama3Scaling, YarnScaling
from cellrt.definition.compiled_form import is_settled
from cellrt.errors import DefinitionError
from tests.cells.positions_oracle import (
    llama3_frequencies,
    plain_frequencies,
    yarn_amplitude,
    yarn_frequencies,
)
from tests.cells.smollm import smollm
from tests.cells.toy_pages import ToyPages, generate, last_logits, spans_of

SIZES = LlamaSizes(vocabulary=40, hidden=24, inner=50, layers=2, heads=4, kv_heads=2, is_tied=True)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [30, 31, 32, 33], list(range(20))]


def small(**changed):
    torch.manual_seed(0)
    return Llama(LlamaSizes(**{**SIZES.__dict__, **changed})).eval()


def turned(x, position, frequencies, amplitude):
    """A head with its rotary pairs as complex numbers."""
    half = len(x) // 2
    pairs = torch.complex(x[:half], x[half:])
    angles = position * torch.tensor(frequencies, dtype=x.dtype)
    pairs = amplitude * pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


def normed(x, weight):
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def logits_by_hand(model, tokens, frequencies, amplitude=1.0):
    """The equations in float64, token by token and head by head."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    heads, kv_heads, size = 4, 2, 2 * len(frequencies)
    rows = [weights["embedding.weight"][token] for token in tokens]
    for layer in range(len(model.layers)):
        own = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"layers.{layer}.")}
        inputs = [normed(x, own["attention_norm.weight"]) for x in rows]
        query, key, value = (
            [
                (own[f"attention.{name}.weight"] @ x + own.get(f"attention.{name}.bias", 0.0)).view(-1, size)
                for x in inputs
            ]
            for name in ("query", "key", "value")
        )

        def at(x, place, name, own=own):
            norm = own.get(f"attention.{name}_norm.weight")
            return turned(x if norm is None else normed(x, norm), place, frequencies, amplitude)

        for place, x in enumerate(rows):
            read, first = [], max(0, place + 1 - (model.sizes.window or place + 1))
            for head in range(heads):
                kv = head * kv_heads // heads
                mine = at(query[place][head], place, "query")
                scores = [mine @ at(key[k][kv], k, "key") / size**0.5 for k in range(first, place + 1)]
                seen = torch.stack([value[k][kv] for k in range(first, place + 1)])
                read.append(softmax(torch.stack(scores), 0) @ seen)
            x = x + own["attention.out.weight"] @ torch.cat(read)
            seen = normed(x, own["mlp_norm.weight"])
            gated = silu(own["mlp.gate.weight"] @ seen) * (own["mlp.up.weight"] @ seen)
            rows[place] = x + own["mlp.down.weight"] @ gated
    return torch.stack([weights["head.weight"] @ normed(x, weights["norm.weight"]) for x in rows])


FAMILY = {
    "Llama": ({}, plain_frequencies(6, 10_000.0), 1.0),
    "Llama 3": ({"rotary_base": 500.0, "scaling": Llama3Scaling(8.0, 32)}, llama3_frequencies(6, 500.0, 8.0, 32), 1.0),
    "Mistral": ({"window": 3}, plain_frequencies(6, 10_000.0), 1.0),
    "Qwen 2 with YaRN": (
        {"has_bias": True, "rotary_base": 500.0, "scaling": YarnScaling(4.0, 32)},
        yarn_frequencies(6, 500.0, 4.0, 32),
        yarn_amplitude(4.0),
    ),
    "Qwen 3": ({"norms_heads": True, "is_tied": False}, plain_frequencies(6, 10_000.0), 1.0),
}


@torch.inference_mode()
@pytest.mark.parametrize("kind", FAMILY)
def test_logits_are_those_of_the_equations(kind):
    changed, frequencies, amplitude = FAMILY[kind]
    model, tokens = small(**changed), [3, 1, 4, 1, 5, 9, 2, 6]
    for name, weight in model.named_parameters():
        if "attention" in name:  # so that scores differ, and norms are not those of ones
            weight.add_(0.5 * torch.randn_like(weight))
    wanted = logits_by_hand(model, tokens, frequencies, amplitude)
    for place in range(len(tokens)):
        found = last_logits(model, ToyPages(model, 4, 4), {0: (0, tokens[: place + 1])})
        torch.testing.assert_close(found[0].double(), wanted[place], atol=2e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_tokens_are_the_same_alone_and_among_others_whole_and_in_chunks(chunk):
    model = small(window=9, is_tied=False)
    for layer in model.layers:  # so that a token depends on those before it
        layer.attention.out.weight.mul_(5.0)
    alone = [generate(model, [prompt], 12)[0] for prompt in PROMPTS]
    assert any(len({*tokens}) > 4 for tokens in alone)
    assert generate(model, PROMPTS, 12, chunk) == alone


@torch.inference_mode()
def test_logits_have_the_same_bits_in_any_company_and_however_they_are_cut():
    model = small(vocabulary=300, hidden=144, inner=200, layers=3, heads=9, kv_heads=3)
    prompts = [torch.randint(0, 300, (length,)).tolist() for length in (1, 7, 64, 100, 2, 30)]
    whole = last_logits(model, ToyPages(model, 40, 16), {k: (0, prompt) for k, prompt in enumerate(prompts)})
    for k, prompt in enumerate(prompts):
        assert torch.equal(last_logits(model, ToyPages(model, 40, 16), {k: (0, prompt)})[0], whole[k])
        pages = ToyPages(model, 40, 16)
        for first in range(0, len(prompt), 13):
            others = {"another": (0, prompts[2][:first])} if first else {}
            part = last_logits(model, pages, {k: (first, prompt[first : first + 13]), **others})
        assert torch.equal(part[0], whole[k])


def test_another_number_of_pages_is_refused():
    model = small()
    with pytest.raises(DefinitionError, match="expected pages of 2 layers, got 0"):
        model(torch.tensor([1]), None, [])


def test_missing_weights_are_named():
    with pytest.raises(DefinitionError, match=r"expected a weight model\.embed_tokens\.weight"):
        llama_from_transformers({}, SIZES)


NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{
        f"attention.{ours}": f"self_attn.{theirs}_proj"
        for ours, theirs in zip(("query", "key", "value", "out"), "qkvo")
    },
    **{f"attention.{ours}_norm": f"self_attn.{theirs}_norm" for ours, theirs in (("query", "q"), ("key", "k"))},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Of a layer's weights: ours, and those of ``transformers``."""


def test_weights_have_the_names_of_transformers():
    model = small(has_bias=True, norms_heads=True, is_tied=False)
    state = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }
    for number, layer in enumerate(model.layers):
        for name, weight in layer.named_parameters():
            part, _, kind = name.rpartition(".")
            state[f"model.layers.{number}.{NAMES[part]}.{kind}"] = weight
    found = llama_from_transformers(state, model.sizes).state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, found[name]) for name, weight in model.state_dict().items())


def test_rotary_pairs_are_reordered_head_by_head():
    rows = torch.arange(8)[:, None].expand(8, 3)
    assert neighbours_to_halves(rows, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


SCALINGS = {
    None: None,
    "llama3": Llama3Scaling(8.0, 32, low=1.0, high=4.0),
    "yarn": YarnScaling(4.0, 32),
}
OWN = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {},
}


def theirs(kind, scaling=None, **changed):
    """A small random model of ``transformers``, and its sizes as ours."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    if scaling is not None:
        shared = {"factor": SCALINGS[scaling].factor, "original_max_position_embeddings": 32}
        rope |= {"rope_type": scaling, **shared, **OWN[scaling]}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40, hidden_size=24, intermediate_size=50, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=False,
        max_position_embeddings=256, attn_implementation="eager", initializer_range=0.3, **changed,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return model, LlamaSizes(40, 24, 50, 3, 4, 2, 8, rotary_base=500.0, scaling=SCALINGS[scaling])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "scaling", "ours", "changed"),
    [
        ("Llama", None, {}, {}),
        ("Llama", "llama3", {}, {}),
        ("Qwen2", "yarn", {"has_bias": True}, {}),
        ("Qwen3", None, {"norms_heads": True}, {}),
        ("Mistral", None, {"window": 10}, {"sliding_window": 10}),
    ],
)
def test_logits_are_those_of_transformers(kind, scaling, ours, changed):
    reference, sizes = theirs(kind, scaling, **changed)
    model = llama_from_transformers(reference.state_dict(), LlamaSizes(**{**sizes.__dict__, **ours}))
    tokens = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = reference(torch.tensor([tokens])).logits[0]
    pages, done = ToyPages(model, 40, 4), 0
    for size in (25, 1, 1, 20, 13):
        other = {"other": (0, tokens[: size % 7 + 1])}
        found = last_logits(model, pages, {"mine": (done, tokens[done : done + size]), **other})
        done += size
        torch.testing.assert_close(found[0], wanted[done - 1], atol=2e-4, rtol=1e-4)


BEGINNINGS = [
    "The capital of {} is",
    "Once upon a time in {}, in a small village by the sea,",
    "<|im_start|>user\nTell me about {}.<|im_end|>\n<|im_start|>assistant\n",
    "def is_in_{}(name):\n",
    "1, 1, 2, 3, 5, 8, {}, 1, 1, 2,",
]
PLACES = ["France", "Peru", "Japan", "Kenya", "Canada", "Norway", "Egypt", "India", "Chile", "Greece"]
TEXTS = [beginning.format(place) for beginning in BEGINNINGS for place in PLACES]


@pytest.mark.slow
@pytest.mark.timeout(600)
@torch.inference_mode()
def test_smollm_says_what_it_says_in_transformers():
    """Greedy tokens are equal, up to where the two best logits are closer than rounding."""
    path = smollm()
    import transformers

    options = {"gguf_file": path.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    model = llama_from_gguf(path)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert prompts[0] == [504, 3575, 282, 4649, 314]
    steps = 16
    found = generate(model, prompts, steps, chunk=7)
    assert found[0][0] == 7042
    assert generate(model, prompts[:5], steps) == found[:5]
    unsure = []
    for text, prompt, tokens in zip(TEXTS, prompts, found):
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        close = (best.values[:, 0] - best.values[:, 1] < 1e-3).nonzero().flatten().tolist()
        sure = close[0] if close else steps
        assert tokens[:sure] == best.indices[:sure, 0].tolist()
        unsure += [text] if close else []
    assert len(unsure) <= len(TEXTS) // 10, unsure


@torch.inference_mode()
@pytest.mark.parametrize("changed", [{}, {"window": 9}, {"norms_heads": True, "has_bias": True}, {"kv_heads": 4}])
def test_all_layers_in_one_call_give_the_same_bits_as_layer_by_layer(changed):
    model, pages = small(**changed), []
    tokens = torch.randint(0, 40, (26,), generator=torch.Generator().manual_seed(4))
    spans = spans_of([range(20), range(5, 6), range(5)])
    outputs = []
    for shared in (True, False):
        kept = model.new_pages(30, 4)
        tables = torch.arange(30, dtype=torch.int32).view(3, 10)
        lengths = torch.tensor([20, 6, 5], dtype=torch.int32)
        pages = [Pages(*own, tables if shared else tables.clone(), lengths) for own in kept]
        outputs.append(model(tokens, spans, pages))
        outputs.append(torch.stack([torch.stack(own) for own in kept]))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@torch.inference_mode()
def test_changed_weights_are_packed_anew():
    model = small()
    before = last_logits(model, ToyPages(model, 4, 4), {0: (0, [1, 2, 3])})
    model.layers[1].mlp.down.weight.data = 2 * model.layers[1].mlp.down.weight
    changed = last_logits(model, ToyPages(model, 4, 4), {0: (0, [1, 2, 3])})
    model.layers[1].mlp.down.weight = torch.nn.Parameter(model.layers[1].mlp.down.weight.detach() / 2)
    again = last_logits(model, ToyPages(model, 4, 4), {0: (0, [1, 2, 3])})
    assert not torch.equal(before, changed)
    assert torch.equal(before, again)


def test_pages_of_layers_lie_where_their_addresses_say():
    pages = torch.zeros(7, 5, 2, 4, 3, 8)[1:6]
    layers = LayerPages(pages, torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    assert [[each.keys.data_ptr(), each.values.data_ptr()] for each in layers] == layers.addresses().tolist()
    assert len(layers[1:3]) == 2 and layers[1:3][0].keys.data_ptr() == layers[1].keys.data_ptr()


def test_a_cell_looks_at_its_own_weights_once(monkeypatch):
    model = small()
    cell = language_model(model, end_token=-1, page_size=4)
    layers = [owner.model.layers for owner in (cell.module, cell.replica().module)]
    assert not is_settled(model.layers) and all(map(is_settled, layers))
    looks = []
    monkeypatch.setattr(Derived, "of", lambda own, *weights: looks.append(own) or (own, weights))
    for _ in range(3):
        for its in layers:
            its.weights.of(its)
    assert len(looks) == len(layers)
